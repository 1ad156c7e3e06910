"""Lanes: turns come in the order in which they were asked for, of waiting threads and of background actions alike."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import PATIENCE_S, until

from oneaccord.calls.order.turns import Turns
from oneaccord.contract.deadline import Deadline
from oneaccord.runtime import computer as runtime
from oneaccord.runtime.idle import Sleeper


def soon() -> Deadline:
    return Deadline(PATIENCE_S)


def queued(lane: Turns) -> int:
    """Return how many turns are waited for."""
    return len(lane.counters._queue)  # type: ignore[attr-defined]


class Takers:
    """Threads that each take a turn in a lane, and note that they had it."""

    def __init__(self, lane: Turns, had: list[object]) -> None:
        self.lane, self.had = lane, had
        self.threads: list[threading.Thread] = []

    def add(self, name: object) -> None:
        """Let a thread ask for its turn, and return once it waits for it."""

        def take() -> None:
            with held(self.lane):
                self.had.append(name)

        before = queued(self.lane)
        self.threads.append(threading.Thread(target=take))
        self.threads[-1].start()
        until(lambda: queued(self.lane) > before)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def held(lane: Turns, deadline: Deadline | None = None) -> Iterator[None]:
    """Keep a lane busy."""
    lane.take(deadline or soon())
    try:
        yield
    finally:
        lane.give()


def finish(lane: Turns) -> None:
    """Wait until all that was asked for before has had its turn."""
    with held(lane):
        pass


@settings(max_examples=20)
@given(st.lists(st.booleans(), max_size=8))
def test_turns_come_in_the_order_in_which_they_were_asked_for(in_background: list[bool]) -> None:
    lane, had = Turns(), list[object]()
    takers = Takers(lane, had)
    with held(lane):
        for number, background in enumerate(in_background):
            if background:
                lane.submit(lambda number=number: had.append(number))  # type: ignore[misc]
            else:
                takers.add(number)
        assert had == []
    takers.join()
    finish(lane)
    assert had == list(range(len(in_background)))


def test_a_lane_that_is_free_is_taken_at_once_and_as_often_as_one_likes() -> None:
    lane = Turns()
    for _ in range(3):
        lane.take(Deadline(1e-9))
        lane.give()


def test_only_one_has_its_turn() -> None:
    lane, inside, most = Turns(), list[int](), list[int]()

    def action() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    def take() -> None:
        for _ in range(50):
            with held(lane):
                action()
            lane.submit(action)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    finish(lane)
    assert most == [1] * 400


def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    lane, had = Turns(), list[object]()
    with held(lane):
        lane.submit(lambda: had.append("before"))
        with pytest.raises(TimeoutError):
            lane.take(Deadline(1e-9))
        lane.submit(lambda: had.append("after"))
        assert queued(lane) == 2
    finish(lane)
    assert had == ["before", "after"]


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_turn_that_comes_as_the_time_runs_out_is_taken(comes_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is given the lane must pass it on, or nobody ever does."""
    lane, had = Turns(), list[object]()
    lane.take(soon())

    class Late(Sleeper):
        """The time runs out; the turn comes just then, or not."""

        def wait(self, timeout_s: float | None) -> bool:
            if comes_first:
                lane.give()
            return False

    monkeypatch.setattr(runtime, "Sleeper", Late)
    if comes_first:
        lane.take(soon())
    else:
        with pytest.raises(TimeoutError):
            lane.take(soon())
    monkeypatch.undo()
    assert queued(lane) == 0
    lane.submit(lambda: had.append("next"))
    assert had == []
    lane.give()
    finish(lane)
    assert had == ["next"]


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_wait_that_is_broken_off_gives_its_place_or_its_turn_to_the_next(
    comes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, had = Turns(), list[object]()
    lane.take(soon())

    class Broken(Sleeper):
        def wait(self, timeout_s: float | None) -> bool:
            if comes_first:
                lane.give()
            raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "Sleeper", Broken)
    with pytest.raises(KeyboardInterrupt):
        lane.take(soon())
    monkeypatch.undo()
    assert queued(lane) == 0
    if not comes_first:
        lane.give()
    lane.submit(lambda: had.append("next"))
    finish(lane)
    assert had == ["next"]


