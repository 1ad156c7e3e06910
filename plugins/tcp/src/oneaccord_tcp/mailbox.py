"""Short messages: one system call in either direction, from and to memory that is made once."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from oneaccord.api import HEADER_BYTES, HeaderMismatch, LinkLost, Mailbox, Transfer, processors
from oneaccord_tcp.transfers import CLOSED, Receiving, Sending

__all__ = ["SLOT_BYTES", "Box", "Patience", "TcpMailbox", "aligned", "compiled_mailbox", "yield_processor"]

_MOST_LENGTHS = 64
SLOT_BYTES: int = 1 << 18
"""The longest payload."""


yield_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Let another process that waits for the processor run; costs less than a microsecond if there is none."""

_now = time.monotonic


def aligned(nbytes: int) -> memoryview:
    """Return memory that is aligned to a cache line, which makes it faster to add."""
    memory = bytearray(nbytes + 64)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64
    return memoryview(memory)[start : start + nbytes]


class Patience(NamedTuple):
    """How long a rank waits actively.

    Attributes
    ----------
    eager_tries
        Tries before the processor is offered to others between two of them: many if every rank has a processor of its own.
    spin_s
        Seconds from then on before it sleeps.
    """

    eager_tries: int
    spin_s: float

    @classmethod
    def of(cls, ranks: int, spin_us: int) -> Patience:
        """Return that of a job of ``ranks`` ranks, which may all be on this host."""
        eager = min(20, spin_us) if ranks <= processors() else min(3, spin_us)  # a try takes about a microsecond
        return cls(eager, spin_us * 1e-6)


class Box(Mailbox):
    """A mailbox that can learn that its connection is closed."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Use the connection no more."""


class TcpMailbox(Box):
    """Short messages over one connection.

    Parameters
    ----------
    sock
        A non-blocking connection.
    peer
        The rank at its other end.
    patience
        How long to wait actively.
    """

    outgoing: tuple[memoryview, ...]
    incoming: tuple[memoryview, ...]
    next_out: int
    next_in: int

    __slots__ = (
        "_incoming",
        "_incoming_header",
        "_lengths",
        "_outgoing",
        "_outgoing_header",
        "_patience",
        "_recv_into",
        "_send",
        "_sock",
        "peer",
    )

    def __init__(self, sock: socket.socket, peer: int, patience: Patience) -> None:
        self._sock = sock
        self.peer: int = peer
        self._patience = patience
        self._send = sock.send
        self._recv_into = sock.recv_into
        # Header and payload stand one behind the other, so that they need no system call of their own.
        self._outgoing = aligned(HEADER_BYTES + SLOT_BYTES)
        self._incoming = aligned(HEADER_BYTES + SLOT_BYTES)
        self._outgoing_header = self._outgoing[:HEADER_BYTES]
        self._incoming_header = self._incoming[:HEADER_BYTES]
        self._lengths: dict[int, memoryview] = {}
        self.outgoing = (self._outgoing[HEADER_BYTES:],)
        self.incoming = (self._incoming[HEADER_BYTES:],)
        self.next_out = self.next_in = 0

    def close(self) -> None:
        """Do nothing: the connection knows that it is closed."""

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send; the part that the kernel does not take at once continues as a transfer."""
        message = self._lengths.get(nbytes)
        if message is None:
            if len(self._lengths) >= _MOST_LENGTHS:
                self._lengths.clear()
            message = self._lengths[nbytes] = self._outgoing[: HEADER_BYTES + nbytes]
        self._outgoing_header[:] = header
        try:
            sent = self._send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise LinkLost(self.peer, error.strerror or str(error)) from error
        if sent == HEADER_BYTES + nbytes:
            return None
        return Sending(self._sock, self.peer, bytes(header), self.outgoing[0][:nbytes], sent)

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Try again and again for a moment; the missing part then continues as a transfer."""
        total = HEADER_BYTES + nbytes
        recv_into, into = self._recv_into, self._incoming
        received, tries, until = 0, self._patience.eager_tries, 0.0
        while True:
            try:
                came = recv_into(into, total - received)
            except BlockingIOError:
                tries -= 1
                if tries < 0:
                    # The clock is looked at every few tries.
                    if tries & 3 == 3:
                        now = _now()
                        if not until:
                            until = now + self._patience.spin_s
                        elif now >= until:
                            break
                    yield_processor()
                continue
            except OSError as error:
                raise LinkLost(self.peer, error.strerror or str(error)) from error
            if not came:
                raise LinkLost(self.peer, CLOSED)
            if received < HEADER_BYTES <= received + came and self._incoming_header.tobytes() != header:
                raise HeaderMismatch(self.peer, self._incoming_header.tobytes())
            received += came
            if received == total:
                return None
            into, tries = self._incoming[received:], self._patience.eager_tries
        begun = self._incoming[: min(received, HEADER_BYTES)].tobytes()
        return Receiving(self._sock, self.peer, bytes(header), self.incoming[0][:nbytes], received, begun)


@cache
def compiled_mailbox(module: Any) -> Callable[[socket.socket, int, Patience], Box]:
    """Return the compiled form of `TcpMailbox`, made of the module ``oneaccord_native``."""

    class CompiledMailbox(module.Stream):  # type: ignore[misc]
        """A `TcpMailbox` whose messages are moved by C, also for the compiled executor, which needs no Python for them."""

        compiled = module
        posted_bytes = None
        _got: int
        _sent: int
        _sending: int

        def __init__(self, sock: socket.socket, peer: int, patience: Patience) -> None:
            memory = [aligned(HEADER_BYTES + SLOT_BYTES) for _ in range(2)]
            super().__init__(sock.fileno(), *memory, patience.eager_tries, patience.spin_s)
            self._sock = sock
            self._incoming_header = memory[1][:HEADER_BYTES]
            self._outgoing_header = memory[0][:HEADER_BYTES]
            self.peer: int = peer
            self.outgoing = (memory[0][HEADER_BYTES:],)
            self.incoming = (memory[1][HEADER_BYTES:],)
            self.next_out = self.next_in = 0

        def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
            """Send; the part that the kernel does not take at once continues as a transfer."""
            try:
                return None if self.post_short(header, nbytes) else self.unsent()
            except OSError as error:
                raise LinkLost(self.peer, error.strerror or str(error)) from error

        def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
            """Try again and again for a moment; the missing part then continues as a transfer."""
            if self.fetch_short(header, nbytes):
                return None
            got, self._got = self._got, 0
            begun = self._incoming_header[: min(got, HEADER_BYTES)].tobytes()
            transfer = Receiving(self._sock, self.peer, bytes(header), self.incoming[0][:nbytes], got, begun)
            transfer.advance()  # which raises the connection's error, if there is one
            return None if transfer.done else transfer

        def close(self) -> None:
            """Use the connection no more."""
            self._fd = -1

        def unsent(self) -> Transfer | None:
            """Return the rest of a message that was posted."""
            sent, total = self._sent, self._sending
            if sent == total:
                return None
            self._sent = total
            header = self._outgoing_header.tobytes()
            return Sending(self._sock, self.peer, header, self.outgoing[0][: total - HEADER_BYTES], sent)

        def recall(self, transfer: Transfer) -> bool:
            """Give up a receive of which nothing has come; return whether that was so."""
            return not transfer.done and not transfer.moved

    Box.register(CompiledMailbox)
    return CompiledMailbox
