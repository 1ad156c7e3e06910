"""From a kind of call to the call of NCCL: all that does not change is bound once, so that a launch does next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from oneaccord.api import Collective, DeviceCall, Launch, UnsupportedError
from oneaccord_nccl._nccl import Library
from oneaccord_nccl.dtypes import BYTE, Abilities, Wire, wire_of
from oneaccord_nccl.own_calls import OwnCalls

__all__ = ["Collectives"]

Block = tuple[int, int, int]
"""A rank, how many bytes it gets or gives, and where they begin in this rank's memory."""


class Collectives:
    """The calls of one communicator.

    Each method returns ``enqueue(source, target, stream)``, or None if there is nothing to move.

    Parameters
    ----------
    library, handle
        NCCL, and the communicator.
    rank
        This rank's number in it.
    abilities
        What decides about reductions.
    """

    def __init__(self, library: Library, handle: Any, rank: int, abilities: Abilities) -> None:
        self._library = library
        self._handle = handle
        self._rank = rank
        self._abilities = abilities
        self._own = OwnCalls(library)
        self._prepare: dict[Collective, Callable[[DeviceCall], Launch | None]] = {
            Collective.ALL_REDUCE: self._all_reduce,
            Collective.REDUCE: self._reduce,
            Collective.BROADCAST: self._broadcast,
            Collective.ALL_GATHER: self._all_gather,
            Collective.REDUCE_SCATTER: self._reduce_scatter,
            Collective.GATHER: self._gather,
            Collective.SCATTER: self._scatter,
            Collective.ALL_TO_ALL: self._all_to_all,
        }

    def prepare(self, call: DeviceCall) -> Launch | None:
        """Return what makes a kind of call.

        Raises
        ------
        UnsupportedError
            NCCL does not do that.
        """
        return self._prepare[call.collective](call)

    def send(self, nbytes: int, dest: int) -> Launch | None:
        """Return what sends so many bytes."""
        return self._messages([(dest, nbytes, 0)] if nbytes else [], [])

    def recv(self, nbytes: int, source: int) -> Launch | None:
        """Return what receives so many bytes."""
        return self._messages([], [(source, nbytes, 0)] if nbytes else [])

    def _all_reduce(self, call: DeviceCall) -> Launch | None:
        wire = self._wire(call)
        if not call.elements:
            return None
        raw, handle = self._library.all_reduce, self._handle
        count, datatype, op = call.elements * wire.per_element, wire.type, wire.op

        def enqueue(source: int, target: int, stream: int) -> None:
            raw(source, target, count, datatype, op, handle, stream)

        return enqueue

    def _reduce(self, call: DeviceCall) -> Launch | None:
        wire = self._wire(call)
        if not call.elements:
            return None
        raw, handle = self._library.reduce, self._handle
        count, datatype, op, root = call.elements * wire.per_element, wire.type, wire.op, call.root

        def enqueue(source: int, target: int, stream: int) -> None:
            raw(source, target, count, datatype, op, root, handle, stream)

        return enqueue

    def _broadcast(self, call: DeviceCall) -> Launch | None:
        if not call.elements:
            return None
        raw, handle = self._library.broadcast, self._handle
        nbytes, root = call.elements * call.dtype.itemsize, call.root

        def enqueue(source: int, target: int, stream: int) -> None:
            # A root that keeps its array has no target, the others have no source, and NCCL takes one for both.
            raw(source or target, target or source, nbytes, BYTE, root, handle, stream)

        return enqueue

    def _all_gather(self, call: DeviceCall) -> Launch | None:
        if not _are_even(call.counts):
            return self._all_gather_uneven(call)
        nbytes = call.counts[self._rank] * call.dtype.itemsize
        if not nbytes:
            return None
        raw, handle = self._library.all_gather, self._handle

        def enqueue(source: int, target: int, stream: int) -> None:
            raw(source, target, nbytes, BYTE, handle, stream)

        return enqueue

    def _all_gather_uneven(self, call: DeviceCall) -> Launch:
        raw, handle, rank = self._library.broadcast, self._handle, self._rank
        blocks = _blocks(call.counts, call.dtype.itemsize)

        def enqueue(source: int, target: int, stream: int) -> None:
            for root, nbytes, offset in blocks:
                block = target + offset
                raw(source if root == rank else block, block, nbytes, BYTE, root, handle, stream)

        return self._together(enqueue)

    def _reduce_scatter(self, call: DeviceCall) -> Launch | None:
        wire = self._wire(call)
        if not _are_even(call.counts):
            return self._reduce_scatter_uneven(call, wire)
        count = call.counts[self._rank] * wire.per_element
        if not count:
            return None
        raw, handle, datatype, op = self._library.reduce_scatter, self._handle, wire.type, wire.op

        def enqueue(source: int, target: int, stream: int) -> None:
            raw(source, target, count, datatype, op, handle, stream)

        return enqueue

    def _reduce_scatter_uneven(self, call: DeviceCall, wire: Wire) -> Launch:
        raw, handle, rank = self._library.reduce, self._handle, self._rank
        datatype, op = wire.type, wire.op
        counts = [count * wire.per_element for count in call.counts]
        blocks = [(root, counts[root], offset) for root, _, offset in _blocks(call.counts, call.dtype.itemsize)]

        def enqueue(source: int, target: int, stream: int) -> None:
            for root, count, offset in blocks:
                raw(source + offset, target if root == rank else 0, count, datatype, op, root, handle, stream)

        return self._together(enqueue)

    def _gather(self, call: DeviceCall) -> Launch | None:
        if (raw := self._own.gather) is not None and _are_even(call.counts):
            return self._rooted(raw, call)
        sends = [(call.root, call.counts[self._rank] * call.dtype.itemsize, 0)] if call.counts[self._rank] else []
        return self._messages(sends, _blocks(call.counts, call.dtype.itemsize) if self._rank == call.root else [])

    def _scatter(self, call: DeviceCall) -> Launch | None:
        if (raw := self._own.scatter) is not None and _are_even(call.counts):
            return self._rooted(raw, call)
        recvs = [(call.root, call.counts[self._rank] * call.dtype.itemsize, 0)] if call.counts[self._rank] else []
        return self._messages(_blocks(call.counts, call.dtype.itemsize) if self._rank == call.root else [], recvs)

    def _rooted(self, raw: Callable[..., None], call: DeviceCall) -> Launch | None:
        nbytes, root, handle = call.counts[0] * call.dtype.itemsize, call.root, self._handle
        if not nbytes:
            return None

        def enqueue(source: int, target: int, stream: int) -> None:
            # NCCL looks at the memory that a rank does not have in its debugging modes alone, and wants an address of the device's there.
            raw(source or target, target or source, nbytes, BYTE, root, handle, stream)

        return enqueue

    def _all_to_all(self, call: DeviceCall) -> Launch | None:
        itemsize = call.dtype.itemsize
        raw, handle = self._own.all_to_all, self._handle
        if raw is None or not call.is_even:
            return self._messages(_blocks(call.counts, itemsize), _blocks(call.receive_counts, itemsize))
        nbytes = call.counts[0] * itemsize
        if not nbytes:
            return None

        def enqueue(source: int, target: int, stream: int) -> None:
            raw(source, target, nbytes, BYTE, handle, stream)

        return enqueue

    def _wire(self, call: DeviceCall) -> Wire:
        assert call.op is not None
        if call.reproducible:
            raise UnsupportedError(
                "NCCL promises no order of reduction, so it cannot honour reproducible=True: omit it, or reduce on the host, with "
                'a cpu backend and gpu_fallback = "host"'
            )
        return wire_of(call.dtype, call.op, self._abilities)

    def _messages(self, sends: list[Block], recvs: list[Block]) -> Launch | None:
        """Return what sends and receives blocks of bytes at once; a rank's message to itself is one of them."""
        if not sends and not recvs:
            return None
        raw_send, raw_recv, handle = self._library.send, self._library.recv, self._handle

        def enqueue(source: int, target: int, stream: int) -> None:
            for dest, nbytes, offset in sends:
                raw_send(source + offset, nbytes, BYTE, dest, handle, stream)
            for origin, nbytes, offset in recvs:
                raw_recv(target + offset, nbytes, BYTE, origin, handle, stream)

        return enqueue if len(sends) + len(recvs) == 1 else self._together(enqueue)

    def _together(self, enqueue: Launch) -> Launch:
        start, end = self._library.group_start, self._library.group_end

        def enqueue_together(source: int, target: int, stream: int) -> None:
            start()
            try:
                enqueue(source, target, stream)
            finally:
                end()

        return enqueue_together


def _are_even(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1


def _blocks(counts: Sequence[int], itemsize: int) -> list[Block]:
    """Return the blocks that hold something, in bytes: a rank that would send or receive nothing takes no part."""
    starts = accumulate(counts, initial=0)
    return [
        (rank, count * itemsize, start * itemsize)
        for rank, (count, start) in enumerate(zip(counts, starts, strict=False))
        if count
    ]
