"""Jobs of the launcher, as real processes, for tests of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oneaccord.contract.deadline import Deadline
from oneaccord.engines.workers import Call, Gang

__all__ = [
    "DRIVER",
    "WATCHED",
    "Deadlines",
    "Watch",
    "deadlines",
    "environment",
    "forking",
    "launch",
    "no_launcher_stays",
    "passing",
    "ranks_in_both_forms",
    "start",
    "started",
    "state_of",
    "watch",
]

DRIVER = """
import json, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it, and programs inherit that
from oneaccord.local import processes
from oneaccord.local.launching import Launch
given = json.loads(sys.argv[1])
processes._END_S = processes._STOP_S = given.pop("end_s")
processes._PATIENCE_S = given.pop("patience_s", processes._PATIENCE_S)
given["args"] = tuple(given.get("args", ()))
sys.exit(processes.run_job(Launch(**given)))
"""

WATCHED = """
import os, signal, subprocess, sys, time
def report(fifo):
    pipe = os.open(fifo, os.O_WRONLY)
    os.write(pipe, b"%d\\n" % os.getpid())
"""


started: list[subprocess.Popen[str]] = []
forking: list[bool] = [False]


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ONEACCORD_", "SLURM_", "PMI"))}
    return clean | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables


def start(
    directory: Path,
    script: str,
    *,
    end_s: float = 30.0,
    environ: dict[str, str] | None = None,
    process_group: int | None = None,
    **job: Any,
) -> subprocess.Popen[str]:
    """Start a launcher for ``script``; ``job`` is what `Launch` takes."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps({"target": str(path), "end_s": end_s, "fork": forking[-1], **job})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=environment(**(environ or {})),
        process_group=process_group,
        text=True,
        errors="surrogateescape",
        # The bytes as they are: no newline is translated.
        encoding="ascii",
    )
    started.append(process)
    return process


def launch(directory: Path, script: str, *, typed: str = "", **job: Any) -> subprocess.CompletedProcess[str]:
    process = start(directory, script, **job)
    out, err = process.communicate(typed, timeout=50)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def state_of(process: int) -> str:
    """Return the letter of a process' state, such as T for one that is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


class Deadlines:
    """Takes note of the deadline of the call of `oneaccord.launch` or `oneaccord.Ranks` that was begun last, so that a test lets it pass at its moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._deadline: Deadline | None = None
        self._gang: Gang | None = None
        run = Gang.run

        def noting(gang: Gang, call: Call, deadline: Deadline | None) -> list[Any]:
            self._gang, self._deadline = gang, deadline
            return run(gang, call, deadline)

        patch.setattr(Gang, "run", noting)

    def pass_now(self) -> None:
        """Let the time be up."""
        assert self._deadline is not None
        assert self._gang is not None
        self._deadline.at = time.monotonic()
        self._gang._events.put(None)  # it looks again


@contextlib.contextmanager
def passing(deadlines: Deadlines, watch: Watch, processes: int) -> Iterator[None]:
    """Let the deadline of a call pass when that many processes hold the pipe."""

    def wait() -> None:
        watch.wait_for(processes)
        deadlines.pass_now()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        yield
        waiting.result()


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    return Deadlines(monkeypatch)


class Watch:
    """A named pipe that every process of a job opens and holds: its end means that all of them are gone."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "alive"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, processes: int) -> list[int]:
        """Return the ids of that many processes once all of them run."""
        text = b""
        while text.count(b"\n") < processes:
            more = self._read()
            assert more, f"all have ended, and {text!r} is all that they said"
            text += more
        return [int(word) for word in text.split()]

    def assert_all_gone(self) -> None:
        assert self._read() == b""

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> bytes:
        assert select.select([self._fd], [], [], 30)[0], "a process is still there after 30 s"
        return os.read(self._fd, 4096)


@pytest.fixture(params=[pytest.param(False, id="exec"), pytest.param(True, id="fork", marks=pytest.mark.long)])
def ranks_in_both_forms(request: pytest.FixtureRequest) -> None:
    """Start ranks as processes of their own, and forked from one; what begins otherwise then is tested by test_launch_fork.py."""
    forking[-1] = request.param


@pytest.fixture
def no_launcher_stays() -> Iterator[None]:
    """End the launchers of a test that failed; their guards end the rest."""
    yield
    while started:
        with started.pop() as process:
            process.kill()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watched = Watch(tmp_path)
    yield watched
    watched.close()
