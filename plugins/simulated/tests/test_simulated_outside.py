"""What the world does while ranks do something that is not of it, and what threads of the program do in it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest

import manyhands as mh
import manyhands_simulated as simulated
from manyhands.api import Group
from manyhands_simulated import outside, scheduler


@pytest.mark.parametrize("helper", ["sleep", "thread that sleeps", "thread that computes"])
def test_no_deadline_that_ends_the_job_passes_while_a_rank_is_outside(monkeypatch, helper):
    monkeypatch.setattr(outside, "_HELP_S", 0.1)
    monkeypatch.setattr(outside, "_IDLE_S", 0.1)

    def work() -> None:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            if helper != "thread that computes":
                time.sleep(0.6)

    def program(group: Group) -> int:
        if group.rank == 0:
            if helper == "sleep":
                work()
            else:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        return group.all_reduce(group.rank, timeout_s=1.0).item()

    run = simulated.run(program, 2)
    assert run.results == [1, 1]
    assert run.duration_s == 0.0


def test_a_rank_killed_outside_does_not_come_back():
    came_back: list[str] = []

    def program(group: Group) -> str:
        if group.rank == 1:
            thread = threading.Thread(target=time.sleep, args=(0.3,))
            thread.start()
            thread.join()
            group.mark("came back")
            came_back.append("came back")
            return "returned"
        group.compute(5.0)
        time.sleep(0.4)
        with pytest.raises(mh.PeerLostError):
            group.barrier()
        return "survived"

    run = simulated.run(program, 2, faults=simulated.Kill(rank=1, at_s=1.0), check=False)
    assert run.results == ["survived", None]
    assert not came_back
    assert [mark.kind for mark in run.trace.marks if mark.rank == 1] == ["killed"]


def test_a_thread_that_ended_outside_helps_nobody(monkeypatch):
    monkeypatch.setattr(outside, "_HELP_S", 10.0)

    def program(group: Group) -> None:
        def send() -> None:
            group.send(1.0, 1)
            time.sleep(0.2)

        if group.rank == 0:
            thread = threading.Thread(target=send)
            thread.start()
            thread.join()
            group.barrier()
            work = group.recv_async(1)
            with pytest.raises(mh.DeadlineError):
                work.wait(timeout_s=1.0)
            work.wait()
        else:
            group.recv(0)
            group.barrier()
            mh.sleep(2.0)
            group.send(1.0, 0)

    begun = time.monotonic()
    assert simulated.run(program, 2).duration_s == 2.0
    assert time.monotonic() - begun < 10


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

    with pytest.raises(mh.UsageError, match=r"^rank 0 uses the group of rank 1"):
        simulated.run(program, 2)


def test_a_mark_is_a_text():
    with pytest.raises(mh.UsageError, match=r"^a mark is a text, and 7 was given"):
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


def test_ranks_that_are_stuck_outside_are_waited_for_together(monkeypatch):
    monkeypatch.setattr(outside, "FORSAKEN_S", 0.2)
    monkeypatch.setattr(scheduler, "_PATIENCE_S", 1.0)
    never = threading.Event()
    begun = time.monotonic()
    with pytest.raises(mh.DeadlockError, match=r"rank 7 waits at"):
        simulated.run(lambda group: never.wait(), 8)
    assert time.monotonic() - begun < 6
    never.set()


def test_a_deadlock_report_tells_who_is_in_init_and_who_is_not():
    def program(group: Group) -> None:
        if group.rank == 0:
            with mh.init("simulated", config={}) as second:
                second.barrier()
        else:
            group.recv_async(0).wait()

    with pytest.raises(mh.DeadlockError) as caught:
        simulated.run(program, 2)
    headline, first, second = str(caught.value).splitlines()[:3]
    assert headline == "deadlock: no rank can go on: rank 1 waits for rank 0, which is in init"
    assert first.startswith("  rank 0: in init at ")
    assert second.startswith("  rank 1: waiting at ")


@pytest.mark.long
def test_the_world_goes_on_while_threads_of_the_program_begin_and_end_and_the_collector_runs():
    """Found as a hang: of the whole interpreter, while the run looked at where its threads are."""
    program = """
        import faulthandler, gc, threading, time
        import numpy as np
        import manyhands_simulated as simulated

        faulthandler.dump_traceback_later(30, exit=True)
        is_over = threading.Event()
        matrix = np.ones((200, 200))

        def come_and_go():
            while not is_over.is_set():
                threads = [threading.Thread(target=int) for _ in range(20)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        def train(group):
            gc.set_threshold(1)
            until = time.monotonic() + (group.rank == 0)
            while time.monotonic() < until:
                matrix @ matrix
            group.barrier()

        other = threading.Thread(target=come_and_go)
        other.start()
        gc.callbacks.append(lambda phase, info: time.sleep(0))
        for seed in range(4):
            simulated.run(train, 8, seed)
        is_over.set()
        other.join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
