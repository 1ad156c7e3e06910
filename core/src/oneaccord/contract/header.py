"""The facts on which two ranks must agree, and the header that carries them in front of every message."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from oneaccord.arrays.dtypes import OP_NAMES, dtype_code, dtype_from_code, dtype_name, fields_of
from oneaccord.common.data import as_dataclass
from oneaccord.contract.backend import HEADER_BYTES

__all__ = [
    "DESCRIPTION_BYTES",
    "INDEX_AT",
    "MAX_DIMENSIONS",
    "MET_CHANNEL",
    "NBYTES_AT",
    "NUMBER_AT",
    "OPERATIONS",
    "POST_CHANNEL",
    "POST_NUMBER",
    "CallSignature",
    "Header",
    "can_describe",
    "pack_description",
    "pack_header",
    "parse_description",
    "parse_header",
    "piece_header",
    "split_header",
    "split_headers",
]

_FORMAT = struct.Struct("<4sBBBBiIIQQ8sQI8x")
assert _FORMAT.size == HEADER_BYTES
_MAGIC = b"OAC1"
NUMBER_AT, NBYTES_AT, INDEX_AT = 20, 44, 52
"""Where a header has the sequence number, the length and the index of its message."""

OPERATIONS: tuple[str, ...] = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier"),
    *("send", "send_object", "broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("scan", "exscan"),
    "tagged_message",
)
"""The operations that send messages; a header names one by its position."""

POST_NUMBER: int = 31
"""The number of no group: its channels are those of messages with tags, of all groups of a job."""
POST_CHANNEL: int = 2 * POST_NUMBER + 1
"""The channel of the records that carry these messages."""
MET_CHANNEL: int = 2 * POST_NUMBER
"""Stands for a channel where these messages are counted, sent ones and received ones; nothing travels there."""

MAX_DIMENSIONS: int = 32
"""The most dimensions of an array that is sent from rank to rank."""

_ABOUT_BYTES = 8 * MAX_DIMENSIONS
_DESCRIPTION = struct.Struct(f"<BBH4x{_ABOUT_BYTES}s")
DESCRIPTION_BYTES: int = _DESCRIPTION.size
"""The bytes of a description."""


@as_dataclass
class CallSignature(msgspec.Struct, frozen=True, dict=True):
    """One rank's call, as far as all ranks must have made the same.

    Attributes
    ----------
    operation
        The method that was called.
    dtype
        The wire code of the dtype; 0 for a barrier.
    shape
        The shape that every rank must have given: the array's shape, or its shape without axis 0 if ``counts`` divide that.
    op, op_code
        The reduction's name and code; empty and 0 if there is none.
    root
        The root, -1 if there is none.
    counts
        Elements of axis 0 per rank, if the caller gave them.
    algorithm
        How it is carried out; ranks with different selection tables must not exchange bytes.
    count
        The number of elements of ``shape``.
    part
        The part of the operation, if it takes several calls: data about sizes that travel ahead.
    reproducible
        Whether the order of reduction was asked to be fixed.
    device
        The memory of the arrays, ``"cuda"``; empty for the host's memory.
    fields
        The fields of a structured dtype, as `fields_of` describes them.
    """

    operation: str
    dtype: int = 0
    shape: tuple[int, ...] = ()
    op: str = ""
    op_code: int = 0
    root: int = -1
    counts: tuple[int, ...] | None = None
    algorithm: str = ""
    count: int = 0
    part: str = ""
    reproducible: bool = False
    device: str = ""
    fields: bytes = b""

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that differ if any field differs."""
        fields = (
            self.operation,
            self.dtype,
            self.shape,
            self.op,
            self.root,
            self.counts,
            self.algorithm,
            self.part,
            self.reproducible,
            self.device,
            self.fields,
        )
        return hashlib.blake2b(repr(fields).encode(), digest_size=8).digest()

    @property
    def nbytes(self) -> int:
        """The size of the array, or of the parts of all ranks if ``counts`` divide it; 0 if there is none."""
        dtype = dtype_from_code(self.dtype, self.fields) if self.dtype else None
        rows = 1 if self.counts is None else sum(self.counts)
        return 0 if dtype is None else self.count * rows * dtype.itemsize

    @property
    def operation_code(self) -> int:
        """The position of the operation in `OPERATIONS`."""
        return OPERATIONS.index(self.operation)

    def describe(self) -> str:
        """Return the call in words, such as ``all_reduce(float32[2, 3], op="sum")``."""
        parts = []
        if self.dtype:
            where = f" on {self.device}" if self.device else ""
            parts.append(f"{dtype_name(self.dtype, self.fields)}{list(self.shape)}{where}")
        if self.op:
            parts.append(f'op="{self.op}"')
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.counts is not None:
            parts.append(f"counts={list(self.counts)}")
        if self.reproducible:
            parts.append("reproducible=True")
        about = f"{self.part} of " if self.part else ""
        return f"{about}{self.operation}({', '.join(parts)})"


