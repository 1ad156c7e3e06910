"""Programs with threads of their own, runs that are broken off, and what a run leaves behind."""

from __future__ import annotations

import _thread
import asyncio
import gc
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.waiting import PATIENCE_S

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(PATIENCE_S)
    assert not [thread for thread in left if thread.is_alive()]


class Mine(Exception):
    """What a program raises."""


# Waiting for what is not of this world.


def test_a_rank_may_wait_for_what_a_callback_sets():
    def program(group: Group) -> float:
        called = threading.Event()
        work = group.all_reduce_async(float(group.rank))
        work.add_done_callback(lambda _: called.set())
        assert called.wait(20)
        return work.wait().item()

    assert simulated.run(program, 4).results == [6.0] * 4


def test_a_rank_may_wait_for_a_pool_of_its_own():
    def program(group: Group) -> float:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda number: number**2, range(10)))
            return group.all_reduce(sum(found) * pool.submit(lambda: group.rank).result()).item()

    assert simulated.run(program, 3).results == [285 * 3] * 3


def test_the_threads_of_a_pool_may_use_the_group():
    def program(group: Group) -> list[float]:
        with ThreadPoolExecutor(1) as pool:
            futures = [pool.submit(group.all_reduce, float(number)) for number in range(5)]
            return [future.result().item() for future in futures]

    assert simulated.run(program, 3).results == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 3


def test_what_a_thread_of_a_rank_calls_stands_in_the_trace_as_that_ranks():
    def program(group: Group) -> None:
        if group.rank == 1:
            thread = threading.Thread(target=group.send, args=(1.0, 0))
            thread.start()
            thread.join()
        elif group.rank == 0:
            group.recv(1)

    trace = simulated.run(program, 3).trace
    assert {(call.rank, call.what) for call in trace.calls} == {(0, "recv from rank 1"), (1, "send to rank 0")}
    assert [trace.messages_sent(rank) for rank in range(3)] == [0, 1, 0]


def test_ranks_and_their_threads_may_hand_things_over_in_queues():
    def program(group: Group) -> list[int]:
        wanted: queue.Queue[int | None] = queue.Queue()
        found: queue.SimpleQueue[int] = queue.SimpleQueue()

        def serve() -> None:
            while (number := wanted.get()) is not None:
                found.put(number * 10 + group.rank)

        server = threading.Thread(target=serve)
        server.start()
        results = []
        for number in range(4):
            wanted.put(number)
            results.append(group.all_reduce(found.get()).item())
        wanted.put(None)
        server.join()
        return results

    assert simulated.run(program, 3).results == [[3, 33, 63, 93]] * 3


def test_ranks_may_hand_things_over_in_a_queue_that_they_share():
    shared: queue.Queue[int] = queue.Queue()

    def program(group: Group) -> int:
        if group.rank == 0:
            return sum(shared.get() for _ in range(2))
        group.compute(float(group.rank))
        shared.put(group.rank)
        return 0

    assert simulated.run(program, 3).results[0] == 3


def ask_with_sleep_0(done: list[object]) -> None:
    while not done:
        oa.sleep(0)


def ask_now_and_then(done: list[object]) -> None:
    while not done:
        time.sleep(0.004)


def ask_an_event(done: list[object]) -> None:
    never = threading.Event()
    while not done:
        never.wait(0.004)


@pytest.mark.parametrize(("ask", "seconds"), [(ask_with_sleep_0, 0.01), (ask_now_and_then, 0.012), (ask_an_event, 0.012)])
def test_a_rank_may_ask_again_and_again_whether_a_callback_has_run(ask, seconds):

    def program(group: Group) -> float:
        if group.rank == 1:
            group.compute(0.01)
            group.send(5.0, 0)
            return 0.0
        done: list[object] = []
        work = group.recv_async(1)
        work.add_done_callback(done.append)
        ask(done)
        return work.wait().item()

    run = simulated.run(program, 2)
    assert run.results == [5.0, 0.0]
    assert run.duration_s == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("pause", [lambda _: oa.sleep(0), lambda group: group.compute(0), lambda _: None])
def test_a_rank_may_ask_a_work_again_and_again(pause):
    def program(group: Group) -> float:
        if group.rank == 1:
            group.compute(0.01)
            group.send(5.0, 0)
            return 0.0
        work = group.recv_async(1)
        while not work.done():
            pause(group)
        return work.wait().item()

    assert simulated.run(program, 2).results == [5.0, 0.0]


def test_a_thread_that_asks_an_event_and_computes_lets_the_clock_go_on():
    def program(group: Group) -> int:
        stop, count = threading.Event(), 0

        def work() -> None:
            nonlocal count
            while not stop.is_set():
                count += 1

        thread = threading.Thread(target=work)
        thread.start()
        group.compute(1.0)
        stop.set()
        thread.join()
        return count

    runs = [simulated.run(program, 2) for _ in range(2)]
    assert runs[0].duration_s == 1.0
    assert runs[0].results == runs[1].results


