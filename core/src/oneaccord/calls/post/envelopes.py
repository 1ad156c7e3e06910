"""What stands in front of a message with a tag: a few fixed bytes, dtype and shape, in one opening of a fixed length.

A receiver cannot predict a tag, but it can predict that record number n comes next from a peer. So the tag stands in the payload of the
opening, and its header is the same for all records. An opening carries the beginning of the data as well, so that a short message is one
opening. The kinds of records:

==========  =========================================================================================================
`EAGER`     a whole message; what does not fit into the opening follows at once, in one slot of a mailbox
`ANNOUNCE`  a long message, of which no data has been sent
`GO`        the answer to it, when it has met its receive: how many bytes to send, which are none if they do not fit
`DATA`      the data of a message that was announced: straight into the receiver's memory
`MET`       the answer to a synchronous message when it has met its receive
==========  =========================================================================================================
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from oneaccord.arrays.dtypes import CODES, dtype_code, dtype_from_code, dtype_name, fields_of
from oneaccord.calls.messages.point_to_point import OPENING_BYTES
from oneaccord.contract.backend import Damaged
from oneaccord.contract.header import MAX_DIMENSIONS, CallSignature

__all__ = [
    "ANNOUNCE",
    "DATA",
    "EAGER",
    "GO",
    "MET",
    "NO_RANK",
    "NO_TAG",
    "OBJECT",
    "READY",
    "RECORD",
    "SYNC",
    "Envelope",
    "answer",
    "envelope",
    "opened",
]

RECORD = CallSignature("tagged_message")
"""What the headers of all records say."""

EAGER, ANNOUNCE, GO, DATA, MET = range(1, 6)
OBJECT, SYNC, READY = 1, 2, 4
"""Flags: the bytes are an object; the sender waits for `MET`; the receive must be there."""

NO_RANK, NO_TAG = -1, -1
"""Stand for any rank and for any tag, in a receive."""

_HEAD = struct.Struct("<IBBBBqQQHH4x")
"""Context, kind, flags, dtype, dimensions, tag, number, bytes, and the length of the fields of a structured dtype."""
_HEAD_BYTES = _HEAD.size
_SHAPES = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(MAX_DIMENSIONS + 1))
_IMPOSSIBLE = 1 << 62


class Envelope(NamedTuple):
    """What an opening says.

    Attributes
    ----------
    context
        The number of the group.
    kind, flags
        As above.
    tag
        The message's tag.
    number
        The sender's number of the message, if an answer must name it.
    nbytes
        The size of the message; in `GO`, how many bytes to send.
    dtype, shape
        Those of the array; no dtype if this process has none for it, or if it is an object.
    words
        The array in words if this process has no dtype for it.
    start
        Where the data begins in the opening.
    """

    context: int
    kind: int
    flags: int
    tag: int
    number: int
    nbytes: int
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    words: str
    start: int


def envelope(
    kind: int,
    flags: int,
    context: int,
    tag: int,
    number: int,
    nbytes: int,
    dtype: np.dtype[Any] | None,
    shape: tuple[int, ...],
) -> bytes:
    """Return what stands in an opening in front of the data."""
    if dtype is None:
        return _HEAD.pack(context, kind, flags, 0, 0, tag, number, nbytes, 0, 0)
    fields = fields_of(dtype) if dtype.names else b""
    code = CODES.get(dtype) or dtype_code(dtype)
    head = _HEAD.pack(context, kind, flags, code, len(shape), tag, number, nbytes, len(fields), 0)
    return head + _SHAPES[len(shape)].pack(*shape) + fields + bytes(-len(fields) % 8)


def answer(kind: int, number: int, nbytes: int = 0) -> bytes:
    """Return an opening that answers message ``number`` of its receiver, or in which the data of a message begins."""
    return _HEAD.pack(0, kind, 0, 0, 0, 0, number, nbytes, 0, 0)


def opened(opening: memoryview, peer: int) -> Envelope:
    """Read an opening of ``peer``.

    Raises
    ------
    Damaged
        No oneaccord writes such an opening.
    """
    context, kind, flags, code, ndim, tag, number, nbytes, length, _ = _HEAD.unpack_from(opening)
    if not code:
        if not EAGER <= kind <= MET or nbytes >= _IMPOSSIBLE:
            raise Damaged(peer, f"rank {peer} sent a record of kind {kind} with {nbytes} bytes")
        return Envelope(context, kind, flags, tag, number, nbytes, None, (), "", _HEAD_BYTES)
    start = _HEAD_BYTES + 8 * ndim
    end = start + length + -length % 8
    if ndim > MAX_DIMENSIONS or end > OPENING_BYTES or kind not in (EAGER, ANNOUNCE):
        raise Damaged(peer, f"rank {peer} sent the description of an impossible array, of {ndim} dimensions")
    shape = _SHAPES[ndim].unpack_from(opening, _HEAD_BYTES)
    dtype = _dtype(code, opening[start : start + length].tobytes())
    size = nbytes if dtype is None else math.prod(shape) * dtype.itemsize
    if size != nbytes or nbytes >= _IMPOSSIBLE:
        raise Damaged(peer, f"rank {peer} sent the description of an impossible array: {dtype}{list(shape)} of {nbytes} bytes")
    words = "" if dtype is not None else f"{dtype_name(code)}{list(shape)}"
    return Envelope(context, kind, flags, tag, number, nbytes, dtype, shape, words, end)


@lru_cache(maxsize=256)
def _dtype(code: int, fields: bytes) -> np.dtype[Any] | None:
    return dtype_from_code(code, fields)
