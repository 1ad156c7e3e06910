"""Ranks as real processes that a test can kill, stop and outlive, cheaply: each is forked from one that has imported all.

Run as a script, this file is that process. What it forks runs a program at the top level of its own ``__main__``, and ends as any
Python ends: tracebacks, exit codes and atexit included.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from worlds import free_port

__all__ = ["TELLING_JOINS", "Nursery", "Ranks"]

SECRET = "the secret of the tests"
_PATIENCE_S = 30.0
"""How long a test waits for what must come: far more than any promise, so that only a hang ends by it."""

PREAMBLE = """
import faulthandler, json, os, sys, threading, time
import numpy as np
import manyhands as mh
from manyhands.control.bystanders import current_frames

faulthandler.dump_traceback_later(25, exit=True)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_telling = os.open(os.environ["TELL"], os.O_WRONLY)

def tell(what, **facts):
    line = json.dumps({"what": what, "rank": rank, "at": time.monotonic(), **facts})
    os.write(_telling, line.encode() + b"\\n")  # less than a pipe's atomic size

def attempt(call, *args, **kwargs):
    \"\"\"Make a call; tell how it ended.\"\"\"
    started = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        ended = time.monotonic()
        tell("raised", type=type(error).__name__, text=str(error)[:3000], about=getattr(error, "peer", None),
             operation=getattr(error, "operation", None), took=ended - started, ended=ended)
        return error
    tell("returned", took=time.monotonic() - started)
    return result

def until_failed(group):
    \"\"\"Wait until the group knows that its job has failed, without a call on it.\"\"\"
    while not repr(group).endswith("failed>"):
        time.sleep(0.005)

def until_told_to_go():
    \"\"\"Wait for the test's word.\"\"\"
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.005)

def until_blocked(thread):
    \"\"\"Wait until a thread waits for other ranks.\"\"\"
    while True:
        frame = current_frames().get(thread.ident)
        while frame is not None:
            if frame.f_code.co_filename.endswith("waiting.py"):
                return
            frame = frame.f_back
        time.sleep(0.005)
"""

TELLING_JOINS = """
from manyhands.control.membership import Membership
join = Membership.join
def joining(self, message):
    verdict = join(self, message)
    tell("joined", who=message.rank)
    return verdict
Membership.join = joining
"""
"""Put in front of a program, it makes the rank that runs the store tell of each rank that comes."""


class Nursery:
    """Starts processes that have imported NumPy and manyhands already.

    Parameters
    ----------
    directory
        Where they run, and where the named pipes and output files are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("MANYHANDS_", "SLURM_", "PMI", "OMPI_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=clean | {"OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )
        self._count = 0

    def close(self) -> None:
        """End the process that forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def ask(self, **request: Any) -> Any:
        """Ask it for something, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @contextlib.contextmanager
    def ranks(self, program: str, world_size: int = 3, **variables: str | None) -> Iterator[Ranks]:
        """Start a job; whatever is left of it at the end is killed."""
        self._count += 1
        ranks = Ranks(self, program, world_size, self.directory / f"job{self._count}", variables)
        try:
            yield ranks
        finally:
            ranks.close()


