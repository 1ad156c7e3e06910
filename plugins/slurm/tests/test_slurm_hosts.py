"""``oneaccord run --on slurm`` on a real Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.on_hosts import ADDS, LOOPS, Runner, await_gone, holders

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]


@pytest.fixture
def on_slurm(slurm: Any, tmp_path: Path) -> Iterator[Runner]:
    variables = {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
    runner = Runner(tmp_path, ["--on", "slurm", "-n", "4", "--per-host", "2"], variables)
    yield runner
    runner.close()
    slurm.until_empty()


def test_run_on_slurm_makes_an_allocation_and_gives_it_back(on_slurm: Runner, slurm: Any) -> None:
    code, out, err = on_slurm.run(ADDS, "x")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[{rank}] rank {rank} of 4 is {rank % 2} on {rank // 2}: 10 ['x']" for rank in range(4)
    ]
    slurm.until_empty()


def test_run_on_slurm_names_a_killed_rank_with_its_host(on_slurm: Runner) -> None:
    job = on_slurm.start(LOOPS)
    pids = job.ranks(4)
    os.kill(pids[3], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert err.count("failed first") == 1
    assert "rank 3 failed first: killed by SIGKILL on 127.0.0.12" in err
    await_gone(pids)


def test_run_on_slurm_interrupted_ends_all(on_slurm: Runner) -> None:
    job = on_slurm.start(LOOPS)
    pids = job.ranks(4)
    os.kill(job.pid, signal.SIGINT)
    assert job.finish()[0] == 130
    await_gone(pids)


def test_run_on_slurm_killed_driver_leaves_nothing(on_slurm: Runner) -> None:
    job = on_slurm.start(LOOPS)
    pids = job.ranks(4)
    assert holders(job.secret()) <= set(pids)
    os.kill(job.pid, signal.SIGKILL)
    job.finish()
    await_gone(pids)
