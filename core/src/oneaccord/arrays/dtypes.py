"""The dtypes that can travel between ranks, and the reductions of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from oneaccord.arrays.low_precision import fast_combine
from oneaccord.arrays.ops import LOCATING, Combine, Function, Op, first_of, locating, neutral
from oneaccord.common.aliases import nearest_op
from oneaccord.common.checks import UNREADABLE
from oneaccord.errors import DTypeError, UsageError

__all__ = [
    "CODES",
    "OP_NAMES",
    "REDUCTIONS",
    "OpLike",
    "Reduction",
    "check_dtype",
    "dtype_code",
    "dtype_from_code",
    "fields_of",
    "identity_of",
    "named_dtype",
    "resolve_op",
]

OpLike = str | np.ufunc | Function | Op
"""The value of ``op=``: a name, a binary NumPy ufunc, a function of two arrays, or an `Op`."""

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
_BY_NAME = {name: code for code, name in enumerate((*_NUMPY_NAMES, *_ML_NAMES), start=1)}
_NAMES = {code: name for name, code in _BY_NAME.items()}
CODES: dict[np.dtype[Any], int] = {np.dtype(name): _BY_NAME[name] for name in reversed(_NUMPY_NAMES)}
"""The codes of NumPy's own dtypes, for fast look-ups during a call; `dtype_code` knows the codes of all dtypes."""
_STRUCTURED = 128
"""The code of all structured dtypes; `fields_of` distinguishes them."""

_Fields = tuple[int, tuple[tuple[str, int, int, tuple[int, ...]], ...]]
"""The bytes of an element; and for each field its name, its code, its offset, and its shape."""
_fields_decoder: msgspec.msgpack.Decoder[_Fields] = msgspec.msgpack.Decoder(_Fields)

