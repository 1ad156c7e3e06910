"""Pairwise exchange: in round i, every rank sends to the one i further on and receives from the one i before.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of
High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from typing import NamedTuple

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.algorithms.fold import Fold
from oneaccord.schedule.steps import Buffer, Collective, Recv, Reduce, Ref, Schedule, Send

__all__ = ["ROUNDS_AT_ONCE", "all_to_all", "all_to_all_cost", "reduce_scatter", "reduce_scatter_cost"]

ROUNDS_AT_ONCE = 4
"""How many rounds are under way at a time: enough to hide latency, few enough not to flood a switch of a large world."""


class _Value(NamedTuple):
    """A value on its way: its place, and the steps after which it is there."""

    ref: Ref
    after: tuple[int, ...]


def all_to_all(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange one block with every other rank directly.

    ``segments`` changes nothing: no rank passes anything on.

    Cost: P - 1 messages; all blocks but one's own, n (P - 1) / P bytes if they are even; P - 1 steps, of which up to four
    are under way at a time.
    """
    draft = Draft(Collective.ALL_TO_ALL, "pairwise", rank, size)
    draft.copy(draft.block(Buffer.OUTPUT, rank), draft.block(Buffer.INPUT, rank))
    _exchange(draft, [draft.block(Buffer.OUTPUT, owner) for owner in range(size)])
    return draft.finish()


def all_to_all_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_to_all`."""
    others = nbytes * (size - 1) / size
    return Cost(size - 1, others, 0.0, others)


def reduce_scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Send every rank its block directly; each combines what it gets in the order of ranks.

    All parts of the own block are in scratch memory, n (P - 1) / P bytes. Pairs of neighbours are combined as soon as both
    are there, then pairs of pairs, and so on. ``segments`` changes nothing: no rank passes anything on.

    Cost: P - 1 messages; n (P - 1) / P bytes; P - 1 steps, of which up to four are under way at a time. ceil(log2 P) blocks
    are reduced after the last one has arrived, if one can be reduced in the time that a block travels, or log2 P of them if P
    is no power of two.
    Order: that of ranks, and the expression of every reproducible reduction.
    """
    draft = Draft(Collective.REDUCE_SCATTER, "pairwise", rank, size)
    own = draft.block(Buffer.INPUT, rank)
    if size == 1:
        draft.copy(draft.whole(Buffer.OUTPUT), own)
        return draft.finish()
    parts = [own if other == rank else draft.reserve(own) for other in range(size)]
    arrived = _exchange(draft, parts)

    def combined(left: _Value, right: _Value, target: Ref | None = None) -> _Value:
        # The own block is input, which is never written; so the other one is.
        place = target or (right if left.ref is own else left).ref
        return _Value(place, (draft.add(Reduce(place, left.ref, right.ref, left.after + right.after)),))

    # As in `Terms.canonical`.
    values = list(map(_Value, parts, arrived))
    pairs = 2 * Fold(size).extra
    values[:pairs] = map(combined, values[0:pairs:2], values[1:pairs:2])
    while len(values) > 2:
        values = list(map(combined, values[::2], values[1::2]))
    combined(values[0], values[1], draft.whole(Buffer.OUTPUT))
    return draft.finish()


def reduce_scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce_scatter`."""
    block = nbytes / size
    return Cost(size - 1, (size - 1) * block, ceil_log2(size) * block, (size - 1) * block)


def _exchange(draft: Draft, targets: list[Ref]) -> list[tuple[int, ...]]:
    """Append the exchange of input blocks with every other rank; return the steps after which the block of each has come.

    In a world of a power of two, both ranks of a pair are each other's partner in the same round.
    """
    rank, size = draft.rank, draft.size
    arrived: list[tuple[int, ...]] = [()] * size
    rounds: list[tuple[int, int]] = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        if not size & (size - 1):
            to = source = rank ^ distance
        after = rounds[-ROUNDS_AT_ONCE] if len(rounds) >= ROUNDS_AT_ONCE else ()
        sent = draft.add(Send(to, draft.block(Buffer.INPUT, to), after))
        received = draft.add(Recv(source, targets[source], after))
        arrived[source] = (received,)
        rounds.append((sent, received))
    return arrived
