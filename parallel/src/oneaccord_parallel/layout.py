"""How several arrays lie side by side in one flat array."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oneaccord_parallel.arrays import Array, dtype_of, readable, shape_of

__all__ = ["Layout", "Slot", "by_dtype"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one array: elements ``start`` to ``stop`` of the flat one, in C order."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The element behind the last one."""
        return self.start + self.size

    def view(self, flat: Array) -> Array:
        """Return the array as a view of a flat buffer."""
        return flat[self.start : self.stop].reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """Arrays of one dtype, one behind the other in a flat array that is padded so that ``parts`` equal shards divide it.

    Parameters
    ----------
    slots
        The place of each array.
    dtype
        The dtype of all of them, by name.
    parts
        The number of shards.
    """

    slots: tuple[Slot, ...]
    dtype: str
    parts: int = 1

    @classmethod
    def of(cls, leaves: Mapping[str, Array], parts: int = 1) -> Layout:
        """Lay out some arrays, which have one dtype, in their order."""
        slots: list[Slot] = []
        for name, leaf in leaves.items():
            slots.append(Slot(name, shape_of(leaf), slots[-1].stop if slots else 0))
        (dtype,) = {dtype_of(leaf) for leaf in leaves.values()}
        return cls(tuple(slots), dtype, parts)

    @cached_property
    def size(self) -> int:
        """The number of elements, without padding."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def shard_size(self) -> int:
        """The number of elements of a shard, the same for all: the last ones may be padding."""
        return -(-self.size // self.parts)

    @cached_property
    def padded_size(self) -> int:
        """The number of elements of the flat array."""
        return self.shard_size * self.parts

    def shard(self, part: int) -> slice:
        """Return which elements of the flat array a shard is."""
        return slice(part * self.shard_size, (part + 1) * self.shard_size)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return each array as a view of a flat buffer."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def pack(self, leaves: Mapping[str, Array], flat: Array) -> None:
        """Copy arrays into a flat buffer; the padding becomes zeros."""
        for slot in self.slots:
            flat[slot.start : slot.stop] = readable(leaves[slot.name]).reshape(-1)
        flat[self.size :] = 0

    def pieces(self, part: int) -> Iterator[tuple[Slot, int, slice]]:
        """Yield for each array its first element in a shard, and which elements of the shard, without padding, are its own; maybe none."""
        begin, stop = part * self.shard_size, (part + 1) * self.shard_size
        for slot in self.slots:
            first, last = (min(max(place, begin), stop) for place in (slot.start, slot.stop))
            yield slot, max(first - slot.start, 0), slice(first - begin, last - begin)


def by_dtype(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide arrays into sets of one dtype each, in the order in which the dtypes first come."""
    sets: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        sets.setdefault(dtype_of(leaf), {})[name] = leaf
    return list(sets.values())
