"""Arithmetic between a buffer and a number, from one dtype to another, rounded once if the library can."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneaccord_parallel.arrays import Array, dtype_of, itemsize, namespace, place_of, readable, shape_of

__all__ = ["add_scaled", "copy_divided", "copy_scaled", "copy_to", "empty_like"]


def _quiet() -> np.errstate:
    """Return a block without warnings: the code that scales the loss checks whether a gradient is finite."""
    return np.errstate(all="ignore")


def copy_scaled(target: Array, source: Array, factor: float) -> None:
    """Set ``target = source * factor``; in place, if both are the same buffer."""
    if factor == 1:
        if target is not source:
            _assign(target, source)
    elif _is_torch(target):
        if target.dtype == source.dtype:
            _torch().mul(source, factor, out=target)
        elif _wider(target, source):
            target.copy_(source).mul_(factor)
        else:
            target.copy_(source * factor)
    else:
        with _quiet():
            _library(target).multiply(source, factor, out=target, dtype=_between(target, source), casting="unsafe")


def add_scaled(target: Array, source: Array, factor: float) -> None:
    """Set ``target += source * factor``: the product is rounded first, in the wider of the two dtypes."""
    if _is_torch(target):
        wide = source.to(target.dtype) if _wider(target, source) else source
        target.add_(wide if factor == 1 else wide * factor)
    else:
        library, between = _library(target), _between(target, source)
        with _quiet():
            product = source if factor == 1 else library.multiply(source, factor, dtype=between, casting="unsafe")
            library.add(target, product, out=target, dtype=between, casting="unsafe")


def copy_divided(target: Array, source: Array, divisor: float) -> None:
    """Set ``target = source / divisor``; in place, if both are the same buffer."""
    if divisor == 1:
        if target is not source:
            _assign(target, source)
    elif _is_torch(target):
        # By a number, torch's kernels for GPUs multiply with the reciprocal, which is rounded twice.
        by = divisor if source.device.type == "cpu" else source.new_tensor(divisor)
        if target.dtype == source.dtype:
            _torch().div(source, by, out=target)
        else:
            target.copy_(source / by)
    else:
        with _quiet():
            _library(target).true_divide(source, divisor, out=target, dtype=_between(target, source), casting="unsafe")


def empty_like(template: Array, shape: tuple[int, ...]) -> Array:
    """Return a buffer of undefined content with the dtype and the memory of ``template``: a tensor of torch for one of torch."""
    buffer = readable(template)
    if _is_torch(buffer):
        return buffer.new_empty(shape)
    if isinstance(buffer, np.ndarray):
        return np.empty(shape, buffer.dtype)
    return namespace(buffer).empty(shape, dtype=buffer.dtype, device=buffer.device)


def copy_to(template: Array, array: Array) -> Array:
    """Return a copy of an array, of any library, as a buffer in the memory of ``template``; the dtype stays."""
    buffer, array = readable(template), readable(array)
    if place_of(buffer) == place_of(array):
        copy = empty_like(array, shape_of(array))
        copy[...] = array
        return copy
    if isinstance(buffer, np.ndarray):
        return np.array(array.get() if hasattr(array, "get") else array.cpu().numpy())  # CuPy converts nothing unasked
    if _is_torch(array) and _is_torch(buffer):
        return array.to(buffer.device)
    return namespace(buffer).asarray(array, device=buffer.device, copy=True)


def _assign(target: Array, source: Array) -> None:
    if _is_torch(target):
        target.copy_(source)
    else:
        with _quiet():
            target[...] = source


def _wider(one: Array, other: Array) -> bool:
    return itemsize(dtype_of(one)) > itemsize(dtype_of(other))


def _between(target: Array, source: Array) -> Any:
    """Return the dtype to calculate in: that of both, or the wider one, and never less than float32."""
    if target.dtype == source.dtype and target.dtype.itemsize > 2:
        return target.dtype
    dtype = source.dtype if _wider(source, target) else target.dtype
    return dtype if dtype.itemsize > 2 else np.dtype(np.float32)


def _is_torch(array: Array) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def _library(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else namespace(array)


def _torch() -> Any:
    import torch

    return torch
