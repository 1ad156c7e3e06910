"""Send and receive: arrays from one rank to one other, with their dtype and shape in front.

An array travels as a *description* (dtype, shape) and then its bytes in pieces. The receiver checks the description before
it takes memory or touches ``out=``. Messages of one direction between two ranks are numbered and never overtake each other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from manyhands.arrays import Array, bytes_of
from manyhands.backend import Transfer, Transport
from manyhands.deadline import Deadline
from manyhands.dtypes import dtype_code, dtype_from_code, dtype_name
from manyhands.waiting import StallCallback, Waiter
from manyhands.wire import MAX_DIMENSIONS, CallSignature, pack_header

__all__ = ["ARRAY", "DescriptionMismatch", "Incoming", "Outgoing", "move"]

_DESCRIPTION = struct.Struct(f"<BB6x{MAX_DIMENSIONS}Q")
_PIECE_BYTES = 1 << 20
ARRAY: CallSignature = CallSignature("send")
"""What the headers of all messages between two ranks say that carry an array of the user's."""


class DescriptionMismatch(Exception):
    """The array that ``peer`` sent is not the one that was expected."""

    def __init__(self, peer: int, problem: str) -> None:
        super().__init__(problem)
        self.peer: int = peer
        self.problem: str = problem


class Outgoing:
    """An array on its way to ``peer``: message ``number`` of that direction."""

    is_send = True

    def __init__(self, rank: int, peer: int, channel: int, number: int, array: Array, signature: CallSignature = ARRAY) -> None:
        self.peer = peer
        self.finished = False
        self._rank = rank
        self._channel = channel
        self.number = number
        self._array = array
        self._signature = signature

    def messages(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield a header and a payload for each message; the next is asked for when one is done."""
        array = self._array
        shape = array.shape + (0,) * (MAX_DIMENSIONS - array.ndim)
        description = _DESCRIPTION.pack(dtype_code(array.dtype), array.ndim, *shape)
        yield self._header(len(description), 0), memoryview(description)
        data = bytes_of(array)
        for index, start in enumerate(range(0, len(data), _PIECE_BYTES), start=1):
            piece = data[start : start + _PIECE_BYTES]
            yield self._header(len(piece), index), piece

    def _header(self, nbytes: int, index: int) -> bytes:
        return pack_header(self._signature, self._rank, self._channel, self.number, nbytes, index)


class Incoming:
    """An array on its way from ``peer``, into ``out`` or into new memory; ``array`` is valid once it has come."""

    is_send = False

    def __init__(self, peer: int, channel: int, number: int, out: Array | None, signature: CallSignature = ARRAY) -> None:
        self.peer = peer
        self.finished = False
        self.array: Array = np.empty(0) if out is None else out
        self._channel = channel
        self.number = number
        self._out = out
        self._signature = signature

    def messages(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the expected header and the memory for each message; the next is asked for when one is done."""
        description = bytearray(_DESCRIPTION.size)
        yield self._header(len(description), 0), memoryview(description)
        dtype, shape = self._read(bytes(description))
        if self._out is None:
            try:
                self.array = np.empty(shape, dtype)
            except (MemoryError, ValueError) as error:
                raise DescriptionMismatch(
                    self.peer, f"there is no memory for the {dtype}{list(shape)} that it sent: {error}"
                ) from error
        data = bytes_of(self.array)
        for index, start in enumerate(range(0, len(data), _PIECE_BYTES), start=1):
            piece = data[start : start + _PIECE_BYTES]
            yield self._header(len(piece), index), piece

    def _read(self, description: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
        code, ndim, *extents = _DESCRIPTION.unpack(description)
        shape = tuple(extents[:ndim])
        dtype = dtype_from_code(code)
        sent = f"{dtype_name(code)}{list(shape)}"
        if self._out is not None and (dtype != self._out.dtype or shape != self._out.shape):
            expected = f"{self._out.dtype}{list(self._out.shape)}"
            raise DescriptionMismatch(
                self.peer, f"rank {self.peer} sent {sent}, and out= is {expected}: give an out= like what is sent, or none"
            )
        if dtype is None:
            raise DescriptionMismatch(
                self.peer, f"rank {self.peer} sent {sent}, and this rank cannot make such an array: pip install ml_dtypes"
            )
        if ndim > MAX_DIMENSIONS or math.prod(shape) * dtype.itemsize >= 1 << 62:
            raise DescriptionMismatch(self.peer, f"rank {self.peer} sent a description that cannot be: {sent}")
        return dtype, shape

    def _header(self, nbytes: int, index: int) -> bytes:
        return pack_header(self._signature, self.peer, self._channel, self.number, nbytes, index)


def move(transport: Transport, flows: list[Outgoing | Incoming], deadline: Deadline, on_stall: StallCallback) -> None:
    """Move arrays, all at once, so that two ranks that exchange arrays never wait for each other's receive.

    Raises
    ------
    DescriptionMismatch
        Something else came than ``out=`` can take; ``out=`` is untouched.
    Overdue, LinkLost, HeaderMismatch
        As `Waiter.wait`; ``out=`` may be partly written.
    """
    transport.connect(sorted({flow.peer for flow in flows}), deadline)
    waiter = Waiter(transport, deadline, on_stall)
    active: list[tuple[Transfer, Outgoing | Incoming, Iterator[tuple[bytes, memoryview]]]] = []
    for flow in flows:
        _proceed(transport, flow, flow.messages(), active)
    while active:
        peers = [entry[1].peer for entry in active]
        waiter.wait([entry[0] for entry in active], peers.copy)
        finished = [entry for entry in active if entry[0].done]
        active = [entry for entry in active if not entry[0].done]
        for _, flow, messages in finished:
            _proceed(transport, flow, messages, active)


def _proceed(
    transport: Transport,
    flow: Outgoing | Incoming,
    messages: Iterator[tuple[bytes, memoryview]],
    active: list[tuple[Transfer, Outgoing | Incoming, Iterator[tuple[bytes, memoryview]]]],
) -> None:
    """Start the next messages of a flow, until one does not move at once."""
    start = transport.send if flow.is_send else transport.recv
    for header, payload in messages:
        transfer = start(flow.peer, header, payload)
        if not transfer.done:
            active.append((transfer, flow, messages))
            return
    flow.finished = True
