"""Turn users' values into memory that can be sent, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.arrays.libraries import WAYS_OUT, DeviceArray, library_of
from oneaccord.arrays.libraries.shared import refuse_overlap
from oneaccord.arrays.low_precision import divide as divide_low
from oneaccord.errors import DTypeError, LayoutError, OutOfMemoryError, SizeMismatchError, UnsupportedError

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
    "given",
    "handed_over",
    "new_array",
    "placed",
    "quiet",
    "to_array",
]

Array = npt.NDArray[Any]

ALIGNMENT: int = 64
"""Bytes of a cache line."""

_BYTE = np.dtype(np.uint8)

NOTHING: Array = np.empty(0, np.uint8)
"""The array of a call that has no array."""


def to_array(value: npt.ArrayLike) -> Array:
    """Return ``value`` as a NumPy array of a dtype that can travel, without a copy if it is one already.

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
            raise UnsupportedError(
                f"a {type(value).__name__} on a GPU cannot be sent, because this backend moves only host memory: {WAYS_OUT}"
            )
        return array
    if _is_masked(value) and np.ma.is_masked(value):
        raise LayoutError(
            "a masked array cannot be sent, because its mask would be lost: use x.filled(value), or send data and mask separately"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise LayoutError(f"{type(value).__name__} cannot be read as an array: {error}") from error


def _is_masked(value: Any) -> bool:
    # NumPy loads numpy.ma at its first use. If it is not loaded, or another thread is just loading it, there are no masked arrays.
    return isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return memory of undefined content, for a result or for data on its way there.

    Raises
    ------
    OutOfMemoryError
        There is not enough memory.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # NumPy raises this for more bytes than an address can count
        raise OutOfMemoryError(
            f"there is no memory for an array of {math.prod(shape) * dtype.itemsize:,} bytes, {dtype}{list(shape)}: give smaller arrays, in "
            "several calls, or run fewer ranks on each host"
        ) from None


def copy_of(array: Array) -> Array:
    """Return a copy in C order; raises as `new_array`."""
    copy = new_array(array.shape, array.dtype)
    copy[...] = array
    return copy


def contiguous(array: Array) -> Array:
    """Return ``array`` itself if it is C-contiguous, otherwise a copy with each element in its place; raises as `new_array`."""
    return array if array.flags.c_contiguous else copy_of(array)


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise an error if ``out=`` cannot take a result of this shape and dtype.

    Raises
    ------
    DTypeError
        Its dtype differs.
    LayoutError
        It is not a NumPy array, or it is read-only, or its elements share memory.
    SizeMismatchError
        Its shape differs.
    """
    if not isinstance(out, np.ndarray) or isinstance(out, np.matrix) or _is_masked(out):
        raise LayoutError(f"out= must be a NumPy array, not a {type(out).__name__}: give its memory, with np.asarray(x)")
    if out.dtype != dtype:
        raise DTypeError(f"out= has dtype {out.dtype}, but the result has {dtype}")
    if out.shape != shape:
        raise SizeMismatchError(f"out= has shape {out.shape}, but the result has {shape}")
    if not out.flags.writeable:
        raise LayoutError("out= is read-only")
    if not out.flags.c_contiguous:
        refuse_overlap(out.shape, out.strides, out.itemsize)


def placed(
    source: Array, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None, *, may_alias: bool
) -> tuple[Array, Array]:
    """Return C-contiguous memory to read from and to write to, for a call whose result goes to ``out`` if that is given.

    If the two overlap, the source is copied first, unless they are the very same memory and ``may_alias`` allows that.

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
    """Return the result in ``out`` if that is given, copied there if it could not be written directly."""
    if out is None or result is out:
        return result
    if not np.may_share_memory(result, out):
        out[...] = result
    return out


def given(out: Array | None, give: Callable[[Array], Any] | None, result: Array) -> Any:
    """Return the result for the caller: in ``out``, and as the array of the caller's library that ``give`` makes of it."""
    result = handed_over(result, out)
    return result if give is None else give(result)


def divide(total: Array, count: int) -> None:
    """Turn sums into means in place, rounded once; as in reductions, no setting of the program turns that into an error."""
    with np.errstate(all="ignore"):
        if total.dtype.itemsize > 2:
            np.true_divide(total, total.dtype.type(count), out=total)
        else:
            divide_low(total, count)


def quiet(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that combines as ``combine`` does, whatever a thread has set for NumPy's floating-point errors."""
    return partial(_quietly, combine)


def _quietly(combine: Callable[..., Any], left: Array, right: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        combine(left, right, out=out)


def aligned_empty(nbytes: int) -> Array:
    """Return ``nbytes`` bytes of undefined content, aligned to a cache line, which makes them faster to add.

    Raises as `new_array`.
    """
    memory = new_array((nbytes + ALIGNMENT,), _BYTE)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array as a one-dimensional memoryview of bytes, without a copy."""
    return memoryview(cast("Any", array.reshape(-1).view(np.uint8)))
