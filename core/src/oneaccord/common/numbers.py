"""A growing set of numbers, which takes a bit for each, and not an object."""

from __future__ import annotations

__all__ = ["Numbers"]

_CHUNK = 4096


class Numbers:
    """A set of whole numbers to which numbers are only added, usually near each other."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Add a number.

        Parameters
        ----------
        number
            The number.
        """
        chunk, bit = divmod(number, _CHUNK)
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << bit

    def __contains__(self, number: int) -> bool:
        chunk, bit = divmod(number, _CHUNK)
        return bool(self._chunks.get(chunk, 0) >> bit & 1)
