"""Send and receive: arrays from one rank to one other, with their dtype and shape in front.

An array travels as an *opening*, and then the rest of its bytes. The opening has one fixed length, because the receiver does not know the array:

=======================  ==================  =====================================================
dtype and shape          the first 8 bytes   the rest of the opening
=======================  ==================  =====================================================
new in this direction    0                   their description, and the array's first 1,024 bytes
as once before           their tag           the array's first 1,288 bytes
=======================  ==================  =====================================================

Both ends of a direction remember the same kinds, in the same order (`Kinds`). The receiver checks the opening before it takes memory or touches
``out=``. Messages of one direction between two ranks are numbered and never overtake each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from oneaccord.arrays.memory import Array, bytes_of, new_array
from oneaccord.calls.engine.adapter import posted_bytes
from oneaccord.calls.engine.waiting import StallCallback, Waiter, checked_transfer, lent
from oneaccord.contract.backend import Damaged, Mailbox, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import (
    DESCRIPTION_BYTES,
    CallSignature,
    pack_description,
    pack_header,
    parse_description,
    split_header,
)

__all__ = [
    "AT_BEGINNING",
    "FIRST_BYTES",
    "OPENED",
    "OPENING_BYTES",
    "OVER",
    "TAG_BYTES",
    "DescriptionMismatch",
    "Incoming",
    "Kind",
    "Kinds",
    "Outgoing",
    "move",
]

AT_BEGINNING, OPENED, OVER, DONE = range(4)
"""How far a message has got: see `move`."""

TAG_BYTES: int = 8
FIRST_BYTES: int = DESCRIPTION_BYTES + 1024
"""The longest array that travels in its opening alone, if its kind is known."""
OPENING_BYTES: int = TAG_BYTES + FIRST_BYTES
_DESCRIBED = bytes(TAG_BYTES)
_PIECE_BYTES = 1 << 20
_MAX_HEADERS = 1024
_headers: dict[tuple[bytes, int, int, int, int], tuple[bytes, bytes]] = {}
"""Headers of messages but for their number, before and after it."""

Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""A dtype and a shape."""


class DescriptionMismatch(Exception):
    """The array that ``peer`` sent is not the one that was expected."""

    def __init__(self, peer: int, problem: str) -> None:
        super().__init__(problem)
        self.peer: int = peer
        self.problem: str = problem


class Kinds:
    """The dtypes and shapes that have travelled in one direction, at most 256: when there are more, both ends forget the oldest.

    Attributes
    ----------
    most
        How many are remembered.
    forgotten
        How many were forgotten.
    users
        Compiled sends that use a kind, and become ``stale`` when one is forgotten.
    """

    most: ClassVar[int] = 256

    __slots__ = ("_kinds", "_tags", "forgotten", "users")

    def __init__(self) -> None:
        self.forgotten: int = 0
        self.users: list[Any] = []
        self._kinds: dict[bytes, Kind] = {}
        self._tags: dict[Kind, bytes] = {}

    def tag(self, kind: Kind) -> bytes | None:
        """Return the tag of a kind that is known, of `TAG_BYTES` bytes."""
        return self._tags.get(kind)

    def kind(self, tag: bytes) -> Kind | None:
        """Return the kind of a tag that is known."""
        return self._kinds.get(tag)

    def learn(self, kind: Kind) -> None:
        """Remember a kind that is not known, whose description has just travelled."""
        while len(self._kinds) >= self.most:
            self.forgotten += 1
            while self.users:
                self.users.pop().stale = True
            self._tags.pop(self._kinds.pop(next(iter(self._kinds))), None)
        tag = hashlib.blake2b(pack_description(*kind), digest_size=TAG_BYTES).digest()
        other = self._kinds.get(tag)
        if other is not None:  # dtypes that differ only in titles and the like, which do not travel, are one kind
            self._tags.pop(other, None)
        self._kinds[tag], self._tags[kind] = kind, tag


