"""Frames between the ranks of a service, and the threads that take them and run what they ask for.

Each rank always has one receive in flight from each peer. Every thread that waits for something waits for such a receive, and whoever wakes
first takes the frame: a thread that waits for the reply to its call, or a *worker*. A worker also runs functions, and as long as the
exchange is open another one waits meanwhile. So a function may call other ranks, also the one that called it, and nobody asks again and
again.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands import Group, Work, wait_any
from manyhands.errors import CommError, DeadlineError

__all__ = ["FOREVER_S", "Exchange", "Frame", "frame_of"]

FOREVER_S = 2_000_000.0
"""23 days: a receive waits for as long as nobody calls."""
_HEAD = struct.Struct("<QQQ")
_SMALL_BYTES = 1024
"""Frames of at most so many bytes have one length, which is the fastest for a group, and need nobody's help to leave."""
_SPARE = 2
"""How many workers may wait for something to do: one that waits, and one that takes its place while it runs a function."""

Frame = npt.NDArray[np.uint8]
Job = Callable[[], None]


def frame_of(kind: int, number: int, body: bytes) -> Frame:
    """Return a frame: its kind, the number of the call it belongs to, and its content."""
    length = _HEAD.size + len(body)
    frame = np.empty(max(length, _SMALL_BYTES), np.uint8)
    _HEAD.pack_into(frame.data, 0, kind, number, len(body))
    frame.data[_HEAD.size : length] = body
    frame.data[length:_SMALL_BYTES] = bytes(max(0, _SMALL_BYTES - length))
    return frame


class Exchange:
    """The frames and the workers of one rank.

    Parameters
    ----------
    group
        A group that nobody else uses.
    threads
        How many functions may run at once.
    take
        It is called under `lock` with a peer, and a frame's kind, number and content. It must not block. What it returns is let go when the
        lock is free.
    fail
        It is called under `lock` with the error that ended the group.

    Attributes
    ----------
    lock
        Guards all books of the service.
    failure
        What ended the group; None as long as it works.
    """

    def __init__(
        self,
        group: Group,
        threads: int,
        take: Callable[[int, int, int, memoryview], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._group = group
        self._most = threads
        self._take = take
        self._fail = fail
        self._receives: dict[int, Work[Frame]] = {}
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._idle = 0
        self._workers: set[threading.Thread] = set()

    def open(self) -> None:
        """Begin to receive."""
        with self.lock:
            for peer in range(self._group.world_size):
                if peer != self._group.rank:
                    self._receive(peer)
            self._ensure_worker()

    def is_own(self, peer: int) -> bool:
        """Tell whether a rank is this one, of which no frames come."""
        return peer == self._group.rank

    def send(self, peer: int, frame: Frame, *, may_wait: bool) -> None:
        """Send a frame; one for this rank itself is taken at once. With ``may_wait``, a small one is sent by the calling thread."""
        if peer == self._group.rank:
            with self.lock:
                left = self._took(peer, frame)  # noqa: F841 - to be let go when the lock is free
            self.nudge()
        elif may_wait and frame.nbytes == _SMALL_BYTES:
            self._group.send(frame, peer, timeout_s=FOREVER_S)
        else:
            self._group.send_async(frame, peer, timeout_s=FOREVER_S)

    def submit(self, job: Job) -> None:
        """Let a worker do something, which must not raise; called under `lock`. `nudge` must follow, unless a frame was just taken."""
        self._jobs.append(job)

    def nudge(self) -> None:
        """See to it that a worker looks for something to do."""
        with self.lock:
            if self._jobs and self._running < self._most:
                self._start_worker()

    def step(self, peer: int, is_over: Callable[[], bool], until: float) -> bool:
        """Wait for a frame of a peer, and take it, unless ``is_over()``, which is asked under `lock`; False when the time is up."""
        with self.lock:
            work = None if is_over() else self._receives.get(peer)
        if work is None:
            return True
        left = until - time.monotonic()
        try:
            if left <= 0:
                return False
            wait_any([work], timeout_s=min(left, FOREVER_S))
        except DeadlineError:
            return False
        self._pump(peer, work)
        return True

    def glance(self, peer: int) -> None:
        """Take the next frame of a peer, if it has come."""
        with self.lock:
            work = self._receives.get(peer)
        if work is not None and work.done():
            self._pump(peer, work)

    def receive_of(self, peer: int) -> Work[Frame] | None:
        """Return the receive in flight; called under `lock`."""
        return self._receives.get(peer)

    def take_from(self, peer: int, work: Work[Frame]) -> None:
        """Take a frame whose receive has ended, unless another thread has."""
        self._pump(peer, work)

    def finish(self) -> None:
        """Wait until each peer has sent its last frame (kind 0), and the workers have ended."""
        while True:
            with self.lock:
                works = list(self._receives.items())
            if not works:
                break
            self._pump(*works[wait_any([work for _, work in works], timeout_s=FOREVER_S)])
        for worker in list(self._workers):
            if worker is not threading.current_thread():
                worker.join()

    def _receive(self, peer: int) -> None:
        self._receives[peer] = self._group.recv_async(peer, timeout_s=FOREVER_S)

    def _pump(self, peer: int, work: Work[Frame]) -> None:
        """Take what has come, unless another thread has."""
        left: object = None
        with self.lock:
            if self._receives.get(peer) is not work:
                return
            try:
                frame = work.wait()
                if _HEAD.unpack_from(frame.data)[0] == 0:
                    del self._receives[peer]
                else:
                    self._receive(peer)
                    left = self._took(peer, frame)
            except CommError as error:
                self._failed(error)
        del left

    def _took(self, peer: int, frame: Frame) -> object:
        kind, number, nbytes = _HEAD.unpack_from(frame.data)
        return self._take(peer, kind, number, frame.data[_HEAD.size : _HEAD.size + nbytes])

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._receives.clear()
            self._jobs.clear()
            self._fail(error)
            if self._jobs:
                self._start_worker()

    # Workers

    def _ensure_worker(self) -> None:
        if self._receives and not self._idle:
            self._start_worker()

    def _start_worker(self) -> None:
        self._idle += 1
        worker = threading.Thread(target=self._work, name="rpc-worker", daemon=True)
        self._workers.add(worker)
        worker.start()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """Run a function, or wait for a frame; tell whether the worker is still needed."""
        with self.lock:
            job = self._jobs.popleft() if self._jobs and self._running < self._most else None
            works = list(self._receives.items())
            if job is not None:
                self._running += 1
                self._idle -= 1
                self._ensure_worker()
            elif not works or self._idle > _SPARE:
                self._idle -= 1
                self._workers.discard(threading.current_thread())
                return False
        if job is None:
            self._pump(*works[wait_any([work for _, work in works])])
            return True
        try:
            job()
        finally:
            del job
            with self.lock:
                self._running -= 1
                self._idle += 1
        return True
