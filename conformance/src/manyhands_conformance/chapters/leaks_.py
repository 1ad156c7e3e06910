"""Leaks: many groups and worlds leave nothing behind: no socket, no file, no thread, no memory."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from manyhands.api import Group
from manyhands_conformance.memory import used_mib
from manyhands_conformance.ranks import join
from manyhands_conformance.registry import check
from manyhands_conformance.worlds import WorldMaker

_SETTLE_S = 5.0
"""How long what ends in the background may take to end."""
_PATIENCE_S = 90.0
"""How long hundreds of calls may take on a machine that has much to do; one that hangs ends by its own timeout."""
_MIB = 1 << 20
_SHARED = Path("/dev/shm")  # noqa: S108 - where segments with names are
_FOLDERS = {f"files in {folder}": folder for folder in (_SHARED, Path(tempfile.gettempdir()))}
_MIB_EACH = 0.5
"""By how much each world, group or round of calls must grow a process to count as a leak."""
_PARTS = 6
_SLACK = 3
"""By how many pieces a process may grow by itself, whatever the number of worlds."""


def _held() -> dict[str, float]:
    """Return what this process holds; where the system does not tell, nothing."""
    gc.collect()
    found: dict[str, float] = {"threads": threading.active_count()}
    descriptors, maps = Path("/proc/self/fd"), Path("/proc/self/maps")
    if descriptors.is_dir():
        found["open files and sockets"] = sum(1 for _ in descriptors.iterdir())
    if maps.exists():
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        found["shared memory segments"] = sum(
            line.split()[1].endswith("s") and ("memfd:" in line or str(_SHARED) in line)
            for line in lines
            if len(line.split()) > 1
        )
    for what, folder in _FOLDERS.items():
        if folder.is_dir():
            found[what] = sum(each.owner_is_me for each in map(_Entry, folder.iterdir()))
    return found


class _Entry:
    """A file that may vanish while it is looked at."""

    def __init__(self, path: Path) -> None:
        try:
            self.owner_is_me = path.stat().st_uid == os.getuid()
        except OSError:
            self.owner_is_me = False


def _repeat(action: Callable[[], None], warm: int, times: int, meet: Callable[[], None] = lambda: None) -> str:
    """Do something again and again; return in words what this process holds more of then, an empty text where it is nothing.

    Memory must have grown in most parts of the time, and altogether but for the parts in which it grew most and least: what was there before may be freed only
    now, and what ends in the background may not have ended. ``meet`` keeps ranks together while they look.
    """
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


def _grown(before: dict[str, float], times: int) -> list[str]:
    """Return in words what has grown by more than some, and does not shrink within a moment."""
    slack = dict.fromkeys(before, min(_SLACK, times / 2))
    slack.update(dict.fromkeys(_FOLDERS, times - 1))  # other programs may make some meanwhile
    limit = time.monotonic() + _SETTLE_S
    while True:
        after = _held()
        grown = [f"{after[what] - held:.0f} {what}" for what, held in before.items() if after[what] - held > slack[what]]
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


def _joins(group: Group, warm: int, times: int) -> str:
    """Make groups one after the other; return what has grown in this process."""
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


@check(chapter="leaks")
def check_worlds(worlds: WorldMaker) -> None:
    """Worlds that were left hold no sockets, files, threads, segments or memory."""
    times = 6 if worlds.quick else 24
    if not worlds.has_threads:
        found = worlds.attempt(_joins, 2, warm=3, times=times)
        if any(each.value for each in found):  # a leak goes on
            found = worlds.attempt(_joins, 2, warm=3, times=times)
        for rank, outcome in enumerate(found):
            assert not outcome.errors, f"rank {rank} {outcome}"
            assert not outcome.value, f"after {times} groups of all ranks, rank {rank} holds more: {outcome.value}"
        return

    def action() -> None:
        for rank, outcome in enumerate(worlds.attempt(_once, 3)):
            assert not outcome.errors, f"rank {rank} {outcome}"

    grown = _repeat(action, 4, times) and _repeat(action, 4, times)  # a leak goes on
    assert not grown, f"after {times} worlds of 3 ranks that are threads of this process, it holds more: {grown}"


def _splits(group: Group, warm: int, times: int) -> str:
    def action() -> None:
        made = group.split(0)
        if made is not None:
            with made:
                _traffic(made)

    return _repeat(action, warm, times, group.barrier)


@check(chapter="leaks")
def check_groups(worlds: WorldMaker) -> None:
    """Groups that were closed hold nothing, though the world goes on."""
    times = 6 if worlds.quick else 30
    found = worlds.run(_splits, 2, patience_s=_PATIENCE_S, warm=4, times=times)
    if any(found):  # a leak goes on
        found = worlds.run(_splits, 2, patience_s=_PATIENCE_S, warm=4, times=times)
    for rank, grown in enumerate(found):
        assert not grown, f"after {times} groups made by split and closed, rank {rank} of 2 holds more: {grown}"


def _calls(group: Group, warm: int, times: int) -> str:
    return _repeat(lambda: _traffic(group), warm, times, group.barrier)


@check(chapter="leaks")
def check_calls(worlds: WorldMaker) -> None:
    """A group that makes many calls does not grow."""
    times = 12 if worlds.quick else 84
    found = worlds.run(_calls, 2, patience_s=_PATIENCE_S, warm=10, times=times)
    if any(found):
        found = worlds.run(_calls, 2, patience_s=_PATIENCE_S, warm=10, times=times)
    for rank, grown in enumerate(found):
        assert not grown, f"after {times} rounds of calls in one group, rank {rank} of 2 holds more: {grown}"


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

    times = 6 if worlds.quick else 18
    grown = _repeat(action, 4, times) and _repeat(action, 4, times)
    assert not grown, f"after {times} worlds of 2 ranks that ended with an error, the process holds more: {grown}"
