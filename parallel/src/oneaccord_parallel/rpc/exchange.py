"""Frames between the ranks of a service, and the threads that do the work of frames.

One thread for each peer receives its frames; it never blocks otherwise, so that a function may call other ranks, also the one that called it.
Functions run in *workers*, which begin when they are needed and end when they had nothing to do for a while.

Large arrays travel before the frame that they belong to, as messages of two axes, which distinguishes them from frames: other frames may come
between.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oneaccord import Group, wait_all
from oneaccord.errors import CommError, DeadlineError
from oneaccord_parallel.rpc.packing import ROOM_BYTES, Bytes, Parcel

__all__ = ["FOREVER_S", "Exchange", "Frame", "frame_of"]

FOREVER_S = 2_000_000.0
"""23 days, the longest that a call of a group may last: a receive waits until another rank calls."""
_HEAD = struct.Struct("<QQQQ")
_SMALL_BYTES = 1024
"""Frames of at most so many bytes all have this length, which is the fastest for a group: they travel in one message of a known kind."""
_IDLE_S = 2.0

Job = Callable[[], object]


class Frame(NamedTuple):
    """A message and the large arrays that go ahead of it."""

    data: Bytes
    arrays: list[Bytes]


def frame_of(kind: int, number: int, parcel: Parcel) -> Frame:
    """Return a frame: its kind, the number of the call it belongs to, and its content."""
    packed, arrays = parcel
    _HEAD.pack_into(packed, 0, kind, number, len(packed) - ROOM_BYTES, len(arrays))
    packed.extend(bytes(max(0, _SMALL_BYTES - len(packed))))
    return Frame(np.frombuffer(packed, np.uint8), arrays)


class Exchange:
    """The frames and the threads of one rank.

    Parameters
    ----------
    group
        A group on which no other code sends messages.
    threads
        How many workers there may be.
    take
        It is called under `lock` with a peer, and a frame's kind, number, content and large arrays. It must not block. Its result is released
        when the lock is free.
    fail
        It is called under `lock` with the error that ended the group. Its result is released when the lock is free.

    Attributes
    ----------
    lock
        Guards all counters of the service.
    failure
        The error that ended the group; None as long as it works.
    """

    def __init__(
        self,
        group: Group,
        threads: int,
        take: Callable[[int, int, int, memoryview, list[Bytes]], object],
        fail: Callable[[CommError], object],
    ) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.failure: CommError | None = None
        self._group = group
        self._most = threads
        self._take = take
        self._fail = fail
        self._sending = [threading.Lock() for _ in range(group.world_size)]
        self._outboxes: list[deque[Bytes]] = [deque() for _ in range(group.world_size)]  # of small frames
        self._issuing = [threading.Lock() for _ in range(group.world_size)]  # arrays are followed by their own frame
        self._receivers: list[threading.Thread] = []
        self._jobs: deque[Job] = deque()
        self._workers: set[threading.Thread] = set()
        self._idle: list[Any] = []

    def open(self) -> None:
        """Begin to receive."""
        peers = [peer for peer in range(self._group.world_size) if peer != self._group.rank]
        self._receivers = [
            threading.Thread(target=self._receive, args=(peer,), name=f"rpc-from-{peer}", daemon=True) for peer in peers
        ]
        for receiver in self._receivers:
            receiver.start()

    def send(self, peer: int, frame: Frame, *, wait_s: float, still: bool = False) -> None:
        """Send a frame; one for this rank itself is taken at once.

        The calling thread may wait for so many seconds until a frame with large arrays has left; if it may not (0), they are copied. A frame
        that has not left by then is still on its way, and its arrays must not be changed. With ``still`` the arrays never change: they are
        neither copied nor waited for.
        """
        data, arrays = frame
        if arrays and (peer == self._group.rank or not (wait_s or still)):
            arrays = [array.copy() for array in arrays]
        if peer == self._group.rank:
            with self.lock:
                left = self._took(peer, data, arrays)
            del left
        elif wait_s and not arrays and data.size <= _SMALL_BYTES:
            self._send_small(peer, data)
        else:
            with self._issuing[peer]:
                parts = [*(array[None] for array in arrays), data]
                works = [self._group.send_async(part, peer, timeout_s=FOREVER_S) for part in parts]
            if wait_s and not still:
                with contextlib.suppress(DeadlineError):
                    wait_all(works, timeout_s=wait_s)

    def _send_small(self, peer: int, data: Bytes) -> None:
        """Send a small frame the fastest way. One thread sends for all, so that only one waits for a rank that is stopped."""
        outbox = self._outboxes[peer]
        outbox.append(data)
        while outbox and self._sending[peer].acquire(blocking=False):
            try:
                while outbox:
                    self._group.send(outbox.popleft(), peer, timeout_s=FOREVER_S)
            finally:
                self._sending[peer].release()

    def submit(self, job: Job) -> None:
        """Let a worker do something, which must not raise; called under `lock`."""
        self._jobs.append(job)
        if self._idle:
            self._idle.pop().release()
        elif len(self._workers) < self._most:
            worker = threading.Thread(target=self._work, name="rpc-worker", daemon=True)
            self._workers.add(worker)
            worker.start()

    def is_worker(self) -> bool:
        """Return whether a worker calls this."""
        return threading.current_thread() in self._workers

    def close(self) -> None:
        """Send the last frame (kind 0) to all peers, wait for theirs, and end the threads."""
        if self.failure is None:
            for peer in range(self._group.world_size):
                if peer != self._group.rank:
                    self.send(peer, frame_of(0, 0, Parcel(bytearray(ROOM_BYTES), [])), wait_s=0)
        for receiver in self._receivers:
            receiver.join()
        with self.lock:
            self._most = 0
            while self._idle:
                self._idle.pop().release()
            workers = list(self._workers)
        for worker in workers:
            worker.join()

    def _receive(self, peer: int) -> None:
        """Take the frames of a peer until its last one."""
        arrays: list[Bytes] = []
        while True:
            try:
                frame = self._group.recv(peer, timeout_s=FOREVER_S)
            except CommError as error:
                with self.lock:
                    left = None
                    if self.failure is None:
                        self.failure = error
                        left = self._fail(error)
                del left
                return
            if frame.ndim == 2:
                arrays.append(frame)
                continue
            if _HEAD.unpack_from(frame.data)[0] == 0:
                return
            try:
                with self.lock:
                    left = self._took(peer, frame, arrays)
            except Exception as error:
                self._group.__exit__(type(error), error, error.__traceback__)  # a bug: the job ends, and no rank waits in vain
                raise
            del left, frame

    def _took(self, peer: int, frame: Bytes, ahead: list[Bytes]) -> object:
        """Take a frame, and out of ``ahead`` its arrays."""
        kind, number, nbytes, count = _HEAD.unpack_from(frame.data)
        arrays: list[Bytes] = []
        if count:  # the last ones: a signal may have kept a caller from sending a frame after its arrays
            arrays = ahead[-count:]
            ahead.clear()
        return self._take(peer, kind, number, frame.data[ROOM_BYTES : ROOM_BYTES + nbytes], arrays)

    def _work(self) -> None:
        """Be a worker."""
        wake = threading.Lock()
        wake.acquire()
        while True:
            with self.lock:
                job = self._jobs.popleft() if self._jobs else None
                if job is None and self._most == 0:
                    break
                if job is None:
                    self._idle.append(wake)
            if job is not None:
                job()
                del job  # it holds arguments, and the next one may be long in coming
            elif not wake.acquire(timeout=_IDLE_S):
                with self.lock:
                    if wake in self._idle:
                        self._idle.remove(wake)
                        # Before the lock is free: a job that comes now must get a worker of its own.
                        self._workers.discard(threading.current_thread())
                        return
                wake.acquire()
        with self.lock:
            self._workers.discard(threading.current_thread())
