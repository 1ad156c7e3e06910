"""``oneaccord run --on slurm``: two commands in one allocation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

PROGRAM = """
import os
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    total = group.all_reduce(np.array([group.rank]))[0]
    print(group.rank, group.world_size, total, os.environ["SLURMD_NODENAME"], os.getpid(), flush=True)
    group.barrier()
"""


@pytest.fixture
def cluster(slurm: Any) -> Iterator[Any]:
    (slurm.folder / "program.py").write_text(PROGRAM)
    yield slurm
    slurm.until_empty()


def words(*more: str) -> list[str]:
    return [sys.executable, "-m", "oneaccord", "run", "--on", "slurm", "-n", "4", "--per-host", "2", *more]


def test_two_commands_share_an_allocation(cluster: Any) -> None:
    script = '"$@" > one.txt & "$@" > other.txt; wait $!'
    done = cluster.run("salloc", "-Q", "-N2", "--ntasks-per-node=2", "sh", "-c", script, "sh", *words("program.py"))
    assert done.returncode == 0, done
    for name in ("one.txt", "other.txt"):
        assert sorted(line.split()[3] for line in (cluster.folder / name).read_text().splitlines()) == ["6"] * 4
