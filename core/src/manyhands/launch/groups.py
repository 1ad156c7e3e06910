"""Processes by their groups, and signals as bytes: what the launcher asks of the system."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Left", "is_stopped", "left_in_group", "signal_group", "signals_as_bytes"]


def signal_group(leader: int, number: int) -> bool:
    """Send a signal to a process and all of its group; return whether there was any."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(frozen=True)
class Left:
    """A process that a rank has left running; another one with its number has begun at another time."""

    process: int
    began: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.process}"


def left_in_group(group: int) -> set[Left]:
    """Return the processes that a leader which has ended has left in its group."""
    if not signal_group(group, 0):
        return set()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = stat.read_bytes().rpartition(b")")
            words = after.split()
            if int(words[2]) == group and words[0] not in (b"Z", b"X"):
                found.add(Left(int(stat.parent.name), int(words[19]), os.fsdecode(before.partition(b"(")[2])))
    return found if found or Path("/proc/self/stat").exists() else {Left(group, 0, "process group")}


def is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process, where the system says so."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


@contextlib.contextmanager
def signals_as_bytes(numbers: Iterable[signal.Signals]) -> Iterator[socket.socket]:
    """Turn the signals that concern the launcher, and SIGCHLD, into bytes of a socket, which the selector waits for like for output."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
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
