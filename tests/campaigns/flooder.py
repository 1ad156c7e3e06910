"""A stranger with many connections: keeps them open at every port at which some processes listen. Run as a process of its own.

Usage: python tests/campaigns/flooder.py KIND COUNT PORT [FILE]

KIND
    What each connection says: ``idle`` nothing, ``slow`` the first bytes of a handshake one at a time, ``wrong`` a first message without a proof,
    ``replay`` one that a rank has sent before. The last comes from the standard input, in hexadecimal, one line for each.
COUNT
    How many connections to keep; those that are closed are made again, at most as many each second.
PORT, FILE
    A port at which a job meets, and a file to which the ids of its processes are written, line by line, as they come.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["listening_ports"]

MAGIC: Final = b"ACCORD\x00\x02"
_SCAN_S: Final = 0.02
_LISTENS: Final = "0A"


def listening_ports(pids: list[str]) -> set[int]:
    """Return the ports of IPv4 at which some processes listen."""
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS:
            inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(inodes.get(str(entry.readlink()), 0))
    return found - {0}


class Flood:
    """The connections of one kind."""

    def __init__(self, kind: str, count: int, lines: list[bytes]) -> None:
        self.kind = kind
        self.count = count
        self.lines = lines
        self.selector = selectors.EpollSelector()
        self.open: dict[socket.socket, int] = {}
        self.made = 0

    def connect(self, port: int) -> None:
        """Make one more connection."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        self.made += 1
        self.open[sock] = 0
        self.selector.register(
            sock, selectors.EVENT_READ if self.kind == "idle" else selectors.EVENT_READ | selectors.EVENT_WRITE
        )

    def words(self) -> bytes:
        """Return what a connection says first."""
        return random.choice(self.lines) if self.kind == "replay" and self.lines else MAGIC + os.urandom(160)

    def serve(self, seconds: float) -> None:
        """Let connections say what they say, and forget those that were closed."""
        for key, mask in self.selector.select(seconds):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if mask & selectors.EVENT_WRITE:
                    sock.send(MAGIC[:1] if self.kind == "slow" else self.words())
                    self.selector.modify(sock, selectors.EVENT_READ)
                if mask & selectors.EVENT_READ and not sock.recv(4096):
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                self.selector.unregister(sock)
                sock.close()
                del self.open[sock]

    def drip(self) -> None:
        """Let some of the slow ones say one byte more."""
        for sock in random.sample(list(self.open), min(50, len(self.open))):
            self.open[sock] += 1
            with contextlib.suppress(OSError):
                sock.send(MAGIC[self.open[sock] : self.open[sock] + 1] or b"x")


def main() -> None:
    """Flood, until the process is killed."""
    kind, count, port, *files = sys.argv[1:]
    lines = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    flood = Flood(kind, int(count), lines)
    ports, scanned, budget, before = {int(port)}, 0.0, float(count), time.monotonic()
    while True:
        now = time.monotonic()
        budget, before = min(float(count), budget + (now - before) * flood.count), now
        if files and now - scanned > _SCAN_S:
            with contextlib.suppress(OSError):
                ports = listening_ports(Path(files[0]).read_text().split()) or {int(port)}
            scanned = now
            if kind == "slow":
                flood.drip()
        choices = sorted(ports)
        while budget >= 1 and len(flood.open) < flood.count:
            budget -= 1
            flood.connect(random.choice(choices))
        flood.serve(0.005)


if __name__ == "__main__":
    main()
