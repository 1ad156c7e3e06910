"""Messages of any length: in slots, part by part; or in place, in the sender's process."""

from __future__ import annotations

from collections.abc import Callable

from oneaccord.api import HEADER_BYTES, Damaged
from oneaccord_shm.link import Link, Moving

__all__ = ["Consuming", "Receiving", "Sending", "SendingInPlace"]

_PART_BYTES = 512 << 10
"""The size of a part that is read in place: other messages move meanwhile, and it is in the cache while it is used."""
_COPIED_BYTES = 4 << 20
"""How much of it is copied at a time by the system."""


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
    """A message that lies at a place in this rank's heap, or elsewhere in its process, until the peer has read it."""

    __slots__ = ("_number", "_payload")

    done: bool
    moved: int

    def __init__(self, link: Link, header: bytes, payload: memoryview, place: int, *, lent: bool) -> None:
        super().__init__(link)
        self._payload = payload  # as long as it is held, its memory is not given back
        self._number = link.put_place(header, place, lent=lent)

    def advance(self) -> bool:
        """See whether the peer has read it."""
        self.done = self._link.has_taken(self._number)
        if self.done:
            self.moved = HEADER_BYTES + len(self._payload)
        return self.done


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
            start += self._borrow(far + start, start)
        else:
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

    def _use(self, part: memoryview, offset: int) -> None:
        """Process a part."""
        raise NotImplementedError

    def _borrow(self, address: int, offset: int) -> int:
        """Read the next part of a lent message; return the number of bytes."""
        raise NotImplementedError


class Receiving(_Incoming):
    """A message into memory of the receiver's."""

    __slots__ = ("_payload",)

    def __init__(self, link: Link, header: bytes, payload: memoryview) -> None:
        super().__init__(link, header, len(payload))
        self._payload = payload

    def _use(self, part: memoryview, offset: int) -> None:
        self._payload[offset : offset + len(part)] = part

    def _borrow(self, address: int, offset: int) -> int:
        part = self._payload[offset : offset + _COPIED_BYTES]
        self._link.borrow(address, part)
        return len(part)


class Consuming(_Incoming):
    """A message whose parts are passed on in place."""

    __slots__ = ("_scratch", "_sink")

    def __init__(self, link: Link, header: bytes, nbytes: int, sink: Callable[[memoryview, int], None]) -> None:
        super().__init__(link, header, nbytes)
        self._sink = sink
        self._scratch: memoryview | None = None

    def _use(self, part: memoryview, offset: int) -> None:
        self._sink(part, offset)

    def _borrow(self, address: int, offset: int) -> int:
        if self._scratch is None:
            self._scratch = self._link.scratch.pop() if self._link.scratch else memoryview(bytearray(_PART_BYTES))
        part = self._scratch[: self._nbytes - offset]
        self._link.borrow(address, part)
        self._sink(part.toreadonly(), offset)
        if offset + len(part) == self._nbytes:
            self._link.scratch.append(self._scratch)
        return len(part)
