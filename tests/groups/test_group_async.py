"""Calls in the background: handles, their order, and what becomes of them when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group, hookimpl
from oneaccord.config.plugins import PluginManager, Switches
from oneaccord.job.job import Job


def test_an_input_that_is_not_contiguous_is_copied_at_once_however_often(world):
    def program(group: Group) -> None:
        for _ in range(4):
            assert group.all_reduce(np.ones(4)).tolist() == [2.0] * 4
            x = np.ones(8)[::2]
            hold = threading.Event()
            group._call_sequence.submit(lambda hold=hold: hold.wait(20))
            work = group.all_reduce_async(x)
            x[...] = -1
            hold.set()
            assert work.wait().tolist() == [2.0] * 4

    world(program, 2)


def test_a_group_opens_one_transport_for_its_collectives_whoever_comes_first(world, monkeypatch):
    opened: list[tuple[int, int]] = []

    def slow(job: Job, channel: int) -> Any:
        opened.append((job.rank, channel))
        threading.Event().wait(0.05)  # so that another call could come meanwhile
        return open_transport(job, channel)

    open_transport = Job.open_transport
    monkeypatch.setattr(Job, "open_transport", slow)

    def program(group: Group) -> None:
        work = group.all_reduce_async(np.ones(2))
        assert group.all_gather(np.ones(1)).tolist() == [1.0, 1.0]
        assert work.wait().tolist() == [2.0, 2.0]

    world(program, 2)
    assert sorted(opened) == [(0, 0), (1, 0)]


def test_uneven_calls_have_a_background_form_with_the_same_result(world):
    def program(group: Group) -> None:
        me, size = group.rank, group.world_size
        x = np.arange(6).reshape(3, 2) + me
        pairs = [
            (group.all_reduce_async(x, "max"), group.all_reduce(x, "max")),
            (group.all_gather_async(x[me:], uneven=True), group.all_gather(x[me:], counts=[3, 2, 1])),
            (group.gather_async(x[me:], 1, uneven=True), group.gather(x[me:], 1, counts=[3, 2, 1])),
            (group.reduce_scatter_async(x, "min"), group.reduce_scatter(x, "min")),
            (group.all_to_all_async(x, send_counts=[1, 0, 2]), group.all_to_all(x, send_counts=[1, 0, 2])),
            (group.send_async(x, (me + 1) % size), None),
            (group.recv_async((me - 1) % size), np.arange(6).reshape(3, 2) + (me - 1) % size),
        ]
        for work, expected in pairs:
            result = work.wait()
            assert (result is None) == (expected is None), work
            np.testing.assert_array_equal(result, expected)

    world(program, 3)


def test_what_is_wrong_with_the_arguments_is_raised_at_once(world):
    def program(group: Group) -> None:
        with pytest.raises(oa.DTypeError):
            group.all_reduce_async(np.ones(3, bool), "sum")
        with pytest.raises(oa.InvalidRankError):
            group.broadcast_async(np.ones(3), 7)
        with pytest.raises(oa.SelfSendError):
            group.send_async(np.ones(3), group.rank)
        with pytest.raises(oa.SizeMismatchError):
            group.all_reduce_async(np.ones(3), out=np.ones(2))
        with pytest.raises(oa.UsageError, match="timeout_s"):
            group.barrier_async(timeout_s=0)
        group.barrier()

    world(program, 2)


def test_closing_waits_for_what_is_in_flight(world):
    results = {}

    def program(group: Group) -> None:
        x = np.full(300_000, group.rank + 1)
        works = [group.all_reduce_async(x, out=x) for _ in range(3)]
        works.append(group.recv_async(1 - group.rank))
        works.append(group.send_async(np.arange(3), 1 - group.rank))
        group.close()
        assert all(work.done() for work in works)
        results[group.rank] = (x.tolist()[0], works[3].wait().tolist())
        with pytest.raises(oa.ClosedError):
            group.all_reduce_async(x)

    world(program, 2)
    assert results == {0: (12, [0, 1, 2]), 1: (12, [0, 1, 2])}


def test_a_mismatch_ends_all_works_in_flight_on_every_rank(world):
    def program(group: Group) -> list[type[BaseException]]:
        works = []
        failures = []
        for issue in (lambda: group.all_reduce_async(np.ones(3 + group.rank)), group.barrier_async, group.barrier_async):
            # A rank that is late may learn of it before it has issued all.
            try:
                works.append(issue())
            except oa.CommError as error:
                failures.append(type(error))
        for work in works:
            with pytest.raises(oa.CommError) as raised:
                work.wait()
            assert work.exception() is raised.value
            failures.append(raised.type)
        with pytest.raises(oa.CollectiveMismatchError):
            group.barrier_async()
        return failures

    assert world.outcomes(program, 3) == [[oa.CollectiveMismatchError] * 3] * 3


def test_an_exception_that_leaves_the_group_ends_its_works_and_those_of_the_others(world):
    works = {}

    def program(group: Group) -> None:
        if group.rank == 0:
            works[0] = group.recv_async(1)
            raise KeyError("the program is broken")
        works[group.rank] = group.all_reduce_async(np.ones(2))
        works[group.rank].wait()

    outcomes = world.outcomes(program, 3)
    assert isinstance(outcomes[0], KeyError)
    assert [type(outcome) for outcome in outcomes[1:]] == [oa.AbortedError] * 2
    with pytest.raises(oa.CommError):
        works[0].wait(timeout_s=20)


def test_a_failure_that_nobody_has_asked_for_is_raised_when_the_group_closes(world):
    def program(group: Group) -> None:
        if group.rank < 2:
            group.all_reduce_async(np.ones(3 + group.rank))

    assert [type(outcome) for outcome in world.outcomes(program, 3)] == [oa.CollectiveMismatchError] * 3


def test_a_failure_that_was_seen_is_not_raised_again(world):
    def program(group: Group) -> bool:
        with pytest.raises(oa.CollectiveMismatchError):
            group.all_reduce_async(np.ones(3 + group.rank)).wait()
        return True

    assert world.outcomes(program, 3) == [True] * 3


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_a_group_that_closes_before_a_call_has_its_turn_ends_that_call_and_nothing_else(backend, monkeypatch):
    begun = [threading.Event() for _ in range(3)]
    closed = threading.Barrier(3)

    class Watch:
        @hookimpl
        def oneaccord_collective_started(self, event: Any) -> None:
            if event.group != "0":
                begun[event.rank].set()

    manager = PluginManager(Switches())
    manager.register(Watch(), "watch")
    monkeypatch.setattr("oneaccord.config.plugins.manager._process_manager", lambda: manager)

    def end_of(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except oa.CommError as error:
            return type(error)

    def program(group: Group) -> list[Any]:
        sub = group.split(0)
        assert sub is not None
        x = np.ones(1000)
        if group.rank == 2:
            closed.wait()
            ends = [sub.all_reduce(x)]
            sub.close()
        else:
            works = [sub.all_reduce_async(x) for _ in range(30)]
            assert begun[group.rank].wait(PATIENCE_S)
            sub.close(timeout_s=0.01)
            assert not any(work.done() for work in works)
            assert end_of(sub.barrier_async) is end_of(lambda: sub.send(x, 2)) is oa.ClosedError
            closed.wait()
            ends = [end_of(work.wait) for work in works]
        assert group.all_reduce(x)[0] == 3
        return [end if isinstance(end, type) else end.tolist() for end in ends]

    first = [3.0] * 1000
    assert must(thread_world(program, 3, backend)) == [[first] + [oa.ClosedError] * 29] * 2 + [[first]]


def test_closing_waits_for_what_callbacks_issue(world):
    def program(group: Group) -> oa.Work[np.ndarray]:
        later: list[oa.Work[np.ndarray]] = []
        work = group.all_reduce_async(np.ones(1))
        work.add_done_callback(lambda _: later.append(group.all_reduce_async(np.full(1, 5))))
        group.close()
        return later[0]

    assert [work.wait().tolist() for work in world(program, 2)] == [[10], [10]]


def test_a_callback_may_close_the_group(world):
    def program(group: Group) -> float:
        closed = threading.Event()

        def close(_: object) -> None:
            group.close()
            closed.set()

        group.barrier_async().add_done_callback(close)
        assert closed.wait(20)
        return 1.0

    assert world(program, 2, timeout_s=60) == [1.0, 1.0]


def test_threads_may_close_one_group_at_once(world):
    def program(group: Group) -> None:
        for _ in range(3):
            sub = group.split(0)
            assert sub is not None
            failures: list[BaseException] = []

            def close(sub: Group = sub, failures: list[BaseException] = failures) -> None:
                try:
                    sub.close()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not failures

    world(program, 2)


def test_a_failure_that_a_call_has_raised_is_not_raised_again_though_works_were_in_flight(world):
    def program(group: Group) -> bool:
        group.recv_async(1 - group.rank)
        with pytest.raises(oa.CollectiveMismatchError):
            group.all_reduce(np.ones(2 + group.rank))
        return True

    assert world.outcomes(program, 2) == [True, True]


def test_what_cannot_be_called_is_no_callback(world):
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError, match="cannot be called"):
            group.barrier_async().add_done_callback(3)  # type: ignore[arg-type]

    world(program, 2)
