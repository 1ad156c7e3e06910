"""Loops of unequal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["until_all_done"]

T = TypeVar("T")


def until_all_done(batches: Iterable[T], group: Group, *, timeout_s: float | None = None) -> Iterator[T | None]:
    """Yield this rank's batches, and then None until every rank has come to the end of its own.

    >>> for batch in mp.until_all_done(batches, group):
    ...     if batch is None:
    ...         gradients = sync(None, weight=0)
    ...     else:
    ...         gradients = sync(backward(batch), weight=len(batch))

    Each round costs one all_reduce of a byte.

    Parameters
    ----------
    batches
        The batches of this rank; there may be none.
    group
        Every rank of it must iterate, to the end.
    timeout_s
        Seconds that a round may wait for the slowest rank.

    Yields
    ------
    object or None
        The next batch, or None if this rank has no more and another one has.
    """
    own = iter(batches)
    has_more = True
    while True:
        batch: T | None = None
        if has_more:
            try:
                batch = next(own)
            except StopIteration:
                has_more = False
        if not group.all_reduce(np.uint8(has_more), "max", timeout_s=timeout_s):
            return
        yield batch
