"""Jobs of ``oneaccord run --on``, as real processes, for tests of the driver and of launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import preloaded
from support.launch_tools import environment

__all__ = ["ADDS", "ELASTIC", "LOOPS", "WAIT_S", "Job", "Runner", "await_gone", "holders", "is_alive"]

WAIT_S = 60.0

ADDS = """
import os, sys
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    total = int(group.all_reduce(np.array([group.rank + 1]))[0])
    print(f"rank {group.rank} of {group.world_size} is {os.environ['LOCAL_RANK']} on {os.environ['GROUP_RANK']}: {total} {sys.argv[1:]}")
"""

ELASTIC = """
import os, signal, sys
from pathlib import Path
import numpy as np
import oneaccord as oa

@oa.elastic(state=lambda: {"step": 0})
def train(group, generation, state):
    while state["step"] < 40:
        group.all_reduce(np.ones(4))
        state["step"] += 1
        state.commit()
        if state["step"] == 20 and generation == 0 and group.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return generation, group.world_size

print(*train())
"""

LOOPS = """
import os, sys
from pathlib import Path
import numpy as np
import oneaccord as oa

with oa.init(timeout_s=60) as group:
    folder = Path(sys.argv[1])
    (folder / f"unfinished-{group.rank}").write_text(f"{os.getpid()} {os.environ['ONEACCORD_SECRET']}")
    (folder / f"unfinished-{group.rank}").rename(folder / f"rank-{group.rank}")
    while group.all_reduce(np.array([float(not (folder / "stop").exists())]), op="min")[0]:
        if group.rank == 1 and (folder / "fail").exists():
            raise ValueError("asked to fail")
    print(f"rank {group.rank} is done")
"""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def await_gone(pids: Sequence[int]) -> None:
    until = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


def holders(text: str) -> set[int]:
    """Return the processes with a text on their command line or in their environment."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                data = (process / name).read_bytes()
            except OSError:
                continue
            if text.encode() in data:
                found.add(int(process.name))
    return found


class Job:
    """A job that runs the program `LOOPS`, or one of its kind."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.pid = process.pid

    def ranks(self, count: int) -> list[int]:
        """Return the processes of the ranks, once all of them run."""
        until = time.monotonic() + WAIT_S
        paths = [self.folder / f"rank-{rank}" for rank in range(count)]
        while not all(path.exists() for path in paths):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        return [int(path.read_text().split()[0]) for path in paths]

    def secret(self) -> str:
        return (self.folder / "rank-0").read_text().split()[1]

    def children(self) -> list[int]:
        """Return the local processes that lead to the hosts, in the order of the hosts."""
        words = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sorted(map(int, words))

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def fail(self) -> None:
        (self.folder / "fail").touch()

    def finish(self) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors."""
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


class Runner:
    """Starts jobs in a folder.

    Parameters
    ----------
    folder
        Where the programs lie.
    words
        What stands behind ``oneaccord run``.
    variables
        More variables for the driver.
    popen
        Starts the driver.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        variables: dict[str, str] | None = None,
        popen: type[subprocess.Popen[Any]] = preloaded.Popen,
    ) -> None:
        self.folder = folder
        self.words = [*words]
        self.variables = variables or {}
        self._popen = popen
        self._jobs: list[subprocess.Popen[str]] = []

    def start(self, program: str, *args: str, words: Sequence[str] = (), name: str = "job", **variables: str) -> Job:
        folder = self.folder / name
        folder.mkdir()
        path = folder / "program.py"
        path.write_text(textwrap.dedent(program))
        given = environment(ONEACCORD_BACKEND="tcp", **self.variables, **variables)
        process = self._popen(
            [sys.executable, "-m", "oneaccord", "run", *self.words, *words, str(path), *(args or [str(folder)])],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._jobs.append(process)
        return Job(process, folder)

    def run(self, program: str, *args: str, words: Sequence[str] = (), name: str = "job") -> tuple[int, str, str]:
        return self.start(program, *args, words=words, name=name).finish()

    def close(self) -> None:
        for process in self._jobs:
            if process.poll() is None:
                os.kill(process.pid, 9)
            process.communicate()
