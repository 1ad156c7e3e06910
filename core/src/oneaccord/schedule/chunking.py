"""How a vector is divided into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["blocks", "even"]


def even(count: int, parts: int) -> tuple[int, ...]:
    """Return the offsets that divide ``count`` elements into ``parts`` chunks, sizes differing by at most one."""
    size, rest = divmod(count, parts) if parts else (0, 0)
    return tuple([i * size + min(i, rest) for i in range(parts + 1)])


def blocks(counts: Sequence[int], segments: int) -> tuple[int, ...]:
    """Return the offsets of blocks of these counts, each divided evenly into ``segments`` chunks."""
    sizes = [stop - start for count in counts for start, stop in pairwise(even(count, segments))]
    return tuple(accumulate(sizes, initial=0))
