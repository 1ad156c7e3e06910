"""A message goes as one or two of a library's, and a mismatch is seen before its payload: by tests, and by threads that block."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from support.transport_tools import finish

from oneaccord.api import (
    BlockingCalls,
    Deadline,
    HeaderMismatch,
    LibraryMessage,
    LibraryUse,
    LinkLost,
    PolledTransport,
    ThreadedTransport,
)

HEADER = bytes(range(64))
SHORT = PolledTransport.short_bytes


class _Library:
    """What both kinds of a transport send on: queues from rank to rank."""

    def __init__(self) -> None:
        self.sent: dict[int, queue.SimpleQueue[bytes | Exception]] = {rank: queue.SimpleQueue() for rank in range(2)}
        self.posted: list[int] = []

    def send(self, peer: int, memory: bytes | memoryview) -> None:
        self.posted.append(len(memory))
        self.sent[peer].put(bytes(memory))

    def receive(self, rank: int, memory: Any, timeout_s: float | None) -> bool:
        try:
            came = self.sent[rank].get(timeout=timeout_s) if timeout_s is None else self.sent[rank].get_nowait()
        except queue.Empty:
            return False
        if isinstance(came, Exception):
            raise came
        memoryview(memory)[: len(came)] = came
        return True


class _Polled(PolledTransport):
    def __init__(self, rank: int, library: _Library) -> None:
        super().__init__(LibraryUse("Pony", rank, 2))
        self.pony, self.rank = library, rank

    def start_send(self, peer: int, memory: bytes | memoryview) -> None:
        self.pony.send(peer, memory)

    def start_receive(self, peer: int, memory: Any) -> Any:
        return memory

    def test(self, request: Any, peer: int) -> bool:
        return self.pony.receive(self.rank, request, 0)

    def end(self, why: str) -> None:
        self.library.end(why)


class _Threaded(ThreadedTransport):
    start_send, start_receive = _Polled.start_send, _Polled.start_receive

    def __init__(self, rank: int, library: _Library) -> None:
        super().__init__(LibraryUse("Pony", rank, 2), BlockingCalls("kit test"))
        self.pony, self.rank = library, rank

    def test(self, request: Any, peer: int) -> bool:
        return self.pony.receive(self.rank, request, None)

    def end(self, why: str) -> None:
        self.library.end(why)
        self.tell()


@pytest.fixture(params=[_Polled, _Threaded])
def pair(request: pytest.FixtureRequest) -> list[Any]:
    """Two ranks that are connected."""
    library = _Library()
    return [request.param(rank, library) for rank in range(2)]


@pytest.mark.parametrize("nbytes", [0, 1, SHORT, SHORT + 1, 100_000])
def test_message_arrives_whole_and_is_held_no_longer(pair: list[Any], nbytes: int):
    payload, memory = bytes(range(256)) * (nbytes // 256 + 1), bytearray(nbytes)
    receiving = pair[1].recv(0, HEADER, memoryview(memory))
    sending = pair[0].send(1, HEADER, memoryview(payload)[:nbytes])
    finish(pair[0], sending)
    finish(pair[1], receiving)
    assert memory == payload[:nbytes]
    assert sending.moved == receiving.moved == 64 + nbytes
    assert pair[0].pony.posted == ([64 + nbytes] if nbytes <= SHORT else [64, nbytes])
    assert pair[0].library.held == pair[1].library.held == {}


@pytest.mark.parametrize("expected", [8, 100_000])
def test_message_with_another_header_is_refused_and_its_payload_not_awaited(pair: list[Any], expected: int):
    memory = bytearray(expected)
    receiving = pair[1].recv(0, HEADER, memoryview(memory))
    pair[0].pony.send(1, bytes(64))  # no payload follows
    with pytest.raises(HeaderMismatch) as caught:
        finish(pair[1], receiving)
    assert (caught.value.peer, caught.value.header) == (0, bytes(64))
    assert memory == bytes(expected)


def test_message_that_the_library_loses_raises_its_error_and_is_held(pair: list[Any]):
    receiving = pair[1].recv(0, HEADER, memoryview(bytearray(8)))
    pair[1].pony.sent[1].put(LinkLost(0, "a leg broke"))
    with pytest.raises(LinkLost, match="a leg broke"):
        finish(pair[1], receiving)
    assert list(pair[1].library.held.values()) == [receiving]


def test_wait_ends_at_the_deadline_and_may_be_called_again(pair: list[Any]):
    memory = bytearray(3)
    receiving = pair[1].recv(0, HEADER, memoryview(memory))
    with pytest.raises(TimeoutError):
        pair[1].wait([receiving], Deadline(0.01))
    pair[0].send(1, HEADER, memoryview(b"abc"))
    finish(pair[1], receiving)
    assert memory == b"abc"


def test_wait_ends_with_the_job_and_nothing_begins_after_it(pair: list[Any]):
    receiving: LibraryMessage = pair[1].recv(0, HEADER, memoryview(bytearray(8)))
    thread = threading.Thread(target=pair[1].end, args=("the job was aborted",))
    thread.start()
    with pytest.raises(LinkLost, match="the job was aborted"):
        pair[1].wait([receiving], Deadline(1000))
    thread.join()
    with pytest.raises(LinkLost, match="the job was aborted"):
        pair[1].send(0, HEADER, memoryview(b""))
    assert list(pair[1].library.held.values()) == [receiving]


class _Asked(_Polled):
    """Its requests, also those of sends, are done when a test says so."""

    def __init__(self) -> None:
        super().__init__(0, _Library())
        self.asked: list[Any] = []
        self.ready: set[int] = set()

    def start_send(self, peer: int, memory: bytes | memoryview) -> int:
        return len(memory)

    def start_receive(self, peer: int, memory: Any) -> Any:
        return peer

    def test(self, request: Any, peer: int) -> bool:
        self.asked.append(request)
        return request in self.ready


def test_long_send_is_done_when_both_of_its_requests_are():
    transport = _Asked()
    sending = transport.send(1, HEADER, memoryview(bytes(100_000)))
    assert sending.requests == [64, 100_000]
    transport.ready = {100_000}
    assert not sending.advance()
    assert (sending.done, sending.requests, list(transport.library.held)) == (False, [64], [id(sending)])
    transport.ready = {64}
    assert sending.advance()
    assert (sending.done, sending.requests, transport.library.held) == (True, [], {})


def test_wait_tests_all_transfers_though_the_first_is_done():
    transport = _Asked()
    sends = [transport.send(1, HEADER, memoryview(bytes(nbytes))) for nbytes in (1, 2)]
    transport.ready, transport.asked[:] = {65}, []
    transport.wait(sends, Deadline(30))
    assert transport.asked == [65, 66]


@pytest.mark.parametrize(
    ("error", "requests", "is_uncertain"), [(LinkLost(1, "it broke"), [], False), (KeyboardInterrupt(), [72], True)]
)
def test_request_is_forgotten_only_if_the_library_has_ended_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, requests: list[int], is_uncertain: bool
):
    transport = _Asked()
    sending = transport.send(1, HEADER, memoryview(bytes(8)))

    def test(request: Any, peer: int) -> bool:
        raise error

    monkeypatch.setattr(transport, "test", test)
    with pytest.raises(type(error)):
        sending.advance()
    assert (sending.requests, sending.is_uncertain, list(transport.library.held)) == (requests, is_uncertain, [id(sending)])
