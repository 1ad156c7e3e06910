"""The process that cleans up after one that was killed before it could do so itself.

It is started as a script with the path of a folder, and whoever starts it keeps the only write end of its standard input. A line ``+PID``
announces a process group, ``-PID`` takes it back. The end of the input means that the other process is gone, however it ended: by then one
that ended in order has taken all groups back and removed the folder, and whatever is left is killed and removed, grandchildren included.

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
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _remove(sys.argv[1])


def _remove(folder: str) -> None:
    if not os.path.lexists(folder):
        return
    import shutil

    # What was killed just now may still be writing there.
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
