"""The arrays that checks send, the expected results, and the comparison of the two, byte by byte."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oneaccord.api import Group

__all__ = ["DTYPES", "OPS", "Array", "bits", "calls", "combined", "numbers", "ops_of", "same"]

Array = npt.NDArray[Any]

_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_FLOATS = "float16 float32 float64 longdouble"
_COMPLEX = "complex64 complex128 clongdouble"
_SHORT = "float8_e4m3fn float8_e5m2 float8_e4m3 float8_e3m4 float8_e4m3fnuz float8_e5m2fnuz float8_e4m3b11fnuz float8_e8m0fnu bfloat16"
DTYPES: tuple[str, ...] = ("bool", *f"{_INTEGERS} {_FLOATS} {_COMPLEX} {_SHORT}".split())
"""The names of all dtypes that groups know; those of ml_dtypes come last."""

OPS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""The reductions that have a name, and the functions that combine two operands."""


_PADDED = (np.dtype(np.longdouble), np.dtype(np.clongdouble))


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name of `DTYPES`."""
    return np.dtype(getattr(ml_dtypes, name) if name in _SHORT.split() else name)


def ops_of(name: str) -> list[str]:
    """Return the reductions that a dtype has, and whose results are exact for `numbers`."""
    if name == "bool":
        return ["min", "max", "and", "or", "xor"]
    if name == "float8_e8m0fnu":
        return ["product", "min", "max"]  # it holds powers of two alone
    if name in _INTEGERS.split():
        return ["sum", "product", "min", "max", "and", "or", "xor"]
    return ["sum", "mean", "product"] if name in _COMPLEX.split() else ["sum", "mean", "product", "min", "max"]


def bits(rank: int, count: int, name: str = "uint8", seed: int = 0) -> Array:
    """Return an array whose bytes are of any kind, another one for each rank, to be moved and not to be reduced."""
    return _bits(rank, count, name, seed).copy()


@functools.lru_cache(maxsize=64)  # each rank asks for the arrays of all
def _bits(rank: int, count: int, name: str, seed: int) -> Array:
    dtype, draw = dtype_of(name), np.random.default_rng([rank, seed])
    if name == "bool" or name.endswith("longdouble"):  # not all of their bytes mean something
        return draw.integers(0, 2 if name == "bool" else 1 << 40, count).astype(dtype)
    return np.frombuffer(draw.bytes(count * dtype.itemsize), dtype).copy()


def numbers(rank: int, count: int, name: str, op: str, seed: int = 0) -> Array:
    """Return an array to be reduced, whose result is exact in worlds of up to 4 ranks, and of up to 9 but for floats of 8 bits."""
    return _numbers(rank, count, name, op, seed).copy()


@functools.lru_cache(maxsize=64)
def _numbers(rank: int, count: int, name: str, op: str, seed: int) -> Array:
    dtype, draw = dtype_of(name), np.random.default_rng([rank, seed])
    if name == "bool":
        return draw.integers(0, 2, count).astype(bool)
    if name in _INTEGERS.split():  # a sum that is too large wraps round, in any order
        return np.frombuffer(draw.bytes(count * dtype.itemsize), dtype).copy()
    if op == "mean":  # the same on all ranks, so that the mean is that
        return np.random.default_rng(seed).integers(1, 3, count).astype(dtype)
    if name in _COMPLEX.split() and op == "product":
        return np.array([1, -1, 1j, -1j], dtype)[draw.integers(0, 4, count)]
    if op == "product" or name == "float8_e8m0fnu":
        return draw.integers(1, 3, count).astype(dtype)
    small = "float8" in name
    values = draw.integers(0, 3 if small else 28, count)
    if name in _COMPLEX.split():
        return (values - 1j * draw.integers(0, 28, count)).astype(dtype)
    return values.astype(dtype)


def combined(op: str, arrays: Sequence[Array]) -> Array:
    """Return the arrays combined element by element, from left to right."""
    dtype = arrays[0].dtype
    with np.errstate(all="ignore"):
        total = arrays[0]
        for array in arrays[1:]:
            total = OPS[op](total, array).astype(dtype)
        return (total / len(arrays)).astype(dtype) if op == "mean" else total.copy()


def same(got: Any, expected: Array | None, what: str) -> None:
    """Raise AssertionError unless an array is the expected one: dtype, shape, and every byte that has a meaning; None is nothing."""
    if expected is None:
        assert got is None, f"{what}: got {got!r}; expected None on this rank"
        return
    assert isinstance(got, np.ndarray), f"{what}: got {got!r}; expected an array"
    assert got.dtype == expected.dtype, f"{what}: got {got.dtype}; expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: got the shape {got.shape}; expected {expected.shape}"
    if got.tobytes() == expected.tobytes():
        return
    if expected.dtype in _PADDED or expected.dtype.kind == "c":  # padding; the sign of a zero
        wrong = np.flatnonzero((got != expected) & ~(np.isnan(got) & np.isnan(expected)))
    else:
        raw = [np.frombuffer(each.tobytes(), np.uint8).reshape(expected.size, -1) for each in (got, expected)]
        wrong = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
    if wrong.size:
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.size} of {expected.size} elements are wrong, the first is element {first}: got {np.ravel(got)[first]!r}, "
            f"and expected was {np.ravel(expected)[first]!r}; the last is element {int(wrong[-1])}"
        )


def _drop(_: Array) -> None:
    """Look at nothing."""


Call = tuple[Callable[..., Any], tuple[Any, ...], Array | None]


def calls(group: Group, arrays: Sequence[Array], op: str = "sum", root: int = 0) -> dict[str, Call]:
    """Return, for every collective and for `sendrecv`: the method, its arguments, and the result that this rank must get.

    Parameters
    ----------
    group
        The group.
    arrays
        Each rank's array. Collectives that divide an array among the ranks are left out if axis 0 cannot be divided.
    op
        The reduction; exscan is left out if that is a mean, and scan.
    root
        The root of those that have one.
    """
    rank, size = group.rank, group.world_size
    mine, total, joined = arrays[rank], combined(op, arrays), np.concatenate([np.atleast_1d(each) for each in arrays])
    at_root = rank == root
    found: dict[str, Call] = {
        "all_reduce": (group.all_reduce, (mine, op), total),
        "reduce": (group.reduce, (mine, op, root), total if at_root else None),
        "broadcast": (group.broadcast, (mine, root), arrays[root]),
        "all_gather": (group.all_gather, (mine,), joined),
        "gather": (group.gather, (mine, root), joined if at_root else None),
        "sendrecv": (group.sendrecv, (mine, (rank + 1) % size, (rank - 1) % size), arrays[rank - 1]),
    }
    if op != "mean":
        found["scan"] = (group.scan, (mine, op), combined(op, arrays[: rank + 1]))
        # Rank 0 gets the identity of the reduction, which core fills in.
        before = combined(op, arrays[:rank]) if rank else np.full_like(total, op == "product")
        if rank or op in ("sum", "product", "or", "xor"):
            found["exscan"] = (group.exscan, (mine, op), before)
        else:
            found["exscan"] = (lambda *given: _drop(group.exscan(*given)), (mine, op), None)
    if mine.ndim and len(mine) % size == 0:
        rows = slice(rank * len(mine) // size, (rank + 1) * len(mine) // size)
        found["scatter"] = (group.scatter, (mine if at_root else None, root), arrays[root][rows])
        found["reduce_scatter"] = (group.reduce_scatter, (mine, op), total[rows])
        found["all_to_all"] = (group.all_to_all, (mine,), np.concatenate([each[rows] for each in arrays]))
    return found
