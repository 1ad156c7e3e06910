"""Frames between the ranks of a service, and the threads that run what frames ask for.

One thread for each peer receives its frames; it never blocks otherwise, so that a function may call other ranks, also the one that called it.
Functions run in *workers*, which begin when they are needed and end when they had nothing to do for a while.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands import Group
from manyhands.errors import CommError
from manyhands_parallel.rpc.packing import ROOM_BYTES

__all__ = ["FOREVER_S", "Exchange", "Frame", "frame_of"]

FOREVER_S = 2_000_000.0
"""23 days, the longest that a call of a group may last: a receive waits for as long as nobody calls."""
_HEAD = struct.Struct("<QQQ")
_SMALL_BYTES = 1024
"""Frames of at most so many bytes all have this length, which is the fastest for a group: they travel in one message of a known kind."""
_IDLE_S = 2.0

Frame = npt.NDArray[np.uint8]
Job = Callable[[], object]


def frame_of(kind: int, number: int, packed: bytearray) -> Frame:
    """Return a frame: its kind, the number of the call it belongs to, and its content, which was packed with room in front."""
    _HEAD.pack_into(packed, 0, kind, number, len(packed) - ROOM_BYTES)
    packed.extend(bytes(max(0, _SMALL_BYTES - len(packed))))
    return np.frombuffer(packed, np.uint8)


class Exchange:
    """The frames and the threads of one rank.

    Parameters
    ----------
    group
        A group that nobody else uses for messages.
    threads
        How many workers there may be.
    take
        It is called under `lock` with a peer, and a frame's kind, number and content. It must not block. What it returns is let go when the
        lock is free.
    fail
        It is called under `lock` with the error that ended the group. What it returns is let go when the lock is free.

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
        fail: Callable[[CommError], object],
    ) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.failure: CommError | None = None
        self._group = group
        self._most = threads
        self._take = take
        self._fail = fail
        self._sending = [threading.Lock() for _ in range(group.world_size)]
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

    def send(self, peer: int, frame: Frame, *, may_wait: bool) -> None:
        """Send a frame; one for this rank itself is taken at once.

        With ``may_wait`` the calling thread itself sends, which is faster. But a rank that is stopped takes nothing, so that it sends small
        frames alone, and no two threads at once.
        """
        if peer == self._group.rank:
            with self.lock:
                left = self._took(peer, frame)
            del left
        elif may_wait and len(frame) <= _SMALL_BYTES and self._sending[peer].acquire(blocking=False):
            try:
                self._group.send(frame, peer, timeout_s=FOREVER_S)
            finally:
                self._sending[peer].release()
        else:
            self._group.send_async(frame, peer, timeout_s=FOREVER_S)

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
        """Tell whether a worker calls this."""
        return threading.current_thread() in self._workers

    def close(self) -> None:
        """Send the last frame (kind 0) to all peers, wait for theirs, and end the threads."""
        if self.failure is None:
            for peer in range(self._group.world_size):
                if peer != self._group.rank:
                    self._group.send_async(frame_of(0, 0, bytearray(ROOM_BYTES)), peer, timeout_s=FOREVER_S)
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
            if _HEAD.unpack_from(frame.data)[0] == 0:
                return
            try:
                with self.lock:
                    left = self._took(peer, frame)
            except Exception as error:
                self._group.__exit__(type(error), error, error.__traceback__)  # a bug: the job ends, and nobody waits in vain
                raise
            del left, frame

    def _took(self, peer: int, frame: Frame) -> object:
        kind, number, nbytes = _HEAD.unpack_from(frame.data)
        return self._take(peer, kind, number, frame.data[ROOM_BYTES : ROOM_BYTES + nbytes])

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
                        break
                wake.acquire()
        with self.lock:
            self._workers.discard(threading.current_thread())
