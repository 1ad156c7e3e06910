"""Windows of real processes, which are killed and stopped, and programs as the chapters on one-sided calls of books have them."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from support.fault_tools import LONG_BEFORE_S, Nursery

import oneaccord as oa
from oneaccord.api import Group

_CALLS = {
    "lock": "win.lock(0)",
    "change": "win.accumulate(1.0, 0)",
    "flush": "win.put(1.0, 2, 1); win.flush(2)",
    "fence": "win.fence()",
}


@pytest.mark.parametrize(
    ("backend", "own", "what", "native"),
    [
        ("shm", False, "lock", True),
        ("shm", True, "lock", True),
        ("tcp", True, "lock", True),
        ("shm", False, "change", True),
        ("tcp", False, "change", False),
        ("shm", False, "fence", True),
        ("shm", True, "flush", True),
        ("tcp", True, "fence", True),
    ],
)
def test_rank_killed_in_its_lock_ends_the_wait_of_others(
    nursery: Nursery, backend: str, own: bool, what: str, native: bool
) -> None:
    program = f"""
with oa.init(config={{"backend": "{backend}", "native": {native}}}, timeout_s=30) as group:
    win = group.window(np.zeros(4) if {own} else 4)
    if rank == 2:
        win.lock(0)
        win.put(1.0, 0)
        win.flush()
        if {"change" in what}:  # in the middle of one
            win._parts.direct._enter(group.ranks[0], "a test", 30)
    group.barrier()
    tell("ready")
    try:
        if rank == 2:
            time.sleep(100)
        while True:  # what comes before the death succeeds
            {_CALLS[what]}
    except oa.PeerLostError as error:
        tell("lost", peer=error.peer, local=win.local.tolist())
"""
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("ready")
        ranks.signal(2, signal.SIGKILL)
        started = time.monotonic()
        facts = ranks.await_facts("lost", 2)
        assert time.monotonic() - started < LONG_BEFORE_S
        assert [fact["peer"] for fact in facts] == [2, 2]
        assert facts[0]["local"] == [1.0, 0, 0, 0]


@pytest.mark.parametrize(("own", "native"), [(False, True), (False, False), (True, True)])
def test_processes_count_and_lock_together(nursery: Nursery, own: bool, native: bool) -> None:
    program = f"""
with oa.init(config={{"backend": "shm", "native": {native} if rank else True}}, timeout_s=30) as group:
    with group.window(np.zeros(2, "int64") if {own} else 2, None if {own} else "int64") as win:
        for _ in range(300):
            win.accumulate(1, 0)
        for _ in range(60):
            with win.lock(0):
                win.put(win.get(0, 1) + 1, 0, 1)
        win.fence()
        tell("has", sums=win.get(0).tolist(), threads=[each.name for each in threading.enumerate()])
"""
    with nursery.ranks(program, 3) as ranks:
        facts = ranks.start().await_facts("has")
        assert [fact["sums"] for fact in facts] == [[900, 180]] * 3
        if not own:  # nobody need serve it
            assert not any("oneaccord-post" in fact["threads"] for fact in facts)


@pytest.mark.parametrize(("backend", "own"), [("shm", False), ("shm", True), ("tcp", True)])
def test_stopped_rank_loses_nothing(nursery: Nursery, backend: str, own: bool) -> None:
    program = f"""
with oa.init("{backend}", timeout_s=60) as group:
    with group.window(np.zeros(3, "int64") if {own} else 3, None if {own} else "int64") as win:
        tell("ready")
        for turn in range(100):
            win.accumulate(1, turn % 3)
            win.fetch_and_op(1, 2, 1)
            with win.lock(2):
                win.put(win.get(2, 2) + 1, 2, 2)
            time.sleep(0.005)
        win.fence()
        tell("has", sums=[win.get(target).tolist() for target in range(3)])
"""
    with nursery.ranks(program, 3) as ranks:
        ranks.start().await_facts("ready")
        for _ in range(3):
            ranks.signal(2, signal.SIGSTOP)
            time.sleep(0.5)
            ranks.signal(2, signal.SIGCONT)
            time.sleep(0.1)
        facts = ranks.await_facts("has")
        assert [fact["sums"] for fact in facts] == [[[102, 0, 0], [99, 0, 0], [99, 300, 300]]] * 3


@pytest.mark.parametrize("own", [False, True], ids=["made", "own"])
def test_queue_of_locks_in_windows_excludes(world, own):
    """The queue of Mellor-Crummey and Scott: element 0 of rank 0 is its end, and each rank has the next one, and whether it waits."""

    def program(group: Group) -> None:
        me = group.rank
        with group.window(np.zeros(4, "int64") if own else 4, "int64") as win:
            for _ in range(6):
                win.put([0, 1], me, 1)
                win.flush(me)
                before = int(win.fetch_and_op(me + 1, 0, 0, "replace"))
                if before:
                    win.fetch_and_op(me + 1, before - 1, 1, "replace")
                    while win.fetch_and_op(0, me, 2):
                        oa.sleep(1e-4)
                win.put(win.get(0, 3) + 1, 0, 3)
                win.flush(0)
                if win.compare_and_swap(me + 1, 0, 0, 0) != me + 1:
                    while not (after := int(win.fetch_and_op(0, me, 1))):
                        oa.sleep(1e-4)
                    win.fetch_and_op(0, after - 1, 2, "replace")
            win.fence()
            assert win.get(0, 3) == 6 * group.world_size

    world(program, 4)


@pytest.mark.parametrize("own", [False, True], ids=["made", "own"])
def test_epochs_of_all_with_all_are_apart(world, own):
    def program(group: Group) -> None:
        me, size = group.rank, group.world_size
        others = [rank for rank in range(size) if rank != me]
        with group.window(np.zeros(size) if own else size) as win:
            for turn in range(4):
                win.post(others)
                win.start(others)
                for other in others:
                    win.put(10.0 * me + turn, other, me)
                win.complete()
                win.wait()
                assert win.local.tolist() == [10.0 * rank + turn if rank != me else 0.0 for rank in range(size)]

    world(program, 4)
