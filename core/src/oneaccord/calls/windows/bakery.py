"""A lock between processes that share memory, of plain words: Lamport's bakery (1974), with readers that may be in together.

Each rank has a word for the ticket that it has drawn, and one that says that it is drawing. No other rank writes these, so that the lock needs no
atomic instruction, and whose it is stands in memory. A rank waits for those with an earlier ticket; of two that share, neither waits.
So it is fair, and of two that exclude each other one always sees the other one's ticket.

A rank that dies in it leaves its ticket there. Its job has failed then, which those that wait learn: see ``pause``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from oneaccord.runtime.host_memory import memory_fence

__all__ = ["Bakery"]

Pause = Callable[[int, int], None]
"""``pause(tries, owner)`` waits a moment for the place ``owner``, or raises."""
_LOADS_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class Bakery:
    """The locks of as many places as there are ranks; each rank may take any of them.

    Parameters
    ----------
    words
        Memory for `nbytes` bytes, as words of 64 bits; zero in the beginning.
    size, place
        The number of ranks, and the place of this one among them.

    Attributes
    ----------
    words
        As above; C uses them alike.
    """

    def __init__(self, words: memoryview, size: int, place: int) -> None:
        self.words: memoryview = words
        self._drawing = words[: size * size]
        self._tickets = words[size * size : 2 * size * size]
        self._size = size
        self._place = place

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that the locks of so many ranks take."""
        return 16 * size * size

    def take(self, of: int, pause: Pause, *, exclusive: bool = True) -> None:
        """Take the lock of a place.

        Parameters
        ----------
        of
            The place.
        pause
            Called while it must be waited for; what it raises takes this rank's ticket back.
        exclusive
            Whether no other rank may have it at the same time.
        """
        size, me = self._size, self._place
        row = of * size
        drawing, tickets = self._drawing, self._tickets
        try:
            drawing[row + me] = 1
            memory_fence()
            number = 1 + max(tickets[row : row + size].tolist()) // 2
            tickets[row + me] = 2 * number + exclusive
            memory_fence()
            drawing[row + me] = 0
            memory_fence()
            for other in range(size):
                if other == me:
                    continue
                tries = 0
                while self._must_wait(row + other, other, number, exclusive):
                    tries += 1
                    pause(tries, other)
            memory_fence()
        except BaseException:
            tickets[row + me] = drawing[row + me] = 0
            raise

    def give_back(self, of: int) -> None:
        """Give the lock of a place back."""
        memory_fence()
        self._tickets[of * self._size + self._place] = 0
        memory_fence()

    def _must_wait(self, at: int, other: int, number: int, exclusive: bool) -> bool:
        if self._drawing[at]:
            return True
        if not _LOADS_IN_ORDER:
            memory_fence()
        ticket = self._tickets[at]
        return bool(ticket) and (exclusive or ticket & 1 == 1) and (ticket // 2, other) < (number, self._place)
