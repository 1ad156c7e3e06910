"""Ranks that are forked from a process that has imported all: the launcher's side of `oneaccord.local.server`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any, Final

from oneaccord.common.folders import here
from oneaccord.local.groups import signal_group
from oneaccord.net.forking import close_after_fork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ForkServer", "ForkedRank", "fork_server", "why_no_fork"]

_PATIENCE_S = 30.0
"""How long the server's imports may take before the ranks are started without it."""

_OWN: Final = ("ONEACCORD_", "MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""The prefixes of the variables that may differ from the server's: nothing reads them while Python or a library begins."""

_TOLD_BY_PYTHON: Final = (
    # Their effects are needed once for each Python that begins.
    "COVERAGE_PROCESS_CONFIG",
    "COVERAGE_PROCESS_START",
    "PYTHONINSPECT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONVERBOSE",
)


class ForkedRank:
    """A rank that the server has forked, with the attributes and methods of `oneaccord.local.groups.Spawned`."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes], server: ForkServer) -> None:
        self.pid: int = pid
        self.returncode: int | Any = None
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.told: int | None = None
        """How the server says that it has ended."""
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, None while it runs according to the server."""
        self.returncode = self.told
        return self.told

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while self.told is None:
            self._server.read(waits=True)
        self.returncode = self.told
        return self.told

    def release(self) -> None:
        """Let others have its number, after its end."""
        self._server.reap(self.pid)


class ForkServer:
    """The process that forks ranks.

    Parameters
    ----------
    environ
        The variables that all ranks share.
    folder
        The first folder in which the program finds its modules.
    """

    def __init__(self, environ: Mapping[str, str], folder: str) -> None:
        self._environ = dict(environ)
        self._ranks: dict[int, ForkedRank] = {}
        self._unread = b""
        self._link, its = socket.socketpair()
        close_after_fork(self._link)  # the server, and its ranks with it, end when no process holds it
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-u", f"{__file__.rpartition(os.sep)[0]}{os.sep}server.py", str(its.fileno()), folder],
                env=self._environ,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no signal to the launcher's group is for it
            )
        self.open: bool = True
        """Whether it answers."""

    def fileno(self) -> int:
        """Return a file that becomes readable when a rank has ended or stopped."""
        return self._link.fileno()

    def prepare(self, modules: Iterable[str]) -> str:
        """Let it import what else the ranks will need; return why they cannot be forked from it, empty if they can."""
        self._link.settimeout(_PATIENCE_S)
        try:
            self._send({"modules": list(modules)})
            return " ".join(self._answer("ready", "no")[1:])
        except TimeoutError:
            return f"the server process from which ranks are forked did not finish its imports within {_PATIENCE_S:g} s"
        except (OSError, EOFError):
            return "the server process from which ranks are forked has ended"
        finally:
            self._link.settimeout(None)

    def fork(self, words: Sequence[str], environ: Mapping[str, str], stdin: int, listener: Sequence[int]) -> ForkedRank | None:
        """Start a rank; None if it needs a Python of its own.

        Parameters
        ----------
        words
            The words after ``python -u``.
        environ
            All its variables.
        stdin
            The file that it reads.
        listener
            The socket at which the ranks meet, for rank 0.
        """
        changed = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        unset = [name for name in self._environ if name not in environ]
        if not all(name.startswith(_OWN) for name in (*changed, *unset)):
            return None
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        rank = None
        try:
            self._send({"words": list(words), "environ": changed, "unset": unset}, [stdin, its_out, its_err, *listener])
            answer = self._answer("started", "failed")
            if answer[0] == "started":
                rank = ForkedRank(int(answer[1]), os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0), self)
                self._ranks[rank.pid] = rank
                self._note_all()  # its end may be known already, and then nothing more comes to be read
        except (OSError, EOFError):
            self._lose()
        finally:
            os.close(its_out)
            os.close(its_err)
            if rank is None:
                os.close(out)
                os.close(err)
        return rank

    def read(self, *, waits: bool = False) -> None:
        """Take in all its messages; call it when `fileno` is readable. Ranks whose end it can report no more are killed.

        The message that made it readable may have been taken in meanwhile. It then waits for nothing, unless it ``waits``.
        """
        with contextlib.suppress(EOFError):
            while waits or b"\n" in self._unread or self._speaks():
                self._note(self._line())
                waits = False

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def reap(self, rank: int) -> None:
        """Have a rank reaped that has ended, and is a zombie until then."""
        try:
            if self.open:
                self._send({"reap": rank})
                return
        except OSError:
            self._lose()
        # As an orphan it has come to this process. If it has not ended yet, it is one orphan of several from now on.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(rank, os.WNOHANG)

    def _speaks(self) -> bool:
        """Return whether it has said something, or has ended."""
        poll = select.poll()
        if self.open:
            poll.register(self._link, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End it; may be called again. The caller must first end the ranks that it has forked and that still run."""
        self.open = False
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _send(self, request: Mapping[str, object], files: Sequence[int] = ()) -> None:
        import json  # not before the server has been started, as all that can wait

        data = json.dumps(request).encode()
        socket.send_fds(self._link, [len(data).to_bytes(8, "big")], list(files))
        self._link.sendall(data)

    def _answer(self, *words: str) -> list[str]:
        """Return the next line that begins with one of some words; take in those before it."""
        while True:
            line = self._line()
            if line[0] in words:
                return line
            self._note(line)

    def _note(self, line: list[str]) -> None:
        if line[0] == "ended":
            self._ranks.pop(int(line[1])).told = int(line[2])

    def _note_all(self) -> None:
        """Take note of all lines that have been received."""
        while b"\n" in self._unread:
            self._note(self._line())

    def _line(self) -> list[str]:
        while b"\n" not in self._unread:
            data = self._link.recv(4096) if self.open else b""
            if not data:
                self._lose()
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().split()

    def _lose(self) -> None:
        """Take note that the server is gone, and with it the reports of how its ranks end."""
        self.open = False
        for rank in self._ranks.values():
            signal_group(rank.pid, signal.SIGKILL)  # it is this process's child now, and was not reaped
            rank.told = -signal.SIGKILL
        self._ranks.clear()


def fork_server(target: str, is_module: bool, environ: Mapping[str, str]) -> ForkServer | None:
    """Start a server for a program; None if each rank needs a Python of its own, as `why_no_fork` says.

    It begins to import at once; errors in the program need not be known before.

    Parameters
    ----------
    target, is_module
        A script's path or a module's name.
    environ
        The variables that all ranks share.
    """
    if why_no_fork(target, is_module, environ):
        return None
    return ForkServer(environ, str(here()) if is_module else os.path.dirname(os.path.realpath(target)))


def why_no_fork(target: str, is_module: bool, environ: Mapping[str, str]) -> str:
    """Return why ranks cannot be forked, as far as it is known before any import; empty if there is no reason."""
    is_free_threaded = not getattr(sys, "_is_gil_enabled", lambda: True)()
    if not sys.platform.startswith("linux") or sys.implementation.name != "cpython" or is_free_threaded or not sys.executable:
        return "ranks are forked only from CPython with its GIL, on Linux"
    for name in _TOLD_BY_PYTHON:
        if environ.get(name):
            return f"{name} is set, which each Python must read at its start"
    if not is_module and not (target.endswith(".py") and os.path.isfile(target)):
        return f"{target!r} is not a .py file"
    return ""
