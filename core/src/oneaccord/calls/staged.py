"""Collectives on arrays on GPUs over backends that move the host's memory: whole, or in pieces that overlap.

While one piece is sent and reduced, in a call of the group's own on pinned memory, the next one is copied to the host on a stream of its own,
and the one before it back to the GPU on another one. All of it is in one turn of the group. The ranks cut alike: the signature of each
piece names the user's call, and how it is cut.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from oneaccord.arrays.buffers import staged
from oneaccord.arrays.costs import Costs, piece_bytes
from oneaccord.arrays.libraries import DeviceArray, Lane, Library
from oneaccord.arrays.memory import Array
from oneaccord.arrays.ops import Combine
from oneaccord.calls.devices.actions import check_device_out
from oneaccord.calls.failures import broken_off, guarded
from oneaccord.calls.host.actions import HostAction, HostPath
from oneaccord.calls.host.plans import VECTOR
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.request import Operation, Request
from oneaccord.contract.deadline import Deadline
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.steps import Collective

__all__ = ["CUT", "PiecedAction", "StagedPath"]

CUT: frozenset[Collective] = frozenset(
    {Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST, Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
)
"""The collectives that may be cut into pieces, if their parts have one size."""

_SLOTS = 3
"""Pieces in memory at once: one on its way to the host, one between the ranks, and one on its way back."""
_NAP_S = 0.00005
_SETTLING_S = 1.0
_abandoned: list[Any] = []
"""The memory of copies that a GPU has not ended in time after a failure: it may still write there."""

Mark = Callable[[], bool]


class StagedPath:
    """The way of one group's collectives on GPUs through the host's memory.

    Parameters
    ----------
    job, members, host
        The job, the members of the group, and the paths of its collectives on host memory.
    costs
        The costs that decide the size of a piece.
    """

    def __init__(self, job: Job, members: Members, host: HostPath, costs: Costs) -> None:
        self.job: Job = job
        self.members: Members = members
        self.host: HostPath = host
        self._costs = costs
        self._lanes: dict[tuple[Library, int, str], Lane] = {}
        self._slots: dict[tuple[str, int], Array] = {}
        self._is_over = False
        self._at_end: Callable[[], None] | None = None

    def prepare(self, step: Operation) -> HostAction | PiecedAction:
        """Make a collective ready, in the thread that makes the call.

        Raises
        ------
        DTypeError, LayoutError, SizeMismatchError
            ``out`` does not fit.
        OutOfMemoryError
            There is no memory for the result.
        UsageError
            A function of the user's does not combine arrays.
        """
        piece = self._piece(step.request)
        return self._whole(step) if piece is None else PiecedAction(self, step, piece)

    def lane(self, array: DeviceArray, what: str) -> Lane:
        """Return the lane for copies of an array in one direction; whose turn it is, may use it."""
        key = array.library, array.device, what
        if key not in self._lanes:
            self._expect_end()
            self._lanes[key] = array.library.lane(array.device)
        return self._lanes[key]

    def slot(self, array: DeviceArray, what: str, number: int, nbytes: int) -> Array:
        """Return so many bytes of pinned memory, which is kept, and used again by calls that come later; whose turn it is, may use it."""
        key = what, number % _SLOTS
        found = self._slots.get(key)
        if found is None or found.nbytes < nbytes:
            self._expect_end()
            self._slots.pop(key, None)  # it is given back first
            found = self._slots[key] = array.library.pinned(nbytes, array.device)
        return found[:nbytes]

    def forget(self, *more: Any) -> None:
        """Keep memory to which a GPU may still write, and ``more``, forever."""
        _abandoned.append((self._slots, self._lanes, more))
        self._slots, self._lanes = {}, {}

    def close(self) -> None:
        """Give the pinned memory and the streams back, now or when the call that uses them has ended; no call may follow."""
        self._is_over = True
        if self._at_end in self.job.on_close:
            self.job.on_close.remove(self._at_end)
        if self.host.call_sequence.take_if_free():
            self.rest()
            self.host.call_sequence.give()

    def _expect_end(self) -> None:
        """Let the end of the job close this. Not before there is memory to give back, and by no reference that keeps a group alive."""
        if self._at_end is None:
            self._at_end = partial(_close, weakref.ref(self))
            self.job.on_close.append(self._at_end)

    def rest(self, *, is_over: bool = False) -> None:
        """Give them back if no call will follow; whose turn it is, may do so."""
        if is_over or self._is_over:
            self._slots.clear()
            self._lanes.clear()

    def _piece(self, request: Request) -> int | None:
        """Return the number of elements in a piece, of each rank's part if there are parts; None if the call is not cut."""
        reduction = request.reduction
        if request.collective not in CUT or request.uneven is not None or (reduction is not None and reduction.is_users):
            return None
        length, width = _extent(request)
        row = request.dtype.itemsize * width
        piece = max(piece_bytes(self._costs, length * row) // row, 1) if length else 0
        return piece if piece < length else None

    def _whole(self, step: Operation) -> HostAction:
        source, out, request = step.source, step.out, step.request
        assert isinstance(source, DeviceArray)
        assert out is None or isinstance(out, DeviceArray)
        host, target, give = staged(source, out, step.give)
        if request.reduction is not None and isinstance(request.reduction.combine, Combine):
            request.reduction.combine.try_on(host)
        if request.collective is Collective.BROADCAST and request.root != self.members.rank:
            host = np.empty(0, request.dtype)
        return self.host.prepare(structs.replace(step, source=host, out=target, give=give))


def _close(path: weakref.ref[StagedPath]) -> None:
    found = path()
    if found is not None:
        found.close()


def _extent(request: Request) -> tuple[int, int]:
    """Return the number of elements in a rank's part, and the number of parts at the point of a call with the most data."""
    if request.collective in VECTOR:
        return math.prod(request.shape), 1
    return request.counts[0], len(request.counts)


class PiecedAction:
    """A collective on a GPU that is ready to go through the host's memory in pieces.

    Parameters
    ----------
    path, step
        The group's way, and the step.
    piece
        The elements of a piece of each rank's part.
    """

    __slots__ = (
        "_arrays",
        "_give",
        "_late",
        "_length",
        "_marks",
        "_path",
        "_piece",
        "_points",
        "_request",
        "_signature",
        "_source",
        "_stored",
        "_target",
        "_width",
        "turns",
    )

    def __init__(self, path: StagedPath, step: Operation, piece: int) -> None:
        request, source, out = step.request, step.source, step.out
        assert isinstance(source, DeviceArray)
        assert out is None or isinstance(out, DeviceArray)
        self._path = path
        self._request = request
        self._give = step.give
        self._piece = piece
        self._length, self._width = _extent(request)
        self._signature = _cut(request, piece, piece).signature()
        self.turns: tuple[Turns, ...] = (path.host.call_sequence,)
        gives = request.collective is not Collective.BROADCAST or request.root == path.members.rank
        self._source = source.library.contiguous(source) if gives else None
        self._target: DeviceArray | None = None
        self._late: DeviceArray | None = None
        if step.shape is not None:
            self._place(source, step.shape, out)
        self._arrays = source, out  # kept until their copies are made
        # Work that the current streams have queued by now comes before the copies; so do earlier uses of the result's memory.
        self._points = [
            (array, what, array.library.point(array.device))
            for array, what in ((self._source, "fetch"), (self._target, "store"))
            if array is not None
        ]
        self._marks: dict[int, Mark] = {}
        self._stored: deque[tuple[int, Mark]] = deque()

    def _place(self, source: DeviceArray, shape: tuple[int, ...], out: DeviceArray | None) -> None:
        """Find the memory of the result; copy the input if it overlaps that memory without being the same."""
        request = self._request
        if out is not None:
            check_device_out(out, shape, request.dtype)
        if out is None or not out.is_contiguous:
            where = source if out is None else out
            self._target, self._late = where.library.empty(shape, request.dtype, where.device), out
            return
        self._target = out
        given = self._source
        if given is None or not _overlap(given, out):
            return
        if request.collective in VECTOR and (given.pointer, given.nbytes) == (out.pointer, out.nbytes):
            return  # each piece is read before it is written
        self._source = given.library.empty(given.shape, given.dtype, given.device)
        given.library.copy(self._source, given)

    def run(self, deadline: Deadline) -> Any:
        """Carry it out, and return the caller's result, which is there on every stream.

        Raises
        ------
        CommError
            The first cause, alike on all ranks. Any part of the result may have been written; nothing more of it is written from then on, unless
            the GPU does not end its copies.
        """
        path, count = self._path, -(-self._length // self._piece)
        has_begun = False
        try:
            for array, what, point in self._points:
                path.lane(array, what).after(point)
            self._fetch(0, deadline)
            for number in range(count):
                if number + 1 < count:
                    self._fetch(number + 1, deadline)
                self._move(number, deadline)
                has_begun = True
                self._store(number)
            self._finish(deadline)
        except BaseException as error:
            if has_begun:  # the other ranks wait for the next piece
                broken_off(path.job, path.members, self._request.name, error)
            self._settle()
            path.rest(is_over=path.job.control.failed)
            raise
        path.rest()
        target = self._target if self._late is None else self._late
        return target if target is None or self._give is None else self._give(target)

    def _bounds(self, number: int) -> tuple[int, int]:
        start = number * self._piece
        return start, min(self._piece, self._length - start)

    def _memory(self, what: str, number: int, width: int) -> Array:
        """Return the pinned memory of a piece, of ``width`` parts; input and output share it if a collective may do so."""
        array = self._source if self._source is not None else self._target
        assert array is not None
        kind = "both" if self._request.collective in VECTOR else what
        itemsize = self._request.dtype.itemsize
        _, size = self._bounds(number)
        whole = self._path.slot(array, kind, number, self._piece * width * itemsize)
        return whole[: size * width * itemsize].view(self._request.dtype)

    def _widths(self) -> tuple[int, int]:
        """Return of how many parts the input and the output are."""
        return {Collective.ALL_GATHER: (1, self._width), Collective.REDUCE_SCATTER: (self._width, 1)}.get(
            self._request.collective, (1, 1)
        )

    def _fetch(self, number: int, deadline: Deadline) -> None:
        """Begin to copy a piece to the host, into memory that the copies of an earlier one have left."""
        self._await_stored(number - _SLOTS, deadline)
        if self._source is None:
            return
        lane, (start, size), width = self._path.lane(self._source, "fetch"), self._bounds(number), self._widths()[0]
        host = self._memory("fetch", number, width)
        for part in range(width):
            lane.fetch(host[part * size : (part + 1) * size], self._source, part * self._length + start)
        self._marks[number] = lane.mark()

    def _move(self, number: int, deadline: Deadline) -> None:
        """Make the call of a piece, once it is on the host."""
        _, size = self._bounds(number)
        widths, nothing = self._widths(), np.empty(0, self._request.dtype)
        source = target = nothing
        if self._source is not None:
            self._await(self._marks[number], "to the host", deadline)
            del self._marks[number]
            source = self._memory("fetch", number, widths[0])
        if self._target is not None:
            self._await_stored(number - _SLOTS, deadline)
            target = self._memory("store", number, widths[1])
        self._path.host.run(_cut(self._request, self._piece, size), source, target, deadline)

    def _store(self, number: int) -> None:
        """Begin to copy a piece of the result to the GPU."""
        if self._target is None:
            return
        lane, (start, size), width = self._path.lane(self._target, "store"), self._bounds(number), self._widths()[1]
        host = self._memory("store", number, width)
        for part in range(width):
            lane.store(self._target, part * self._length + start, host[part * size : (part + 1) * size])
        self._stored.append((number, lane.mark()))

    def _finish(self, deadline: Deadline) -> None:
        """Wait until the result is there."""
        if self._target is not None and self._late is not None:
            lane = self._path.lane(self._target, "store")
            lane.copy(self._late, self._target)
            self._stored.append((-1, lane.mark()))
        while self._stored:
            self._await(self._stored[0][1], "of its result to the GPU", deadline)
            self._stored.popleft()

    def _await_stored(self, number: int, deadline: Deadline) -> None:
        while self._stored and self._stored[0][0] <= number:
            self._await(self._stored[0][1], "of its result to the GPU", deadline)
            self._stored.popleft()

    def _await(self, mark: Mark, where: str, deadline: Deadline) -> None:
        """Wait on the host for one copy, as long as the call may last; the other ranks wait for this one meanwhile."""
        path = self._path
        if not mark():
            wait = partial(_until, path.job, mark, f"the copy {where} has not ended", deadline)
            guarded(path.job, path.members, path.host.call_sequence.next, self._signature, deadline, wait)

    def _settle(self) -> None:
        """After a failure, let the copies that are under way end, so that none writes to memory that is used for another purpose by then."""
        left = [*self._marks.values(), *(mark for _, mark in self._stored)]
        patience = Deadline(_SETTLING_S)
        with suppress(Exception):  # the device has failed, which the error that is on its way says or follows from
            while not patience.passed():
                if all(mark() for mark in left):
                    return
                time.sleep(_NAP_S)
        self._path.forget(self._arrays, self._source, self._target)


def _overlap(one: DeviceArray, other: DeviceArray) -> bool:
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes


def _until(job: Job, mark: Mark, words: str, deadline: Deadline) -> None:
    while not mark():
        if job.control.failed:
            raise job.error()
        if deadline.passed():
            raise TimeoutError(words)
        time.sleep(_NAP_S)


def _cut(request: Request, piece: int, size: int) -> Request:
    """Return the request of a piece of ``size`` elements, which informs the other ranks about the user's call, and how it is cut."""
    length, width = (size,), len(request.counts)
    if request.collective in VECTOR:
        return structs.replace(request, shape=length, whole=request, cut=piece)
    shape = length if request.collective is Collective.ALL_GATHER else (size * width,)
    return structs.replace(request, shape=shape, counts=length * width, whole=request, cut=piece)
