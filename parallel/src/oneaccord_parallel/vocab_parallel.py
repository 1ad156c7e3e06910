"""The vocabulary divided among the ranks of a group: the embedding, and the cross-entropy of the logits.

Both are those of M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.agreement import need_group
from oneaccord_parallel.arrays import Array, dtype_of, itemsize, like, namespace, need_no_graph, readable, shape_of
from oneaccord_parallel.tensor_parallel import Vjp, counts_of_parts, sequence_axis_of, sum_up

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_embedding"]


def vocab_parallel_embedding(
    ids: Array,
    table: Array,
    group: Group,
    *,
    counts: Sequence[int] | None = None,
    sequence_axis: int | None = None,
    sequence_counts: Sequence[int] | None = None,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[Array]]:
    """Look up rows of a table of which each rank has some.

    Parameters
    ----------
    ids
        Integers from 0 to the size of the vocabulary, of any shape, the same on all ranks.
    table
        This rank's rows of the table, shape ``(v of this rank, d)``, in the order of ranks: v may differ from rank to rank, and may be 0.
    group
        The ranks that share the table.
    counts
        The number of rows on each rank. By default the ranks exchange them, in a small call, and compare a checksum of ``ids`` if these are in the
        host's memory.
    sequence_axis
        The axis of the result that is divided among the ranks (sequence parallel), such as 0. By default every rank gets all of it.
    sequence_counts
        With ``sequence_axis``, how many rows of it each rank gets. By default as `shard_of` divides.
    reproducible
        Whether sums of floats have the same bits for every backend and size: see `Group.all_reduce`. A row is found only on one
        rank, and the others add zeros.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    y
        Shape ``(*ids.shape, d)``; with ``sequence_axis`` this rank's part of it. Its library and dtype are those of ``table``.
    vjp
        ``vjp(dy)`` returns the gradient of ``table``. Rows that are looked up several times have their gradients added in the order of ``ids``, except
        on GPUs, where no order is promised.

    Raises
    ------
    UsageError
        An id is outside of the vocabulary; or, on every rank, the ranks were found to have different ones.
    DTypeError
        ``ids`` holds no integers.
    SizeMismatchError
        ``table`` does not have two axes, or ``counts`` or ``sequence_counts`` do not fit.
    """
    need_group(group)
    need_no_graph(table)
    rows, template = readable(table), table
    if len(shape_of(rows)) != 2:
        raise SizeMismatchError(f"a table of embeddings must have shape (v, d), not {shape_of(rows)}")
    local, inside, wrong = _localized(ids, shape_of(rows)[0], rows, group, counts, timeout_s)
    _refuse(ids, wrong)
    width = shape_of(rows)[1]
    partial = namespace(rows).zeros((*shape_of(local), width), dtype=rows.dtype, device=_device(rows))
    partial[inside] = rows[local[inside]]
    y, leave = sum_up(partial, group, sequence_axis_of(partial, sequence_axis), sequence_counts, reproducible, timeout_s)

    def backward(dy: Array, local: Array, inside: Array) -> Array:
        gradient = namespace(rows).zeros_like(rows)
        _add_rows(gradient, local[inside], leave(readable(dy))[inside])
        return like(gradient, template)

    return like(y, template), Vjp(y, backward, local, inside)


def vocab_parallel_cross_entropy(
    logits: Array,
    targets: Array,
    group: Group,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    counts: Sequence[int] | None = None,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[Array]]:
    """Compute the cross-entropy of logits of which each rank has those of some classes, without joining them.

    Two collectives are made: one for the greatest logit of each target, and one for the sum of exponentials and the logit of the target.

    Parameters
    ----------
    logits
        Shape ``(..., v of this rank)``: the logits of this rank's classes, in the order of ranks, as `column_linear` gives them. float16 and
        bfloat16 are computed in float32.
    targets
        The number of the right class, integers of shape ``(...)``, the same on all ranks.
    group
        The ranks that share the classes.
    ignore_index
        Targets of this number have loss 0 and gradient 0, and do not count.
    reduction
        ``"mean"`` over the targets that count (0 if none does), ``"sum"``, or ``"none"`` for the loss of each target.
    counts
        The number of classes on each rank. By default the ranks exchange them, in a small call, and compare a checksum of ``targets`` if these are in
        the host's memory.
    reproducible
        Whether sums of floats have the same bits for every backend and size: see `Group.all_reduce`.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    loss
        The same on all ranks, of shape ``()``, or with ``reduction="none"`` that of ``targets``; float64 for such logits, or else float32.
    vjp
        ``vjp(dloss=1)`` returns the gradient of ``logits``, of their shape and dtype. It does not communicate. ``dloss`` has the shape of the loss.

    Raises
    ------
    UsageError
        A target is no class and not ``ignore_index``, or the reduction is unknown; or, on every rank, the ranks were found to have different targets.
    DTypeError
        ``targets`` holds no integers, or ``logits`` no floats.
    SizeMismatchError
        The shape of ``targets`` is not that of ``logits`` without the last axis, or ``counts`` does not fit.
    """
    need_group(group)
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"the reduction of a loss must be 'mean', 'sum' or 'none', not {reduction!r}")
    need_no_graph(logits)
    z, targets = readable(logits), readable(targets)
    if "float" not in dtype_of(z):
        raise DTypeError(f"logits must be floats, not {dtype_of(z)}")
    if not shape_of(z) or shape_of(z)[:-1] != shape_of(targets):
        raise SizeMismatchError(
            f"logits of shape (..., v) need targets of shape (...), but {shape_of(z)} and {shape_of(targets)} were given"
        )
    shape, classes, xp = shape_of(targets), shape_of(z)[-1], namespace(z)
    z = xp.reshape(z, (math.prod(shape), classes))
    z = z if itemsize(dtype_of(z)) >= 4 else xp.astype(z, xp.float32)
    device = _device(z)
    counted = xp.asarray(targets, device=device) != ignore_index
    local, inside, wrong = _localized(targets, classes, z, group, counts, timeout_s)
    _refuse(targets, wrong & counted)
    counted, local, inside = counted.reshape(-1), local.reshape(-1), (inside & counted).reshape(-1)
    largest = xp.max(z, axis=-1) if classes else xp.full(z.shape[:1], -math.inf, dtype=z.dtype, device=device)
    largest = group.all_reduce(largest, "max", timeout_s=timeout_s)
    with np.errstate(all="ignore"):  # logits may be infinite: those of masked classes, and of targets that do not count
        exponentials = xp.exp(z - largest[:, None])
        both = xp.zeros((2, z.shape[0]), dtype=z.dtype, device=device)
        both[0] = xp.sum(exponentials, axis=-1)
        both[1][inside] = z[inside, local[inside]] - largest[inside]
        total, chosen = group.all_reduce(both, reproducible=reproducible, timeout_s=timeout_s)
        losses = xp.where(counted, xp.log(total) - chosen, xp.zeros_like(total))
    number = max(int(xp.sum(counted)), 1) if reduction == "mean" else 1
    loss = xp.asarray(xp.reshape(losses, shape) if reduction == "none" else xp.sum(losses) / number)
    dtype, template = readable(logits).dtype, like(xp.asarray(number), logits)

    def backward(dloss: Any, exponentials: Array, total: Array, counted: Array, local: Array, inside: Array) -> Array:
        scale = xp.asarray(readable(dloss), dtype=total.dtype, device=device).reshape(-1) / number
        with np.errstate(all="ignore"):
            gradient = exponentials / total[:, None]
            gradient[inside, local[inside]] -= 1
            gradient = xp.where(counted[:, None], gradient * scale[:, None], xp.zeros_like(gradient))
            gradient = xp.astype(gradient, dtype, copy=False)
        return like(xp.reshape(gradient, (*shape, classes)), template)

    return like(loss, logits), Vjp(loss, backward, exponentials, total, counted, local, inside)


def _localized(
    ids: Array, rows: int, template: Array, group: Group, counts: Sequence[int] | None, timeout_s: float | None
) -> tuple[Array, Array, Array]:
    """Return ids counted from this rank's first row, which are among its ``rows``, and which are among those of no rank."""
    xp = namespace(template)
    ids = readable(ids)
    if "int" not in dtype_of(ids):
        raise DTypeError(f"numbers of rows must be integers, not {dtype_of(ids)}")
    if counts is None:
        told = group.all_gather(np.array([[rows, _checksum(ids)]]), timeout_s=timeout_s)
        other = [group.ranks[rank] for rank in range(group.world_size) if told[rank, 1] != told[0, 1]]
        if other:
            raise UsageError(
                f"the ranks that share a vocabulary need the same batch: the numbers of rows on ranks {other} are not those on rank {group.ranks[0]}"
            )
        counts = told[:, 0].tolist()
    sizes = counts_of_parts(rows, group, counts, timeout_s)
    ids = xp.astype(xp.asarray(ids, device=_device(template)), xp.int64)
    local = ids - sum(sizes[: group.rank])
    return local, (local >= 0) & (local < rows), (ids < 0) | (ids >= sum(sizes))


def _checksum(ids: Array) -> int:
    """Return a checksum of integers in the host's memory, and 0 for those on a GPU, which would have to come to the host."""
    if not isinstance(ids, np.ndarray) and str(ids.device) != "cpu":
        return 0
    return zlib.crc32(np.ascontiguousarray(ids, np.int64).data)


def _refuse(ids: Array, wrong: Array) -> None:
    if bool(wrong.any()):
        there = namespace(wrong).asarray(readable(ids), device=_device(wrong))  # they may be on the host, and the rows on a GPU
        raise UsageError(f"{int(there[wrong].reshape(-1)[0])} is not the number of a row on any rank; they begin with 0")


def _add_rows(target: Array, ids: Array, rows: Array) -> None:
    """Add rows to some rows of a buffer, to one of them also several times."""
    if hasattr(target, "index_add_"):
        target.index_add_(0, ids, rows)
    else:
        namespace(target).add.at(target, ids, rows)


def _device(array: Array) -> Any:
    return "cpu" if isinstance(array, np.ndarray) else array.device
