"""Which dtypes travel, and which reductions each of them has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from manyhands.aliases import nearest_op
from manyhands.errors import DTypeError
from manyhands.low_precision import fast_combine

__all__ = ["OP_NAMES", "Op", "Reduction", "check_dtype", "dtype_code", "dtype_from_code", "resolve_op"]

Op = str | np.ufunc
"""What users give as ``op=``: a name, or a binary NumPy ufunc."""

_NUMPY_NAMES = (
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
)
_ML_NAMES = (
    "bfloat16",
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
)
# The code of a dtype on the wire is its position here, counted from 1; 0 is "none". Only ever append.
_CODES = {name: code for code, name in enumerate((*_NUMPY_NAMES, *_ML_NAMES), start=1)}
_NAMES = {code: name for name, code in _CODES.items()}

_ANY = frozenset({"bool", "integer", "float", "complex"})
_OPS: dict[str, tuple[np.ufunc, frozenset[str], str]] = {
    # name: the ufunc, the kinds of dtype that have it, and what to do for the others
    "sum": (np.add, frozenset({"integer", "float", "complex"}), 'use op="or", or count with x.astype("int64")'),
    "mean": (np.add, frozenset({"float", "complex"}), 'convert first, with x.astype("float64"), or use op="sum" and divide'),
    "product": (np.multiply, frozenset({"integer", "float", "complex"}), 'use op="and"'),
    "min": (np.minimum, _ANY - {"complex"}, "complex numbers have no order; reduce abs(x), or real and imaginary parts apart"),
    "max": (np.maximum, _ANY - {"complex"}, "complex numbers have no order; reduce abs(x), or real and imaginary parts apart"),
    "and": (np.bitwise_and, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
    "or": (np.bitwise_or, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
    "xor": (np.bitwise_xor, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
}
OP_NAMES: tuple[str, ...] = tuple(_OPS)
"""The names that ``op=`` takes."""

_UFUNC_NAMES = {ufunc.__name__: name for name, (ufunc, _, _) in _OPS.items() if name != "mean"}
# Results of these would depend on how the ranks are paired, which no caller can want.
_NOT_ASSOCIATIVE = frozenset(
    "subtract divide true_divide floor_divide power float_power remainder mod fmod arctan2 copysign nextafter ldexp "
    "heaviside left_shift right_shift less less_equal greater greater_equal not_equal equal divmod".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduction for one dtype: how two operands are combined, and whether the result is divided by the world size.

    There is one for each op and dtype, so that it is compared, and looked up, by identity.
    """

    name: str
    code: int
    combine: Callable[..., Any]
    is_mean: bool


def check_dtype(dtype: np.dtype[Any]) -> int:
    """Return the wire code of ``dtype``.

    Raises
    ------
    DTypeError
        Arrays of this dtype cannot travel.
    """
    code = dtype_code(dtype)
    if code:
        return code
    if dtype.hasobject:
        reason = "it holds Python objects, and manyhands never pickles"
    elif not dtype.isnative:
        reason = 'its bytes are not in this machine\'s order; use x.astype(x.dtype.newbyteorder("="))'
    elif dtype.names is not None:
        reason = "it is a structured dtype; send the fields one by one, or x.view(np.uint8)"
    elif dtype.kind in "mM":
        reason = 'times have no wire format; send x.view("int64")'
    elif dtype.kind in "US":
        reason = "it holds text"
    else:
        reason = "it is none of NumPy's numeric dtypes"
    raise DTypeError(f"an array of dtype {dtype} cannot travel between ranks: {reason}")


@lru_cache(maxsize=256)
def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the wire code of ``dtype``, 0 when it has none."""
    if not dtype.isnative or dtype.names is not None:
        return 0
    # By type: ml_dtypes reuses the characters of these two.
    if dtype.type is np.longdouble:
        return _CODES["longdouble"]
    if dtype.type is np.clongdouble:
        return _CODES["clongdouble"]
    if dtype.name in _ML_NAMES and dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return 0
    return _CODES.get(dtype.name, 0)


def dtype_from_code(code: int) -> np.dtype[Any] | None:
    """Return the dtype of a wire code, None when there is no such code or ml_dtypes is missing."""
    name = _NAMES.get(code)
    if name is None:
        return None
    if name in _ML_NAMES:
        try:
            import ml_dtypes
        except ImportError:
            return None
        name = getattr(ml_dtypes, name)
    found: np.dtype[Any] = np.dtype(name)
    return found


def dtype_name(code: int) -> str:
    """Return the name of a wire code, for messages to people."""
    return _NAMES.get(code, f"dtype code {code}")


def _kind(dtype: np.dtype[Any]) -> str:
    kinds = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}
    return kinds.get(dtype.kind, "float")  # bfloat16 and float8 have kind "V"


def resolve_op(op: Op, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction that ``op`` means for ``dtype``.

    Raises
    ------
    DTypeError
        There is no such op, or the dtype does not have it.
    """
    try:
        return _resolve(op, dtype)
    except TypeError:  # it cannot be a key of the cache
        raise _no_such(op) from None


def _no_such(op: object) -> DTypeError:
    near = nearest_op(op, OP_NAMES)
    hint = f' (did you mean "{near}"?)' if near else ""
    return DTypeError(f"op={op!r} is not a reduction{hint}: give one of {', '.join(OP_NAMES)}, or a binary NumPy ufunc")


@lru_cache(maxsize=512)
def _resolve(op: Op, dtype: np.dtype[Any]) -> Reduction:
    if isinstance(op, np.ufunc):
        known = _UFUNC_NAMES.get(op.__name__)
        if known is None or _OPS[known][0] is not op:
            return _custom(op, dtype)
        return _resolve(known, dtype)
    if op not in _OPS:
        raise _no_such(op)
    combine, kinds, remedy = _OPS[op]
    kind = _kind(dtype)
    if kind not in kinds:
        raise DTypeError(f'op="{op}" is not defined for arrays of {dtype}: {remedy}')
    if op == "product" and kind == "complex":
        return Reduction(op, OP_NAMES.index(op) + 1, _complex_product, is_mean=False)
    return Reduction(op, OP_NAMES.index(op) + 1, fast_combine(combine, dtype), is_mean=op == "mean")


def _complex_product(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Multiply in steps that are each rounded exactly.

    NumPy's own complex product fuses steps where the processor and the layout of the operands allow, so that its bits depend on
    whether ``out`` is an operand, and all ranks must get the same.
    """
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    out.real[...] = real
    out.imag[...] = imag


def _custom(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Reduction:
    name = ufunc.__name__
    if (ufunc.nin, ufunc.nout) != (2, 1) or ufunc.signature is not None:
        raise DTypeError(
            f"op=np.{name} is no element-by-element ufunc of two arguments with one result, as a reduction must be"
        )
    if name in _NOT_ASSOCIATIVE:
        raise DTypeError(f"op=np.{name} is not associative, so its result would depend on how the ranks are paired")
    if ufunc.types == ["OO->O"]:
        raise DTypeError(
            f"op={name}, made by np.frompyfunc, gives Python objects, whatever the arrays: give a function of two arrays that gives one of their "
            "dtype"
        )
    try:
        result = ufunc.resolve_dtypes((dtype, dtype, None))[2]
    except TypeError as error:
        raise DTypeError(f"op=np.{name} is not defined for arrays of {dtype}") from error
    if result != dtype:
        raise DTypeError(f"op=np.{name} turns {dtype} into {result}; a reduction keeps its dtype: convert the array first")
    return Reduction(f"np.{name}", 255, ufunc, is_mean=False)
