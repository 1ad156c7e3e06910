"""Batch normalisation over the batches of all ranks, forward and backward (Ioffe and Szegedy, arXiv:1502.03167)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import array_api_compat
import numpy as np

from oneaccord import Group
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.arrays import (
    Array,
    dtype_of,
    like,
    namespace,
    need_no_graph,
    readable,
    same_place,
    shape_of,
    writable,
)
from oneaccord_parallel.trees import register_node

__all__ = ["BatchNormCache", "RunningStats", "batch_norm", "batch_norm_backward"]

_WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}
"""The dtype in which elements of each dtype are computed."""


class RunningStats:
    """The running mean and variance of the channels of a batch normalisation: a node of trees, whose leaves are three arrays.

    Parameters
    ----------
    channels
        The number of channels, or their shape if they are along several axes.
    like
        An array, such as gamma, whose library, device and dtype the statistics have; float32 if it has 16 bits. By default they are
        NumPy's, and float64.

    Attributes
    ----------
    mean
        The mean of each channel, at first 0.
    var
        The unbiased variance of each channel, at first 1.
    count
        How many batches were seen: an integer, shape ``()``.
    """

    def __init__(self, channels: int | Sequence[int], like: Array | None = None) -> None:
        shape = tuple(channels) if isinstance(channels, Sequence) else (channels,)
        template = np.zeros(()) if like is None else like
        dtype = "float64" if dtype_of(template) == "float64" else "float32"
        self.mean: Array = _full(template, shape, dtype, 0)
        self.var: Array = _full(template, shape, dtype, 1)
        self.count: Array = _full(template, (), "int64", 0)

    def __repr__(self) -> str:
        return f"RunningStats(mean={self.mean!r}, var={self.var!r}, count={self.count!r})"


register_node(RunningStats, ("mean", "var", "count"))


@dataclass(frozen=True, slots=True)
class _Channels:
    """Which axes of an array are the channels.

    All sums run over the others, and over an axis of extent 1 that is put before them, so that there always is one.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    ndim: int

    @classmethod
    def of(cls, x: Array, axis: int | Sequence[int]) -> _Channels:
        extents = shape_of(x)
        given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
        axes = tuple(sorted({number + len(extents) if number < 0 else number for number in given}))
        if len(axes) != len(given) or not all(0 <= number < len(extents) for number in axes):
            raise UsageError(f"axis must name axes of an array of shape {extents}, each once, not {axis!r}")
        return cls(axes, tuple(extents[number] for number in axes), len(extents))

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that are summed over, of an array with one more axis in front."""
        return (0, *(number + 1 for number in range(self.ndim) if number not in self.axes))

    def wide(self, array: Array) -> Array:
        """Return a copy in the dtype of computations, with one more axis in front."""
        buffer = readable(array)
        return _cast(buffer, _WIDE[dtype_of(buffer)])[None]

    def sum(self, wide: Array) -> Array:
        """Return the sum for each channel, in float64, flat."""
        xp = namespace(wide)
        return xp.sum(wide, axis=self.others, dtype=xp.float64).reshape(-1)

    def spread(self, flat: Array, wide: Array) -> Array:
        """Return one number for each channel so that it broadcasts against an array, in its dtype."""
        extents = [1] * (self.ndim + 1)
        for number, extent in zip(self.axes, self.shape, strict=True):
            extents[number + 1] = extent
        return _cast(flat, dtype_of(wide)).reshape(extents)


@dataclass(frozen=True, slots=True)
class BatchNormCache:
    """The part of the forward pass that `batch_norm_backward` needs; opaque."""

    x: Array
    gamma: Array | None
    beta: Array | None
    group: Group | None
    channels: _Channels
    mean: Array
    inverse: Array
    count: float
    training: bool


def batch_norm(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    group: Group | None,
    axis: int | Sequence[int] = 1,
    eps: float = 1e-5,
    running: RunningStats | None = None,
    momentum: float | None = 0.1,
    training: bool = True,
    *,
    timeout_s: float | None = None,
) -> tuple[Array, BatchNormCache]:
    """Normalise each channel by its mean and variance over the batches of all ranks: ``(x - mean) / sqrt(var + eps) * gamma + beta``.

    The result is that of one process with the batches of all ranks. The ranks exchange mean, sum of squared differences and number of
    elements by one all_gather, and each merges them in the order of ranks (Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979), so that a large mean costs no accuracy. 16-bit floats are computed in float32, float32
    in float64; all sums are in float64.

    Parameters
    ----------
    x
        This rank's batch, of any number of axes; the extents that are no channels may differ between ranks, and be 0. A rank without a
        sample takes part as well. The backward pass reads it again, so leave it as it is until then.
    gamma, beta
        Scale and shift of each channel, of the shape of the channels: ``(x.shape[1],)``, unless ``axis`` says otherwise. None for 1 and 0.
    group
        The ranks, or None for this one alone.
    axis
        The axis of the channels, or several; they may count from the end.
    eps
        The number that is added to the variance.
    running
        The statistics that ``training`` updates, the same on all ranks, and that are used without it. They are written in place
        if possible, and replaced if they are of JAX.
    momentum
        How much a batch counts in the running statistics: ``running = (1 - momentum) * running + momentum * batch``, as in torch. None for
        the mean of all batches.
    training
        False to normalise by ``running`` instead of the batch, without any message.
    timeout_s
        Seconds that the all_gather may last.

    Returns
    -------
    tuple
        The normalised batch, of the shape, dtype and library of ``x``, and the cache for `batch_norm_backward`.

    Raises
    ------
    UsageError
        ``axis`` names no axes of ``x``; there is nothing to normalise by, without ``training`` and ``running``; or ``running`` is of
        another library than ``x``. On all ranks: all of them together have a single element for each channel, whose variance is not
        defined. ``running`` stays as it was.
    SizeMismatchError
        gamma, beta or ``running`` do not have the shape of the channels.
    DTypeError
        ``x`` is not of float16, bfloat16, float32 or float64.
    CollectiveMismatchError
        The ranks have other numbers of channels. Every rank raises it.
    """
    for each in (x, gamma, beta):
        need_no_graph(each)
    if dtype_of(readable(x)) not in _WIDE:
        raise DTypeError(f"batch_norm takes floats of 16, 32 or 64 bits, but x is {dtype_of(x)}")
    channels = _Channels.of(x, axis)
    parts = {"gamma": gamma, "beta": beta}
    if running is not None:
        parts |= {"running.mean": running.mean, "running.var": running.var}
    for name, part in parts.items():
        if part is not None and shape_of(part) != channels.shape:
            raise SizeMismatchError(f"{name} must have the shape of the channels, {channels.shape}, but has {shape_of(part)}")
        if part is not None and namespace(readable(part)) is not namespace(readable(x)):
            raise UsageError(f"{name} must be of the library of x: a {type(x).__name__}, not a {type(part).__name__}")
    values = channels.wide(x)
    if training:
        mean, squares, count = _merged(values, channels, group, timeout_s)
        if count == 1:
            raise UsageError("all ranks together have a single element for each channel: its variance is not defined")
        if running is not None and count:
            _update(running, mean, squares / (count - 1), momentum)
        var = squares / max(count, 1)
    elif running is not None:
        count = 0
        mean, var = (_cast(readable(part), "float64").reshape(-1) for part in (running.mean, running.var))
    else:
        raise UsageError(
            "without training there are no statistics for the normalisation; give running=, the statistics of the training"
        )
    inverse = 1 / (var + eps) ** 0.5
    values -= channels.spread(mean, values)
    values *= channels.spread(inverse if gamma is None else inverse * _flat(gamma), values)
    if beta is not None:
        values += channels.spread(_flat(beta), values)
    cache = BatchNormCache(x, gamma, beta, group, channels, mean, inverse, count, training)
    return _back(values[0], x), cache


def batch_norm_backward(
    dy: Array, cache: BatchNormCache, *, weight: float = 1.0, timeout_s: float | None = None
) -> tuple[Array, Array | None, Array | None]:
    """Return the gradients of `batch_norm` for its input, gamma and beta.

    Each element of a batch changes the outputs of all ranks, and so the losses of all. ``dx`` is the gradient of their weighted sum: with
    ``loss`` this rank's, it is that of sum(weight * loss) over all ranks, divided by this rank's weight. So pass the weight that
    `GradientSync` is given, and its results are the gradients of the mean over all samples. ``dgamma`` and ``dbeta`` are this rank's own
    part, as those of torch's SyncBatchNorm: let `GradientSync` reduce them with all others.

    Parameters
    ----------
    dy
        The gradient of this rank's loss for the output, of its shape.
    cache
        The result of `batch_norm`.
    weight
        The weight of this rank's loss, such as the number of its samples if the loss is their mean. Ranks with equal batches need none.
    timeout_s
        Seconds that the all_reduce may last. There is one for each call after a forward pass with ``training``, and else none.

    Returns
    -------
    tuple
        ``dx``, like the input; ``dgamma`` and ``dbeta``, like gamma and beta, or None for those that were None.

    Raises
    ------
    SizeMismatchError
        ``dy`` does not have the shape of the output.
    UsageError
        ``weight`` is negative, not finite, or 0 although this rank has samples: they changed the losses of the others.
    DTypeError
        ``dy`` is not of float16, bfloat16, float32 or float64.
    """
    channels, gamma = cache.channels, cache.gamma
    if shape_of(dy) != shape_of(cache.x):
        raise SizeMismatchError(f"dy must have the shape of the output, {shape_of(cache.x)}, but has {shape_of(dy)}")
    if dtype_of(readable(dy)) not in _WIDE:
        raise DTypeError(f"batch_norm_backward takes floats of 16, 32 or 64 bits, but dy is {dtype_of(dy)}")
    if not 0 <= weight < math.inf or (weight == 0 and 0 not in shape_of(dy)):
        raise UsageError(f"weight must be a positive number, or 0 on a rank without samples, not {weight!r}")
    given, normal = channels.wide(dy), channels.wide(cache.x)
    xp = namespace(normal)
    normal -= channels.spread(cache.mean, normal)
    normal *= channels.spread(cache.inverse, normal)
    own = xp.concat([channels.sum(given), channels.sum(given * normal)])
    size = math.prod(channels.shape)
    if cache.training:
        sums = own * weight
        if cache.group is not None:
            # NCCL has no order of its own choice, and gives all ranks the same bits.
            reproducible = True if same_place(sums, np.empty(0)) else None
            sums = cache.group.all_reduce(sums, reproducible=reproducible, timeout_s=timeout_s)
        means = sums / (max(cache.count, 1) * (weight or 1.0))
        given = given - channels.spread(means[:size], given)
        normal *= channels.spread(means[size:], normal)
        given = given - normal
    scale = cache.inverse if gamma is None else cache.inverse * _flat(gamma)
    dx = given * channels.spread(scale, given)
    dbeta, dgamma = own[:size].reshape(channels.shape), own[size:].reshape(channels.shape)
    return (
        _back(dx[0], cache.x),
        None if gamma is None else _back(dgamma, gamma),
        None if cache.beta is None else _back(dbeta, cache.beta),
    )


def _merged(values: Array, channels: _Channels, group: Group | None, timeout_s: float | None) -> tuple[Array, Array, float]:
    """Return mean and sum of squared differences of each channel, and the number of its elements, over all ranks."""
    xp = namespace(values)
    size = math.prod(channels.shape)
    extents = shape_of(values)
    count = math.prod([extents[number] for number in channels.others])
    # Differences from a number near the mean, in the dtype of computations: the difference of that number from the mean is subtracted afterwards.
    near = _cast(channels.sum(values) / max(count, 1), dtype_of(values))
    rest = values - channels.spread(near, values)
    left = channels.sum(rest) / max(count, 1)
    squares = channels.sum(rest * rest) - count * left * left
    mine = xp.concat([_cast(near, "float64") + left, squares, _full(left, (1,), "float64", count)])[None]
    all_ = mine if group is None else group.all_gather(mine, timeout_s=timeout_s)
    counts = all_[:, -1:]
    total = float(xp.sum(counts))
    about = xp.sum(counts * all_[:, :size], axis=0) / max(total, 1)
    rest = all_[:, :size] - about
    left = xp.sum(counts * rest, axis=0) / max(total, 1)
    squares = xp.sum(all_[:, size:-1] + counts * rest * rest, axis=0) - total * left * left
    return about + left, squares, total


def _update(running: RunningStats, mean: Array, var: Array, momentum: float | None) -> None:
    share = 1 / (int(running.count) + 1) if momentum is None else momentum
    running.mean = _assigned(running.mean, (1 - share) * _flat(running.mean) + share * mean)
    running.var = _assigned(running.var, (1 - share) * _flat(running.var) + share * var)
    running.count = _assigned(running.count, _cast(readable(running.count), "int64") + 1)


def _assigned(target: Array, value: Array) -> Array:
    """Return ``target`` with another value, in place if possible."""
    value = value.reshape(shape_of(target))
    if not writable(target):
        return _back(value, target)
    buffer = readable(target)
    buffer[...] = _cast(value, dtype_of(buffer))
    return target


def _flat(array: Array) -> Array:
    return _cast(readable(array), "float64").reshape(-1)


def _cast(buffer: Array, dtype: str) -> Array:
    """Return a copy of a buffer in another dtype."""
    xp = namespace(buffer)
    return xp.astype(buffer, getattr(xp, dtype))


def _back(buffer: Array, template: Array) -> Array:
    """Return a buffer in the dtype and the library of ``template``."""
    return like(namespace(buffer).astype(buffer, readable(template).dtype), template)


def _full(template: Array, shape: tuple[int, ...], dtype: str, value: float) -> Array:
    buffer = readable(template)
    xp = namespace(buffer)
    made = xp.full(shape, value, dtype=getattr(xp, dtype), device=array_api_compat.device(buffer))
    return like(made, template)
