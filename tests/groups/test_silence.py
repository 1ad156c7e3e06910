"""A host that vanishes is noticed within the patience, also where somebody writes to it meanwhile."""

from __future__ import annotations

import socket
import time

import pytest
from support.user_space_network import Network, can_make_networks

from oneaccord.net.keepalive import Liveness


@pytest.mark.long  # since it measures how long a kernel waits
@pytest.mark.skipif(not can_make_networks(), reason="making hosts needs root, iproute2 and /dev/net/tun")
def test_what_is_sent_into_a_silence_does_not_begin_the_patience_anew() -> None:
    liveness = Liveness(1, 3)
    with Network(2) as network:
        with network.entered(1):
            listener = socket.create_server((network.address(1), 0))
        with network.entered(0):
            sock = socket.create_connection(listener.getsockname())
        with listener, sock, network.cut([0], [1]):
            liveness.bound(sock)
            assert not liveness.count_silence(sock)
            cut_at = time.monotonic()
            time.sleep(2.3)
            assert liveness.count_silence(sock)
            sock.send(b"there?")
            with pytest.raises(TimeoutError):
                sock.recv(1)
            assert (
                time.monotonic() - cut_at < 5.2
            )  # the whole patience after what was sent would end after 5.3 s at the earliest
