"""The cleanup after a process, even if it is killed: a temporary folder, and the process groups that it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oneaccord.local.guard.process import begin
from oneaccord.net.forking import forget_after_fork

__all__ = ["Guard", "guarded"]

_END_S = 3.0
_MOST_STARTS = 10
"""The most starts of a guard: one that ends at once each time must not be started forever."""


class Guard:
    """Knows the files and processes that would be left behind.

    Attributes
    ----------
    folder
        A temporary folder that only this user can read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self._groups: dict[int, int] = {}
        self._starts_left = _MOST_STARTS
        self._has_given_up = False
        self._start()
        forget_after_fork(self)

    def after_fork(self) -> None:
        """Let go of the pipe in a forked child, which would keep a dead parent looking alive to the process that cleans up."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        """The process that cleans up."""
        return self._process.pid

    def add(self, group: int) -> None:
        """Have a process group killed, should this process end before `remove`.

        Parameters
        ----------
        group
            Its number, that of a child of this process which leads it.
        """
        self._groups[group] = begin(group) or 0
        self._announce(f"+{group} {self._groups[group]}\n")

    def remove(self, group: int) -> None:
        """Leave a process group alone from now on; called before its leader is reaped, after which another process could get the number.

        Parameters
        ----------
        group
            Its number.
        """
        self._groups.pop(group, None)
        self._announce(f"-{group}\n")

    def renew(self) -> str:
        """Start another process that cleans up, if the one before has ended; return once why that is impossible, otherwise nothing."""
        if self._process.poll() is None or self._has_given_up:
            return ""
        problem = "" if self._starts_left else f"{_MOST_STARTS} of them have ended"
        if not problem:
            try:
                self._start()
            except OSError as error:
                problem = str(error)
        self._has_given_up = bool(problem)
        return problem

    def _start(self) -> None:
        self._starts_left -= 1
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # By the pipe, because all users can read the words of a command, and another user could make the folder before.
        self._announce(f"={os.fsencode(self.folder).hex()}\n")
        for group, when in self._groups.items():
            self._announce(f"+{group} {when}\n")

    def _announce(self, line: str) -> None:
        # A guard that was killed protects nothing, and that is no reason to end the job.
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    """Make a temporary folder that is removed when the context ends, or when this process ends in any way."""
    # The guard knows the folder before it exists, so that there is no moment in which it would not be removed.
    guard = Guard(Path(tempfile.gettempdir(), f"oneaccord-{secrets.token_hex(8)}"))
    try:
        guard.folder.mkdir(0o700)
        yield guard
    finally:
        shutil.rmtree(guard.folder, ignore_errors=True)
        guard._end()
