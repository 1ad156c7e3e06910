"""The program in which a job runs, if its process is no launcher alone."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from oneaccord.local.failure import Ended, Failure
from oneaccord.local.output import Screen

__all__ = ["Owner", "PythonScreen"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A program that runs a job in one of its threads, and speaks to the ranks itself.

    Attributes
    ----------
    signals
        A non-blocking socket from which the job's signals come, one byte each, in the place of those of the process. The byte 0 asks for the output.
    stdin
        For each rank of this host, the file that it reads; None if they read the standard input of this process, as the job says.
    screens
        What shows standard output and standard error, in the place of the files 1 and 2.
    ended
        Called with each rank that has ended, in the place of the last report.
    concluded
        Called at the end with all ranks, and the signal that ended the job from outside, if one did.
    listener
        The socket at which the ranks meet, if the program has bound it.
    is_alone
        Whether the process has no other purpose, so that all its children are those of the job.
    shown
        Called when all is shown that ranks had written before the output was asked for.
    """

    signals: socket.socket
    stdin: Sequence[socket.socket] | None
    screens: tuple[Screen, Screen]
    ended: Callable[[Failure], None]
    concluded: Callable[[Sequence[Ended], signal.Signals | None], None] | None = None
    listener: socket.socket | None = None
    is_alone: bool = False
    shown: Callable[[], None] | None = None


class PythonScreen(Screen):
    """Writes to ``sys.stdout`` or ``sys.stderr`` as they are at that time: a notebook, or a test, puts others in the place of the files."""

    def write(self, fd: int, data: bytes) -> None:
        """Write to ``sys.stdout`` if ``fd`` is 1, otherwise to ``sys.stderr``; what cannot be written is lost."""
        stream = sys.stdout if fd == 1 else sys.stderr
        # Streams of any kind, or none: no job ends because of its output.
        with suppress(Exception):
            stream.write(data.decode(errors="replace"))
            stream.flush()
