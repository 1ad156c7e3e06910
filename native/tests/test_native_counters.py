"""The counters of C do what those of Python do, and calls that C makes keep what Python promises."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.worlds import must, thread_world

from oneaccord.api import Group
from oneaccord.calls.order.counters import PythonCounters

native = pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

BACKENDS = ["shm", "tcp"]
STEPS = st.sampled_from(["take", "queue", "give", "drop", "begin", "leave", "undo", "count", "set"])


def story(counters: Any, counted: Any, steps: list[tuple[str, int]]) -> list[object]:
    """Take steps; return all that can be seen of them."""
    told: list[object] = []
    turns: list[object] = []
    begun = False
    for step, number in steps:
        match step:
            case "take":
                told.append(counters.take())
            case "queue":
                turns.append((None, object()))
                told.append(counters.take(turns[-1]))
            case "give":
                turn = counters.give()
                told.append(None if turn is None else turns.index(turn))
            case "drop" if turns:
                told.append(counters.drop(turns[number % len(turns)]))
            case "begin" if not begun:
                told.append(counters.begin(f"call {number}"))
                begun = True
            case "leave" if begun:
                counters.leave()
                begun = False
            case "undo" if begun:
                counters.undo()
                begun = False
            case "count":
                told.append(counted.count_message())
            case "set":
                counters.next = 1 + number  # a call that has begun, and is undone, has a number of its own
        told += [counters.busy, counters.next, counted.messages]
        told.append([(channel, call, what, finished > 0) for channel, call, what, _, finished in counters.short()])
    return told


@given(st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=150), st.booleans())
def test_counters_of_both_forms_say_the_same(steps: list[tuple[str, int]], is_counted: bool) -> None:
    one, other = PythonCounters(4), native.Counters(4)
    both = [(PythonCounters(5, one), one), (native.Counters(5, other), other)] if is_counted else [(one, one), (other, other)]
    assert story(*both[0], steps) == story(*both[1], steps)


@given(st.integers(1, 40), st.integers(0, 100))
def test_counters_keep_as_many_calls_as_they_are_told(kept: int, count: int) -> None:
    for counters in (PythonCounters(4, None, kept), native.Counters(4, None, kept)):
        for number in range(count):
            counters.begin(number)
            counters.leave()
        assert [call for _, call, *_ in counters.short()] == list(range(count))[-kept:]


@pytest.mark.parametrize("wrong", [0, -1, 1 << 62])
def test_counters_that_could_keep_nothing_are_not_made(wrong: int) -> None:
    with pytest.raises((ValueError, MemoryError)):
        native.Counters(0, None, wrong)


def test_many_turns_come_in_their_order() -> None:
    counters = native.Counters()
    assert counters.take()
    turns = [(None, number) for number in range(1000)]
    assert not any(counters.take(turn) for turn in turns)
    assert [counters.give() for _ in turns] == turns
    assert counters.give() is None
    assert not counters.busy


@pytest.mark.parametrize("wrong", [1, object(), PythonCounters()])
def test_counters_are_counted_in_counters_of_their_form(wrong: object) -> None:
    with pytest.raises(TypeError, match="other counters of this form"):
        native.Counters(1, wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_of_a_group_take_turns(backend: str) -> None:
    """Whoever finds the turn taken goes the long way, and waits for it there."""

    def program(group: Group) -> list[float]:
        found: list[float] = []

        def work() -> None:
            found.extend(float(group.all_reduce(np.ones(3))[0]) for _ in range(200))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert must(thread_world(program, 2, backend)) == [[2.0] * 600] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kind_that_both_ends_have_forgotten_is_described_anew(backend: str) -> None:
    def program(group: Group) -> bool:
        other = 1 - group.rank
        for _ in range(2):
            for length in range(300):  # more kinds than a direction remembers
                for _ in range(2):
                    if group.rank == 0:
                        group.send(np.full(length % 150, length, np.int32 if length < 150 else np.float32), other)
                    else:
                        came = group.recv(other)
                        assert came.dtype == (np.int32 if length < 150 else np.float32)
                        assert came.tolist() == [length] * (length % 150)
        return True

    assert must(thread_world(program, 2, backend)) == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_group_was_is_freed_when_it_is_closed(backend: str) -> None:
    def program(group: Group) -> Any:
        x = np.ones(4)
        for _ in range(3):
            group.all_reduce(x)
            group.sendrecv(x, 1 - group.rank, 1 - group.rank)
            if group.rank == 0:
                group.send(x, 1)
            else:
                group.recv(0)
        return weakref.ref(group)

    groups = must(thread_world(program, 2, backend))
    gc.collect()
    assert [group() for group in groups] == [None, None]
