"""Connections: made when first needed, whoever speaks first; and what their failures become. Ranks are threads that talk TCP."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from worlds import must
from worlds import over_sockets as run

import manyhands as mh
from manyhands import Group
from manyhands.api import HEADER_BYTES
from manyhands_tcp import transfers


def links(group: Group) -> list[tuple[int, int]]:
    """Return the (channel, peer) of each link."""
    return sorted(group._job.backend._links)  # type: ignore[union-attr]


def link(group: Group, channel: int, peer: int) -> socket.socket:
    """Return the first connection of a link, once it is there on this side."""
    limit = time.monotonic() + 10
    while (channel, peer) not in group._job.backend._links:  # type: ignore[union-attr]
        assert time.monotonic() < limit
        time.sleep(0.005)
    return group._job.backend._links[channel, peer][0]  # type: ignore[union-attr,no-any-return]


def test_only_pairs_that_talk_are_connected() -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> list[list[tuple[int, int]]]:
        seen = [links(group)]
        together.wait(10)
        if group.rank == 0:
            group.send(np.ones(1), 2)
        elif group.rank == 2:
            group.recv(0)
        together.wait(10)
        seen.append(links(group))
        together.wait(10)
        return seen

    before, after = zip(*must(run(program, 3)), strict=True)
    assert list(before) == [[], [], []]
    assert list(after) == [[(1, 2)], [], [(1, 0)]]


def test_the_higher_rank_may_speak_first() -> None:
    sent = threading.Event()

    def program(group: Group) -> float | None:
        if group.rank == 1:
            group.send(np.full(1, 7.0), 0)
            sent.set()
            return None
        assert sent.wait(10)  # rank 0 has not called anything yet
        return float(group.recv(1)[0])

    assert must(run(program)) == [7.0, None]


def test_many_higher_ranks_may_speak_first() -> None:
    together = threading.Barrier(5)

    def program(group: Group) -> list[float]:
        if group.rank:
            group.send(np.full(1, float(group.rank)), 0)
        together.wait(10)
        return [float(group.recv(peer)[0]) for peer in range(1, 5)] if not group.rank else []

    assert must(run(program, 5))[0] == [1.0, 2.0, 3.0, 4.0]


def test_two_ranks_that_speak_at_once_share_one_connection() -> None:
    def program(group: Group) -> tuple[float, int]:
        peer = 1 - group.rank
        value = float(group.sendrecv(np.full(1, float(group.rank)), peer, peer)[0])
        group.sendrecv(np.zeros(1), peer, peer)
        return value, len(links(group))

    assert must(run(program)) == [(1.0, 1), (0.0, 1)]


LARGE = 64 << 20
SLACK = 1 << 20
"""What two calls may take for themselves: no part of the arrays."""


def peak_of(operation: str) -> int:
    """Return the most memory, in bytes, that two ranks take for an operation on arrays of `LARGE` bytes."""
    together = threading.Barrier(2)
    arrays = [np.full(LARGE, rank + 1, np.uint8) for rank in range(2)]
    halves = [array[: LARGE // 2].copy() for array in arrays]

    def program(group: Group) -> int:
        x, peer = arrays[group.rank], 1 - group.rank
        # Connections, and what NumPy imports when it is first needed, are not what is measured.
        group.all_reduce(np.ones(1), out=np.ones(1))
        group.sendrecv(np.ones(1), peer, peer, out=np.ones(1))
        if operation == "all_reduce":
            # Nor are the views of each piece and the memory where it is reduced, which the engine makes once.
            group.all_reduce(x, out=x)
        together.wait(10)
        if group.rank == 0:
            tracemalloc.start()
        together.wait(10)
        if operation == "all_reduce":
            group.all_reduce(x, out=x)
        elif operation == "broadcast":
            group.broadcast(x, out=x)
        elif operation == "all_gather":
            group.all_gather(halves[group.rank], out=x)
        elif group.rank == 0:
            group.send(x, 1)
        else:
            group.recv(0, out=x)
        together.wait(10)
        return tracemalloc.get_traced_memory()[1]

    try:
        peak = max(must(run(program)))
    finally:
        tracemalloc.stop()
    expected = {"send and recv": 1, "all_reduce": 6, "all_gather": 1, "broadcast": 1}[operation]
    assert arrays[1][0] == expected
    assert arrays[1][-1] == (2 if operation == "all_gather" else expected)
    return peak


OPERATIONS = ["send and recv", "all_reduce", "all_gather", "broadcast"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_copied_on_the_way(operation: str) -> None:
    assert peak_of(operation) < SLACK


careful_send = transfers.Sending.advance


def copying_send(transfer: transfers.Sending) -> bool:
    """Move a message out as a careless transport would: begin with a copy of all of it."""
    if transfer.moved >= HEADER_BYTES:
        return careful_send(transfer)
    try:
        transfer.moved += transfer._sock.send((bytes(transfer._header) + bytes(transfer._payload))[transfer.moved :])
    except BlockingIOError:
        return False
    transfer.done = transfer.moved == transfer._total
    return True


def copying_receive(transfer: transfers.Receiving) -> bool:
    """Move a message in as a careless transport would: into memory of its own, and from there to the user's."""
    wanted = transfer._total if transfer.moved >= HEADER_BYTES else HEADER_BYTES
    try:
        data = transfer._sock.recv(wanted - transfer.moved)
    except BlockingIOError:
        return False
    start = transfer.moved - HEADER_BYTES
    if start >= 0:
        transfer._payload[start : start + len(data)] = data
    transfer.moved += len(data)
    transfer.done = transfer.moved == transfer._total
    return True


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_copy_on_the_way_would_be_seen(monkeypatch: pytest.MonkeyPatch, operation: str, direction: str) -> None:
    if direction == "out":
        monkeypatch.setattr(transfers.Sending, "advance", copying_send)
    else:
        monkeypatch.setattr(transfers.Receiving, "advance", copying_receive)
    assert peak_of(operation) > SLACK


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4097, (1 << 20) + 1, 3 << 20])
def test_messages_that_move_in_small_parts_arrive_whole(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)

    def program(group: Group) -> list[np.ndarray[Any, Any]]:
        peer = 1 - group.rank
        exchanged = group.sendrecv(data[::-1] if group.rank else data, peer, peer)
        return [exchanged, group.all_reduce(data, "xor"), group.all_gather(data)]

    first, second = must(run(program, buffer_bytes=1 << 16))
    np.testing.assert_array_equal(first[0], data[::-1])
    np.testing.assert_array_equal(second[0], data)
    for _, total, gathered in (first, second):
        np.testing.assert_array_equal(total, np.zeros(size, np.uint8))
        np.testing.assert_array_equal(gathered, np.concatenate([data, data]))


