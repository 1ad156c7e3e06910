"""Tasks: the threads of ranks, as the scheduler knows them."""

from __future__ import annotations

import contextvars
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from oneaccord.api import Record
from oneaccord_simulated.primitives import acquire, release

__all__ = ["BLOCKED", "DEAD", "ENDED", "OUTSIDE", "READY", "RUNNING", "Stopped", "Task"]

READY, RUNNING, BLOCKED, OUTSIDE, ENDED, DEAD = "ready", "running", "blocked", "outside", "ended", "dead"


class Stopped(BaseException):
    """The run is over: the remaining work of a thread ends here."""


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
    ident
        The name that Python has for its thread.
    where
        The line of the program for which it works; empty if its own stack shows it.
    is_foreign
        Whether the program started the thread itself.
    test
        The condition that it waits for, if that is not of a group: a lock, say. It can run once this returns True.
    waits_for
        The same in words.
    until
        When a wait ends by itself, as a part of the program.
    left_s, gives_up_at
        How long that would still have taken at the end of the run, and when that is over on the computer's clock.
    world
        The world that it belongs to now; None if the run of that is over. For threads of the program only.
    thread
        The name that `threading` gives such a thread.
    timeouts
        How many such waits have ended by a timeout.
    naps
        How often it has slept by `time.sleep`.
    heard
        The number of events when it last polled for an end.
    asked, asked_in_vain
        The number of polls since then, and the number when nothing else could happen.
    doing
        The call that it is in, for observers; of no concern here.
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
        "asked",
        "asked_in_vain",
        "awaits",
        "deadline",
        "doing",
        "ends_job",
        "error",
        "gives_up_at",
        "heard",
        "ident",
        "is_foreign",
        "left_s",
        "naps",
        "number",
        "over",
        "rank",
        "started",
        "state",
        "test",
        "thread",
        "timeouts",
        "until",
        "waits_for",
        "where",
        "woken",
        "world",
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
        self.doing: Record | None = None
        self.awaits: tuple[tuple[int, bool], ...] = ()
        self.error: BaseException | None = None
        self.heard: int = -1
        self.asked: int = 0
        self.asked_in_vain: int = 0
        self.test: Callable[[], bool] | None = None
        self.waits_for: str = ""
        self.until: float = math.inf
        self.left_s: float = math.inf
        self.gives_up_at: float = math.inf
        self.world: Any = None
        self.thread: weakref.ref[threading.Thread] | None = None
        self.timeouts: int = 0
        self.naps: int = 0
        self.ident: int = 0
        self.started: bool = False
        self.is_foreign: bool = False
        self.over: threading.Event = threading.Event()
        self._baton = threading.Lock()
        acquire(self._baton)
        self._context = contextvars.copy_context()

    @property
    def is_in_first_nap(self) -> bool:
        """Whether it sleeps for the first time."""
        return self.naps == 1 and self.waits_for == "in time.sleep"

    def take_baton(self, timeout_s: float = -1) -> bool:
        """Wait for the baton, on the computer's clock; return whether it came."""
        return acquire(self._baton, True, timeout_s)

    def give_baton(self) -> None:
        """Let the thread run; twice is fine, as happens when a run is broken off while it passes the baton on."""
        with suppress(RuntimeError):
            release(self._baton)

    def run(self) -> None:
        """Run the function of the task."""
        self._context.run(self.action)
