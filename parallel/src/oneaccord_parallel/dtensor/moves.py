"""The steps of a redistribution on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import array_api_compat
import numpy as np

from oneaccord_parallel.arrays import Array, dtype_of, namespace, shape_of
from oneaccord_parallel.axes import all_gather, exchange, flat, part, reduce_scatter
from oneaccord_parallel.boxes import Box
from oneaccord_parallel.dtensor.placements import Partial, Replicate, Shard
from oneaccord_parallel.dtensor.plan import Step
from oneaccord_parallel.dtensor.spec import Spec

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["Place", "move", "owned"]


@dataclass(frozen=True)
class Place:
    """A rank's place on a mesh: the group of all ranks, and for each axis its group, its name and this rank's coordinate."""

    parent: Group
    groups: tuple[Group, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: tuple[int, ...]

    def along(self, axis: int) -> list[tuple[int, ...]]:
        """Return the coordinates of the ranks along an axis of the mesh."""
        before, after = self.coordinates[:axis], self.coordinates[axis + 1 :]
        return [(*before, place, *after) for place in range(self.shape[axis])]


def move(local: Array, before: Spec, step: Step, place: Place, *, reproducible: bool | None, timeout_s: float | None) -> Array:
    """Carry out a step; return this rank's part after it."""
    group, old, new = place.groups[step.axis], step.source, step.target
    if isinstance(old, Replicate) and isinstance(new, Shard):
        mine = part(local, new.dim, step.after.counts_at(step.axis, place.coordinates), group.rank)
        return owned(mine)
    if isinstance(old, Shard) and isinstance(new, Replicate):
        return all_gather(local, group, old.dim, before.counts_at(step.axis, place.coordinates), timeout_s=timeout_s)
    if isinstance(old, Partial) and isinstance(new, Replicate):
        return _all_reduce(local, group, old.op, reproducible, timeout_s)
    if isinstance(old, Partial) and isinstance(new, Shard):
        counts = step.after.counts_at(step.axis, place.coordinates)
        return reduce_scatter(local, group, new.dim, counts, old.op, reproducible=reproducible, timeout_s=timeout_s)
    if isinstance(old, Shard) and isinstance(new, Shard):
        return _all_to_all(local, before, step, place, timeout_s)
    assert isinstance(new, Partial)
    return _pad(local, before, step, place, new.op)


def owned(view: Array) -> Array:
    """Return a copy, so that the owner of the view's memory can be freed."""
    return namespace(view).asarray(view, copy=True)


def _all_reduce(local: Array, group: Group, op: str, reproducible: bool | None, timeout_s: float | None) -> Array:
    """Combine the operands of all ranks by a reduce_scatter and an all_gather.

    These send 2 (p - 1) / p of the bytes from every rank; an all_reduce may take an algorithm that sends more, to have fewer messages.
    """
    each, left = divmod(math.prod(shape_of(local)), group.world_size)
    counts = [each + (rank < left) for rank in range(group.world_size)]
    mine = reduce_scatter(flat(local), group, 0, counts, op, reproducible=reproducible, timeout_s=timeout_s)
    return namespace(local).reshape(all_gather(mine, group, 0, counts, timeout_s=timeout_s), shape_of(local))


def _all_to_all(local: Array, before: Spec, step: Step, place: Place, timeout_s: float | None) -> Array:
    """Give each rank along an axis of the mesh its future share of this rank's box."""
    old, new, ranks, group = step.source, step.target, place.along(step.axis), place.groups[step.axis]
    assert isinstance(old, Shard)
    assert isinstance(new, Shard)
    olds, news = [before.box(rank) for rank in ranks], [step.after.box(rank) for rank in ranks]
    mine, wanted = olds[group.rank], news[group.rank]
    parts = [local[_common(mine, each).within(mine).slices] for each in news]
    found = [_common(each, wanted) for each in olds]
    rows = [set(spec.counts_at(step.axis, place.coordinates)) for spec in (before, step.after)]
    even = old.dim != new.dim and all(len(each) == 1 for each in rows)
    arrived = exchange(parts, [each.shape for each in found], even, group, timeout_s=timeout_s)
    # The parts come in the order of ranks, in which they are side by side along the sharded axis.
    return namespace(local).concat(arrived, axis=old.dim)


def _common(one: Box, other: Box) -> Box:
    """Return the common part of two boxes, even if it is empty."""
    offset = tuple(map(max, one.offset, other.offset))
    stop = (min(a + m, b + n) for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True))
    return Box(offset, tuple(max(0, last - first) for first, last in zip(offset, stop, strict=True)))


def _pad(local: Array, before: Spec, step: Step, place: Place, op: str) -> Array:
    """Return an operand for each rank, which all together give the array: its elements on the rank that has them, elsewhere the identity."""
    if op == "mean":
        local = local * place.shape[step.axis]
    whole, mine = step.after.box(place.coordinates), before.box(place.coordinates)
    if isinstance(step.source, Replicate):
        return local if place.coordinates[step.axis] == 0 else _identities(local, whole.shape, op)
    assert isinstance(step.source, Shard)
    dim = step.source.dim
    ahead = mine.offset[dim] - whole.offset[dim]
    behind = whole.shape[dim] - mine.shape[dim] - ahead
    before_it, behind_it = (
        _identities(local, (*whole.shape[:dim], rows, *whole.shape[dim + 1 :]), op) for rows in (ahead, behind)
    )
    return namespace(local).concat([before_it, local, behind_it], axis=dim)


def _identities(like: Array, shape: Sequence[int], op: str) -> Array:
    """Return an array of the identity of a reduction."""
    xp = namespace(like)
    return xp.full(tuple(shape), _identity(dtype_of(like), op), dtype=like.dtype, device=array_api_compat.device(like))


def _identity(dtype: str, op: str) -> Any:
    if op in ("sum", "mean"):
        # x + -0.0 is x for every float, and -0.0 + 0.0 is not -0.0.
        return 0 if "int" in dtype else complex(-0.0, -0.0) if "complex" in dtype else -0.0
    if dtype == "bool":
        return op == "min"
    if "int" in dtype:
        info = np.iinfo(dtype)
        return int(info.max if op == "min" else info.min)
    return math.inf if op == "min" else -math.inf
