"""Which threads of a process could still come to the rescue: a rank is accused of nothing while one can."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from support.waiting import PATIENCE_S, until

from oneaccord.calls.order.turns import Turns
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from oneaccord.runtime import idle as idle_module
from oneaccord.runtime.computer import COMPUTER
from oneaccord.runtime.idle import (
    Sleeper,
    begin_to_help,
    blocked,
    current_frames,
    end_of_help,
    nobody_else,
    released,
    stands_by,
)

HOME = threading.current_thread()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads of the test runner, and what other tests have left, count for nothing."""
    monkeypatch.setattr(idle_module, "_idle_threads", weakref.WeakSet(threading.enumerate()))
    monkeypatch.setattr(idle_module, "_blocked", set())
    monkeypatch.setattr(idle_module, "_helpers", set())
    monkeypatch.setattr(idle_module, "_strangers", lambda known: False)


@contextmanager
def thread(body: Callable[[threading.Event], object], name: str = "a thread of the program") -> Iterator[threading.Thread]:
    """Run ``body(end)`` in a thread, which must return when ``end`` is set."""
    end = threading.Event()
    started = threading.Thread(target=body, args=(end,), name=name)
    started.start()
    try:
        yield started
    finally:
        end.set()
        started.join(PATIENCE_S)
        assert not started.is_alive()


