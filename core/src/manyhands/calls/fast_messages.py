"""The fast way of messages whose dtype and shape have travelled between the same two ranks before: see `manyhands.calls.fast`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from manyhands.arrays.memory import Array
from manyhands.calls.engine.waiting import StallCallback, Waiter, checked_transfer
from manyhands.calls.failures import guarded
from manyhands.calls.ledger import Direction, Ledger
from manyhands.calls.point_to_point import FIRST_BYTES, OPENING_BYTES, TAG_BYTES, Kind
from manyhands.calls.request import ARRAY, LONG_WAY
from manyhands.contract.backend import Mailbox, Transfer, Transport
from manyhands.contract.deadline import Deadline
from manyhands.control.signatures import pack_header, split_header
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["End", "FastRecv", "FastSend"]

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


class _Fast:
    """What sends and receives have in common."""

    __slots__ = ("_box", "_direction", "_end", "_header", "_number", "_tags", "_what")

    def __init__(self, end: End) -> None:
        self._end = end
        self._direction = end.direction
        self._box = end.box
        self._what = end.what
        head, tail = split_header(pack_header(ARRAY, end.sender, end.members.channel + 1, 0, OPENING_BYTES, 0))
        self._header = bytearray(head + bytes(8) + tail)
        self._number = memoryview(self._header)[len(head) : len(head) + 8].cast("Q")
        slots = end.box.outgoing if end.direction.is_send else end.box.incoming
        self._tags = [slot[:TAG_BYTES].cast("Q") for slot in slots]

    def _slots(self, kind: Kind) -> list[Array]:
        """Return where arrays of a kind lie in each slot."""
        slots = self._box.outgoing if self._direction.is_send else self._box.incoming
        return [_ndarray(kind[1], kind[0], slot, TAG_BYTES) for slot in slots]

    def _wait(self, transfer: Transfer, number: int, deadline: Deadline, call: str) -> None:
        """Wait for what was not done at once."""
        checked_transfer(transfer, self._box, call)
        with _Slow(self._end, number) as slow:
            waiter = Waiter(deadline, slow.report)
            while not transfer.done:
                waiter.wait(self._end.transport, [transfer], lambda: [self._direction.rank])

    def _move(self, number: int, array: Array | None, deadline: Deadline) -> Array:
        """Move what does not travel in an opening alone."""
        with _Slow(self._end, number) as slow:
            return self._end.move(number, array, deadline, slow.report)

    def _failed(self, error: BaseException, deadline: Deadline) -> None:
        """Raise what a failure means: the first cause that all ranks agree on."""
        end = self._end
        guarded(end.job, end.members, end.ledger.messages, ARRAY, deadline, partial(_again, error), self._what)


class _Slow:
    """A message that has to wait, which makes it a record of its own."""

    __slots__ = ("_end", "_messages", "_record")

    def __init__(self, end: End, number: int) -> None:
        self._end = end
        self._messages = [(end.direction.rank, end.direction.is_send, number)]
        self._record = end.ledger.record_message(end.what, 0)

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
    kind
        The dtype and the shape, which the direction knows.
    """

    __slots__ = ("_arrays", "_forgotten", "_is_short", "_kinds", "_tag")

    def __init__(self, end: End, kind: Kind) -> None:
        super().__init__(end)
        tag = end.direction.kinds.tag(kind)
        assert tag is not None
        self._kinds = end.direction.kinds
        self._forgotten = self._kinds.forgotten
        self._tag = int.from_bytes(tag, "little")
        self._is_short = int(np.prod(kind[1])) * kind[0].itemsize <= FIRST_BYTES
        self._arrays = self._slots(kind) if self._is_short else []

    def run(self, array: Array, out: object, timeout_s: float) -> Any:
        """Send an array of the kind; `LONG_WAY` where it must go that.

        Raises
        ------
        CommError
            The first cause, alike on all ranks.
        """
        if self._kinds.forgotten != self._forgotten or not (self._is_short or array.flags.c_contiguous):
            return LONG_WAY
        direction, box = self._direction, self._box
        number = direction.enter()
        if number < 0:
            return LONG_WAY
        started = _now()
        try:
            if not self._is_short:
                self._move(number, array, _until(started, timeout_s))
                return None
            slot = box.next_out
            self._tags[slot][0] = self._tag
            self._arrays[slot][...] = array
            self._number[0] = number
            transfer = box.post(self._header, OPENING_BYTES)
            if transfer is not None:
                self._wait(transfer, number, _until(started, timeout_s), "post")
        except BaseException as error:  # noqa: BLE001 - it is raised again, as the first cause or as it was
            self._failed(error, _until(started, timeout_s))
        finally:
            direction.leave(self._what, started)
        return None


class FastRecv(_Fast):
    """Receives from one rank. Arrays that travel in their opening alone are fast; what else comes goes on from there the long way."""

    __slots__ = ("_known",)

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self._known: dict[int, tuple[Kind, list[Array]]] = {}

    def run(self, array: object, out: Any, timeout_s: float) -> Any:
        """Receive the next array into ``out``, or into a new one; `LONG_WAY` where it must go that.

        Raises
        ------
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        if out is not None and not (type(out) is _ndarray and out.flags.carray):
            return LONG_WAY
        direction, box = self._direction, self._box
        number = direction.enter()
        if number < 0:
            return LONG_WAY
        started = _now()
        try:
            self._number[0] = number
            transfer = box.fetch(self._header, OPENING_BYTES)
            if transfer is not None:
                self._wait(transfer, number, _until(started, timeout_s), "fetch")
            slot = box.next_in
            known = self._known.get(self._tags[slot][0])
            if known is not None:
                (dtype, shape), arrays = known
                if out is None:
                    return arrays[slot].copy()
                if out.dtype is dtype and out.shape == shape:
                    out[...] = arrays[slot]
                    return out
            return self._others(number, out, _until(started, timeout_s))
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(error, _until(started, timeout_s))
        finally:
            direction.leave(self._what, started)
        return None

    def _others(self, number: int, out: Array | None, deadline: Deadline) -> Array:
        """Receive what is new, or long, or does not fit."""
        array, kinds = self._move(number, out, deadline), self._direction.kinds
        kind = array.dtype, array.shape
        tag = kinds.tag(kind)
        if tag is not None and array.nbytes <= FIRST_BYTES:
            # A tag is made of what it stands for, so that it never means anything else.
            if len(self._known) >= kinds.most:
                self._known.clear()
            self._known[int.from_bytes(tag, "little")] = kind, self._slots(kind)
        return array


def _until(started: float, timeout_s: float) -> Deadline:
    """Return the deadline of a call that began a moment ago."""
    deadline = Deadline(timeout_s)
    deadline.at += started - _now()
    return deadline


def _again(error: BaseException) -> None:
    raise error
