"""Whether boxes fill an array without overlapping."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from oneaccord_parallel.boxes import Box, whole

__all__ = ["find_fault", "tile"]

_PRIME: Final = 2**127 - 1


def tile(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Return whether boxes hold each element of an array exactly once, and nothing beyond it.

    The number of boxes that hold an element is a function of its index that is zero far away, so that its mixed difference determines it.
    The mixed difference of one box is +1 or -1 at each of its corners, and zero elsewhere. So the corners must add up to those of the
    whole. A box has two to the power of its axes of them, and they are not listed: each end along an axis gets a random number, a corner has
    the product of its own, and the sum over the corners of a box is a product of differences. If the corners do not add up, the numbers
    do with a chance of axes in 2**127 (Schwartz and Zippel). So the time is linear in the number of boxes and of axes.
    """
    ends: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))
    total = 0
    for box, sign in [*((box, 1) for box in boxes), (whole(shape), -1)]:
        if box.size:
            product = sign
            for axis, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
                product = product * (ends[axis, start + extent] - ends[axis, start]) % _PRIME
            total += product
    return total % _PRIME == 0


def find_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Box, Box] | Box | None:
    """Return two boxes that overlap, or a box of elements that no box holds; None if `tile` holds."""
    ordered = sorted(box for box in boxes if box.size)
    for number, one in enumerate(ordered):
        for other in islice(ordered, number + 1, None):
            if one.offset and other.offset[0] >= one.offset[0] + one.shape[0]:
                break  # and so do all that follow
            if one.intersection(other):
                return one, other
    left = [box for box in [whole(shape)] if box.size]
    for box in boxes:
        left = [rest for part in left for rest in _without(part, box)]
    return left[0] if left else None


def _without(part: Box, hole: Box) -> Iterable[Box]:
    """Yield the boxes that are left of a box without another."""
    common = part.intersection(hole)
    if common is None:
        yield part
        return
    offset, shape = list(part.offset), list(part.shape)
    for axis, (start, extent) in enumerate(zip(common.offset, common.shape, strict=True)):
        before, behind = start - offset[axis], offset[axis] + shape[axis] - (start + extent)
        if before:
            yield Box(tuple(offset), (*shape[:axis], before, *shape[axis + 1 :]))
        if behind:
            yield Box((*offset[:axis], start + extent, *offset[axis + 1 :]), (*shape[:axis], behind, *shape[axis + 1 :]))
        offset[axis], shape[axis] = start, extent
