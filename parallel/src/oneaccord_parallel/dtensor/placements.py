"""How an array lies on one axis of a mesh: on every rank, in shards, or as operands of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oneaccord.errors import UsageError

__all__ = ["Partial", "Placement", "Replicate", "Shard"]


class Placement:
    """How an array lies on one axis of a mesh: `Replicate`, `Shard` or `Partial`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank has the same array."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """Each rank has some rows of an axis of the array, in the order of ranks.

    If several axes of a mesh shard one axis of the array, it is divided by the first of them, its parts by the next, and so on.

    Parameters
    ----------
    dim
        The axis of the array; it may count from the end.
    counts
        How many rows each rank has. By default as `torch.chunk` divides: equal parts, the last ones smaller or empty. If an axis of the mesh before this one
        shards the same axis of the array, a list for each place on that axis may be given, and so on.

    Raises
    ------
    UsageError
        ``dim`` is not an integer, or ``counts`` holds a value that is not an integer of at least 0.
    """

    dim: int
    counts: Any = None

    def __init__(self, dim: int, counts: Sequence[Any] | None = None) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise UsageError(f"Shard takes the number of an axis, not {dim!r}")
        object.__setattr__(self, "dim", int(dim))
        object.__setattr__(self, "counts", None if counts is None else _as_tuples(counts))

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.counts is None else f"Shard({self.dim}, counts={self.counts})"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Each rank has an operand: the array is their sum, mean, least or greatest, element by element.

    Parameters
    ----------
    op
        ``"sum"``, ``"mean"`` (or ``"avg"``), ``"min"`` or ``"max"``.

    Raises
    ------
    UsageError
        The op is another one.
    """

    op: str = "sum"

    def __init__(self, op: str = "sum") -> None:
        if op not in ("sum", "mean", "avg", "min", "max"):
            raise UsageError(f"Partial takes 'sum', 'mean', 'min' or 'max', not {op!r}")
        object.__setattr__(self, "op", "mean" if op == "avg" else op)

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


def _as_tuples(counts: Any) -> tuple[Any, ...]:
    try:
        array = np.array(counts)
    except ValueError:
        array = np.empty(0, object)
    if array.ndim == 0 or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
        raise UsageError(f"counts must be a number of rows for each rank, not {counts!r}")
    return tuples(array)


def tuples(array: Any) -> tuple[Any, ...]:
    """Return an array of integers as nested tuples."""
    return tuple(tuples(row) if row.ndim else int(row) for row in array)
