"""Collectives that wait inside MPI cannot be interrupted: a thread looks after them, and ends the world when one is stuck."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from oneaccord.api import Deadline, Thread, Timer
from oneaccord_mpi.world import MpiWorld

__all__ = ["Watchdog"]

_LOOK_S = 0.1
_GRACE_S = 0.5
"""How long a call that should end may take to do so."""
_ABORT_S = 3.0
_CODE = 70


class Watchdog:
    """Knows the call that waits inside MPI.

    Parameters
    ----------
    world
        Whose calls.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._call: tuple[str, Deadline] | None = None
        self._thread: threading.Thread | None = None

    def enter(self, name: str, deadline: Deadline) -> None:
        """Look after a call that begins now."""
        self._call = (name, deadline)
        if self._thread is None:
            self._thread = Thread(target=self._look, name="oneaccord-mpi-watchdog", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Take note that the call has ended."""
        self._call = None

    def _look(self) -> None:
        overdue: tuple[str, Deadline] | None = None
        since = 0.0
        while True:
            time.sleep(_LOOK_S)
            call = self._call
            if call is None:
                if self._world.ended:
                    return
                overdue = None
            elif self._world.ended or call[1].passed():
                if call is not overdue:
                    overdue, since = call, time.monotonic()
                elif time.monotonic() - since > _GRACE_S:
                    self._end_world(*call)

    def _end_world(self, name: str, deadline: Deadline) -> None:
        reason = self._world.ended or f"it did not finish within {deadline.timeout_s:g} s"
        sys.stderr.write(
            f"oneaccord: rank {self._world.rank} is stuck in {name} of MPI, which cannot be interrupted ({reason}): it ends the whole "
            'world; with native = "polled" in [backends.mpi] it would raise an error instead\n'
        )
        sys.stderr.flush()
        last_resort = Timer(_ABORT_S, os._exit, (_CODE,))
        last_resort.daemon = True
        with contextlib.suppress(RuntimeError):  # no memory for a thread: there is this one
            last_resort.start()
        self._world.mpi.COMM_WORLD.Abort(_CODE)
