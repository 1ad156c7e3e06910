"""Requests to a window: messages with a tag of a context that only the window has, so that they need no records of their own.

A request is a few fixed bytes and the elements. Each rank has a receive for the requests of every rank, which is there as long as the window is:
it serves one request before it takes the next one. So the requests of one rank are served in their order. The replies come
in another context, with the number of the request as their tag.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from oneaccord.arrays.memory import Array, bytes_of
from oneaccord.calls.post.messages import BYTE, Letter, Receive, Send
from oneaccord.calls.post.office import PostOffice
from oneaccord.calls.windows.places import Place
from oneaccord.errors import OutOfMemoryError

__all__ = [
    "ACCUMULATE",
    "COMPLETED",
    "FETCH",
    "FLUSH",
    "GET",
    "LOCK",
    "LOCK_SHARED",
    "NAMES",
    "NOWHERE",
    "PIECE_BYTES",
    "POSTED",
    "PUT",
    "SWAP",
    "UNLOCK",
    "Asked",
    "Reply",
    "Standing",
    "asked",
    "reply",
    "request",
]

PUT, GET, ACCUMULATE, FETCH, SWAP, FLUSH, LOCK, LOCK_SHARED, UNLOCK = range(1, 10)
NAMES: dict[int, str] = {PUT: "put", GET: "get", ACCUMULATE: "accumulate", FETCH: "fetch_and_op", SWAP: "compare_and_swap"}
"""The names of the calls on elements; C knows them too."""
_REQUESTS, POSTED, COMPLETED = range(3)
"""Tags of requests, and of what `Window.post` and `Window.complete` send."""
PIECE_BYTES = 1 << 20
"""The most bytes of elements in one request or reply."""
_REPLIES = 1 << 31
_HEAD = struct.Struct("<BB6xqqqQ")
NOWHERE = Place(0, 1, 0)


class Asked(NamedTuple):
    """A request: what it is, the number of its op, its elements, the number for its reply, or 0, and its data."""

    kind: int
    op: int
    place: Place
    number: int
    data: memoryview


def request(
    what: object, window: int, peer: int, kind: int, *, op: int = 0, place: Place = NOWHERE, number: int = 0, data: bytes = b""
) -> Send:
    """Return the message of a request to a rank of the world."""
    body = memoryview(_HEAD.pack(kind, op, *place, number) + data)
    return Ask(what, window, peer, _REQUESTS, body, BYTE, (len(body),), 0)


def asked(data: memoryview) -> Asked:
    """Read a request."""
    kind, op, start, step, count, number = _HEAD.unpack_from(data)
    return Asked(kind, op, Place(start, step, count), number, data[_HEAD.size :])


def reply(what: object, window: int, peer: int, number: int, data: memoryview) -> Send:
    """Return the message that answers a request of a rank of the world."""
    return Send(what, window | _REPLIES, peer, number, data, BYTE, (len(data),), 0)


class Ask(Send):
    """A request."""

    __slots__ = ()

    @property
    def is_served(self) -> bool:
        """Whether the other rank's office takes it, whatever its program does; true."""
        return True


class Reply(Receive):
    """The receive of a reply, which no call of the other rank's program needs to send.

    Parameters
    ----------
    what, window, peer, number
        The call, the number of the window, the rank of the world that was asked, and the number of the request.
    out
        The memory for its bytes; None for new memory.
    """

    __slots__ = ()

    def __init__(self, what: object, window: int, peer: int, number: int, out: Array | None = None) -> None:
        super().__init__(what, window | _REPLIES, peer, number, out, ())

    @property
    def is_served(self) -> bool:
        """Whether the other rank's office ends it, whatever its program does; true."""
        return True


class Standing(Receive):
    """The receive of all requests of one rank.

    Parameters
    ----------
    office, window, peer
        The office of this rank, the number of the window, and the rank of the world that asks.
    serve
        ``serve(peer, data)`` carries out a request; under the lock of the office.
    """

    __slots__ = ("_is_going_on", "_office", "_serve")

    def __init__(self, office: PostOffice, window: int, peer: int, serve: Callable[[int, memoryview], None]) -> None:
        super().__init__("requests to a window", window, peer, _REQUESTS, None, ())
        self._office = office
        self._serve = serve
        self._is_going_on = False

    def begin(self) -> None:
        """Wait for requests, and serve those that have come; under the lock of the office."""
        self._go_on()

    def finish(self) -> None:
        """Serve the request that has come, and wait for the next one; or end, if it was ended by an error."""
        letter, array, error = self.letter, self.array, self.error
        if isinstance(error, OutOfMemoryError):  # the rank that asks cannot be told in any other way
            raise error
        if letter is None or error is not None or array is None:
            super().finish()
            return
        self.letter: Letter | None = None
        self.array: Array | None = None
        self._serve(self.key[1], bytes_of(array))
        if not self._is_going_on:
            self._go_on()

    def _go_on(self) -> None:
        matching = self._office.matching
        self._is_going_on = True
        try:
            while (letter := matching.letter_for(self.key)) is not None:
                matching.remove(letter)
                self._office.meet(self, letter)
                if self.letter is not None:  # it is still on its way
                    return
            matching.post(self)
        finally:
            self._is_going_on = False
