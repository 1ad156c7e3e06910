"""``metadata.json``: what a checkpoint holds, and where. The file is there if, and only if, the checkpoint is complete."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from typing import Any, TypeVar

import msgspec

from manyhands.errors import UsageError
from manyhands_parallel.boxes import Box
from manyhands_parallel.checkpoint.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["BLOCK_BYTES", "Chunk", "Metadata", "Stamp", "StoredArray", "StoredValue", "dump", "from_json", "parse", "to_json"]

BLOCK_BYTES = 1 << 20
"""The bytes under one checksum: few enough that most of a partial read is checked, many enough that a terabyte has a million of them."""
_VERSION = 1
_HEAD = re.compile(rb'\{"format":"manyhands-checkpoint","version":(\d{1,9}),"crc32":"([0-9a-f]{8})",')


class Chunk(msgspec.Struct, frozen=True):
    """A box of an array, as C-contiguous bytes from ``start`` on in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    crc32: str
    """The checksum of each block, eight digits each; empty if there are none."""

    @property
    def box(self) -> Box:
        """Which elements these are."""
        return Box(self.offset, self.shape)


class StoredArray(msgspec.Struct, frozen=True):
    """An array: the keys that lead to it, its dtype and shape, and its chunks, which do not overlap."""

    path: tuple[int | str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class StoredValue(msgspec.Struct, frozen=True):
    """A Python value, as `to_json` returns it."""

    path: tuple[int | str, ...]
    value: Any


class Stamp(msgspec.Struct):
    """Which save it was, when, and the length of each of its files."""

    save: str
    time: float
    step: int | None
    files: dict[str, int]


class Metadata(Stamp):
    """All that ``metadata.json`` says."""

    world_size: int
    block_bytes: int
    extra: Any
    arrays: dict[str, StoredArray]
    values: dict[str, StoredValue]


S = TypeVar("S", bound=Stamp)


def dump(metadata: Metadata) -> bytes:
    """Return the content of the file. Its checksum covers all but itself."""
    body = msgspec.json.encode(metadata)[1:] + b"\n"
    return _begin(f"{zlib.crc32(_begin('') + body):08x}") + body


def parse(data: bytes, file: str, kind: type[S]) -> S:
    """Read the content of the file.

    Raises
    ------
    CheckpointFormatError
        It is no checkpoint of manyhands, or that of a newer version.
    CheckpointCorruptError
        It was changed after it was written.
    """
    head = _HEAD.match(data)
    if head is None:
        raise CheckpointFormatError(f"{file} is no metadata of a manyhands checkpoint, or damaged at its beginning", file=file)
    version, crc = int(head[1]), head[2].decode()
    if version > _VERSION:
        raise CheckpointFormatError(
            f"{file} has version {version} of the format, and this manyhands reads up to {_VERSION}: install a newer one",
            file=file,
        )
    if f"{zlib.crc32(_begin('') + data[head.end() :]):08x}" != crc:
        raise CheckpointCorruptError(f"{file} is damaged: its checksum is not {crc}, as it was when it was written", file=file)
    try:
        return msgspec.json.decode(b"{" + data[head.end() :], type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8 is a plain ValueError
        raise CheckpointFormatError(f"{file} does not have the fields of a checkpoint: {error}", file=file) from error


def _begin(crc: str) -> bytes:
    return f'{{"format":"manyhands-checkpoint","version":{_VERSION},"crc32":"{crc}",'.encode()


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it. What JSON lacks becomes an object with one key, such as ``{"$float": "7ff0000000000000"}``.

    Raises
    ------
    UsageError
        It is not None, a bool, int, float, complex, str or bytes, or a list, tuple or dict of such.
    """
    match value:
        case None | bool():
            return value
        case int():
            return int(value) if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        case float():
            # The bits, for the NaNs are many.
            return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        case complex():
            return {"$complex": [to_json(value.real), to_json(value.imag)]}
        case str():
            # A text with half a surrogate pair is no UTF-8.
            return str(value) if _is_utf8(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        case bytes() | bytearray():
            return {"$bytes": _base64(bytes(value))}
        case list() | tuple():
            return [to_json(item) for item in value]
        case dict():
            if all(isinstance(key, str) and _is_utf8(key) and not key.startswith("$") for key in value):
                return {key: to_json(item) for key, item in value.items()}
            return {"$dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise UsageError(
        f"metadata cannot hold a {type(value).__qualname__}; give None, bool, int, float, complex, str, bytes, list or dict"
    )


def from_json(value: Any) -> Any:
    """Return what `to_json` was given; tuples have become lists, and bytearrays bytes."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$int": digits}:
            return int(digits, 16)
        case {"$float": bits}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$complex": [real, imag]}:
            return complex(from_json(real), from_json(imag))
        case {"$str": text}:
            return base64.b64decode(text).decode("utf-8", "surrogatepass")
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$dict": items}:
            return {from_json(key): from_json(item) for key, item in items}
    return {key: from_json(item) for key, item in value.items()}


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text) if not text.isascii() else True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
