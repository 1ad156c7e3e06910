"""Ranks whose seats the program itself gives: several jobs in one process, and what their seats must be."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.worlds import free_port

import oneaccord as oa

SECRET = "0f" * 32


def seats(world_size: int, job: str = "") -> list[oa.Seat]:
    """Return the seats of a new job, whose rank 0 holds the listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, secret = f"127.0.0.1:{listener.getsockname()[1]}", secrets.token_hex(32)
    return [
        oa.Seat(rank, world_size, address, secret, listener=None if rank else listener, job=job) for rank in range(world_size)
    ]


def joined(seat: oa.Seat, value: float, rounds: int = 1) -> list[float]:
    with oa.init("tcp", seat=seat, timeout_s=60) as group:
        assert (group.rank, group.world_size) == (seat.rank, seat.world_size)
        return [float(group.all_reduce(np.array([value + seat.rank * (turn + 1)]))[0]) for turn in range(rounds)]


def test_seat_two_jobs_in_one_process_each_right(monkeypatch: pytest.MonkeyPatch) -> None:
    # What another launcher, or another job, has left in the process must mislead none of them.
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "ONEACCORD_SECRET": "of another job",
        "ONEACCORD_RENDEZVOUS": "127.0.0.1:1",
        "ONEACCORD_RENDEZVOUS_FD": "999",
        "ONEACCORD_RUN_ID": "another",
        "ONEACCORD_RANK": "7",
        "ONEACCORD_WORLD_SIZE": "9",
        "ONEACCORD_ELASTIC": "/nowhere",
        "ONEACCORD_JOINED": "1 0/2@('127.0.0.1', 1)",
    }.items():
        monkeypatch.setenv(name, value)
    jobs = [seats(3, "one"), seats(2, "two")]
    with ThreadPoolExecutor(5) as pool:
        futures = [
            [pool.submit(joined, seat, 1000.0 * number, rounds=50) for seat in job] for number, job in enumerate(jobs, 1)
        ]
        results = [[future.result(timeout=60) for future in job] for job in futures]
    assert results[0] == [[3000.0 + 3 * turn for turn in range(1, 51)]] * 3
    assert results[1] == [[4000.0 + turn for turn in range(1, 51)]] * 2


def test_seat_without_listener_rank_0_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    given = [oa.Seat(rank, 2, address, SECRET) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(joined, given, [1.0, 1.0], timeout=60)) == [[3.0], [3.0]]


def test_seat_of_another_job_is_refused() -> None:
    rank_0, rank_1 = seats(2, "one")
    stranger = oa.Seat(1, 2, rank_1.address, rank_1.secret, job="two")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(joined, rank_0, 1.0)
        with pytest.raises(oa.RendezvousError, match=r"belongs to the job 'two', but the job 'one' meets at"):
            joined(stranger, 1.0)
        assert joined(rank_1, 1.0) == waiting.result(timeout=60) == [3.0]


def test_seat_of_one_needs_nobody() -> None:
    (seat,) = seats(1)
    assert joined(seat, 2.0) == [2.0]
    assert seat.listener is not None
    assert seat.listener.fileno() == -1


def test_seat_secret_is_not_shown() -> None:
    assert SECRET not in repr(oa.Seat(0, 1, "127.0.0.1:1", SECRET))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"rank": 2}, oa.InvalidRankError, "rank must be an integer from 0 to 1, not 2"),
        ({"rank": True}, oa.InvalidRankError, "not True"),
        ({"local_rank": 2}, oa.InvalidRankError, "local_rank must be an integer from 0 to 1, not 2"),
        ({"world_size": 0}, oa.InvalidWorldSizeError, "not 0"),
        ({"address": "nowhere"}, oa.ConfigError, "host:port"),
        ({"address": 5}, oa.UsageError, "a seat's address must be a text, not 5"),
        ({"job": 5}, oa.UsageError, "a seat's job must be a text, not 5"),
        ({"secret": ""}, oa.UsageError, "secrets.token_hex"),
        ({"listener": "no socket"}, oa.UsageError, "socket.create_server"),
        ({"rank": 1, "listener": "any"}, oa.UsageError, "rank 0 alone"),
    ],
)
def test_seat_that_cannot_be_says_why(given: dict[str, object], error: type[oa.UsageError], words: str) -> None:
    whole = {"rank": 0, "world_size": 2, "address": "127.0.0.1:1", "secret": SECRET} | given
    with pytest.raises(error, match=words):
        oa.Seat(**whole)  # type: ignore[arg-type]


def test_seat_listener_that_is_closed_is_refused() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    with pytest.raises(oa.UsageError, match=r"socket\.create_server"):
        oa.Seat(0, 2, "127.0.0.1:1", SECRET, listener=listener)


def test_init_seat_and_rank_is_refused() -> None:
    seat = oa.Seat(0, 1, "127.0.0.1:1", SECRET)
    with pytest.raises(oa.UsageError, match="leave those out"):
        oa.init(seat=seat, rank=0)
    with pytest.raises(oa.UsageError, match=r"must be a oneaccord\.Seat"):
        oa.init(seat="rank 0")  # type: ignore[arg-type]
