"""A world whose ranks are started by ``oneaccord run``: processes, or the ranks of the backend's launcher."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneaccord_conformance import patience
from oneaccord_conformance.ranks import Outcome, Program

__all__ = ["ProcessJob"]

_START_S = 60.0
"""How long ranks may take to start and meet."""
_END_S = 15.0
_TAIL = 2000


class ProcessJob:
    """Ranks that run one program after the other in one group until the job ends.

    Their temporary files have a folder of their own, used by no other program; it is removed with the job.

    Parameters
    ----------
    backend, config
        The options of ``oneaccord run``: a mapping becomes variables, a text is the name of a file.
    size
        How many ranks there are.
    timeout_s
        The timeout of their group.
    keep_going
        Whether the others are left alone when a rank fails.
    is_virtual
        Whether the ranks live on a clock of their own.

    Attributes
    ----------
    pids
        The process of each rank.
    words
        The words of ranks so far: (rank, word).

    Raises
    ------
    AssertionError
        The ranks do not come together; with their output.
    """

    def __init__(
        self,
        backend: str,
        config: Mapping[str, Any] | str | None,
        size: int,
        timeout_s: float,
        *,
        keep_going: bool = False,
        is_virtual: bool = False,
    ) -> None:
        self.size: int = size
        self.pids: dict[int, int] = {}
        self.words: list[tuple[int, str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="oa-check-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        temporary = folder / "t"  # short: the names of sockets have little room
        temporary.mkdir()
        self._output = folder / "output"
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._outcomes: dict[int, Outcome] = {}
        self._gone: set[int] = set()
        self._failed: list[Outcome] = []
        self._is_over = False
        options = ["--backend", backend, "-n", str(size)]
        options += ["--keep-going"] if keep_going else []
        options += ["--config", str(Path(config).resolve())] if isinstance(config, str) else []
        command = [sys.executable, "-m", "oneaccord", "run", *options, "-m", "oneaccord_conformance.rank"]
        environ = os.environ | _variables(config if isinstance(config, Mapping) else {})
        environ["TMPDIR"] = str(temporary)
        environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        with socket.socket(socket.AF_UNIX) as listener, self._output.open("wb") as output:
            listener.bind(str(folder / "meet"))
            listener.listen(size)
            self._process = subprocess.Popen(
                [*command, str(folder / "meet"), str(timeout_s), "virtual" if is_virtual else "real"],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._gather(listener)
            except BaseException:
                self._kill()
                raise

    def run(self, program: Program, facts: Mapping[str, Any], patience_s: float) -> list[Outcome | None]:
        """Run a program on every rank; return the result on each, None for a rank that was not done in time, or has died."""
        self.begin(program, facts)
        return self.outcomes(patience_s)

    def begin(self, program: Program, facts: Mapping[str, Any]) -> None:
        """Run a program on every rank, and do not wait for it."""
        self._outcomes = {}
        self._order({"program": f"{program.__module__}:{program.__qualname__}", "facts": dict(facts)})

    def outcomes(self, patience_s: float, lost: tuple[int, ...] = ()) -> list[Outcome | None]:
        """Wait until every rank except ``lost`` ones is done; return the results of the program, None for ranks that are not done."""
        wanted = set(range(self.size)).difference(lost)
        self._read_until(lambda: wanted <= self._outcomes.keys() | self._gone, patience_s)
        if self._outcomes.keys() >= self._connections.keys():
            self._order({"rest": True})
        return [self._outcomes.get(rank) for rank in range(self.size)]

    def told(self, word: str, count: int) -> bool:
        """Wait until so many ranks have sent a word; return whether they have."""
        return self._read_until(lambda: sum(each == word for _, each in self.words) >= count, patience.TIMEOUT_S)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return when, by `time.monotonic`."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def whereabouts(self) -> str:
        """Return the last output of the ranks."""
        tail = self._tail()
        return f"  they wrote: {tail}" if tail else "  they wrote nothing"

    def leave(self) -> None:
        """Let all ranks leave, and do not wait for them."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)

    def end(self, patience_s: float) -> str:
        """Let all ranks leave; return the fault if they do not end well, otherwise an empty text. Remaining ranks are killed."""
        fault = ""
        if self._is_over:
            return fault
        self.leave()
        try:
            code = self._process.wait(patience_s)
            if code:
                fault = f"oneaccord run ended with exit code {code}:\n{self._tail()}"
        except subprocess.TimeoutExpired:
            fault = f"not all ranks left the world within {patience_s:g} s:\n{self._tail()}"
        self._kill()
        return fault

    def _order(self, order: Mapping[str, Any]) -> None:
        line = f"{json.dumps(order)}\n".encode()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # of a rank that is gone, which is noticed when it is read
                connection.socket.sendall(line)

    def _gather(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        limit = time.monotonic() + _START_S
        waiting: list[_Connection] = []
        while len(waiting) < self.size or not all(each.is_here for each in waiting):
            with contextlib.suppress(TimeoutError):
                if len(waiting) < self.size:
                    connection = _Connection(listener.accept()[0])
                    waiting.append(connection)
                    self._selector.register(connection.socket, selectors.EVENT_READ, connection)
                    continue
            self._read(0.1)
            if self._failed:
                raise AssertionError(f"a rank did not come into the world: it {self._failed[0]}")
            if self._process.poll() is not None:
                raise AssertionError(f"the ranks did not start: exit code {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > limit:
                raise AssertionError(f"the ranks did not meet within {_START_S:g} s:\n{self._tail()}")

    def _read_until(self, done: Any, patience_s: float) -> bool:
        limit = time.monotonic() + patience_s
        while not done():
            left = limit - time.monotonic()
            if left <= 0:
                return False
            self._read(min(left, 0.2))
        return True

    def _read(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(min(timeout_s, 0.05))
            return
        for key, _ in self._selector.select(timeout_s):
            connection: _Connection = key.data
            lines = connection.read()
            if lines is None:
                self._selector.unregister(connection.socket)
                self._gone.update({connection.rank} - {-1})
                continue
            for line in lines:
                self._take(connection, line)

    def _take(self, connection: _Connection, line: dict[str, Any]) -> None:
        what, fact = line["what"], line["fact"]
        if what == "here":
            connection.rank, self.pids[fact[0]] = fact
            self._connections[connection.rank] = connection
        elif what == "word":
            self.words.append((connection.rank, fact))
        else:
            outcome = Outcome(**{**fact, "errors": tuple(fact["errors"])})
            if connection.is_here:
                self._outcomes.setdefault(connection.rank, outcome)
            else:
                self._failed.append(outcome)

    def _tail(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")[-_TAIL:]

    def _kill(self) -> None:
        self._is_over = True
        for pid in self.pids.values():  # also those that a signal has stopped
            with contextlib.suppress(OSError):
                if self._process.poll() is None:
                    os.kill(pid, signal.SIGCONT)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._selector.close()
        self._folder.cleanup()


class _Connection:
    """The socket of a rank, and the received part of a line."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(True)
        self.socket = own
        self.rank = -1
        self._partial = b""

    @property
    def is_here(self) -> bool:
        return self.rank >= 0

    def read(self) -> list[dict[str, Any]] | None:
        """Return the lines that came; None if the other side is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _variables(config: Mapping[str, Any], prefix: str = "ONEACCORD") -> dict[str, str]:
    """Return a config as variables: ``ONEACCORD_BACKENDS__TCP__SPIN_US``."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{'_' if prefix == 'ONEACCORD' else '__'}{key.upper()}"
        if isinstance(value, Mapping):
            found |= _variables(value, name)
        else:
            found[name] = value if isinstance(value, str) else json.dumps(value)
    return found
