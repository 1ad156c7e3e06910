"""Races for elements of windows: which calls have an order, and which do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_simulated import explore
from oneaccord_simulated.races import Races


def both_put(group: Group, win: oa.Window) -> None:
    if group.rank:
        win.put(1.0, 0, at=3)


def message_without_flush(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        win.put(np.ones(3), 0, at=3)
        group.send(np.zeros(1), 2)
    elif group.rank == 2:
        group.recv(1)
        win.get(0, np.s_[5:8])


def flush_without_message(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        win.put(np.ones(3), 0, at=3)
        win.flush(0)
    elif group.rank == 2:
        oa.sleep(1.0)  # which orders nothing
        win.get(0, np.s_[:6:5])


def message_the_other_way(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        group.recv(2, tag=1)
        win.put(1.0, 0)
        win.flush()
    elif group.rank == 2:
        group.send(np.zeros(1), 1, tag=1)
        win.get(0, 0)


def get_beside_accumulate(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        win.get(2, 0)
    else:
        win.accumulate(1.0, 2)


def shared_locks(group: Group, win: oa.Window) -> None:
    with win.lock(0, shared=True):
        win.put(1.0, 0)


def another_lock(group: Group, win: oa.Window) -> None:
    with win.lock(group.rank):
        win.put(1.0, 0)


RACES = [
    both_put,
    message_without_flush,
    flush_without_message,
    message_the_other_way,
    get_beside_accumulate,
    shared_locks,
    another_lock,
]


def fences(group: Group, win: oa.Window) -> None:
    for _ in range(40):  # so that old calls are forgotten
        win.put(1.0, 0, group.rank)
        win.fence()
        win.get(0)
        win.fence()
    win.put(1.0, 1, group.rank)
    win.flush()
    group.all_reduce(1)
    win.get(1)


def locks(group: Group, win: oa.Window) -> None:
    for _ in range(3):
        with win.lock(1):
            win.put(win.get(1, 0) + 1, 1)
        with win.lock(1, shared=True):
            win.get(1)


def flush_and_message(tag: int | None) -> Callable[[Group, oa.Window], None]:
    def program(group: Group, win: oa.Window) -> None:
        if group.rank == 1:
            win.put(np.ones(3), 0, at=3)
            win.flush()
            group.send(np.zeros(1), 2, tag=tag)
        elif group.rank == 2:
            group.recv(1, tag=tag)
            win.get(0, np.s_[5:8])

    return program


def request_and_store(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        win.put(1.0, 0)
        win.flush()
        group.send_async(np.zeros(1), 2, tag=7).wait()
    elif group.rank == 2:
        work = group.recv_async(oa.ANY, tag=7)
        work.wait()
        win.put(2.0, 0)
        win.flush()
    group.split(0)
    win.get(0)


def flag(group: Group, win: oa.Window) -> None:
    if group.rank == 1:
        win.put(5.0, 0)
        win.flush(0)
        win.accumulate(1.0, 2, at=1)
    else:
        while win.fetch_and_op(0.0, 2, at=1) == 0:
            oa.sleep(0)
        win.get(0, 0)


def post_and_start(group: Group, win: oa.Window) -> None:
    if group.rank == 0:
        win.put([1.0, 1.0, 1.0], 0)
        win.post([1, 2])
        win.wait()
        assert win.get(0, np.s_[:3]).tolist() == [1, 2, 3]
    else:
        win.start([0])
        win.put(1.0 + group.rank, 0, group.rank)
        win.complete()


def other_elements(group: Group, win: oa.Window) -> None:
    win.put([1.0, 2.0], 0, np.s_[group.rank : group.rank + 6 : 5])
    win.accumulate(1.0, 1)
    win.compare_and_swap(0.0, 1.0, 1)
    win.get(2)


ORDERED = {
    "fences": fences,
    "locks": locks,
    "flush and message": flush_and_message(None),
    "flush and tag": flush_and_message(3),
    "request and store": request_and_store,
    "flag": flag,
    "post and start": post_and_start,
    "other elements": other_elements,
}


def with_window(body: Callable[[Group, oa.Window], None]) -> Callable[[Group], None]:
    def program(group: Group) -> None:
        with group.window(10) as win:
            body(group, win)

    return program


@pytest.mark.parametrize("body", RACES, ids=lambda body: body.__name__)
def test_race_is_an_error_under_every_seed(body: Callable[[Group, oa.Window], None]) -> None:
    for seed in range(10):
        found = explore(with_window(body), 3, [seed], alike=False)
        assert isinstance(found.error, oa.RaceError), found.error
        assert found.run is not None
        assert {type(error) for error in found.run.errors.values()} == {oa.RaceError}
        lines = [line for line in str(found.error).split() if "test_simulated_races.py:" in line]
        assert len(lines) == 2
        assert "a race for elements of the window of rank" in str(found.error)


def test_race_names_both_ranks_and_calls() -> None:
    text = str(explore(with_window(message_without_flush), 3, range(3)).error)
    first = message_without_flush.__code__.co_firstlineno
    assert f"rank 1 in window.put at rank 0, [3:6] at plugins/simulated/tests/test_simulated_races.py:{first + 2}, and " in text
    assert f"rank 2 in window.get at rank 0, [5:8] at plugins/simulated/tests/test_simulated_races.py:{first + 6}. " in text
    assert "the call of rank 1 was not complete" in text
    complete = str(explore(with_window(flush_without_message), 3, range(1)).error)
    assert "was not complete" not in complete


@pytest.mark.parametrize("body", ORDERED.values(), ids=ORDERED)
def test_ordered_calls_are_no_race(body: Callable[[Group, oa.Window], None]) -> None:
    explore(with_window(body), 3, range(8)).raise_failure()


def test_old_calls_are_forgotten() -> None:
    races = Races(2, lambda: "")
    assert races.begins("simulated")

    class One:
        def meets(self, other: object) -> bool:
            return True

    for _ in range(1000):
        for rank in (0, 1):
            assert not races.access(1, rank, 0, One(), "put", writes=True, is_atomic=False, ends=True)
            races.gives(rank, "key")
            races.takes(1 - rank, "key")
    assert sum(map(len, races._accesses.values())) < 100
