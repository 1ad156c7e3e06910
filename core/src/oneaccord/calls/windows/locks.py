"""Who holds the lock of a window, and who waits for it: in the order in which they asked, so that nobody waits forever."""

from __future__ import annotations

from collections import deque

__all__ = ["LockQueue"]


class LockQueue:
    """The lock of one rank's window, exclusive or shared.

    Attributes
    ----------
    holders
        The ranks that hold it.
    is_exclusive
        Whether one of them holds it alone.
    """

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.is_exclusive: bool = False
        self._waiting: deque[tuple[int, int, bool]] = deque()

    def ask(self, rank: int, number: int, *, exclusive: bool) -> list[tuple[int, int]]:
        """Let a rank ask for it, with the number of its request; return the ranks that have it from now on, and their numbers."""
        self._waiting.append((rank, number, exclusive))
        return self._granted()

    def give_back(self, rank: int) -> list[tuple[int, int]]:
        """Let a rank give it back; return as `ask`."""
        self.holders.discard(rank)
        if not self.holders:
            self.is_exclusive = False
        return self._granted()

    def _granted(self) -> list[tuple[int, int]]:
        granted: list[tuple[int, int]] = []
        while self._waiting:
            rank, number, exclusive = self._waiting[0]
            if self.holders and (exclusive or self.is_exclusive):
                break
            self._waiting.popleft()
            self.holders.add(rank)
            self.is_exclusive = exclusive
            granted.append((rank, number))
        return granted
