"""The launcher: its workers are processes of this computer, each with a socket on which calls go and answers come."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from oneaccord.api import Ask, Deadline, UsageError, Worker, WorkerLost

from oneaccord_stork.plugin import Config

__all__ = ["ProcessLauncher"]

T = TypeVar("T")


class ProcessLauncher:
    """Gives workers to one job. Its methods are called from several threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._processes: list[_Process] = []

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Get one worker for each rank; the workers of one host are neighbours.

        Wait for an engine no longer than until ``deadline``. The address is the one at which the other ranks reach a worker's host.
        """
        if ask.ranks > self._config.most_workers:
            raise UsageError(
                f"{ask.ranks} workers were asked for, and most_workers is {self._config.most_workers}: raise it, or ask for fewer ranks"
            )
        if ask.gpus or (ask.per_host or ask.ranks) < ask.ranks:
            raise UsageError("this launcher has one host, and gives no GPUs: leave per_host and gpus out")
        for _ in range(ask.ranks):
            self._processes.append(_Process(self._config.python or sys.executable))
        return [Worker(index, "this computer", "127.0.0.1", each) for index, each in enumerate(self._processes)]

    def call(self, worker: Worker, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        """Run ``function(*args)`` in a worker, and return at once; a worker may have several calls at the same time."""
        process: _Process = worker.handle
        return process.call(function, args)

    def stop(self, workers: Sequence[Worker]) -> None:
        """End all workers with whatever they do; called again, it does nothing."""
        for each in self._processes:
            each.stop()


class _Process:
    """A worker, and the calls that it has not answered."""

    def __init__(self, python: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the program, which ends the calls.
            self._process = subprocess.Popen(
                [python, "-m", "oneaccord_stork.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._lock = threading.Lock()  # guards what follows
        self._calls: dict[int, Future[Any]] = {}
        self._count = 0
        self._end: str | None = None
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._end is not None:
                future.set_exception(WorkerLost(self._end))
                return future
            self._count += 1
            number = self._count
            self._calls[number] = future
        threading.Thread(target=self._send, args=(pickle.dumps((number, function, args)),), daemon=True).start()
        return future

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: bytes) -> None:
        """Send a call: in a thread of its own, because a worker that hangs reads nothing."""
        try:
            with self._sending:
                self._socket.sendall(message)
        except OSError:
            pass  # it has ended, and `_read` says so

    def _read(self) -> None:
        with self._socket, self._socket.makefile("rb") as answers:
            try:
                while True:
                    number, is_good, value = pickle.load(answers)  # noqa: S301 - from a process that this one has started
                    with self._lock:
                        future = self._calls.pop(number)
                    future.set_result(value) if is_good else future.set_exception(value)
            except (OSError, EOFError, pickle.UnpicklingError):
                pass
        code = self._process.wait()
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with self._lock:
            self._end, left = reason, list(self._calls.values())
            self._calls.clear()
        for future in left:
            future.set_exception(WorkerLost(reason))
