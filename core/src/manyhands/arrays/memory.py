"""From what users give to memory that can be sent, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from manyhands.arrays.dtypes import check_dtype
from manyhands.arrays.libraries import WAYS_OUT, DeviceArray, library_of
from manyhands.arrays.libraries.shared import refuse_overlap
from manyhands.arrays.low_precision import divide as divide_low
from manyhands.errors import DTypeError, LayoutError, OutOfMemoryError, SizeMismatchError, UnsupportedError

__all__ = [
    "ALIGNMENT",
    "NOTHING",
    "Array",
    "aligned_empty",
    "bytes_of",
    "check_out",
    "contiguous",
    "copy_of",
    "divide",
    "handed_over",
    "new_array",
    "placed",
    "quiet",
    "to_array",
]

Array = npt.NDArray[Any]

ALIGNMENT: int = 64
"""Bytes of a line of the cache."""

_BYTE = np.dtype(np.uint8)

NOTHING: Array = np.empty(0, np.uint8)
"""The array of a call that has none."""


def to_array(value: npt.ArrayLike) -> Array:
    """Return ``value`` as a NumPy array of a dtype that can travel, without a copy where it is one already.

    Parameters
    ----------
    value
        A NumPy array of any shape, a scalar, anything that NumPy reads (the buffer protocol, ``__array__``), or an array in host memory of
        torch, JAX or another library that speaks DLPack.

    Raises
    ------
    DTypeError
        Its dtype cannot travel.
    LayoutError
        It is not an array of numbers.
    UnsupportedError
        It lives on a GPU.
    """
    if type(value) is not np.ndarray:
        value = _foreign_array(value)
    check_dtype(value.dtype)
    return value


def _foreign_array(value: Any) -> Array:
    library = library_of(value)
    if library is not None:
        array = library.read(value)
        if isinstance(array, DeviceArray):
            raise UnsupportedError(f"a {type(value).__name__} on a GPU cannot be moved here, only host memory can: {WAYS_OUT}")
        return array
    if _is_masked(value) and np.ma.is_masked(value):
        raise LayoutError(
            "a masked array cannot be sent: its mask would be lost; use x.filled(value), or send data and mask apart"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise LayoutError(f"{type(value).__name__} cannot be read as an array: {error}") from error


def _is_masked(value: Any) -> bool:
    # NumPy loads numpy.ma when it is first named; where it was not, or another thread is about to, there are no masked arrays.
    return isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return memory of undefined content, for a result or for what is on its way there.

    Raises
    ------
    OutOfMemoryError
        There is none.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # NumPy's word for more bytes than an address can count
        raise OutOfMemoryError(
            f"there is no memory for an array of {math.prod(shape) * dtype.itemsize:,} bytes, {dtype}{list(shape)}: give smaller arrays, in "
            "several calls, or fewer ranks to each host"
        ) from None


def copy_of(array: Array) -> Array:
    """Return a copy in C order; raises as `new_array`."""
    copy = new_array(array.shape, array.dtype)
    copy[...] = array
    return copy


def contiguous(array: Array) -> Array:
    """Return ``array`` itself where it is C-contiguous, else a copy, so that no element changes its place; raises as `new_array`."""
    return array if array.flags.c_contiguous else copy_of(array)


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse an ``out=`` that cannot take a result of this shape and dtype.

    Raises
    ------
    DTypeError
        Its dtype differs.
    LayoutError
        It is no NumPy array, or read-only, or its elements share memory.
    SizeMismatchError
        Its shape differs.
    """
    if not isinstance(out, np.ndarray) or isinstance(out, np.matrix) or _is_masked(out):
        raise LayoutError(
            f"out= must be a NumPy array, and a {type(out).__name__} was given: give its memory, with np.asarray(x)"
        )
    if out.dtype != dtype:
        raise DTypeError(f"out= has dtype {out.dtype}, and the result has {dtype}")
    if out.shape != shape:
        raise SizeMismatchError(f"out= has shape {out.shape}, and the result has {shape}")
    if not out.flags.writeable:
        raise LayoutError("out= is read-only")
    if not out.flags.c_contiguous:
        refuse_overlap(out.shape, out.strides, out.itemsize)


def placed(
    source: Array, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None, *, may_alias: bool
) -> tuple[Array, Array]:
    """Return C-contiguous memory to read from and to write to, for a call whose result goes to ``out`` if that is given.

    Where the two overlap, the source is copied first, unless they are the very same memory and ``may_alias`` allows that.

    Raises
    ------
    DTypeError, LayoutError, SizeMismatchError
        As `check_out`.
    OutOfMemoryError
        As `new_array`.
    """
    source = contiguous(source)
    if out is None:
        return source, new_array(shape, dtype)
    check_out(out, shape, dtype)
    if not out.flags.c_contiguous:
        return source, new_array(shape, dtype)
    if source is out and may_alias:
        return source, out
    if source.size and np.may_share_memory(source, out):
        same = source.size == out.size and source.ctypes.data == out.ctypes.data
        if not (same and may_alias):
            source = copy_of(source)
    return source, np.asarray(out)


def handed_over(result: Array, out: Array | None) -> Array:
    """Return the result in ``out`` where that is given, copied there where it could not be written directly."""
    if out is None or result is out:
        return result
    if not np.may_share_memory(result, out):
        out[...] = result
    return out


def divide(total: Array, count: int) -> None:
    """Turn sums into means in place, rounded once; as in reductions, no setting of the program makes that an error."""
    with np.errstate(all="ignore"):
        if total.dtype.itemsize > 2:
            np.true_divide(total, total.dtype.type(count), out=total)
        else:
            divide_low(total, count)


def quiet(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Return what combines two arrays as ``combine`` does, whatever a thread has told NumPy to do about floating-point errors."""
    return partial(_quietly, combine)


def _quietly(combine: Callable[..., Any], left: Array, right: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        combine(left, right, out=out)


def aligned_empty(nbytes: int) -> Array:
    """Return ``nbytes`` bytes of undefined content that begin where a line of the cache does, which makes them faster to add.

    Raises as `new_array`.
    """
    memory = new_array((nbytes + ALIGNMENT,), _BYTE)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array as a one-dimensional memoryview of bytes, without a copy."""
    return memoryview(cast("Any", array.reshape(-1).view(np.uint8)))
