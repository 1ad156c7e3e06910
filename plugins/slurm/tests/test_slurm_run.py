"""``oneaccord run --on slurm``: one command for ranks on several nodes, with an allocation that it makes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

PROGRAM = """
import os, signal, sys, time
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    total = group.all_reduce(np.array([group.rank]))[0]
    print(group.rank, group.world_size, total, os.environ["SLURMD_NODENAME"], os.getpid(), flush=True)
    if "dies" in sys.argv and group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if "sleeps" in sys.argv:
        time.sleep(600)
    group.barrier()
"""


@pytest.fixture
def cluster(slurm: Any) -> Iterator[Any]:
    (slurm.folder / "program.py").write_text(PROGRAM)
    yield slurm
    slurm.until_empty()


def words(*more: str) -> list[str]:
    return [sys.executable, "-m", "oneaccord", "run", "--on", "slurm", "-n", "4", "--per-host", "2", *more]


def test_ranks_run_on_the_nodes_of_a_new_allocation(cluster: Any) -> None:
    done = cluster.run(*words("--option", "partition=main", "program.py"))
    assert done.returncode == 0, done
    told = sorted(line.split()[1:5] for line in done.stdout.splitlines())
    first, second = cluster.nodes[:2]
    assert told == [[str(rank), "4", "6", first if rank < 2 else second] for rank in range(4)], done


def test_two_commands_share_an_allocation(cluster: Any) -> None:
    script = '"$@" > one.txt & "$@" > other.txt; wait $!'
    done = cluster.run("salloc", "-Q", "-N2", "--ntasks-per-node=2", "sh", "-c", script, "sh", *words("program.py"))
    assert done.returncode == 0, done
    for name in ("one.txt", "other.txt"):
        assert sorted(line.split()[3] for line in (cluster.folder / name).read_text().splitlines()) == ["6"] * 4


def test_a_killed_rank_is_named_with_its_node(cluster: Any) -> None:
    done = cluster.run(*words("program.py", "dies"))
    assert done.returncode == 128 + 9
    assert f"rank 2 on {cluster.nodes[1]} failed first: killed by SIGKILL" in done.stderr


def test_a_killed_command_leaves_no_rank_and_no_job(cluster: Any) -> None:
    command = cluster.start(*words("program.py", "sleeps"))
    ranks = [int(command.stdout.readline().split()[5]) for _ in range(4)]
    command.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 45
    while any(map(is_there, ranks)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    cluster.until_empty()
    command.communicate()


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
