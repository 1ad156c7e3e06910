"""The records between this rank and one other: one ordered stream each way, each with one message on its way at a time.

A record that cannot go at once waits in a queue, and is never waited for here: two ranks that send to each other would wait for ever when what is
between them is full. All methods are called under the lock of the office.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from oneaccord.arrays.memory import aligned_empty
from oneaccord.calls.engine.waiting import checked_transfer, lent
from oneaccord.calls.messages.point_to_point import OPENING_BYTES
from oneaccord.calls.post.envelopes import RECORD
from oneaccord.contract.backend import Mailbox, Transfer, Transport
from oneaccord.contract.header import INDEX_AT, NBYTES_AT, NUMBER_AT, POST_CHANNEL, pack_header, split_header

__all__ = ["Body", "Line", "Tally"]

_PIECE_BYTES = 1 << 20
_NOTHING = memoryview(b"")
Body = tuple[memoryview, Callable[[], None]]
"""The memory for what follows an opening, and what to do when it is there."""
OnOpening = Callable[["Line", memoryview], Body | None]


class _Record(NamedTuple):
    """A record to send: its number, what its opening begins with, its data, and what to do when it has gone."""

    number: int
    head: bytes
    data: memoryview
    then: Callable[[], None] | None


class Tally:
    """A counter of records or messages, for the store; it keeps no calls.

    Attributes
    ----------
    next
        How many there were.
    """

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next: int = 0

    def short(self) -> tuple[()]:
        """Return no calls."""
        return ()


class Line:
    """The records to and from one peer.

    Parameters
    ----------
    rank, peer
        This rank, and the other.
    transport, box
        The transport, and its mailbox for the peer.
    on_opening
        Called with each opening that has come.

    Attributes
    ----------
    peer
        As above.
    sent, taken
        How many records were queued, and how many openings were taken.
    outgoing, incoming
        What the stream waits for, each way; None if for nothing.
    most
        The longest part of an eager message that follows its opening.
    lane
        What the compiled executor needs of this; None if it sends and receives nothing here.
    deliver
        ``deliver(lane)`` lets messages that have come meet receives that wait, in C, as far as nothing is unusual; returns how many. None if there is none.
    """

    __slots__ = (
        "_box",
        "_buffer",
        "_in_header",
        "_in_number",
        "_into",
        "_on_opening",
        "_out_header",
        "_out_number",
        "_queue",
        "_rank",
        "_reading",
        "_transport",
        "_writing",
        "deliver",
        "incoming",
        "lane",
        "most",
        "outgoing",
        "peer",
        "sent",
        "taken",
    )

    def __init__(
        self, rank: int, peer: int, transport: Transport, box: Mailbox, on_opening: OnOpening, sent: Tally, taken: Tally
    ) -> None:
        self.peer: int = peer
        self.sent: Tally = sent
        self.taken: Tally = taken
        self.lane: Any = None
        self.deliver: Callable[[object], int] | None = None
        self.outgoing: Transfer | None = None
        self.incoming: Transfer | None = None
        self.most: int = min(len(box.outgoing[0]), len(box.incoming[0]))
        self._rank = rank
        self._transport = transport
        self._box = box
        self._on_opening = on_opening
        self._queue: deque[_Record] = deque()
        self._writing: Iterator[Transfer] | None = None
        self._reading: Iterator[Transfer] | None = None
        self._buffer: memoryview = aligned_empty(OPENING_BYTES).data
        self._into: memoryview | None = None
        self._out_header, self._out_number = _blank_header(rank)
        self._in_header, self._in_number = _blank_header(peer)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send."""
        return self.outgoing is None and not self._queue

    @property
    def is_reading(self) -> bool:
        """Whether a record has come of which the rest is on its way."""
        return self._reading is not None

    @property
    def moved(self) -> int:
        """A number that grows when anything moves."""
        moving = sum(each.moved for each in (self.outgoing, self.incoming) if each is not None)
        return moving + self.sent.next - len(self._queue) + self.taken.next

    # Out

    def push(self, head: bytes, data: memoryview, then: Callable[[], None] | None = None) -> None:
        """Send a record, at once or when those before it have gone; ``then`` is called when it has.

        Parameters
        ----------
        head
            The beginning of its opening.
        data
            What follows, of any length, unchanged until then.
        then
            What to do then.
        """
        number = self.sent.next
        self.sent.next = number + 1
        lane = self.lane
        if lane is not None and lane.full:
            lane.full = False
            self._writing = self._rest(self._box.unsent(), number - 1, _NOTHING, None)
            self.write_on()
        if self.outgoing is None and not self._queue and (lane is None or not lane.stopped):
            self._write(number, head, data, then)
            if self._writing is not None:
                self.write_on()
        else:
            self._queue.append(_Record(number, head, data, then))

    def go_on(self, rest: memoryview, then: Callable[[], None]) -> None:
        """Send the rest of the record that C has begun, and then those that wait behind it."""
        self.lane.stopped = False
        self._writing = self._rest(self._box.unsent(), self._number_of_begun(), rest, then)
        self.write_on()

    def compiled(self, begun: Tally, met: Tally) -> Any:
        """Return what the compiled executor needs of this, which counts messages in ``begun`` and ``met`` as well; None if the mailbox has no C form."""
        module = self._box.compiled
        if module is None:
            return None
        headers = bytes(self._out_header), bytes(self._in_header), NUMBER_AT, NBYTES_AT, INDEX_AT
        return module.Lane(self, self.peer, self._box, (self.sent, self.taken, begun, met), *headers, OPENING_BYTES, self.most)

    def _number_of_begun(self) -> int:
        return (self._queue[0].number if self._queue else self.sent.next) - 1

    def _write(self, number: int, head: bytes, data: memoryview, then: Callable[[], None] | None) -> None:
        """Send a record while nothing else is on its way."""
        box = self._box
        slot, begin = box.outgoing[box.next_out], len(head)
        slot[:begin] = head
        first = min(len(data), OPENING_BYTES - begin)
        if first:
            slot[begin : begin + first] = data if first == len(data) else data[:first]
        self._out_number[0] = number
        transfer = box.post(self._out_header, OPENING_BYTES)
        if first == len(data):  # its memory may be written to, even if there is no room for another record yet
            if then is not None:
                then()
            if transfer is None:
                return
            then = None
        self._writing = self._rest(transfer, number, data[first:], then)

    def write_on(self) -> None:
        """Go on sending, if what was waited for is done."""
        while True:
            while self._writing is not None:
                if self.outgoing is not None and not self.outgoing.done:
                    return
                self.outgoing = next(self._writing, None)
                if self.outgoing is None:
                    self._writing = None
            if not self._queue:
                return
            self._write(*self._queue.popleft())

    def _rest(
        self, transfer: Transfer | None, number: int, rest: memoryview, then: Callable[[], None] | None
    ) -> Iterator[Transfer]:
        box, transport = self._box, self._transport
        if transfer is not None and not checked_transfer(transfer, box, "post").done:
            yield transfer
        if 0 < len(rest) <= len(box.outgoing[0]):
            box.outgoing[box.next_out][: len(rest)] = rest
            transfer = box.post(_header(self._rank, number, len(rest), 1), len(rest))
            if transfer is not None and not checked_transfer(transfer, box, "post").done:
                yield transfer
        else:
            for index, piece in self._pieces(rest):
                sending = lent(transport, self.peer, _header(self._rank, number, len(piece), index), piece.toreadonly())
                if not sending.done:
                    yield sending
        if then is not None:
            then()

    # In

    def listen(self, *, patient: bool, once: bool = False) -> None:
        """Take the records that have come, and wait for the next one.

        Parameters
        ----------
        patient
            Whether to look for it for a moment, since nothing else is to be done.
        once
            Whether to take one at most.
        """
        while self.incoming is None:
            if self.deliver is not None and self.deliver(self.lane):
                if once:
                    return
                continue
            number = self.taken.next
            self._in_number[0] = number
            box = self._box
            if patient or (self.lane is not None and self.lane.partial):
                transfer = box.fetch(self._in_header, OPENING_BYTES)
                self._into = None
                if self.lane is not None:
                    self.lane.partial = False
                if transfer is None:
                    self._take(box.incoming[box.next_in])
                    if once:
                        return
                    continue
                checked_transfer(transfer, box, "fetch")
            else:
                transfer = self._transport.recv(self.peer, bytes(self._in_header), self._buffer)
                self._into = self._buffer
                checked_transfer(transfer, self._transport, "recv")
            if transfer.done:
                self._take(box.incoming[box.next_in] if self._into is None else self._into)
            else:
                self.incoming = transfer

    def recall(self) -> bool:
        """Wait for no opening any more; return whether nothing has come of one, so that C may look for it."""
        transfer = self.incoming
        if transfer is None or self._reading is not None or not self._box.recall(transfer):
            return transfer is None
        self.incoming = None
        return True

    def read_on(self) -> None:
        """Go on receiving, if what was waited for is done."""
        if self.incoming is None or not self.incoming.done:
            return
        self.incoming = None
        if self._reading is None:
            self._take(self._box.incoming[self._box.next_in] if self._into is None else self._into)
        else:
            self._read()

    def _take(self, opening: memoryview) -> None:
        number = self.taken.next
        self.taken.next = number + 1
        body = self._on_opening(self, opening)
        if body is not None:
            self._reading = self._body(number, *body)
            self._read()

    def take_rest(self, rest: memoryview, then: Callable[[], None]) -> None:
        """Receive what follows the opening that C has taken."""
        self.lane.partial = False
        self._reading = self._body(self.taken.next - 1, rest, then)
        self._read()

    def _read(self) -> None:
        assert self._reading is not None
        self.incoming = next(self._reading, None)
        if self.incoming is None:
            self._reading = None

    def _body(self, number: int, rest: memoryview, then: Callable[[], None]) -> Iterator[Transfer]:
        box, transport = self._box, self._transport
        if len(rest) <= len(box.incoming[0]):
            fetching = box.fetch(_header(self.peer, number, len(rest), 1), len(rest))
            if fetching is not None and not checked_transfer(fetching, box, "fetch").done:
                yield fetching
            rest[:] = box.incoming[box.next_in][: len(rest)]
        else:
            for index, piece in self._pieces(rest):
                receiving = transport.recv(self.peer, _header(self.peer, number, len(piece), index), piece)
                if not checked_transfer(receiving, transport, "recv").done:
                    yield receiving
        then()

    def _pieces(self, rest: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield the index and the memory of each message of what follows an opening."""
        piece_bytes = max(1, len(rest)) if self._transport.streams else _PIECE_BYTES
        for index, start in enumerate(range(0, len(rest), piece_bytes), start=1):
            yield index, rest[start : start + piece_bytes]


def _blank_header(sender: int) -> tuple[bytearray, memoryview]:
    """Return the header of an opening, and its number."""
    head, tail = split_header(pack_header(RECORD, sender, POST_CHANNEL, 0, OPENING_BYTES, 0))
    header = bytearray(head + bytes(8) + tail)
    return header, memoryview(header)[len(head) : len(head) + 8].cast("Q")


def _header(sender: int, number: int, nbytes: int, index: int) -> bytes:
    return pack_header(RECORD, sender, POST_CHANNEL, number, nbytes, index)
