"""Messages of any length: in slots, part by part; or in place, in the sender's process."""

from __future__ import annotations

from collections.abc import Callable

from oneaccord.api import HEADER_BYTES, Damaged
from oneaccord_shm.link import Link, Moving

__all__ = ["Consuming", "Receiving", "Sending", "SendingInPlace"]

_PART_BYTES = 512 << 10
"""The size of a part that is read in place: other messages move meanwhile, and it is in the cache while it is used."""


class Sending(Moving):
    """A message on its way out through slots."""

    __slots__ = ("_header", "_payload", "_start")

    done: bool
    moved: int

    def __init__(self, link: Link, header: bytes, payload: memoryview) -> None:
        super().__init__(link)
        self._header: bytes | None = header
        self._payload = payload
        self._start = 0

    def advance(self) -> bool:
        """Send a part. The message is done when all of it was sent and the next slot is free."""
        link, payload = self._link, self._payload
        if not link.has_room():
            return False
        if self._header is not None or self._start < len(payload):
            self._start += link.put(self._header, payload, self._start)
            self._header = None
            self.moved = HEADER_BYTES + self._start
        self.done = self._start == len(payload) and link.has_room()
        return True


class SendingInPlace(Moving):
    """A message that lies in this rank's heap, or elsewhere in its process, until the peer has read it.

    ``place`` is that in the heap; None if it is lent.
    """

    __slots__ = ("_is_lent", "_number", "_payload")

    done: bool
    moved: int

    def __init__(self, link: Link, header: bytes, payload: memoryview, place: int | None) -> None:
        super().__init__(link)
        self._payload = payload  # as long as it is held, its memory is not given back
        self._is_lent = place is None
        self._number = link.lend(header, payload) if place is None else link.put_place(header, place, lent=False)

    def advance(self) -> bool:
        """Copy a part if the peer takes it so, and see whether it has all."""
        helped = self._is_lent and self._link.help()
        self.done = self._link.has_taken(self._number)
        if self.done:
            self.moved = HEADER_BYTES + len(self._payload)
        return helped or self.done


class _Incoming(Moving):
    """A message of ``nbytes`` bytes on its way in."""

    __slots__ = ("_begun", "_far", "_header", "_nbytes", "_start")

    done: bool
    moved: int

    def __init__(self, link: Link, header: bytes, nbytes: int) -> None:
        super().__init__(link)
        self._header = header
        self._nbytes = nbytes
        self._start = 0
        self._begun = False
        self._far: memoryview | int | None = None

    def advance(self) -> bool:
        """Read a part."""
        link, start, far = self._link, self._start, self._far
        slots = 1
        if far is None:
            if not link.arrived():
                return False
            if not self._begun:
                link.open(self._header)
                self._begun = True
            slots = link.slots()
            if not slots:
                if start:
                    raise Damaged(self.peer, f"rank {self.peer} sent the rest of a message by another way than its beginning")
                self._far = far = link.whole(self._nbytes)
                slots = 1
        if isinstance(far, int):
            return self._advance_lent(far)
        part = link.part(self._nbytes - start, slots) if far is None else far[start : start + _PART_BYTES]
        if part:
            self._use(part, start)
        start += len(part)
        self._start = start
        if start == self._nbytes and isinstance(far, memoryview):
            link.check_lender()
        self.moved = HEADER_BYTES + start
        self.done = start == self._nbytes
        if far is None or self.done:
            link.take(slots)
        return True

    def _advance_lent(self, address: int) -> bool:
        """Move a part of a lent message; when all are there, it is taken."""
        before, self._start = self._start, self._borrow(address, self._start)
        self.moved = HEADER_BYTES + self._start
        self.done = self._start == self._nbytes
        return self._start > before

    def _use(self, part: memoryview, offset: int) -> None:
        """Process a part."""
        raise NotImplementedError

    def _borrow(self, address: int, start: int) -> int:
        """Read parts of a lent message; return how many bytes are there of the ``start`` before. When all are, it is taken."""
        raise NotImplementedError


class Receiving(_Incoming):
    """A message into memory of the receiver's."""

    __slots__ = ("_payload",)

    def __init__(self, link: Link, header: bytes, payload: memoryview) -> None:
        super().__init__(link, header, len(payload))
        self._payload = payload

    def _use(self, part: memoryview, offset: int) -> None:
        self._payload[offset : offset + len(part)] = part

    def _borrow(self, address: int, start: int) -> int:
        return self._link.draw(address, self._payload, start)


class Consuming(_Incoming):
    """A message whose parts are passed on in place."""

    __slots__ = ("_scratch", "_sink")

    def __init__(self, link: Link, header: bytes, nbytes: int, sink: Callable[[memoryview, int], None]) -> None:
        super().__init__(link, header, nbytes)
        self._sink = sink
        self._scratch: memoryview | None = None

    def _use(self, part: memoryview, offset: int) -> None:
        self._sink(part, offset)

    def _borrow(self, address: int, start: int) -> int:
        if self._scratch is None:
            self._scratch = self._link.scratch.pop() if self._link.scratch else memoryview(bytearray(_PART_BYTES))
        part = self._scratch[: self._nbytes - start]
        self._link.borrow(address + start, part)
        self._sink(part.toreadonly(), start)
        start += len(part)
        if start == self._nbytes:
            self._link.scratch.append(self._scratch)
            self._link.take(1)
        return start
