"""The fast way of messages whose dtype and shape have travelled between the same two ranks before: see `manyhands.calls.fast`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from manyhands.arrays.memory import Array, contiguous
from manyhands.calls.engine.waiting import StallCallback, Waiter, checked_transfer
from manyhands.calls.failures import again, guarded
from manyhands.calls.fast import example
from manyhands.calls.ledger import Direction, Ledger
from manyhands.calls.point_to_point import FIRST_BYTES, OPENING_BYTES, TAG_BYTES, Kind
from manyhands.calls.request import ARRAY, LONG_WAY, Later
from manyhands.contract.backend import Mailbox, Transfer, Transport
from manyhands.contract.deadline import Deadline
from manyhands.control.signatures import pack_header, split_header
from manyhands.errors import InternalError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["End", "FastExchange", "FastRecv", "FastSend"]

_ndarray = np.ndarray
_now = time.monotonic


class End(NamedTuple):
    """One end of a direction: that of this rank.

    Attributes
    ----------
    job, members, ledger
        Where the group lives, who belongs to it, and its books.
    direction
        The books of the direction.
    transport, box
        What moves its messages.
    what
        A call in words: an object that makes them when somebody asks.
    sender
        Who sends, as a rank of the world.
    move
        ``move(number, array, deadline, on_stall)``: sends an array whole, or receives what an opening in the mailbox begins, into an array
        or None for a new one; returns it.
    """

    job: Job
    members: Members
    ledger: Ledger
    direction: Direction
    transport: Transport
    box: Mailbox
    what: object
    sender: int
    move: Callable[[int, Array | None, Deadline, StallCallback], Array]


class _Fast(ABC):
    """What sends and receives have in common.

    Attributes
    ----------
    turns
        The books of its direction, where it takes turns.
    """

    __slots__ = ("_box", "_end", "_header", "_name", "_number", "_number_at", "_tags", "_what", "turns")

    def __init__(self, end: End) -> None:
        self._end = end
        self.turns: Direction = end.direction
        self._name = str(end.what)
        self._box = end.box
        self._what = end.what
        head, tail = split_header(pack_header(ARRAY, end.sender, end.members.channel + 1, 0, OPENING_BYTES, 0))
        self._header = bytearray(head + bytes(8) + tail)
        self._number_at = len(head)
        self._number = memoryview(self._header)[len(head) : len(head) + 8].cast("Q")
        slots = end.box.outgoing if end.direction.is_send else end.box.incoming
        self._tags = [slot[:TAG_BYTES].cast("Q") for slot in slots]

    def _slots(self, kind: Kind) -> list[Array]:
        """Return where arrays of a kind lie in each slot."""
        slots = self._box.outgoing if self.turns.is_send else self._box.incoming
        return [_ndarray(kind[1], kind[0], slot, TAG_BYTES) for slot in slots]

    def _wait(self, transfers: Sequence[Transfer], number: int, deadline: Deadline) -> None:
        """Wait for what was not done at once."""
        for transfer in transfers:
            checked_transfer(transfer, self._box, "post" if self.turns.is_send else "fetch")
        with _Slow(self._end, number) as slow:
            _wait(self._end.transport, transfers, deadline, slow.report, [self.turns.rank])

    def _move(self, number: int, array: Array | None, deadline: Deadline) -> Array:
        """Move what does not travel in an opening alone."""
        with _Slow(self._end, number) as slow:
            return self._end.move(number, array, deadline, slow.report)

    def later(self, array: Any, out: Any) -> Later | None:
        """Return the call to be made later: in words, whose turn it needs, and what makes it in so many seconds then; None where it must go the long way."""
        return (self._name, self.turns, partial(self._in_turn, array, out)) if self._fits(array, out) else None

    def run(self, array: Any, out: Any, timeout_s: float) -> Any:
        """Make the call, and return what came, in ``out`` or as a new array; `LONG_WAY` where it must go that.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        if not self._fits(array, out):
            return LONG_WAY
        return self._carry_out(array, out, timeout_s, self.turns.enter, self._go, gives_turn=True)

    def go_on(self, array: Any, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """As for `HostFast`; step 0 is the beginning, and at step 1 the opening has been posted or fetched."""
        number, step = at
        return self._carry_out(array, target, timeout_s, lambda _: number, self._end_of if step else self._go, gives_turn=True)

    def _compiled_parts(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return what its compiled form is made of; None where the mailbox has none."""
        if self._box.compiled is None:
            return None
        turns = self.turns
        own = self, turns, turns.books, self._what, example(dtype, shape)
        return *own, self._box, bytes(self._header), self._number_at, OPENING_BYTES

    def _in_turn(self, array: Any, out: Any, timeout_s: float) -> Any:
        self._end.ledger.check(self._what)
        return self._carry_out(array, out, timeout_s, self.turns.books.begin, self._go, gives_turn=False)

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
                return LONG_WAY
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
        """Tell whether arrays are such as this is for."""

    @abstractmethod
    def _go(self, array: Any, out: Any, number: int, timeout_s: float) -> Any:
        """Move message ``number``, which has begun."""

    @abstractmethod
    def _end_of(self, array: Any, out: Any, number: int, timeout_s: float) -> Any:
        """Do what is left of it where its opening has been posted or fetched."""


class _Slow:
    """A message that has to wait, which makes it a record of its own."""

    __slots__ = ("_end", "_messages", "_record")

    def __init__(self, end: End, number: int) -> None:
        self._end = end
        self._messages = [(end.direction.rank, end.direction.is_send, number)]
        self._record = end.ledger.record_message(end.what, end.direction.call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.ledger.end(self._record)

    def report(self, peers: list[int]) -> None:
        """Tell the store that it waits."""
        self._end.ledger.report_message_wait(self._record, self._messages, peers)


class FastSend(_Fast):
    """Sends to one rank, of one dtype and shape.

    Parameters
    ----------
    end
        This rank's end.
    kind, tag
        The dtype and the shape, and what stands for them.
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
            self._move(number, contiguous(array), _until(self.turns.started, timeout_s))
            return
        transfer = self.start(array, number)
        if transfer is not None:
            self._wait([transfer], number, _until(self.turns.started, timeout_s))

    def _end_of(self, array: Array, out: object, number: int, timeout_s: float) -> None:
        transfer = self._box.unsent()
        if transfer is not None:
            self._wait([transfer], number, _until(self.turns.started, timeout_s))

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`."""
        parts = self._compiled_parts(dtype, shape)
        if parts is None or not self.is_short or self.is_stale:
            return None
        made = module.Send(*parts, self._tag)
        self._kinds.users.append(made)
        return made


class FastRecv(_Fast):
    """Receives from one rank. Arrays that travel in their opening alone are fast; what else comes goes on from there the long way."""

    __slots__ = ("_known", "_learns")

    is_stale: ClassVar[bool] = False

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self._learns: Callable[[int, Array], object] | None = None
        self._known: dict[int, tuple[Kind, list[Array]]] = {}

    def _fits(self, array: object, out: Any) -> bool:
        return out is None or (type(out) is _ndarray and bool(out.flags.carray))

    def _go(self, array: object, out: Any, number: int, timeout_s: float) -> Array:
        transfer = self.start(number)
        if transfer is not None:
            self._wait([transfer], number, _until(self.turns.started, timeout_s))
        return self.take(number, out, timeout_s)

    def _end_of(self, array: object, out: Any, number: int, timeout_s: float) -> Array:
        tag = self._tags[self._box.next_in][0]
        came = self.take(number, out, timeout_s)
        if self._learns is not None and tag in self._known:
            self._learns(tag, came)
        return came

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`. It learns what comes."""
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
        return self._others(number, out, _until(self.turns.started, timeout_s))

    def _others(self, number: int, out: Array | None, deadline: Deadline) -> Array:
        """Receive what is new, or long, or does not fit."""
        array, kinds = self._move(number, out, deadline), self.turns.kinds
        kind = array.dtype, array.shape
        tag = kinds.tag(kind)
        if tag is not None and array.nbytes <= FIRST_BYTES:
            # A tag is made of what it stands for, so that it never means anything else.
            if len(self._known) >= kinds.most:
                self._known.clear()
            self._known[int.from_bytes(tag, "little")] = kind, self._slots(kind)
        return array


class FastExchange:
    """Sends to one rank and receives from one, at once, where what is sent travels in its opening alone.

    Parameters
    ----------
    send, recv
        The two halves.
    what
        The call in words.
    """

    __slots__ = ("_end", "_recv", "_send", "_what")

    def __init__(self, send: FastSend, recv: FastRecv, what: object, end: End) -> None:
        self._send = send
        self._recv = recv
        self._what = what
        self._end = end

    @property
    def is_stale(self) -> bool:
        """As for `FastSend`."""
        return self._send.is_stale

    def run(self, array: Array, out: Any, timeout_s: float) -> Any:
        """Exchange arrays; return the one that came, in ``out`` or as a new one. `LONG_WAY` where it must go that.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        send, recv = self._send, self._recv
        if not send.is_short or (out is not None and not (type(out) is _ndarray and out.flags.carray)):
            return LONG_WAY
        sending, receiving = send.turns, recv.turns
        sent = received = -1
        try:
            sent = sending.enter(self._what)
            received = receiving.enter(self._what) if sent >= 0 and not send.is_stale else -1
            if received < 0:
                return LONG_WAY
            # Both have begun before either is waited for: the peers do the same.
            active = [transfer for transfer in (send.start(array, sent), recv.start(received)) if transfer is not None]
            if active:
                self._wait(active, sent, received, _until(receiving.started, timeout_s))
            return recv.take(received, out, timeout_s)
        except BaseException as error:
            if received < 0:
                raise
            end, deadline = self._end, _until(receiving.started, timeout_s)
            guarded(end.job, end.members, receiving.call, ARRAY, deadline, partial(again, error), self._what)
        finally:
            if received >= 0:
                receiving.leave(gives_turn=True)
                sending.leave(gives_turn=True)
            elif sent >= 0:
                sending.take_back()

    def later(self, array: Array, out: Any) -> None:
        """Return None: there is no sendrecv in the background."""

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Return None: it has no compiled form."""

    def go_on(self, array: Any, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """Not called, since there is no compiled form."""
        raise InternalError("a sendrecv went on where none had stopped")

    def _wait(self, transfers: Sequence[Transfer], sent: int, received: int, deadline: Deadline) -> None:
        sending, receiving, ledger = self._send.turns, self._recv.turns, self._end.ledger
        messages = [(sending.rank, True, sent), (receiving.rank, False, received)]
        record = ledger.record_message(self._what, receiving.call)
        try:
            for transfer in transfers:
                checked_transfer(transfer, self._end.box, "post or fetch")
            report = partial(ledger.report_message_wait, record, messages)
            _wait(self._end.transport, transfers, deadline, report, [receiving.rank, sending.rank])
        finally:
            ledger.end(record)


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
