"""Short messages: one system call in either direction, from and to memory that is made once."""

from __future__ import annotations

import os
import socket
import time

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Mailbox, Transfer
from manyhands_tcp.transfers import CLOSED, Receiving, Sending

__all__ = ["SLOT_BYTES", "TcpMailbox", "yield_processor"]

SLOT_BYTES: int = 1 << 16
"""The longest payload; the smallest buffer that can be configured holds several."""

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
        """Try again and again for a moment; what did not come then goes on as a transfer."""
        total = HEADER_BYTES + nbytes
        recv_into, frame = self._recv_into, self._incoming
        tries = _EAGER_TRIES
        until = 0.0
        received = 0
        while True:
            try:
                received = recv_into(frame, total)
                break
            except BlockingIOError:
                tries -= 1
                if tries < 0:
                    # The clock is looked at every few tries.
                    if tries & 3 == 3:
                        now = _now()
                        if not until:
                            until = now + self._spin_s
                        elif now >= until:
                            return Receiving(self._sock, self.peer, bytes(header), self.incoming[0][:nbytes])
                    yield_processor()
            except OSError as error:
                raise LinkLost(self.peer, error.strerror or str(error)) from error
        if received == total:
            if self._incoming_frame.startswith(header):
                return None
            raise HeaderMismatch(self.peer, bytes(self._incoming_frame[:HEADER_BYTES]))
        if not received:
            raise LinkLost(self.peer, CLOSED)
        begun = self._incoming_frame[: min(received, HEADER_BYTES)]
        return Receiving(self._sock, self.peer, bytes(header), self.incoming[0][:nbytes], received, begun)
