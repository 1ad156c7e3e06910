"""Reductions of floats of 16 and 8 bits: the bits that NumPy's ufuncs give, in a fraction of their time.

NumPy adds float16 one number at a time, and its conversions between float16 and float32 are no faster. Here blocks that stay in the
cache go through operations on integers and float32, which use the vector unit:

- Move the exponent and mantissa of a float16 to their places in a float32: the result is its value times 2**-112. This holds for
subnormal numbers too. Their sum is rounded to 11 bits by an addition of integers.
- bfloat16 is the upper half of a float32, and ml_dtypes converts whole arrays fast.
- Floats of one sign are in the order of their bits, which gives minima and maxima.
- Two numbers of 8 bits are one index into a table of all results; one number of 16 bits, into a table of quotients.

A float32 has enough bits: rounding a sum or product of two such numbers first to float32 and then to 16 bits is the same as
rounding once (S. A. Figueroa, When is double rounding innocuous?, ACM SIGNUM Newsletter 30(3), 1995). The ufunc itself, block by
block, handles the other cases: NaN, possible overflow, and anything of which NumPy may warn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "compiled_combine", "divide", "fast_combine"]

Array = npt.NDArray[Any]
Kernel = Callable[[Array, Array, Array], bool]
"""Combines two blocks into a third, which may be one of them; returns False, having done nothing, if it must not."""

BLOCK: int = 1 << 16
"""Elements in a block. Each thread that reduces keeps 10 bytes of scratch memory for each."""

# How many elements an array must have before the fast way is the faster one, as measured. Minima of bfloat16 gain nothing.
_LEAST: dict[str, dict[np.ufunc, int]] = {
    "float16": {np.add: 6144, np.multiply: 1 << 14, np.minimum: 4096, np.maximum: 4096},
    "bfloat16": {np.add: 1 << 15, np.multiply: 1 << 15},
    **{
        f"float8_{kind}": dict.fromkeys((np.add, np.multiply, np.minimum, np.maximum), 2048)
        for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
    },
}
_LEAST_QUOTIENTS = 4096
_LEAST_COMPILED = 1024
_LEFT_BLOCK = 2048
"""Combines in C, and leaves the blocks that C may not combine."""


def fast_combine(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return a function that combines two arrays as a ufunc does, bit for bit, as fast as possible.

    Parameters
    ----------
    ufunc
        A binary ufunc of the dtype.
    dtype
        The dtype of both operands and of the result.

    Returns
    -------
    Callable
        To be called as ``combine(left, right, out=target)``. ``target`` may be one of the operands. NumPy's settings for floating-point
        errors (`numpy.errstate`) apply, once for each block; after an exception the content of ``target`` is undefined. It is
        the ufunc itself for dtypes that NumPy reduces well.
    """
    least = _LEAST.get(dtype.name, {}).get(ufunc)
    if least is None or dtype.type.__module__ not in ("numpy", "ml_dtypes"):
        return ufunc
    kernel = _kernel(ufunc, dtype)
    return ufunc if kernel is None else partial(_in_blocks, ufunc, kernel, least)


