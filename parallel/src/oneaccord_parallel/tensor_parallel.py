"""Tensor parallel layers: the weights of a layer divided among the ranks of a group.

Each function returns its result and a function ``vjp``, which takes the gradient of the loss with respect to that result and returns those
with respect to the inputs. A ``vjp`` may communicate: every rank calls it, in the same order. The layers and the pairs of operations that
they are made of are those of M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
2019, and, with the sequence divided between the layers, of V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from oneaccord.errors import SizeMismatchError, UsageError
from oneaccord_parallel import axes
from oneaccord_parallel.agreement import need_group
from oneaccord_parallel.arrays import Array, namespace, shape_of
from oneaccord_parallel.axes import chunks, part, value

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = [
    "Vjp",
    "column_linear",
    "copy_to",
    "gather_from",
    "gather_sequence",
    "reduce_from",
    "reduce_scatter_sequence",
    "row_linear",
    "scatter_to",
    "shard_of",
]

T = TypeVar("T")


class Vjp(Generic[T]):
    """A backward pass: a function of the gradient of a result, and of its arrays from the forward pass.

    These arrays are not in a closure, so that torch's autograd can keep them in its own way: it frees them early, computes them again or
    moves them elsewhere, and notices their changes.

    Parameters
    ----------
    y
        The result.
    backward
        The function: ``backward(dy, *saved)`` returns the gradients of the inputs.
    *saved
        The arrays of the forward pass that it needs.

    Attributes
    ----------
    backward
        As given.
    saved
        As given, a tuple.
    """

    def __init__(self, y: Array, backward: Callable[..., T], *saved: Array) -> None:
        self._shape = shape_of(y)
        self.backward: Callable[..., T] = backward
        self.saved: tuple[Array, ...] = saved

    def __call__(self, dy: Array = 1) -> T:
        """Return the gradients of the inputs.

        Parameters
        ----------
        dy
            The gradient of the loss with respect to the result, of the result's shape. By default that of a result that is the loss.

        Raises
        ------
        SizeMismatchError
            The shape is another one.
        """
        dy = value(dy)
        if shape_of(dy) != self._shape:
            raise SizeMismatchError(
                f"the result has shape {self._shape} on this rank, so its gradient must have that shape too, not {shape_of(dy)}"
            )
        return self.backward(dy, *self.saved)


def shard_of(whole: Array, group: Group, axis: int = 0, counts: Sequence[int] | None = None) -> Array:
    """Return this rank's part of an array that every rank has, such as a weight or a bias.

    >>> w = mp.shard_of(weight, group, axis=1)  # columns, for column_linear
    >>> b = mp.shard_of(bias, group)

    Parameters
    ----------
    whole
        The array, of at least one axis.
    group
        The ranks among which it is divided.
    axis
        The axis that is divided.
    counts
        How many rows of that axis each rank gets. By default as `torch.chunk` divides: equal parts, the last ones smaller or empty.

    Returns
    -------
    ndarray
        A copy, so that the whole array can be freed.

    Raises
    ------
    SizeMismatchError
        ``counts`` does not have one number for each rank, or their sum is not the size of the axis.
    UsageError
        The array does not have that axis.
    """
    need_group(group)
    whole = value(whole, takes_leaves=True)
    axis = axis_of(whole, axis)
    mine = part(whole, axis, _counts_of_whole(shape_of(whole)[axis], group, counts), group.rank)
    return namespace(mine).asarray(mine, copy=True)


# The pairs: each function is the other one's vjp


def copy_to(
    x: Array, group: Group, *, reproducible: bool | None = True, timeout_s: float | None = None
) -> tuple[Array, Vjp[Array]]:
    """Let every rank use an array that all have: forward the array itself, backward the sum of the gradients of all ranks.

    Parameters
    ----------
    x
        Any shape, the same array on all ranks.
    group
        The ranks that use it.
    reproducible
        Whether sums of floats have the same bits for every backend and size: see `Group.all_reduce`.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    y
        ``x`` itself, not a copy.
    vjp
        ``vjp(dy)`` returns ``dx``, the same on all ranks.
    """
    need_group(group)
    x = value(x)
    return x, Vjp(x, lambda dy: _all_reduce(dy, group, reproducible, timeout_s))


def reduce_from(
    x: Array, group: Group, *, reproducible: bool | None = True, timeout_s: float | None = None
) -> tuple[Array, Vjp[Array]]:
    """Add up the arrays of all ranks: forward the sum, backward the gradient itself.

    Parameters
    ----------
    x
        This rank's summand, of the same shape on all ranks.
    group, reproducible, timeout_s
        As for `copy_to`.

    Returns
    -------
    y
        The sum, on every rank.
    vjp
        ``vjp(dy)`` returns ``dx``, which is ``dy``. ``dy`` is the same on all ranks.
    """
    need_group(group)
    y = _all_reduce(value(x), group, reproducible, timeout_s)
    return y, Vjp(y, lambda dy: dy)


def gather_from(
    x: Array, group: Group, axis: int = -1, counts: Sequence[int] | None = None, *, timeout_s: float | None = None
) -> tuple[Array, Vjp[Array]]:
    """Join the parts of all ranks: forward the whole array, backward this rank's part of the gradient.

    Parameters
    ----------
    x
        This rank's part.
    group
        The ranks that have the parts.
    axis
        The axis along which the parts are joined; their other axes are alike.
    counts
        The number of rows of that axis on each rank, the same list on all ranks. By default the ranks exchange them, in a small call.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    y
        The whole array, on every rank.
    vjp
        ``vjp(dy)`` returns ``dx``, of the shape of ``x``. ``dy`` is the same on all ranks; if each rank has a summand of it, use `gather_sequence`
        instead.

    Raises
    ------
    SizeMismatchError
        ``counts`` does not have one number for each rank, or this rank's is not the size of its part.
    UsageError
        The array does not have that axis.
    """
    need_group(group)
    x = value(x)
    axis = axis_of(x, axis)
    sizes = counts_of_parts(shape_of(x)[axis], group, counts, timeout_s)
    y = axes.all_gather(x, group, axis, sizes, timeout_s=timeout_s)
    return y, Vjp(y, lambda dy: part(dy, axis, sizes, group.rank))


def scatter_to(
    x: Array, group: Group, axis: int = -1, counts: Sequence[int] | None = None, *, timeout_s: float | None = None
) -> tuple[Array, Vjp[Array]]:
    """Divide an array that all ranks have: forward this rank's part, backward the whole gradient, joined from all ranks.

    Parameters
    ----------
    x
        The whole array, the same on all ranks.
    group
        The ranks among which it is divided.
    axis
        The axis that is divided.
    counts
        How many rows of that axis each rank gets. By default as `shard_of` divides.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    y
        This rank's part, as a view if possible.
    vjp
        ``vjp(dy)`` returns ``dx``, the same on all ranks.

    Raises
    ------
    SizeMismatchError, UsageError
        As for `shard_of`.
    """
    need_group(group)
    x = value(x)
    axis = axis_of(x, axis)
    sizes = _counts_of_whole(shape_of(x)[axis], group, counts)
    y = part(x, axis, sizes, group.rank)
    return y, Vjp(y, lambda dy: axes.all_gather(dy, group, axis, sizes, timeout_s=timeout_s))


def gather_sequence(
    x: Array,
    group: Group,
    axis: int = 0,
    counts: Sequence[int] | None = None,
    *,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[Array]]:
    """Join the parts of a sequence before each rank uses it in another way: backward the gradients of all ranks are added and divided.

    Parameters
    ----------
    x, group, axis, counts, timeout_s
        As for `gather_from`.
    reproducible
        As for `copy_to`.

    Returns
    -------
    y
        The whole array, on every rank.
    vjp
        ``vjp(dy)`` returns ``dx``: this rank's part of the sum of the ``dy`` of all ranks.

    Raises
    ------
    SizeMismatchError, UsageError
        As for `gather_from`.
    """
    need_group(group)
    x = value(x)
    axis = axis_of(x, axis)
    sizes = counts_of_parts(shape_of(x)[axis], group, counts, timeout_s)
    y = axes.all_gather(x, group, axis, sizes, timeout_s=timeout_s)
    return y, Vjp(y, lambda dy: axes.reduce_scatter(dy, group, axis, sizes, reproducible=reproducible, timeout_s=timeout_s))


def reduce_scatter_sequence(
    x: Array,
    group: Group,
    axis: int = 0,
    counts: Sequence[int] | None = None,
    *,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[Array]]:
    """Add up the arrays of all ranks and divide the sum along the sequence: backward the gradients are joined.

    Parameters
    ----------
    x
        This rank's summand, of the same shape on all ranks.
    group, axis, counts, timeout_s
        As for `scatter_to`.
    reproducible
        As for `copy_to`.

    Returns
    -------
    y
        This rank's part of the sum.
    vjp
        ``vjp(dy)`` returns ``dx``: the ``dy`` of all ranks, joined.

    Raises
    ------
    SizeMismatchError, UsageError
        As for `scatter_to`.
    """
    need_group(group)
    x = value(x)
    axis = axis_of(x, axis)
    sizes = _counts_of_whole(shape_of(x)[axis], group, counts)
    y = axes.reduce_scatter(x, group, axis, sizes, reproducible=reproducible, timeout_s=timeout_s)
    return y, Vjp(y, lambda dy: axes.all_gather(dy, group, axis, sizes, timeout_s=timeout_s))


# The layers


def column_linear(
    x: Array,
    w: Array,
    b: Array | None,
    group: Group,
    gather_output: bool = False,
    *,
    counts: Sequence[int] | None = None,
    sequence_axis: int | None = None,
    sequence_counts: Sequence[int] | None = None,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[tuple[Array, Array, Any]]]:
    """Compute ``x @ w + b`` if each rank has some columns of the weight.

    Parameters
    ----------
    x
        Shape ``(..., k)``, the same array on all ranks; with ``sequence_axis`` this rank's part of it.
    w
        This rank's columns of the weight, shape ``(k, n of this rank)``; n may differ from rank to rank, and may be 0.
    b
        This rank's part of the bias, shape ``(n of this rank,)``; None for no bias.
    group
        The ranks that share the layer.
    gather_output
        Whether every rank gets all columns of the result. Otherwise each gets its own, as `row_linear` takes them.
    counts
        With ``gather_output``, the number of columns on each rank. By default the ranks exchange them, in a small call.
    sequence_axis
        The axis of ``x`` that is divided among the ranks (sequence parallel), such as 0. It is joined before the product, in the forward pass and
        again for the gradient of the weight, so that no rank keeps the whole of ``x``.
    sequence_counts
        With ``sequence_axis``, the number of its rows on each rank. By default the ranks exchange them, in a small call.
    reproducible
        Whether sums of floats have the same bits for every backend and size: see `Group.all_reduce`.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    y
        Shape ``(..., n of this rank)``, or with ``gather_output`` ``(..., n)``.
    vjp
        ``vjp(dy)`` returns ``dx, dw, db``, of the shapes of ``x``, ``w`` and ``b``; ``db`` is None without a bias. With ``gather_output``, ``dy`` is the
        same on all ranks.

    Raises
    ------
    SizeMismatchError
        The shapes do not fit, or ``counts`` or ``sequence_counts`` do not.
    UsageError
        ``x`` does not have that sequence axis, or it is the last one; or ``x`` and ``w`` are of two libraries.
    """
    need_group(group)
    x, (w, b) = value(x), _weights(w, b)
    _check_input(x, w)
    along = sequence_axis_of(x, sequence_axis)
    if along is None:
        whole, enter = copy_to(x, group, reproducible=reproducible, timeout_s=timeout_s)
    else:
        sequence_counts = counts_of_parts(shape_of(x)[along], group, sequence_counts, timeout_s)
        whole, enter = gather_sequence(x, group, along, sequence_counts, reproducible=reproducible, timeout_s=timeout_s)
    y = whole @ w if b is None else whole @ w + b
    leave: Callable[[Array], Array] = value
    has_bias = b is not None
    if gather_output:
        y, leave = gather_from(y, group, -1, counts, timeout_s=timeout_s)

    def backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Any]:
        dy = leave(dy)
        inputs = x if along is None else axes.all_gather(x, group, along, sequence_counts or (), timeout_s=timeout_s)
        return enter(dy @ w.T), *_of_weights(inputs, dy, has_bias)

    return y, Vjp(y, backward, x, w)


def row_linear(
    x: Array,
    w: Array,
    b: Array | None,
    group: Group,
    input_is_sharded: bool = True,
    *,
    counts: Sequence[int] | None = None,
    sequence_axis: int | None = None,
    sequence_counts: Sequence[int] | None = None,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> tuple[Array, Vjp[tuple[Array, Array, Any]]]:
    """Compute ``x @ w + b`` if each rank has some rows of the weight; the bias is added once, to the sum.

    Parameters
    ----------
    x
        Shape ``(..., k of this rank)``: this rank's columns, as `column_linear` gives them. Without ``input_is_sharded``, shape ``(..., k)``, the same array
        on all ranks.
    w
        This rank's rows of the weight, shape ``(k of this rank, n)``; k may differ from rank to rank, and may be 0.
    b
        The whole bias, shape ``(n,)``, the same on all ranks; None for no bias.
    group
        The ranks that share the layer.
    input_is_sharded
        Whether ``x`` has this rank's columns only.
    counts
        Without ``input_is_sharded``, the number of rows of the weight on each rank. By default the ranks exchange them, in a small call.
    sequence_axis
        The axis of the result that is divided among the ranks (sequence parallel), such as 0.
    sequence_counts
        With ``sequence_axis``, how many rows of it each rank gets. By default as `shard_of` divides.
    reproducible, timeout_s
        As for `column_linear`.

    Returns
    -------
    y
        Shape ``(..., n)``, the same on all ranks; with ``sequence_axis`` this rank's part of it.
    vjp
        ``vjp(dy)`` returns ``dx, dw, db``, of the shapes of ``x``, ``w`` and ``b``; ``db`` is the same on all ranks, and None without a bias.

    Raises
    ------
    SizeMismatchError
        The shapes do not fit, or ``counts`` or ``sequence_counts`` do not.
    UsageError
        The result does not have that sequence axis, or it is the last one; or ``x`` and ``w`` are of two libraries.
    """
    need_group(group)
    x, (w, b) = value(x), _weights(w, b)
    divide: Callable[[Array], Array] = value
    has_bias = b is not None
    if not input_is_sharded:
        sizes = counts_of_parts(shape_of(w)[0], group, counts, timeout_s)
        x, divide = scatter_to(x, group, -1, sizes, timeout_s=timeout_s)
    _check_input(x, w)
    y, leave = sum_up(x @ w, group, sequence_axis_of(x, sequence_axis), sequence_counts, reproducible, timeout_s)

    def backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Any]:
        dy = leave(dy)
        return divide(dy @ w.T), *_of_weights(x, dy, has_bias)

    return (y if b is None else y + b), Vjp(y, backward, x, w)


def _of_weights(x: Array, dy: Array, has_bias: bool) -> tuple[Array, Any]:
    """Return the gradients of a weight and of a bias."""
    dy = _rows(dy)
    return _rows(x).T @ dy, namespace(dy).sum(dy, axis=0, dtype=dy.dtype) if has_bias else None


def _rows(array: Array) -> Array:
    *outer, last = shape_of(array)
    return namespace(array).reshape(array, (math.prod(outer), last))


def _all_reduce(array: Array, group: Group, reproducible: bool | None, timeout_s: float | None) -> Array:
    return group.all_reduce(array, reproducible=reproducible, timeout_s=timeout_s)


def sum_up(
    x: Array,
    group: Group,
    sequence_axis: int | None,
    sequence_counts: Sequence[int] | None,
    reproducible: bool | None,
    timeout_s: float | None,
) -> tuple[Array, Vjp[Array]]:
    """Add up the arrays of all ranks, and with a sequence axis divide the sum along it."""
    if sequence_axis is None:
        return reduce_from(x, group, reproducible=reproducible, timeout_s=timeout_s)
    return reduce_scatter_sequence(x, group, sequence_axis, sequence_counts, reproducible=reproducible, timeout_s=timeout_s)


def _weights(w: Array, b: Array | None) -> tuple[Array, Array | None]:
    w, b = value(w), None if b is None else value(b)
    if len(shape_of(w)) != 2 or (b is not None and shape_of(b) != shape_of(w)[1:]):
        bias = "" if b is None else f" and {shape_of(b)}"
        raise SizeMismatchError(f"a weight must have shape (k, n) and a bias (n,), but {shape_of(w)}{bias} were given")
    return w, b


def _check_input(x: Array, w: Array) -> None:
    if namespace(x) is not namespace(w):
        raise UsageError(f"x and the weight must be arrays of one library, but {type(x)!r} and {type(w)!r} were given")
    if not shape_of(x) or shape_of(x)[-1] != shape_of(w)[0]:
        raise SizeMismatchError(
            f"x @ w needs shapes (..., k) and (k, n), but {shape_of(x)} and {shape_of(w)} are given on this rank; the weight of a "
            "torch.nn.Linear is (n, k): give weight.T"
        )


def axis_of(array: Array, axis: Any) -> int:
    ndim = len(shape_of(array))
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise UsageError(f"an array of shape {shape_of(array)} has no axis {axis!r}")
    return int(axis) % ndim


def sequence_axis_of(array: Array, axis: int | None) -> int | None:
    found = None if axis is None else axis_of(array, axis)
    if found is not None and found == len(shape_of(array)) - 1:
        raise UsageError(
            f"the sequence axis of an array of shape {shape_of(array)} must be an axis before the last, not {axis}"
        )
    return found


def _counts_of_whole(size: int, group: Group, counts: Sequence[int] | None) -> tuple[int, ...]:
    """Return how a whole axis is divided."""
    given = chunks(size, group.world_size) if counts is None else _numbers(counts, group)
    if sum(given) != size:
        raise SizeMismatchError(
            f"counts must be the numbers of rows of {group.world_size} ranks, with the sum {size}, not {list(given)}"
        )
    return given


def counts_of_parts(size: int, group: Group, counts: Sequence[int] | None, timeout_s: float | None) -> tuple[int, ...]:
    """Return how many rows each rank has, of which this one has ``size``."""
    if counts is None:
        told = group.all_gather(np.array([size]), timeout_s=timeout_s)
        return tuple(int(each) for each in told)
    given = _numbers(counts, group)
    if given[group.rank] != size:
        raise SizeMismatchError(
            f"counts must be the numbers of rows of all ranks, of which rank {group.rank} has {size}, not {list(given)}"
        )
    return given


def _numbers(counts: Any, group: Group) -> tuple[int, ...]:
    """Return a number of rows for each rank."""
    try:
        given = [*counts]
    except TypeError:
        given = []
    if len(given) != group.world_size or not all(isinstance(each, int | np.integer) and each >= 0 for each in given):
        raise SizeMismatchError(
            f"counts must be an integer of at least 0 for each of the {group.world_size} ranks, not {counts!r}"
        )
    return tuple(map(int, given))
