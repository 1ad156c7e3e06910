"""Detection of a connection whose other end is gone without having closed it."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import sys
from typing import NamedTuple

__all__ = ["Liveness"]

_TCP_RTO_MAX_MS = 44
"""Of Linux; Python has no name for it."""
_LONGEST_PAUSE_MS = 120_000
"""The most that Linux takes."""
_TCP_INFO = struct.Struct("=24xI28xI")
"""Of Linux's ``struct tcp_info``: how many packets are under way, and for how many milliseconds the other end has been silent."""


class Liveness(NamedTuple):
    """How often an idle connection is asked whether its other end is there, and for how long silence is borne.

    The kernels ask and answer: a process that is busy, or stopped, is there. TCP counts whole seconds (RFC 9293, 3.8.4).

    Attributes
    ----------
    heartbeat_s
        After so many seconds without a word, and then each so many, the kernel asks.
    patience_s
        After so many seconds without an answer the connection ends; at least two heartbeats.
    """

    heartbeat_s: int = 2
    patience_s: int = 10

    def watch(self, sock: socket.socket) -> None:
        """Let a connection end once its host has vanished; bytes on their way may take as long as they need.

        Raises
        ------
        OSError
            The connection has ended.
        """
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux names; others lack some.
        unanswered = max(1, math.ceil(self.patience_s / self.heartbeat_s) - 1)
        options = {"TCP_KEEPIDLE": self.heartbeat_s, "TCP_KEEPINTVL": self.heartbeat_s, "TCP_KEEPCNT": unanswered}
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if sys.platform == "linux":
            # Bytes on their way are sent again after pauses that double, so that a network that is back would be tried too late. Linux gives up
            # after fifteen times, which must last longer than the patience. Kernels before 6.15 do not know this option.
            pause_ms = max(1000 * self.heartbeat_s, 125 * self.patience_s)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, min(pause_ms, _LONGEST_PAUSE_MS))

    def bound(self, sock: socket.socket) -> None:
        """Let a control connection end whose other end takes nothing, as well (RFC 5482).

        Never for data: a rank that is busy for long takes none either, and is only late.

        Raises
        ------
        OSError
            The connection has ended.
        """
        self.watch(sock)
        if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.patience_s * 1000)

    def count_silence(self, sock: socket.socket) -> bool:
        """Before a write to a bound connection: count the silence until now as a part of the patience, and return whether there was any.

        The kernel stops asking once bytes are on their way, and gives these the whole patience. `bound` gives it back.

        Raises
        ------
        OSError
            The connection has ended.
        """
        if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        under_way, silent_ms = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        if under_way or silent_ms < 2000 * self.heartbeat_s:  # otherwise the kernel has asked, and got no answer
            return False
        left_ms = max(1000 * self.heartbeat_s, 1000 * self.patience_s - silent_ms)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, left_ms)
        return True
