"""A launcher of the kind "workers" whose workers are threads of this process, on hosts that it pretends to have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from oneaccord.api import Ask, Deadline, Worker, WorkerLost

__all__ = ["ThreadWorkers"]


class ThreadWorkers:
    """Each call is a thread; several jobs of one process are then ranks in it at once.

    Parameters
    ----------
    per_host
        How many workers each pretended host has.
    """

    def __init__(self, per_host: int = 2) -> None:
        self._per_host = per_host
        self._lock = threading.Lock()
        self._calls: dict[int, list[Future[Any]]] = {}
        self._gone: dict[int, str] = {}
        self.asked: list[Ask] = []
        self.stops = 0

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        self.asked.append(ask)
        assert deadline.remaining() > 0
        return [Worker(index, f"host{index // self._per_host}", "127.0.0.1", f"worker {index}") for index in range(ask.ranks)]

    def call(self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        assert worker.handle == f"worker {worker.index}"
        future: Future[Any] = Future()
        with self._lock:
            if worker.index in self._gone:
                future.set_exception(WorkerLost(self._gone[worker.index]))
                return future
            self._calls.setdefault(worker.index, []).append(future)

        def work() -> None:
            try:
                value = function(*args)
            except Exception as error:
                self._settle(future, None, error)
            else:
                self._settle(future, value, None)

        threading.Thread(target=work, daemon=True).start()
        return future

    def _settle(self, future: Future[Any], value: Any, error: Exception | None) -> None:
        with self._lock:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def lose(self, index: int, reason: str) -> None:
        """Pretend that a worker ends, with all its calls."""
        with self._lock:
            self._gone[index] = reason
            lost = [each for each in self._calls.get(index, []) if not each.done()]
        for each in lost:
            each.set_exception(WorkerLost(reason))

    def stop(self, workers: Sequence[Worker]) -> None:
        del workers
        self.stops += 1
