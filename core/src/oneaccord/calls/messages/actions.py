"""Messages of one group on the host's memory: arrays from one rank to one other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import NOTHING, Array, contiguous, copy_of, given, new_array
from oneaccord.calls.engine.adapter import mailbox_of
from oneaccord.calls.engine.waiting import StallCallback
from oneaccord.calls.failures import guarded
from oneaccord.calls.messages.fast import CachedExchange, CachedRecv, CachedSend, End
from oneaccord.calls.messages.point_to_point import AT_BEGINNING, OPENING_BYTES, DescriptionMismatch, Incoming, Outgoing, move
from oneaccord.calls.observed import observed
from oneaccord.calls.order.call_sequence import CallSequence, Direction
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.request import ARRAY, Message
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.backend import Mailbox, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["MessageAction", "MessagePath"]


class MessagePath:
    """Sends and receives of one group; safe to use from several threads.

    Parameters
    ----------
    job, members, call_sequence, plugins
        The job, the members of the group, its call sequence, and the plugins that may observe.
    """

    def __init__(self, job: Job, members: Members, call_sequence: CallSequence, plugins: PluginManager) -> None:
        self._plugins = plugins
        self.job: Job = job
        self.members: Members = members
        self.call_sequence: CallSequence = call_sequence
        self._channel = members.channel + 1
        self._transport: Transport | None = None
        self._boxes: dict[int, Mailbox] = {}
        self._opening = threading.Lock()

    def prepare(self, message: Message) -> MessageAction:
        """Find the memory that a message goes from and to."""
        outgoing, out = message.outgoing, message.target
        assert not isinstance(outgoing, DeviceArray)
        assert not isinstance(out, DeviceArray)
        sending = None if message.dest is None or outgoing is None else contiguous(outgoing)
        if sending is not None and out is not None and np.may_share_memory(sending, out):
            sending = copy_of(sending)
        target = out if out is None or out.flags.c_contiguous else new_array(out.shape, out.dtype)
        return MessageAction(self, message, sending, target)

    def close(self) -> None:
        """Give back the transport; no call may follow."""
        if self._transport is not None:
            self._transport.close()

    def move(
        self, outgoing: Outgoing | None, incoming: Incoming | None, what: Words, deadline: Deadline, signature: CallSignature
    ) -> None:
        """Move a message in either direction or both; raises as `MessageAction.run`."""
        job, members, call_sequence = self.job, self.members, self.call_sequence
        flows = [flow for flow in (outgoing, incoming) if flow is not None]
        record = call_sequence.begin_message(what, 0 if outgoing is None else outgoing.nbytes)

        def report_wait(peers: list[int]) -> None:
            waits = [(flow.peer, flow.is_send, flow.number) for flow in flows if not flow.finished]
            call_sequence.report_message_wait(record, waits, peers)

        def action() -> None:
            self._carry(outgoing, incoming, what, deadline, None if job.runtime.is_simulated else report_wait)

        def call() -> None:
            guarded(job, members, record.sequence, signature, deadline, action, what)

        if not self._plugins.settled:
            self._plugins.load_extensions()
        try:
            if self._plugins.observed:
                is_array = signature is ARRAY
                words = str(what)
                with observed(
                    self._plugins,
                    job.runtime,
                    members,
                    operation=words.partition(" ")[0],
                    sequence=record.sequence,
                    nbytes=0 if outgoing is None else outgoing.nbytes,
                    dtype=str(outgoing.dtype) if outgoing is not None and is_array else "",
                    call=words,
                ) as known:
                    call()
                    if outgoing is None and incoming is not None and incoming.array is not None:
                        known.update(nbytes=incoming.array.nbytes, dtype=str(incoming.array.dtype) if is_array else "")
            else:
                call()
        finally:
            if outgoing is None and incoming is not None and incoming.array is not None:
                record.nbytes = incoming.array.nbytes
            call_sequence.end(record)

    def outgoing(self, direction: Direction, number: int, array: Array, signature: CallSignature = ARRAY) -> Outgoing:
        """Return a message of a direction, which carries an array."""
        kinds = direction.kinds if signature is ARRAY else None
        return Outgoing(self.job.rank, direction.rank, self._channel, number, array, signature, kinds)

    def incoming(self, direction: Direction, number: int, out: Array | None, signature: CallSignature = ARRAY) -> Incoming:
        """Return a message that comes from a direction, into ``out`` or new memory."""
        kinds = direction.kinds if signature is ARRAY else None
        return Incoming(direction.rank, self._channel, number, out, signature, kinds)

    def fast(self, action: MessageAction, array: Array) -> CachedSend | CachedRecv | CachedExchange | None:
        """Return the fast path of a message that was just moved, if it has one."""
        sending, receiving, kind = action.sending, action.receiving, (array.dtype, array.shape)
        if self._transport is None or self.job.runtime.is_simulated or not action.is_repeatable:
            return None
        send: CachedSend | None = None
        if sending is not None:
            # In this order: another thread may send an array that makes the direction forget the kind.
            forgotten, tag = sending.kinds.forgotten, sending.kinds.tag(kind)
            if tag is None:
                return None
            send = CachedSend(self._end(self._transport, sending, action.what.of(array.nbytes)), kind, tag, forgotten)
        recv = None if receiving is None else CachedRecv(self._end(self._transport, receiving, action.what))
        if send is None or recv is None or receiving is None:
            return send or recv
        assert sending is not None
        rest = partial(self._exchange, sending, receiving, action.what)
        return CachedExchange(send, recv, action.what, self._end(self._transport, receiving, action.what), rest)

    def _end(self, transport: Transport, direction: Direction, what: Words) -> End:
        return End(
            self.job,
            self.members,
            self.call_sequence,
            direction,
            transport,
            self._boxes[direction.rank],
            what,
            self.job.rank if direction.is_send else direction.rank,
            partial(self._send if direction.is_send else self._recv, direction, what),
        )

    def _send(
        self, direction: Direction, what: Words, number: int, array: Array, deadline: Deadline, stall: StallCallback, step: int
    ) -> Array:
        self._carry(self.outgoing(direction, number, array), None, what, deadline, stall, (step, AT_BEGINNING))
        return array

    def _recv(
        self,
        direction: Direction,
        what: Words,
        number: int,
        out: Array | None,
        deadline: Deadline,
        stall: StallCallback,
        step: int,
    ) -> Array:
        flow = self.incoming(direction, number, out)
        self._carry(None, flow, what, deadline, stall, (AT_BEGINNING, step))
        assert flow.array is not None
        return flow.array

    def _exchange(
        self,
        sending: Direction,
        receiving: Direction,
        what: Words,
        numbers: tuple[int, int],
        array: Array,
        out: Array | None,
        deadline: Deadline,
        stall: StallCallback,
        steps: tuple[int, int],
    ) -> Array:
        flow = self.incoming(receiving, numbers[1], out)
        self._carry(self.outgoing(sending, numbers[0], array), flow, what, deadline, stall, steps)
        assert flow.array is not None
        return flow.array

    def _carry(
        self,
        outgoing: Outgoing | None,
        incoming: Incoming | None,
        what: Words,
        deadline: Deadline,
        stall: StallCallback | None,
        steps: tuple[int, int] = (AT_BEGINNING, AT_BEGINNING),
    ) -> None:
        """Move a message as `move` of `oneaccord.calls.messages.point_to_point` does; a mismatch ends the job."""
        transport = self._connected([flow.peer for flow in (outgoing, incoming) if flow is not None], deadline)
        try:
            move(transport, self._boxes, outgoing, incoming, deadline, stall, steps=steps)
        except DescriptionMismatch as mismatch:
            text = f"{what} on rank {self.job.rank}: {mismatch.problem}"
            members = list(self.members.ranks)
            raise self.job.fail(Report("mismatch", text, mismatch.peer, str(what), self._channel, members=members)) from None

    def _connected(self, peers: list[int], deadline: Deadline) -> Transport:
        """Return the transport, ready to talk to these peers."""
        transport = self._transport or self._open()
        for peer in peers:
            if peer not in self._boxes:
                transport.connect([peer], deadline)
                with self._opening:
                    if peer not in self._boxes:
                        self._boxes[peer] = mailbox_of(transport, peer, OPENING_BYTES)
        return transport

    def _open(self) -> Transport:
        with self._opening:
            if self._transport is None:
                self._transport = self.job.open_transport(self._channel)
            return self._transport


class MessageAction:
    """A message that is ready to be moved when the turn of its directions comes.

    Parameters
    ----------
    path, message
        The group's path, and the message.
    sending, target
        The memory, C-contiguous; None if nothing is sent, and for new memory.
    """

    __slots__ = ("_message", "_path", "_sent", "_target", "receiving", "sending", "turns", "what")

    def __init__(self, path: MessagePath, message: Message, sending: Array | None, target: Array | None) -> None:
        ranks, call_sequence = path.members.ranks, path.call_sequence
        to = None if message.dest is None or sending is None else ranks[message.dest]
        whence = None if message.source is None else ranks[message.source]
        self._path = path
        self._message = message
        self._sent = sending
        self._target = target
        self.sending: Direction | None = None if to is None else call_sequence.direction(to, is_send=True)
        self.receiving: Direction | None = None if whence is None else call_sequence.direction(whence, is_send=False)
        # Both turns first, and only then the numbers of the messages: a caller that gives up while it waits must not have used one.
        self.turns: tuple[Turns, ...] = tuple(each for each in (self.sending, self.receiving) if each is not None)
        self.what: Words = Words(to, whence, message.signature)

    @property
    def is_repeatable(self) -> bool:
        """Whether it is the user's array, and the result is the received one: not if a sendrecv receives from no rank."""
        return self._message.signature is ARRAY and (self.receiving is not None or self._message.target is None)

    def apart(self, targets: Sequence[Array]) -> Callable[[Any], Any] | None:
        """As `HostAction.apart`, for the received array."""
        message, out = self._message, self._message.target
        assert not isinstance(out, DeviceArray)
        is_there = (
            self.receiving is not None and out is not None and any(np.may_share_memory(out, target) for target in targets)
        )
        if not is_there or self._target is None:
            return None
        self._message = structs.replace(message, target=None, give=None)
        self._target = np.empty_like(self._target)
        return partial(given, out, message.give)

    def run(self, deadline: Deadline) -> Any:
        """Move it; return the received array, None if there is none.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        path, signature = self._path, self._message.signature
        path.call_sequence.check(self.what, path.call_sequence.messages + 1)
        outgoing, incoming = None, None
        if self.sending is not None and self._sent is not None:
            outgoing = path.outgoing(self.sending, self.sending.next(), self._sent, signature)
        if self.receiving is not None:
            incoming = path.incoming(self.receiving, self.receiving.next(), self._target, signature)
        path.move(outgoing, incoming, self.what, deadline, signature)
        if incoming is None:
            return None
        out, give = self._message.target, self._message.give
        assert not isinstance(out, DeviceArray)
        return given(out, give, NOTHING if incoming.array is None else incoming.array)


class Words:
    """A call in words, which are made only on demand."""

    __slots__ = ("_dest", "_kind", "_source", "nbytes")

    def __init__(self, dest: int | None, source: int | None, signature: CallSignature) -> None:
        self._kind = signature.operation.removeprefix("send")
        self._dest = dest
        self._source = source
        self.nbytes: int = 0  # of the sent array, if it always has the same size

    def of(self, nbytes: int) -> Words:
        """Return the words for a call that sends so many bytes each time."""
        sized = copy(self)
        sized.nbytes = nbytes
        return sized

    def __str__(self) -> str:
        if self._dest is None:
            return f"recv{self._kind} from rank {self._source}"
        to = f"to rank {self._dest}"
        return f"send{self._kind} {to}" if self._source is None else f"sendrecv {to} and from rank {self._source}"
