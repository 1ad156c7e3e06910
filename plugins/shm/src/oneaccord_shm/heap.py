"""Memory that peers read in place: pages of this rank's heap, first fit, given back when the last view is gone."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

from oneaccord_shm.segment import PAGE, Segment

__all__ = ["Heap"]


class Heap:
    """The heap of one rank.

    Parameters
    ----------
    segment
        The rank's memory.

    Attributes
    ----------
    nbytes
        Its size.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._memory = segment.heap()
        self._array = np.frombuffer(self._memory, np.uint8)
        self._address = int(self._array.__array_interface__["data"][0])
        self.nbytes: int = len(self._memory)
        self._changing = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        self._returned: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> memoryview:
        """Return zeroed memory at the beginning of a page.

        Raises
        ------
        MemoryError
            There is no free part that large.
        """
        size = max(1, -(-nbytes // PAGE)) * PAGE
        with self._changing:
            self._take_back()
            offset = self._first_fit(size)
        # Arrays made of this memoryview hold the array; arrays made of the array itself would hold the whole heap instead.
        array = self._array[offset : offset + nbytes]
        weakref.finalize(array, self._give_back, offset, size).atexit = False
        return array.data

    def offset_of(self, payload: memoryview) -> int | None:
        """Return the place of a payload in the heap, None if it is other memory."""
        offset = int(np.frombuffer(payload, np.uint8).__array_interface__["data"][0]) - self._address
        return offset if 0 <= offset < self.nbytes else None

    def _first_fit(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, room - size)
                return offset
        most = max((room for _, room in self._free), default=0)
        raise MemoryError(
            f"{size} bytes that peers can read in place are needed, but the largest free part of this rank's share of "
            f"{self.nbytes} is {most}: let go of arrays that are done, or raise backends.shm.heap_bytes"
        )

    def _give_back(self, offset: int, size: int) -> None:
        # A collection of garbage may call this anywhere, also in this thread while it holds the lock.
        self._returned.append((offset, size))
        while self._returned and self._changing.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._changing.release()

    def _take_back(self) -> None:
        while self._returned:
            offset, size = self._returned.popleft()
            if self._segment.drop_heap(offset, size):  # otherwise its content is unknown, and it is not used again
                self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        """Put a part back among those that are free, joined with its neighbours."""
        free = self._free
        index = next((index for index, (start, _) in enumerate(free) if start > offset), len(free))
        if index < len(free) and offset + size == free[index][0]:
            size += free.pop(index)[1]
        if index and sum(free[index - 1]) == offset:
            index -= 1
            start, room = free.pop(index)
            offset, size = start, room + size
        free.insert(index, (offset, size))
