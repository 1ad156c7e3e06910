"""What the world does while ranks do something that is not of it, and what threads of the program do in it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing.pool
import os
import queue
import subprocess
import sys
import threading
import time
from time import sleep

import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group


def test_the_clock_stands_while_a_rank_is_outside():
    """The others run meanwhile; none of their deadlines passes."""
    ran: list[str] = []
    others = threading.Event()

    def program(group: Group) -> int:
        if group.rank == 0:
            with oa.outside():
                assert others.wait(30)  # a wait on the computer's clock
                time.sleep(0.1)
                ran.append("came back")
        elif group.rank == 1:
            others.set()
            group.compute(0.5)
            ran.append("computed")
        return group.all_reduce(group.rank, timeout_s=1.0).item()

    run = simulated.run(program, 3)
    assert run.results == [3, 3, 3]
    assert run.duration_s == 0.5
    assert ran == ["came back", "computed"]


def test_a_rank_that_computes_keeps_its_turn_and_passes_no_time():
    def program(group: Group) -> int:
        if group.rank == 0:
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
        return group.all_reduce(group.rank, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [1, 1]
    assert run.duration_s == 0.0


@pytest.mark.parametrize(
    "nap",
    [
        lambda seconds: time.sleep(seconds),  # noqa: PLW0108 - it is looked up when it is called
        lambda seconds: sleep(seconds),  # noqa: PLW0108 - likewise
        lambda seconds: threading.Event().wait(seconds),
        lambda seconds: asyncio.run(asyncio.sleep(seconds)),
    ],
    ids=["sleep", "sleep by another name", "event", "asyncio"],
)
def test_naps_and_timeouts_of_python_pass_virtual_time(nap):
    """A million seconds: no computer waits that long."""

    def program(group: Group) -> float:
        if group.rank == 0:
            nap(1e6)
        return group.all_reduce(1.0, timeout_s=2e6).item()

    run = simulated.run(program, 2)
    assert run.results == [2.0, 2.0]
    assert run.duration_s == 1e6


def test_timeouts_of_queues_and_futures_pass_virtual_time():
    def program(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(queue.Empty):
                queue.Queue().get(timeout=100.0)
            with pytest.raises(queue.Empty):
                queue.SimpleQueue().get(timeout=100.0)
            with pytest.raises(TimeoutError):
                concurrent.futures.Future().result(timeout=100.0)
            assert not threading.Semaphore(0).acquire(timeout=100.0)
            condition = threading.Condition()
            with condition:
                assert not condition.wait_for(lambda: False, timeout=100.0)
            with pytest.raises(TimeoutError):
                list(concurrent.futures.as_completed([concurrent.futures.Future()], timeout=100.0))

    assert simulated.run(program, 2).duration_s == pytest.approx(600.0)


def test_nothing_of_the_world_can_be_used_outside():
    def program(group: Group) -> None:
        with oa.outside(), oa.outside():
            group.barrier()

    with pytest.raises(oa.UsageError, match=r"^this thread is in oneaccord\.outside\(\)"):
        simulated.run(program, 2)


def test_outside_does_nothing_in_an_ordinary_program():
    with oa.outside():
        pass


def test_a_program_is_waited_for_outside():
    def program(group: Group) -> int:
        with oa.outside():
            done = subprocess.run(
                [sys.executable, "-c", f"print({group.rank} + 1)"], capture_output=True, text=True, check=True
            )
        return group.all_reduce(int(done.stdout), timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [3, 3]
    assert run.duration_s == 0.0


def test_an_event_loop_waits_for_another_program_and_the_clock_stands():
    async def lines() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(0.2); print(6)", stdout=asyncio.subprocess.PIPE
        )
        found, _ = await process.communicate()
        return found

    def program(group: Group) -> int:
        found = int(asyncio.run(lines())) if group.rank == 0 else 0
        return group.all_reduce(found, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [6, 6]
    assert run.duration_s == 0.0


def test_a_condition_made_before_the_world_may_be_shared():
    """Its last step takes a lock in C that the one who told holds, in a call."""
    condition = threading.Condition()

    def program(group: Group) -> int:
        if group.rank == 1:
            with condition:
                assert condition.wait(1e6)
                return 1
        group.compute(1.0)
        with condition:
            condition.notify()
            group.compute(2.0)
        return 0

    run = simulated.run(program, 2)
    assert run.results == [0, 1]
    assert run.duration_s == 3.0


def test_a_lock_that_a_thread_of_no_world_holds_is_waited_for():
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(0.3)

    other = threading.Thread(target=hold)
    other.start()
    assert is_held.wait(30)

    def program(group: Group) -> float:
        if group.rank == 0:
            with lock:
                pass
        return group.all_reduce(1.0, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    other.join(30)
    assert run.results == [2.0, 2.0]
    assert run.duration_s == 0.0


def test_a_rank_killed_while_it_waits_for_its_thread_does_not_come_back():
    came_back: list[str] = []

    def program(group: Group) -> str:
        if group.rank == 1:
            thread = threading.Thread(target=time.sleep, args=(3.0,))
            thread.start()
            thread.join()
            came_back.append("came back")
            return "returned"
        group.compute(5.0)
        with pytest.raises(oa.PeerLostError):
            group.barrier()
        return "survived"

    run = simulated.run(program, 2, faults=simulated.Kill(rank=1, at_s=1.0), check=False)
    assert run.results == ["survived", None]
    assert not came_back
    assert [mark.kind for mark in run.trace.marks if mark.rank == 1] == ["killed"]


def test_all_threads_that_outlive_a_run_wait_as_in_any_program():
    served: list[int] = []
    wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads: list[threading.Thread] = []

    def serve() -> None:
        served.extend(iter(wanted.get, 0))

    def program(group: Group) -> None:
        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        group.barrier()

    simulated.run(program, 2)
    for number in (1, 2, 0, 0):
        wanted.put(number)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(served) == [1, 2]


def test_what_a_thread_of_the_program_computes_is_its_ranks():
    def program(group: Group) -> None:
        def compute() -> None:
            group.compute(2.0)
            group.mark("computed")

        if group.rank == 1:
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
        group.barrier()

    run = simulated.run(program, 3, faults=simulated.Slow(rank=1, factor=2.0))
    assert run.duration_s == 4.0
    assert [call.rank for call in run.trace.calls if call.operation == "compute"] == [1]
    assert [mark.rank for mark in run.trace.marks if mark.label == "computed"] == [1]
    assert run.trace_json()


@pytest.mark.parametrize("call", [lambda group: group.compute(1.0), lambda group: group.mark("x")])
def test_a_rank_may_not_compute_for_another_one(call):
    groups: dict[int, Group] = {}

    def program(group: Group) -> None:
        groups[group.rank] = group
        group.barrier()
        if group.rank == 0:
            call(groups[1])
        group.barrier()

    with pytest.raises(oa.UsageError, match=r"^rank 0 uses the group of rank 1"):
        simulated.run(program, 2)


def test_a_mark_is_a_text():
    with pytest.raises(oa.UsageError, match=r"^the label of a mark must be a text, not 7"):
        simulated.run(lambda group: group.mark(7), 2)


def test_to_compute_for_no_time_passes_none():
    def program(group: Group) -> float:
        if group.rank == 1:
            group.compute(5.0)
            return 0.0
        for _ in range(10):
            group.compute(0)
        group.mark("done")
        return 0.0

    run = simulated.run(program, 2)
    assert [mark.time_s for mark in run.trace.marks if mark.label == "done"] == [0.0]


def test_a_deadlock_report_tells_who_is_in_init_and_who_is_not():
    def program(group: Group) -> None:
        if group.rank == 0:
            with oa.init("simulated", config={}) as second:
                second.barrier()
        else:
            group.recv_async(0).wait()

    with pytest.raises(oa.DeadlockError) as caught:
        simulated.run(program, 2)
    headline, first, second = str(caught.value).splitlines()[:3]
    assert headline == "deadlock: no rank can go on: rank 1 waits for rank 0, which is in init"
    assert first.startswith("  rank 0: in init at ")
    assert second.startswith("  rank 1: waiting at ")


def test_a_wait_that_has_ended_sets_no_alarm_for_those_that_ask():
    def program(group: Group) -> list[float]:
        come = threading.Event()
        threading.Thread(target=come.set).start()
        assert come.wait(20.0)
        if group.rank == 0:
            work = group.recv_async(1)
            assert not any(work.done() for _ in range(50))
            group.send(1.0, 1)
            return [work.wait().item()]
        group.recv(0, timeout_s=10.0)
        group.send(2.0, 0)
        return []

    run = simulated.run(program, 2)
    assert run.results == [[2.0], []]
    assert run.duration_s == 0.0


def test_a_deadlock_is_found_beside_a_thread_that_naps_for_ever():
    def beat(over: threading.Event) -> None:
        while not over.is_set():
            time.sleep(1.0)

    over = threading.Event()

    def program(group: Group) -> None:
        threading.Thread(target=beat, args=(over,), daemon=True).start()
        if group.rank == 0:
            queue.Queue().get()

    with pytest.raises(oa.DeadlockError, match=r"rank 0 is waiting for an event, a queue or a condition"):
        simulated.run(program, 2)
    over.set()


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_queue_may_be_asked_again_and_again(kind):
    def program(group: Group) -> int:
        items: queue.Queue[int] = kind()
        threading.Thread(target=items.put, args=(5,)).start()
        while True:
            try:
                return items.get(block=False)
            except queue.Empty:
                pass

    assert simulated.run(program, 1).results == [5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_of_a_rank_is_no_part_of_the_world():
    def program(group: Group) -> int:
        group.barrier()
        found = 0
        if group.rank == 0:
            reader, writer = os.pipe()
            if os.fork() == 0:
                lock = threading.Lock()
                with lock:
                    time.sleep(0.01)
                os.write(writer, b"6")
                os._exit(0)
            found = int(os.read(reader, 1))
            os.wait()
            os.close(reader)
            os.close(writer)
        return group.all_reduce(found, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [6, 6]
    assert run.duration_s == 0.0


def test_an_event_loop_may_talk_with_another_program():
    child = "import sys; print('ready', flush=True); print(int(sys.stdin.readline()) * 2, flush=True); sys.stdin.read()"

    async def talk() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", child, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        process.stdin.write(b"3\n")
        found = int(await process.stdout.readline())
        process.stdin.close()
        await process.wait()
        return found

    def program(group: Group) -> int:
        return group.all_reduce(asyncio.run(talk()) if group.rank == 0 else 0, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [6, 6]
    assert run.duration_s == 0.0


def test_a_pool_of_multiprocessing_with_threads_is_of_the_world():
    """One of its threads waits for a pipe, with `selectors.PollSelector`."""

    def program(group: Group) -> int:
        with multiprocessing.pool.ThreadPool(2) as pool:
            return group.all_reduce(sum(pool.map(lambda number: number**2, range(4))), timeout_s=1000.0).item()

    assert simulated.run(program, 2).results == [28, 28]


def test_a_lock_that_another_world_holds_is_waited_for():
    lock, is_held, waits = threading.Lock(), threading.Event(), threading.Event()

    def holds(group: Group) -> None:
        if group.rank == 0:
            with lock, oa.outside():
                is_held.set()
                assert waits.wait(30)
                time.sleep(0.2)  # the other world finds the lock taken

    other = threading.Thread(target=simulated.run, args=(holds, 2))
    other.start()
    assert is_held.wait(30)

    def wants(group: Group) -> float:
        waits.set()
        with lock:
            return group.all_reduce(1.0).item() if group.world_size == 1 else 0.0

    assert simulated.run(wants, 1).results == [1.0]
    other.join(30)
    assert not other.is_alive()


def test_a_program_with_a_timeout_is_waited_for_on_the_computers_clock():
    def program(group: Group) -> int:
        if group.rank == 0:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)"], timeout=60, check=True)
        return group.all_reduce(1, timeout_s=0.1).item()

    run = simulated.run(program, 2)
    assert run.results == [2, 2]
    assert run.duration_s == 0.0


def test_a_program_that_is_too_slow_passes_no_virtual_time():
    def program(group: Group) -> int:
        if group.rank == 0:
            with pytest.raises(subprocess.TimeoutExpired):
                subprocess.run(
                    [sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2, check=False, capture_output=True
                )
        return group.all_reduce(1, timeout_s=0.1).item()

    run = simulated.run(program, 2)
    assert run.results == [2, 2]
    assert run.duration_s == 0.0
