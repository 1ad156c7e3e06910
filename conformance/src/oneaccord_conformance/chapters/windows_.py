"""Windows, which core makes of shared memory and of the backend's messages: elements, atomic changes, locks, epochs, and deaths."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.arrays import same
from oneaccord_conformance.ranks import ending, tell
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_LONG = 300_000
"""Elements that go in several requests."""
_ROUNDS = 20


def _made(group: Group, length: int, dtype: str, *, own: bool) -> oa.Window:
    """Make a window of zeros: of an array, whose calls are messages, or of a shape, which ranks of a host reach in memory."""
    return group.window(np.zeros(length, dtype)) if own else group.window(length, dtype)


def _elements(group: Group, *, own: bool) -> None:
    rank, size = group.rank, group.world_size
    right, left = (rank + 1) % size, (rank - 1) % size
    with _made(group, _LONG, "int64", own=own) as win:
        for count in (1, 1000, _LONG - 5):
            win.put(np.arange(count) + rank, right, at=3)
            win.put([-7, -8], right, np.s_[2::-2])
            win.fence()
            expected = np.concatenate(([-8, 0, -7], np.arange(count) + left))
            same(win.local[: count + 3], expected, f"int64[{count}] that was put")
            same(win.get(right, np.s_[3 : count + 3]), np.arange(count) + rank, f"int64[{count}] that was got")
            win.fence()


@check(chapter="windows")
def check_elements(worlds: WorldMaker) -> None:
    """What is put is there after a fence, and what is got is what is there, short and long, also at oneself."""
    for own in (False, True):
        worlds.run(_elements, own=own)
    worlds.run(_elements, 1, own=True)


def _counters(group: Group, *, own: bool) -> list[int]:
    with _made(group, 3, "int64", own=own) as win:
        found = [int(win.fetch_and_op(1, 0, 1)) for _ in range(_ROUNDS)]
        for _ in range(_ROUNDS):
            old = win.fetch_and_op(0, 1, 2)
            while (now := win.compare_and_swap(old, old + 1, 1, 2)) != old:
                old = now
            win.accumulate([1, 2], 1)
        win.fence()
        total = group.world_size * _ROUNDS
        same(win.get(1), np.array([total, 2 * total, total]), "elements that all ranks have changed")
        return found


@check(chapter="windows")
def check_atomic(worlds: WorldMaker) -> None:
    """Atomic changes of all ranks add up, and each returns another number."""
    for own in (False, True):
        found = worlds.run(_counters, own=own)
        numbers = sorted(number for mine in found for number in mine)
        assert numbers == list(range(worlds.ranks * _ROUNDS)), f"fetch_and_op returned {numbers}"
        assert all(mine == sorted(mine) for mine in found), f"fetch_and_op went back: {found}"


def _locks(group: Group, *, own: bool) -> None:
    with _made(group, 2, "int64", own=own) as win:
        for _ in range(_ROUNDS):
            with win.lock(1):
                both = win.get(1)
                win.put(both + np.array([1, 2]), 1)
        win.fence()
        with win.lock_all():
            group.barrier()  # which none would pass that waits for another one's lock
        win.fence()
        total = group.world_size * _ROUNDS
        same(win.get(1), np.array([total, 2 * total]), "elements that all ranks have changed under a lock")


@check(chapter="windows")
def check_locks(worlds: WorldMaker) -> None:
    """An exclusive lock excludes all others, and shared ones are held together."""
    for own in (False, True):
        worlds.run(_locks, own=own)


def _epochs(group: Group, *, own: bool) -> None:
    rank, size = group.rank, group.world_size
    with _made(group, 1000, "float64", own=own) as win:
        for turn in range(5):
            if rank:
                win.post([rank - 1])
                win.wait()
                same(win.local, np.arange(1000.0) + turn, f"what came in epoch {turn}")
            else:
                win.local[:] = np.arange(1000.0) + turn
            if rank + 1 < size:
                win.start([rank + 1])
                win.put(win.local, rank + 1)
                win.complete()


@check(chapter="windows")
def check_epochs(worlds: WorldMaker) -> None:
    """What is put between ``start`` and ``complete`` is there after ``wait``, from rank to rank."""
    for own in (False, True):
        worlds.run(_epochs, own=own)


def _mistakes(group: Group, *, own: bool) -> None:
    with _made(group, 4, "float64", own=own) as win:
        for call in (
            lambda: win.put(1.0, group.world_size),
            lambda: win.put(np.zeros(3), 1, at=2),
            lambda: win.put(np.zeros(3, "f4"), 1),
            lambda: win.get(1, np.s_[2:5]),
            lambda: win.accumulate(1.0, 1, op="mean"),
            lambda: win.unlock(1),
            win.complete,
        ):
            assert "UsageError" in ending(call)["errors"], f"a wrong call ended with {ending(call)['text'] or 'no error'}"
        win.accumulate(1.0, 1)
        win.fence()
        same(win.get(1), np.array([group.world_size, 0.0, 0.0, 0.0]), "a window after wrong calls")


@check(chapter="windows")
def check_mistakes(worlds: WorldMaker) -> None:
    """Wrong arguments are an error of the rank that gives them, and window and group go on."""
    for own in (False, True):
        worlds.run(_mistakes, own=own)


def _computes(group: Group, *, own: bool) -> None:
    with _made(group, 1, "int64", own=own) as win:
        if group.rank == 0:
            for _ in range(5):
                with win.lock(1):
                    win.put(win.get(1, 0) + 1, 1)
            group.send(np.zeros(1), 1)
        elif group.rank == 1:
            while win.local[0] < 5:  # in no call of the group
                oa.sleep(0.01)
            group.recv(0)


@check(chapter="windows", needs="cpu clock")
def check_target_computes(worlds: WorldMaker) -> None:
    """A rank that makes no call is reached all the same."""
    for own in (False, True):
        worlds.run(_computes, 2, own=own)


def _flushes(win: oa.Window) -> None:
    win.put(1.0, 2)
    win.flush(2)


_WAITS: dict[str, Callable[[oa.Window], object]] = {
    "lock": lambda win: win.lock(0),
    "flush": _flushes,
    "fence": lambda win: win.fence(),
}


def _waits_for_the_dead(group: Group, *, own: bool, call: str) -> dict[str, Any]:
    win = _made(group, 4, "float64", own=own)
    if group.rank == 2:
        win.lock(0)
    group.barrier()
    tell("ready")
    if group.rank == 2:
        oa.sleep(2 * patience.LONG_S)

    def calls() -> None:
        while True:  # a flush that comes before the death succeeds
            _WAITS[call](win)

    return ending(calls)


@check(chapter="windows", needs="cpu clock processes")
def check_killed(worlds: WorldMaker) -> None:
    """A rank that is killed while it holds a lock is named to those that wait for the lock, for a flush, or in a fence."""
    cases = [(own, call) for own in (False, True) for call in _WAITS]
    for own, call in [(False, "lock"), (True, "lock")] if worlds.quick else cases:
        with worlds.processes(_waits_for_the_dead, 3, timeout_s=patience.LONG_S, own=own, call=call) as job:
            assert job.told("ready", 3), f"the ranks did not come out of their first barrier\n{job.whereabouts()}"
            since = job.signal(2, signal.SIGKILL)
            for rank, outcome in enumerate(job.outcomes(patience.LONG_S, lost=(2,))):
                if rank == 2:
                    continue
                assert outcome is not None, f"rank {rank} did not return, or ended without a word\n{job.whereabouts()}"
                assert not outcome.errors, f"rank {rank} {outcome}"
                found = outcome.value
                assert ("PeerLostError" in found["errors"], found["peer"]) == (True, 2), (
                    f"in {call} rank {rank} got {found['errors'][:1] or 'no error'} about rank {found['peer']}: {found['text']}"
                )
                late = found["ended"] - since
                assert late < patience.PROMPT_S, f"in {call} rank {rank} learned of it after {late:.1f} s"
