"""Frames over a proven socket, for the control connections."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

from oneaccord.contract.seal import TAMPERED, Seal
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.proven import ProvenSocket

__all__ = ["FrameConnection"]

_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""The error of a connection whose other end is silent, and not known to have ended."""

_LINGER_S = 2.0
"""How long a connection that was tampered with is emptied, until the other side has closed it."""


class FrameConnection:
    """Frames of at most ``max_bytes`` over a proven socket, in a loop.

    On the wire a frame is its length (4 bytes, little-endian), the seal of that, the frame, and its seal. So a length that was changed is
    found before it is waited for.

    Parameters
    ----------
    loop, sock
        The loop, and the non-blocking socket, owned by the connection from now on.
    on_frame
        Called in the loop's thread with each frame; with None for one that is announced as too long, or whose seal is wrong, the
        last.
    on_lost
        Called once in the loop's thread, with a reason, when the other side closed or broke the connection.
    max_bytes
        A longer frame is refused before memory is taken for it.
    liveness
        How silence ends it.

    Attributes
    ----------
    flaw
        The fault of the last frame, in words, if None was passed for it.
    vanished
        Whether it was lost because the other side no longer answers: it may live, and be cut off.
    """

    _LENGTH = struct.Struct("<I")

    def __init__(
        self,
        loop: Loop,
        sock: ProvenSocket,
        on_frame: Callable[[bytes | None], None],
        on_lost: Callable[[str], None],
        max_bytes: int,
        liveness: Liveness,
    ) -> None:
        with contextlib.suppress(OSError):  # it has ended, as its first use will show
            liveness.bound(sock)
        self._loop = loop
        self._sock = sock
        self._liveness = liveness
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._max_bytes = max_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._open = loop.own(sock)
        self._seal_out, self._seal_in = sock.seals
        self._length: int | None = None  # of the frame that comes
        self.flaw: str = ""
        self.vanished: bool = False
        loop.call(lambda: self._watch(selectors.EVENT_READ))

    def send(self, frame: bytes, *, within_s: float = 0.0) -> None:
        """Send a frame; from any thread. Lost without a word when the connection has gone.

        Never blocks longer than ``within_s``, until the kernel has the frame: the process may end right after.
        """
        given = threading.Event()

        def queue() -> None:
            self._queue(frame)
            given.set()

        self._loop.call(queue)
        if within_s and not self._loop.runs_here:
            given.wait(within_s)

    def close(self) -> None:
        """Send the queue as far as the kernel takes it, and close; from any thread."""
        self._loop.call(self._close)

    def _close(self) -> None:
        if self._open:
            self._flush()
        self._open = False
        self._give_back()

    def _watch(self, events: int) -> None:
        if self._open:
            self._loop.watch(self._sock, events, self._ready)

    def _queue(self, frame: bytes) -> None:
        if not self._open:
            return
        with contextlib.suppress(OSError):
            if self._liveness.count_silence(self._sock):
                self._loop.call_later(self._liveness.patience_s, self._be_patient)
        length, seal = self._LENGTH.pack(len(frame)), self._seal_out
        self._outgoing += length + seal.of(length) + frame + seal.of(frame)
        self._flush()

    def _be_patient(self) -> None:
        if self._open:
            with contextlib.suppress(OSError):
                self._liveness.bound(self._sock)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read()
        if events & selectors.EVENT_WRITE and self._open:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(str(error), error)
            return
        self._watch(selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0))

    def _read(self) -> None:
        reason, failure = "the connection was closed", None
        try:
            piece = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EBADMSG:  # from TLS
                self._refuse(TAMPERED)
                return
            piece, reason, failure = b"", str(error), error
        self._incoming += piece
        while self._open:
            count = self._LENGTH.size if self._length is None else self._length
            if len(self._incoming) < count + Seal.BYTES:
                break
            part = bytes(self._incoming[:count])
            is_sound = self._seal_in.fits(part, self._incoming[count : count + Seal.BYTES])
            del self._incoming[: count + Seal.BYTES]
            if not is_sound:
                self._refuse(TAMPERED)
                return
            if self._length is None:
                (self._length,) = self._LENGTH.unpack(part)
                if self._length > self._max_bytes:
                    self._refuse(f"a frame of {self._length} bytes was announced, but at most {self._max_bytes} are allowed")
                    return
            else:
                self._length = None
                self._on_frame(part)
        if not piece and self._open:
            self._lost(reason, failure)

    def _refuse(self, flaw: str) -> None:
        self.flaw = flaw
        self._on_frame(None)
        self._loop.call(partial(self._end, flaw))  # after the frames of the callback

    def _end(self, reason: str) -> None:
        """End the connection, but let the other side read the last frames: closing with bytes unread would reset it."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._loop.watch(self._sock, selectors.EVENT_READ, lambda _: self._empty())
        self._loop.call_later(_LINGER_S, self._give_back)
        self._on_lost(reason)

    def _empty(self) -> None:
        try:
            while socket.socket.recv(self._sock, 65536):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self._give_back()

    def _give_back(self) -> None:
        self._loop.give_back(self._sock)

    def _lost(self, reason: str, error: OSError | None = None) -> None:
        self._open = False
        self.vanished = error is not None and error.errno in _SILENT
        self._give_back()
        self._on_lost(reason)
