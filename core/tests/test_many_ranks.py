"""What the control plane sends in a job of many ranks: how often, and made how many times."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from oneaccord.control.connection import Control
from oneaccord.control.protocol import Farewell, FromRank, Join, Stalled, Wait, Welcome
from oneaccord.control.server import Seat, Server
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.runtime.computer import COMPUTER


class _Clock(type(COMPUTER)):  # type: ignore[misc] # the computer's own threads, at times of the test
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class _Rank(Control):
    """A rank that keeps what it would send to the store."""

    def __init__(self, world_size: int, clock: _Clock) -> None:
        self.posted: list[FromRank] = []
        super().__init__(0, world_size, "host", clock)

    def _post(self, message: FromRank) -> None:
        self.posted.append(message)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("world_size", [64, 256, 1024])
def test_waiting_ranks_report_at_most_250_times_a_second_together(world_size: int) -> None:
    clock = _Clock()
    rank = _Rank(world_size, clock)
    record = rank.recorder.start(0, 0, "barrier")
    wait = Wait(0, 0, "barrier", b"digest", [1], [], [0, 1])
    seconds = 20
    for _ in range(seconds * 10):
        rank.report_wait(record, wait)
        clock.time += 0.1
    assert all(isinstance(message, Stalled) for message in rank.posted)
    assert 2 <= len(rank.posted) <= 1 + seconds * 250 / world_size


def test_another_call_is_reported_at_once() -> None:
    rank = _Rank(1024, _Clock())
    for sequence in range(3):
        record = rank.recorder.start(0, sequence, "barrier")
        rank.report_wait(record, Wait(0, sequence, "barrier", b"digest", [1], [], [0, 1]))
        rank.recorder.finish(record)
    assert len(rank.posted) == 3


class _Frames:
    """Stands in for a client's connection."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.connection = self
        self.number: int | None = None

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)


class _Server(Server):
    def _join(self, seat: Seat, message: Join) -> None: ...

    def _hear(self, number: int, message: FromRank) -> None: ...

    def _lose(self, number: int, reason: str, vanished: bool) -> None: ...

    def tell(self, clients: list[Any], message: Any) -> None:
        """Send a message to all clients."""
        for number, client in enumerate(clients):
            self._sit(client, number)
            self._send(number, message)


def test_a_message_for_all_clients_is_written_once() -> None:
    ended = threading.Event()
    loop = Loop("test", lambda _: ended.set())
    try:
        server, clients = _Server(loop, Liveness()), [_Frames() for _ in range(4)]
        server.tell(clients, Welcome(b"key", [0] * 4, [None] * 4))
        server.tell(clients, Farewell())
        first = clients[0].frames
        assert [type(frame) for frame in first] == [bytes, bytes]
        assert first[0] != first[1]
        for client in clients:
            assert [frame is same for frame, same in zip(client.frames, first, strict=True)] == [True, True]
    finally:
        loop.stop()
    assert not ended.is_set()
