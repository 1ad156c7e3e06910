"""What the ranks of a job run on: a clock, threads, and ways to wait.

Nearly always these are the computer's own, `COMPUTER`. A backend whose ranks live in a simulated world brings a `Runtime` of its own:
then every wait of core goes through it, so that it decides who runs when, and what time it is.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from manyhands.rendezvous.bystanders import Sleeper, begin_to_help, end_of_help
from manyhands.rendezvous.recorder import FlightRecorder

__all__ = ["COMPUTER", "Condition", "Place", "Runtime"]


class Place(Protocol):
    """Where one thread waits once, until another one wakes it."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait to be woken, for at most ``timeout_s`` seconds; tell whether it was."""
        ...

    def wake(self) -> None:
        """Wake the thread, now or when it comes to wait; twice is fine."""
        ...


class Condition(Protocol):
    """What `threading.Condition` is, as far as core uses it."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the predicate is true, for at most ``timeout`` seconds; return what it is."""
        ...

    def notify_all(self) -> None:
        """Let all who wait look again."""
        ...


class Runtime(ABC):
    """What ranks run on.

    Attributes
    ----------
    is_simulated
        Whether a scheduler decides who runs. It then finds by itself that nobody can go on, so that calls need not tell what they wait
        for; and it wants to see every call, so that none takes a short way past `recorder`.
    """

    is_simulated: bool = False

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since some moment; never less than before."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let the calling thread do nothing for a time."""

    @abstractmethod
    def compute(self, seconds: float) -> None:
        """Let the time pass that the calling thread's program would need to compute; no time where it does compute."""

    @abstractmethod
    def mark(self, label: str) -> None:
        """Note for whoever reads a trace that the calling rank has come to a point of its program."""

    @abstractmethod
    def place(self, *, for_good: bool) -> Place:
        """Return where the calling thread is about to wait; to be made under the lock that whoever wakes it holds as well.

        Parameters
        ----------
        for_good
            Whether the thread makes no other call before it is woken.
        """

    @abstractmethod
    def condition(self) -> Condition:
        """Return a condition with a lock of its own."""

    @abstractmethod
    def start(self, action: Callable[[], None]) -> None:
        """Run an action, which must not raise, in a background thread; RuntimeError when there can be no more."""

    @abstractmethod
    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action, which must not block, after a delay."""

    @abstractmethod
    def glance(self) -> None:
        """Take note that the calling thread asks whether something has ended, and may go on asking."""

    @abstractmethod
    def enter(self, rank: int) -> None:
        """Take note that the calling thread makes a call on a group of this rank.

        Raises
        ------
        UsageError
            The thread is another rank's, where ranks are threads.
        """

    @abstractmethod
    def on_behalf(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return the action, to be run in another thread for a call that the calling thread makes now."""

    @abstractmethod
    def carry(self, source: int, dest: int, action: Callable[[], None]) -> None:
        """Run an action that brings word from a rank to the store (-1) of a job whose ranks are threads, or back."""

    @abstractmethod
    def recorder(self, rank: int) -> FlightRecorder:
        """Return what records the calls of a rank."""

    @abstractmethod
    def identity(self, rank: int) -> tuple[str, int]:
        """Return the name of the host, and the number of the process, of a rank that is a thread."""


class _Event:
    """A place of a thread that may yet do something else."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, timeout_s: float | None) -> bool:
        return self._event.wait(timeout_s)

    def wake(self) -> None:
        self._event.set()


class _Computer(Runtime):
    """The computer's own clock and threads.

    Background threads are shared by the whole process, begin when they are needed, and end when they had nothing to do for a while.
    """

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def compute(self, seconds: float) -> None:
        pass

    def mark(self, label: str) -> None:
        pass

    def place(self, *, for_good: bool) -> Place:
        return Sleeper() if for_good else _Event()

    def condition(self) -> Condition:
        return threading.Condition()

    def start(self, action: Callable[[], None]) -> None:
        with _pool_lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            worker = _Worker()
            # The name tells the rules about waiting that this thread makes no calls of its own.
            begin_to_help(worker)
            try:
                threading.Thread(target=worker.run, name="manyhands-work", daemon=True).start()
            except RuntimeError:
                end_of_help(worker)
                raise
        worker.give(action)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.name = "manyhands-timer"
        timer.daemon = True
        timer.start()

    def glance(self) -> None:
        pass

    def enter(self, rank: int) -> None:
        pass

    def on_behalf(self, action: Callable[[], None]) -> Callable[[], None]:
        return action

    def carry(self, source: int, dest: int, action: Callable[[], None]) -> None:
        action()

    def recorder(self, rank: int) -> FlightRecorder:
        return FlightRecorder()

    def identity(self, rank: int) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()


COMPUTER: Runtime = _Computer()
"""The computer's own clock and threads."""

_IDLE_S = 2.0
"""How long a background thread waits for more to do before it ends."""


class _Worker:
    """A background thread, or the wish for one."""

    def __init__(self) -> None:
        self.ident: int | None = None
        self._action: Callable[[], None] | None = None
        self._given = threading.Event()

    def give(self, action: Callable[[], None]) -> None:
        begin_to_help(self)
        self._action = action
        self._given.set()

    def run(self) -> None:
        self.ident = threading.get_ident()
        while True:
            if not self._given.wait(_IDLE_S):
                with _pool_lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                # Somebody has just taken this worker out of the pool: its action is on the way.
                self._given.wait()
            self._given.clear()
            action, self._action = self._action, None
            try:
                if action is not None:
                    action()
            finally:
                end_of_help(self)
            del action
            with _pool_lock:
                _idle.append(self)


_pool_lock = threading.Lock()
_idle: list[_Worker] = []


def _in_child() -> None:
    """Forget the parent's threads, which a forked child does not have."""
    global _pool_lock  # noqa: PLW0603 - it may have been held when the process forked
    _pool_lock = threading.Lock()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
