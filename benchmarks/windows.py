"""What one-sided calls cost, next to mpi4py: rank 0 makes each call in turn with each library, in the same processes, and the median and the best of all rounds.

    mpirun -n 2 python benchmarks/windows.py [--rounds 30] [--calls 400] [--backends shm,tcp] [--own]

Windows are made from shapes, or with ``--own`` from arrays, whose calls are messages. Rank 1 is in a barrier of MPI meanwhile, but for fences.
It needs mpi4py, an MPI, and oneaccord with the named backends in one environment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]

import oneaccord as oa
from oneaccord.api import Group

_LENGTH = 1 << 17
_LONG = 1 << 16
_TOGETHER = "fence"
_OTHER = 1
Calls = dict[str, Callable[[], object]]


def _ours(win: oa.Window, counts: oa.Window) -> Calls:
    x, long, one = np.zeros(1), np.zeros(_LONG // 8), np.ones(1, np.int64)
    out, old, old_float = np.zeros(1), np.zeros(1, np.int64), np.zeros(1)
    places = iter(range(1 << 60))

    def put() -> None:
        win.put(x, _OTHER)
        win.flush(_OTHER)

    def put_anywhere() -> None:
        win.put(x, _OTHER, next(places) * 97 % _LENGTH)
        win.flush(_OTHER)

    def put_long() -> None:
        win.put(long, _OTHER)
        win.flush(_OTHER)

    def get() -> None:
        win.get(_OTHER, 0, out=out)

    def accumulate() -> None:
        win.accumulate(x, _OTHER)
        win.flush(_OTHER)

    def lock() -> None:
        with counts.lock(_OTHER):
            counts.put(one, _OTHER)

    return {
        "put + flush": put,
        "put + flush, moving": put_anywhere,
        "put + flush, 64 KiB": put_long,
        "get": get,
        "accumulate + flush": accumulate,
        "fetch_and_op": lambda: counts.fetch_and_op(one, _OTHER, out=old),
        "fetch_and_op, float": lambda: win.fetch_and_op(x, _OTHER, out=old_float),
        "fetch_and_op(1)": lambda: counts.fetch_and_op(1, _OTHER),
        "compare_and_swap": lambda: counts.compare_and_swap(one, one, _OTHER, out=old),
        "lock + put + unlock": lock,
        _TOGETHER: win.fence,
    }


def _theirs(win: MPI.Win, counts: MPI.Win, fenced: MPI.Win, locked: MPI.Win) -> Calls:
    x, long, one = np.zeros(1), np.zeros(_LONG // 8), np.ones(1, np.int64)
    out, old, old_float = np.zeros(1), np.zeros(1, np.int64), np.zeros(1)
    places = iter(range(1 << 60))

    def put() -> None:
        win.Put(x, _OTHER)
        win.Flush(_OTHER)

    def put_anywhere() -> None:
        win.Put(x, _OTHER, next(places) * 97 % _LENGTH)
        win.Flush(_OTHER)

    def put_long() -> None:
        win.Put(long, _OTHER)
        win.Flush(_OTHER)

    def get() -> None:
        win.Get(out, _OTHER)
        win.Flush(_OTHER)

    def accumulate() -> None:
        win.Accumulate(x, _OTHER)
        win.Flush(_OTHER)

    def fetch() -> None:
        counts.Fetch_and_op(one, old, _OTHER)
        counts.Flush(_OTHER)

    def fetch_float() -> None:
        win.Fetch_and_op(x, old_float, _OTHER)
        win.Flush(_OTHER)

    def swap() -> None:
        counts.Compare_and_swap(one, one, old, _OTHER)
        counts.Flush(_OTHER)

    def lock() -> None:
        locked.Lock(_OTHER)
        locked.Put(one, _OTHER)
        locked.Unlock(_OTHER)

    return {
        "put + flush": put,
        "put + flush, moving": put_anywhere,
        "put + flush, 64 KiB": put_long,
        "get": get,
        "accumulate + flush": accumulate,
        "fetch_and_op": fetch,
        "fetch_and_op, float": fetch_float,
        "fetch_and_op(1)": fetch,
        "compare_and_swap": swap,
        "lock + put + unlock": lock,
        _TOGETHER: fenced.Fence,
    }


def _made(group: Group, *, own: bool) -> tuple[oa.Window, oa.Window]:
    if own:
        return group.window(np.zeros(_LENGTH)), group.window(np.zeros(_LENGTH, np.int64))
    return group.window(_LENGTH), group.window(_LENGTH, "int64")


def _measure(kind: str, columns: dict[str, Calls], rounds: int, count: int) -> None:
    world = MPI.COMM_WORLD
    took: dict[str, list[float]] = {name: [] for name in columns}
    for turn in range(rounds):
        for name, calls in columns.items():
            world.Barrier()
            if world.rank == 0 or kind == _TOGETHER:
                call = calls[kind]
                for _ in range(5):
                    call()
                started = time.perf_counter()
                for _ in range(count):
                    call()
                if turn:
                    took[name].append((time.perf_counter() - started) / count)
            world.Barrier()
    if world.rank == 0:
        for about, of in (("median", statistics.median), ("best", min)):
            found = {name: of(each) * 1e6 for name, each in took.items()}
            words = [f"{name} {us:8.2f} us ({us / found['mpi4py']:6.2f})" for name, us in found.items()]
            print(f"{kind:20} {about:6}", "   ".join(words), flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--backends", default="shm,tcp")
    parser.add_argument("--own", action="store_true")
    given = parser.parse_args()
    world = MPI.COMM_WORLD
    groups = {name: oa.init(name) for name in given.backends.split(",")}
    windows = {name: _made(group, own=given.own) for name, group in groups.items()}
    theirs = [MPI.Win.Allocate(8 * _LENGTH, 8, comm=world) for _ in range(4)]
    for win in theirs[:2]:
        win.Lock_all()
    columns = {name: _ours(*two) for name, two in windows.items()} | {"mpi4py": _theirs(*theirs)}
    for kind in columns["mpi4py"]:
        _measure(kind, columns, given.rounds, given.calls)
    for win in theirs[:2]:
        win.Unlock_all()
    for win in theirs:
        win.Free()
    for two in windows.values():
        for window in two:
            window.close()
    for group in reversed(groups.values()):
        group.close()


main()
