"""`oneaccord run --nnodes --max-restarts`: each host's launcher replaces its own ranks, and a host that has died is taken in again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic.test_elastic_launch import TRAINING, generations
from support.preloaded import BEARING, Started
from support.worlds import free_port

DYING = """
said = set()
def say(words):
    if words not in said:
        said.add(words)
        print(words, flush=True)

def at_step(group, generation, state):
    is_old = "ONEACCORD_NEWCOMER" not in os.environ
    newcomers = group.all_reduce(np.array(float(not is_old)))
    is_full = group.world_size == 4
    if is_old and is_full and rank == "1" and state["step"] == 10 and newcomers == 0:
        os.kill(os.getpid(), 9)
    if is_old and is_full and rank == "2" and state["step"] == 20 and newcomers == 1:
        os.kill(os.getpid(), 9)
    if state["step"] == 39:
        if newcomers == 2 and is_full:
            say("two deaths")
        if group.world_size == 2:
            say("a host has gone")
            open("gone", "w").close()
        if not is_full or group.all_reduce(np.array(float(os.path.exists("gone")))) < 4:
            time.sleep(0.02)
            state["step"] -= 1  # until all that is to happen has happened
"""
DYING_AT_ONCE = """
import socket
socket.gethostname = lambda: "host " + os.environ["GROUP_RANK"]  # the store's successor is to be on the other one

def at_step(group, generation, state):
    if rank in DEAD and state["step"] == 5:
        os.kill(os.getpid(), 9)
"""
LATE = """
if "ONEACCORD_NEWCOMER" in os.environ:
    time.sleep(60)

def at_step(group, generation, state):
    if rank == "3" and state["step"] == 30:
        os.kill(os.getpid(), 9)
"""
Start = Callable[..., Started]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start one of two hosts, whose ranks die as a program says, on loopback."""
    script = tmp_path / "train.py"
    address = f"127.0.0.1:{free_port()}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
    jobs: list[Started] = []

    def start(node_rank: int, dying: str = DYING, *options: str) -> Started:
        script.write_text(TRAINING + dying + "train()", encoding="utf-8")
        words = [
            "-m",
            "oneaccord",
            "run",
            "-n",
            "2",
            "--backend",
            "tcp",
            "--nnodes",
            "2",
            *(options or ("--max-restarts", "1")),
        ]
        words += ["--node-rank", str(node_rank), "--rendezvous", address, str(script)]
        jobs.append(Started(words, cwd=tmp_path, environ=clean | BEARING | {"ONEACCORD_SECRET": "the secret of the test"}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_ranks_of_each_host_are_replaced_and_so_is_a_host(start: Start) -> None:
    first, second = start(0), start(1)
    first.await_words("two deaths")
    os.kill(second.pid, signal.SIGKILL)
    first.await_words("a host has gone")
    again = start(1)
    assert [first.finish(), again.finish()] == [0, 0], (first.said, again.said)
    told = generations(first.said + again.said)
    assert [fact["size"] for fact in told[max(told)]] == [4] * 4
    assert "rank 1 failed (killed by SIGKILL), and another one comes in its place: restart 1 of 1" in first.said


@pytest.mark.parametrize("dead", ["0", pytest.param("01", marks=pytest.mark.long)])
def test_min_ranks_holds_where_the_store_and_the_door_die_too(start: Start, dead: str) -> None:
    jobs = [start(host, f"DEAD = {dead!r}" + DYING_AT_ONCE, "--min-ranks", "4") for host in range(2)]
    codes = [job.finish() for job in jobs]
    assert codes == [137, 1], [job.said for job in jobs]
    assert (
        f"{4 - len(dead)} ranks are left, and the job needs 4 or more to continue (--min-ranks): start it anew" in jobs[1].said
    )
    assert set(generations(jobs[0].said + jobs[1].said)) == {0}


def test_who_has_not_come_in_when_the_job_ends_is_ended_and_does_no_harm(start: Start) -> None:
    jobs = [start(host, LATE) for host in range(2)]
    assert [job.finish() for job in jobs] == [0, 0], [job.said for job in jobs]
    assert "1 rank failed, and all others ended well" in jobs[1].said
