"""Speed: calls reach a sane share of the speed of this machine, measured in the same run. No absolute time is promised."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_SHARE = 60.0
"""By which factor a call may be slower than two plain threads, which have a socket or yield to each other: generous, for busy machines and thorough backends."""
_ROUNDS = 3
_TRIES = 5
"""How often a backend is looked at: one call of hundreds that nothing disturbed is enough."""
_LONG = 1 << 20
_BUSY_S = 0.15
"""The processor time that a thread may use up while a rank waits: a busy rank gets as much, however busy the machine is."""
_MEMORY = bytes(1 << 18)
_IDLE_SHARE = 0.2
"""Which share of that a rank that waits may use: it may poll for a moment first."""


def _best(action: Callable[[], object], times: int) -> float:
    """Return the time of the shortest of many calls, in seconds: disturbances make a machine slower, never faster."""
    took = []
    for _ in range(_ROUNDS * times):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return min(took)


def _receive(own: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[own.recv_into(memory) :]


class _Echo:
    """A pair of sockets, and a thread that sends everything back."""

    def __init__(self, nbytes: int) -> None:
        self._near, self._far = socket.socketpair()
        self._mine, self._theirs = bytearray(nbytes), bytearray(nbytes)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        self._near.sendall(self._mine)
        _receive(self._near, memoryview(self._mine))

    def end(self) -> None:
        self._near.close()
        self._thread.join()
        self._far.close()

    def _answer(self) -> None:
        while True:
            memory = memoryview(self._theirs)
            while memory:
                count = self._far.recv_into(memory)
                if not count:
                    return
                memory = memory[count:]
            self._far.sendall(self._theirs)


class _Turns:
    """Two threads that take turns, each of which yields the processor until it is its turn: a measure of other load on the machine."""

    def __init__(self) -> None:
        self._turn = 0
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        self._turn = 1
        while self._turn == 1:
            time.sleep(0)

    def end(self) -> None:
        self._turn = 2
        self._thread.join()

    def _answer(self) -> None:
        while self._turn != 2:
            if self._turn == 1:
                self._turn = 0
            time.sleep(0)


def _limit(nbytes: int, times: int) -> float:
    """Return how long it takes at least: by a socket, whose threads are woken, or by threads that yield, as those of many backends do."""
    found = []
    for way in (_Echo(nbytes), _Turns()):
        try:
            found.append(_best(way.turn, times))
        finally:
            way.end()
    return max(found)


def _times(group: Group) -> dict[str, tuple[float, float]]:
    """Return, for each kind of call, how long it takes, and how long the same bytes take between two threads."""
    found: dict[str, tuple[float, float]] = {}
    for length, count, times in (("short", 1, 10), ("long", _LONG // 8, 4)):
        array = np.ones(count)
        limit = 0.0
        if group.rank == 0:
            limit = _limit(8 * count, times)
        group.barrier()

        def echo(array: np.ndarray[tuple[int], np.dtype[np.float64]] = array) -> None:
            if group.rank == 0:
                group.send(array, 1)
                group.recv(1, out=array)
            elif group.rank == 1:
                group.recv(0, out=array)
                group.send(array, 0)

        calls: dict[str, Callable[[], object]] = {
            f"{length} messages there and back": echo,
            f"{length} all_reduce": functools.partial(group.all_reduce, array, "max", out=array),
        }
        if length == "short":
            calls["barrier"] = group.barrier
        for name, call in calls.items():
            call()
            found[name] = _best(call, times), limit
            group.barrier()
    return found


@check(chapter="speed", needs="cpu clock")
def check_share(worlds: WorldMaker) -> None:
    """Short and long calls between two ranks are not slower by orders of magnitude than two plain threads that talk to each other."""
    best: dict[str, tuple[float, float]] = {}
    slow: list[str] = []
    for _ in range(_TRIES):
        for name, (took, limit) in worlds.run(_times, 2)[0].items():
            before = best.get(name, (took, limit))
            best[name] = min(took, before[0]), min(limit, before[1])
        slow = [
            f"{name}: {took * 1e6:.0f} us, but two plain threads need {limit * 1e6:.0f} us"
            for name, (took, limit) in best.items()
            if took > _SHARE * limit
        ]
        if not slow:
            return
    raise AssertionError(f"slower than {_SHARE:g} times two plain threads: {'; '.join(slow)}")


def _waits(group: Group) -> list[float]:
    """Return how busy this rank's process was while rank 0 waited, how busy this thread was, and the number of the process."""
    group.barrier()
    process, thread = time.process_time(), time.thread_time()
    if group.rank == 0:
        group.recv(1)
    elif group.rank == 1:
        while time.thread_time() - thread < _BUSY_S:
            hashlib.sha256(_MEMORY)  # which lets other threads run
        group.send(np.ones(1), 0)
    return [time.process_time() - process, time.thread_time() - thread, os.getpid()]


@check(chapter="speed", needs="cpu clock")
def check_waiting_is_idle(worlds: WorldMaker) -> None:
    """A rank that waits for another leaves the processor to others."""
    share = 0.0
    for _ in range(3):  # other threads of the process count as well
        (waiting, _, first), (_, busy, second) = worlds.run(_waits, 2)
        share = (waiting - (busy if first == second else 0.0)) / busy
        if share < _IDLE_SHARE:
            return
    raise AssertionError(
        f"while rank 0 waited in recv, its process was busy for {share:.0%} of the time that a busy thread had: let wait() sleep"
    )
