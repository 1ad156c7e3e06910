"""Symbolic values: which ranks' input was combined, and in what order, without any numbers.

A term is a leaf (one rank's input) or ``left op right``. It need not say of which piece: chunks of different pieces count as of
different sizes, so that a value never leaves the chunks of its own piece. Equal terms are one object (hash-consing), so
that two ranks hold bit-identical results exactly if they hold the same object.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Term", "Terms"]

_SHOWN_DEPTH = 5


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An expression over the input of the ranks.

    Attributes
    ----------
    ranks
        The ranks of the leaves, as a bit mask.
    once
        Whether every rank occurs at most once.
    first, last
        The ranks of the leftmost and of the rightmost leaf.
    in_order
        Whether the ranks of the leaves, read from left to right, are ``first, first + 1, ..., last``.
    left, right
        The operands; None in a leaf.
    """

    ranks: int
    once: bool
    first: int
    last: int
    in_order: bool
    left: Term | None = None
    right: Term | None = None

    def __str__(self) -> str:
        return self._show(_SHOWN_DEPTH)

    def _show(self, depth: int) -> str:
        if self.left is None or self.right is None:
            return f"r{self.first}"
        if not depth:
            return "(...)"
        return f"({self.left._show(depth - 1)} op {self.right._show(depth - 1)})"

    def counts(self) -> Counter[int]:
        """Return how often each rank's input occurs; takes time, so it is for messages of errors."""
        known: dict[Term, Counter[int]] = {}

        def count(term: Term) -> Counter[int]:
            if term.left is None or term.right is None:
                return Counter([term.first])
            if term not in known:
                known[term] = count(term.left) + count(term.right)
            return known[term]

        return count(self)


class Terms:
    """The one place where terms are made, so that equal terms are one object."""

    __slots__ = ("_leaves", "_pairs")

    def __init__(self) -> None:
        self._leaves: dict[int, Term] = {}
        self._pairs: dict[tuple[Term, Term], Term] = {}

    def leaf(self, rank: int) -> Term:
        """Return the input of a rank."""
        term = self._leaves.get(rank)
        if term is None:
            term = self._leaves[rank] = Term(1 << rank, True, rank, rank, True)
        return term

    def combine(self, left: Term, right: Term) -> Term:
        """Return ``left op right``."""
        key = (left, right)
        term = self._pairs.get(key)
        if term is None:
            term = self._pairs[key] = Term(
                left.ranks | right.ranks,
                left.once and right.once and not left.ranks & right.ranks,
                left.first,
                right.last,
                left.in_order and right.in_order and left.last + 1 == right.first,
                left,
                right,
            )
        return term
