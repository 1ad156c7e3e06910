"""Boxes in the index space of an array: an offset and an extent along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Box", "boxes_of_range", "whole"]


class Box(NamedTuple):
    """The elements from ``offset`` on, ``shape`` of them along each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that take the box out of its array."""
        return tuple(slice(start, start + extent) for start, extent in zip(self.offset, self.shape, strict=True))

    def within(self, other: Box) -> Box:
        """Return the box, counted from the beginning of another that holds it."""
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset, strict=True)), self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the common part of both; None if there is none."""
        first = tuple(map(max, self.offset, other.offset))
        last = (min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        shape = tuple(stop - start for start, stop in zip(first, last, strict=True))
        return Box(first, shape) if all(extent > 0 for extent in shape) else None


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of an array."""
    return Box((0,) * len(shape), shape)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``stop`` in C order consist of, in that order: at most ``2 * ndim - 1``."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, left) = divmod(start, inner), divmod(stop, inner)
    if skipped or first == last:
        end = left if first == last else inner
        for box in boxes_of_range(shape[1:], skipped, end):
            yield Box((first, *box.offset), (1, *box.shape))
        if first == last:
            return
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    for box in boxes_of_range(shape[1:], 0, left):
        yield Box((last, *box.offset), (1, *box.shape))