class Outgoing:
    """An array on its way to ``peer``: message ``number`` of that direction, which knows ``kinds``; None if each array is described."""

    __slots__ = ("_array", "_channel", "_kinds", "_rank", "_signature", "finished", "number", "peer")

    is_send: ClassVar[bool] = True

    def __init__(
        self, rank: int, peer: int, channel: int, number: int, array: Array, signature: CallSignature, kinds: Kinds | None
    ) -> None:
        self.peer: int = peer
        self.finished: bool = False
        self._rank = rank
        self._channel = channel
        self.number: int = number
        self._array = array
        self._signature = signature
        self._kinds = kinds

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return self._array.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        return self._array.dtype

    def open(self, opening: memoryview) -> memoryview:
        """Write the opening; return the rest of the array."""
        array, start = self._array, TAG_BYTES
        tag = None if self._kinds is None else self._kinds.tag((array.dtype, array.shape))
        opening[:TAG_BYTES] = tag or _DESCRIBED
        if tag is None:
            start += DESCRIPTION_BYTES
            opening[TAG_BYTES:start] = pack_description(array.dtype, array.shape)
            if self._kinds is not None:
                self._kinds.learn((array.dtype, array.shape))
        data = bytes_of(array)
        first = min(len(data), OPENING_BYTES - start)
        opening[start : start + first] = data[:first]
        return data[first:]

    def rest(self) -> memoryview:
        """Return the part that does not travel in the opening, if the kind is known."""
        return bytes_of(self._array)[FIRST_BYTES:]

    def header(self, nbytes: int, index: int) -> bytes:
        """Return the header of one of its messages."""
        return _header(self._signature, self._rank, self._channel, self.number, nbytes, index)


class Incoming:
    """An array on its way from ``peer``, into ``out`` or into new memory; ``array`` is valid once it has come. The rest is as for `Outgoing`."""

    __slots__ = ("_channel", "_kinds", "_out", "_signature", "array", "finished", "number", "peer")

    is_send: ClassVar[bool] = False

    def __init__(
        self, peer: int, channel: int, number: int, out: Array | None, signature: CallSignature, kinds: Kinds | None
    ) -> None:
        self.peer: int = peer
        self.finished: bool = False
        self.array: Array | None = out
        self._channel = channel
        self.number: int = number
        self._out = out
        self._signature = signature
        self._kinds = kinds

    def opened(self, opening: memoryview) -> memoryview:
        """Read the opening; return the memory for the rest of the array.

        Raises
        ------
        DescriptionMismatch
            It does not fit ``out``, or cannot be taken.
        Damaged
            No oneaccord writes such an opening.
        """
        tag, start = opening[:TAG_BYTES].tobytes(), TAG_BYTES
        if tag != _DESCRIBED:
            kind = None if self._kinds is None else self._kinds.kind(tag)
            if kind is None:
                raise Damaged(self.peer, f"rank {self.peer} sent an array of a kind that it has not described before: {tag!r}")
            dtype, shape = kind
        else:
            start += DESCRIPTION_BYTES
            dtype, shape = self._described(opening[TAG_BYTES:start].tobytes())
        array = self._out
        if array is None:
            array = new_array(shape, dtype)
        elif (array.dtype, array.shape) != (dtype, shape):
            raise self._mismatch(f"{dtype}{list(shape)}")
        self.array = array
        data = bytes_of(array)
        first = min(len(data), OPENING_BYTES - start)
        data[:first] = opening[start : start + first]
        return data[first:]

    def _described(self, description: bytes) -> Kind:
        dtype, shape, sent = parse_description(description)
        if dtype is None:
            if self._out is not None:
                raise self._mismatch(sent)
            raise DescriptionMismatch(
                self.peer, f"rank {self.peer} sent {sent}, but this rank cannot make such an array: pip install ml_dtypes"
            )
        if math.prod(extent or 1 for extent in shape) * dtype.itemsize >= 1 << 62:
            raise Damaged(self.peer, f"rank {self.peer} sent the description of an impossible array: {sent}")
        if self._kinds is not None:
            self._kinds.learn((dtype, shape))
        return dtype, shape

    def _mismatch(self, sent: str) -> DescriptionMismatch:
        assert self._out is not None
        expected = f"{self._out.dtype}{list(self._out.shape)}"
        return DescriptionMismatch(
            self.peer,
            f"rank {self.peer} sent {sent}, but out= is {expected}: give an out= like the sent array, or leave it out",
        )

    def rest(self) -> memoryview:
        """Return the memory for the part that does not travel in the opening, if the kind is known and the array is there."""
        assert self.array is not None
        return bytes_of(self.array)[FIRST_BYTES:]

    def header(self, nbytes: int, index: int) -> bytes:
        """Return the header that one of its messages must have."""
        return _header(self._signature, self.peer, self._channel, self.number, nbytes, index)


def _header(signature: CallSignature, sender: int, channel: int, number: int, nbytes: int, index: int) -> bytes:
    # By the digest: to hash a signature would take longer than to pack a header.
    key = (signature.digest, sender, channel, nbytes, index)
    parts = _headers.get(key)
    if parts is None:
        if len(_headers) >= _MAX_HEADERS:
            _headers.clear()
        parts = _headers[key] = split_header(pack_header(signature, sender, channel, 0, nbytes, index))
    return parts[0] + number.to_bytes(8, "little") + parts[1]


