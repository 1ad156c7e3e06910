"""Threads of a program that outlive a run, or were there before it, and what a run does not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group
from oneaccord_simulated import primitives

PATIENCE_S = 60


@contextmanager
def started(body: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run a thread that no world knows, and wait for its end."""
    thread = threading.Thread(target=body, name="early")
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)


def computed() -> int:
    """Return 3, after a while of the computer's."""
    return 3 + 0 * sum(range(200_000))


def test_a_pool_that_earlier_runs_have_used_serves_the_next_ones_as_fast_as_it_can():
    with ThreadPoolExecutor(2) as pool:

        def program(group: Group) -> int:
            jobs = [pool.submit(computed) for _ in range(3)]
            return group.all_reduce(sum(job.result(timeout=5.0) for job in jobs)).item()

        runs = [simulated.run(program, 2, seed=5) for _ in range(4)]
        assert [run.results for run in runs] == [[18, 18]] * 4
        assert [run.duration_s for run in runs] == [0.0] * 4
        assert runs[2].trace_json() == runs[1].trace_json() == runs[3].trace_json()
        assert pool.submit(computed).result(PATIENCE_S) == 3  # and so it does between runs


def test_a_pool_of_an_earlier_run_may_be_shut_down_in_a_later_one():
    pools: list[ThreadPoolExecutor] = []

    def begin(group: Group) -> int:
        if group.rank == 0:
            pools.append(ThreadPoolExecutor(2))
            assert pools[0].submit(computed).result() == 3
        return group.all_reduce(1).item()

    def end(group: Group) -> int:
        if group.rank == 1:
            pools[0].shutdown()
        return group.all_reduce(1).item()

    assert simulated.run(begin, 2).results == [2, 2]
    assert simulated.run(end, 2).results == [2, 2]


def test_timeout_of_a_wait_that_a_later_run_takes_over_is_virtual_there():
    """What is left of it when the first run ends is left when the second one begins."""
    never, told = threading.Event(), Future[float]()

    def wait() -> None:
        assert not never.wait(10_000.0)
        told.set_result(0.0)

    def begin(group: Group) -> None:
        threading.Thread(target=wait).start()
        group.compute(4_000.0)

    def end(_: Group) -> None:
        told.result()

    simulated.run(begin, 1)
    assert simulated.run(end, 1).duration_s == 6_000.0


def test_thread_of_an_earlier_run_may_sleep_and_go_outside_in_a_later_one():
    with ThreadPoolExecutor(1) as pool:

        def rest(seconds: float) -> str:
            oa.sleep(seconds)
            with oa.outside():
                return "slept"

        def program(group: Group) -> str:
            return pool.submit(rest, 1000.0).result()

        runs = [simulated.run(program, 1) for _ in range(2)]
    assert [(run.results, run.duration_s) for run in runs] == [(["slept"], 1000.0)] * 2


@pytest.mark.parametrize("way", ["sleep", "compute", "asks", "outside"])
def test_no_run_waits_for_what_a_thread_of_the_program_does_by_itself(way: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # a group that is closed is an error
    over = threading.Event()
    threads: list[threading.Thread] = []

    def program(group: Group) -> int:
        def linger() -> None:
            if way == "outside":
                with oa.outside():
                    over.wait(PATIENCE_S)
            while not over.is_set():
                if way == "sleep":
                    oa.sleep(0.01)
                if way == "compute":
                    group.compute(0.01)

        threads.append(threading.Thread(target=linger))
        threads[-1].start()
        return group.all_reduce(1).item()

    run = simulated.run(program, 2)
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert run.results == [2, 2]


def nap(seconds: float) -> None:
    """Sleep by the name that a world replaces."""
    time.sleep(seconds)


@pytest.mark.parametrize("wait", [nap, oa.sleep, threading.Event().wait], ids=["nap", "sleep", "event"])
def test_threads_of_a_killed_rank_are_dead_for_good(wait: Callable[[float], object]):
    went_on: list[str] = []
    threads: list[threading.Thread] = []

    def late() -> None:
        wait(1.2)
        went_on.append("a thread of the killed rank went on")

    def program(group: Group) -> None:
        if group.rank == 1:
            threads.append(threading.Thread(target=late))
            threads[-1].start()
        group.compute(5.0)

    simulated.run(program, 2, faults=simulated.Kill(rank=1, at_s=1.0), check=False)
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()
    assert not went_on


class Counted:
    """A lock of a program's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize("lock", [Counted, threading.Lock, threading.RLock])
def test_a_condition_waits_with_any_lock(lock: Callable[[], threading.Lock]):
    def program(group: Group) -> int:
        condition = threading.Condition(lock())
        with condition:
            assert not condition.wait(1.0)
            assert not condition.wait(0)
        return group.all_reduce(1).item()

    run = simulated.run(program, 2)
    assert run.results == [2, 2]
    assert run.duration_s == 1.0


@pytest.mark.parametrize("lock", [threading.Lock, threading.RLock])
def test_a_condition_made_before_the_run_is_taken_and_freed_by_its_methods(lock: Callable[[], threading.Lock]):
    condition = threading.Condition(lock())

    def program(group: Group) -> int:
        condition.acquire()
        try:
            group.compute(1.0)
        finally:
            condition.release()
        return group.all_reduce(1).item()

    run = simulated.run(program, 3)
    assert run.results == [3, 3, 3]
    assert run.duration_s == 3.0
    assert not {"acquire", "release"} & set(vars(threading.Condition))


def test_a_thread_may_ask_again_and_again_with_a_timeout_of_none():
    def program(group: Group) -> int:
        event = threading.Event()
        threading.Thread(target=event.set).start()
        while not event.wait(0):
            pass
        return group.all_reduce(1).item()

    assert simulated.run(program, 2).results == [2, 2]


def test_others_run_while_a_rank_waits_for_long_for_a_lock_of_no_world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(primitives, "_WITH_TURN_S", 0.01)
    lock, is_held, may_free = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            assert may_free.wait(PATIENCE_S)

    def program(group: Group) -> int:
        if group.rank == 0:
            with lock:
                pass
        else:
            may_free.set()
        return group.all_reduce(1, timeout_s=1.0).item()

    with started(hold):
        assert is_held.wait(PATIENCE_S)
        runs = [simulated.run(program, 2, seed) for seed in (0, 1)]
    assert [(run.results, run.duration_s) for run in runs] == [([2, 2], 0.0)] * 2


def test_what_a_test_has_put_in_the_place_of_sleep_stays():
    def program(_: Group) -> None:
        time.sleep(5.0)

    with mock.patch("time.sleep") as sleep:
        assert simulated.run(program, 2).duration_s == 0.0
    assert sleep.call_args_list == [mock.call(5.0)] * 2
    assert simulated.run(program, 2).duration_s == 5.0


@pytest.mark.alone  # other tests may have left threads that run as well
def test_a_deadlock_names_threads_that_were_there_before():
    answer, may_end = Future[int](), threading.Event()

    def program(_: Group) -> int:
        return answer.result()

    with started(lambda: may_end.wait(PATIENCE_S)):
        try:
            with pytest.raises(oa.DeadlockError, match=r"no part of it: early\. .* `with oneaccord\.outside\(\):`"):
                simulated.run(program, 2)
        finally:
            may_end.set()
