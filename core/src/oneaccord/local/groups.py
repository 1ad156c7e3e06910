"""Processes by their groups, and signals as bytes: the launcher's interface to the system.

The number of a process, and of the group that it leads, belongs to it until it is reaped. So on Linux an ended rank stays a
zombie until its group is dealt with: no signal of the launcher can reach a group that got the number of an ended one. Other systems have
no means for that, and there a rank is reaped as soon as it has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from oneaccord.local.orphans import end_with

__all__ = [
    "Left",
    "Spawned",
    "all_signals",
    "exit_status",
    "is_stopped",
    "left_in_group",
    "name_of",
    "signal_group",
    "signals_as_bytes",
]

_HAS_STATES = os.path.exists("/proc/self/stat")  # noqa: PTH110 - asked once, of the system


class Spawned:
    """A Python of its own that leads a session and a group.

    Attributes
    ----------
    pid
        Its process, and its group, which no other process gets until `release`.
    returncode
        As that of `subprocess.Popen`: None until `poll` or `wait` has found its end.
    stdout, stderr
        Its output.

    Raises
    ------
    OSError
        It cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], stdin: int, handed_over: Sequence[int]) -> None:
        # A function between fork and exec is safe if no other thread can hold a lock.
        is_alone = sys.platform.startswith("linux") and threading.active_count() == 1
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=handed_over,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()) if is_alone else None,  # noqa: PLW1509
        )
        self.pid: int = self._process.pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = self._process.stdout
        self.stderr: IO[bytes] | None = self._process.stderr

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = exit_status(self.pid) if _HAS_STATES else self._process.poll()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        if self.returncode is None:
            self.returncode = exit_status(self.pid, waits=True) if _HAS_STATES else self._process.wait()
        assert self.returncode is not None
        return self.returncode

    def release(self) -> None:
        """Let others have its number, after its end."""
        self._process.wait()


def exit_status(child: int, *, waits: bool = False) -> int | None:
    """Return the exit code of a child, minus the signal's number when a signal ended it, and leave the child to be reaped; None while it runs."""
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | (0 if waits else os.WNOHANG))
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def signal_group(leader: int, number: int) -> bool:
    """Send a signal to a process that was not released, and to all of its group; return whether there was any."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(frozen=True)
class Left:
    """A process that a rank has left running."""

    process: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.process}"


def left_in_group(group: int) -> set[Left]:
    """Return the processes that a leader which has ended, and was not released, has left in its group."""
    if not _HAS_STATES:
        return {Left(group, "process group")} if signal_group(group, 0) else set()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = stat.read_bytes().rpartition(b")")
            words = after.split()
            if int(words[2]) == group and words[0] not in (b"Z", b"X"):
                found.add(Left(int(stat.parent.name), os.fsdecode(before.partition(b"(")[2])))
    return found


def name_of(process: int) -> Left:
    """Return a process with its name."""
    try:
        name = os.fsdecode(Path(f"/proc/{process}/comm").read_bytes()).rstrip()
    except OSError:
        name = "process"
    return Left(process, name)


def is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process, if the system says so."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


@contextlib.contextmanager
def all_signals() -> Iterator[None]:
    """Unblock the signals that the parent of this process has blocked: without SIGCHLD no end of a rank is seen, and the ranks inherit the blocked ones."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_as_bytes(numbers: Iterable[signal.Signals]) -> Iterator[socket.socket]:
    """Turn the signals that concern the launcher, and SIGCHLD, into bytes of a socket, which the selector waits for like for output.

    In a thread that is not the main one, where Python handles no signals, they stay what they are to the program, and no byte comes.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield ours
            return
        # A signal that is ignored, as under nohup, stays ignored.
        handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, _no_action) for number in (*handled, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def _no_action(_number: int, _frame: object) -> None:
    """Stand in for a handler: with one, Python writes the signal's number to the wakeup socket."""
