"""Which elements of an array each rank of a mesh has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.errors import UsageError
from oneaccord_parallel.boxes import Box
from oneaccord_parallel.dtensor.placements import Partial, Placement, Replicate, Shard, tuples

__all__ = ["Spec"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spec:
    """An array's shape, and how it lies on a mesh. Two that are equal put each element on the same ranks.

    Made by `of`, which brings the placements into a normal form: axes count from 0, and the counts of a `Shard` are None if they are the usual
    ones, or else all of them.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]) -> Spec:
        """Return the spec of these placements, one for each axis of the mesh.

        Raises
        ------
        UsageError
            They do not fit the mesh, the shape or each other.
        """
        given: list[Any] = [*placements] if isinstance(placements, list | tuple) else [placements]
        if len(given) != len(mesh) or not all(isinstance(each, Replicate | Shard | Partial) for each in given):
            raise UsageError(
                f"a mesh of {len(mesh)} axes takes that many placements, each Replicate(), Shard(dim) or Partial(op), not {placements!r}"
            )
        kinds = {"sum" if each.op == "mean" else each.op for each in given if isinstance(each, Partial)}
        if len(kinds) > 1:
            raise UsageError(
                f"{given} has several reductions, whose result would depend on their order; redistribute one of them first"
            )
        found: list[Placement] = []
        for axis, each in enumerate(given):
            found.append(_normal(each, shape, mesh, found, axis) if isinstance(each, Shard) else each)
        return cls(shape, mesh, tuple(found))

    def replaced(self, axis: int, placement: Placement) -> Spec:
        """Return the spec with another placement on one axis of the mesh."""
        return Spec.of(self.shape, self.mesh, [*self.placements[:axis], placement, *self.placements[axis + 1 :]])

    @cached_property
    def counts(self) -> tuple[Counts | None, ...]:
        """For each axis of the mesh that shards, how many rows each place has, for each place on the axes before that shard the same."""
        return tuple(
            _counts(each, self.shape, self.mesh, self.placements[:axis], axis) if isinstance(each, Shard) else None
            for axis, each in enumerate(self.placements)
        )

    def sharding(self, dim: int) -> list[int]:
        """Return the axes of the mesh that shard an axis of the array, from the outermost to the innermost."""
        return _sharding(self.placements, dim)

    def is_innermost(self, axis: int) -> bool:
        """Return whether no axis of the mesh divides further what this one divides."""
        placement = self.placements[axis]
        return not isinstance(placement, Shard) or self.sharding(placement.dim)[-1] == axis

    def counts_at(self, axis: int, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Return how many rows each place along a sharding axis of the mesh has, seen from one rank."""
        placement, counts = self.placements[axis], self.counts[axis]
        assert isinstance(placement, Shard)
        assert counts is not None
        outer = [each for each in self.sharding(placement.dim) if each < axis]
        return tuple(int(each) for each in counts[tuple(coordinates[each] for each in outer)])

    def box(self, coordinates: Sequence[int]) -> Box:
        """Return the box of a rank."""
        offset, extent = [0] * len(self.shape), list(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                counts = self.counts_at(axis, coordinates)
                offset[placement.dim] += sum(counts[: coordinates[axis]])
                extent[placement.dim] = counts[coordinates[axis]]
        return Box(tuple(offset), tuple(extent))

    @cached_property
    def size(self) -> int:
        """The number of elements that all ranks have together."""
        return math.prod(self.shape) * self.copies

    @cached_property
    def copies(self) -> int:
        """How many ranks have each element."""
        return math.prod(extent for extent, each in zip(self.mesh, self.placements, strict=True) if not isinstance(each, Shard))


def _sharding(placements: Sequence[Placement], dim: int) -> list[int]:
    return [axis for axis, each in enumerate(placements) if isinstance(each, Shard) and each.dim == dim]


def _lengths(shape: tuple[int, ...], mesh: tuple[int, ...], before: Sequence[Placement], dim: int) -> Counts:
    """Return the lengths of the parts into which the axes of the mesh before have divided an axis of the array."""
    outer = _sharding(before, dim)
    if not outer:
        return np.array(shape[dim])
    last = before[outer[-1]]
    assert isinstance(last, Shard)
    return _counts(last, shape, mesh, before[: outer[-1]], outer[-1])


def _counts(shard: Shard, shape: tuple[int, ...], mesh: tuple[int, ...], before: Sequence[Placement], axis: int) -> Counts:
    if shard.counts is not None:
        return np.array(shard.counts)
    lengths = _lengths(shape, mesh, before, shard.dim)[..., None]
    step = -(-lengths // mesh[axis])
    return np.clip(lengths - step * np.arange(mesh[axis]), 0, step)


def _normal(shard: Shard, shape: tuple[int, ...], mesh: tuple[int, ...], before: Sequence[Placement], axis: int) -> Shard:
    if not -len(shape) <= shard.dim < len(shape):
        raise UsageError(f"{shard} needs an axis of the array, whose shape is {shape}")
    plain = Shard(shard.dim % len(shape))
    if shard.counts is None:
        return plain
    usual, lengths = _counts(plain, shape, mesh, before, axis), _lengths(shape, mesh, before, plain.dim)
    given: Any = np.array(shard.counts)
    if given.ndim == 1 and given.shape == usual.shape[-1:]:
        given = np.broadcast_to(given, usual.shape)
    if given.shape != usual.shape or (given.sum(axis=-1) != lengths).any():
        raise UsageError(
            f"the counts of {shard} must divide {lengths.tolist()} rows among {mesh[axis]} places on axis {axis} of the mesh: that many numbers of "
            "this sum"
        )
    return plain if (given == usual).all() else Shard(plain.dim, tuples(given))
