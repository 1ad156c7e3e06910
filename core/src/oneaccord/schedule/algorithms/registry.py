"""The algorithms of oneaccord, and the description that each algorithm gives of itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from oneaccord.common.data import as_dataclass
from oneaccord.schedule.algorithms import (
    bruck,
    circulant,
    composed,
    doubling,
    halving,
    hierarchical,
    pairwise,
    prefix,
    ring,
    tree,
)
from oneaccord.schedule.algorithms.cost import Cost
from oneaccord.schedule.steps import Collective, Schedule

__all__ = ["BUILTIN", "Algorithm", "Cost"]


@as_dataclass
class Algorithm(msgspec.Struct, frozen=True):
    """A way to carry out a collective.

    Attributes
    ----------
    name
        Its name in the config; unique among the algorithms of its collective.
    collective
        The collective that it carries out.
    build
        ``build(rank, size, root, segments)`` returns the schedule of one rank; pure, and defined for any world and root.
        With ``by_host``, ``build(rank, size, root, segments, ranks_per_host)``.
    summary
        One line for messages and tables.
    ordered
        Whether operands are combined in the order of ranks, so that the reduction need not commute.
    segment_bytes
        The best size of a segment, in bytes; None if the algorithm does not gain from segments.
    blockwise
        Whether segments divide the block of each rank instead of the whole vector.
    canonical
        Whether every reduction is the one expression that all reproducible reductions share (`Terms.canonical`).
    even
        Whether the blocks of all ranks must have one size.
    by_host
        Whether it needs the number of neighbouring ranks that share a host. Rank r is on host ``r // ranks_per_host``, and
        ``ranks_per_host`` divides the world size.
    pipelined
        Whether it needs segments: without them it is useless.
    in_order
        Accepted, but without effect. Every algorithm must be able to run its steps in their listed order. Tests prove this for the
        algorithms of oneaccord, and registration proves it for those of plugins (`oneaccord.schedule.proof.in_order`).
    cost
        ``cost(size, nbytes, segments, ranks_per_host)`` is the formula of the docstring for a call of ``nbytes`` bytes,
        of the vector or of all blocks together, evenly divided; None if there is no formula.
    """

    name: str
    collective: Collective
    build: Callable[..., Schedule]
    summary: str
    ordered: bool = True
    segment_bytes: int | None = None
    blockwise: bool = False
    canonical: bool = False
    even: bool = False
    by_host: bool = False
    pipelined: bool = False
    in_order: bool = True
    cost: Callable[[int, float, int, int], Cost] | None = None

    def schedule(self, rank: int, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Schedule:
        """Return the schedule of one rank.

        Parameters
        ----------
        rank, size, root, segments
            As in `Schedule`; ``segments`` is the number of chunks of a vector or of each block.
        ranks_per_host
            How many neighbouring ranks share a host; for an algorithm ``by_host`` alone.
        """
        if self.by_host:
            return self.build(rank, size, root, segments, ranks_per_host)
        return self.build(rank, size, root, segments)


_KIB = 1024

BUILTIN: tuple[Algorithm, ...] = (
    Algorithm(
        "ring",
        Collective.ALL_REDUCE,
        ring.all_reduce,
        "reduce-scatter and all-gather around a ring: the fewest bytes, only between neighbours",
        ordered=False,
        segment_bytes=1024 * _KIB,
        blockwise=True,
        cost=ring.all_reduce_cost,
    ),
    Algorithm(
        "recursive_doubling",
        Collective.ALL_REDUCE,
        doubling.all_reduce,
        "whole vectors exchanged in log2 P rounds: the fewest steps, for small arrays",
        canonical=True,
        cost=doubling.all_reduce_cost,
    ),
    Algorithm(
        "rabenseifner",
        Collective.ALL_REDUCE,
        halving.all_reduce,
        "recursive halving, and back: the fewest bytes in log2 P rounds if P is a power of two",
        canonical=True,
        cost=halving.all_reduce_cost,
    ),
    Algorithm(
        "circulant",
        Collective.ALL_REDUCE,
        circulant.all_reduce,
        "repeated halving around the end: the fewest bytes in log2 P rounds in any world",
        ordered=False,
        cost=circulant.all_reduce_cost,
    ),
    Algorithm(
        "tree",
        Collective.ALL_REDUCE,
        composed.tree_all_reduce,
        "up a binomial tree and down another: few messages in all",
        canonical=True,
        cost=composed.tree_all_reduce_cost,
    ),
    Algorithm(
        "hierarchical",
        Collective.ALL_REDUCE,
        hierarchical.all_reduce,
        "in every host, then across hosts by as many lanes as a host has ranks: the fewest bytes between hosts",
        ordered=False,
        by_host=True,
        cost=hierarchical.all_reduce_cost,
    ),
    Algorithm(
        "binomial",
        Collective.REDUCE,
        tree.reduce,
        "up a binomial tree: few steps, for small arrays",
        segment_bytes=512 * _KIB,
        canonical=True,
        cost=tree.reduce_cost,
    ),
    Algorithm(
        "reduce_scatter_gather",
        Collective.REDUCE,
        halving.reduce,
        "recursive halving, then gathered: few bytes, for large arrays",
        canonical=True,
        cost=halving.reduce_cost,
    ),
    Algorithm(
        "binomial",
        Collective.BROADCAST,
        tree.broadcast,
        "down a binomial tree: few steps, for small arrays",
        cost=tree.broadcast_cost,
    ),
    Algorithm(
        "chain",
        Collective.BROADCAST,
        tree.chain,
        "segments passed along all ranks in a row: the time of one transfer, for large arrays",
        segment_bytes=512 * _KIB,
        pipelined=True,
        cost=tree.chain_cost,
    ),
    Algorithm(
        "scatter_all_gather",
        Collective.BROADCAST,
        composed.scatter_all_gather,
        "scattered down a tree, gathered around a ring: the time of two transfers, for large arrays",
        cost=composed.scatter_all_gather_cost,
    ),
    Algorithm(
        "scatter_doubling",
        Collective.BROADCAST,
        composed.scatter_doubling,
        "scattered down a tree, gathered by recursive doubling: few bytes in few steps if P is a power of two",
        cost=composed.scatter_doubling_cost,
    ),
    Algorithm(
        "hierarchical",
        Collective.BROADCAST,
        hierarchical.broadcast,
        "scattered in the root's host, then across hosts by as many lanes as a host has ranks",
        by_host=True,
        cost=hierarchical.broadcast_cost,
    ),
    Algorithm(
        "ring",
        Collective.ALL_GATHER,
        ring.all_gather,
        "blocks go around a ring: only between neighbours, for large arrays",
        segment_bytes=1024 * _KIB,
        blockwise=True,
        cost=ring.all_gather_cost,
    ),
    Algorithm(
        "recursive_doubling",
        Collective.ALL_GATHER,
        doubling.all_gather,
        "blocks exchanged in log2 P rounds: the fewest steps if P is a power of two",
        cost=doubling.all_gather_cost,
    ),
    Algorithm(
        "bruck",
        Collective.ALL_GATHER,
        bruck.all_gather,
        "all blocks passed on in log2 P rounds, for small arrays in any world",
        cost=bruck.all_gather_cost,
    ),
    Algorithm(
        "hierarchical",
        Collective.ALL_GATHER,
        hierarchical.all_gather,
        "across hosts by as many lanes as a host has ranks, then in every host: the fewest bytes between hosts",
        by_host=True,
        cost=hierarchical.all_gather_cost,
    ),
    Algorithm("binomial", Collective.GATHER, tree.gather, "up a binomial tree", cost=tree.gather_cost),
    Algorithm("binomial", Collective.SCATTER, tree.scatter, "down a binomial tree", cost=tree.scatter_cost),
    Algorithm(
        "ring",
        Collective.REDUCE_SCATTER,
        ring.reduce_scatter,
        "blocks go around a ring to their owners: the fewest bytes, only between neighbours",
        ordered=False,
        segment_bytes=1024 * _KIB,
        blockwise=True,
        cost=ring.reduce_scatter_cost,
    ),
    Algorithm(
        "recursive_halving",
        Collective.REDUCE_SCATTER,
        halving.reduce_scatter,
        "halves of the world exchange halves of the blocks: the fewest bytes in log2 P rounds if P is a power of two",
        ordered=False,
        cost=halving.reduce_scatter_cost,
    ),
    Algorithm(
        "pairwise",
        Collective.REDUCE_SCATTER,
        pairwise.reduce_scatter,
        "each pair of ranks exchanges directly: the fewest bytes, in the order of ranks",
        canonical=True,
        cost=pairwise.reduce_scatter_cost,
    ),
    Algorithm(
        "circulant",
        Collective.REDUCE_SCATTER,
        circulant.reduce_scatter,
        "repeated halving around the end: the fewest bytes in log2 P rounds in any world",
        ordered=False,
        cost=circulant.reduce_scatter_cost,
    ),
    Algorithm(
        "hierarchical",
        Collective.REDUCE_SCATTER,
        hierarchical.reduce_scatter,
        "in every host, then across hosts by as many lanes as a host has ranks: the fewest bytes between hosts",
        ordered=False,
        by_host=True,
        cost=hierarchical.reduce_scatter_cost,
    ),
    Algorithm(
        "pairwise",
        Collective.ALL_TO_ALL,
        pairwise.all_to_all,
        "each pair of ranks exchanges directly: the fewest bytes",
        cost=pairwise.all_to_all_cost,
    ),
    Algorithm(
        "bruck",
        Collective.ALL_TO_ALL,
        bruck.all_to_all,
        "blocks relayed in log2 P rounds: the fewest steps, for small blocks of one size",
        even=True,
        cost=bruck.all_to_all_cost,
    ),
    Algorithm(
        "recursive_doubling",
        Collective.SCAN,
        prefix.scan,
        "handed on in log2 P rounds, twice as far in each: the fewest steps, for small arrays",
        cost=prefix.scan_cost,
    ),
    Algorithm(
        "chain",
        Collective.SCAN,
        prefix.chain_scan,
        "segments passed along all ranks in a row: the time of one transfer, for large arrays",
        segment_bytes=512 * _KIB,
        canonical=True,
        pipelined=True,
        cost=prefix.chain_scan_cost,
    ),
    Algorithm(
        "doubling_123",
        Collective.EXSCAN,
        prefix.exscan,
        "handed on by 1, 2, 3, 6, 12, ... ranks: the fewest steps, for small arrays",
        cost=prefix.exscan_cost,
    ),
    Algorithm(
        "chain",
        Collective.EXSCAN,
        prefix.chain_exscan,
        "segments passed along all ranks in a row: the time of one transfer, for large arrays",
        segment_bytes=512 * _KIB,
        canonical=True,
        pipelined=True,
        cost=prefix.chain_exscan_cost,
    ),
    Algorithm(
        "dissemination",
        Collective.BARRIER,
        doubling.barrier,
        "log2 P rounds of empty messages",
        cost=doubling.barrier_cost,
    ),
)
"""The algorithms that come with oneaccord."""
