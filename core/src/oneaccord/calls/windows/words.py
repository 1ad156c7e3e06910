"""A lock between processes that share memory, of one word, for which C has the instructions: it holds the number of its owner."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

__all__ = ["APART", "WordLocks"]

_TRIES = 200
"""How often C looks before Python waits."""
APART: int = 8
"""Words from one lock to the next one, so that each has a cache line."""


class WordLocks:
    """The locks of as many places as there are ranks, for changes that take no time. They are not fair, but quicker than `Bakery`.

    Parameters
    ----------
    module
        The compiled executor, which all ranks have.
    words
        Memory for `nbytes` bytes, as words of 64 bits; zero in the beginning.
    place
        The place of this rank.

    Attributes
    ----------
    words
        As above.
    """

    def __init__(self, module: ModuleType, words: memoryview, place: int) -> None:
        self._take = module.take_word
        self._free = module.free_word
        self.words: memoryview = words
        self._owner = place + 1

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that the locks of so many ranks take."""
        return 8 * APART * size

    def take(self, of: int, pause: Callable[[int, int], None], *, exclusive: bool = True) -> None:
        """Take the lock of a place; as `Bakery.take`."""
        tries = 0
        while owner := self._take(self.words, of * APART, self._owner, _TRIES):
            tries += 1
            pause(tries, owner - 1)

    def give_back(self, of: int) -> None:
        """Give the lock of a place back."""
        self._free(self.words, of * APART, self._owner)
