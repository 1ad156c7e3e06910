"""Additions to a transport: mailboxes, and long messages that are sent whole and reduced as they arrive.

The interpreter sees nothing else. If a transport has no mailboxes, their slots are memory of core, and each message is one `Transport.send`
and `Transport.recv`. If it does not stream, a long message is cut into pieces. If such a message is reduced, the next piece is received into
scratch memory while the present one is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from oneaccord.arrays.memory import aligned_empty
from oneaccord.calls.engine.program import CompiledSchedule
from oneaccord.calls.engine.scratch import shared_pool
from oneaccord.calls.engine.waiting import checked_mailbox, checked_transfer, checked_wait
from oneaccord.contract.backend import Mailbox, Sink, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import piece_header

__all__ = ["SLOT_BYTES", "Links", "cutting", "lent_bytes", "mailbox_of", "posted_bytes"]

SLOT_BYTES: int = 1 << 16
"""The longest payload that goes through a mailbox of core's own."""

_Start = Callable[[int, bytes, int, memoryview], Transfer]
"""Starts to move a piece: the peer, the header of the whole message, the offset of the piece in it, and the piece."""


class Links:
    """A transport, the peers that it is connected to, and a mailbox for each of them.

    Parameters
    ----------
    transport
        A transport on which nothing else is sent.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = transport
        self._connected: set[int] = set()
        self._boxes: dict[int, Mailbox] = {}

    def connect(self, peers: frozenset[int], until: Callable[[], Deadline]) -> None:
        """Make ready to talk to ``peers``, as long as ``until()`` allows; raises as `Transport.connect`."""
        if not peers <= self._connected:
            self.transport.connect(sorted(peers - self._connected), until())
            self._connected |= peers

    def mailboxes(self, peers: frozenset[int]) -> tuple[dict[int, Mailbox], int, int]:
        """Return the mailboxes of peers that are connected, the length of the shortest slots, and the least of their `posted_bytes`.

        Raises as `checked_mailbox`.
        """
        for peer in peers - self._boxes.keys():
            self._boxes[peer] = mailbox_of(self.transport, peer)
        boxes = {peer: self._boxes[peer] for peer in peers}
        slot_bytes = min((len(box.outgoing[0]) for box in boxes.values()), default=0)
        return boxes, slot_bytes, min(map(posted_bytes, boxes.values()), default=0)


def mailbox_of(transport: Transport, peer: int, least_bytes: int = 0) -> Mailbox:
    """Return the transport's mailbox for a connected peer; if it has none with slots that long, one made of its sends and receives."""
    box = checked_mailbox(transport, peer)
    if box is None or min(len(box.outgoing[0]), len(box.incoming[0])) < least_bytes:
        return _Slots(transport, peer)
    return box


def posted_bytes(box: Mailbox) -> int:
    """Return the length of the longest message that is posted though it will not be reduced."""
    slot_bytes, limit = len(box.outgoing[0]), lent_bytes(box)
    return slot_bytes if limit is None else min(slot_bytes, limit)


def lent_bytes(box: Mailbox) -> int | None:
    """Return `Mailbox.posted_bytes`, also of a class that is only registered as a mailbox, and does not know it."""
    limit: int | None = getattr(box, "posted_bytes", None)
    return limit


def cutting(transport: Transport, program: CompiledSchedule) -> Transport:
    """Return an object that cuts the long messages of a program, for a transport that does not stream.

    The parts of a streamed message are multiples of 64 bytes, which need not be whole elements of a structured dtype. Such messages are cut, too.
    """
    return _Cutting(transport, program.piece_bytes)


class _Slots(Mailbox):
    """A mailbox over sends and receives. Its one slot each way is as good as several: while a send is on its way, no other one may begin."""

    __slots__ = ("_peer", "_transport")

    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self.outgoing = (aligned_empty(SLOT_BYTES).data,)
        self.incoming = (aligned_empty(SLOT_BYTES).data,)
        self.next_out = self.next_in = 0

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        transfer = self._transport.send(self._peer, bytes(header), self.outgoing[0][:nbytes].toreadonly())
        return None if checked_transfer(transfer, self._transport, "send").done else transfer

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        transfer = self._transport.recv(self._peer, bytes(header), self.incoming[0][:nbytes])
        return None if checked_transfer(transfer, self._transport, "recv").done else transfer


class _Pieces(Transfer):
    """A message on its way in pieces, one after the other."""

    __slots__ = ("_left", "_past", "piece")

    def __init__(self, pieces: Iterator[Transfer]) -> None:
        self._left = pieces
        self._past = 0
        self.done = False
        self.piece: Transfer = next(pieces)
        self.go_on()

    @property
    def moved(self) -> int:
        """The bytes of all pieces so far."""
        return self._past + self.piece.moved

    @moved.setter
    def moved(self, value: int) -> None:
        raise AttributeError("what has moved is the sum of the pieces")

    def go_on(self) -> None:
        """Start pieces until one has to be waited for."""
        while self.piece.done and not self.done:
            following = next(self._left, None)
            if following is None:
                self.done = True
            else:
                self._past += self.piece.moved
                self.piece = following


class _Cutting(Transport):
    """Cuts messages into pieces.

    Parameters
    ----------
    transport
        The function that moves the pieces.
    piece_bytes
        The size of each, but for the last.
    """

    streams = True

    def __init__(self, transport: Transport, piece_bytes: int) -> None:
        self._transport = transport
        self._piece_bytes = piece_bytes

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self._transport.connect(peers, deadline)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._cut(self._send, peer, header, payload.toreadonly())

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._cut(self._recv, peer, header, payload)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        return _Pieces(self._consuming(peer, header, nbytes, sink))

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        # The interpreter waits for its receives before its sends. The sends go first, so that peers have them while this rank reduces.
        cut = [transfer for transfer in reversed(transfers) if isinstance(transfer, _Pieces)]
        while True:
            moving = [transfer.piece if isinstance(transfer, _Pieces) else transfer for transfer in transfers]
            checked_wait(self._transport, moving, deadline)
            for transfer in cut:
                transfer.go_on()
            if any(transfer.done for transfer in transfers):
                return
            if deadline.passed():
                raise TimeoutError("the deadline passed")

    def _send(self, peer: int, header: bytes, offset: int, piece: memoryview) -> Transfer:
        transfer = self._transport.send(peer, piece_header(header, len(piece), offset), piece)
        return checked_transfer(transfer, self._transport, "send")

    def _recv(self, peer: int, header: bytes, offset: int, piece: memoryview) -> Transfer:
        transfer = self._transport.recv(peer, piece_header(header, len(piece), offset), piece)
        return checked_transfer(transfer, self._transport, "recv")

    def _cut(self, start: _Start, peer: int, header: bytes, payload: memoryview) -> Transfer:
        size = self._piece_bytes
        if len(payload) <= size:
            return start(peer, header, 0, payload)
        return _Pieces(start(peer, header, offset, payload[offset : offset + size]) for offset in range(0, len(payload), size))

    def _consuming(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Iterator[Transfer]:
        size = min(nbytes, self._piece_bytes)
        memory = shared_pool.take(min(nbytes, 2 * size))
        halves = memory.data[:size], memory.data[size : 2 * size]
        come: tuple[memoryview, int] | None = None
        for number, offset in enumerate(range(0, nbytes, size)):
            piece = halves[number & 1][: nbytes - offset]
            transfer = self._recv(peer, header, offset, piece)
            if come is not None:
                sink(*come)
            yield transfer
            come = piece.toreadonly(), offset
        if come is not None:
            sink(*come)
        # After a failure it is not kept: the transport may still write there.
        shared_pool.give(memory)
