"""Symbolic values: which ranks' input was combined, and in what order, without any numbers.

A term is a leaf (one rank's input) or ``left op right``. If blocks may differ in size, it need not name the piece: chunks of
different pieces then count as different in size, so that a value never leaves the chunks of its own piece. If blocks
are even, a leaf names it. Equal terms are one object (hash-consing), so that two ranks hold bit-identical results exactly if
they hold the same object.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Term", "Terms"]

Piece = tuple[int, ...]

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
    piece
        The piece that it is a value of, ``()`` if that need not be named; None if two were mixed.
    left, right
        The operands; None in a leaf.
    """

    ranks: int
    once: bool
    first: int
    last: int
    in_order: bool
    piece: Piece | None = ()
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
        # A chain of reductions can be longer than Python's own stack.
        pending: list[Term] = [self]
        while pending:
            term = pending[-1]
            if term.left is None or term.right is None:
                known[term] = Counter([term.first])
            else:
                missing = [part for part in (term.left, term.right) if part not in known]
                if missing:
                    pending += missing
                    continue
                known[term] = known[term.left] + known[term.right]
            pending.pop()
        return known[self]


class Terms:
    """The only place that makes terms, so that equal terms are one object."""

    __slots__ = ("_canonical", "_folded", "_leaves", "_pairs")

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, Piece], Term] = {}
        self._pairs: dict[tuple[Term, Term], Term] = {}
        self._canonical: dict[tuple[int, Piece], Term] = {}
        self._folded: list[Term] = []

    def leaf(self, rank: int, piece: Piece = ()) -> Term:
        """Return the input of a rank."""
        term = self._leaves.get((rank, piece))
        if term is None:
            term = self._leaves[rank, piece] = Term(1 << rank, True, rank, rank, True, piece)
        return term

    def canonical(self, size: int, piece: Piece = ()) -> Term:
        """Return the one expression that every reproducible reduction evaluates.

        It is that of recursive doubling: of the P ranks, the first 2 (P - Q), with Q = 2**floor(log2 P), are combined in pairs, so
        that Q values are left; neighbours among these are combined until one is left. The order is that of ranks.
        """
        known = self._canonical.get((size, piece))
        if known is not None:
            return known
        pairs = size - (1 << (size.bit_length() - 1))
        values = [self.combine(self.leaf(2 * i, piece), self.leaf(2 * i + 1, piece)) for i in range(pairs)]
        values += [self.leaf(rank, piece) for rank in range(2 * pairs, size)]
        while len(values) > 1:
            values = [self.combine(left, right) for left, right in zip(values[::2], values[1::2], strict=True)]
        self._canonical[size, piece] = values[0]
        return values[0]

    def folded(self, size: int) -> Term:
        """Return the input of ranks 0, 1, ... combined from left to right, the one expression of every reproducible scan."""
        while len(self._folded) < size:
            leaf = self.leaf(len(self._folded))
            self._folded.append(self.combine(self._folded[-1], leaf) if self._folded else leaf)
        return self._folded[size - 1]

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
                left.piece if left.piece == right.piece else None,
                left,
                right,
            )
        return term
