"""What the kernel is told of silence; that it does so is for tests with networks that part."""

from __future__ import annotations

import contextlib
import socket

import pytest

from oneaccord.net.keepalive import _TCP_RTO_MAX_MS, Liveness

linux = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="these options are Linux's")


@linux
@pytest.mark.parametrize(
    ("liveness", "unanswered"), [(Liveness(), 4), (Liveness(1, 2), 1), (Liveness(3, 10), 3), (Liveness(1, 100), 99)]
)
def test_the_kernel_asks_and_gives_up(liveness: Liveness, unanswered: int) -> None:
    def option(name: str) -> int:
        return sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

    with socket.socket() as sock:
        liveness.watch(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = liveness.heartbeat_s
        assert (option("TCP_KEEPIDLE"), option("TCP_KEEPINTVL"), option("TCP_KEEPCNT")) == (asked, asked, unanswered)
        assert option("TCP_USER_TIMEOUT") == 0  # data may take as long as it takes
        with contextlib.suppress(OSError):  # a kernel before 6.15
            assert sock.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) == max(1000 * asked, 125 * liveness.patience_s)
    with socket.socket() as sock:
        liveness.bound(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option("TCP_USER_TIMEOUT") == 1000 * liveness.patience_s


def test_what_is_no_connection_over_a_network_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Liveness().bound(ours)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
