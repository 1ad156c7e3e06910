"""Arguments and results as bytes: msgpack by msgspec, with NumPy arrays as an extension. Nothing that comes can run code.

Large arrays stay beside the bytes, which hold a description in their place: they travel as they are, without a copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oneaccord.errors import UsageError

__all__ = ["ROOM_BYTES", "Bytes", "Parcel", "decoder", "pack", "unpack"]

ROOM_BYTES = 32
"""The room in front of packed bytes for other data."""

_ARRAY = 77
"""The code of the extension: the length of a description in two bytes, the description ``[dtype, shape]``, and the array in C order."""
_BESIDE = 78
"""The code of an array that is beside the bytes: its index, its dtype, its shape."""
_LARGE_BYTES = 1 << 18
"""Arrays of at least so many bytes are beside. Copies of smaller ones cost less than a further message (measured)."""
_CANNOT = (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError)
"""The exceptions of msgspec for an object that it cannot encode."""


Bytes = npt.NDArray[np.uint8]


class Parcel(NamedTuple):
    """A packed object: bytes, which begin after `ROOM_BYTES`, and large arrays beside them, which are not copied."""

    data: bytearray
    arrays: list[Bytes]

    @property
    def nbytes(self) -> int:
        """How many bytes travel."""
        return len(self.data) - ROOM_BYTES + sum(array.nbytes for array in self.arrays)


def pack(value: object, what: str) -> Parcel:
    """Return an object as bytes and large arrays.

    Parameters
    ----------
    value
        The object to send.
    what
        The object in words, such as ``"the result of 'eval'"``.

    Raises
    ------
    UsageError
        Something in it cannot travel.
    """
    data = bytearray(ROOM_BYTES)
    arrays: list[Bytes] = []
    _beside.arrays = arrays
    try:
        _encoder.encode_into(value, data, ROOM_BYTES)
    except _CANNOT as error:
        raise UsageError(
            f"{what} cannot travel: {error}. Give None, bool, int of 64 bits, float, str, bytes, lists, dicts, dataclasses, "
            "msgspec.Struct, times and NumPy arrays; leave any other object on its rank, and pass a reference made by Service.remote"
        ) from None
    finally:
        _beside.arrays = []
    return Parcel(data, arrays)


def unpack(decode: msgspec.msgpack.Decoder[Any], data: Any, arrays: Sequence[Bytes], what: str) -> Any:
    """Return the object in a buffer, with the large arrays that were beside it, in whose memory they stay.

    Raises
    ------
    UsageError
        It is not of the type that was asked for.
    """
    _beside.arrays = arrays
    try:
        return decode.decode(data)
    except (
        msgspec.DecodeError,
        RecursionError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        ImportError,
        AttributeError,
    ) as error:
        raise UsageError(f"{what} does not fit its type: {error}") from None
    finally:
        _beside.arrays = []


def decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for a type; None for plain Python objects.

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
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.nbytes >= _LARGE_BYTES:
            _beside.arrays.append(raw)
            return msgspec.msgpack.Ext(_BESIDE, msgspec.msgpack.encode([len(_beside.arrays) - 1, name, array.shape]))
        about = msgspec.msgpack.encode([name, array.shape])
        return msgspec.msgpack.Ext(_ARRAY, len(about).to_bytes(2, "little") + about + raw.tobytes())
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return value.item()
    raise TypeError(f"it holds an object of type {type(value).__qualname__}")


def _rebuilt(code: int, data: memoryview) -> object:
    """Return the array that an extension carries, in memory of its own."""
    if code == _BESIDE:
        index, name, shape = _place.decode(data)
        return np.frombuffer(_beside.arrays[index].data, _dtype(name), math.prod(shape)).reshape(shape)
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(data))
    start = 2 + int.from_bytes(data[:2], "little")
    name, shape = _about.decode(data[2:start])
    return np.frombuffer(data, _dtype(name), math.prod(shape), start).reshape(shape).copy()


def _dtype(name: str) -> Any:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(import_module("ml_dtypes"), name))


class _Beside(threading.local):
    """The large arrays of the object that this thread packs or unpacks; msgspec does not pass them to hooks."""

    arrays: Any = ()


_beside = _Beside()
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_about = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
_place = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]])
