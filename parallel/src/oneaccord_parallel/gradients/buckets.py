"""Buckets: gradients that travel together, in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneaccord_parallel.arrays import Array, Memory, itemsize
from oneaccord_parallel.compress import Channel
from oneaccord_parallel.layout import Layout, Slot

__all__ = ["Bucket", "Leaf", "plan"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """The facts about a gradient that the buckets need.

    Parameters
    ----------
    shape, dtype
        Those of the gradient.
    wire
        The dtype in which it is summed, by name.
    place
        The memory, in words: gradients of one bucket are in one memory.
    template
        An empty array of its library, dtype and place.
    """

    shape: tuple[int, ...]
    dtype: str
    wire: str
    place: str
    template: Array

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def plan(leaves: Mapping[str, Leaf], order: Sequence[str], first_bytes: int, other_bytes: int) -> list[list[str]]:
    """Divide leaves into buckets: those that come one after the other share one, if dtype and place allow.

    Parameters
    ----------
    leaves
        All leaves by name.
    order
        Their names in the order in which they are expected.
    first_bytes, other_bytes
        How much the first bucket of each dtype and the others hold at most. A leaf that is larger has one of its own.

    Returns
    -------
    list of list of str
        The names in each bucket. A bucket comes behind another one if its last leaf does.
    """
    done: list[tuple[int, list[str]]] = []
    filling: dict[tuple[str, str], tuple[int, int, list[str]]] = {}  # the last place in the order, the bytes, the names
    started: set[tuple[str, str]] = set()
    for place, name in enumerate(order):
        leaf = leaves[name]
        kind = (leaf.wire, leaf.place)
        nbytes = leaf.size * itemsize(leaf.wire)
        last, held, names = filling.get(kind, (place, 0, []))
        if names and held + nbytes > (other_bytes if kind in started else first_bytes):
            done.append((last, names))
            started.add(kind)
            held, names = 0, []
        names.append(name)
        filling[kind] = (place, held + nbytes, names)
    done += [(last, names) for last, _, names in filling.values()]
    return [names for _, names in sorted(done)]


class Bucket:
    """Some gradients side by side, and behind them a mark for each: how many ranks have used it.

    So one message holds the sums and shows which gradients no rank has.

    Attributes
    ----------
    layout
        The place of each gradient.
    flat
        All: the gradients, then the marks.
    views
        Each gradient, as a view of ``flat``.
    missing
        How many gradients of this step are still to come.
    channel
        The compressor, if there is one.
    """

    def __init__(self, names: Iterable[str], leaves: Mapping[str, Leaf], memory: Memory) -> None:
        slots: list[Slot] = []
        for name in names:
            slots.append(Slot(name, leaves[name].shape, slots[-1].stop if slots else 0))
        leaf = leaves[slots[0].name]
        self.layout: Layout = Layout(tuple(slots), leaf.wire)
        self.flat: Array = memory.empty("gradients", self.layout.size + len(slots), leaf.wire, leaf.template)
        self.views: dict[str, Array] = self.layout.views(self.flat)
        self.missing: int = len(slots)
        self.channel: Channel | None = None

    @property
    def values(self) -> Array:
        """The gradients, without the marks."""
        return self.flat[: self.layout.size]

    def mark(self, used: set[str]) -> None:
        """Set the marks of this rank, and zeros for the gradients that it has not used."""
        self.flat[self.layout.size :] = 1
        for number, slot in enumerate(self.layout.slots):
            if slot.name not in used:
                self.views[slot.name][...] = 0
                self.flat[self.layout.size + number] = 0

    def unused(self) -> set[str]:
        """Return the gradients that no rank has used, once the sums are there."""
        marks: list[Any] = self.flat[self.layout.size :].tolist()
        return {slot.name for slot, mark in zip(self.layout.slots, marks, strict=True) if not mark}
