"""Leaks: many groups and worlds leave nothing behind: no socket, no file, no thread, no memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

from manyhands.api import Group
from manyhands_conformance.ranks import join
from manyhands_conformance.registry import check
from manyhands_conformance.worlds import WorldMaker

_SETTLE_S = 5.0
"""How long what ends in the background may take to end."""
_MIB = 1 << 20
_SHARED = Path("/dev/shm")  # noqa: S108 - where segments with names are
_SLACK = 3
"""By how many pieces a process may grow by itself, whatever the number of worlds."""


def _held() -> dict[str, float]:
    """Return what this process holds; where the system does not tell, nothing."""
    gc.collect()
    found: dict[str, float] = {"threads": threading.active_count()}
    descriptors, maps, status = Path("/proc/self/fd"), Path("/proc/self/maps"), Path("/proc/self/status")
    if descriptors.is_dir():
        found["open files and sockets"] = sum(1 for _ in descriptors.iterdir())
    if maps.exists():
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        found["shared memory segments"] = sum(
            line.split()[1].endswith("s") and ("memfd:" in line or str(_SHARED) in line)
            for line in lines
            if len(line.split()) > 1
        )
        memory = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS"))
        found["MiB of memory"] = int(memory.split()[1]) / 1024
    if _SHARED.is_dir():
        found["files in /dev/shm"] = sum(each.owner_is_me for each in map(_Entry, _SHARED.iterdir()))
    return found


class _Entry:
    """A file that may vanish while it is looked at."""

    def __init__(self, path: Path) -> None:
        try:
            self.owner_is_me = path.stat().st_uid == os.getuid()
        except OSError:
            self.owner_is_me = False


def _grown(before: dict[str, float], times: int) -> str:
    """Return in words what has grown with the number of times; an empty text where nothing has, or does no more after a moment."""
    limit = time.monotonic() + _SETTLE_S
    while True:
        after = _held()
        grown = [
            f"{after[what] - held:.0f} {what}"
            for what, held in before.items()
            if after[what] - held > (max(times, 16) if "MiB" in what else min(_SLACK, times / 2))
        ]
        if not grown or time.monotonic() > limit:
            return ", ".join(grown)
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
    _traffic(group)
    group.close()
    before: dict[str, float] = {}
    for number in range(warm + times):
        if number == warm:
            before = _held()
        with join() as own:
            _traffic(own)
    return _grown(before, times)


def _once(group: Group) -> None:
    _traffic(group)
    half = group.split(group.rank % 2)
    if half is not None:
        with half:
            _traffic(half)


@check(chapter="leaks")
def check_worlds(worlds: WorldMaker) -> None:
    """Worlds that were left hold no sockets, files, threads, segments or memory."""
    times = 8 if worlds.quick else 24
    if not worlds.has_threads:
        for rank, outcome in enumerate(worlds.attempt(_joins, 2, warm=3, times=times)):
            assert not outcome.errors, f"rank {rank} {outcome}"
            assert not outcome.value, f"after {times} groups of all ranks, rank {rank} holds more: {outcome.value}"
        return
    before: dict[str, float] = {}
    for number in range(4 + times):
        if number == 4:
            before = _held()
        for rank, outcome in enumerate(worlds.attempt(_once, 3)):
            assert not outcome.errors, f"rank {rank} {outcome}"
    grown = _grown(before, times)
    assert not grown, f"after {times} worlds of 3 ranks that are threads of this process, it holds more: {grown}"


def _splits(group: Group, warm: int, times: int) -> str:
    before: dict[str, float] = {}
    for number in range(warm + times):
        if number == warm:
            group.barrier()
            before = _held()
            group.barrier()
        made = group.split(0)
        if made is not None:
            with made:
                _traffic(made)
    group.barrier()
    grown = _grown(before, times)
    group.barrier()
    return grown


@check(chapter="leaks")
def check_groups(worlds: WorldMaker) -> None:
    """Groups that were closed hold nothing, though the world goes on."""
    times = 10 if worlds.quick else 30
    for rank, grown in enumerate(worlds.run(_splits, 2, warm=4, times=times)):
        assert not grown, f"after {times} groups made by split and closed, rank {rank} of 2 holds more: {grown}"


def _calls(group: Group, warm: int, times: int) -> str:
    before: dict[str, float] = {}
    for number in range(warm + times):
        if number == warm:
            group.barrier()
            before = _held()
            group.barrier()
        _traffic(group)
    group.barrier()
    grown = _grown(before, times)
    group.barrier()
    return grown


@check(chapter="leaks")
def check_calls(worlds: WorldMaker) -> None:
    """A group that makes many calls does not grow."""
    times = 20 if worlds.quick else 80
    for rank, grown in enumerate(worlds.run(_calls, 2, warm=10, times=times)):
        assert not grown, f"after {times} rounds of calls in one group, rank {rank} of 2 holds more: {grown}"


def _fails(group: Group) -> None:
    _traffic(group)
    if group.rank == 1:
        raise RuntimeError("its program failed")
    group.recv(1)


@check(chapter="leaks")
def check_failures(worlds: WorldMaker) -> None:
    """Worlds that failed hold nothing either."""
    if not worlds.has_threads:
        return  # their processes have ended
    times = 5 if worlds.quick else 15
    before: dict[str, float] = {}
    for number in range(4 + times):
        if number == 4:
            before = _held()
        outcomes = worlds.attempt(_fails, 2)
        assert "CommError" in outcomes[0].errors, f"rank 0 {outcomes[0]}"
    grown = _grown(before, times)
    assert not grown, f"after {times} worlds of 2 ranks that ended with an error, the process holds more: {grown}"
