"""``oneaccord run --on ssh --max-restarts``: a host whose connection is lost gets its ranks again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.on_hosts import Runner, await_gone

pytestmark = [pytest.mark.engines, pytest.mark.timeout(150)]

PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import oneaccord as oa

folder = Path(sys.argv[1])

@oa.elastic
def train(group, generation, state):
    rank = os.environ["RANK"]
    if not generation:
        folder.joinpath(f"unfinished-{rank}").write_text(f"{os.getpid()} -")
        folder.joinpath(f"unfinished-{rank}").rename(folder / f"rank-{rank}")
    while not (generation and group.world_size == 4):
        group.barrier()
        time.sleep(0.01)
        state["steps"] = state.get("steps", 0) + 1
        state.commit()
    return generation > 0, group.world_size

print(*train())
"""


def test_ssh_lost_connection_starts_the_host_again(servers: Any, tmp_path: Path) -> None:
    words = ["--on", "ssh", "--option", f"config_file={servers.config}", "--hosts", "host1:2,host2:2", "-n", "4"]
    runner = Runner(tmp_path, words)
    try:
        job = runner.start(PROGRAM, words=["--max-restarts", "1"])
        pids = job.ranks(4)
        os.kill(job.children()[1], signal.SIGKILL)
        code, out, err = job.finish()
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"[{rank}] True 4" for rank in range(4)]
        assert "host host2 was lost (ssh ended (killed by SIGKILL)), and its ranks are started again: restart 1 of 1" in err
        await_gone(pids)
    finally:
        runner.close()
