"""Messages of any length between a program and a worker that it has started, over a pair of sockets."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

from oneaccord.net.forking import close_after_fork
from oneaccord.net.loop import Loop

__all__ = ["LENGTH_BYTES", "Channel"]

LENGTH_BYTES = 8
"""In front of each message stands its length, little-endian."""
_READ_BYTES = 1 << 20


class Channel:
    """The program's end.

    Parameters
    ----------
    loop
        Reads and writes.
    sock
        The socket, which belongs to the channel from now on.
    on_message
        Called in the loop's thread with each message.
    on_end
        Called once in the loop's thread, when the worker has closed its end.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, on_message: Callable[[memoryview], None], on_end: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = close_after_fork(sock)
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray(LENGTH_BYTES)
        self._filled = 0
        self._is_body = False
        self._open = loop.own(sock)
        loop.call(self._watch)

    def send(self, message: bytes) -> None:
        """Send a message; from any thread. It is dropped if the channel has ended."""
        self._loop.call(lambda: self._queue(message))

    def close(self) -> None:
        """Close, which the worker sees; from any thread."""
        self._loop.call(self._close)

    def drain(self) -> None:
        """Take in what the worker has sent, without waiting; from the loop's thread."""
        while self._open and self._read():
            pass

    def _queue(self, message: bytes) -> None:
        if self._open:
            self._outgoing += memoryview(len(message).to_bytes(LENGTH_BYTES, "little")), memoryview(message)
            self._flush()

    def _watch(self) -> None:
        if self._open:
            wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._loop.watch(self._sock, wants, self._ready)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ and self._open:
            self._read()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing[0])
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:  # what the worker has said before its end is still to be read
            self._outgoing.clear()
        self._watch()

    def _read(self) -> bool:
        """Take in a piece; return whether there was one."""
        try:
            count = self._sock.recv_into(memoryview(self._incoming)[self._filled : self._filled + _READ_BYTES])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self._close()
            self._on_end()
            return False
        self._filled += count
        while self._filled == len(self._incoming):
            whole, self._filled = self._incoming, 0
            if self._is_body:
                self._is_body, self._incoming = False, bytearray(LENGTH_BYTES)
                self._on_message(memoryview(whole))
                break
            self._is_body, self._incoming = True, bytearray(int.from_bytes(whole, "little"))
        return True

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._outgoing.clear()
            self._loop.give_back(self._sock)
