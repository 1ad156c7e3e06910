"""Leaks: many groups and worlds leave nothing behind: no socket, no file, no thread, no memory.

Other programs make files and use memory at the same time, so that only this counts:

- threads, descriptors and mapped segments of the process that is looked at: each one that was not there before, and not how many there are, since what ends
  meanwhile would hide what is left;
- files in a temporary folder that no other program knows: ``tempfile`` and ``TMPDIR`` lead there while the check lasts;
- files in the folder of shared memory that the process itself has opened or mapped, even if other processes make some there;
- the memory of the process, by its allocator; see `oneaccord_conformance.memory`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.memory import used_mib
from oneaccord_conformance.ranks import join
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_MIB = 1 << 20
_SHARED = "/dev/shm"  # noqa: S108 - the folder of segments with names
_MIB_EACH = 0.5
"""By how much each world, group or round of calls must grow a process to count as a leak."""
_PARTS = 6
_SLACK = 3
"""The pieces that a process may keep for itself, for any number of worlds."""

_own_names: set[str] = set()
"""The files that this process has opened or mapped in the folder of shared memory, since `_listen`."""


@functools.cache
def _listen() -> None:
    """Note from now on which names of `_SHARED` this process opens, for as long as it lives: a hook cannot be taken away."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        name = ""
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            name = os.fsdecode(args[0])
        elif event == "mmap.__new__" and args[0] >= 0:  # of a segment that was opened by its name
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{args[0]}")  # noqa: PTH115 - it is no Path
        if name.startswith(_SHARED):
            _own_names.add(name)

    sys.addaudithook(hook)


def _descriptors() -> Iterator[tuple[str, str]]:
    """Yield the number of each descriptor of this process, and its file; nothing if the system does not say."""
    folder = "/proc/self/fd"
    for number in os.listdir(folder) if os.path.isdir(folder) else ():  # noqa: PTH112, PTH208 - a Path for each takes its time
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            yield number, os.readlink(f"{folder}/{number}")  # noqa: PTH115


def _segments() -> Iterator[tuple[str, str]]:
    """Yield the number and the name of the file behind each mapping of shared memory of this process."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else ():
        _, access, _, _, number, *name = line.split(maxsplit=5)
        if access.endswith("s") and name and ("memfd:" in name[0] or _SHARED in name[0]):
            yield number, name[0]


def _note() -> None:
    """Take note of the names of shared memory that this process holds now: code that is not Python's may have made them."""
    _own_names.update(name for _, name in (*_segments(), *_descriptors()) if name.startswith(_SHARED))


