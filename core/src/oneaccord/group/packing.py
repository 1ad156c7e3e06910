"""Python objects as bytes: msgpack by msgspec, never pickle, and explanations for objects that cannot travel."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import sys
from collections.abc import Iterator, Sized
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.common.checks import UNREADABLE, safe_str
from oneaccord.contract.header import DESCRIPTION_BYTES, can_describe, pack_description, parse_description
from oneaccord.errors import DTypeError, OutOfMemoryError, UsageError

__all__ = ["Unpacker", "pack"]

T = TypeVar("T")

_CAN_TRAVEL = (
    "an object between ranks may hold None, bool, int of 64 bits, float, str, bytes, lists, tuples, sets, dicts, enums, times, "
    "Decimal, UUID, dataclasses, msgspec.Struct, NumPy arrays and scalars"
)
_ARRAY = 77
"""The code of msgpack's extension type that carries a NumPy array: the length of a description, the description, and its bytes in C order."""
_TEXT_CHARACTERS = 120
_CANNOT = (TypeError, ValueError, OverflowError, RecursionError, BufferError, msgspec.EncodeError)
"""The exceptions of msgspec for an object that it cannot encode."""


def pack(given: object, what: str) -> bytearray:
    """Return an object as bytes.

    Parameters
    ----------
    given
        The object to send.
    what
        The call, for messages to people.

    Raises
    ------
    UsageError
        Something in it cannot travel; the message says what, at which place, and what to do.
    OutOfMemoryError
        There is no memory for the bytes.
    """
    data = bytearray()
    try:
        _encoder.encode_into(given, data)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{what} has no memory for its object as bytes ({safe_str(error) or 'MemoryError'}): give smaller ones, in several calls"
        ) from None
    except _CANNOT as error:
        raise UsageError(f"{what} cannot send {_explain(given, error)}") from None
    return data


class Unpacker(Generic[T]):
    """Turns bytes back into objects of one type.

    Parameters
    ----------
    expected
        The type for msgspec: a dataclass, a `msgspec.Struct`, ``list[int]`` and the like; None for plain Python objects.
    what
        The call, for messages to people.

    Raises
    ------
    UsageError
        msgspec knows no such type.
    """

    def __init__(self, expected: Any, what: str) -> None:
        self._expected = expected
        self._what = what
        try:
            self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
                Any if expected is None else expected, ext_hook=_rebuilt
            )
        except (TypeError, NameError, AttributeError) as error:
            raise UsageError(
                f"{what} cannot decode into type={_type_name(expected)}: {error}; give a dataclass, a msgspec.Struct, a TypedDict, "
                "or a type such as list[int]"
            ) from None

    def unpack(self, data: Any, sender: int) -> T:
        """Return the object in ``data``, a buffer from ``sender``.

        Raises
        ------
        UsageError
            It is not of the expected type, or cannot be rebuilt.
        """
        try:
            value: T = self._decoder.decode(data)
        except (msgspec.ValidationError, RecursionError, MemoryError) as error:
            expected = "" if self._expected is None else f" as type={_type_name(self._expected)}"
            problem = (
                "it is nested too deep" if isinstance(error, RecursionError) else safe_str(error) or "there is no memory for it"
            )
            raise UsageError(
                f"{self._what} cannot read the object of rank {sender}{expected}: {problem}", peer=sender
            ) from None
        except UNREADABLE as error:  # for bytes that make no object, text or array
            raise UsageError(
                f"{self._what} cannot rebuild the object of rank {sender}: {error}; if keys of a dict are dataclasses or the like, "
                "give type=",
                peer=sender,
            ) from None
        return value


def _plain(value: object) -> object:
    """Return a NumPy array as an extension, and a NumPy scalar as a Python one, for the encoder.

    Raises
    ------
    TypeError
        It is none, or no Python number has its value.
    DTypeError
        Arrays of that dtype do not travel.
    """
    if type(value) in (np.ndarray, np.memmap):  # others hold more than their elements, such as a mask
        array: np.ndarray[Any, Any] = np.asarray(value)
        check_dtype(array.dtype)
        if not can_describe(array.dtype, array.ndim):
            raise DTypeError(
                f"{array.ndim} dimensions and its dtype are too much to be described; give its fields, or x.view(np.uint8)"
            )
        description = pack_description(array.dtype, array.shape).rstrip(b"\0")
        data = bytearray(len(description).to_bytes(2, "little") + description)
        data += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return msgspec.msgpack.Ext(_ARRAY, data)
    if isinstance(value, np.generic) and (value.dtype.kind == "U" or (value.dtype.kind in "biuf" and value.itemsize <= 8)):
        return value.item()
    raise TypeError


