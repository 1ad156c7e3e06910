"""Tasks: the threads of ranks, as the scheduler knows them."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable
from contextlib import suppress

from manyhands.api import Record

__all__ = ["BLOCKED", "DEAD", "ENDED", "OUTSIDE", "READY", "RUNNING", "Stopped", "Task"]

READY, RUNNING, BLOCKED, OUTSIDE, ENDED, DEAD = "ready", "running", "blocked", "outside", "ended", "dead"


class Stopped(BaseException):
    """The run is over: what a thread still did ends here."""


class Task:
    """A thread of a rank.

    Attributes
    ----------
    rank
        Whose it is.
    number
        0 for the rank's own thread, and from 1 on for those in the background.
    state
        Whether it runs, could, waits, or is over.
    alarms
        How often it has waited.
    deadline
        When it gives up waiting.
    ends_job
        Whether that ends the whole job.
    ident, native_id
        The names that Python and the system have for its thread.
    where
        The line of the program for which it works; empty where its own stack tells.
    is_foreign
        Whether the program started the thread itself.
    is_leaving
        Whether it is about to count as outside, so that it has to ask before it goes on.
    comes_back
        Whether, while it is outside, it will go on without anybody's doing: it sleeps.
    heard
        How much had happened when it last asked whether something has ended.
    calls
        How often it has been about to make a call, while the program had threads of its own.
    doing
        The call that it is in, for whoever looks on; of no concern here.
    awaits
        The messages that it waits for, likewise: each a peer, and whether the message goes there.
    over
        Set when the thread has ended.
    """

    __slots__ = (
        "_baton",
        "_context",
        "action",
        "alarms",
        "awaits",
        "calls",
        "comes_back",
        "deadline",
        "doing",
        "ends_job",
        "error",
        "heard",
        "ident",
        "is_foreign",
        "is_leaving",
        "native_id",
        "number",
        "over",
        "rank",
        "started",
        "state",
        "where",
        "woken",
    )

    def __init__(self, rank: int, number: int, action: Callable[[], None]) -> None:
        self.rank: int = rank
        self.number: int = number
        self.action: Callable[[], None] = action
        self.state: str = READY
        self.deadline: float = math.inf
        self.alarms: int = 0
        self.ends_job: bool = True
        self.woken: bool = False
        self.where: str = ""
        self.calls: int = 0
        self.doing: Record | None = None
        self.awaits: tuple[tuple[int, bool], ...] = ()
        self.error: BaseException | None = None
        self.heard: int = -1
        self.ident: int = 0
        self.native_id: int = 0
        self.started: bool = False
        self.is_foreign: bool = False
        self.is_leaving: bool = False
        self.comes_back: bool = False
        self.over: threading.Event = threading.Event()
        self._baton = threading.Lock()
        self._baton.acquire()
        self._context = contextvars.copy_context()

    def take_baton(self) -> None:
        """Wait for the baton."""
        self._baton.acquire()

    def give_baton(self) -> None:
        """Let the thread run; twice is fine, as happens when a run is broken off while it passes the baton on."""
        with suppress(RuntimeError):
            self._baton.release()

    def run(self) -> None:
        """Do what it is for."""
        self._context.run(self.action)
