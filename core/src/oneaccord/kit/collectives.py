"""What native collectives of libraries need around them: the same call on all ranks, means, and what a root keeps itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.contract.transport import HeaderMismatch
from oneaccord.schedule.steps import Collective

__all__ = ["REDUCING", "agree_on_call", "copy_own", "divide_sum"]

REDUCING: frozenset[Collective] = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER})
"""The collectives with a reduction that libraries have."""


def agree_on_call(
    digest: bytes, size: int, least: Callable[[bytes], bytes | bytearray], gather: Callable[[bytes], bytes | bytearray]
) -> None:
    """Return when every rank has come with the same digest: ranks that call different things hang a library, or get wrong numbers.

    It takes as long as a barrier, and since all ranks have entered the same call when it is done, what follows waits for nobody any more.

    Parameters
    ----------
    digest
        `CollectiveRequest.digest`.
    size
        The number of ranks.
    least
        Reduces 16 bytes over all ranks, as two integers of 64 bits, to the least of each: a number and its complement, so that
        both stay what they are only if all ranks have the same number.
    gather
        Brings the bytes of all ranks, in order. Called on all ranks if they differ.

    Raises
    ------
    HeaderMismatch
        A rank, which the error names, makes another call.
    """
    pair = digest + bytes(255 - byte for byte in digest)
    if least(pair) == pair:
        return
    everyones, length = gather(digest), len(digest)
    raise HeaderMismatch(next(rank for rank in range(size) if everyones[rank * length : (rank + 1) * length] != digest), b"")


def copy_own(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy what this rank keeps itself, such as the root of a broadcast.

    Parameters
    ----------
    source
        C-contiguous; may be empty, or the memory of ``target``, and nothing is copied then.
    target
        An array with as many elements.
    """
    if source.size and not np.may_share_memory(source, target):
        np.copyto(target, source.reshape(target.shape))


def divide_sum(total: npt.NDArray[Any], count: int) -> None:
    """Turn sums into means in place, rounded once.

    Parameters
    ----------
    total
        The sums, of a dtype of floats or complex numbers; may be empty.
    count
        How many were added; 1 changes nothing.
    """
    if count == 1 or not total.size:
        return
    if total.dtype.itemsize > 2:
        np.true_divide(total, total.dtype.type(count), out=total)
    else:
        # The count itself may have no exact value in a dtype this small.
        total[...] = (total.astype(np.float32) / np.float32(count)).astype(total.dtype)
