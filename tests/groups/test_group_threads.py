"""One group in the hands of several threads of a rank."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.waiting import PATIENCE_S, until
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group


def in_threads(*functions: Callable[[], object]) -> list[object]:
    """Call all functions at once, each in a thread, and return what they return."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(30) for future in [pool.submit(function) for function in functions]]


def test_threads_that_send_to_one_peer_take_turns(world):
    """Whole arrays arrive, each once; those of one thread in their order."""

    def program(group: Group) -> None:
        if group.rank == 0:
            in_threads(*[lambda t=t: [group.send(np.full(30_000, 1000 * t + n), 1) for n in range(20)] for t in range(4)])
        else:
            received = [group.recv(0) for _ in range(80)]
            assert all((array == array[0]).all() for array in received)
            numbers = [int(array[0]) for array in received]
            assert sorted(numbers) == sorted(1000 * t + n for t in range(4) for n in range(20))
            for t in range(4):
                mine = [number for number in numbers if number // 1000 == t]
                assert mine == sorted(mine)

    world(program, 2)


def test_same_collectives_from_several_threads_take_turns(world):
    """Which thread's call meets which does not matter where all make the same: each gets one whole result."""

    def program(group: Group) -> None:
        results = in_threads(*[lambda: [group.all_reduce(np.ones(2000)) for _ in range(10)] for _ in range(4)])
        assert all((result == 3).all() for part in results for result in part)

    world(program, 3)


def test_a_call_that_waits_for_another_thread_in_vain_says_so_and_sends_nothing(world):
    busy, refused = threading.Event(), threading.Event()

    def exchange(group: Group) -> None:
        assert group.sendrecv(1, 1, 1).item() == 2

    def interfere(group: Group) -> None:
        assert busy.wait(PATIENCE_S)
        for call in (lambda: group.send(3, 1, timeout_s=0.02), lambda: group.recv(1, timeout_s=0.02)):
            with pytest.raises(oa.DeadlineError, match=r"another call of rank 0 .* rank 1; nothing was sent") as caught:
                call()
            assert (caught.value.rank, caught.value.peer) == (0, 1)
        refused.set()

    def program(group: Group) -> None:
        if group.rank == 0:
            in_threads(lambda: exchange(group), lambda: interfere(group))
        else:
            # What has come shows that the other rank's first thread is in its call, and has both directions.
            assert group.recv(0).item() == 1
            busy.set()
            assert refused.wait(PATIENCE_S)
            group.send(2, 0)
        assert group.all_reduce(1).item() == 2

    world(program, 2)


def test_a_world_of_threads_keeps_no_group_that_was_closed():
    def again(group):
        made = []
        group.close()
        for _ in range(3):
            with oa.init(config={}, timeout_s=20) as later:
                made += [weakref.ref(later), weakref.ref(later.backend())]
        del later

        def is_gone() -> bool:  # another thread may collect, or end
            gc.collect()
            return all(each() is None for each in made)

        until(is_gone)

    must(thread_world(again, 2, "tcp"))
