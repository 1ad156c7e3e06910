"""The number of connections of two ranks, and the part of a long message on each."""

from __future__ import annotations

import socket
import struct

__all__ = ["SEGMENT_BYTES", "enough_streams", "segments"]

SEGMENT_BYTES: int = 1 << 18
"""The shortest segment. Below it, waking up for one more connection takes longer than what it saves; and a message that fits into a
mailbox is never cut, since it may leave by the mailbox and arrive without it."""
_LINE_BYTES = 64
_BYTES_PER_S = 25e9 / 8
"""The largest rate of a link: the card of an ordinary server. One connection carries at most its window each round trip."""
_MOST = 8
"""More are seldom faster, but take descriptors and memory of the kernel for each pair of ranks; a user can set the number."""
_MIN_RTT = struct.Struct("=148xI")
"""The offset of ``tcpi_min_rtt`` in ``struct tcp_info`` of Linux, in microseconds. The smoothed time includes the answer of a busy program."""


def segments(nbytes: int, streams: int) -> list[tuple[int, int]]:
    """Return the beginning and the end of each part of a message: the same at both ends, which know nothing else of each other.

    Parameters
    ----------
    nbytes
        The length of its payload.
    streams
        How many connections there are, at least 1.

    Returns
    -------
    list of (int, int)
        At most as many as connections, one behind the other. Each begins at a multiple of 64 bytes. None is empty, but for the only one
        of an empty message.
    """
    count = max(1, min(streams, nbytes // SEGMENT_BYTES))
    size = -(-nbytes // (count * _LINE_BYTES)) * _LINE_BYTES
    return [(number * size, min(nbytes, (number + 1) * size)) for number in range(count)]


def enough_streams(sock: socket.socket, peers: int) -> int:
    """Return how many connections fill a link: its bandwidth times its delay, over the window of one.

    With windows of 1 MiB, that is 1 up to a round trip of 0.33 ms, as between the servers of a room; 3 at 1 ms; 8 from 2.4 ms on. A host
    that allows only small buffers gets more connections, as far as its descriptors go: a quarter of them for a group whose ranks all
    exchange messages.

    Parameters
    ----------
    sock
        A connection over that link whose buffers are as large as they will be.
    peers
        How many other ranks there are.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 1
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    if len(info) < _MIN_RTT.size:  # an older kernel
        return 1
    import resource

    round_trip_s: float = _MIN_RTT.unpack(info)[0] * 1e-6
    # Linux doubles the requested size, because it includes its own needs.
    window = min(sock.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)) // 2
    wanted = int(-(-round_trip_s * _BYTES_PER_S // window))
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    affordable = _MOST if descriptors == resource.RLIM_INFINITY else descriptors // (4 * peers)
    return max(1, min(wanted, _MOST, affordable))
