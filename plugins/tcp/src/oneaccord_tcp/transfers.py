"""Messages on sockets: each moves as far as the kernel lets it, and never further than its own end.

Array memory goes to the socket and comes from it directly. A header and the beginning of its payload share one system
call in either direction, which makes small messages fast. A long message may be cut into segments, one for each of
several connections: each then moves as a message whose header has moved already.
"""

from __future__ import annotations

import errno
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from oneaccord.api import HEADER_BYTES, Damaged, HeaderMismatch, LinkLost, Sink, Transfer

__all__ = ["CLOSED", "Consuming", "Moving", "Receiving", "Sending", "Striped", "broken"]

CLOSED: str = "the other end closed the connection"

_SEND_BYTES = 1 << 19
_LONG_SEND_BYTES = 1 << 18
"""More in one call only fills the kernel's buffer while the other direction waits; for long messages, which leave the cache, sooner."""
_LONG_BYTES = 1 << 22


def broken(peer: int, error: OSError) -> LinkLost | Damaged:
    """Return the meaning of a failed call of a connection."""
    reason = error.strerror or str(error)
    if error.errno == errno.EBADMSG:
        return Damaged(peer, f"on the connection to rank {peer}: {reason}")
    return LinkLost(peer, reason)


class Moving(Transfer, ABC):
    """A message between its two ends.

    Parameters
    ----------
    sock
        A non-blocking connection.
    peer
        The rank at its other end.
    header
        The header to send, or the one that must come.
    payload
        The memory to send from or to receive into.
    moved
        How many bytes, of header and payload together, have moved already.
    """

    __slots__ = ("_header", "_payload", "_sock", "_total", "peer")

    event: ClassVar[int]
    """The event that the message waits for, in the form of `select.poll`."""

    def __init__(self, sock: socket.socket, peer: int, header: bytes, payload: memoryview, moved: int = 0) -> None:
        self._sock = sock
        self.peer: int = peer
        self._header = header
        self._payload = payload
        self._total = HEADER_BYTES + len(payload)
        self.moved: int = moved
        self.done: bool = False

    @property
    def fd(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    @property
    def pending(self) -> Sequence[Moving]:
        """The message that waits for the kernel: this one."""
        return (self,)

    @abstractmethod
    def advance(self) -> bool:
        """Move as much as the kernel takes now; return whether anything moved.

        Raises
        ------
        LinkLost
            The connection broke.
        Damaged
            The bytes from TLS are not the ones that were sent.
        HeaderMismatch
            Another header came.
        """


class Sending(Moving):
    """A message on its way out."""

    __slots__ = ("_most",)

    event: ClassVar[int] = select.POLLOUT
    moved: int
    done: bool

    def __init__(self, sock: socket.socket, peer: int, header: bytes, payload: memoryview, moved: int = 0) -> None:
        super().__init__(sock, peer, header, payload, moved)
        self._most = _SEND_BYTES if len(payload) <= _LONG_BYTES else _LONG_SEND_BYTES

    def advance(self) -> bool:
        """Move as much as the kernel takes now."""
        moved = self.moved
        try:
            if moved >= HEADER_BYTES:
                start = moved - HEADER_BYTES
                sent = self._sock.send(self._payload[start : start + self._most])
            elif self._payload:
                sent = self._sock.sendmsg((self._header[moved:], self._payload[: self._most]))
            else:
                sent = self._sock.send(self._header[moved:])
        except BlockingIOError:
            return False
        except OSError as error:
            raise broken(self.peer, error) from error
        self.moved = moved = moved + sent
        self.done = moved == self._total
        return True


class Receiving(Moving):
    """A message on its way in, into memory that is exactly as long as its payload.

    ``begun`` holds the part of the header that has come; raises `HeaderMismatch` if that is all of it, and a different one.
    """

    __slots__ = ("_came",)

    event: ClassVar[int] = select.POLLIN
    moved: int
    done: bool

    def __init__(
        self, sock: socket.socket, peer: int, header: bytes, payload: memoryview, moved: int = 0, begun: bytes | bytearray = b""
    ) -> None:
        super().__init__(sock, peer, header, payload, moved)
        self._came = bytearray(HEADER_BYTES)
        self._came[: len(begun)] = begun
        self._check(0)

    def advance(self) -> bool:
        """Move as much as the kernel has now."""
        moved = self.moved
        try:
            if moved >= HEADER_BYTES:
                received = self._sock.recv_into(self._payload[moved - HEADER_BYTES :])
            elif self._payload:
                received = self._sock.recvmsg_into((memoryview(self._came)[moved:], self._payload))[0]
            else:
                received = self._sock.recv_into(memoryview(self._came)[moved:])
        except BlockingIOError:
            return False
        except OSError as error:
            raise broken(self.peer, error) from error
        if not received:
            raise LinkLost(self.peer, CLOSED)
        self.moved = now = moved + received
        self._check(moved)
        self.done = now == self._total
        return True

    def _check(self, before: int) -> None:
        if before < HEADER_BYTES <= self.moved and self._came != self._header:
            raise HeaderMismatch(self.peer, bytes(self._came))


class Consuming(Receiving):
    """A message on its way in that is handed over in parts, each when it fills the staging memory.

    Parameters
    ----------
    sock, peer, header
        As for `Moving`.
    nbytes
        The length of the payload.
    staging
        The memory for parts until they are passed on; a multiple of 64 bytes.
    sink
        The function that takes them.
    moved, begun
        As for `Receiving`: all of the header or nothing.
    """

    moved: int
    done: bool

    __slots__ = ("_filled", "_left", "_sink", "_staging")

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        header: bytes,
        nbytes: int,
        staging: memoryview,
        sink: Sink,
        moved: int = 0,
        begun: bytes = b"",
    ) -> None:
        super().__init__(sock, peer, header, staging[: min(nbytes, len(staging))], moved, begun)
        self._total = HEADER_BYTES + nbytes
        self._staging = staging.toreadonly()
        self._sink = sink
        self._filled = 0
        self._left = nbytes

    def advance(self) -> bool:
        """Move as much as the kernel has now, but for the rest of the staging memory; hand that over when it is full."""
        moved = self.moved
        if moved < HEADER_BYTES:
            if not super().advance():
                return False
            self._filled = max(0, self.moved - HEADER_BYTES)
        else:
            try:
                received = self._sock.recv_into(self._payload[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise broken(self.peer, error) from error
            if not received:
                raise LinkLost(self.peer, CLOSED)
            self.moved = moved + received
            self._filled += received
        length = len(self._payload)
        if self._filled == length:
            self._sink(self._staging[:length], self.moved - HEADER_BYTES - length)
            self._left -= length
            self._filled = 0
            if self._left < length:
                self._payload = self._payload[: self._left]
        self.done = not self._left
        return True


class Striped(Transfer):
    """A long message over several connections: its header and first segment on one, another segment on each of the others.

    Nothing moves on the others before the header has moved. So what was sent in the place of this message is found out before any of it
    is read there.

    Parameters
    ----------
    segments
        The parts, at least two and none of them empty: the first with the header, the others as if it had moved already.
    """

    __slots__ = ("_first", "_segments")

    def __init__(self, segments: Sequence[Moving]) -> None:
        self._first = segments[0]
        self._segments = segments
        self.moved: int = 0
        self.done: bool = False

    @property
    def pending(self) -> Sequence[Moving]:
        """The segments that wait for the kernel."""
        if self._first.moved < HEADER_BYTES:
            return (self._first,)
        return [segment for segment in self._segments if not segment.done]

    def advance(self) -> bool:
        """Move as much as the kernel takes now, on all connections; return whether anything moved.

        Raises
        ------
        LinkLost, HeaderMismatch
            As `Moving.advance`.
        """
        progressed = not self._first.done and self._first.advance()
        if self._first.moved >= HEADER_BYTES:
            for segment in self._segments[1:]:
                progressed = (not segment.done and segment.advance()) or progressed
        if progressed:
            self.moved = sum(segment.moved for segment in self._segments) - HEADER_BYTES * (len(self._segments) - 1)
            self.done = all(segment.done for segment in self._segments)
        return progressed
