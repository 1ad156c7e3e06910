"""Lanes: calls that must run one after the other, in the order in which they came.

A collective of a group, and a message of one direction between two ranks, must come in the same order on both sides. Whoever
makes such a call takes its turn in a lane: the calling thread itself where it waits for the result (no thread is woken
when the lane is free), a background thread where it does not.

Background threads are shared by the whole process, begin when they are needed, and end when they had nothing to do for a while.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manyhands.deadline import Deadline
from manyhands.rendezvous.bystanders import Sleeper, begin_to_help, end_of_help

__all__ = ["Lane"]

_IDLE_S = 2.0
"""How long a background thread waits for more to do before it ends."""


class _Turn:
    """A place in the queue: of a waiting thread, or of an action for a background thread."""

    __slots__ = ("action", "come")

    def __init__(self, action: Callable[[], None] | None) -> None:
        self.action = action
        self.come = Sleeper() if action is None else None


class Lane:
    """A queue of turns, of which one runs at a time."""

    __slots__ = ("_busy", "_lock", "_queue")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._queue: deque[_Turn] = deque()

    def take(self, deadline: Deadline) -> None:
        """Wait for the calling thread's turn; `give` must follow.

        Raises
        ------
        TimeoutError
            The turn did not come in time; its place in the queue is given up.
        """
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            turn = _Turn(None)
            self._queue.append(turn)
        assert turn.come is not None
        try:
            if turn.come.wait(deadline.remaining()):
                return
        except BaseException:
            if not self._leave(turn):
                self.give()
            raise
        if self._leave(turn):
            raise TimeoutError

    def give(self) -> None:
        """End the calling thread's turn."""
        action = self._next()
        if action is not None:
            try:
                _start(lambda: self._drain(action))
            except RuntimeError:  # no thread can be had: what was promised is done all the same, only not in the background
                self._drain(action)

    @contextmanager
    def turn(self, deadline: Deadline) -> Iterator[None]:
        """Run a block in the calling thread's turn.

        Raises
        ------
        TimeoutError
            As `take`.
        """
        self.take(deadline)
        try:
            yield
        finally:
            self.give()

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action``, which must not raise, in a background thread when its turn comes.

        Raises
        ------
        RuntimeError
            This process can have no more threads; ``action`` will not run.
        """
        with self._lock:
            if self._busy:
                self._queue.append(_Turn(action))
                return
            self._busy = True
        try:
            _start(lambda: self._drain(action))
        except RuntimeError:
            self.give()
            raise

    def _drain(self, first: Callable[[], None]) -> None:
        """Run an action, and those that directly follow it, in this background thread."""
        action: Callable[[], None] | None = first
        while action is not None:
            action()
            action = self._next()

    def _next(self) -> Callable[[], None] | None:
        """Pass the lane on: wake the thread whose turn it is, or return the action whose turn it is."""
        with self._lock:
            if not self._queue:
                self._busy = False
                return None
            turn = self._queue.popleft()
        if turn.come is not None:
            turn.come.wake()
        return turn.action

    def _leave(self, turn: _Turn) -> bool:
        """Give up a place in the queue; tell whether it was still one. Else the turn has just come."""
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
                return True
        return False


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
            if action is not None:
                action()
            del action  # an idle thread must keep no arrays alive
            end_of_help(self)
            with _pool_lock:
                _idle.append(self)


_pool_lock = threading.Lock()
_idle: list[_Worker] = []


def _start(action: Callable[[], None]) -> None:
    """Run an action in a background thread."""
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


def _in_child() -> None:
    """Forget the parent's threads, which a forked child does not have."""
    global _pool_lock  # noqa: PLW0603 - it may have been held when the process forked
    _pool_lock = threading.Lock()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
