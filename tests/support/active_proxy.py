"""Somebody on the path between ranks who changes what they say."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from oneaccord.net.handshake import CLIENT_BYTES, GREETING_BYTES, KNOCK_BYTES, REPLY_BYTES

__all__ = ["MEANS", "VIA_PROXY", "ActiveProxy", "Tampering", "active_proxy", "chance"]

MEANS = ("flip", "drop", "repeat", "swap", "insert", "truncate")

VIA_PROXY = """
from oneaccord.net import network
connect = network._connect
def via_proxy(address, *rest):
    sock = connect(("127.0.0.1", int(os.environ["PROXY"])), *rest)
    sock.send(address[1].to_bytes(2, "little"))
    return sock
network._connect = via_proxy
"""
"""Put in front of a program, it makes each connection of its ranks one through the proxy."""


@dataclass
class Tampering:
    """What is done to one connection.

    Attributes
    ----------
    kind
        What its hello begins with.
    direction
        ``"up"`` is what the one who dialled says.
    place
        At which byte after the handshake.
    means
        One of `MEANS`.
    which
        How many connections of the kind are left alone before.
    count
        How many bytes are concerned.
    """

    kind: bytes
    direction: str
    place: int
    means: str
    which: int = 0
    count: int = 1

    def __call__(self, data: bytes) -> bytes | None:
        """Return what goes on instead of ``data``, which begins at the place; None where the connection ends."""
        first, second, rest = data[: self.count], data[self.count : 2 * self.count], data[2 * self.count :]
        match self.means:
            case "flip":
                return bytes([data[0] ^ (1 << self.count % 8)]) + data[1:]
            case "drop":
                return second + rest
            case "repeat":
                return first + data
            case "swap":
                return second + first + rest
            case "insert":
                return bytes(self.count) + data
            case _:
                return None


class ActiveProxy:
    """Passes connections on, one of them changed.

    Attributes
    ----------
    port
        Where it listens.
    done
        Whether it has changed something.
    """

    def __init__(self, tampering: Tampering) -> None:
        self._tampering = tampering
        self._left = tampering.which
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.done: bool = False
        self._passed: list[bytes] = []
        self._run(self._accept)

    def passed(self) -> bytes:
        """Return all that passed after the handshakes, one piece behind the other."""
        return b"".join(self._passed)

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                self._run(self._serve, sock)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            port = int.from_bytes(client.recv(2, socket.MSG_WAITALL), "little")
            try:
                server = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:  # as the ranks would be told
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                return
            self._socks.append(server)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.sendall(client.recv(KNOCK_BYTES, socket.MSG_WAITALL))
            client.sendall(server.recv(GREETING_BYTES, socket.MSG_WAITALL))
            proof = client.recv(CLIENT_BYTES, socket.MSG_WAITALL)
            server.sendall(proof)
            is_meant = self._is_meant(proof[GREETING_BYTES:])
            self._run(self._pump, client, server, is_meant and self._tampering.direction == "up", 0)
            self._pump(server, client, is_meant and self._tampering.direction == "down", REPLY_BYTES)

    def _is_meant(self, hello: bytes) -> bool:
        with self._lock:
            if not hello.startswith(self._tampering.kind):
                return False
            self._left -= 1
            return self._left == -1

    def _pump(self, source: socket.socket, target: socket.socket, is_meant: bool, skip: int) -> None:
        left = self._tampering.place + skip
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passed.append(data)
                if is_meant and left < len(data):
                    changed = self._tampering(data[left:])
                    self.done, is_meant = True, False
                    target.sendall(data[:left])
                    if changed is None:
                        break
                    target.sendall(changed)
                else:
                    left -= len(data)
                    target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
        for sock in (self._listener, *self._socks):
            sock.close()


@contextlib.contextmanager
def active_proxy(tampering: Tampering) -> Iterator[ActiveProxy]:
    """Run a proxy."""
    proxy = ActiveProxy(tampering)
    try:
        yield proxy
    finally:
        proxy.close()


def chance(seed: int) -> Tampering:
    """Return a tampering of a seed."""
    draw = random.Random(seed)
    kind = draw.choice([b"control", b"tcp\0\0", b"tcp\0\0", b"reserve"])
    place = draw.choice([draw.randrange(200), draw.randrange(2000), draw.randrange(400_000)])
    if not kind.startswith(b"tcp"):
        place %= 1500
    direction, means = draw.choice(["up", "down"]), draw.choice(MEANS)
    return Tampering(kind, direction, place, means, draw.randrange(2), draw.choice([1, 7, 16, 64, 80]))
