"""The cheapest way from one set of placements to another.

A step changes the placement on one axis of the mesh. If several axes of the mesh shard one axis of the array, only the innermost of them can
change: the blocks that another one joined would not be side by side. So a way may need a detour, and among all of them the one that sends the fewest
bytes is searched, by the algorithm of E. W. Dijkstra, "A note on two problems in connexion with graphs", 1959.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.dtensor.placements import Partial, Placement, Replicate, Shard
from oneaccord_parallel.dtensor.spec import Spec

__all__ = ["Step", "plan"]


@dataclass(frozen=True)
class Step:
    """A step of a redistribution, along one axis of the mesh.

    Attributes
    ----------
    axis
        The number of the axis of the mesh.
    name
        Its name.
    source, target
        The placement on that axis before and after.
    collective
        ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"``, ``"all_to_all"``; or ``"slice"`` or ``"pad"``, which send nothing.
    total_bytes
        The bytes of the array that all ranks of the mesh send together.
    bytes_per_rank
        The bytes that a rank sends, on average; if the shards are even, the bytes of each rank.
    """

    axis: int
    name: str
    source: Placement
    target: Placement
    collective: str
    total_bytes: int
    bytes_per_rank: float
    after: Spec = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.source} -> {self.target} by {self.collective}, {self.bytes_per_rank:,.12g} bytes sent by each rank"


@lru_cache(maxsize=1024)
def plan(source: Spec, target: Spec, itemsize: int, names: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the steps that send the fewest bytes; of several such ways the one with the fewest collectives, then with the fewest steps.

    All ranks find the same one.
    """
    best = {source: (0, 0, 0)}
    came: dict[Spec, tuple[Spec, int, int]] = {}
    numbers = itertools.count()
    ahead = [((0, 0, 0), next(numbers), source)]
    while ahead:
        cost, _, spec = heapq.heappop(ahead)
        if spec == target:
            break
        if cost > best[spec]:
            continue
        for axis, after in _neighbours(spec, source, target):
            elements = _elements_sent(spec, after, axis)
            new = cost[0] + elements, cost[1] + (elements > 0), cost[2] + 1
            if after not in best or new < best[after]:
                best[after] = new
                came[after] = spec, axis, elements
                heapq.heappush(ahead, (new, next(numbers), after))
    steps: list[Step] = []
    spec, ranks = target, math.prod(source.mesh)
    while spec != source:
        before, axis, elements = came[spec]
        old, changed, sent = before.placements[axis], spec.placements[axis], elements * itemsize
        steps.append(Step(axis, names[axis], old, changed, _collective(old, changed), sent, sent / ranks, spec))
        spec = before
    return tuple(reversed(steps))


def _neighbours(spec: Spec, source: Spec, target: Spec) -> Iterator[tuple[int, Spec]]:
    """Yield the specs that are one step away: a change on one axis of the mesh that moves whole blocks."""
    for axis, old in enumerate(spec.placements):
        if not spec.is_innermost(axis):
            continue
        wanted = [Replicate(), *map(Shard, range(len(spec.shape))), source.placements[axis], target.placements[axis]]
        for new in dict.fromkeys(wanted):
            if new == old or (isinstance(old, Partial) and isinstance(new, Partial)):
                continue
            try:
                after = spec.replaced(axis, new)
            except UsageError:
                continue  # counts for parts of other lengths
            if after != spec and after.is_innermost(axis):
                yield axis, after


def _collective(old: Placement, new: Placement) -> str:
    if isinstance(new, Partial):
        return "pad"
    if isinstance(old, Replicate):
        return "slice"
    if isinstance(old, Partial):
        return "all_reduce" if isinstance(new, Replicate) else "reduce_scatter"
    return "all_gather" if isinstance(new, Replicate) else "all_to_all"


def _elements_sent(before: Spec, after: Spec, axis: int) -> int:
    """Return how many elements all ranks together send in one step, without looking at each rank."""
    others = before.mesh[axis] - 1
    match _collective(before.placements[axis], after.placements[axis]):
        case "all_gather":
            return others * before.size
        case "reduce_scatter":
            return others * after.size
        case "all_reduce":
            return 2 * others * before.size // before.mesh[axis]
        case "all_to_all":
            return after.size - _staying(before, after, axis)
        case _:
            return 0


def _staying(before: Spec, after: Spec, axis: int) -> int:
    """Return how many elements stay in place when an axis of the mesh shards another axis of the array."""
    old, new = before.placements[axis], after.placements[axis]
    mine, its = before.counts[axis], after.counts[axis]
    assert isinstance(old, Shard)
    assert isinstance(new, Shard)
    assert mine is not None
    assert its is not None
    if old.dim == new.dim:
        ends, its_ends = mine.cumsum(axis=-1), its.cumsum(axis=-1)
        shared = np.minimum(ends, its_ends) - np.maximum(ends - mine, its_ends - its)
        rows = int(np.clip(shared, 0, None).sum())
    else:
        places = mine.shape[-1]
        rows = int(mine.reshape(-1, places).sum(axis=0) @ its.reshape(-1, places).sum(axis=0))
    untouched = math.prod(extent for dim, extent in enumerate(before.shape) if dim not in (old.dim, new.dim))
    return rows * untouched * after.copies