def _rebuilt(code: int, data: memoryview) -> object:
    """Return the array that an extension carries, for the decoder; it takes no memory beyond that of the message.

    Raises
    ------
    ValueError
        It carries none.
    """
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(data))
    start = 2 + int.from_bytes(data[:2], "little")
    dtype, shape, words = parse_description(bytes(data[2:start])[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0"))
    if dtype is None:
        raise ValueError(f"it holds {words}, which this rank cannot make: is ml_dtypes installed?")
    if math.prod(shape) * dtype.itemsize != len(data) - start or max(shape, default=0) >= 1 << 62:
        raise ValueError(f"it holds {len(data)} bytes for an array {words}, which is a wrong number")
    array = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
    return array if array.flags.aligned and array.flags.writeable else array.copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _explain(given: object, error: Exception) -> str:
    """Say what in ``given`` made the encoder raise ``error``, at which place, and what to do."""
    path, value = "", given
    above: list[object] = []
    circular = False
    # A child that cannot be encoded on its own is the cause; if all children can, it is the object itself.
    while not circular and len(above) < sys.getrecursionlimit():
        above.append(value)
        for step, child in _children(value):
            fault = _fault(child)
            if fault is not None:
                path, value, error = path + step, child, fault
                break
        else:
            break
        circular = any(value is other for other in above)
    where = f"obj{_shortened(path)}"
    if circular:
        return f"{where}, which contains itself: give a structure without circles"
    if isinstance(error, RecursionError):
        return f"{where}, which is nested too deep: give a flatter structure"
    return f"{where}, {_problem(value, error)}"


def _fault(value: object) -> Exception | None:
    """Return the encoder's exception for an object; None if it can be encoded."""
    try:
        _encoder.encode(value)
    except _CANNOT as error:
        return error
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object as the encoder sees it, and how to get to each."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield f" (the key {reprlib.repr(key)})", key
            yield f"[{_quoted(key)}]", child
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((" (an element of the set)", child) for child in value)
    else:
        yield from ((f".{name}", getattr(value, name)) for name in _fields(value) if hasattr(value, name))


def _fields(value: object) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [attribute.name for attribute in getattr(type(value), "__attrs_attrs__", ())]


def _problem(value: object, error: Exception) -> str:
    """Say why one object cannot travel, and what to do instead."""
    if isinstance(error, msgspec.EncodeError) and isinstance(value, Sized):
        size = f"{value.nbytes} bytes" if isinstance(value, np.ndarray) else f"length {len(value)}"
        return (
            f"a {_type_name(type(value))} of {size}: no part of an object may have 4 GiB or more; give an array alone, to broadcast(), send() or "
            "all_gather(), or give the object in parts"
        )
    if isinstance(value, int):
        if isinstance(error, OverflowError):
            return "an int of more than 64 bits: give it as text, str(n), or as bytes"
        return f"a {_type_name(type(value))}, a kind of int: give int(n)"
    if isinstance(value, str):
        if isinstance(error, UnicodeError):
            return "a str with half a surrogate pair, which UTF-8 cannot encode: give bytes, os.fsencode(x) for a file name"
        return f"a {_type_name(type(value))}, a kind of str: give str(x)"
    if isinstance(value, np.ndarray):
        if isinstance(error, UsageError):
            return f"a NumPy array: {error}"
        return f"a {_type_name(type(value))}, a kind of array: give np.asarray(x), and its other data separately"
    kind = _type_name(type(value))
    if isinstance(value, complex | np.complexfloating):
        return f"a {kind}: give its parts, [z.real, z.imag]"
    if isinstance(value, np.datetime64 | np.timedelta64):
        return f'a {kind}, which no Python number equals: give x.astype("int64")'
    if isinstance(value, np.generic):
        return f"a {kind}, which no Python number equals: convert it with float(x)"
    if not isinstance(error, TypeError):
        return f"a {kind}: {error}"
    return f"a {kind}: {_CAN_TRAVEL}; give its data as one of these, and type= on the receiving rank"


def _type_name(kind: Any) -> str:
    if not isinstance(kind, type) or hasattr(kind, "__origin__") or hasattr(kind, "__args__"):
        return reprlib.repr(kind)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _quoted(key: object) -> str:
    return f'"{key}"' if isinstance(key, str) and key.isprintable() and '"' not in key else reprlib.repr(key)


def _shortened(path: str) -> str:
    return path if len(path) <= _TEXT_CHARACTERS else f"{path[: _TEXT_CHARACTERS // 2]}...{path[-_TEXT_CHARACTERS // 2 :]}"
