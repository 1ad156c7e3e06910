"""``metadata.json``: the content of a checkpoint, with its places. The file is there if, and only if, the checkpoint is complete."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec

from oneaccord.errors import UsageError
from oneaccord_parallel.boxes import Box
from oneaccord_parallel.checkpoint.documents import Count, Extents, decode
from oneaccord_parallel.checkpoint.errors import CheckpointCorruptError, CheckpointFormatError
from oneaccord_parallel.checkpoint.safetensors import nbytes_of
from oneaccord_parallel.checkpoint.storage import DATA_FILE, LARGEST_METADATA
from oneaccord_parallel.checkpoint.tiling import tile

__all__ = ["BLOCK_BYTES", "Chunk", "Metadata", "Stamp", "StoredArray", "StoredValue", "dump", "from_json", "parse", "to_json"]

BLOCK_BYTES = 1 << 20
"""The bytes under one checksum: few enough that most of a partial read is checked, many enough that a terabyte has a million of them."""
_VERSION = 1
_DEEPEST = 100
"""How deep a value may be nested, so that no reader needs much of a stack."""
_LAST_S = 1e11
"""A time that no clock shows: three thousand years."""
_WORDS = 1000
"""The most characters of a fault that are shown; a text may be as long as the file."""
_HEAD = re.compile(rb'\{"format":"oneaccord-checkpoint","version":([1-9]\d{0,8}),"crc32":"([0-9a-f]{8})",')


class Chunk(msgspec.Struct, frozen=True):
    """A box of an array, as C-contiguous bytes from ``start`` on in a file."""

    offset: Extents
    shape: Extents
    file: str
    start: Count
    crc32: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]*\Z")]
    """The checksum of each block, eight digits each; empty if there are none."""

    @property
    def box(self) -> Box:
        """Which elements these are."""
        return Box(self.offset, self.shape)


class StoredArray(msgspec.Struct, frozen=True):
    """An array: the keys that lead to it, its dtype and shape, and its chunks, which do not overlap."""

    path: tuple[int | str, ...]
    dtype: str
    shape: Extents
    chunks: list[Chunk]


class StoredValue(msgspec.Struct, frozen=True):
    """A Python value, as `to_json` returns it."""

    path: tuple[int | str, ...]
    value: Any


class Stamp(msgspec.Struct):
    """Which save it was, when, and the length of each of its files."""

    save: str
    time: Annotated[float, msgspec.Meta(ge=-_LAST_S, le=_LAST_S)]
    step: Annotated[int, msgspec.Meta(ge=0)] | None
    files: dict[Annotated[str, msgspec.Meta(pattern=DATA_FILE)], Count]


class Metadata(Stamp):
    """All that ``metadata.json`` says."""

    world_size: Annotated[int, msgspec.Meta(ge=1)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    extra: Any
    arrays: dict[str, StoredArray]
    values: dict[str, StoredValue]


S = TypeVar("S", bound=Stamp)


def dump(metadata: Metadata) -> bytes:
    """Return the content of the file. Its checksum covers all but itself.

    Raises
    ------
    UsageError
        No reader would take so much.
    """
    body = msgspec.json.encode(metadata)[1:] + b"\n"
    if len(body) > LARGEST_METADATA - len(_begin("")) - 8:
        raise UsageError(
            f"the metadata of the checkpoint have {len(body):,} bytes, and a reader takes {LARGEST_METADATA:,}: give fewer or larger arrays, or "
            "less as extra="
        )
    return _begin(f"{zlib.crc32(_begin('') + body):08x}") + body


def parse(data: bytes, file: str, kind: type[S]) -> S:
    """Read the content of the file. An attacker who can write it can also make its checksum, so nothing in it is trusted for that.

    Raises
    ------
    CheckpointFormatError
        It is no checkpoint of oneaccord, or that of a newer version, or describes none that a save can have written: every element of each
        array is at one place within a data file of this save.
    CheckpointCorruptError
        It was changed after it was written.
    """
    head = _HEAD.match(data)
    if head is None:
        raise CheckpointFormatError(
            f"{file} is not the metadata of a oneaccord checkpoint, or damaged at its beginning", file=file
        )
    version, crc = int(head[1]), head[2].decode()
    if version > _VERSION:
        raise CheckpointFormatError(
            f"{file} has version {version} of the format, but this oneaccord reads up to {_VERSION}: install a newer one",
            file=file,
        )
    if f"{zlib.crc32(_begin('') + data[head.end() :]):08x}" != crc:
        raise CheckpointCorruptError(f"{file} is damaged: its checksum is not {crc}, as it was when it was written", file=file)
    found = decode(b"{" + data[head.end() :], kind, file, "does not have the fields of a checkpoint")
    try:
        _check_names(found)
        if isinstance(found, Metadata):
            _check(found)
    except ValueError as error:
        raise CheckpointFormatError(f"{file} does not describe a checkpoint: {str(error)[:_WORDS]}", file=file) from error
    return found


def _check_names(stamp: Stamp) -> None:
    for name in stamp.files:
        if re.match(DATA_FILE, name)[1] != stamp.save:  # type: ignore[index] # as the field demands
            raise ValueError(f"the file {name!r} is not one of its save, {stamp.save!r}")
    if not re.fullmatch("[0-9a-f]{16}", stamp.save):
        raise ValueError(f"{stamp.save!r} is not the name of a save, which has 16 hexadecimal digits")


def _check(metadata: Metadata) -> None:
    """Find out whether a save can have written this.

    Raises
    ------
    ValueError
        It cannot.
    """
    pieces: list[tuple[str, int, int, str]] = []
    for name, array in metadata.arrays.items():
        try:
            pieces += [(*piece, name) for piece in _pieces(array, metadata)]
        except ValueError as error:
            raise ValueError(f"array {name!r}: {error}") from error
    for (file, _, stop, one), (same, start, _, other) in pairwise(sorted(pieces)):
        if file == same and start < stop:
            raise ValueError(f"arrays {one!r} and {other!r} share bytes {start} to {stop} of {file}")
    for name, value in metadata.values.items():
        if name in metadata.arrays:
            raise ValueError(f"{name!r} is both an array and a value")
        try:
            from_json(value.value)
        except ValueError as error:
            raise ValueError(f"value {name!r}: {error}") from error
    from_json(metadata.extra)
    leaves: list[StoredArray | StoredValue] = [*metadata.arrays.values(), *metadata.values.values()]
    paths = sorted(tuple((isinstance(key, str), key) for key in leaf.path) for leaf in leaves)
    for above, below in pairwise(paths):  # of those that begin with a path, one comes next
        if below[: len(above)] == above:
            raise ValueError(f"a leaf is at {[key for _, key in above]}, and another one there or below it")


def _pieces(array: StoredArray, metadata: Metadata) -> list[tuple[str, int, int]]:
    """Return the file of each chunk that has bytes, and which of its bytes these are."""
    nbytes_of(array.dtype, array.shape)
    width = nbytes_of(array.dtype, ())
    for chunk in array.chunks:
        if not len(chunk.offset) == len(chunk.shape) == len(array.shape):
            raise ValueError(f"a piece has shape {chunk.shape} at {chunk.offset}, and the array {len(array.shape)} axes")
    if not tile((chunk.box for chunk in array.chunks), array.shape):
        held = sum(chunk.box.size for chunk in array.chunks)
        raise ValueError(
            f"its {len(array.chunks)} pieces do not hold each element of shape {array.shape} exactly once: they have {held} elements in all"
        )
    found = []
    for chunk in array.chunks:
        nbytes = chunk.box.size * width
        if chunk.start + nbytes > (length := metadata.files.get(chunk.file, -1)):
            has = "is not among its files" if length < 0 else f"has {length} bytes"
            raise ValueError(
                f"the piece at {chunk.offset} is bytes {chunk.start} to {chunk.start + nbytes} of {chunk.file!r}, which {has}"
            )
        if len(chunk.crc32) != 8 * -(-nbytes // metadata.block_bytes):
            raise ValueError(
                f"the piece at {chunk.offset} has {len(chunk.crc32)} digits of checksums, and {nbytes} bytes in blocks of "
                f"{metadata.block_bytes}, which have eight each"
            )
        if nbytes:
            found.append((chunk.file, chunk.start, chunk.start + nbytes))
    return found


def _begin(crc: str) -> bytes:
    return f'{{"format":"oneaccord-checkpoint","version":{_VERSION},"crc32":"{crc}",'.encode()


def to_json(value: Any, depth: int = 0) -> Any:
    """Return a value in a form that JSON can hold. A value that JSON lacks becomes an object with one key, such as ``{"$float": "7ff0000000000000"}``.

    Raises
    ------
    UsageError
        It is not None, a bool, int, float, complex, str or bytes, or a list, tuple or dict of such, or is nested too deep.
    """
    if depth > _DEEPEST:
        raise UsageError(
            f"metadata cannot hold what is nested deeper than {_DEEPEST} lists and dicts, or contains itself; give a flatter one"
        )

    def inner(item: Any) -> Any:
        return to_json(item, depth + 1)

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
            return [inner(item) for item in value]
        case dict():
            if all(isinstance(key, str) and _is_utf8(key) and not key.startswith("$") for key in value):
                return {key: inner(item) for key, item in value.items()}
            return {"$dict": [[inner(key), inner(item)] for key, item in value.items()]}
    raise UsageError(
        f"metadata cannot hold a {type(value).__qualname__}; give None, bool, int, float, complex, str, bytes, list or dict"
    )


def from_json(value: Any, depth: int = 0) -> Any:
    """Return the argument of `to_json`; tuples have become lists, except in keys, and bytearrays bytes.

    Raises
    ------
    ValueError
        It is nothing that `to_json` returns.
    """
    if depth > _DEEPEST:
        raise ValueError(f"it is nested deeper than {_DEEPEST} lists and dicts")

    def inner(item: Any) -> Any:
        return from_json(item, depth + 1)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$int": str(digits)} if len(value) == 1:
            return int(digits, 16)
        case {"$float": str(bits)} if len(value) == 1 and len(bits) == 16:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$complex": [real, imag]} if len(value) == 1:
            return complex(_number(from_json(real)), _number(from_json(imag)))
        case {"$str": str(text)} if len(value) == 1:
            return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
        case {"$bytes": str(text)} if len(value) == 1:
            return base64.b64decode(text, validate=True)
        case {"$dict": list(items)} if len(value) == 1:
            found = {}
            for item in items:
                if not isinstance(item, list) or len(item) != 2:
                    raise ValueError("a dict has an entry that is not a key with a value")
                found[_key(inner(item[0]))] = inner(item[1])
            if len(found) < len(items):
                raise ValueError("a dict has the same key twice")
            return found
    if any(key.startswith("$") for key in value):
        raise ValueError(f"an object with the keys {[*value]} does not represent a value")
    return {key: inner(item) for key, item in value.items()}


def _number(value: Any) -> float:
    if not isinstance(value, float):
        raise ValueError(f"{value!r} is not a part of a complex number")
    return value


def _key(value: Any) -> Any:
    """Return a key of a dict: lists were tuples, or it could not have been one."""
    if isinstance(value, dict):
        raise ValueError("a dict cannot be a key")
    return tuple(map(_key, value)) if isinstance(value, list) else value


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text) if not text.isascii() else True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