@pytest.mark.parametrize(
    "garbage", [bytes(64), b"GET / HTTP/1.1\r\n" * 8, b"MHD1" + b"\xff" * 400], ids=["zeros", "words", "almost"]
)
def test_garbage_from_a_proven_peer_ends_the_job(garbage: bytes) -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> None:
        group.all_gather(np.ones(1))
        if group.rank == 0:
            link(group, 0, 1).send(garbage)
        together.wait(10)
        group.all_gather(np.ones(1))

    results = run(program, 3)
    assert [type(result) for result in results] == [mh.ProtocolError] * 3, results
    assert len({str(result) for result in results}) == 1
    assert "rank 0 sent rank 1 something that is no manyhands message" in str(results[0])
    assert [result.peer for result in results] == [0] * 3


@pytest.mark.parametrize("breaker", [0, 1])
def test_a_connection_that_breaks_while_both_live_is_a_lost_peer(breaker: int) -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> None:
        group.all_gather(np.ones(1))
        together.wait(10)
        if group.rank == breaker:
            link(group, 0, 1 - breaker).shutdown(socket.SHUT_RDWR)
        together.wait(10)
        group.all_gather(np.ones(1))

    started = time.monotonic()
    results = run(program, 3)
    assert [type(result) for result in results] == [mh.PeerLostError] * 3, results
    assert len({str(result) for result in results}) == 1
    assert results[0].peer in (0, 1)
    assert "the connection of rank" in str(results[0])
    assert time.monotonic() - started < 10


def test_a_peer_that_cannot_be_reached_is_lost() -> None:
    together = threading.Barrier(2)

    def program(group: Group) -> None:
        if group.rank == 1:
            group._job._listeners[0].close()
        else:
            address = group._job.backend._addresses[1]  # type: ignore[union-attr]
            limit = time.monotonic() + 10
            while True:  # the listener closes in the background
                with socket.socket() as probe:
                    if probe.connect_ex(address):
                        break
                assert time.monotonic() < limit
        together.wait(10)
        group.barrier()

    results = run(program)
    assert [type(result) for result in results] == [mh.PeerLostError] * 2, results
    assert "Connection refused" in str(results[0])


def user_timeout_ms(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_silence_is_bounded_on_the_control_connection_alone() -> None:
    """A rank that is late takes no data for as long as it likes; only a host that vanished takes none on the control connection."""

    def program(group: Group) -> tuple[int, list[int]]:
        peer = 1 - group.rank
        group.barrier()
        group.sendrecv(np.ones(1), peer, peer)
        job: Any = group._job
        return user_timeout_ms(job.control._connection._connection._sock), [
            user_timeout_ms(link(group, *key)) for key in links(group)
        ]

    assert must(run(program)) == [(10_000, [0, 0])] * 2


def test_nine_ranks_talk_to_all() -> None:
    def program(group: Group) -> list[float]:
        group.barrier()
        return [float(value) for value in group.all_to_all(np.arange(9.0) + 10 * group.rank)]

    assert must(run(program, 9)) == [[10.0 * peer + rank for peer in range(9)] for rank in range(9)]
