"""The point-to-point half of one group: who may use which direction, message numbers, and what failures mean."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial

import numpy as np

from manyhands.arrays import Array
from manyhands.backend import Transport
from manyhands.deadline import Deadline
from manyhands.errors import DeadlineError
from manyhands.failures import check_usable, guarded
from manyhands.job import Job
from manyhands.lanes import Lane
from manyhands.members import Members
from manyhands.point_to_point import ARRAY, DescriptionMismatch, Incoming, Outgoing, move
from manyhands.rendezvous.messages import Report, Wait
from manyhands.rendezvous.recorder import Record
from manyhands.wire import CallSignature

__all__ = ["Peers"]


class _Direction:
    """One direction between this rank and another; ``begun`` counts its messages where the store can ask for them."""

    def __init__(self, begun: dict[int, int], peer: int) -> None:
        self.lane = Lane()
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
        self._opening = threading.Lock()
        self._directions: dict[tuple[int, bool], _Direction] = {}
        self._calls = 0

    def lane(self, peer: int, is_send: bool) -> Lane:
        """Return the lane of one direction; who runs `exchange` in the background takes a turn in it, and says so."""
        return self._direction(peer, is_send).lane

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
        check_usable(self._job, self._members.number)
        what = self._words(dest, source)
        with ExitStack() as stack:
            # Both directions first, and only then their numbers: who gives up while it waits must not have used one.
            sending = None if dest is None else self._direction(dest, True)
            receiving = None if source is None else self._direction(source, False)
            for direction in (sending, receiving):
                if direction is not None and not has_turn:
                    self._take(stack, direction, deadline, what)
            check_usable(self._job, self._members.number)
            flows: list[Outgoing | Incoming] = []
            incoming: Incoming | None = None
            if sending is not None and array is not None and dest is not None:
                flows.append(Outgoing(self._job.rank, dest, self._channel, sending.next(), array, signature))
            if receiving is not None and source is not None:
                incoming = Incoming(source, self._channel, receiving.next(), out, signature)
                flows.append(incoming)
            self._move(flows, what, deadline, signature)
        return incoming.array if incoming is not None else np.empty(0)

    def _move(self, flows: list[Outgoing | Incoming], what: str, deadline: Deadline, signature: CallSignature) -> None:
        transport = self._open()
        self._calls = call = self._calls + 1
        recorder = self._job.control.recorder
        record = recorder.start(self._channel, call, what)
        stall = partial(self._stalled, record, what, flows)

        def action() -> None:
            try:
                move(transport, flows, deadline, stall)
            except DescriptionMismatch as mismatch:
                text = f"{what} on rank {self._job.rank}: {mismatch.problem}"
                raise self._job.fail(
                    Report("mismatch", text, mismatch.peer, what, self._channel, members=list(self._members.ranks))
                ) from None

        try:
            guarded(self._job, self._members, call, signature, deadline, action, what)
        finally:
            recorder.finish(record)

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
            direction = self._directions.setdefault((peer, is_send), _Direction(begun, peer))
        return direction

    def _take(self, stack: ExitStack, direction: _Direction, deadline: Deadline, what: str) -> None:
        """Take a direction for this thread until ``stack`` ends."""
        try:
            stack.enter_context(direction.lane.turn(deadline))
        except TimeoutError:
            raise DeadlineError(
                f"{what} did not begin within {deadline.timeout_s:g} s: another call of rank {self._job.rank} was still talking with "
                f"rank {direction.peer}; nothing was sent",
                rank=self._job.rank,
                peer=direction.peer,
            ) from None

    def _stalled(self, record: Record, what: str, flows: list[Outgoing | Incoming], peers: list[int]) -> None:
        messages = [(flow.peer, flow.is_send, flow.number) for flow in flows if not flow.finished]
        wait = Wait(self._channel, record.sequence, what, b"", peers, messages, list(self._members.ranks))
        self._job.control.stalled(record, wait)

    def _words(self, dest: int | None, source: int | None) -> str:
        if dest is None:
            return f"recv from rank {source}"
        return f"send to rank {dest}" if source is None else f"sendrecv to rank {dest} and from rank {source}"