def test_a_timer_may_come_to_the_rescue():
    def program(group: Group) -> float:
        if group.rank == 0:
            timer = threading.Timer(0.05, group.send, (7.0, 1))
            timer.start()
            timer.join()
            return 0.0
        return group.recv(0).item() if group.rank == 1 else 0.0

    assert simulated.run(program, 3).results == [0.0, 7.0, 0.0]


def test_a_thread_may_wait_for_the_end_of_a_rank():
    joined: list[int] = []
    threads: list[threading.Thread] = []

    def program(group: Group) -> None:
        rank, me = group.rank, threading.current_thread()

        def wait() -> None:
            me.join()
            joined.append(rank)

        thread = threading.Thread(target=wait)
        thread.start()
        threads.append(thread)
        group.barrier()

    simulated.run(program, 3)
    for thread in threads:
        thread.join(20)
    assert sorted(joined) == [0, 1, 2]


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock, threading.Semaphore, threading.Condition])
def test_a_rank_may_hold_a_lock_that_another_one_wants(kind):
    lock = kind()

    def program(group: Group) -> float:
        with lock:
            oa.sleep(1.0)
        lock.acquire()
        oa.sleep(1.0)
        lock.release()
        return group.all_reduce(1.0).item()

    run = simulated.run(program, 3)
    assert run.results == [3.0] * 3
    assert run.duration_s == 6.0


def test_an_event_loop_may_leave_calls_to_other_threads():
    def program(group: Group) -> list[float]:
        async def main() -> list[float]:
            first = asyncio.to_thread(group.all_reduce, 1.0)
            return [(await first).item(), (await asyncio.to_thread(group.all_reduce, 2.0)).item()]

        return asyncio.run(main())

    assert simulated.run(program, 3).results == [[3.0, 6.0]] * 3


def test_an_event_loop_may_sleep_on_the_computers_clock_while_work_waits_for_it():
    def program(group: Group) -> float:
        if group.rank == 1:
            group.recv(0)
            group.send(5.0, 0)
            return 0.0

        async def later() -> None:
            await asyncio.sleep(0.2)
            group.send(1.0, 1)

        async def main() -> float:
            found, _ = await asyncio.gather(group.recv_async(1), later())
            return found.item()

        return asyncio.run(main())

    assert simulated.run(program, 2).results == [5.0, 0.0]


def test_what_a_thread_does_after_its_call_keeps_nobody_waiting():
    """It sleeps on the computer's clock until all ranks have met, which they can only because it is not waited for."""
    met = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 0:

            def beat() -> None:
                group.send(1.0, 1)
                while not met.is_set():
                    time.sleep(0.5)

            threading.Thread(target=beat).start()
        elif group.rank == 1:
            group.recv(0)
        group.barrier()
        met.set()

    simulated.run(program, 3)


def test_no_deadline_passes_while_a_rank_is_about_to_help():
    """The clock could go on to the end of a sleep: that would be after the deadline of the one that is to be helped."""

    def program(group: Group) -> float:
        if group.rank == 0:
            with ThreadPoolExecutor(1) as pool:
                group.send(pool.submit(slow).result(), 1)
        elif group.rank == 1:
            return group.recv(0, timeout_s=60.0).item()
        else:
            oa.sleep(100.0)
        return 0.0

    def slow() -> float:
        time.sleep(0.2)
        return 5.0

    run = simulated.run(program, 3)
    assert run.results == [0.0, 5.0, 0.0]
    assert run.duration_s == 100.0


def test_one_thread_runs_at_a_time_whatever_it_waits_for():
    running: list[int] = []
    worst = 0

    def alone() -> None:
        nonlocal worst
        running.append(threading.get_ident())
        for _ in range(100):
            worst = max(worst, len(running))
            sum(range(1000))  # long enough for the interpreter to pass its lock on
        running.remove(threading.get_ident())

    def program(group: Group) -> None:
        wanted: queue.Queue[int] = queue.Queue()
        thread = threading.Thread(target=lambda: [alone() for _ in iter(wanted.get, 4)])
        thread.start()
        for number in range(5):
            wanted.put(number)
            alone()
            group.all_reduce(1.0)
        thread.join()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        simulated.run(program, 3)
    finally:
        sys.setswitchinterval(interval)
    assert worst == 1


# Failing, and being broken off.


def test_the_exception_of_one_rank_is_the_cause_when_another_waits_for_a_lock():
    never = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 1:
            never.wait()
        elif group.rank == 0:
            raise Mine("the cause")
        group.barrier()

    with pytest.raises(Mine, match="the cause"):
        simulated.run(program, 3)