def compiled_combine(module: Any, combine: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Return the compiled form of the result of `fast_combine`, for programs of C, and the original.

    Parameters
    ----------
    module
        The module ``oneaccord_native``.
    combine
        The result of `fast_combine`, or any other function of its kind.

    Returns
    -------
    tuple
        A reduction of the module and a function; ``combine`` twice if there is no compiled form.
    """
    if not isinstance(combine, partial) or combine.func is not _in_blocks:
        return combine, combine
    ufunc, kernel, _ = combine.args
    low = module.Low(*_compiled_kernel(ufunc, kernel))
    return low, partial(_in_c, ufunc, low.combine)


def divide(total: Array, count: int) -> None:
    """Divide an array of floats of at most 16 bits by a number of ranks, in place.

    The quotient is that of float32, rounded to the dtype: the number of ranks need not have an exact value in the dtype.

    Parameters
    ----------
    total
        An array of any shape.
    count
        A positive number.
    """
    if total.size < _LEAST_QUOTIENTS or not _is_plain(total) or not total.flags.writeable:
        _quotients(total, count)
        return
    table = _quotient_table(total.dtype, count)
    bits = total.reshape(-1).view(table.dtype)
    scratch = _scratch
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        index = scratch.indices[: block.size]
        np.copyto(index, block)
        table.take(index, None, block, "clip")


def _quotients(total: Array, count: int) -> None:
    total[...] = (total.astype(np.float32) / np.float32(count)).astype(total.dtype)


@lru_cache(maxsize=16)
def _quotient_table(dtype: np.dtype[Any], count: int) -> Array:
    bits = _all_bits(dtype.itemsize)
    with np.errstate(all="ignore"):
        _quotients(bits.view(dtype), count)
    return bits


def _all_bits(itemsize: int) -> Array:
    return np.arange(1 << 8 * itemsize, dtype=f"u{itemsize}")


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class _Scratch(threading.local):
    """Memory for the kernels, of each thread its own, made when it is first used."""

    def __init__(self) -> None:
        # A vector that straddles two cache lines takes twice as long.
        memory = np.empty(10 * BLOCK + 64, np.uint8)
        first = -_address(memory) % 64
        wide, narrow = memory[first : first + 8 * BLOCK], memory[first + 8 * BLOCK : first + 10 * BLOCK]
        self._ints = wide.view(np.int32)
        self._floats = wide.view(np.float32)
        self._whole_pair: tuple[Array, Array, Array, Array, Array] | None = None
        self.indices: Array = wide.view(np.int64)
        self.shorts: Array = wide.view(np.uint16)
        self.more_shorts: Array = narrow.view(np.uint16)
        self.flags: Array = narrow.view(np.bool_)

    def pair(self, count: int) -> tuple[Array, Array, Array, Array, Array]:
        """Return int32 for two blocks: both, the first, the second; and for each of the two the same memory as float32."""
        if count == BLOCK and self._whole_pair is not None:
            return self._whole_pair
        ints, floats = self._ints[: 2 * count], self._floats[: 2 * count]
        pair = ints, ints[:count], ints[count:], floats[:count], floats[count:]
        if count == BLOCK:
            self._whole_pair = pair
        return pair


_scratch = _Scratch()


def _is_plain(array: Array) -> bool:
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


def _fit(left: Array, right: Array, out: Array) -> bool:
    """Return whether blocks of the arrays can be combined one after the other."""
    return not (
        not (left.shape == right.shape == out.shape and left.dtype == right.dtype == out.dtype)
        or not (_is_plain(left) and _is_plain(right) and _is_plain(out) and out.flags.writeable)
        or _shifted(left, out)
        or _shifted(right, out)
    )


def _in_c(ufunc: np.ufunc, combine: Callable[[Array, Array, Array, int], int], left: Array, right: Array, out: Array) -> Array:
    """Combine by C; the ufunc does the rest."""
    if out.size < _LEAST_COMPILED or not _fit(left, right, out) or np.geterr()["under"] != "ignore":
        ufunc(left, right, out=out)
        return out
    start = combine(left, right, out, 0)
    while start < out.size:
        part = slice(start, start + _LEFT_BLOCK)
        ufunc(left.reshape(-1)[part], right.reshape(-1)[part], out=out.reshape(-1)[part])
        start = combine(left, right, out, min(part.stop, out.size))
    return out


def _compiled_kernel(ufunc: np.ufunc, kernel: Kernel) -> tuple[str, Array | None]:
    """Return the name that C has for a kernel, and its table."""
    match kernel:
        case partial(func=looks_up, args=(_, dtype)) if looks_up is _look_up:
            return "float8", _results(ufunc, dtype)
        case partial(func=through) if through is _through_float32:
            return f"bfloat16 {ufunc.__name__}", None
        case partial(args=(_, zero)):
            return f"float16 {ufunc.__name__}" + ("" if zero is None else f", {('left', 'right')[zero]} zero"), None
    return f"float16 {ufunc.__name__}", None


def _in_blocks(ufunc: np.ufunc, kernel: Kernel, least: int, left: Array, right: Array, out: Array) -> Array:
    size = out.size
    if size < least or not _fit(left, right, out):
        ufunc(left, right, out=out)
        return out
    if size <= BLOCK:
        if not kernel(left.reshape(-1), right.reshape(-1), out.reshape(-1)):
            ufunc(left, right, out=out)
        return out
    lefts, rights, targets = left.reshape(-1), right.reshape(-1), out.reshape(-1)
    for start in range(0, size, BLOCK):
        part = slice(start, start + BLOCK)
        block = lefts[part], rights[part], targets[part]
        if not kernel(*block):
            ufunc(block[0], block[1], out=block[2])
    return out


def _shifted(operand: Array, out: Array) -> bool:
    """Return whether writing a block of the result changes what a later block still needs."""
    return operand is not out and np.may_share_memory(operand, out) and _address(operand) != _address(out)


def _kernel(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Kernel | None:
    if dtype.itemsize == 1:
        return partial(_look_up, ufunc, dtype)
    if dtype.name == "bfloat16":
        return partial(_through_float32, ufunc)
    if ufunc in (np.minimum, np.maximum):
        return _extreme_kernel(ufunc)
    return _add_float16 if ufunc is np.add else _multiply_float16


# Constants as arrays of the operands' dtype: a ufunc takes them as they are.
_SHIFT = np.array(13, np.int32)
_SIGN_SHIFT = np.array(15, np.int16)
_SIGN = np.array(0x8000, np.uint16)
_BYTE = np.array(8, np.uint16)
_SIGN_AND_SMALL_EXPONENT = np.array(0x8FFFFFFF - (1 << 32), np.int32)
_MAGNITUDE = np.array(0x7FFFFFFF, np.int32)
_EXPONENT = np.array(0x7F800000, np.int32)
_SIGN_AND_LAST_BIT = np.array(1 << 28 | 1, np.int32)
_ALMOST_HALF = np.array(0x0FFF, np.int32)
_LEAST_EXPONENT = np.array(127 - 14 << 23, np.int32)
_13_MORE = np.array(13 << 23, np.int32)
_EXPONENT_OFFSET = np.array(-(126 << 10) % (1 << 16), np.uint16)
_SCALE = np.array(2.0**112, np.float32)
_TOO_LARGE = int(np.float32(65520).view(np.int32))
_SUBNORMAL = np.float32(1e-40)
_MAXIMUM = np.maximum.reduce


def _reaches(bits: Array, limit: int) -> bool:
    """Return whether a number, given as a signed integer of its bits, is at least that of the bits ``limit``, its sign left out."""
    return bool(_MAXIMUM(bits) >= limit or _MAXIMUM(bits.view(np.uint16)) >= 0x8000 | limit)


def _flushes_subnormals() -> bool:
    """Return whether this thread's processor treats subnormal float32s as zero, a mode that some libraries set by accident."""
    return not _SUBNORMAL + _SUBNORMAL


def _widen(left: Array, right: Array) -> tuple[Array, Array, Array, Array]:
    """Return two blocks of bits of float16, times 2**-112, as float32 and as its bits, both in scratch memory."""
    both, first, second, first_float, second_float = _scratch.pair(left.size)
    np.copyto(first, left)
    np.copyto(second, right)
    np.left_shift(both, _SHIFT, both)
    # The sign filled the upper bits of the exponent too.
    np.bitwise_and(both, _SIGN_AND_SMALL_EXPONENT, both)
    return first_float, second_float, first, second


def _add_float16(left: Array, right: Array, out: Array) -> bool:
    left_bits, right_bits = left.view(np.int16), right.view(np.int16)
    # Numbers below 2**15 have a sum that is no infinity.
    if _reaches(left_bits, 0x7800) or _reaches(right_bits, 0x7800) or _flushes_subnormals():
        return False
    total, other, bits, change = _widen(left_bits, right_bits)
    np.add(total, other, total)
    # Add just less than half of the last bit that stays, and one more if that bit is set, so that ties go to even. The sign is added
    # at the bit that the shift makes the first of 16; that bit is free, because the exponent is small.
    np.right_shift(bits, _SHIFT, change)
    np.bitwise_and(change, _SIGN_AND_LAST_BIT, change)
    np.add(bits, change, bits)
    np.add(bits, _ALMOST_HALF, bits)
    np.right_shift(bits, _SHIFT, bits)
    np.copyto(out.view(np.int16), bits, casting="unsafe")
    return True


def _multiply_float16(left: Array, right: Array, out: Array) -> bool:
    left_bits, right_bits = left.view(np.int16), right.view(np.int16)
    if _reaches(left_bits, 0x7C00) or _reaches(right_bits, 0x7C00) or _flushes_subnormals() or np.geterr()["under"] != "ignore":
        return False
    product, other, bits, power = _widen(left_bits, right_bits)
    np.multiply(product, _SCALE, product)
    np.multiply(other, _SCALE, other)
    np.multiply(product, other, product)
    np.bitwise_and(bits, _MAGNITUDE, bits)
    if _MAXIMUM(bits) >= _TOO_LARGE:
        return False
    narrow = _scratch.more_shorts[: left.size]
    np.bitwise_xor(left_bits.view(np.uint16), right_bits.view(np.uint16), narrow)
    np.bitwise_and(narrow, _SIGN, narrow)
    np.add(narrow, _EXPONENT_OFFSET, narrow)
    # Add the power of two whose last bit as a float32 is the last bit that a float16 of the product's size keeps: the bits that this adds
    # are the mantissa, rounded. Subnormal float16s share one last bit.
    np.bitwise_and(bits, _EXPONENT, power)
    np.maximum(power, _LEAST_EXPONENT, out=power)
    np.add(power, _13_MORE, power)
    np.add(product, other, product)
    np.subtract(bits, power, bits)
    np.right_shift(power, _SHIFT, power)
    np.add(bits, power, bits)
    result = out.view(np.uint16)
    np.copyto(result, bits, casting="unsafe")
    np.add(result, narrow, result)
    return True


def _through_float32(ufunc: np.ufunc, left: Array, right: Array, out: Array) -> bool:
    # Which of two NaN comes out depends on the instruction.
    if _reaches(left.view(np.int16), 0x7F81):
        return False
    # NumPy converts piece by piece, in buffers of its own.
    ufunc(left, right, out=out, dtype=np.float32, casting="unsafe")
    return True


def _extreme_kernel(ufunc: np.ufunc) -> Kernel | None:
    """Return the kernel for a minimum or maximum, or None if NumPy chooses among zeros in a way that is not known here."""
    zeros = np.zeros(64, np.float16)
    both = ufunc(zeros, -zeros).tobytes(), ufunc(-zeros, zeros).tobytes()
    plus, minus = zeros.tobytes(), (-zeros).tobytes()
    if both == ((minus, minus) if ufunc is np.minimum else (plus, plus)):
        return partial(_extreme_float16, ufunc, None)
    # To most, zeros of different sign are equal; then the result is always the left one, or always the right one.
    chosen = {(plus, minus): 0, (minus, plus): 1}.get(both)
    return None if chosen is None else partial(_extreme_float16, ufunc, chosen)


def _extreme_float16(ufunc: np.ufunc, zero: int | None, left: Array, right: Array, out: Array) -> bool:
    signed = left.view(np.int16), right.view(np.int16)
    if _reaches(signed[0], 0x7C01) or _reaches(signed[1], 0x7C01):
        return False
    count = left.size
    scratch = _scratch
    result, other, both = (scratch.shorts[first : first + count] for first in (0, count, 2 * count))
    unsigned = left.view(np.uint16), right.view(np.uint16)
    # The extreme of signed integers is right unless both are negative, the opposite one of unsigned integers unless none is.
    ufunc(*signed, out=result.view(np.int16))
    (np.maximum if ufunc is np.minimum else np.minimum)(*unsigned, out=other)
    negative = scratch.more_shorts[:count]
    np.right_shift(result.view(np.int16), _SIGN_SHIFT, negative.view(np.int16))
    np.bitwise_xor(other, result, other)
    np.bitwise_and(other, negative, other)
    np.bitwise_xor(result, other, result)
    if zero is not None:
        np.bitwise_or(*unsigned, both)
        zeros = scratch.flags[:count]
        np.equal(both, _SIGN, zeros)
        if zeros.any():
            np.copyto(result, unsigned[zero], where=zeros)
    np.copyto(out.view(np.uint16), result)
    return True


def _look_up(ufunc: np.ufunc, dtype: np.dtype[Any], left: Array, right: Array, out: Array) -> bool:
    table = _results(ufunc, dtype)
    count = left.size
    scratch = _scratch
    index, result = scratch.indices[:count], scratch.more_shorts[:count]
    np.copyto(result, left.view(np.uint8))
    np.left_shift(result, _BYTE, result)
    np.bitwise_or(result, right.view(np.uint8), result)
    np.copyto(index, result)
    table.take(index, None, result, "clip")
    if _MAXIMUM(result) > 0xFF:
        return False
    np.copyto(out.view(np.uint8), result, casting="unsafe")
    return True


@lru_cache
def _results(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Array:
    """Return the results for all pairs of 8-bit numbers, with more than 8 bits if NumPy may warn about them."""
    pairs = _all_bits(2)
    left, right = ((pairs >> 8).astype(np.uint8).view(dtype), pairs.astype(np.uint8).view(dtype))
    told: list[str] = []

    def find(first: int, stop: int) -> None:
        told.clear()
        ufunc(left[first:stop], right[first:stop])
        if told and stop - first == 1:
            table[first] = 1 << 8
        elif told:
            middle = (first + stop) // 2
            find(first, middle)
            find(middle, stop)

    with np.errstate(all="call", call=lambda kind, _: told.append(kind)):
        table: Array = ufunc(left, right).view(np.uint8).astype(np.uint16)
        find(0, pairs.size)
    return table
