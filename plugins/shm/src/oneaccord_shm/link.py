"""One peer on one channel: two rings of slots, and short messages that use them directly.

A ring belongs to the sender, and is in its memory. Slots are numbered forever: number n is slot n modulo `SLOTS`. The sender fills
a slot and then writes n + 1 into its label; the receiver reads it and then writes n + 1 into the ring's first word. A message has its
header in the label of its first slot. A part of it that is longer than a slot takes several neighbours, of which only the first is labelled.

While no send is on its way, the next slot is free, so that a short message can always be written at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import Any, Protocol

from oneaccord.api import HEADER_BYTES, Damaged, HeaderMismatch, LinkLost, Mailbox, Transfer
from oneaccord_shm.bell import Ringer
from oneaccord_shm.kernel import address_of
from oneaccord_shm.lender import Lender
from oneaccord_shm.order import fence
from oneaccord_shm.segment import LABELS, LINE, PAYLOADS, SLOTS, Geometry

__all__ = ["Link", "Moving", "PythonLink", "Shared", "compiled_link"]

_NUMBER, _EXTENT, _PLACE, _CLAIMS, _HELPED = (HEADER_BYTES + offset for offset in (0, 8, 16, 24, 48))
"""The positions of the words of a label, after the header. Between the last two are those that a receiver writes."""
_IN_HEAP, _LENT = 0, 255
_EXTENTS = 256
"""An extent is a slot's number times this, plus the number of slots of the part, or a code for the place of the payload: `_IN_HEAP` is the
sender's heap, `_LENT` other memory of its process.
An extent with another number is an old one, and means one slot: a short message need not write it."""
_PART_BYTES = 512 << 10
"""The largest part that is copied at once: the receiver uses one while the sender copies the next."""
_DRAWN_BYTES = 4 << 20
"""How much of a lent message is copied before others may move."""
_AFTER = tuple((slot + 1) % SLOTS for slot in range(SLOTS))
_yield: Callable[[], None] = os.sched_yield


class Shared(Protocol):
    """The common part of all links of a backend.

    Attributes
    ----------
    ended
        Why no more messages come; empty as long as they do.
    fenced
        Whether messages must be fenced: this machine reorders stores, or the system has no barrier for sleepers.
    spin_s
        For how many seconds to look again and again before sleeping.
    tries
        How often to look before giving way to others.
    """

    ended: str
    fenced: bool
    spin_s: float
    tries: int


class Link:
    """The common part of both forms of a link: `PythonLink`, and `CompiledLink`, whose counters and short messages are C's."""

    outgoing: tuple[memoryview, ...]
    incoming: tuple[memoryview, ...]
    next_out: int
    next_in: int
    _sent: int  # slots that were filled
    _room: int  # how many may be filled before the peer must have emptied one more
    _received: int  # slots that were read

    def __init__(
        self,
        peer: int,
        out: memoryview,
        into: memoryview,
        geometry: Geometry,
        ringer: Ringer,
        shared: Shared,
        lender: Lender,
        lent_bytes: int,
    ) -> None:
        self.peer: int = peer
        self._lender = lender
        self.posted_bytes: int | None = lent_bytes or None
        self.scratch: list[memoryview] = []  # buffers that transfers copy into, and give back
        self._shared = shared
        self._fenced = shared.fenced
        self._ringer = ringer
        self._sleepers = ringer.sleepers
        self._slot_bytes = geometry.slot_bytes
        self._most_slots = max(1, min(_PART_BYTES // geometry.slot_bytes, _EXTENTS - 1))

        self._out_headers = _headers(out)
        self._out_numbers = _words(out, _NUMBER)
        self._out_extents = _words(out, _EXTENT)
        self._out_places = _words(out, _PLACE)
        self._out_claims = _words(out, _CLAIMS)
        self._out_helped = _words(out, _HELPED)
        self._out_payloads = out[PAYLOADS : PAYLOADS + SLOTS * geometry.slot_bytes]
        self._emptied = out[:8].cast("Q")
        self.outgoing = _slots(self._out_payloads, geometry)

        into_read = into.toreadonly()
        self._in_headers = _headers(into_read)
        self._in_numbers = _words(into_read, _NUMBER)
        self._in_extents = _words(into_read, _EXTENT)
        self._in_places = _words(into_read, _PLACE)
        self._in_payloads = into_read[PAYLOADS : PAYLOADS + SLOTS * geometry.slot_bytes]
        self._taken = into[:8].cast("Q")
        self.incoming = _slots(self._in_payloads, geometry)

    # The interface for transfers: the sending half.

    def check(self) -> None:
        """Raise `LinkLost` if no more messages come."""
        if self._shared.ended:
            raise LinkLost(self.peer, self._shared.ended)

    def has_room(self) -> bool:
        """Return whether the next slot is free."""
        if self._sent >= self._room:
            self._room = self._emptied[0] + SLOTS
        return self._sent < self._room

    def put(self, header: bytes | bytearray | None, payload: memoryview, start: int) -> int:
        """Send as large a part of a message as fits, from ``start`` on, if there is room; return the number of bytes.

        ``header`` is given with the first part.
        """
        slot, slot_bytes = self.next_out, self._slot_bytes
        size = len(payload) - start
        slots = 1
        if size > slot_bytes:
            # Neither beyond the end of the ring nor into slots that the peer has not yet emptied.
            self._room = self._emptied[0] + SLOTS
            slots = min(-(-size // slot_bytes), self._most_slots, self._room - self._sent, SLOTS - slot)
            size = min(size, slots * slot_bytes)
        if size:
            place = slot * slot_bytes
            self._out_payloads[place : place + size] = payload[start : start + size]
        if header is not None:
            self._out_headers[slot][:] = header
        if slots > 1:
            self._out_extents[slot] = (self._sent + 1) * _EXTENTS + slots
        self._publish(slot, slots)
        return size

    def put_place(self, header: bytes | bytearray, place: int, *, lent: bool) -> int:
        """Send a message whose payload lies at an offset in this rank's heap, or is ``lent`` from an address in its process.

        Returns the number that the peer takes when it has read it.
        """
        slot = self.next_out
        self._out_headers[slot][:] = header
        self._out_places[slot] = place
        if lent:
            self._out_claims[slot] = self._out_helped[slot] = 0  # which a receiver in C counts: see lend.c
        self._out_extents[slot] = (self._sent + 1) * _EXTENTS + (_LENT if lent else _IN_HEAP)
        self._publish(slot, 1)
        return self._sent

    def lend(self, header: bytes, payload: memoryview) -> int:
        """Send a message from where it lies in this process; the rest is as for `put_place`."""
        return self.put_place(header, address_of(payload), lent=True)

    def help(self) -> bool:
        """Copy a part of the lent message to the peer, if it is there; return whether that was done."""
        return False

    def has_taken(self, number: int) -> bool:
        """Return whether the peer has read the place that `put_place` numbered so."""
        if self._emptied[0] < number:
            return False
        self._room = self._emptied[0] + SLOTS
        return True

    def _publish(self, slot: int, slots: int) -> None:
        number = self._sent + 1
        if self._fenced:
            fence()
        self._out_numbers[slot] = number
        self._sent += slots
        self.next_out = self._sent % SLOTS
        self._wake()

    def _wake(self) -> None:
        if self._fenced:
            fence()
        if self._sleepers[0]:
            self._ringer.ring()

    # The interface for transfers: the receiving half.

    def arrived(self) -> bool:
        """Return whether the next slot has come."""
        received = self._received
        if self._in_numbers[received % SLOTS] != received + 1:
            return False
        if self._fenced:
            fence()
        return True

    def open(self, header: bytes | bytearray) -> None:
        """Raise `HeaderMismatch` unless the slot that has come begins a message with ``header``."""
        came = self._in_headers[self._received % SLOTS].tobytes()
        if came != header:
            raise HeaderMismatch(self.peer, came)

    def take_short(self) -> None:
        """Receive a short message from the slot that has come; it stays there until the next is asked for."""
        self.next_in = self._received % SLOTS
        self._received += 1

    def slots(self) -> int:
        """Return the number of slots of the part that has come; 0 if it is elsewhere."""
        received = self._received
        number, extent = divmod(self._in_extents[received % SLOTS], _EXTENTS)
        if number != received + 1:
            return 1
        return 0 if extent == _LENT else extent

    def part(self, nbytes: int, slots: int) -> memoryview:
        """Return the part of a message that has come in so many slots; ``nbytes`` bytes of the message are left."""
        start = self._received % SLOTS * self._slot_bytes
        return self._in_payloads[start : start + min(nbytes, slots * self._slot_bytes)]

    def whole(self, nbytes: int) -> memoryview | int:
        """Return the message in the sender's heap, or its address in the sender's process."""
        slot = self._received % SLOTS
        place = self._in_places[slot]
        if self._in_extents[slot] % _EXTENTS == _LENT:
            return place
        heap = self._lender.heap(place, nbytes)
        if len(heap) != nbytes:
            raise Damaged(self.peer, f"rank {self.peer} sent an address outside of its memory")
        return heap

    def borrow(self, address: int, into: memoryview) -> None:
        """Copy a lent message; raise `LinkLost` if its pledge is gone."""
        if not self._lender.borrow(address, into):
            raise self._withdrawn()

    def draw(self, address: int, into: memoryview, start: int) -> int:
        """Copy parts of a lent message; return how many bytes are there of the ``start`` before. When all are, it is taken.

        Raises
        ------
        LinkLost
            Its pledge is gone.
        """
        part = into[start : start + _DRAWN_BYTES]
        self.borrow(address + start, part)
        start += len(part)
        if start == len(into):
            self.take(1)
        return start

    def revoke(self) -> None:
        """Let the peer write no more into this rank's memory."""

    def check_lender(self) -> None:
        """Raise `LinkLost` if the bytes read in the sender's heap may not be the ones that it had sent."""
        if not self._lender.stands():
            raise self._withdrawn()

    def _withdrawn(self) -> LinkLost:
        return LinkLost(self.peer, f"rank {self.peer} failed or died while this rank read its memory")

    def take(self, slots: int) -> None:
        """Give so many slots back to the sender, and all before them."""
        self._received += slots
        if self._fenced:
            fence()
        self._taken[0] = self._received
        self._wake()

    def unsent(self) -> Transfer | None:
        """Return the wait of a message that was posted without room for another one."""
        return None if self.has_room() else _Emptying(self)

    def recall(self, transfer: Transfer) -> bool:
        """Give up a receive of which nothing has come; return whether that was so."""
        return not transfer.done and not transfer.moved


class PythonLink(Link, Mailbox):
    """Messages from and to one peer on one channel.

    Parameters
    ----------
    peer
        The rank at the other end.
    out, into
        The ring in which this rank sends, and that of the peer.
    geometry
        The layout of the rings.
    ringer
        Wakes the peer.
    shared
        The common part of this rank's links.
    lender
        The memory of the peer that is not in slots.
    lent_bytes
        Longer messages are lent, unless they are to be reduced; 0 if none are.
    """

    next_out: int
    next_in: int

    def __init__(
        self,
        peer: int,
        out: memoryview,
        into: memoryview,
        geometry: Geometry,
        ringer: Ringer,
        shared: Shared,
        lender: Lender,
        lent_bytes: int,
    ) -> None:
        super().__init__(peer, out, into, geometry, ringer, shared, lender, lent_bytes)
        self._sent = self._received = self.next_out = self.next_in = 0
        self._room = SLOTS

    # Short messages. These two methods make up their latency.

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send the message in slot ``next_out``."""
        slot = self.next_out
        self._out_headers[slot][:] = header
        self._sent = sent = self._sent + 1
        if self._fenced:
            fence()
            self._out_numbers[slot] = sent
            fence()
        else:
            self._out_numbers[slot] = sent
        if self._sleepers[0]:
            self._ringer.ring()
        self.next_out = _AFTER[slot]
        if sent < self._room or self.has_room():
            return None
        return _Emptying(self)

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Receive the next message, for which to wait a moment."""
        received = self._received
        # The messages that were fetched before have been read.
        if self._fenced:
            fence()
            self._taken[0] = received
            fence()
        else:
            self._taken[0] = received
        if self._sleepers[0]:
            self._ringer.ring()
        slot = received % SLOTS
        number = received + 1
        numbers = self._in_numbers
        if numbers[slot] != number:
            for _ in repeat(None, self._shared.tries):
                if numbers[slot] == number:
                    break
            else:
                if not self._await(slot, number):
                    return _Fetching(self, header)
        if self._fenced:
            fence()
        if self._in_headers[slot].tobytes() != header:
            raise HeaderMismatch(self.peer, self._in_headers[slot].tobytes())
        self._received = number
        self.next_in = slot
        return None

    def _await(self, slot: int, number: int) -> bool:
        """Look for a slot's number for a moment, giving way to others; return whether it has come."""
        numbers = self._in_numbers
        until = time.monotonic() + self._shared.spin_s
        while numbers[slot] != number:
            if time.monotonic() >= until:
                self.check()
                return False
            _yield()
        return True


@cache
def compiled_link(module: Any) -> type[Link]:
    """Return the compiled form of `PythonLink`, made of the module ``oneaccord_native``."""

    class CompiledLink(Link, module.Ring):  # type: ignore[misc]
        """A `PythonLink` whose short messages are moved by C, also for the compiled executor, which needs no Python for them."""

        compiled = module

        def __init__(
            self,
            peer: int,
            out: memoryview,
            into: memoryview,
            geometry: Geometry,
            ringer: Ringer,
            shared: Shared,
            lender: Lender,
            lent_bytes: int,
        ) -> None:
            Link.__init__(self, peer, out, into, geometry, ringer, shared, lender, lent_bytes)
            module.Ring.__init__(
                self,
                out,
                into,
                ringer.sleepers,
                ringer.ring,
                slots=SLOTS,
                slot_bytes=geometry.slot_bytes,
                labels=LABELS,
                payloads=PAYLOADS,
                line=LINE,
                number_at=_NUMBER,
                fenced=shared.fenced,
                tries=shared.tries,
                spin_s=shared.spin_s,
                extent_at=_EXTENT,
                pid=lender.pid,
                pledge_at=lender.pledge_at,
                token=lender.token,
                lent_bytes=lent_bytes,
            )

        def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
            """Send the message in slot ``next_out``."""
            return None if self.post_short(header) else _Emptying(self)

        def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
            """Receive the next message, for which to wait a moment."""
            came = self.fetch_short(header)
            if came > 0:
                return None
            if came < 0:
                self.open(header)
            self.check()
            return _Fetching(self, header)

        def unsent(self) -> Transfer | None:
            """Return the wait of a message that was lent, or posted without room for another one."""
            number = self._lending
            return super().unsent() if not number or self.has_taken(number) else _Lent(self, number)

        # Both ranks copy a lent message: see lend.c.

        def lend(self, header: bytes, payload: memoryview) -> int:
            """As `Link.lend`."""
            return int(self.lend_whole(header, payload))

        def help(self) -> bool:
            """As `Link.help`."""
            return bool(self.help_peer())

        def draw(self, address: int, into: memoryview, start: int) -> int:
            """As `Link.draw`."""
            there = int(self.draw_parts(into))
            if there < 0:
                raise self._withdrawn()
            return there

        def revoke(self) -> None:
            """As `Link.revoke`."""
            self.revoke_parts()

    Mailbox.register(CompiledLink)
    return CompiledLink


class Moving(Transfer):
    """A message on its way; ``peer`` is the rank at its other end."""

    __slots__ = ("_link", "peer")

    done: bool
    moved: int

    def __init__(self, link: Link) -> None:
        self._link = link
        self.peer: int = link.peer
        self.moved: int = 0
        self.done: bool = False

    def advance(self) -> bool:
        """Move a part if one can be moved now, or see that all was moved; return whether anything changed. Not when it is done.

        Raises
        ------
        HeaderMismatch
            Another header came.
        """
        raise NotImplementedError


class _Emptying(Moving):
    """Until the slot after a posted one is free."""

    __slots__ = ()

    def advance(self) -> bool:
        self.done = self._link.has_room()
        return self.done


class _Lent(Moving):
    """Until the peer has a message that was lent."""

    __slots__ = ("_number",)

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(link)
        self._number = number

    def advance(self) -> bool:
        helped = self._link.help()
        self.moved += helped
        self.done = self._link.has_taken(self._number) and self._link.has_room()
        return helped or self.done


class _Fetching(Moving):
    """Until a short message has come."""

    __slots__ = ("_header",)

    def __init__(self, link: Link, header: bytes | bytearray) -> None:
        super().__init__(link)
        self._header = header

    def advance(self) -> bool:
        if not self._link.arrived():
            return False
        self._link.open(self._header)
        self._link.take_short()
        self.moved = HEADER_BYTES
        self.done = True
        return True


def _headers(ring: memoryview) -> tuple[memoryview, ...]:
    """Return the addresses of the headers."""
    return tuple(ring[start : start + HEADER_BYTES] for start in range(LABELS, PAYLOADS, LINE))


def _words(ring: memoryview, offset: int) -> memoryview:
    """Return the same word of each label, as one view: indexing it makes no object but the number."""
    return ring[:PAYLOADS].cast("Q")[(LABELS + offset) // 8 :: LINE // 8]


def _slots(payloads: memoryview, geometry: Geometry) -> tuple[memoryview, ...]:
    """Return the addresses of the payloads of short messages."""
    size = geometry.slot_bytes
    return tuple(payloads[start : start + size] for start in range(0, SLOTS * size, size))
