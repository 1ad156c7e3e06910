"""Short messages: one system call in either direction, from and to memory that is made once."""

from __future__ import annotations

import os
import socket
import time

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Mailbox, Transfer
from manyhands_tcp.transfers import CLOSED, Receiving, Sending

__all__ = ["SLOT_BYTES", "TcpMailbox", "yield_processor"]

SLOT_BYTES: int = 1 << 18
"""The longest payload."""

_EAGER_TRIES = 3
"""Tries before the processor is offered to others: what is on its way already comes within these."""

yield_processor = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Let whoever else waits for the processor run; costs less than a microsecond where there is nobody."""

_now = time.monotonic


class TcpMailbox(Mailbox):
    """Short messages over one connection.

    Parameters
    ----------
    sock
        A non-blocking connection.
    peer
        The rank at its other end.
    spin_s
        Seconds to wait actively.
    """

    __slots__ = (
        "_incoming",
        "_incoming_frame",
        "_lengths",
        "_outgoing_frame",
        "_recv_into",
        "_send",
        "_sock",
        "_spin_s",
        "peer",
    )

    def __init__(self, sock: socket.socket, peer: int, spin_s: float) -> None:
        self._sock = sock
        self.peer = peer
        self._spin_s = spin_s
        self._send = sock.send
        self._recv_into = sock.recv_into
        # Header and payload stand one behind the other, so that they need no system call of their own.
        self._outgoing_frame = bytearray(HEADER_BYTES + SLOT_BYTES)
        self._incoming_frame = bytearray(HEADER_BYTES + SLOT_BYTES)
        self._incoming = memoryview(self._incoming_frame)
        self._lengths: dict[int, memoryview] = {}
        self.outgoing = (memoryview(self._outgoing_frame)[HEADER_BYTES:],)
        self.incoming = (self._incoming[HEADER_BYTES:],)
        self.next_out = self.next_in = 0

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send; what the kernel does not take at once goes on as a transfer."""
        message = self._lengths.get(nbytes)
        if message is None:
            message = self._lengths[nbytes] = memoryview(self._outgoing_frame)[: HEADER_BYTES + nbytes]
        self._outgoing_frame[:HEADER_BYTES] = header
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
        """Try again and again for a moment, which begins anew when something comes; what is missing then goes on as a transfer."""
        total = HEADER_BYTES + nbytes
        recv_into, into = self._recv_into, self._incoming
        received, tries, until = 0, _EAGER_TRIES, 0.0
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
                            until = now + self._spin_s
                        elif now >= until:
                            break
                    yield_processor()
                continue
            except OSError as error:
                raise LinkLost(self.peer, error.strerror or str(error)) from error
            if not came:
                raise LinkLost(self.peer, CLOSED)
            if received < HEADER_BYTES <= received + came and not self._incoming_frame.startswith(header):
                raise HeaderMismatch(self.peer, bytes(self._incoming_frame[:HEADER_BYTES]))
            received += came
            if received == total:
                return None
            into, tries, until = self._incoming[received:], _EAGER_TRIES, 0.0
        begun = self._incoming_frame[: min(received, HEADER_BYTES)]
        return Receiving(self._sock, self.peer, bytes(header), self.incoming[0][:nbytes], received, begun)
