"""Scratch memory that is kept for the next call."""

from __future__ import annotations

import os
import threading

from oneaccord.arrays.memory import Array, aligned_empty

__all__ = ["KEPT_BYTES", "Pool", "shared_pool"]

KEPT_BYTES: int = 1 << 25
"""The most bytes of scratch memory that a process keeps from one call to the next."""

_LEAST_BYTES = 1 << 12


class Pool:
    """Unused arrays of bytes; the last one given back is the first one taken, because it is still in the cache.

    Parameters
    ----------
    limit
        The most bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()
        # In a forked child the thread that holds the lock no longer exists.
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Keep nothing."""
        self._lock = threading.Lock()
        self._blocks: list[Array] = []
        self._kept = 0

    @property
    def kept_bytes(self) -> int:
        """How many bytes are kept now."""
        return self._kept

    def take(self, nbytes: int) -> Array:
        """Return at least ``nbytes`` bytes, of undefined content."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            blocks = self._blocks
            for position in range(len(blocks) - 1, -1, -1):
                if blocks[position].nbytes == size:
                    self._kept -= size
                    return blocks.pop(position)
        return aligned_empty(size)

    def give(self, block: Array) -> None:
        """Take back an array from `take`; forget the arrays that were unused for longest if there are too many."""
        with self._lock:
            self._blocks.append(block)
            self._kept += block.nbytes
            while self._kept > self._limit:
                self._kept -= self._blocks.pop(0).nbytes


shared_pool: Pool = Pool(KEPT_BYTES)
"""That of the whole process, for all its groups together."""
