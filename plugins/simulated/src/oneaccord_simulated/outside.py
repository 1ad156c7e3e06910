"""Threads that are outside of a simulated world: those that said so, and those that the world never knew.

A thread of a rank goes outside with `oneaccord.outside()`, or when an event loop waits for a file descriptor that nothing in this process can
make ready. The clock stops until it comes back. A thread that the world did not start comes in when it makes its first call on a group.
"""

from __future__ import annotations

import threading

from oneaccord_simulated.task import OUTSIDE, READY, Task

__all__ = ["Outside"]


class Outside:
    """The threads outside, for one scheduler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone: dict[int, Task] = {}
        self._arrived: list[Task] = []
        self._is_closed = False

    def __bool__(self) -> bool:
        """Return whether a task is outside."""
        return bool(self._gone)

    def tasks(self) -> list[Task]:
        """Return the tasks that are outside."""
        return list(self._gone.values())

    def holds(self, ident: int) -> bool:
        """Return whether a thread is outside that belongs to a task."""
        return ident in self._gone

    def leave(self, task: Task) -> None:
        """Let a task be outside."""
        task.state = OUTSIDE
        self._gone[task.ident] = task

    def come(self, task: Task) -> bool:
        """Let a task queue up, from any thread; return whether the world can still let it in."""
        with self._lock:
            if not self._is_closed:
                self._arrived.append(task)
            return not self._is_closed

    def close(self) -> list[Task]:
        """Let no task in any more; return those that have queued up."""
        with self._lock:
            self._is_closed = True
        return self.arrivals()

    def forget(self, task: Task) -> None:
        """Wait no longer for a task."""
        self._gone.pop(task.ident, None)

    def arrivals(self) -> list[Task]:
        """Return the tasks that have queued up since the last time."""
        if not self._arrived:
            return []
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for task in arrived:
            self._gone.pop(task.ident, None)
            if task.state is OUTSIDE:
                task.state = READY
        return arrived