def test_actions_run_in_the_background() -> None:
    lane, threads = Turns(), list[threading.Thread]()
    lane.submit(lambda: threads.append(threading.current_thread()))
    finish(lane)
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon
    assert threads[0].name.startswith("oneaccord")


def test_actions_that_follow_each_other_share_a_thread() -> None:
    lane, threads = Turns(), list[int]()
    with held(lane):
        for _ in range(5):
            lane.submit(lambda: threads.append(threading.get_ident()))
    finish(lane)
    assert len(threads) == 5
    assert len(set(threads)) == 1


def test_lanes_do_not_wait_for_each_other() -> None:
    one, other = Turns(), Turns()
    met = threading.Barrier(2)
    one.submit(lambda: met.wait(PATIENCE_S))
    other.submit(lambda: met.wait(PATIENCE_S))
    finish(one)
    finish(other)
    assert not met.broken


def test_an_action_may_use_other_lanes_and_submit_to_its_own() -> None:
    lane, other, had = Turns(), Turns(), list[object]()

    def action() -> None:
        with held(other):
            had.append("other")
        lane.submit(lambda: had.append("next"))
        had.append("action")

    lane.submit(action)
    finish(lane)
    finish(lane)
    assert had == ["other", "action", "next"]


def test_background_threads_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_IDLE_S", 2 * PATIENCE_S)  # none ends meanwhile
    idents: set[int] = set()
    for _ in range(20):
        lane = Turns()
        lane.submit(lambda: idents.add(threading.get_ident()))
        finish(lane)
        until(lambda: any(worker.ident in idents for worker in runtime._idle))
    assert len(idents) == 1


def test_background_threads_end_when_they_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_IDLE_S", 0.001)
    lane, threads = Turns(), list[threading.Thread]()
    lane.submit(lambda: threads.append(threading.current_thread()))
    finish(lane)
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()
    lane.submit(lambda: threads.append(threading.current_thread()))
    finish(lane)
    assert len(threads) == 2


def test_a_background_thread_that_ends_takes_no_action_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment an action comes at, somebody runs it."""
    monkeypatch.setattr(runtime, "_IDLE_S", 1e-6)
    lane, had = Turns(), list[int]()
    for number in range(300):
        lane.submit(lambda number=number: had.append(number))  # type: ignore[misc]
        if number % 3 == 0:
            finish(lane)
    finish(lane)
    assert had == list(range(300))


def test_an_idle_thread_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        pass

    # Nor may the thing be given back by nothing but the end of the thread.
    monkeypatch.setattr(runtime, "_IDLE_S", 2 * PATIENCE_S)
    lane = Turns()
    thing = Thing()
    alive = weakref.ref(thing)
    lane.submit(lambda thing=thing: None)  # type: ignore[misc]
    del thing
    finish(lane)
    until(lambda: alive() is None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_background_threads_of_its_own() -> None:
    """The parent's idle thread, and one in the middle of an action, do not exist in the child."""
    program = """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore")
        from oneaccord.runtime import computer as runtime
        from oneaccord.contract.deadline import Deadline
        from oneaccord.calls.order.turns import Turns
        from oneaccord.runtime.idle import nobody_else

        def use(lane):
            had = []
            lane.submit(lambda: had.append(1))
            lane.take(Deadline(30))
            lane.give()
            return had

        busy, begun, end = Turns(), threading.Event(), threading.Event()
        def action():
            begun.set()
            end.wait(30)
        busy.submit(action)
        assert begun.wait(30)
        assert use(Turns()) == [1]
        while not runtime._idle:
            pass
        child = os.fork()
        if child == 0:
            fine = nobody_else(threading.current_thread()) and use(Turns()) == [1]
            os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        end.set()
        assert use(busy) == [1]
        print("well")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr
