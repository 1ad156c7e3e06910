"""Memory for runs: scratch blocks that are kept for the next run, and views that keep no array alive.

A run keeps its views for the next one, and an array must not live on because of them: its owner may want to free, resize or unmap
it. So the views are those of a `Memory`, which stands for an address alone, whatever array is there: they are right whenever
the run is on an array at that address. While it goes on, they hold the array. After a failure they hold it as long as they
exist themselves, since a transport may still write there; and so they do where a function of the user's has seen them, who may have kept one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any, cast

import numpy as np

from manyhands.arrays.memory import Array, aligned_empty

__all__ = ["KEPT_BYTES", "Block", "Memory", "Pool", "address_of", "shared_pool"]

KEPT_BYTES: int = 1 << 25
"""The most bytes of scratch memory that a process keeps from one run to the next."""

_LEAST_BYTES = 1 << 12
# One type for memory of any size: making one for each takes longer than a small call.
_Everything = ctypes.c_char * sys.maxsize


def address_of(array: Array) -> int:
    """Return where the memory of a C-contiguous array begins; 0 where it has none."""
    if not array.size:
        return 0
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", array)))
    except (TypeError, ValueError):
        # Read-only, or of a dtype that has no buffer protocol; this way takes longer.
        return int(array.ctypes.data)


class Memory:
    """The memory at an address, to make views of that keep nothing alive but its owner.

    Parameters
    ----------
    address, nbytes
        Where, and how much. It must exist whenever a view is used.
    writable
        Whether views may write.
    """

    __slots__ = ("_base", "_bytes", "address")

    def __init__(self, address: int, nbytes: int, *, writable: bool) -> None:
        self.address: int = address
        self._base: Any = _Everything.from_address(address)
        view = memoryview(self._base).cast("B")[:nbytes]
        self._bytes = view if writable else view.toreadonly()

    def hold(self, owner: object) -> None:
        """From now on keep ``owner`` alive as long as there are views; None keeps nothing alive."""
        self._base.owner = owner

    def payload(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` as a transport takes them."""
        return self._bytes[start:stop]

    def elements(self, start: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` elements, beginning at byte ``start``, as an array."""
        return np.ndarray(count, dtype, self._bytes, start)


class Block:
    """Scratch memory.

    Attributes
    ----------
    memory
        An array of bytes.
    address, nbytes
        Where it is, and its size.
    """

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.memory: Array = aligned_empty(nbytes)
        self.address: int = address_of(self.memory)
        self.nbytes: int = nbytes


class Pool:
    """Scratch blocks that nobody uses now; the last one given back is the first one taken, since it is still in the cache.

    Parameters
    ----------
    limit
        The most bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()
        # A thread that holds the lock is not there any more in a forked child.
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Keep nothing."""
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        self._kept = 0

    @property
    def kept_bytes(self) -> int:
        """How many bytes are kept now."""
        return self._kept

    def take(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes`` bytes, of undefined content."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            blocks = self._blocks
            for position in range(len(blocks) - 1, -1, -1):
                if blocks[position].nbytes == size:
                    self._kept -= size
                    return blocks.pop(position)
        return Block(size)

    def give(self, block: Block) -> None:
        """Take a block back; forget those that were unused for longest where there are too many."""
        with self._lock:
            self._blocks.append(block)
            self._kept += block.nbytes
            while self._kept > self._limit:
                self._kept -= self._blocks.pop(0).nbytes


shared_pool: Pool = Pool(KEPT_BYTES)
"""That of the whole process, for all its engines together."""