def _held() -> dict[str, set[Any]]:
    """Return the pieces of this process and its temporary folder, each by its identity."""
    gc.collect()
    _note()
    return {
        "threads": {thread.native_id for thread in threading.enumerate()},
        "open files and sockets": set(_descriptors()),
        "shared memory segments": set(_segments()),
        "temporary files": set(os.listdir(tempfile.gettempdir())),  # noqa: PTH208 - names alone
        f"files in {_SHARED}": {name for name in _own_names if os.path.exists(name)},  # noqa: PTH110 - they are no Paths
    }


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Let this process make its temporary files in a folder of its own. Ranks that are processes have such a folder from the start."""
    before, told = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="oa-check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if told is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = told


def _repeat(action: Callable[[], None], warm: int, times: int, meet: Callable[[], None] = lambda: None) -> str:
    """Repeat an action; return words for the pieces of which this process then holds more, an empty text if there are none.

    Memory must have grown in most parts of the time, and altogether except for the parts in which it grew most and least: older memory may be freed only
    now, and work in the background may not have ended. A burst in one part, or a move by the system from one kind to another, is not a leak, and
    memory that becomes free in one part hides none. ``meet`` keeps ranks together while they look.
    """
    _listen()
    for _ in range(warm):
        action()
    meet()
    before = _held()
    memory = [used_mib() or 0.0]
    meet()
    for _ in range(_PARTS):
        for _ in range(times // _PARTS):
            action()
        meet()
        gc.collect()
        memory.append(used_mib() or 0.0)
        meet()
    grown = _grown(before, times)
    meet()
    steps = sorted(later - earlier for earlier, later in pairwise(memory))
    if min(statistics.median(steps), statistics.fmean(steps[1:-1])) > times / _PARTS * _MIB_EACH:
        grown.append(f"{memory[-1] - memory[0]:.0f} MiB of memory")
    return ", ".join(grown)


def _grown(before: dict[str, set[Any]], times: int) -> list[str]:
    """Return words for the new pieces beyond the allowed ones that do not go away within the time that a busy machine may need."""
    slack = min(_SLACK, times / 2)
    limit = time.monotonic() + patience.PROMPT_S  # less than the timeout of the others, which wait in `meet`
    while True:
        after = _held()
        grown = [f"{len(after[what] - held)} {what}" for what, held in before.items() if len(after[what] - held) > slack]
        if not grown or time.monotonic() > limit:
            return grown
        time.sleep(0.05)


def _traffic(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (5, 30_000, _MIB // 4):
        group.all_reduce(np.ones(count))
        group.sendrecv(np.ones(count), (rank + 1) % size, (rank - 1) % size)
    group.all_reduce_async(np.ones(1000)).wait()
    group.all_gather_object({"rank": rank})
    group.empty(1000)[...] = 1.0
    _note()


def _joins(group: Group, warm: int, times: int) -> str:
    """Make groups one after the other; return the growth of this process."""
    group.close()

    def action() -> None:
        with join() as own:
            _traffic(own)

    return _repeat(action, warm, times)


def _once(group: Group) -> None:
    _traffic(group)
    half = group.split(group.rank % 2)
    if half is not None:
        with half:
            _traffic(half)


def _check(worlds: WorldMaker, program: Callable[..., str], warm: int, times: int, what: str) -> None:
    """Run a program that looks for leaks on two ranks, and again if it finds one: a leak continues."""
    for last in (False, True):
        if worlds.has_threads:  # in a world that does not outlive the folder
            with _own_folder():
                outcomes = worlds.attempt(program, 2, warm=warm, times=times)
        else:
            outcomes = worlds.attempt(program, 2, warm=warm, times=times)
        for rank, outcome in enumerate(outcomes):
            assert not outcome.errors, f"rank {rank} {outcome}"
            assert not (last and outcome.value), f"after {times} {what}, rank {rank} of 2 holds more: {outcome.value}"
        if not any(outcome.value for outcome in outcomes):
            return


def _check_threads(action: Callable[[], None], times: int, what: str) -> None:
    """Do likewise with code that makes worlds whose ranks are threads of this process."""
    with _own_folder():
        grown = _repeat(action, 4, times) and _repeat(action, 4, times)
    assert not grown, f"after {times} {what} this process, it holds more: {grown}"


@check(chapter="leaks")
def check_worlds(worlds: WorldMaker) -> None:
    """Worlds that were left hold no sockets, files, threads, segments or memory."""
    times = 6 if worlds.quick else 24
    if not worlds.has_threads:
        _check(worlds, _joins, 3, times, "groups of all ranks")
        return

    def action() -> None:
        for rank, outcome in enumerate(worlds.attempt(_once, 3)):
            assert not outcome.errors, f"rank {rank} {outcome}"

    _check_threads(action, times, "worlds of 3 ranks that are threads of")


def _splits(group: Group, warm: int, times: int) -> str:
    def action() -> None:
        made = group.split(0)
        if made is not None:
            with made:
                _traffic(made)

    return _repeat(action, warm, times, group.barrier)


@check(chapter="leaks")
def check_groups(worlds: WorldMaker) -> None:
    """Closed groups hold nothing, though the world continues."""
    _check(worlds, _splits, 4, 6 if worlds.quick else 30, "groups made by split and closed")


def _calls(group: Group, warm: int, times: int) -> str:
    return _repeat(lambda: _traffic(group), warm, times, group.barrier)


@check(chapter="leaks")
def check_calls(worlds: WorldMaker) -> None:
    """A group that makes many calls does not grow."""
    warm, times = (4, 6) if worlds.quick else (10, 84)
    _check(worlds, _calls, warm, times, "rounds of calls in one group")


def _fails(group: Group) -> None:
    _traffic(group)
    if group.rank == 1:
        raise RuntimeError("its program failed")
    group.recv(1)


@check(chapter="leaks", needs="cpu threads")
def check_failures(worlds: WorldMaker) -> None:
    """Worlds that failed hold nothing either."""

    def action() -> None:
        outcomes = worlds.attempt(_fails, 2)
        assert "CommError" in outcomes[0].errors, f"rank 0 {outcomes[0]}"

    _check_threads(action, 6 if worlds.quick else 18, "worlds of 2 ranks that ended with an error, as threads of")
