"""Threads for functions that block: for calls of a library that can be neither tested nor interrupted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from oneaccord.common.threads import Thread

__all__ = ["BlockingCalls"]


class BlockingCalls:
    """Runs functions that block, each at once: with as many threads as there were such functions at one time.

    The threads are daemons. A function that never returns keeps no process alive.

    Parameters
    ----------
    name
        The name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def start(self, task: Callable[[], None]) -> None:
        """Run a function in a thread, at once.

        Parameters
        ----------
        task
            The function, which must not raise.
        """
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._tasks.put(task)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the threads that are idle, and wait for the others, which end when their function returns.

        Parameters
        ----------
        timeout_s
            How many seconds to wait at most.
        """
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