@contextmanager
def no_other_thread_runs() -> Iterator[None]:
    """Keep other threads from going on, be they free to do so or not, as long as this thread does not wait."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def waiting() -> Iterator[None]:
    """Count as a thread that waits for a call to end, during a block."""
    blocked(threading.get_ident())
    try:
        yield
    finally:
        released(threading.get_ident())


def idle(end: threading.Event) -> None:
    end.wait(PATIENCE_S)


def wait_marked(end: threading.Event) -> None:
    with waiting():
        end.wait(PATIENCE_S)


def test_the_only_thread_is_alone() -> None:
    assert nobody_else(HOME)


def test_a_thread_of_the_program_may_come_to_the_rescue() -> None:
    with thread(idle):
        assert not nobody_else(HOME)
    assert nobody_else(HOME)


def test_a_thread_that_only_waits_cannot_until_it_goes_on() -> None:
    with thread(wait_marked):
        until(lambda: nobody_else(HOME))
    with thread(idle) as other:
        assert other.ident is not None
        blocked(other.ident)
        assert nobody_else(HOME)
        released(other.ident)
        assert not nobody_else(HOME)


def test_a_wait_that_is_broken_off_is_over() -> None:
    answers: list[bool] = []

    def ask() -> None:
        asking = threading.Thread(target=lambda: answers.append(nobody_else(HOME)))
        asking.start()
        asking.join(PATIENCE_S)

    with suppress(KeyboardInterrupt), waiting():
        ask()
        raise KeyboardInterrupt
    ask()
    assert answers == [True, False]


def test_a_thread_of_another_rank_cannot_come_to_the_rescue_of_this_one() -> None:
    with thread(idle) as other:
        stands_by(other)
        assert nobody_else(HOME)
        assert not nobody_else(other)  # it is the home of the other rank, and may go on there


def test_a_thread_of_oneaccord_makes_no_calls_of_its_own() -> None:
    with thread(idle, name="oneaccord-0"):
        assert nobody_else(HOME)


class Helper:
    def __init__(self, ident: int | None) -> None:
        self.ident = ident


def test_a_background_thread_with_something_to_do_may_come_to_the_rescue() -> None:
    with thread(idle, name="oneaccord-work") as other:
        helper = Helper(other.ident)
        begin_to_help(helper)
        assert not nobody_else(HOME)
        assert other.ident is not None
        blocked(other.ident)
        assert nobody_else(HOME)
        released(other.ident)
        assert not nobody_else(HOME)
        end_of_help(helper)
        assert nobody_else(HOME)


def test_a_background_thread_that_has_yet_to_begin_may_come_to_the_rescue() -> None:
    helper = Helper(None)
    begin_to_help(helper)
    assert not nobody_else(HOME)
    end_of_help(helper)
    assert nobody_else(HOME)


def test_a_background_thread_may_ask_for_its_own_call() -> None:
    answers: list[bool] = []

    def ask(_: threading.Event) -> None:
        helper = Helper(threading.get_ident())
        begin_to_help(helper)
        answers.append(nobody_else(HOME))
        with_home_waiting.set()
        home_waits.wait(PATIENCE_S)
        answers.append(nobody_else(HOME))
        end_of_help(helper)

    with_home_waiting, home_waits = threading.Event(), threading.Event()
    with thread(ask, name="oneaccord-work") as asking:
        with_home_waiting.wait(PATIENCE_S)
        with waiting():
            home_waits.set()
            asking.join(PATIENCE_S)
    assert answers == [False, True]


def test_a_thread_that_passes_its_work_on_while_it_is_asked_about_is_seen() -> None:
    """It hands a call to the background and waits for it, just between the looks at the one and at the other."""

    class Asking:
        """The helper that asks; as it is looked at, another thread goes on."""

        @property
        def ident(self) -> int:
            if not passed_on:
                passed_on.append(Helper(None))
                begin_to_help(passed_on[0])
                assert other.ident is not None
                blocked(other.ident)
            return threading.get_ident()

    passed_on: list[Helper] = []
    with thread(idle) as other:
        begin_to_help(Asking())
        assert not nobody_else(HOME)
        assert not nobody_else(HOME)
        end_of_help(passed_on[0])
        assert nobody_else(HOME)


def test_a_thread_that_waits_for_work_may_come_to_the_rescue_as_soon_as_the_work_is_done() -> None:
    """Not only once it wakes: a report in between would say that nobody can help, and be believed."""
    work: Work[int] = Work("a call", Turns())
    with thread(lambda _: work.wait()):
        until(lambda: nobody_else(HOME))
        with no_other_thread_runs():
            work.run(lambda: 1)
            alone = nobody_else(HOME)
    assert not alone


def test_a_thread_that_waits_for_its_turn_may_come_to_the_rescue_as_soon_as_it_has_it() -> None:
    lane = Turns()
    lane.take(Deadline(PATIENCE_S))

    def take(_: threading.Event) -> None:
        lane.take(Deadline(PATIENCE_S), for_good=True)
        lane.give()

    with thread(take):
        until(lambda: nobody_else(HOME))
        with no_other_thread_runs():
            lane.give()
            alone = nobody_else(HOME)
    assert not alone


def test_a_thread_that_waits_for_its_turn_waits() -> None:
    lane = Turns()
    with thread(lambda _: lane.take(Deadline(PATIENCE_S), for_good=True)):
        pass
    with thread(lambda _: lane.take(Deadline(PATIENCE_S), for_good=True)):
        until(lambda: nobody_else(HOME))
        lane.give()


@pytest.mark.parametrize("for_good", [False, True])
def test_a_place_may_be_woken_twice_and_before_anybody_waits(for_good: bool) -> None:
    place = COMPUTER.place(for_good=for_good)
    for _ in range(2):
        place.wake()
    assert place.wait(None)


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 1e-6])
def test_a_time_that_has_passed_is_not_waited_for(timeout_s: float) -> None:
    assert not COMPUTER.place(for_good=False).wait(timeout_s)


def test_work_that_runs_may_come_to_the_rescue_and_work_that_has_ended_cannot() -> None:
    lane, begun, end = Turns(), threading.Event(), threading.Event()

    def action() -> None:
        begun.set()
        end.wait(PATIENCE_S)

    lane.submit(action)
    assert not nobody_else(HOME)
    assert begun.wait(PATIENCE_S)
    assert not nobody_else(HOME)
    end.set()
    until(lambda: nobody_else(HOME))


@pytest.mark.parametrize("seconds", [0.5, pytest.param(3, marks=pytest.mark.long)])
def test_to_look_at_all_threads_stops_nothing_while_others_begin_and_end_and_the_collector_runs(seconds):
    """Found as a hang of the whole interpreter (python/cpython#106883), which no signal handler and no Python thread could have ended."""
    program = f"""
        import faulthandler, gc, threading, time
        from oneaccord.runtime.idle import current_frames

        faulthandler.dump_traceback_later(20, exit=True)
        is_over = threading.Event()

        def come_and_go():
            while not is_over.is_set():
                threads = [threading.Thread(target=int) for _ in range(20)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        other = threading.Thread(target=come_and_go)
        other.start()
        gc.callbacks.append(lambda phase, info: time.sleep(0))
        gc.set_threshold(1)
        until = time.monotonic() + {seconds}
        while time.monotonic() < until:
            assert threading.get_ident() in current_frames()
            assert gc.isenabled()
        gc.disable()
        current_frames()
        assert not gc.isenabled()
        is_over.set()
        other.join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr


def test_looking_at_frames_keeps_nothing_alive():
    """Found in the memory of a sharded model: frames that held themselves kept the arrays of all threads until the collector came."""

    class Thing:
        pass

    def look() -> weakref.ref[Thing]:
        thing = Thing()
        current_frames()
        return weakref.ref(thing)

    before = gc.get_threshold()
    gc.set_threshold(10**6)  # enabled, which makes a difference to it, and idle
    try:
        assert look()() is None
    finally:
        gc.set_threshold(*before)


def test_a_signal_that_comes_just_as_a_thread_falls_asleep_interrupts_it_soon() -> None:
    home = threading.get_ident()
    in_time: list[bool] = []

    def sleep() -> None:
        is_about_to, is_through = threading.Event(), threading.Event()
        sleeper = Sleeper(for_good=False)

        def interrupt() -> None:
            while not is_about_to.is_set():
                pass
            signal.pthread_kill(home, signal.SIGINT)
            in_time.append(is_through.wait(PATIENCE_S))
            sleeper.wake()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            is_about_to.set()
            sleeper.wait(None)
        finally:
            is_through.set()
            interrupting.join()

    for _ in range(20):  # Python misses about one of ten
        with pytest.raises(KeyboardInterrupt):
            sleep()
    assert in_time == [True] * 20, "it slept until it was woken"
