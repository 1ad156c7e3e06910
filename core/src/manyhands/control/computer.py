"""The computer's own clock and threads, on which ranks run that are processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from manyhands.contract.runtime import Condition, Place, Runtime
from manyhands.control.bystanders import Sleeper, begin_to_help, end_of_help

__all__ = ["COMPUTER"]


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
