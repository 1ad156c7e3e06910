"""Ranks as real processes that a test can kill, stop and outlive, cheaply: each is forked from one that has imported all."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneaccord.runtime.idle import current_frames
from support.preloaded import OF_RANKS, ended, preloaded
from support.worlds import held_port

__all__ = ["LONG_BEFORE_S", "SECRET", "TELLING_JOINS", "LaunchedRanks", "Nursery", "Ranks", "until_blocked"]

SECRET = "the secret of the tests"
LONG_BEFORE_S = 20.0
"""What is told sooner than this was not told because a timeout of 30 s was up, however busy the machine is."""
_PATIENCE_S = 45.0
"""How long a test waits for what must come: far more than any promise, so that only a hang ends by it; longer than `PREAMBLE` lets a rank live."""


def until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread waits for other ranks."""
    while True:
        frame = current_frames().get(thread.ident)
        while frame is not None:
            if frame.f_code.co_filename.endswith("engine/waiting.py"):
                return
            frame = frame.f_back
        time.sleep(0.005)


PREAMBLE = (
    "import threading\n"
    + inspect.getsource(until_blocked)
    + """
import faulthandler, json, os, sys, threading, time
import numpy as np
import oneaccord as oa
from oneaccord.runtime.idle import current_frames

faulthandler.dump_traceback_later(40, exit=True)
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

"""
)

TELLING_JOINS = """
from oneaccord.control.membership import Membership
join = Membership.join
def joining(self, message):
    verdict = join(self, message)
    tell("joined", who=message.rank)
    return verdict
Membership.join = joining
"""
"""Put in front of a program, it makes the rank that runs the store tell of each rank that comes."""


def _clean_environ() -> dict[str, str]:
    """Return the variables of this process, but for those that tell ranks where they are."""
    foreign = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


class Nursery:
    """Starts jobs whose ranks have imported NumPy and oneaccord already.

    Parameters
    ----------
    directory
        Where they run, and where the named pipes and output files are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._parent = preloaded(*OF_RANKS)
        self._count = 0

    def start(self, program: str, environ: Mapping[str, str | None], output: Path) -> int:
        """Start a process with further variables, None for those that it must not have; return its id."""
        variables = {name: value for name, value in {**_clean_environ(), **environ}.items() if value is not None}
        with Path(os.devnull).open() as nothing, output.open("wb") as written:
            files = [nothing.fileno(), written.fileno(), written.fileno()]
            return self._parent.start(["-c", program], files=files, environ=variables, cwd=self.directory)

    def reap(self, pid: int) -> int:
        """Wait for a process; return its exit code, negative for a signal."""
        return self._parent.reap(pid)

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
        self._held = held_port()
        self.port: int = self._held.getsockname()[1]
        self.facts: list[dict[str, Any]] = []
        self._variables: dict[str, str | None] = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "ONEACCORD_SECRET": SECRET,
            "ONEACCORD_BACKEND": "tcp",
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
        self._pids[key] = self._nursery.start(self._program, environ, self._outputs[key])

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

    def file(self, kind: str) -> Path:
        """Return the path of a file of this job alone, which is not there yet."""
        return self._name.with_suffix(f".{kind}")

    def await_facts(self, what: str, count: int | None = None, patience_s: float = _PATIENCE_S) -> list[dict[str, Any]]:
        """Wait until ``count`` ranks, by default all, have told ``what``; return what they told, in the order of ranks."""
        wanted = self.world_size if count is None else count
        limit = time.monotonic() + patience_s
        while len(found := [fact for fact in self.facts if fact["what"] == what]) < wanted:
            left = limit - time.monotonic()
            assert left > 0, f"waited for {wanted} times {what!r}, and was told {self.facts}; output: {self.output()}"
            self.read(min(left, 0.5))
        return sorted(found, key=lambda fact: int(fact["rank"]))

    def wait(self, which: Sequence[int] | None = None, timeout_s: float = _PATIENCE_S) -> dict[int, int]:
        """Wait until processes have ended; return their exit codes, negative for a signal."""
        limit = time.monotonic() + timeout_s
        for key in self._pids if which is None else which:
            if key in self.codes:
                continue
            while not ended(self._pids[key], 0.2):
                self.read(0)
                assert time.monotonic() < limit, f"process {key} does not end; told: {self.facts}; output: {self.output()}"
            self.codes[key] = self._nursery.reap(self._pids[key])
        self.read(0)
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
                self.codes[key] = self._nursery.reap(pid)
        os.close(self._told)
        self._held.close()

    def read(self, timeout_s: float) -> None:
        """Take in what the ranks tell, for at most so many seconds."""
        if not select.select([self._told], [], [], timeout_s)[0]:
            return
        *lines, self._partial = (self._partial + os.read(self._told, 1 << 16)).split(b"\n")
        self.facts.extend(json.loads(line) for line in lines)


class LaunchedRanks(Ranks):
    """The processes of one job that `oneaccord run` starts.

    Attributes
    ----------
    options
        Of `oneaccord run`.
    before
        What stands in front of its command.
    """

    options: Sequence[str] = ()
    before: Sequence[str] = ()
    _before = ""

    def start(self, *_which: int, **_variables: str | None) -> Ranks:
        """Start the job."""
        program = self._name.with_suffix(".py")
        program.write_text(self._before + self._program, encoding="utf-8")
        command = [sys.executable, "-m", "oneaccord", "run", *self.options, "-n", str(self.world_size), str(program)]
        native = {name: value for name, value in os.environ.items() if name == "ONEACCORD_NATIVE"}
        mine = {
            name: value
            for name, value in self._variables.items()
            if value is not None
            and (
                name in {"CASE", "TELL", "GO", "TMPDIR", "HOSTS"}
                or name.startswith(("ONEACCORD_BACKENDS__", "ONEACCORD_RENDEZVOUS"))
            )
        }
        with self._name.with_suffix(".out").open("wb") as output:
            self._job = subprocess.Popen(
                [*self.before, *command],
                env=_clean_environ() | native | mine,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.launcher = self._job.pid
        return self

    def wait(self, which: Sequence[int] | None = None, timeout_s: float = _PATIENCE_S) -> dict[int, int]:
        """Wait until the job has ended."""
        limit = time.monotonic() + timeout_s
        while self._job.poll() is None:
            self.read(0.1)
            assert time.monotonic() < limit, f"the job does not end; told: {self.facts}; output: {self.output()}"
        self.read(0)
        self.codes = dict.fromkeys(range(self.world_size), self._job.returncode)
        return self.codes

    def output(self, rank: int | None = None) -> str:
        """Return what the job wrote."""
        return self._name.with_suffix(".out").read_text(errors="replace") if rank in (None, 0) else ""

    def close(self) -> None:
        """Kill what still runs."""
        if self._job.poll() is None:
            os.killpg(self._job.pid, signal.SIGKILL)
            self._job.wait()
        os.close(self._told)
        self._held.close()
