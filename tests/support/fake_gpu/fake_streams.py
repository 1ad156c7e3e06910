"""The streams of `fake_cuda`: queues of work, each with a thread that runs it, and what is recorded from them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from support.fake_gpu.fake_earnest import in_earnest

__all__ = ["Capture", "Point", "Stream", "here"]

LATENESS_S = 0.005
"""How long a stream dawdles that nobody waits for."""

here = threading.local()
"""The device of each thread."""


class Point:
    """A place in the work of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reached = threading.Event()

    def wait(self) -> None:
        if not self.reached.is_set():
            with in_earnest(), self.stream.hurried():
                self.reached.wait()


class Capture:
    """The work that is recorded from one stream, and from those that join it."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.streams = [origin]
        self.unjoined: set[Stream] = set()
        self.work: list[Callable[[], object]] = []
        self.is_invalid = False


class Stream:
    """A queue of work, and the thread that runs it in order."""

    def __init__(self, machine: Any, device: int, handle: int, *, is_blocking: bool) -> None:
        self.machine = machine
        self.device = device
        self.handle = handle
        self.is_blocking = is_blocking
        self.capture: Capture | None = None
        # Simple queues may be put to at any moment, even by __del__ in the middle of another put.
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.last = Point(self)
        self.last.reached.set()
        self._lock = threading.Lock()
        self._waiters = 0
        self._hurry = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"fake stream {handle:#x} of device {device}", daemon=True)
        with in_earnest():
            self.thread.start()

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        with self._lock:
            self._waiters += 1
            self._hurry.set()
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1
                if not self._waiters:
                    self._hurry.clear()

    def put(self, function: Callable[[], object]) -> None:
        """Queue a function, and move the last point behind it."""
        self.last = point = Point(self)
        self.work.put(function)
        self.work.put(point.reached.set)

    def _run(self) -> None:
        here.device = self.device
        while True:
            try:
                function = self.work.get_nowait()
            except queue.Empty:
                function = self.work.get()
                self._hurry.wait(LATENESS_S)
            if function is None:
                return
            try:
                function()
            except BaseException as error:  # a broken device is what the host shall see
                self.machine.fail(self.device, error)
