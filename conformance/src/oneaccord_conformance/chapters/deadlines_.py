"""Deadlines: a call ends in time, and names the late rank."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.ranks import came_late, ending, until_failed
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_TIMEOUT_S = 0.5
_LATE_S = 0.5
"""The delay of a rank that comes in time: core has looked at a wait by then, and begun it again, because its messages do not move."""
_SOME = 3


def _late(group: Group, name: str) -> dict[str, Any]:
    """The last rank does not come; the others make a call with a deadline."""
    rank, size, absent = group.rank, group.world_size, group.world_size - 1
    x, long = np.ones(3), np.ones(3 << 18)
    calls = {
        "all_reduce": lambda: group.all_reduce(x, timeout_s=_TIMEOUT_S),
        "a long all_reduce": lambda: group.all_reduce(long, timeout_s=_TIMEOUT_S),
        "barrier": lambda: group.barrier(timeout_s=_TIMEOUT_S),
        "recv": lambda: group.recv(absent, timeout_s=_TIMEOUT_S),
        "a long send": lambda: group.send(np.ones(1 << 22), absent, timeout_s=_TIMEOUT_S),
        "broadcast from it": lambda: group.broadcast(x, absent, timeout_s=_TIMEOUT_S),
        "a long broadcast from it": lambda: group.broadcast(long, absent, timeout_s=_TIMEOUT_S),
        "all_gather": lambda: group.all_gather(x, timeout_s=_TIMEOUT_S),
        "all_to_all": lambda: group.all_to_all(x, timeout_s=_TIMEOUT_S),
        "a long all_to_all": lambda: group.all_to_all(long, timeout_s=_TIMEOUT_S),
        "reduce_scatter": lambda: group.reduce_scatter(x, timeout_s=_TIMEOUT_S),
        "gather on rank 1": lambda: group.gather(x, 1, timeout_s=_TIMEOUT_S),
        "scan": lambda: group.scan(x, timeout_s=_TIMEOUT_S),
        "all_reduce_async": lambda: group.all_reduce_async(x, timeout_s=_TIMEOUT_S).wait(),
        "sendrecv": lambda: group.sendrecv(long, (rank + 1) % size, (rank - 1) % size, timeout_s=_TIMEOUT_S),
        "split": lambda: group.split(0, timeout_s=_TIMEOUT_S),
    }
    group.barrier()
    if rank == absent:
        until_failed(group)
        return ending(group.barrier)
    first = ending(calls[name])  # one that does not need that rank may end well
    return first if first["errors"] else ending(lambda: group.barrier(timeout_s=_TIMEOUT_S))


_CALLS = (
    "barrier",
    "recv",
    "a long all_reduce",
    "all_reduce",
    "a long send",
    "broadcast from it",
    "a long broadcast from it",
    "all_gather",
    "all_to_all",
    "a long all_to_all",
    "reduce_scatter",
    "gather on rank 1",
    "scan",
    "all_reduce_async",
    "sendrecv",
    "split",
)


@check(chapter="deadlines", needs="cpu clock")
def check_late_rank(worlds: WorldMaker) -> None:
    """If a rank does not come, every call ends at its deadline with a DeadlineError that names it, on every rank."""
    names = _CALLS[:_SOME] if worlds.quick or not worlds.has_threads else _CALLS
    for name, outcomes in zip(
        names, worlds.attempts(_late, [{"name": name} for name in names], 3, timeout_s=patience.LONG_S), strict=True
    ):
        late = {2} | came_late([outcome.value for outcome in outcomes[:2]], _TIMEOUT_S)
        for rank, outcome in enumerate(outcomes):
            what = f"{name} with timeout_s={_TIMEOUT_S}, and rank 2 does not come: rank {rank}"
            assert not outcome.errors, f"{what} {outcome}"
            found = outcome.value
            assert "DeadlineError" in found["errors"], f"{what} got {found['errors'][:1] or 'no error'}: {found['text']}"
            assert found["peer"] in late, f"{what} got an error about rank {found['peer']}: {found['text']}"
            if rank != 2:
                assert found["took_s"] < _TIMEOUT_S + patience.PROMPT_S, f"{what} ended after {found['took_s']:.2f} s"
        # The later of two ranks ends with the other, at the deadline of the first.
        first = max(outcome.value["took_s"] for outcome in outcomes[:2])
        assert first >= _TIMEOUT_S - 0.1, (
            f"{name} with timeout_s={_TIMEOUT_S}, and rank 2 does not come: all ended after {first:.2f} s"
        )


def _in_time(group: Group) -> list[float]:
    """Return when this rank came to a call, and when it left it."""
    group.barrier()
    if group.rank == 1:
        oa.sleep(_LATE_S)
    came = time.monotonic()
    assert group.all_reduce(np.ones(2)).tolist() == [group.world_size] * 2
    left = time.monotonic()
    group.sendrecv(np.ones(1000), (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size)
    return [came, left]


@check(chapter="deadlines")
def check_rank_in_time(worlds: WorldMaker) -> None:
    """A rank that comes late, but in time, is waited for."""
    (_, left), (came, _), _ = worlds.run(_in_time, 3)
    assert left >= came, f"rank 0 did not wait for rank 1, which came {came - left:.2f} s later"


def _not_late(group: Group, times: int) -> None:
    for number in range(times):
        assert group.all_reduce(np.full(2, number), timeout_s=patience.TIMEOUT_S).tolist() == [group.world_size * number] * 2
        group.barrier(timeout_s=patience.TIMEOUT_S)


@check(chapter="deadlines")
def check_in_time(worlds: WorldMaker) -> None:
    """A deadline that is not missed has no effect."""
    worlds.run(_not_late, times=100)
