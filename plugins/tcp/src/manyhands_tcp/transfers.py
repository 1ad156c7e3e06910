"""Messages on sockets: each moves as far as the kernel lets it, and never further than its own end.

Array memory goes to the socket and comes from it directly. A header and the beginning of its payload share one system
call in either direction, which is what makes small messages fast.
"""

from __future__ import annotations

import socket

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer

__all__ = ["Receiving", "Sending"]

_SEND_BYTES = 1 << 18
"""More in one call only fills the kernel's buffer while the other direction waits."""


class Sending(Transfer):
    """A message on its way out."""

    __slots__ = ("_header", "_payload", "_sock", "_total", "peer")

    def __init__(self, sock: socket.socket, peer: int, header: bytes, payload: memoryview) -> None:
        self._sock = sock
        self.peer: int = peer
        self._header = header
        self._payload = payload
        self._total = HEADER_BYTES + len(payload)
        self.moved: int = 0
        self.done: bool = False

    @property
    def waits_to_read(self) -> bool:
        """Whether it waits for the socket to be readable rather than writable."""
        return False

    @property
    def fd(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    def advance(self) -> bool:
        """Move as much as the kernel takes now; tell whether anything moved."""
        moved = self.moved
        try:
            if moved >= HEADER_BYTES:
                start = moved - HEADER_BYTES
                sent = self._sock.send(self._payload[start : start + _SEND_BYTES])
            elif self._payload:
                sent = self._sock.sendmsg((self._header[moved:], self._payload[:_SEND_BYTES]))
            else:
                sent = self._sock.send(self._header[moved:])
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkLost(self.peer, error.strerror or str(error)) from error
        self.moved = moved = moved + sent
        self.done = moved == self._total
        return True


class Receiving(Transfer):
    """A message on its way in, into memory that is exactly as long as its payload."""

    __slots__ = ("_expected", "_header", "_payload", "_sock", "_total", "peer")

    def __init__(self, sock: socket.socket, peer: int, expected: bytes, payload: memoryview) -> None:
        self._sock = sock
        self.peer: int = peer
        self._expected = expected
        self._header = bytearray(HEADER_BYTES)
        self._payload = payload
        self._total = HEADER_BYTES + len(payload)
        self.moved: int = 0
        self.done: bool = False

    @property
    def waits_to_read(self) -> bool:
        """Whether it waits for the socket to be readable rather than writable."""
        return True

    @property
    def fd(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    def advance(self) -> bool:
        """Move as much as the kernel has now; tell whether anything moved."""
        moved = self.moved
        try:
            if moved >= HEADER_BYTES:
                received = self._sock.recv_into(self._payload[moved - HEADER_BYTES :])
            elif self._payload:
                received = self._sock.recvmsg_into((memoryview(self._header)[moved:], self._payload))[0]
            else:
                received = self._sock.recv_into(memoryview(self._header)[moved:])
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkLost(self.peer, error.strerror or str(error)) from error
        if not received:
            raise LinkLost(self.peer, "it closed the connection")
        self.moved = now = moved + received
        if moved < HEADER_BYTES <= now and self._header != self._expected:
            raise HeaderMismatch(self.peer, bytes(self._header))
        self.done = now == self._total
        return True