_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}
_ANY = frozenset({"bool", "integer", "float", "complex"})
_OPS: dict[str, tuple[np.ufunc, frozenset[str], str]] = {
    # name: the ufunc, the kinds of dtype that have it, and advice for the other kinds
    "sum": (np.add, frozenset({"integer", "float", "complex"}), 'use op="or", or count with x.astype("int64")'),
    "mean": (np.add, frozenset({"float", "complex"}), 'convert first, with x.astype("float64"), or use op="sum" and divide'),
    "product": (np.multiply, frozenset({"integer", "float", "complex"}), 'use op="and"'),
    "min": (
        np.minimum,
        _ANY - {"complex"},
        "complex numbers have no order; reduce abs(x), or the real and imaginary parts separately",
    ),
    "max": (
        np.maximum,
        _ANY - {"complex"},
        "complex numbers have no order; reduce abs(x), or the real and imaginary parts separately",
    ),
    "and": (np.bitwise_and, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
    "or": (np.bitwise_or, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
    "xor": (np.bitwise_xor, frozenset({"bool", "integer"}), "bitwise reductions need a bool or integer dtype"),
}
OP_NAMES: tuple[str, ...] = (*_OPS, *LOCATING)
"""The names that ``op=`` takes."""

_UFUNC_NAMES = {ufunc.__name__: name for name, (ufunc, _, _) in _OPS.items() if name != "mean"}
# Functions of one array, which are easily mistaken for functions of two.
_OF_ONE_ARRAY: frozenset[object] = frozenset({sum, min, max, np.sum, np.mean, np.prod, np.min, np.max, np.argmin, np.argmax})
# Results of these would depend on how the ranks are paired, which no caller can want.
_NOT_ASSOCIATIVE = frozenset(
    "subtract divide true_divide floor_divide power float_power remainder mod fmod arctan2 copysign nextafter ldexp "
    "heaviside left_shift right_shift less less_equal greater greater_equal not_equal equal divmod".split()
)


class Reduction(msgspec.Struct, frozen=True, eq=False):
    """A reduction for one dtype: how two operands are combined, and whether the result is divided by the world size.

    There is one for each op and dtype, so that it is compared, and looked up, by identity.
    """

    name: str
    code: int
    combine: Callable[..., Any]
    is_mean: bool
    commutes: bool = True
    is_users: bool = False
    """Whether ``combine`` hands its operands to a function of the user's, which may keep them."""


def named_dtype(given: Any) -> np.dtype[Any]:
    """Return the dtype that an argument names.

    Raises
    ------
    DTypeError
        It names none.
    """
    try:
        found: np.dtype[Any] = np.dtype(given)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"dtype must be a dtype of NumPy, not {given!r}: {error}") from None
    return found


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
        reason = (
            "it holds Python objects, and oneaccord never pickles; send_object(), broadcast_object() and their kin "
            "take numbers, text, lists and dicts, and an array as x.tolist()"
        )
    elif not dtype.isnative and dtype_code(dtype.newbyteorder("=")):
        reason = 'its byte order is not this machine\'s; use x.astype(x.dtype.newbyteorder("="))'
    elif dtype.names is not None:
        reason = (
            "every field of a structured dtype must have a numeric dtype, or be an array of one; send its fields one by one, "
            "or x.tolist() with send_object(), broadcast_object() or their kin"
        )
    elif dtype.kind in "mM":
        reason = 'times cannot be sent as they are; send x.astype("int64")'
    elif dtype.kind in "US":
        reason = "it holds text; send it with send_object(), broadcast_object() or their kin, an array as x.tolist()"
    else:
        reason = 'it is not one of NumPy\'s numeric dtypes; send its bytes, x.view("uint8")'
    raise DTypeError(f"an array of dtype {dtype} cannot travel between ranks: {reason}")


@lru_cache(maxsize=256)
def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the wire code of ``dtype``, 0 when it has none."""
    if not dtype.isnative:
        return 0
    if dtype.names is not None:
        return _STRUCTURED if fields_of(dtype) else 0
    # By type: ml_dtypes reuses the characters of these two.
    if dtype.type is np.longdouble:
        return _BY_NAME["longdouble"]
    if dtype.type is np.clongdouble:
        return _BY_NAME["clongdouble"]
    if dtype.name in _ML_NAMES and dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return 0
    return _BY_NAME.get(dtype.name, 0)


@lru_cache(maxsize=256)
def fields_of(dtype: np.dtype[Any]) -> bytes:
    """Return bytes that distinguish structured dtypes with the same code; empty for other dtypes, and for one that cannot travel."""
    fields: list[tuple[str, int, int, tuple[int, ...]]] = []
    described: Mapping[str, Any] = dtype.fields or {}
    for name in dtype.names or ():
        field, offset = described[name][:2]
        code = dtype_code(field.base)
        if code in (0, _STRUCTURED):
            return b""
        fields.append((name, code, offset, field.shape))
    return msgspec.msgpack.encode((dtype.itemsize, fields)) if fields and dtype.itemsize else b""


def dtype_from_code(code: int, fields: bytes = b"") -> np.dtype[Any] | None:
    """Return the dtype of a wire code and `fields_of`, None when there is no such code or ml_dtypes is missing."""
    if code == _STRUCTURED:
        return _structured(fields)
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


def _structured(fields: bytes) -> np.dtype[Any] | None:
    try:
        itemsize, described = _fields_decoder.decode(fields)
        formats = [(dtype_from_code(code), shape) for _, code, _, shape in described]
        if any(dtype is None for dtype, _ in formats):
            return None
        names, offsets = [field[0] for field in described], [field[2] for field in described]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})
    except UNREADABLE:
        return None


def dtype_name(code: int, fields: bytes = b"") -> str:
    """Return the name of a wire code and `fields_of`, for messages."""
    if code == _STRUCTURED:
        return str(_structured(fields) or "structured")
    return _NAMES.get(code, f"dtype code {code}")


def resolve_op(op: OpLike, dtype: np.dtype[Any], sample: npt.NDArray[Any] | None = None) -> Reduction:
    """Return the reduction that ``op`` means for ``dtype``; a user's function is tried on ``sample`` at its first use.

    Raises
    ------
    DTypeError
        There is no such op, or the dtype does not have it.
    UsageError
        As `Combine.try_on`.
    """
    try:
        reduction = _resolve(op, dtype)
    except TypeError:  # it cannot be a key of the cache
        raise _no_such(op) from None
    if sample is not None and type(reduction.combine) is Combine:
        reduction.combine.try_on(sample)
    return reduction


def identity_of(op: OpLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the identity of a reduction, the element that leaves every other unchanged, with shape ().

    Raises
    ------
    DTypeError
        As `resolve_op`.
    UsageError
        It is not known, or it is not an element of the dtype.
    """
    name = resolve_op(op, dtype).name
    if name in OP_NAMES:
        return first_of(neutral(name, dtype), dtype, f'op="{name}"')
    identity = op.identity if isinstance(op, Op | np.ufunc) else None
    if identity is None:
        raise UsageError(
            f"op={name}: its identity, which exscan needs for rank 0, is not known: give op=oa.Op(fn, identity=...), "
            "with the element that leaves every other unchanged under fn"
        )
    return first_of(identity, dtype, f"op={name}")


def _no_such(op: object) -> DTypeError:
    near = nearest_op(op, OP_NAMES)
    shown, hint = repr(op), f' (did you mean "{near}"?)' if near else ""
    if getattr(op, "ndim", 0):  # as in MPI, where the result goes into the second argument
        shown, hint = f"<{type(op).__name__}>", " (did you mean out=, which takes the result?)"
    others = "a binary NumPy ufunc, or a function of two arrays (one that can be hashed)"
    return DTypeError(f"op={shown} is not a reduction{hint}; give one of {', '.join(OP_NAMES)}, {others}")


@lru_cache(maxsize=512)
def _resolve(op: OpLike, dtype: np.dtype[Any]) -> Reduction:
    if isinstance(op, np.ufunc):
        known = _UFUNC_NAMES.get(op.__name__)
        if known is None or _OPS[known][0] is not op:
            return _custom(op, dtype)
        return _resolve(known, dtype)
    if op in _OF_ONE_ARRAY:
        raise _no_such(op)
    if callable(op):
        op = Op(op)
    if isinstance(op, Op):
        return Reduction(str(op), 254, Combine(op, dtype), is_mean=False, commutes=op.commutative, is_users=True)
    if op in LOCATING:
        return Reduction(op, OP_NAMES.index(op) + 1, locating(op, dtype), is_mean=False)
    if op not in _OPS:
        raise _no_such(op)
    if dtype.names is not None:
        raise DTypeError(
            f'op="{op}" is not defined for a structured dtype such as {dtype}: reduce its fields one by one, give a function of two arrays, '
            'or op="minloc" or "maxloc" for a value and its location'
        )
    combine, kinds, remedy = _OPS[op]
    if _KINDS.get(dtype.kind, "float") not in kinds:  # bfloat16 and float8 have kind "V"
        raise DTypeError(f'op="{op}" is not defined for arrays of {dtype}: {remedy}')
    return REDUCTIONS.get((op, dtype)) or Reduction(
        op, OP_NAMES.index(op) + 1, fast_combine(combine, dtype), is_mean=op == "mean"
    )


def _complex_product(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Multiply in steps that are each rounded exactly.

    NumPy's own complex product fuses steps if the processor and the layout of the operands allow it. Its bits then depend on
    whether ``out`` is an operand, but all ranks must get the same bits.
    """
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    out.real[...] = real
    out.imag[...] = imag


def _custom(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Reduction:
    name = ufunc.__name__
    if (ufunc.nin, ufunc.nout) != (2, 1) or ufunc.signature is not None:
        raise DTypeError(
            f"op=np.{name} is not an element-by-element ufunc of two arguments with one result, as a reduction must be"
        )
    if name in _NOT_ASSOCIATIVE:
        raise DTypeError(f"op=np.{name} is not associative, so its result would depend on how the ranks are paired")
    if ufunc.types == ["OO->O"]:
        raise DTypeError(
            f"op={name}, made by np.frompyfunc, returns Python objects for any arrays: give a function of two arrays that returns an array of "
            "their dtype"
        )
    try:
        result = ufunc.resolve_dtypes((dtype, dtype, None))[2]
    except TypeError as error:
        raise DTypeError(f"op=np.{name} is not defined for arrays of {dtype}") from error
    if result.hasobject:
        raise DTypeError(
            f"op=np.{name} turns {dtype} into Python objects: give a function of two arrays as op=fn, not a function of two numbers"
        )
    if result != dtype:
        raise DTypeError(f"op=np.{name} turns {dtype} into {result}; a reduction keeps its dtype: convert the array first")
    return Reduction(f"np.{name}", 255, ufunc, is_mean=False)


REDUCTIONS: dict[tuple[object, np.dtype[Any]], Reduction] = {
    (op, dtype): Reduction(
        op, code, _complex_product if op == "product" and dtype.kind == "c" else combine, is_mean=op == "mean"
    )
    for code, (op, (combine, kinds, _)) in enumerate(_OPS.items(), start=1)
    for dtype in CODES
    if dtype.itemsize > 2 and _KINDS[dtype.kind] in kinds
}
"""By name, the dtypes that NumPy itself reduces well, for fast look-ups during a call; `resolve_op` knows all of them."""
