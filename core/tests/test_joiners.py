"""The server for newcomers: whose connection it keeps, and what it tells of one that ends."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from oneaccord.contract.seal import Seal
from oneaccord.control.joiners import NEWCOMER_HELLO, JoinAddress, Joiners
from oneaccord.control.protocol import RUNS_ALREADY, Join, Verdict, decode_from_store, encode
from oneaccord.net.credentials import Credentials
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.proven import ProvenSocket

JOIN = encode(Join(-1, 4, "tcp", "", "1", "little", "host", 7))


class Place:
    """Joiners that give each newcomer the number 4, and the other end of a newcomer's connection."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop("test", lambda error: pytest.fail(str(error)))
        self._listening = socket.create_server(("127.0.0.1", 0))
        address = JoinAddress(self._listening.fileno(), folder, Credentials(b"key"))
        self.joiners = Joiners(self.loop, address, Liveness())
        self.lost: list[tuple[int, str]] = []
        self.has_lost = threading.Event()
        self.end, self._its = socket.socketpair()
        self.end.settimeout(PATIENCE_S)
        self._seal = Seal(bytes(32))

    def lose(self, number: int, reason: str) -> None:
        self.lost.append((number, reason))
        self.has_lost.set()

    def come(self, hello: bytes) -> None:
        its = ProvenSocket.over(self._its, (Seal(b"out".ljust(32)), Seal(bytes(32))))
        self.run(lambda: self.joiners._accept(its, hello))

    def open(self) -> None:
        self.run(lambda: self.joiners.open(lambda _: 4, lambda *_: None, self.lose))

    def say(self, frame: bytes) -> None:
        length = struct.pack("<I", len(frame))
        self.end.sendall(length + self._seal.of(length) + frame + self._seal.of(frame))

    def run(self, function: Callable[[], object]) -> None:
        """Run a function in the loop, and wait for its end."""
        done = threading.Event()
        self.loop.call(lambda: (function(), done.set()))
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        self.run(self.joiners.close)
        self.loop.stop()
        self.end.close()
        self._listening.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_newcomer_with_an_unreadable_frame_is_closed_and_lost(place: Place) -> None:
    place.open()
    place.come(NEWCOMER_HELLO)
    place.say(JOIN)
    place.say(b"\xff\xff")
    assert place.end.recv(1) == b""
    assert place.has_lost.wait(PATIENCE_S)
    assert place.lost == [(4, "it sent a frame that cannot be read")]


def test_rank_that_comes_as_if_the_job_began_learns_that_it_runs(place: Place) -> None:
    place.open()
    place.come(b"control")
    place.say(JOIN)
    (length,) = struct.unpack("<I", place.end.recv(4 + Seal.BYTES, socket.MSG_WAITALL)[:4])
    message = decode_from_store(place.end.recv(length + Seal.BYTES, socket.MSG_WAITALL)[:length])
    assert isinstance(message, Verdict)
    assert message.kind == RUNS_ALREADY
    assert place.lost == []


def test_newcomer_that_is_watched_for_knocks_and_is_sent_away(place: Place) -> None:
    knocks: list[None] = []
    place.run(lambda: place.joiners.watch(lambda: knocks.append(None)))
    place.come(NEWCOMER_HELLO)
    assert place.end.recv(1) == b""
    assert knocks == [None]
