"""Death: every other rank names a rank that is killed, or stopped, in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.processes import ProcessJob
from oneaccord_conformance.ranks import came_late, ending, tell, until_failed
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_STOPPED_S = 1.0


def _waits(group: Group, name: str, victim: int) -> dict[str, Any] | None:
    """The victim does nothing; the others are in a call."""
    other = next(rank for rank in range(group.world_size) if rank not in (group.rank, victim))
    long = np.ones(1 << 20)
    group.barrier()
    tell("ready")
    if name != "in the middle of long calls" and group.rank == victim:
        time.sleep(2 * patience.LONG_S)
        return None

    def forever() -> None:
        while True:
            group.all_reduce(long, out=long, op="max")

    calls: dict[str, Callable[[], object]] = {
        "in a barrier": group.barrier,
        "in recv from it": lambda: group.recv(victim),
        "in recv from another rank": lambda: group.recv(other),
        "in a long send to it": lambda: group.send(np.ones(1 << 22), victim),
        "in no call": lambda: until_failed(group),
        "in the middle of long calls": forever,
    }
    first = ending(calls[name])
    return first if first["errors"] else ending(group.barrier)


def _look(job: ProcessJob, victim: int, since: float, kind: str, what: str) -> None:
    outcomes = job.outcomes(patience.LONG_S, lost=(victim,))
    may_be_named = {victim}
    if kind == "DeadlineError":
        may_be_named |= came_late([None if each is None else each.value for each in outcomes], _STOPPED_S)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome is not None, f"{what}: rank {rank} did not return, or ended without a word\n{job.whereabouts()}"
        assert not outcome.errors, f"{what}: rank {rank} {outcome}"
        found = outcome.value
        assert kind in found["errors"], f"{what}: rank {rank} got {found['errors'][:1] or 'no error'}: {found['text']}"
        assert found["peer"] in may_be_named, f"{what}: rank {rank} got an error about rank {found['peer']}: {found['text']}"
        late = found["ended"] - since
        assert late < patience.PROMPT_S, f"{what}: rank {rank} learned of it after {late:.1f} s"


_KILLED = (
    ("in the middle of long calls", 1),
    ("in a barrier", 0),
    ("in recv from it", 2),
    ("in recv from another rank", 1),
    ("in a long send to it", 2),
    ("in no call", 1),
)


@check(chapter="death", needs="cpu clock processes")
def check_killed(worlds: WorldMaker) -> None:
    """A PeerLostError on every survivor names a killed rank at once, whatever the survivors do."""
    for name, victim in _KILLED[:1] if worlds.quick else _KILLED:
        with worlds.processes(_waits, 3, timeout_s=patience.LONG_S, name=name, victim=victim) as job:
            assert job.told("ready", 3), f"the ranks did not come out of their first barrier\n{job.whereabouts()}"
            since = job.signal(victim, signal.SIGKILL)
            _look(job, victim, since, "PeerLostError", f"rank {victim} of 3 was killed, and the others were {name}")


def _stands_still(group: Group, name: str, victim: int) -> dict[str, Any] | None:
    group.barrier()
    tell("ready")
    if group.rank == victim:
        time.sleep(2 * patience.LONG_S)
        return None
    calls = {
        "barrier": lambda: group.barrier(timeout_s=_STOPPED_S),
        "a long all_reduce": lambda: group.all_reduce(np.ones(1 << 20), timeout_s=_STOPPED_S),
        "recv": lambda: group.recv(victim, timeout_s=_STOPPED_S),
    }
    return ending(calls[name])


@check(chapter="death", needs="cpu clock processes")
def check_stopped(worlds: WorldMaker) -> None:
    """A rank that was stopped is named by a DeadlineError when the time is up."""
    cases = (("a long all_reduce", 1), ("barrier", 0), ("recv", 2))
    for name, victim in cases[:1] if worlds.quick else cases:
        with worlds.processes(_stands_still, 3, timeout_s=patience.LONG_S, name=name, victim=victim) as job:
            assert job.told("ready", 3), f"the ranks did not come out of their first barrier\n{job.whereabouts()}"
            since = job.signal(victim, signal.SIGSTOP)
            what = f"rank {victim} of 3 was stopped, and the others were in {name} with timeout_s={_STOPPED_S}"
            _look(job, victim, since, "DeadlineError", what)


def _gives_up(group: Group) -> dict[str, Any] | None:
    if group.rank == 1:
        group.barrier()
        time.sleep(0.1)  # for the others to be blocked by then
        raise RuntimeError("its program failed")

    def call() -> None:
        group.barrier()  # it may be over on rank 1, and not yet here
        group.recv(1) if group.rank else group.all_reduce(np.ones(1 << 20))

    return ending(call)


@check(chapter="death", needs="cpu clock processes")
def check_error(worlds: WorldMaker) -> None:
    """If the program of a process fails, every other that waits wakes, and learns which."""
    with worlds.processes(_gives_up, 3, timeout_s=patience.LONG_S) as job:
        _look(job, 1, time.monotonic(), "AbortedError", "the program of rank 1 of 3 failed")