def test_an_exception_in_a_thread_of_a_rank_is_that_threads(monkeypatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda raised: seen.append(raised.exc_type))

    def program(group: Group) -> float:
        thread = threading.Thread(target=group.send, args=(1, 7))
        thread.start()
        thread.join()
        return group.all_reduce(1.0).item()

    assert simulated.run(program, 3).results == [3.0] * 3
    assert seen == [oa.InvalidRankError] * 3


def test_an_interrupt_ends_the_run_and_all_that_it_began():
    seen: list[str] = []
    ended: list[int] = []

    def program(group: Group) -> None:
        group.barrier_async().add_done_callback(lambda _: None)
        number = 0
        try:
            while True:
                group.all_reduce(np.ones(10))
                number += 1
                if (group.rank, number) == (0, 5):
                    _thread.interrupt_main()
        except Exception as error:
            seen.append(str(error))
        finally:
            ended.append(group.rank)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        simulated.run(program, 3)
    assert set(threading.enumerate()) <= before
    assert sorted(ended) == [0, 1, 2]
    assert seen == []
    assert simulated.run(lambda group: group.all_reduce(1.0).item(), 3).results == [3.0] * 3


def test_a_rank_that_runs_on_when_the_run_is_broken_off_hears_nothing_of_how_the_others_ended():
    seen: list[str] = []

    def program(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            _thread.interrupt_main()
            time.sleep(0.1)
        try:
            group.barrier()
        except Exception as error:
            seen.append(str(error))

    with pytest.raises(KeyboardInterrupt):
        simulated.run(program, 3)
    assert seen == []


def test_an_interrupt_may_come_at_any_moment():
    """It comes at the n-th call of a rank, be the baton on its way just then or not."""
    calls = 0

    def program(group: Group, limit: int) -> None:
        nonlocal calls
        while True:
            group.all_reduce(1.0)
            calls += 1
            if calls == limit:
                signal.raise_signal(signal.SIGINT)

    before = set(threading.enumerate())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for limit in range(1, 11):
            calls = 0
            with pytest.raises(KeyboardInterrupt):
                simulated.run(lambda group, limit=limit: program(group, limit), 4)
            assert set(threading.enumerate()) <= before
    finally:
        sys.setswitchinterval(interval)


# Afterwards.


@pytest.mark.long
def test_hundreds_of_runs_leave_neither_threads_nor_memory():
    def program(group: Group) -> None:
        work = group.all_reduce_async(np.ones(1000))
        work.add_done_callback(lambda _: None)
        with group.split(group.rank % 2) as half:
            half.barrier()
        work.wait()
        if group.rank == 3:
            raise Mine

    def many(count: int) -> tuple[int, int]:
        for seed in range(count):
            simulated.run(program, 4, seed, network="fat-tree", check=False)
        gc.collect()
        return threading.active_count(), len(gc.get_objects())

    threads, objects = many(30)
    threads_after, objects_after = many(130)
    assert threads_after <= threads
    assert objects_after - objects < 130  # less than one for each run


@pytest.mark.parametrize(
    "faults", [None, simulated.Kill(rank=1, operation="barrier")], ids=["that went well", "of a rank that died"]
)
def test_a_group_whose_run_is_over_says_so(faults):
    groups: list[Group] = []

    def program(group: Group) -> None:
        groups.append(group)
        group.barrier()

    simulated.run(program, 2, faults=faults, check=False)
    calls: list[Callable[[Group], object]] = [
        lambda group: group.barrier(),
        lambda group: group.all_reduce_async(1.0),
        lambda group: group.split(0),
        lambda group: group.recv(1 - group.rank),
    ]
    for group in groups:
        for call in calls:
            with pytest.raises(oa.ClosedError, match="closed"):
                call(group)
        group.close()


def test_a_thread_that_lives_on_meets_a_closed_group(monkeypatch):
    seen: list[BaseException] = []
    over = threading.Event()

    def program(group: Group) -> None:
        def later() -> None:
            over.wait(20)
            try:
                group.all_reduce(1.0)
            except oa.OneAccordError as error:
                seen.append(error)

        if group.rank == 0:
            threading.Thread(target=later).start()

    simulated.run(program, 2)
    over.set()
    for _ in range(1000):
        if seen:
            break
        time.sleep(0.01)
    assert [type(error) for error in seen] == [oa.ClosedError]


def test_a_thread_that_waits_when_the_run_ends_is_told(monkeypatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda raised: seen.append(raised.exc_type))
    threads: list[threading.Thread] = []

    def program(group: Group) -> None:
        if group.rank == 0:
            threads.append(threading.Thread(target=group.recv, args=(1,)))
            threads[0].start()
            oa.sleep(1.0)
            raise Mine
        group.barrier()

    with pytest.raises(Mine):
        simulated.run(program, 2)
    threads[0].join(20)
    assert len(seen) == 1
    assert issubclass(seen[0], oa.OneAccordError)
