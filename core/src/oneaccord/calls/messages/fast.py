"""The fast way of messages whose dtype and shape have travelled between the same two ranks before: see `oneaccord.calls.host.fast`."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from oneaccord.arrays.memory import Array, contiguous
from oneaccord.calls.engine.adapter import lent_bytes
from oneaccord.calls.engine.waiting import StallCallback, Waiter, checked_transfer
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.host.fast import example
from oneaccord.calls.messages.point_to_point import AT_BEGINNING, FIRST_BYTES, OPENED, OPENING_BYTES, TAG_BYTES, Kind
from oneaccord.calls.order.call_sequence import CallSequence, Direction
from oneaccord.calls.request import ARRAY, SLOW_PATH, Later
from oneaccord.contract.backend import Mailbox, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import pack_header, split_header
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["CachedExchange", "CachedRecv", "CachedSend", "End"]

_ndarray = np.ndarray
_now = time.monotonic


class End(NamedTuple):
    """One end of a direction: that of this rank.

    Attributes
    ----------
    job, members, call_sequence
        The job, the members of the group, and its call sequence.
    direction
        The counters of the direction.
    transport, box
        The transport and the mailbox of its messages.
    what
        A call in words: an object that makes them on demand.
    sender
        The sender, as a rank of the world.
    move
        ``move(number, array, deadline, on_stall, step)``: sends an array, or receives one into an array or None for a new one, from a step on,
        as `oneaccord.calls.messages.point_to_point.move` counts them; returns it.
    """

    job: Job
    members: Members
    call_sequence: CallSequence
    direction: Direction
    transport: Transport
    box: Mailbox
    what: object
    sender: int
    move: Callable[[int, Array | None, Deadline, StallCallback, int], Array]


class _Fast(ABC):
    """The common part of sends and receives.

    Attributes
    ----------
    turns
        The direction's counters, if it takes turns.
    """

    __slots__ = ("_box", "_end", "_header", "_name", "_number", "_number_at", "_tags", "_what", "turns")

    def __init__(self, end: End) -> None:
        self._end = end
        self.turns: Direction = end.direction
        self._name = str(end.what)
        self._box = end.box
        self._what = end.what
        self._header, self._number_at = self._blank_header(OPENING_BYTES, 0)
        self._number = memoryview(self._header)[self._number_at : self._number_at + 8].cast("Q")
        slots = end.box.outgoing if end.direction.is_send else end.box.incoming
        self._tags = [slot[:TAG_BYTES].cast("Q") for slot in slots]

    def _blank_header(self, nbytes: int, index: int) -> tuple[bytearray, int]:
        """Return the header of a message except for its number, and the offset of the number."""
        head, tail = split_header(pack_header(ARRAY, self._end.sender, self._end.members.channel + 1, 0, nbytes, index))
        return bytearray(head + bytes(8) + tail), len(head)

    def _slots(self, kind: Kind) -> list[Array]:
        """Return the arrays of a kind in each slot."""
        slots = self._box.outgoing if self.turns.is_send else self._box.incoming
        return [_ndarray(kind[1], kind[0], slot, TAG_BYTES) for slot in slots]

    def _wait(self, transfers: Sequence[Transfer], number: int, deadline: Deadline) -> None:
        """Wait for the messages that were not done at once."""
        for transfer in transfers:
            checked_transfer(transfer, self._box, "post" if self.turns.is_send else "fetch")
        with _Slow(self._end, [(self.turns.rank, self.turns.is_send, number)]) as slow:
            _wait(self._end.transport, transfers, deadline, slow.report, [self.turns.rank])

    def _move(self, number: int, array: Array | None, timeout_s: float, step: int) -> Array:
        """Move the part that does not travel in an opening alone, from a step on."""
        with _Slow(self._end, [(self.turns.rank, self.turns.is_send, number)]) as slow:
            return self._end.move(number, array, _until(self.turns.started, timeout_s), slow.report, step)

    def later(self, array: Any, out: Any) -> Later | None:
        """Return the call to be made later: its words, its turn, and a function that makes it within a number of seconds; None for the slow path."""
        return (self._name, self.turns, partial(self._in_turn, array, out)) if self._fits(array, out) else None

    def run(self, array: Any, out: Any, timeout_s: float) -> Any:
        """Make the call, and return the received array, in ``out`` or as a new array; `SLOW_PATH` if it must take that path.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        if not self._fits(array, out):
            return SLOW_PATH
        return self._carry_out(array, out, timeout_s, self.turns.enter, self._go, gives_turn=True)

    def go_on(self, array: Any, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """As for `HostFast`, with the steps of `oneaccord.calls.messages.point_to_point.move`."""
        number, step = at
        rest = partial(self._rest, step)
        return self._carry_out(array, target, timeout_s, lambda _: number, rest, gives_turn=True)

    @abstractmethod
    def _rest(self, step: int, array: Any, out: Any, number: int, timeout_s: float) -> Any:
        """Move message ``number`` from a step on."""

    def _compiled_parts(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return the parts of its compiled form; None if the mailbox has none."""
        if self._box.compiled is None:
            return None
        turns = self.turns
        own = self, turns, turns.counters, self._what, example(dtype, shape)
        return *own, self._box, bytes(self._header), self._number_at, OPENING_BYTES

    def rest_header(self, nbytes: int) -> bytes | None:
        """Return the header, except for its number, of the message after the opening of an array of ``nbytes`` bytes, through the mailbox.

        Empty if no message follows; None if it is too long for the mailbox, which does not lend it either.
        """
        rest, limit = nbytes - FIRST_BYTES, lent_bytes(self._box)
        is_lent = limit is not None and rest > limit and self._end.transport.streams
        if rest > len(self._box.outgoing[0]) and not is_lent:
            return None
        return bytes(self._blank_header(rest, 1)[0]) if rest > 0 else b""

    def _in_turn(self, array: Any, out: Any, timeout_s: float) -> Any:
        self._end.call_sequence.check(self._what)
        return self._carry_out(array, out, timeout_s, self.turns.counters.begin, self._go, gives_turn=False)

    def _carry_out(
        self,
        array: Any,
        out: Any,
        timeout_s: float,
        enter: Callable[[object], int],
        go: Callable[[Any, Any, int, float], Any],
        *,
        gives_turn: bool,
    ) -> Any:
        end, direction, number = self._end, self.turns, -1
        try:
            number = enter(self._what)
            if number < 0:
                return SLOW_PATH
            return go(array, out, number, timeout_s)
        except BaseException as error:
            if number < 0:
                raise
            deadline = _until(direction.started, timeout_s)
            guarded(end.job, end.members, direction.call, ARRAY, deadline, partial(again, error), self._what)
        finally:
            if number >= 0:
                direction.leave(gives_turn)

    @abstractmethod
    def _fits(self, array: Any, out: Any) -> bool:
        """Return whether this is for arrays like the given ones."""

    @abstractmethod
    def _go(self, array: Any, out: Any, number: int, timeout_s: float) -> Any:
        """Move message ``number``, which has begun."""


class _Slow:
    """A message that has to wait, which makes it a record of its own."""

    __slots__ = ("_end", "_messages", "_record")

    def __init__(self, end: End, messages: list[tuple[int, bool, int]]) -> None:
        self._end = end
        self._messages = messages
        self._record = end.call_sequence.record_message(end.what, end.direction.call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.call_sequence.end(self._record)

    def report(self, peers: list[int]) -> None:
        """Report to the store that it waits."""
        self._end.call_sequence.report_message_wait(self._record, self._messages, peers)


class CachedSend(_Fast):
    """Sends to one rank, of one dtype and shape.

    Parameters
    ----------
    end
        This rank's end.
    kind, tag
        The dtype and the shape, and the number that represents them.
    forgotten
        How many kinds the direction had forgotten when it knew this one.
    """

    __slots__ = ("_arrays", "_forgotten", "_kinds", "_tag", "is_short")

    def __init__(self, end: End, kind: Kind, tag: bytes, forgotten: int) -> None:
        super().__init__(end)
        self._kinds = end.direction.kinds
        self._forgotten = forgotten
        self._tag = int.from_bytes(tag, "little")
        self.is_short: bool = int(np.prod(kind[1])) * kind[0].itemsize <= FIRST_BYTES
        self._arrays = self._slots(kind) if self.is_short else []

    @property
    def is_stale(self) -> bool:
        """Whether the two ends may have forgotten the kind."""
        return self._kinds.forgotten != self._forgotten

    def start(self, array: Array, number: int) -> Transfer | None:
        """Post a short array as message ``number``."""
        box = self._box
        slot = box.next_out
        self._tags[slot][0] = self._tag
        self._arrays[slot][...] = array
        self._number[0] = number
        return box.post(self._header, OPENING_BYTES)

    def _fits(self, array: Array, out: object) -> bool:
        return out is None and (self.is_short or bool(array.flags.c_contiguous))

    def _go(self, array: Array, out: object, number: int, timeout_s: float) -> None:
        if not self.is_short or self._kinds.forgotten != self._forgotten:  # as `is_stale`
            self._move(number, contiguous(array), timeout_s, AT_BEGINNING)
            return
        transfer = self.start(array, number)
        if transfer is not None:
            self._wait([transfer], number, _until(self.turns.started, timeout_s))

    def _rest(self, step: int, array: Array, out: object, number: int, timeout_s: float) -> None:
        self._move(number, array, timeout_s, step)

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`."""
        parts, header = self._compiled_parts(dtype, shape), self.rest_header(math.prod(shape) * dtype.itemsize)
        if parts is None or header is None or self.is_stale:
            return None
        made = module.Send(*parts, self._tag, header)
        self._kinds.users.append(made)
        return made


class CachedRecv(_Fast):
    """Receives from one rank. Arrays that travel in their opening alone are fast; all others continue on the slow path from there."""

    __slots__ = ("_known", "_learns")

    is_stale: ClassVar[bool] = False

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self._learns: Callable[[int, Array, bytes], object] | None = None
        self._known: dict[int, tuple[Kind, list[Array]]] = {}

    def _fits(self, array: object, out: Any) -> bool:
        return out is None or (type(out) is _ndarray and bool(out.flags.carray))

    def _go(self, array: object, out: Any, number: int, timeout_s: float) -> Array:
        transfer = self.start(number)
        if transfer is not None:
            self._wait([transfer], number, _until(self.turns.started, timeout_s))
        return self.take(number, out, timeout_s)

    def _rest(self, step: int, array: object, out: Any, number: int, timeout_s: float) -> Array:
        came = self._move(number, out, timeout_s, step)
        self.learn(came)
        return came

    def learn(self, came: Array) -> None:
        """Show the compiled form the kind of the received array."""
        tag, header = self.turns.kinds.tag((came.dtype, came.shape)), self.rest_header(came.nbytes)
        if self._learns is not None and tag is not None and header is not None:
            self._learns(int.from_bytes(tag, "little"), came, header)

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`. It learns the kind of the received array."""
        parts = self._compiled_parts(dtype, shape)
        if parts is None:
            return None
        made = module.Recv(*parts)
        self._learns = made.know
        return made

    def start(self, number: int) -> Transfer | None:
        """Fetch the opening of message ``number``."""
        self._number[0] = number
        return self._box.fetch(self._header, OPENING_BYTES)

    def take(self, number: int, out: Array | None, timeout_s: float) -> Array:
        """Return the array whose opening has come, in ``out`` or as a new one."""
        slot = self._box.next_in
        known = self._known.get(self._tags[slot][0])
        if known is not None:
            (dtype, shape), arrays = known
            if out is None:
                return arrays[slot].copy()
            if out.dtype is dtype and out.shape == shape:
                out[...] = arrays[slot]
                return out
        return self._others(number, out, timeout_s)

    def _others(self, number: int, out: Array | None, timeout_s: float) -> Array:
        """Receive an array that is new, or long, or does not fit."""
        array, kinds = self._move(number, out, timeout_s, OPENED), self.turns.kinds
        kind = array.dtype, array.shape
        tag = kinds.tag(kind)
        if tag is not None and array.nbytes <= FIRST_BYTES:
            # A tag is computed from its kind, so that it never means another one.
            if len(self._known) >= kinds.most:
                self._known.clear()
            self._known[int.from_bytes(tag, "little")] = kind, self._slots(kind)
        return array


class CachedExchange:
    """Sends to one rank and receives from one, at once, if the sent array travels in its opening alone.

    Parameters
    ----------
    send, recv
        The two halves.
    what
        The call in words.
    end
        This rank's end of the direction that it receives from.
    move
        ``move((sent, received), array, out, deadline, on_stall, steps)``: moves both messages from steps on, and returns the received one.
    """

    __slots__ = ("_end", "_move", "_recv", "_send", "_what")

    def __init__(self, send: CachedSend, recv: CachedRecv, what: object, end: End, move: Callable[..., Array]) -> None:
        self._move = move
        self._send = send
        self._recv = recv
        self._what = what
        self._end = end

    @property
    def is_stale(self) -> bool:
        """As for `CachedSend`."""
        return self._send.is_stale

    def run(self, array: Array, out: Any, timeout_s: float) -> Any:
        """Exchange arrays; return the received one, in ``out`` or as a new one. `SLOW_PATH` if it must take that path.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        if not self._send.is_short or (out is not None and not (type(out) is _ndarray and out.flags.carray)):
            return SLOW_PATH
        return self._carry_out(array, out, timeout_s, self._enter, self._go)

    def _enter(self) -> tuple[int, int]:
        sending, receiving = self._send.turns, self._recv.turns
        sent, received = sending.enter(self._what), -1
        try:
            if sent >= 0 and not self._send.is_stale:
                received = receiving.enter(self._what)
        finally:
            if sent >= 0 > received:
                sending.take_back()
        return sent, received

    def _carry_out(
        self,
        array: Array,
        out: Any,
        timeout_s: float,
        enter: Callable[[], tuple[int, int]],
        go: Callable[[Array, Any, tuple[int, int], float], Array],
    ) -> Any:
        sending, receiving = self._send.turns, self._recv.turns
        received = -1
        try:
            sent, received = enter()
            return SLOW_PATH if received < 0 else go(array, out, (sent, received), timeout_s)
        except BaseException as error:
            if received < 0:
                raise
            end, deadline = self._end, _until(receiving.started, timeout_s)
            guarded(end.job, end.members, receiving.call, ARRAY, deadline, partial(again, error), self._what)
        finally:
            if received >= 0:
                receiving.leave(gives_turn=True)
                sending.leave(gives_turn=True)

    def _go(self, array: Array, out: Any, numbers: tuple[int, int], timeout_s: float) -> Array:
        # Both have begun before either is waited for: the peers do the same.
        send, recv, (sent, received) = self._send, self._recv, numbers
        active = [transfer for transfer in (send.start(array, sent), recv.start(received)) if transfer is not None]
        if active:
            self._wait(active, sent, received, _until(recv.turns.started, timeout_s))
        return recv.take(received, out, timeout_s)

    def go_on(self, array: Array, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """As for `HostFast`: the number is that of the received message, and the step holds both numbers, the sent one times 4."""
        received, step = at
        sent = self._send.turns.counters.next - 1
        return self._carry_out(array, target, timeout_s, lambda: (sent, received), partial(self._rest, divmod(step, 4)))

    def _rest(self, steps: tuple[int, int], array: Array, out: Any, numbers: tuple[int, int], timeout_s: float) -> Array:
        receiving = self._recv.turns
        with _Slow(self._end, self._messages(*numbers)) as slow:
            came = self._move(numbers, array, out, _until(receiving.started, timeout_s), slow.report, steps)
        self._recv.learn(came)
        return came

    def later(self, array: Array, out: Any) -> None:
        """Return None: there is no sendrecv in the background."""

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`."""
        send, recv = self._send.compiled(module, dtype, shape), self._recv.compiled(module, dtype, shape)
        return None if send is None or recv is None else module.Exchange(self, send, recv, self._what)

    def _messages(self, sent: int, received: int) -> list[tuple[int, bool, int]]:
        return [(self._send.turns.rank, True, sent), (self._recv.turns.rank, False, received)]

    def _wait(self, transfers: Sequence[Transfer], sent: int, received: int, deadline: Deadline) -> None:
        for transfer in transfers:
            checked_transfer(transfer, self._end.box, "post or fetch")
        with _Slow(self._end, self._messages(sent, received)) as slow:
            _wait(self._end.transport, transfers, deadline, slow.report, [self._recv.turns.rank, self._send.turns.rank])


def _wait(
    transport: Transport, transfers: Sequence[Transfer], deadline: Deadline, report: StallCallback, peers: list[int]
) -> None:
    """Wait until all transfers are done."""
    waiter = Waiter(deadline, report)
    while left := [transfer for transfer in transfers if not transfer.done]:
        waiter.wait(transport, left, lambda: peers)


def _until(started: float, timeout_s: float) -> Deadline:
    """Return the deadline of a call that began a moment ago."""
    deadline = Deadline(timeout_s)
    deadline.at += started - _now()
    return deadline
