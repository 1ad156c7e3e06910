"""Worlds of any size as worlds of a power of two."""

from __future__ import annotations

__all__ = ["Fold"]


class Fold:
    """A world whose ranks share Q = 2**floor(log2 P) *places*, in the order of ranks.

    The first 2 (P - Q) ranks share places in pairs: one of them *leads*, and the other one, its partner, hands over its data
    before and gets the result afterwards. This is the pairing of `Terms.canonical`.

    Parameters
    ----------
    size
        The number of ranks, P.
    root
        This rank leads its own pair; in every other pair the first rank leads.
    """

    __slots__ = ("_root", "extra", "rounds")

    def __init__(self, size: int, root: int = 0) -> None:
        self.rounds: int = size.bit_length() - 1
        """log2 Q: how often the places can be halved."""
        self.extra: int = size - (1 << self.rounds)
        """P - Q: the number of pairs."""
        self._root = root

    def place(self, rank: int) -> int:
        """Return the place of a rank."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def first(self, place: int) -> int:
        """Return the first rank of a place; the size of the world for the place after the last."""
        return 2 * place if place < self.extra else place + self.extra

    def leader(self, place: int) -> int:
        """Return the rank that acts for a place."""
        first = self.first(place)
        return self._root if place < self.extra and self._root == first + 1 else first

    def partner(self, rank: int) -> int | None:
        """Return the other rank of a pair; None for a rank that has a place to itself."""
        return rank ^ 1 if rank < 2 * self.extra else None
