"""The process that cleans up after one that was killed before it could do so itself.

It is started as a script, and its parent keeps the only write end of its standard input. A line ``=PATH``, in hexadecimal digits, names a
folder, ``+PID BEGIN`` announces a process group by its leader and the leader's start, ``-PID`` takes it back. The end of the input means that the
parent is gone, however it ended. A parent that ended in order has taken all groups back and removed the folder by then. What is left
is killed and removed, grandchildren included.

This needs no code in the ranks' processes before their program starts, no thread in them, and no system call that only one
operating system has.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_TRIES = 200
_PAUSE_S = 0.01


def main() -> None:
    """Read announcements until the other process is gone, then clean up."""
    # A signal that is meant for the launcher must not end its guard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = ""
    groups: dict[int, int] = {}
    for line in sys.stdin:
        if line[0] == "=":
            folder = os.fsdecode(bytes.fromhex(line[1:]))
            continue
        group, *rest = map(int, line[1:].split())
        if line[0] == "+":
            groups[group] = rest[0]
        else:
            groups.pop(group, None)
    for group, begin_of_leader in groups.items():
        # A number is given out again when no process of the group is left: then another one has it, which began at another time.
        if begin(group) not in (None, begin_of_leader):
            continue
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _remove(folder)


def begin(process: int) -> int | None:
    """Return the start of a process, in ticks of the system's clock; None if there is none, or the system does not say."""
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:  # noqa: PTH123 - pathlib is one more import
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _remove(folder: str) -> None:
    if not os.path.lexists(folder):
        return
    import shutil

    # A process that was killed just now may still be writing there.
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
