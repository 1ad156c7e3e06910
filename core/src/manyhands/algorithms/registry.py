"""The algorithms that come with manyhands, and what one must say about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.algorithms import doubling, pairwise, ring, tree
from manyhands.schedule.steps import Collective, Schedule

__all__ = ["BUILTIN", "Algorithm"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to carry out a collective.

    Attributes
    ----------
    name
        Its name in the config; unique among the algorithms of its collective.
    collective
        What it carries out.
    build
        ``build(rank, size, root, segments)`` returns the schedule of one rank; pure, and defined for any world and root.
    summary
        One line for people.
    ordered
        Whether operands are combined in the order of ranks, so that the reduction need not commute.
    segment_bytes
        How large a segment should be, in bytes; None for one that does not gain from segments.
    blockwise
        Whether segments divide the block of each rank instead of the whole vector.
    """

    name: str
    collective: Collective
    build: Callable[[int, int, int, int], Schedule]
    summary: str
    ordered: bool = True
    segment_bytes: int | None = None
    blockwise: bool = False


_KIB = 1024

BUILTIN: tuple[Algorithm, ...] = (
    Algorithm(
        "ring",
        Collective.ALL_REDUCE,
        ring.all_reduce,
        "reduce-scatter and all-gather around a ring: the fewest bytes, for large arrays",
        ordered=False,
        segment_bytes=1024 * _KIB,
        blockwise=True,
    ),
    Algorithm(
        "recursive_doubling",
        Collective.ALL_REDUCE,
        doubling.all_reduce,
        "whole vectors exchanged in log2 P rounds: the fewest steps, for small arrays",
    ),
    Algorithm("binomial", Collective.REDUCE, tree.reduce, "up a binomial tree", segment_bytes=512 * _KIB),
    Algorithm("binomial", Collective.BROADCAST, tree.broadcast, "down a binomial tree: few steps, for small arrays"),
    Algorithm(
        "chain",
        Collective.BROADCAST,
        tree.chain,
        "segments passed along all ranks in a row: the time of one transfer, for large arrays",
        segment_bytes=512 * _KIB,
    ),
    Algorithm(
        "ring",
        Collective.ALL_GATHER,
        ring.all_gather,
        "blocks go around a ring: neighbours talk, for large arrays",
        segment_bytes=1024 * _KIB,
        blockwise=True,
    ),
    Algorithm("bruck", Collective.ALL_GATHER, doubling.all_gather, "all blocks passed on in log2 P rounds, for small arrays"),
    Algorithm("binomial", Collective.GATHER, tree.gather, "up a binomial tree"),
    Algorithm("binomial", Collective.SCATTER, tree.scatter, "down a binomial tree"),
    Algorithm(
        "ring",
        Collective.REDUCE_SCATTER,
        ring.reduce_scatter,
        "blocks go around a ring to their owners: the fewest bytes",
        ordered=False,
        segment_bytes=1024 * _KIB,
        blockwise=True,
    ),
    Algorithm("pairwise", Collective.ALL_TO_ALL, pairwise.all_to_all, "each pair of ranks exchanges directly"),
    Algorithm("dissemination", Collective.BARRIER, doubling.barrier, "log2 P rounds of empty messages"),
)
"""The algorithms that come with manyhands."""
