"""Threads that wait for messages of Gloo.

A message of Gloo cannot be tested, and a wait for it that runs out of time breaks its connection. So each is waited for without a
limit by a thread of its own, and whoever has a deadline waits for that thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from manyhands.api import Thread

__all__ = ["Waiters"]


class Waiters:
    """Runs functions that block, each at once: with as many threads as there were such functions at one time."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def start(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise, in a thread."""
        with self._lock:
            wanted = self._idle == 0
            if wanted:
                thread = Thread(target=self._serve, name="manyhands-gloo", daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._idle -= 1
        self._tasks.put(task)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the threads that wait for nothing, and wait for the others, which end when their wait does, at most so long."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task
            with self._lock:
                self._idle += 1
