"""The point-to-point half of one group: who may use which direction, message numbers, and what failures mean."""

from __future__ import annotations

import threading
from functools import partial

from manyhands.arrays.memory import NOTHING, Array
from manyhands.calls.engine.waiting import checked_mailbox
from manyhands.calls.failures import check_usable, guarded
from manyhands.calls.point_to_point import ARRAY, DescriptionMismatch, Incoming, Outgoing, move
from manyhands.calls.turns import Lane
from manyhands.contract.backend import Mailbox, Transport
from manyhands.contract.deadline import Deadline
from manyhands.contract.runtime import Runtime
from manyhands.control.protocol import Report, Wait
from manyhands.control.recorder import Record
from manyhands.control.signatures import CallSignature
from manyhands.errors import DeadlineError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["Peers"]

_NOBODY = -1


class _Direction:
    """One direction between this rank and another; ``begun`` counts its messages where the store can ask for them."""

    def __init__(self, begun: dict[int, int], peer: int, runtime: Runtime) -> None:
        self.lane = Lane(runtime)
        self._begun = begun
        self.peer = peer

    def next(self) -> int:
        """Return the number of the next message."""
        number = self._begun.get(self.peer, 0)
        self._begun[self.peer] = number + 1
        return number


class Peers:
    """Sends and receives of one group; safe to use from several threads. Ranks are those of the world here.

    Parameters
    ----------
    job
        Where the group lives.
    members
        Who belongs to it.
    """

    def __init__(self, job: Job, members: Members) -> None:
        self._job = job
        self._members = members
        self._channel = members.channel + 1
        self._transport: Transport | None = None
        self._boxes: dict[int, Mailbox | None] = {}
        self._opening = threading.Lock()
        self._directions: dict[tuple[int, bool], _Direction] = {}
        self._calls = 0

    def lane(self, peer: int | None, is_send: bool) -> Lane:
        """Return the lane of one direction; who runs `exchange` in the background takes a turn in it, and says so.

        None is nobody, and has a lane of its own, in which nothing waits.
        """
        return self._direction(_NOBODY if peer is None else peer, is_send).lane

    def lanes(self) -> list[Lane]:
        """Return the lanes of all directions used so far."""
        return [direction.lane for direction in list(self._directions.values())]

    def close(self) -> None:
        """Give back the transport; no call may follow."""
        if self._transport is not None:
            self._transport.close()

    def exchange(
        self,
        array: Array | None,
        dest: int | None,
        source: int | None,
        out: Array | None,
        deadline: Deadline,
        *,
        signature: CallSignature = ARRAY,
        has_turn: bool = False,
    ) -> Array:
        """Send ``array`` to ``dest`` and receive from ``source``, each where it is not None; return what was received.

        Raises
        ------
        DeadlineError
            Another thread was still using the same direction when the time was up; nothing was sent.
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        number, what = self._members.number, _Words(dest, source, signature)
        check_usable(self._job, number, what, self._calls + 1)
        # Both directions first, and only then their numbers: who gives up while it waits must not have used one.
        sending = None if dest is None else self._direction(dest, True)
        receiving = None if source is None else self._direction(source, False)
        taken: list[Lane] = []
        try:
            for direction in (sending, receiving):
                if direction is not None and not has_turn:
                    self._take(direction, deadline, what)
                    taken.append(direction.lane)
            check_usable(self._job, number, what, self._calls + 1)
            outgoing, incoming = None, None
            if sending is not None and array is not None and dest is not None:
                outgoing = Outgoing(self._job.rank, dest, self._channel, sending.next(), array, signature)
            if receiving is not None and source is not None:
                incoming = Incoming(source, self._channel, receiving.next(), out, signature)
            self._move(outgoing, incoming, what, deadline, signature)
        finally:
            for lane in taken:
                lane.give()
        return NOTHING if incoming is None or incoming.array is None else incoming.array

    def _move(
        self, outgoing: Outgoing | None, incoming: Incoming | None, what: _Words, deadline: Deadline, signature: CallSignature
    ) -> None:
        flows = [flow for flow in (outgoing, incoming) if flow is not None]
        self._calls = call = self._calls + 1
        recorder = self._job.control.recorder
        record = recorder.start(self._channel, call, what, 0 if outgoing is None else outgoing.nbytes)
        stall = None if self._job.runtime.is_simulated else partial(self._stalled, record, flows)

        def action() -> None:
            transport = self._connected([flow.peer for flow in flows], deadline)
            try:
                move(transport, self._boxes, outgoing, incoming, deadline, stall)
            except DescriptionMismatch as mismatch:
                text = f"{what} on rank {self._job.rank}: {mismatch.problem}"
                raise self._job.fail(
                    Report("mismatch", text, mismatch.peer, str(what), self._channel, members=list(self._members.ranks))
                ) from None

        try:
            guarded(self._job, self._members, call, signature, deadline, action, what)
        finally:
            recorder.finish(record)

    def _connected(self, peers: list[int], deadline: Deadline) -> Transport:
        """Return the transport, ready to talk to these peers."""
        transport = self._transport or self._open()
        for peer in peers:
            if peer not in self._boxes:
                transport.connect([peer], deadline)
                with self._opening:
                    if peer not in self._boxes:
                        self._boxes[peer] = checked_mailbox(transport, peer)
        return transport

    def _open(self) -> Transport:
        with self._opening:
            if self._transport is None:
                self._transport = self._job.open_transport(self._channel)
            return self._transport

    def _direction(self, peer: int, is_send: bool) -> _Direction:
        direction = self._directions.get((peer, is_send))
        if direction is None:
            progress = self._job.control.progress
            begun = (progress.sends if is_send else progress.receives).setdefault(self._channel, {})
            direction = self._directions.setdefault((peer, is_send), _Direction(begun, peer, self._job.runtime))
        return direction

    def _take(self, direction: _Direction, deadline: Deadline, what: _Words) -> None:
        """Take a direction for this thread."""
        try:
            if not direction.lane.take_if_free():
                direction.lane.take(deadline)
        except TimeoutError:
            raise DeadlineError(
                f"{what} did not begin within {deadline.timeout_s:g} s: another call of rank {self._job.rank} was still "
                f"talking with rank {direction.peer}; nothing was sent",
                rank=self._job.rank,
                peer=direction.peer,
                operation=str(what),
            ) from None

    def _stalled(self, record: Record, flows: list[Outgoing | Incoming], peers: list[int]) -> None:
        messages = [(flow.peer, flow.is_send, flow.number) for flow in flows if not flow.finished]
        wait = Wait(self._channel, record.sequence, str(record.call), b"", peers, messages, list(self._members.ranks))
        self._job.control.stalled(record, wait)


class _Words:
    """What a call is, in words that are made only when somebody asks."""

    __slots__ = ("_dest", "_kind", "_source")

    def __init__(self, dest: int | None, source: int | None, signature: CallSignature) -> None:
        self._kind = signature.operation.removeprefix("send")
        self._dest = dest
        self._source = source

    def __str__(self) -> str:
        if self._dest is None:
            return f"recv{self._kind} from rank {self._source}"
        to = f"to rank {self._dest}"
        return f"send{self._kind} {to}" if self._source is None else f"sendrecv {to} and from rank {self._source}"
