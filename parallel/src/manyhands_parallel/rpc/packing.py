"""Arguments and results as bytes: msgpack by msgspec, with NumPy arrays as an extension. Nothing that comes can run code."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from manyhands.errors import UsageError

__all__ = ["ROOM_BYTES", "decoder", "pack", "unpack"]

ROOM_BYTES = 24
"""How much room for something else packed bytes have in front."""

_ARRAY = 77
"""The code of the extension: the length of a description in two bytes, the description ``[dtype, shape]``, and the array in C order."""
_CANNOT = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for an object that it cannot encode."""


def pack(value: object, what: str) -> bytearray:
    """Return an object as bytes, which begin after `ROOM_BYTES`.

    Parameters
    ----------
    value
        What is to travel.
    what
        The object in words, such as ``"the result of 'eval'"``.

    Raises
    ------
    UsageError
        Something in it cannot travel.
    """
    data = bytearray(ROOM_BYTES)
    try:
        _encoder.encode_into(value, data, ROOM_BYTES)
    except _CANNOT as error:
        raise UsageError(
            f"{what} cannot travel: {error}. Give None, bool, int of 64 bits, float, str, bytes, lists, dicts, dataclasses, "
            "msgspec.Struct, times and NumPy arrays; for anything else keep it where it is, with Service.remote"
        ) from None
    return data


def unpack(decode: msgspec.msgpack.Decoder[Any], data: Any, what: str) -> Any:
    """Return the object in a buffer.

    Raises
    ------
    UsageError
        It is not of the type that was asked for.
    """
    try:
        return decode.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError, ArithmeticError, ImportError, AttributeError) as error:
        raise UsageError(f"{what} does not fit its type: {error}") from None


def decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return what decodes into a type; None for plain Python objects.

    Raises
    ------
    UsageError
        msgspec knows no such type.
    """
    try:
        return _cached(expected)
    except TypeError:  # it cannot be hashed, or is unknown
        return _decoder(expected)


def _decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        return msgspec.msgpack.Decoder(Any if expected is None else expected, ext_hook=_rebuilt)
    except (TypeError, NameError, AttributeError) as error:
        raise UsageError(
            f"msgspec cannot decode into {expected!r}: {error}; give a dataclass, a msgspec.Struct, a TypedDict, numpy.ndarray, or a type "
            "such as list[int]"
        ) from None


_cached = lru_cache(256)(_decoder)


def _plain(value: object) -> object:
    """Return a NumPy array as an extension, and a NumPy scalar as a Python one."""
    if type(value) in (np.ndarray, np.memmap):
        array: np.ndarray[Any, Any] = np.asarray(value)
        name = array.dtype.name if array.dtype.kind == "V" and array.dtype.names is None else array.dtype.str
        if array.dtype.kind not in "biufc" and name.startswith(("|", "<", ">", "void")):
            raise TypeError(f"it holds an array of {array.dtype}")
        about = msgspec.msgpack.encode([name, array.shape])
        data = bytearray(len(about).to_bytes(2, "little") + about)
        data += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return msgspec.msgpack.Ext(_ARRAY, data)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return value.item()
    raise TypeError(f"it holds an object of type {type(value).__qualname__}")


def _rebuilt(code: int, data: memoryview) -> object:
    """Return the array that an extension carries, in memory of its own."""
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(data))
    start = 2 + int.from_bytes(data[:2], "little")
    name, shape = _about.decode(data[2:start])
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(getattr(import_module("ml_dtypes"), name))
    return np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_about = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
