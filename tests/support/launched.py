"""Functions for ranks that `oneaccord.launch` starts, in a module that ranks import."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.engines import worker_main

__all__ = [
    "OfItsOwn",
    "Unpicklable",
    "aborts",
    "adds",
    "backend_name",
    "big",
    "die",
    "double",
    "exits",
    "fails",
    "hang",
    "hold",
    "interrupted",
    "killed",
    "notes",
    "opens",
    "pid",
    "raises_unpicklable",
    "secret_of",
    "shows",
    "sleeps",
    "speaks",
    "sums",
    "unpicklable",
    "waits_for",
]


class OfItsOwn(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("words of it")
        self.lock = threading.Lock()


def adds(group: oa.Group, value: float, *, times: int = 1) -> tuple[int, int, float]:
    total = 0.0
    for _ in range(times):
        total = float(group.all_reduce(np.array([value + group.rank]))[0])
    return group.rank, group.world_size, total


def big(group: oa.Group, count: int) -> Any:
    return np.full(count, group.rank, dtype=np.uint8)


def sums(group: oa.Group, given: Any) -> int:
    return int(given.sum())


def backend_name(group: oa.Group) -> str:
    return group._job.backend_name


def fails(group: oa.Group, rank: int) -> None:
    if group.rank == rank:
        raise OfItsOwn(7, "no such thing")
    group.barrier()


def raises_unpicklable(group: oa.Group) -> None:
    if group.rank == 1:
        raise Unpicklable
    group.barrier()


def unpicklable(group: oa.Group) -> Any:
    return threading.Lock() if group.rank == 1 else None


class _Unreadable:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def unreadable(group: oa.Group) -> Any:
    return _Unreadable() if group.rank == 1 else None


def holds(group: oa.Group, path: str) -> None:
    hold(path)


def turns(group: oa.Group) -> None:
    """Go on for ever in calls of the group."""
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.05)


def killed(group: oa.Group, rank: int) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def exits(group: oa.Group) -> None:
    if group.rank == 1:
        sys.exit(3)
    group.barrier()


def hold(path: str) -> None:
    """Note this process in a named pipe, and hold it open until the process ends."""
    os.write(os.open(path, os.O_WRONLY), b"%d\n" % os.getpid())


def hang(group: oa.Group, path: str, late: tuple[int, ...]) -> None:
    """Hold the pipe; the late ranks go on for ever, in calls of their own, and the others hold it only when they have ended this one."""
    if group.rank not in late:
        threading.Thread(target=_hold_when_leaving, args=(path,), daemon=True).start()
        return
    hold(path)
    while True:
        time.sleep(3600)


def _hold_when_leaving(path: str) -> None:
    while not all(rank.is_leaving for rank in list(worker_main._ranks.values())):
        time.sleep(0.005)
    hold(path)


def aborts(group: oa.Group, path: str) -> None:
    """Hold the pipe, and wait in calls of the group for ever."""
    hold(path)
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.05)


def interrupted(group: oa.Group, path: str, note: str) -> None:
    hold(path)
    try:
        while True:
            time.sleep(3600)
    finally:
        Path(note).with_suffix(f".{group.rank}").write_text(str(sys.exc_info()[0]))


def speaks(group: oa.Group) -> None:
    print("this is", group.rank)
    print("trouble", group.rank, file=sys.stderr)


def shows(group: oa.Group, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def opens(group: oa.Group) -> str:
    return sys.stdin.read()


def sleeps(path: str) -> None:
    hold(path)
    time.sleep(3600)


def pid(*_: object) -> int:
    return os.getpid()


def double(value: int) -> int:
    if value < 0:
        raise OfItsOwn(value, "below 0")
    return 2 * value


def die(path: str | None = None) -> str:
    """Die, unless a file says that it was done before."""
    if path is None or not Path(path).exists():
        if path is not None:
            Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def secret_of(group: oa.Group) -> str:
    """Return the secret of the job, from the frames of the worker: no variable holds it."""
    del group
    frame = sys._getframe()
    while "task" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_locals["task"].secret)


def notes(group: oa.Group, folder: str) -> None:
    """Note the process and the secret, and then the end; wait for ever in calls of the group."""
    path = Path(folder, f"{group.rank}.began")
    path.with_suffix(".new").write_text(f"{os.getpid()} {secret_of(group)}")
    path.with_suffix(".new").rename(path)
    try:
        turns(group)
    finally:
        path.with_suffix(".ended").touch()


def waits_for(path: str) -> None:
    """Say that this has begun, and wait until a file is there, or this process is to end."""
    Path(path + ".begun").touch()
    end = time.monotonic() + 120
    while not Path(path).exists() and time.monotonic() < end:
        time.sleep(0.05)


def rests(seconds: float) -> None:
    time.sleep(seconds)
