"""The control connection of ranks that are threads of one process. They share the store as an object."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Runtime
from oneaccord.control.connection import Control, make_join
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import FromRank, FromStore, Verdict, Welcome
from oneaccord.control.recorder import FlightRecorder
from oneaccord.control.verdicts import error_from
from oneaccord.errors import DeadlineError
from oneaccord.runtime.computer import COMPUTER

__all__ = ["LocalControl", "LocalHub"]

_STORE = -1
"""Stands for the store in place of a rank."""


class LocalHub:
    """The store of a job whose ranks are threads of this process; ``recorder(rank)`` makes the flight recorder of a rank."""

    def __init__(
        self, world_size: int, runtime: Runtime = COMPUTER, recorder: Callable[[int], FlightRecorder] | None = None
    ) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self._lock = threading.RLock()
        self._controls: dict[int, LocalControl] = {}
        self._membership = Membership(world_size, os.urandom(32), self._send, self._call_later)
        self.world_size = world_size

    @property
    def verdict(self) -> Verdict | None:
        """The first cause of the job's failure, if it has failed."""
        return self._membership.verdict

    def connect(self, rank: int, backend: str, choices: str) -> LocalControl:
        """Take a rank in."""
        with self._lock:
            control = LocalControl(self, rank, self.world_size)
            self._controls[rank] = control
            verdict = self._membership.join(make_join(rank, self.world_size, backend, choices, self.runtime))
        if verdict is not None:
            raise error_from(verdict, rank)
        return control

    def handle(self, rank: int, message: FromRank) -> None:
        """Take in a message of a rank."""
        with self._lock:
            self._membership.handle(rank, message)

    def lost(self, rank: int, reason: str) -> None:
        """Take note that a rank's thread has ended without a goodbye."""
        with self._lock:
            if rank in self._membership.members:
                self._membership.lost(rank, reason)
            else:
                self._membership.will_not_come(rank, reason)

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has come."""
        return rank in self._controls

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has closed its group."""
        return self._membership.has_left(rank)

    def is_complete(self) -> bool:
        """Return whether all ranks have come."""
        return self._membership.complete

    def late(self, timeout_s: float) -> None:
        """End the job if ranks have not come in time."""
        with self._lock:
            self._membership.late(timeout_s)

    def fail(self, verdict: Verdict) -> None:
        """End the job."""
        with self._lock:
            self._membership.fail(verdict)

    def _send(self, rank: int, message: FromStore) -> None:
        control = self._controls[rank]
        self.runtime.carry(_STORE, rank, lambda: control._deliver(message))

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                function()

        self.runtime.call_later(delay_s, locked)


class LocalControl(Control):
    """A rank's membership in a `LocalHub`."""

    def __init__(self, hub: LocalHub, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, "127.0.0.1", hub.runtime, hub.recorder and hub.recorder(rank))
        self._hub = hub

    def _post(self, message: FromRank) -> None:
        self.runtime.carry(self.rank, _STORE, lambda: self._hub.handle(self.rank, message))

    def welcome(self, deadline: Deadline) -> Welcome:
        """Wait until all ranks have come. The first rank whose deadline passes ends the wait of all, and names those that are missing."""
        try:
            return super().welcome(deadline)
        except DeadlineError:
            self._hub.late(deadline.timeout_s)
            if self.failed:
                raise self.error() from None
            raise

    def close(self) -> None:
        """Leave the hub."""
        self._hub.lost(self.rank, "its thread ended")
        self._on_failure.clear()  # the hub keeps this as long as the world lives