def move(
    transport: Transport,
    boxes: Mapping[int, Mailbox],
    outgoing: Outgoing | None,
    incoming: Incoming | None,
    deadline: Deadline,
    on_stall: StallCallback | None,
    *,
    steps: tuple[int, int] = (AT_BEGINNING, AT_BEGINNING),
) -> None:
    """Move an array in either direction or both, at once, so that two ranks that exchange arrays never wait for each other's receive.

    Parameters
    ----------
    transport
        The transport that moves them.
    boxes
        Its mailboxes of the peers, which are connected.
    outgoing, incoming
        The arrays to move.
    deadline, on_stall
        As for `Waiter`.
    steps
        How far the one that is sent and the one that comes have got already: nowhere; their opening is posted or lies in its mailbox; all is
        posted, or the opening has been taken, into the array of ``incoming``; all has come.

    Raises
    ------
    DescriptionMismatch
        An array came that ``out=`` cannot take; ``out=`` is untouched.
    Overdue, LinkLost, HeaderMismatch
        As `Waiter.wait`; ``out=`` may be partly written.
    """
    mover = _Mover(transport, boxes)
    ways = [mover.send(outgoing, steps[0])] if outgoing is not None else []
    if incoming is not None:
        ways.append(mover.receive(incoming, steps[1]))
    waiter: Waiter | None = None
    # Each direction proceeds as far as it can, and says what it waits for.
    active = [(way, transfer) for way in ways if (transfer := next(way, None)) is not None]
    while active:
        if waiter is None:
            waiter = Waiter(deadline, on_stall)
        waiter.wait(
            transport,
            [transfer for _, transfer in active],
            lambda: [flow.peer for flow in (incoming, outgoing) if flow is not None],
        )
        going_on = [(way, next(way, None) if transfer.done else transfer) for way, transfer in active]
        active = [(way, transfer) for way, transfer in going_on if transfer is not None]


class _Mover:
    """Moves the messages of one call: each way yields the transfers that it has to wait for, one after the other."""

    __slots__ = ("_boxes", "_transport")

    def __init__(self, transport: Transport, boxes: Mapping[int, Mailbox]) -> None:
        self._transport = transport
        self._boxes = boxes

    def send(self, flow: Outgoing, step: int) -> Iterator[Transfer]:
        """Send the opening, and the rest: through the mailbox if it is short."""
        box = self._boxes[flow.peer]
        if step == AT_BEGINNING:
            rest = flow.open(box.outgoing[box.next_out])
            yield from _unfinished(box.post(flow.header(OPENING_BYTES, 0), OPENING_BYTES), box, "post")
        else:
            rest = flow.rest()[: None if step == OPENED else 0]
            yield from _unfinished(box.unsent(), box, "post")
        if 0 < len(rest) <= posted_bytes(box):
            box.outgoing[box.next_out][: len(rest)] = rest
            yield from _unfinished(box.post(flow.header(len(rest), 1), len(rest)), box, "post")
        else:
            for header, piece in self._pieces(flow, rest):
                sending = lent(self._transport, flow.peer, header, piece)
                if not sending.done:
                    yield sending
        flow.finished = True

    def receive(self, flow: Incoming, step: int) -> Iterator[Transfer]:
        """Receive the opening, unless it is there, and the rest: through the mailbox if it is short."""
        if step == DONE:
            flow.finished = True
            return
        box = self._boxes[flow.peer]
        if step == AT_BEGINNING:
            yield from _unfinished(box.fetch(flow.header(OPENING_BYTES, 0), OPENING_BYTES), box, "fetch")
        rest = flow.rest() if step == OVER else flow.opened(box.incoming[box.next_in])
        if 0 < len(rest) <= min(len(box.incoming[0]), posted_bytes(box)):
            yield from _unfinished(box.fetch(flow.header(len(rest), 1), len(rest)), box, "fetch")
            rest[:] = box.incoming[box.next_in][: len(rest)]
        else:
            for header, piece in self._pieces(flow, rest):
                yield from _unfinished(self._transport.recv(flow.peer, header, piece), self._transport, "recv")
        flow.finished = True

    def _pieces(self, flow: Outgoing | Incoming, rest: memoryview) -> Iterator[tuple[bytes, memoryview]]:
        """Yield a header and a payload for each message of the rest."""
        piece_bytes = max(1, len(rest)) if self._transport.streams else _PIECE_BYTES
        for index, start in enumerate(range(0, len(rest), piece_bytes), start=1):
            piece = rest[start : start + piece_bytes]
            yield flow.header(len(piece), index), piece


def _unfinished(transfer: Transfer | None, source: Transport | Mailbox, call: str) -> Iterator[Transfer]:
    """Yield a transfer that is not done at once; check a plugin's result."""
    if transfer is None and isinstance(source, Mailbox):
        return
    if not checked_transfer(transfer, source, call).done:
        assert transfer is not None
        yield transfer
