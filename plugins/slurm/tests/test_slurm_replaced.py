"""``oneaccord run --on slurm --max-restarts``: a step that is lost is started again, as long as the allocation has its node."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

PROGRAM = """
import os, sys, time
from pathlib import Path
import oneaccord as oa

@oa.elastic
def train(group, generation, state):
    if not generation:
        Path(f"rank-{os.environ['RANK']}").touch()
    while not (generation and group.world_size == 4):
        group.barrier()
        time.sleep(0.01)
        state["steps"] = state.get("steps", 0) + 1
        state.commit()
    return generation > 0, group.world_size

print(*train())
"""


def test_slurm_lost_step_is_started_again(slurm: Any) -> None:
    (slurm.folder / "elastic.py").write_text(PROGRAM)
    words = ["run", "--on", "slurm", "-n", "4", "--per-host", "2", "--max-restarts", "1", "elastic.py"]
    driver = slurm.start(sys.executable, "-m", "oneaccord", *words)
    limit = time.monotonic() + 90
    while not all((slurm.folder / f"rank-{rank}").exists() for rank in range(4)):
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    steps = [int(pid) for pid in children if b"srun" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(steps), signal.SIGKILL)
    out, err = driver.communicate(timeout=90)
    assert driver.returncode == 0, (out, err)
    assert sorted(out.splitlines()) == [f"[{rank}] True 4" for rank in range(4)]
    assert "its ranks are started again: restart 1 of 1" in err
    slurm.until_empty()
