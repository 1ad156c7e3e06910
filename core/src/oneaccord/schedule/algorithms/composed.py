"""Collectives that are two others, one after the other: the second starts, chunk by chunk, at the end of the first.

Barnett, Gupta, Payne, Shuler, van de Geijn and Watts, "Interprocessor Collective Communication Library (InterCom)", Scalable
High Performance Computing Conference, 1994; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", International Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from dataclasses import replace

from oneaccord.schedule.algorithms import quick, ring, tree
from oneaccord.schedule.algorithms.cost import Cost, one_after_the_other
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, Ref, Schedule

__all__ = [
    "scatter_all_gather",
    "scatter_all_gather_cost",
    "scatter_doubling",
    "scatter_doubling_cost",
    "tree_all_reduce",
    "tree_all_reduce_cost",
]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


def tree_all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Reduce up a binomial tree to rank 0, then broadcast down another one. ``segments`` changes nothing.

    Cost: 2 ceil(log2 P) steps, each with n bytes; ceil(log2 P) n bytes reduced; at most ceil(log2 P) messages of a rank.
    Order: that of ranks, and the expression of every reproducible reduction.
    """
    draft = Draft(Collective.ALL_REDUCE, "tree", rank, size)
    vector = draft.whole(OUTPUT)
    # Partial results are kept at the place of the result.
    draft.include(tree.reduce(rank, size), _same, input=draft.whole(INPUT), output=vector, scratch=vector)
    draft.include(tree.broadcast(rank, size), _same, input=vector, output=vector)
    return draft.finish()


def tree_all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `tree_all_reduce`."""
    upwards, downwards = tree.reduce_cost(size, nbytes), tree.broadcast_cost(size, nbytes)
    # No rank sends more than rank 0, which does so on the way down alone.
    return replace(one_after_the_other(upwards, downwards), sent_bytes=downwards.sent_bytes)


def scatter_all_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Scatter the vector down a binomial tree, then gather it around a ring.

    The vector is divided into P blocks of k segments.

    Cost: ceil(log2 P) + (P - 1) k steps and 2 n (P - 1) / P bytes on the critical path.
    """
    draft = _scattered("scatter_all_gather", rank, size, root, segments)
    _gather(draft, ring.all_gather(rank, size, 0, segments))
    return draft.finish()


def scatter_all_gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `scatter_all_gather`."""
    return one_after_the_other(tree.scatter_cost(size, nbytes), ring.all_gather_cost(size, nbytes, segments))


def scatter_doubling(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Scatter the vector down a binomial tree, then gather it with distances that double.

    The vector is divided into P blocks; ``segments`` changes nothing. They are gathered by recursive doubling if P is a
    power of two, and else by Bruck's algorithm, with its scratch memory.

    Cost: 2 ceil(log2 P) steps and 2 n (P - 1) / P bytes on the critical path if P is a power of two, and at least as much
    otherwise, when ranks that have their block early are in the way of others.
    """
    draft = _scattered("scatter_doubling", rank, size, root)
    _gather(draft, quick.all_gather(rank, size))
    return draft.finish()


def scatter_doubling_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `scatter_doubling`."""
    return one_after_the_other(tree.scatter_cost(size, nbytes), quick.all_gather_cost(size, nbytes))


def _scattered(algorithm: str, rank: int, size: int, root: int, segments: int = 1) -> Draft:
    """Return a broadcast in the making: every rank has its block, at its place in the output."""
    draft = Draft(Collective.BROADCAST, algorithm, rank, size, root, size * segments)
    own = Ref(OUTPUT, rank * segments, segments)
    # A rank also copies the block that it hands on to its own output.
    branch = tree.binomial_place(rank, size, root).branch
    handed_on = Ref(OUTPUT, branch.start * segments, branch.count * segments)
    draft.include(tree.scatter(rank, size, root), _same, input=draft.whole(INPUT), output=own, scratch=handed_on)
    return draft


def _gather(draft: Draft, part: Schedule) -> None:
    """Append an all_gather of the blocks that all ranks have."""
    width = draft.segments // draft.size
    draft.include(part, _same, input=Ref(OUTPUT, draft.rank * width, width), output=draft.whole(OUTPUT), in_turn=True)


def _same(rank: int) -> int:
    return rank
