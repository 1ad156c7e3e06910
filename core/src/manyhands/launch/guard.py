"""A small process that ends the ranks of a job when their launcher was killed before it could do so.

The launcher starts this file as a script and keeps the only write end of its standard input. It announces each process group
with a line ``+PID`` and takes it back with ``-PID``. The end of the input means that the launcher is gone, however it ended: by then
a launcher that ended in order has taken all groups back, and whatever is left is killed, grandchildren included.

This needs no code in the ranks' processes before their program starts, no thread in them, and no system call that only one
operating system has.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Read announcements until the launcher is gone, then kill what is left."""
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


if __name__ == "__main__":
    main()
