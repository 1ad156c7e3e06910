"""Messages that bear seals: on the wire a header, its seal, the payload, and its seal. An empty payload has none.

The header has a seal of its own, because it gives the length of the message: if it was changed on its way, the ranks are not blamed for different
calls. A message that is reduced as it comes is passed on before all of it has been checked; the transfer is not done before.
"""

from __future__ import annotations

import hmac
import select
import socket
from collections.abc import Iterator
from typing import ClassVar

from oneaccord.api import HEADER_BYTES, Damaged, HeaderMismatch, LinkLost, Seal, Sink
from oneaccord_tcp.transfers import CLOSED, Moving, broken

__all__ = ["SealedReceiving", "SealedSending"]

_PIECE_BYTES = 1 << 18
"""The bytes that are hashed at once: they are still in the cache when the kernel takes them."""


class SealedSending(Moving):
    """A message on its way out.

    Parameters
    ----------
    sock, peer, payload
        As for `Moving`.
    seal
        That of this connection and direction.
    header
        The header; empty if it goes on another connection.
    """

    __slots__ = ("_left", "_now", "_sent")

    event: ClassVar[int] = select.POLLOUT
    moved: int
    done: bool

    def __init__(self, sock: socket.socket, peer: int, seal: Seal, header: bytes, payload: memoryview) -> None:
        super().__init__(sock, peer, header, payload)
        self._left = self._pieces(seal)
        self._now: memoryview = memoryview(next(self._left))
        self._sent = 0 if header else HEADER_BYTES + Seal.BYTES
        self.moved = HEADER_BYTES * (not header)

    def _pieces(self, seal: Seal) -> Iterator[bytes | memoryview]:
        payload = self._payload
        start = self._header and self._header + seal.of(self._header)
        if not payload:
            yield start
            return
        body = seal.begin()
        if len(payload) <= _PIECE_BYTES:  # in one system call
            body.update(payload)
            yield b"".join((start, payload, body.digest()))
            return
        if start:
            yield start
        for at in range(0, len(payload), _PIECE_BYTES):
            piece = payload[at : at + _PIECE_BYTES]
            body.update(piece)
            yield piece
        yield body.digest()

    def advance(self) -> bool:
        """Move as much as the kernel takes now."""
        try:
            sent = self._sock.send(self._now)
        except BlockingIOError:
            return False
        except OSError as error:
            raise broken(self.peer, error) from error
        self._sent += sent
        self.moved = min(self._total, max(0, self._sent - Seal.BYTES))
        self._now = self._now[sent:]
        if not self._now:
            following = next(self._left, None)
            if following is None:
                self.done = True
            else:
                self._now = memoryview(following)
        return True


class SealedReceiving(Moving):
    """A message on its way in, into memory as long as its payload; or, with a sink, handed over in parts.

    Parameters
    ----------
    sock, peer
        As for `Moving`.
    seal
        That of this connection and direction.
    rank
        The receiving rank, for errors.
    header
        The expected header; empty if it comes on another connection.
    memory
        The memory for the payload, or for a part of it until it is passed on.
    nbytes, sink
        The length of a payload that is passed on, and its receiver.
    """

    __slots__ = ("_body", "_filled", "_got", "_left", "_past", "_rank", "_seal", "_sink", "_tail", "_tailed", "_top")

    event: ClassVar[int] = select.POLLIN
    moved: int
    done: bool

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        seal: Seal,
        rank: int,
        header: bytes,
        memory: memoryview,
        nbytes: int | None = None,
        sink: Sink | None = None,
    ) -> None:
        nbytes = len(memory) if nbytes is None else nbytes
        super().__init__(sock, peer, header, memory[:nbytes])
        self._seal = seal
        self._rank = rank
        self._sink = sink
        self._left = nbytes  # of the payload, including the part in memory that is not passed on yet
        self._filled = 0
        self._top = bytearray(HEADER_BYTES + Seal.BYTES if header else 0)
        self._tail = bytearray(Seal.BYTES if nbytes else 0)
        self._got = self._tailed = self._past = 0
        self._body = seal.begin() if nbytes and not header else None
        self.moved = HEADER_BYTES * (not header)

    def advance(self) -> bool:
        """Move as much as the kernel has now, but no further than the memory goes; hand that over when it is full."""
        parts = [memoryview(self._top)[self._got :], self._payload[self._filled :]]
        if self._left == len(self._payload):
            parts.append(memoryview(self._tail)[self._tailed :])
        try:
            came = self._sock.recvmsg_into(list(filter(None, parts)))[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise broken(self.peer, error) from error
        if not came:
            raise LinkLost(self.peer, CLOSED)
        if parts[0]:
            took = min(came, len(parts[0]))
            self._got, came = self._got + took, came - took
            if self._got == len(self._top):
                self._check_header()
        if parts[1]:
            took = min(came, len(parts[1]))
            came -= took
            if self._body is not None:
                self._body.update(parts[1][:took])
            self._filled += took
        self._tailed += came
        self._hand_over()
        # Not one of the others' segments moves before the header has been checked: see Striped.
        self.moved = HEADER_BYTES + self._past + self._filled if self._got == len(self._top) else 0
        if self._tailed == len(self._tail) and self._got == len(self._top) and self._filled == self._left:
            if self._body is not None and not hmac.compare_digest(self._body.digest(), bytes(self._tail)):
                raise self._damaged()
            self.done = True
        return True

    def _check_header(self) -> None:
        came = bytes(self._top[:HEADER_BYTES])
        if not self._seal.fits(came, self._top[HEADER_BYTES:]):
            raise self._damaged()
        if came != self._header:
            raise HeaderMismatch(self.peer, came)
        if self._tail:
            self._body = self._seal.begin()

    def _hand_over(self) -> None:
        length = len(self._payload)
        if self._sink is None or self._filled < length or not length:
            return
        self._sink(self._payload.toreadonly(), self._past)
        self._past += length
        self._left -= length
        self._filled = 0
        self._payload = self._payload[: self._left]

    def _damaged(self) -> Damaged:
        return Damaged(
            self.peer,
            f"the received message is not the one that rank {self.peer} sent to rank {self._rank}: the connection was tampered with, or the network has a fault",
        )