class Header(msgspec.Struct, frozen=True):
    """A received header, with the peer's call in words."""

    operation: str
    op: str
    dtype: int
    root: int
    sender: int
    channel: int
    sequence: int
    count: int
    digest: bytes
    nbytes: int
    index: int

    def describe(self) -> str:
        """Return the peer's call in words, as far as the header shows it."""
        parts = [f"{dtype_name(self.dtype)}, {self.count} elements"] if self.dtype else []
        if self.op:
            parts.append(f'op="{self.op}"')
        if self.root >= 0:
            parts.append(f"root={self.root}")
        return f"{self.operation}({', '.join(parts)})"


def can_describe(dtype: np.dtype[Any], ndim: int) -> bool:
    """Return whether there is a description of arrays of a dtype and so many dimensions."""
    return 8 * ndim + len(fields_of(dtype)) <= _ABOUT_BYTES


@lru_cache(maxsize=256)
def pack_description(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the dtype and shape of an array, for another rank; `can_describe` it."""
    extents, fields = b"".join(extent.to_bytes(8, "little") for extent in shape), fields_of(dtype)
    return _DESCRIPTION.pack(dtype_code(dtype), len(shape), len(fields), extents + fields)


def parse_description(data: bytes) -> tuple[np.dtype[Any] | None, tuple[int, ...], str]:
    """Return what `pack_description` packed, and its words; no dtype if this process has none for it, or no array can have it."""
    code, ndim, length, about = _DESCRIPTION.unpack(data)
    if ndim > MAX_DIMENSIONS:
        return None, (), f"an array of {ndim} dimensions"
    shape = tuple(int.from_bytes(about[start : start + 8], "little") for start in range(0, 8 * ndim, 8))
    fields = about[8 * ndim : 8 * ndim + length]
    dtype = dtype_from_code(code, fields)
    return dtype, shape, f"{dtype_name(code, fields)}{list(shape)}"


def pack_header(signature: CallSignature, sender: int, channel: int, sequence: int, nbytes: int, index: int) -> bytes:
    """Return the header of message ``index`` of a call, `HEADER_BYTES` bytes."""
    return _FORMAT.pack(
        _MAGIC,
        signature.operation_code,
        signature.op_code,
        signature.dtype,
        0,
        signature.root,
        sender,
        channel,
        sequence,
        signature.count,
        signature.digest,
        nbytes,
        index,
    )


def split_headers(
    signature: CallSignature, channel: int, messages: Iterable[tuple[int, int, int]]
) -> list[tuple[bytes, bytes]]:
    """Return the halves of the headers of messages, each given by its sender, its bytes and its index."""
    return [split_header(pack_header(signature, sender, channel, 0, nbytes, index)) for sender, nbytes, index in messages]


def split_header(header: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and after the sequence number, the only part that changes from call to call."""
    return header[:NUMBER_AT], header[NUMBER_AT + 8 :]


def piece_header(header: bytes, nbytes: int, offset: int) -> bytes:
    """Return the header of a piece of a message that is cut, of ``nbytes`` bytes from ``offset`` on; that of a whole message is its own."""
    return header[:NBYTES_AT] + nbytes.to_bytes(8, "little") + header[INDEX_AT : INDEX_AT + 4] + offset.to_bytes(8, "little")


def parse_header(data: bytes) -> Header | None:
    """Take a header apart; None when no oneaccord of this version wrote it."""
    magic, operation, op, dtype, _, root, sender, channel, sequence, count, digest, nbytes, index = _FORMAT.unpack(data)
    if magic != _MAGIC or operation >= len(OPERATIONS):
        return None
    op_name = OP_NAMES[op - 1] if 0 < op <= len(OP_NAMES) else {0: "", 254: "a function"}.get(op, "a ufunc")
    return Header(OPERATIONS[operation], op_name, dtype, root, sender, channel, sequence, count, digest, nbytes, index)
