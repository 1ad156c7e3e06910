"""Work: what the handle of a call in the background tells, and when."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import signal
import threading
import weakref
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_S, until
from support.work_tools import Gate, Group

import oneaccord as oa
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import AbortedError, ClosedError, DeadlineError, UsageError


@pytest.fixture
def group() -> Group:
    return Group()


def test_work_runs_in_the_background_and_gives_its_result_as_often_as_asked(group: Group) -> None:
    gate = Gate("result")
    work = group.later(gate)
    assert gate.begun.wait(PATIENCE_S)
    assert not work.done()
    assert work.exception() is None
    gate.open.set()
    assert [work.wait(), work.wait(), work.wait(PATIENCE_S)] == ["result"] * 3
    assert work.done()
    assert work.exception() is None


def test_what_a_call_raised_is_raised_by_wait_each_time(group: Group) -> None:
    error = AbortedError("rank 1 gave up", rank=0, peer=1)
    gate = Gate(error)
    gate.open.set()
    work = group.later(gate)
    for _ in range(2):
        with pytest.raises(AbortedError) as raised:
            work.wait()
        assert raised.value is error
    assert work.done()
    assert work.exception() is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_whatever_a_call_raises_belongs_to_who_asks_and_the_next_call_goes_on(group: Group, kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind

    work, following = group.later(fails), group.later(lambda: "next")
    with pytest.raises(kind):
        work.wait()
    assert following.wait() == "next"


def test_a_wait_that_ends_early_leaves_the_work_running(group: Group) -> None:
    gate = Gate("result")
    work = group.later(gate, "barrier")
    with pytest.raises(DeadlineError, match=r"^barrier was not done within 0\.001 s of waiting; the call continues$") as raised:
        work.wait(0.001)
    assert raised.value.operation == "barrier"
    assert not work.done()
    assert work.exception() is None
    gate.open.set()
    assert work.wait() == "result"


@pytest.mark.parametrize("timeout_s", [None, PATIENCE_S])
@pytest.mark.parametrize(
    "wait",
    [lambda works, timeout_s: works[0].wait(timeout_s), lambda works, timeout_s: oa.wait_any(works, timeout_s=timeout_s)],
)
def test_a_wait_that_is_interrupted_leaves_the_work_running(
    group: Group, wait: Callable[[list[Work[object]], float | None], object], timeout_s: float | None
) -> None:
    gate = Gate("result")
    works = [group.later(gate), group.later(gate)]
    home = threading.get_ident()

    def interrupt() -> None:
        until(lambda: bool(works[0]._places))
        signal.pthread_kill(home, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        wait(works, timeout_s)
    interrupting.join()
    assert not works[0].done()
    gate.open.set()
    assert oa.wait_all(works) == ["result", "result"]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "soon"])
@pytest.mark.parametrize("done", [False, True])
def test_a_time_that_is_none_is_refused(group: Group, timeout_s: float, done: bool) -> None:
    gate = Gate("result")
    work = group.later(gate)
    if done:
        gate.open.set()
        work.wait()
    with pytest.raises(UsageError, match="timeout_s must be a positive, finite number of seconds"):
        work.wait(timeout_s)
    gate.open.set()
    assert work.wait() == "result"


def test_many_threads_may_wait(group: Group) -> None:
    gate, results = Gate("result"), list[object]()
    work = group.later(gate)
    threads = [threading.Thread(target=lambda: results.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.open.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == ["result"] * 4


def test_the_handle_says_what_it_is(group: Group) -> None:
    gate = Gate()
    work = group.later(gate, "send to rank 1")
    assert repr(work) == "<oneaccord.Work send to rank 1, running>"
    gate.open.set()
    work.wait()
    assert repr(work) == "<oneaccord.Work send to rank 1, done>"

    def fails() -> None:
        raise ZeroDivisionError

    failed = group.later(fails)
    group.finish()
    assert repr(failed) == "<oneaccord.Work all_reduce, failed: ZeroDivisionError>"


def test_callbacks_come_in_the_order_in_which_calls_ended_and_callbacks_were_added(group: Group) -> None:
    gate, heard = Gate(), list[object]()
    works = [group.later(gate), group.later(lambda: 1), group.later(lambda: 2)]
    for number in (2, 0, 1):
        for time in range(2):
            works[number].add_done_callback(lambda work, number=number, time=time: heard.append((number, time, work)))  # type: ignore[misc]
    assert heard == []
    gate.open.set()
    group.finish()
    assert heard == [(number, time, works[number]) for number in range(3) for time in range(2)]


def test_a_callback_finds_its_work_done(group: Group) -> None:
    gate, heard = Gate("result"), list[object]()
    work = group.later(gate)
    work.add_done_callback(lambda work: heard.extend([work.done(), work.wait()]))
    gate.open.set()
    group.finish()
    assert heard == [True, "result"]


def test_a_callback_of_work_that_has_failed_finds_the_error(group: Group) -> None:
    error = AbortedError("rank 1 gave up")
    gate, heard = Gate(error), list[object]()
    work = group.later(gate)
    work.add_done_callback(lambda work: heard.append(work.exception()))
    gate.open.set()
    group.finish()
    assert heard == [error]


def test_a_callback_that_comes_late_is_called_all_the_same_and_after_those_before_it(group: Group) -> None:
    heard, holding, hold = list[str](), threading.Event(), threading.Event()
    work = group.later(lambda: None)
    work.wait()

    def slow(_: Work[object]) -> None:
        holding.set()
        assert hold.wait(PATIENCE_S)
        heard.append("slow")

    work.add_done_callback(slow)
    assert holding.wait(PATIENCE_S)
    work.add_done_callback(lambda _: heard.append("late"))
    assert heard == []
    hold.set()
    group.finish()
    assert heard == ["slow", "late"]


def test_callbacks_run_in_the_background(group: Group) -> None:
    work, threads = group.later(lambda: None), list[threading.Thread]()
    work.wait()
    work.add_done_callback(lambda _: threads.append(threading.current_thread()))
    group.finish()
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_an_exception_in_a_callback_is_logged_and_changes_nothing(
    group: Group, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    gate, heard = Gate("result"), list[str]()
    work = group.later(gate, "barrier")

    def fails(_: Work[object]) -> None:
        heard.append("fails")
        raise kind("no")

    work.add_done_callback(fails)
    work.add_done_callback(lambda _: heard.append("next"))
    with caplog.at_level(logging.ERROR, logger="oneaccord"):
        gate.open.set()
        assert work.wait() == "result"
        group.finish()
    assert heard == ["fails", "next"]
    assert work.wait() == "result"
    assert work.exception() is None
    assert [record.getMessage() for record in caplog.records] == ["oneaccord: a callback of barrier failed"]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[0] is kind


def test_a_callback_may_make_calls_and_wait_for_them(group: Group) -> None:
    heard = list[object]()
    work = group.later(lambda: 1)
    work.add_done_callback(lambda work: heard.append((work.wait(), group.later(lambda: 2).wait())))
    work.wait()
    group.finish()
    assert heard == [(1, 2)]


def test_a_callback_may_take_a_turn_while_calls_are_under_way(group: Group) -> None:
    """Calls do not wait for callbacks, so that a callback may wait for calls."""
    gate, heard = Gate(), list[object]()
    first = group.later(lambda: 1)

    def waits(_: Work[object]) -> None:
        group.calls.take(Deadline(PATIENCE_S))
        heard.append("turn")
        group.calls.give()

    second = group.later(gate)
    first.add_done_callback(waits)
    assert gate.begun.wait(PATIENCE_S)
    assert heard == []
    gate.open.set()
    second.wait()
    group.finish()
    assert heard == ["turn"]


def test_a_callback_may_add_another(group: Group) -> None:
    heard = list[str]()
    work = group.later(lambda: None)

    def first(work: Work[object]) -> None:
        work.add_done_callback(lambda _: heard.append("second"))
        heard.append("first")

    work.add_done_callback(first)
    work.wait()
    group.finish()
    group.finish()
    assert heard == ["first", "second"]


def test_a_handle_that_is_dropped_lets_the_call_go_on(group: Group) -> None:
    gate, heard = Gate(), list[str]()
    group.later(gate).add_done_callback(lambda _: heard.append("done"))
    gc.collect()
    gate.open.set()
    group.finish()
    assert heard == ["done"]


def test_work_that_is_done_keeps_nothing_alive_but_its_result(group: Group) -> None:
    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    work = group.later(lambda thing=thing: "result")  # type: ignore[misc]
    del thing
    work.wait()
    group.finish()
    until(lambda: alive() is None)
    assert work.wait() == "result"


def test_work_is_awaited_without_blocking_the_event_loop(group: Group) -> None:
    gate = Gate("result")

    async def main() -> list[object]:
        async def opens() -> str:
            gate.open.set()
            return "opened"

        async def waits() -> object:
            return await group.later(gate)

        return await asyncio.wait_for(asyncio.gather(waits(), opens()), PATIENCE_S)

    assert asyncio.run(main()) == ["result", "opened"]


def test_work_that_is_done_is_awaited_as_well_and_twice(group: Group) -> None:
    work = group.later(lambda: "result")
    work.wait()

    async def main() -> list[object]:
        return [await work, await work]

    assert asyncio.run(main()) == ["result", "result"]


def test_what_a_call_raised_is_raised_where_it_is_awaited(group: Group) -> None:
    gate = Gate(AbortedError("rank 1 gave up"))
    work = group.later(gate)
    gate.open.set()

    async def main() -> None:
        await work

    with pytest.raises(AbortedError, match="rank 1 gave up"):
        asyncio.run(main())


def test_an_await_without_an_event_loop_of_asyncio_says_what_to_do(group: Group) -> None:
    gate = Gate(5)
    work = group.later(gate)
    with pytest.raises(UsageError, match=r"needs a running event loop of asyncio: elsewhere, call work\.wait\(\)"):
        next(work.__await__())
    gate.open.set()
    assert work.wait() == 5


def test_who_stops_awaiting_leaves_the_work_running(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("result")
    work = group.later(gate)

    async def awaits() -> object:
        return await work

    async def main() -> object:
        task = asyncio.create_task(awaits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        return await work

    assert asyncio.run(main()) == "result"
    group.finish()
    assert caplog.records == []


def test_an_event_loop_that_has_closed_is_not_told(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("result")
    work = group.later(gate)

    async def awaits() -> object:
        return await work

    async def main() -> None:
        task = asyncio.create_task(awaits())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    gate.open.set()
    assert work.wait() == "result"
    group.finish()
    assert caplog.records == []


def test_a_failure_has_been_seen_once_wait_or_exception_tells_it() -> None:
    seen = list[str]()

    def fails() -> None:
        raise ZeroDivisionError

    work: Work[None] = Work("barrier", Turns(), lambda: seen.append("seen"))
    work.run(fails)
    assert work.done()
    assert "ZeroDivisionError" in repr(work)
    assert seen == []
    assert isinstance(work.exception(), ZeroDivisionError)
    assert seen == ["seen"]
    with pytest.raises(ZeroDivisionError):
        work.wait()
    assert seen == ["seen", "seen"]


def test_there_is_no_failure_to_see_where_all_went_well() -> None:
    seen = list[str]()
    work: Work[int] = Work("barrier", Turns(), lambda: seen.append("seen"))
    work.run(lambda: 1)
    assert (work.wait(), work.exception(), seen) == (1, None, [])


@pytest.mark.parametrize("loops", [asyncio.FIRST_COMPLETED, asyncio.ALL_COMPLETED, asyncio.FIRST_EXCEPTION])
def test_an_event_loop_waits_for_works_as_for_its_own_futures(loops: str) -> None:
    gates = [Gate(number) for number in range(3)]
    works = [Group().later(gate) for gate in gates]

    async def main() -> tuple[set[Work[object]], set[Work[object]]]:
        asyncio.get_running_loop().call_later(0.001, gates[1].open.set)
        if loops == asyncio.ALL_COMPLETED:
            gates[0].open.set()
            gates[2].open.set()
        if loops == asyncio.FIRST_EXCEPTION:
            gates[1].result = ZeroDivisionError()
        return await asyncio.wait(works, timeout=PATIENCE_S, return_when=loops)  # type: ignore[type-var]

    done, pending = asyncio.run(main())
    for gate in gates:
        gate.open.set()
    every = {*works}
    assert (done, pending) == ((every, set()) if loops == asyncio.ALL_COMPLETED else ({works[1]}, every - {works[1]}))


def test_an_event_loop_waits_for_a_work_that_is_done_and_not_for_ever_for_one_that_is_not(group: Group) -> None:
    gate = Gate()
    first, second = group.later(lambda: "result"), group.later(gate)
    first.wait()

    async def main() -> None:
        assert await asyncio.wait([first]) == ({first}, set())  # type: ignore[type-var]
        assert await asyncio.wait([second], timeout=0.001) == (set(), {second})  # type: ignore[type-var]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second, 0.001)
        gate.open.set()
        assert await asyncio.wait_for(asyncio.shield(first), PATIENCE_S) == "result"
        assert [await each for each in asyncio.as_completed([second])] == [None]
        assert await asyncio.gather(first, asyncio.ensure_future(second)) == ["result", None]

    asyncio.run(main())


def test_a_callback_that_is_added_in_a_coroutine_may_touch_its_event_loop(group: Group) -> None:
    gate, threads = Gate(), list[int]()

    async def main() -> None:
        event = asyncio.Event()
        work = group.later(gate)
        work.add_done_callback(lambda _: (threads.append(threading.get_ident()), event.set()))
        gate.open.set()
        await asyncio.wait_for(event.wait(), PATIENCE_S)

    asyncio.run(main())
    assert threads == [threading.get_ident()]


def test_a_callback_that_was_removed_is_not_called(group: Group) -> None:
    gate, told = Gate(), list[str]()

    def no(_: Work[object]) -> None:
        told.append("no")

    work = group.later(gate)
    work.add_done_callback(no)
    work.add_done_callback(lambda _: told.append("yes"))
    work.add_done_callback(no)
    assert [work.remove_done_callback(no), work.remove_done_callback(no)] == [2, 0]
    gate.open.set()
    group.finish()
    assert told == ["yes"]


@pytest.mark.parametrize("waits", [concurrent.futures.wait, lambda works: list(concurrent.futures.as_completed(works))])
def test_what_waits_for_futures_of_threads_is_told_what_to_write(group: Group, waits: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match=r"not a concurrent\.futures\.Future: wait for several with oneaccord\.wait_all"):
        waits([group.later(lambda: 1)])


def test_a_forked_child_is_told_that_a_work_of_its_parent_never_ends_there(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    work = group.later(gate)
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        waits: list[Callable[[], object]] = [
            lambda: work.add_done_callback(print),
            lambda: asyncio.run(asyncio.wait([work])),  # type: ignore[type-var]
            lambda: oa.wait_all([work]),
            lambda: oa.wait_any([work]),
            lambda: next(oa.as_completed([work])),
        ]
        for wait in waits:
            with pytest.raises(ClosedError, match="issued by the process that this one was forked from"):
                wait()
    gate.open.set()
    assert work.wait() is None
