"""Orphans: processes of ranks whose own parent has ended, and which Linux then gives to the launcher; and the end of a rank with its parent."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["Orphans", "end_with"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_KILL_S = 1.0
_PAUSE_S = 0.005


class Orphans:
    """The children of this process that it has not started itself: left behind by ranks.

    An orphan's number is its own until `reap` has found its end, because no other code waits for it.

    Parameters
    ----------
    started
        The children that the launcher has started by now. If there are others, such as those of a shell that has become the launcher by ``exec``, an orphan
        may be theirs, and none is taken for a rank's.
    adopts
        Whether orphans may come to this process. Not to one that is a program of its own, and starts other processes meanwhile.

    Attributes
    ----------
    are_of_ranks
        Whether orphans of ranks come to this process, and no others do; only on Linux.
    ours
        The children for which other code waits: the present ones, and those that are added.
    """

    def __init__(self, started: Iterable[int], *, adopts: bool = True) -> None:
        self._before = _is_subreaper() if adopts else None
        self._come = self._before is not None and _control(_PR_SET_CHILD_SUBREAPER, 1)
        self.ours: set[int] = _children() if self._come else set()
        self.are_of_ranks: bool = self._come and self.ours <= {*started}

    def reap(self) -> set[int]:
        """Reap those that have ended, which stay zombies otherwise; return the others if they are of ranks."""
        running = set()
        for orphan in _children() - self.ours if self._come else ():
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(orphan, os.WNOHANG)[0]:
                    running.add(orphan)
        return running if self.are_of_ranks else set()

    def signal(self, orphans: Iterable[int], number: int) -> None:
        """Send a signal to some that `reap` has just returned; one of another user gets none."""
        for orphan in orphans:
            with contextlib.suppress(PermissionError):
                os.kill(orphan, number)

    def kill(self) -> None:
        """End all, and those that become orphans by that; one that does not end within a second stays."""
        until = time.monotonic() + _KILL_S
        while (running := self.reap()) and time.monotonic() < until:
            self.signal(running, signal.SIGKILL)
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Let orphans go to their former reaper again."""
        if self._come:
            _control(_PR_SET_CHILD_SUBREAPER, int(bool(self._before)))


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, on Linux; called by a child that ``parent`` has just forked."""
    if _control(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)  # it has ended already


@functools.cache
def _prctl() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    function, word = ctypes.CDLL(None).prctl, ctypes.c_ulong
    return lambda option, value: int(function(option, word(value), word(0), word(0), word(0)))


def _control(option: int, value: int) -> bool:
    prctl = _prctl()
    return prctl is not None and prctl(option, value) == 0


def _is_subreaper() -> bool | None:
    """Return whether orphans come to this process already; None if the system cannot say."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    value = ctypes.c_int()
    return bool(value.value) if _control(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(value)) else None


def _children() -> set[int]:
    lists = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            lists.append(path.read_bytes())
    if lists:
        return {int(word) for each in lists for word in each.split()}
    found = set()  # a kernel without CONFIG_PROC_CHILDREN
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found
