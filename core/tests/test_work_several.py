"""Works: waiting for several of them."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_S
from support.work_tools import Gate, Group

import oneaccord as oa
from oneaccord.errors import AbortedError, DeadlineError, UsageError


@pytest.fixture
def group() -> Group:
    return Group()


def test_several_works_are_waited_for_in_order_whoever_is_first() -> None:
    gates = [Gate(number) for number in range(3)]
    works = [Group().later(gate) for gate in gates]
    gates[2].open.set()
    assert oa.wait_any(works) == 2
    gates[0].open.set()
    works[0].wait()
    assert oa.wait_any(works) == 0  # of those that are done the first
    gates[1].open.set()
    assert oa.wait_all(iter(works)) == [0, 1, 2]
    assert oa.wait_all(works, timeout_s=1.0) == [0, 1, 2]
    assert oa.wait_any(works * 2, timeout_s=1.0) == 0


def test_who_waits_for_any_is_woken_by_whichever_ends_first() -> None:
    gates = [Gate(number) for number in range(3)]
    works = [Group().later(gate) for gate in gates]
    found: queue.Queue[int] = queue.Queue()
    for last in (1, 2, 0):
        waiting = threading.Thread(target=lambda: found.put(oa.wait_any(works)))
        waiting.start()
        while not works[0]._places:  # it waits
            threading.Event().wait(0.001)
        gates[last].open.set()
        assert found.get(timeout=PATIENCE_S) == last
        waiting.join()
        works[last] = Group().later(Gate())  # another one that does not end
    assert not any(work._places for work in works)


def test_works_come_as_they_are_completed() -> None:
    gates = [Gate(number) for number in range(4)]
    works = [Group().later(gate) for gate in gates]
    for index in (3, 1):
        gates[index].open.set()
        works[index].wait()
    coming = oa.as_completed(works, timeout_s=PATIENCE_S)
    assert [next(coming), next(coming)] == [works[1], works[3]]
    gates[2].open.set()
    assert next(coming) is works[2]
    gates[0].open.set()
    assert [work.wait() for work in coming] == [0]
    assert list(oa.as_completed([])) == []


def test_a_work_that_failed_counts_as_done_and_raises_where_its_result_is_asked_for(group: Group) -> None:
    def fails() -> None:
        raise AbortedError("rank 1 gave up")

    works = [group.later(fails), group.later(lambda: 1)]
    works[1].wait()
    assert oa.wait_any(works) == 0
    assert list(oa.as_completed(works)) == works
    with pytest.raises(AbortedError, match="rank 1 gave up"):
        oa.wait_all(reversed(works))


def test_waits_for_several_end_in_time_and_leave_the_works_running() -> None:
    gates = [Gate(number) for number in range(6)]
    works = [Group().later(gate, f"recv from rank {number}") for number, gate in enumerate(gates)]
    gates[0].open.set()
    with pytest.raises(DeadlineError, match=r"^recv from rank 1 was not done within 0\.01 s of waiting; the call continues$"):
        oa.wait_all(works, timeout_s=0.01)
    with pytest.raises(DeadlineError) as raised:
        oa.wait_any(works[1:], timeout_s=0.01)
    assert str(raised.value) == (
        "none of 5 calls was done within 0.01 s of waiting (recv from rank 1, recv from rank 2, recv from rank 3, recv from rank 4, 1 more); "
        "the calls continue"
    )
    coming = oa.as_completed(works, timeout_s=0.01)
    assert next(coming) is works[0]
    with pytest.raises(DeadlineError, match="none of 5 calls was done within"):
        next(coming)
    for gate in gates:
        gate.open.set()
    assert oa.wait_all(works) == list(range(6))
    assert not any(work._places for work in works)


@pytest.mark.parametrize("waits", [oa.wait_all, oa.wait_any, oa.as_completed])
def test_what_is_no_list_of_works_is_refused_at_once(waits: Callable[..., object], group: Group) -> None:
    work = group.later(lambda: 1)
    for wrong, kind in (
        (work, "Work"),
        (None, "NoneType"),
        ([work, concurrent.futures.Future()], "Future"),
        ([None], "NoneType"),
    ):
        with pytest.raises(
            UsageError, match=rf"takes a list of works, such as group.all_reduce_async\(\) returns, but a {kind} was given"
        ):
            waits(wrong)
    for empty in ([], [work]):
        with pytest.raises(UsageError, match="timeout_s must be a positive, finite number of seconds"):
            waits(empty, timeout_s=0)


def test_any_of_no_works_is_refused() -> None:
    with pytest.raises(UsageError, match="wait_any got no works, and would wait forever"):
        oa.wait_any([])
    assert oa.wait_all([]) == []