class Ranks:
    """The processes of one job.

    Parameters
    ----------
    nursery
        Who starts them.
    program
        What each runs, after `PREAMBLE`.
    world_size
        How many there are.
    name
        The path that the names of its files begin with.
    variables
        Variables of all ranks, beside those of a launch; None takes one away.

    Attributes
    ----------
    port
        Where the ranks meet.
    facts
        What the ranks have told so far.
    """

    def __init__(self, nursery: Nursery, program: str, world_size: int, name: Path, variables: dict[str, str | None]) -> None:
        self._nursery = nursery
        self._program = PREAMBLE + textwrap.dedent(program)
        self._name = name
        self.world_size = world_size
        self.port = free_port()
        self.facts: list[dict[str, Any]] = []
        self._variables: dict[str, str | None] = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "MANYHANDS_SECRET": SECRET,
            "MANYHANDS_BACKEND": "tcp",
            "TELL": f"{name}.told",
            "GO": f"{name}.go",
            **variables,
        }
        os.mkfifo(f"{name}.told")
        # Read and write: the pipe never ends while the test runs, whichever rank has opened it.
        self._told = os.open(f"{name}.told", os.O_RDWR | os.O_NONBLOCK)
        self._partial = b""
        self._pids: dict[int, int] = {}
        self._outputs: dict[int, Path] = {}
        self.codes: dict[int, int] = {}

    def start(self, *which: int, **variables: str | None) -> Ranks:
        """Start some ranks, by default all; ``variables`` are theirs alone."""
        for rank in which or range(self.world_size):
            self.start_as(rank, RANK=str(rank), **variables)
        return self

    def start_as(self, key: int, **variables: str | None) -> None:
        """Start a process that this object calls ``key``, whatever rank its variables make it."""
        environ = {**self._variables, **variables}
        self._outputs[key] = self._name.with_suffix(f".out{key}")
        self._pids[key] = self._nursery.ask(
            program=self._program,
            unset=[name for name, value in environ.items() if value is None],
            environ={name: value for name, value in environ.items() if value is not None},
            output=str(self._outputs[key]),
        )

    def go(self) -> None:
        """Let the ranks go on that wait for the test's word."""
        self._name.with_suffix(".go").touch()

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        return self._pids[rank]

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal; return when, by the clock that the ranks tell times by."""
        now = time.monotonic()
        os.kill(self._pids[rank], number)
        return now

    def await_facts(self, what: str, count: int | None = None) -> list[dict[str, Any]]:
        """Wait until ``count`` ranks, by default all, have told ``what``; return what they told, in the order of ranks."""
        wanted = self.world_size if count is None else count
        limit = time.monotonic() + _PATIENCE_S
        while len(found := [fact for fact in self.facts if fact["what"] == what]) < wanted:
            left = limit - time.monotonic()
            assert left > 0, f"waited for {wanted} times {what!r}, and was told {self.facts}; output: {self.output()}"
            self._read(min(left, 0.5))
        return sorted(found, key=lambda fact: int(fact["rank"]))

    def wait(self, which: Sequence[int] | None = None, timeout_s: float = _PATIENCE_S) -> dict[int, int]:
        """Wait until processes have ended; return their exit codes, negative for a signal."""
        limit = time.monotonic() + timeout_s
        for key in self._pids if which is None else which:
            if key in self.codes:
                continue
            end = os.pidfd_open(self._pids[key])
            try:
                while not select.select([end], [], [], 0.2)[0]:
                    self._read(0)
                    assert time.monotonic() < limit, f"process {key} does not end; told: {self.facts}; output: {self.output()}"
            finally:
                os.close(end)
            self.codes[key] = self._nursery.ask(reap=self._pids[key])
        self._read(0)
        return self.codes

    def output(self, rank: int | None = None) -> str:
        """Return what a rank wrote, or all ranks did."""
        which = self._outputs if rank is None else [rank]
        return "".join(self._outputs[key].read_text() for key in which)

    def raised(self) -> dict[int, dict[str, Any]]:
        """Wait for all processes; return the last failure that each rank told."""
        self.wait()
        return {fact["rank"]: fact for fact in self.facts if fact["what"] == "raised"}

    def close(self) -> None:
        """Kill what still runs."""
        for key, pid in self._pids.items():
            if key not in self.codes:
                os.kill(pid, signal.SIGKILL)
                self.codes[key] = self._nursery.ask(reap=pid)
        os.close(self._told)

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._told], [], [], timeout_s)[0]:
            return
        *lines, self._partial = (self._partial + os.read(self._told, 1 << 16)).split(b"\n")
        self.facts.extend(json.loads(line) for line in lines)


def _serve() -> str:
    """Answer requests until the end of the input; in a forked process, return its program."""
    import msgspec
    import numpy as np

    import manyhands.group.init  # noqa: F401 - imported for the forked processes
    import manyhands_tcp.backend

    del manyhands_tcp, msgspec, np
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                _become(request)
                return str(request["program"])
        print(json.dumps(answer), flush=True)
    return ""


def _become(request: dict[str, Any]) -> None:
    """Make a forked process a rank: its variables, its output, no input."""
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["environ"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    random.seed()


if __name__ == "__main__":
    program = _serve()
    if program:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
