"""Connections: made when first needed, whoever speaks first; and what their failures become. Ranks are threads that talk TCP."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.fault_tools import Nursery
from support.waiting import PATIENCE_S, until
from support.worlds import must
from support.worlds import over_sockets as run

import oneaccord as oa
from oneaccord import Group


def links(group: Group) -> list[tuple[int, int]]:
    """Return the (channel, peer) of each link."""
    return sorted(group._job.backend._links)  # type: ignore[union-attr]


def link(group: Group, channel: int, peer: int) -> socket.socket:
    """Return the first connection of a link, once it is there on this side."""
    made: Any = group._job.backend._links  # type: ignore[union-attr]
    until(lambda: (channel, peer) in made)
    return made[channel, peer][0]  # type: ignore[no-any-return]


def test_only_pairs_that_talk_are_connected() -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> list[list[tuple[int, int]]]:
        seen = [links(group)]
        together.wait(PATIENCE_S)
        if group.rank == 0:
            group.send(np.ones(1), 2)
        elif group.rank == 2:
            group.recv(0)
        together.wait(PATIENCE_S)
        seen.append(links(group))
        together.wait(PATIENCE_S)
        return seen

    before, after = zip(*must(run(program, 3)), strict=True)
    assert list(before) == [[], [], []]
    assert list(after) == [[(1, 2)], [], [(1, 0)]]


def test_higher_ranks_may_speak_first() -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> list[float]:
        if group.rank:
            group.send(np.full(1, float(group.rank)), 0)
        together.wait(PATIENCE_S)  # rank 0 has not called anything yet
        return [] if group.rank else [float(group.recv(peer)[0]) for peer in (1, 2)]

    assert must(run(program, 3))[0] == [1.0, 2.0]


def test_two_ranks_that_speak_at_once_share_one_connection() -> None:
    def program(group: Group) -> tuple[float, int]:
        peer = 1 - group.rank
        value = float(group.sendrecv(np.full(1, float(group.rank)), peer, peer)[0])
        group.sendrecv(np.zeros(1), peer, peer)
        return value, len(links(group))

    assert must(run(program)) == [(1.0, 1), (0.0, 1)]


def test_nothing_is_copied_on_the_way() -> None:
    nbytes = 8 << 20
    together = threading.Barrier(2)
    arrays = [np.full(nbytes, rank + 1, np.uint8) for rank in range(2)]
    halves = [array[: nbytes // 2].copy() for array in arrays]
    peaks: dict[str, int] = {}

    def program(group: Group) -> None:
        x = arrays[group.rank]
        calls = {
            "send and recv": lambda: group.recv(0, out=x) if group.rank else group.send(x, 1),
            "all_reduce": lambda: group.all_reduce(x, out=x),
            "broadcast": lambda: group.broadcast(x, out=x),
            "all_gather": lambda: group.all_gather(halves[group.rank], out=x),
        }
        # Connections, what NumPy imports late, views of each piece, and where pieces are reduced: all that is made once.
        group.sendrecv(np.ones(1), 1 - group.rank, 1 - group.rank)
        group.all_reduce(x.copy())
        for name, call in calls.items():
            together.wait(PATIENCE_S)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            together.wait(PATIENCE_S)
            call()
            together.wait(PATIENCE_S)
            peaks[name] = tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        must(run(program))
    finally:
        tracemalloc.stop()
    assert max(peaks.values()) < nbytes // 8, peaks
    assert [arrays[1][0], arrays[1][-1]] == [1, 2]


def test_messages_that_move_in_small_parts_arrive_whole() -> None:
    sizes = [0, 1, 63, 64, 65, 4097, (1 << 20) + 1]
    every = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]

    def program(group: Group) -> None:
        peer = 1 - group.rank
        for data in every:
            mine, theirs = (data[::-1], data) if group.rank else (data, data[::-1])
            np.testing.assert_array_equal(group.sendrecv(mine, peer, peer), theirs)
            np.testing.assert_array_equal(group.all_reduce(data, "xor"), np.zeros_like(data))
            np.testing.assert_array_equal(group.all_gather(data), np.concatenate([data, data]))

    must(run(program, buffer_bytes=1 << 16))


@pytest.mark.parametrize("garbage", [bytes(64), b"OAC1" + b"\xff" * 400], ids=["zeros", "almost"])
def test_garbage_from_a_proven_peer_ends_the_job(garbage: bytes) -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> None:
        group.all_gather(np.ones(1))
        if group.rank == 0:
            link(group, 0, 1).send(garbage)
        together.wait(PATIENCE_S)
        group.all_gather(np.ones(1))

    results = run(program, 3)
    assert [type(result) for result in results] == [oa.ProtocolError] * 3, results
    assert len({str(result) for result in results}) == 1
    assert "rank 0 sent rank 1 something that is no oneaccord message" in str(results[0])
    assert [result.peer for result in results] == [0] * 3


@pytest.mark.parametrize("breaker", [0, 1])
def test_a_connection_that_breaks_while_both_live_is_a_lost_peer(breaker: int) -> None:
    together = threading.Barrier(3)

    def program(group: Group) -> None:
        group.all_gather(np.ones(1))
        together.wait(PATIENCE_S)
        if group.rank == breaker:
            link(group, 0, 1 - breaker).shutdown(socket.SHUT_RDWR)
        together.wait(PATIENCE_S)
        group.all_gather(np.ones(1))

    results = run(program, 3)
    assert [type(result) for result in results] == [oa.PeerLostError] * 3, results
    assert len({str(result) for result in results}) == 1
    assert results[0].peer in (0, 1)
    assert "the connection of rank" in str(results[0])


def test_a_peer_that_cannot_be_reached_is_lost() -> None:
    together = threading.Barrier(2)

    def program(group: Group) -> None:
        if group.rank == 1:
            group._job._listeners[0].close()
        else:
            address = group._job.backend._addresses[1]  # type: ignore[union-attr]

            def is_closed() -> bool:
                with socket.socket() as probe:
                    return bool(probe.connect_ex(address))

            until(is_closed)  # in the background
        together.wait(PATIENCE_S)
        group.barrier()

    results = run(program)
    assert [type(result) for result in results] == [oa.PeerLostError] * 2, results
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
        return user_timeout_ms(job.control._store._connection._sock), [
            user_timeout_ms(link(group, *key)) for key in links(group)
        ]

    assert must(run(program)) == [(10_000, [0, 0])] * 2


@pytest.mark.parametrize("checksum", ["false", "true"])
def test_a_connection_that_somebody_on_the_path_leads_to_another_rank_is_refused(nursery: Nursery, checksum: str) -> None:
    program = """
        from oneaccord.net import network
        connect = network._connect
        group = oa.init(timeout_s=30)
        if rank == 0:
            one, two = map(tuple, group._job.backend._addresses[1:])
            network._connect = lambda address, *rest: connect({one: two, two: one}.get(tuple(address), address), *rest)
            attempt(group.send, np.ones(3), 1)
        else:
            until_failed(group)  # a rank that receives may connect first, and rank 0 would not
            attempt(group.recv, 0)
    """
    with nursery.ranks(program, ONEACCORD_BACKEND="tcp", ONEACCORD_SECURITY__CHECKSUM=checksum) as ranks:
        failures = ranks.start().raised()
    assert failures.keys() == {0, 1, 2}
    assert (failures[0]["type"], failures[0]["about"]) == ("PeerLostError", 1)
    assert "is not rank 1 (tcp) of this job: connections are redirected" in failures[0]["text"]
