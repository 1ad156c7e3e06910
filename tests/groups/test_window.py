"""Windows: elements, atomic changes, locks, epochs, and what goes wrong, on all backends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, stories, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.calls.windows.places import Place, locate

OWN = pytest.mark.parametrize("own", [False, True], ids=["made", "own"])
LONG = 300_000
"""Elements that go in several requests."""


def made(length: int, dtype: str, own: bool):
    """Return what makes a window of zeros: a shape, or an array."""
    return (np.zeros(length, dtype),) if own else (length, dtype)


@OWN
def test_put_and_get_move_elements(world, own):
    def program(group: Group) -> None:
        rank, right = group.rank, (group.rank + 1) % 3
        with group.window(*made(10, "int64", own)) as win:
            win.put(np.arange(3) + 10 * rank, right, at=2)
            win.put(7, right)
            win.put([8, 9], right, np.s_[-1:6:-2])
            win.fence()
            left = (rank - 1) % 3
            expected = [7, 0, 10 * left, 10 * left + 1, 10 * left + 2, 0, 0, 9, 0, 8]
            assert win.local.tolist() == expected
            assert win.get(rank).tolist() == expected
            there = [7, 0, 10 * rank, 10 * rank + 1, 10 * rank + 2, 0, 0, 9, 0, 8]
            assert win.get(right).tolist() == there
            assert win.get(right, np.s_[4:1:-1]).tolist() == there[4:1:-1]
            one = win.get(right, 3)
            assert (one, one.dtype, one.shape) == (10 * rank + 1, np.int64, ())
            out = np.zeros((2, 4), np.int64)[:, ::2]
            assert win.get(right, 2, out=out) is out
            assert out.tolist() == [there[2:4], there[4:6]]
            assert win.get(right, np.s_[3:3]).shape == (0,)
            win.put([], right, np.s_[3:3])
            assert win.lengths == (10, 10, 10)

    world(program, 3)


@OWN
def test_long_put_get_and_accumulate_come_whole(world, own):
    def program(group: Group) -> None:
        values = np.arange(LONG, dtype=np.float64)
        with group.window(*made(LONG + 7, "float64", own)) as win:
            other = 1 - group.rank
            win.put(values, other, at=3)
            win.put(-1.0, other, at=4)
            win.flush(other)
            values[1] = -1
            assert np.array_equal(win.get(other, np.s_[3 : LONG + 3]), values)
            win.fence()
            win.accumulate(np.ones(LONG), 0, at=3)
            win.fence()
            assert np.array_equal(win.get(0, np.s_[3 : LONG + 3]), values + 2)
            win.fence()
            if group.rank == 1:
                assert np.array_equal(win.fetch_and_op(values, 0, 3, "replace"), values + 2)
                assert np.array_equal(win.compare_and_swap(values, values * 2, 0, 3), values)
            win.fence()
            if group.rank == 0:
                assert np.array_equal(win.local[3:-4], values * 2)

    world(program, 2)


@OWN
def test_every_op_changes_as_numpy_does(world, own):
    ops = {
        "sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "xor": np.bitwise_xor,
        np.bitwise_or: np.bitwise_or,
    }

    def program(group: Group) -> None:
        with group.window(*made(4, "int32", own)) as win:
            for op, ufunc in ops.items():
                before, more = np.array([5, -3, 12, 0], np.int32), np.array([3, 9, -7, 1], np.int32)
                if group.rank == 0:
                    win.put(before, 1)
                    assert win.fetch_and_op(more[:2], 1, 1, op).tolist() == before[1:3].tolist()
                    win.accumulate(more[:2], 1, np.s_[:4:3], op)
                win.fence()
                if group.rank == 1:
                    expected = before.copy()
                    expected[1:3] = ufunc(before[1:3], more[:2])
                    expected[::3] = ufunc(before[::3], more[:2])
                    assert win.local.tolist() == expected.tolist()
                win.fence()

    world(program, 2)


@OWN
def test_atomic_changes_of_all_ranks_add_up(world, own):
    def program(group: Group) -> list[int]:
        with group.window(*made(3, "int64", own)) as win:
            seen = [int(win.fetch_and_op(1, 0, 1)) for _ in range(20)]
            for _ in range(10):
                old = win.fetch_and_op(0, 1, 2)
                while (now := win.compare_and_swap(old, old + 1, 1, 2)) != old:
                    old = now
            win.accumulate([1, 2], 2, at=1)
            win.fence()
            assert win.get(0, 1) == 60
            assert win.get(1, 2) == 30
            assert win.get(2).tolist() == [0, 3, 6]
            return seen

    numbers = world(program, 3)
    assert sorted(number for mine in numbers for number in mine) == list(range(60))
    assert all(mine == sorted(mine) for mine in numbers)


def test_compare_and_swap_compares_bits(world):
    def program(group: Group) -> None:
        with group.window(3, "float64") as win:
            win.put([0.0, np.nan, 1.0], 0)
            old = win.compare_and_swap([-0.0, np.nan, 1.0], [5.0, 6.0, 7.0], 0)
            assert str(old) == "[ 0. nan  1.]"
            assert win.get(0).tolist() == [0.0, 6.0, 7.0]

    world(program, 1)


@OWN
def test_exclusive_locks_exclude(world, own):
    def program(group: Group) -> None:
        with group.window(*made(2, "int64", own)) as win:
            for _ in range(10):
                with win.lock(1):
                    count = win.get(1, 0)
                    win.put(count + 1, 1, 0)
            with win.lock(2, shared=True):
                win.accumulate(1, 2)
            with win.lock_all():
                assert win.get(2, 1) == 0
            win.fence()
            assert win.get(1, 0) == 30
            assert win.get(2, 0) == 3

    world(program, 3)


@OWN
def test_shared_locks_are_held_together(world, own):
    def program(group: Group) -> None:
        with group.window(*made(1, "int64", own)) as win:
            with win.lock(0, shared=True):
                group.barrier()  # which none would pass that waits for another one's lock
            win.lock(group.rank)
            group.barrier()
            win.unlock()

    world(program, 3)


@OWN
def test_post_start_complete_wait(world, own):
    def program(group: Group) -> None:
        with group.window(*made(3, "float64", own)) as win:
            for round_ in range(3):
                if group.rank == 0:
                    win.post([1, 2])
                    win.wait()
                    assert win.local.tolist() == [0.0, 10.0 + round_, 20.0 + round_]
                else:
                    win.start([0])
                    win.put(10.0 * group.rank + round_, 0, group.rank)
                    win.complete()

    world(program, 3)


def test_ranks_bring_what_they_have(world):
    point = np.dtype([("x", "f4"), ("n", "i8")])

    def program(group: Group) -> None:
        mine = [np.zeros((2, 3), point), None, 5][group.rank]
        with group.window(mine, point if group.rank == 2 else None) as win:
            assert win.lengths == (6, 0, 5)
            assert win.dtype == point
            assert win.local.shape == [(2, 3), (0,), (5,)][group.rank]
            win.put(np.array([(group.rank, 7)], point), 0, at=group.rank)
            win.put(np.array([(group.rank, 8)], point), 2, at=group.rank)
            win.fence()
            if group.rank == 0:
                assert win.local is mine
                assert win.local["x"].tolist() == [[0, 1, 2], [0, 0, 0]]
                assert win.local["n"].tolist() == [[7, 7, 7], [0, 0, 0]]
            assert win.get(2)["n"].tolist() == [8, 8, 8, 0, 0]
            with pytest.raises(oa.SizeMismatchError, match="rank 1, which has 0"):
                win.get(1, 0)

    world(program, 3)


@OWN
def test_wrong_arguments_leave_window_and_group_usable(world, own):
    def program(group: Group) -> None:
        with pytest.raises(oa.DTypeError, match="one dtype to a window, and there are rank 0 float32; rank 1 int64"):
            group.window(3, ["float32", "int64"][group.rank])
        with group.window(*made(4, "float64", own)) as win:
            if group.rank == 0:
                wrong = [
                    (oa.InvalidRankError, lambda: win.put(1.0, 2)),
                    (oa.SizeMismatchError, lambda: win.put(np.zeros(3), 1, at=2)),
                    (oa.SizeMismatchError, lambda: win.put(np.zeros(3), 1, np.s_[0:2])),
                    (oa.SizeMismatchError, lambda: win.get(1, np.s_[2:5])),
                    (oa.SizeMismatchError, lambda: win.get(1, 4)),
                    (oa.SizeMismatchError, lambda: win.get(1, -5)),
                    (oa.UsageError, lambda: win.get(1, "x")),
                    (oa.DTypeError, lambda: win.get(1, out=np.zeros(4, "f4"))),
                    (oa.SizeMismatchError, lambda: win.get(1, np.s_[:], out=np.zeros(3))),
                    (oa.DTypeError, lambda: win.put(np.zeros(3, "f4"), 1)),
                    (oa.DTypeError, lambda: win.put(1j, 1)),
                    (oa.DTypeError, lambda: win.accumulate(1.0, 1, op="xor")),
                    (oa.DTypeError, lambda: win.accumulate(1.0, 1, op="plus")),
                    (oa.UsageError, lambda: win.accumulate(1.0, 1, op="mean")),
                    (oa.UsageError, lambda: win.accumulate(1.0, 1, op=lambda a, b: a + b)),
                    (oa.SizeMismatchError, lambda: win.compare_and_swap([1.0, 2.0], 3.0, 1)),
                    (oa.UsageError, lambda: win.unlock(1)),
                    (oa.UsageError, win.complete),
                    (oa.UsageError, win.wait),
                    (oa.UsageError, lambda: win.start([])),
                    (oa.UsageError, lambda: win.post([1, 1])),
                ]
                for kind, call in wrong:
                    with pytest.raises(kind):
                        call()
                with win.lock(1):
                    with pytest.raises(oa.UsageError, match="holds the lock of rank 1's window already"):
                        win.lock(1)
                    with pytest.raises(oa.UsageError, match="before unlock"):
                        win.close()
            win.accumulate(1, 1)
            win.fence()
            assert win.get(1).tolist() == [2, 0, 0, 0]
        win.close()
        with pytest.raises(oa.ClosedError, match="after close"):
            win.put(1.0, 0)
        assert win.local.shape == (4,)
        assert group.all_reduce(1) == 2

    world(program, 2)


@OWN
def test_target_that_computes_is_served(world, own):
    def program(group: Group) -> float:
        with group.window(*made(1, "int64", own)) as win:
            done = 0.0
            if group.rank == 0:
                started = time.monotonic()
                for _ in range(5):
                    with win.lock(1):
                        win.put(win.get(1, 0) + 1, 1)
                done = time.monotonic() - started
                group.send(np.zeros(1), 1)
            else:
                oa.sleep(1.5)  # in no call of the group
                group.recv(0)
                assert win.local[0] == 5
            return done

    assert max(world(program, 2)) < 1.2


def test_open_window_keeps_no_group_from_closing(world):
    def program(group: Group) -> float:
        with group.window(np.zeros(1)) as win:
            group.barrier()
            started = time.monotonic()
            with group.split(0) as other:
                other.send(np.zeros(1), (group.rank + 1) % 2, tag=1)
                other.recv(oa.ANY, tag=1)
            took = time.monotonic() - started
            win.fence()
        return took

    assert max(world(program, 2)) < 5


@OWN
def test_wait_for_a_lock_behind_a_barrier_is_no_deadlock(world, own):
    def program(group: Group) -> None:
        with group.window(*made(1, "int64", own)) as win:
            if group.rank == 0:
                win.lock(1)
                group.barrier()
                oa.sleep(1.5)  # long enough to be found, if it were one
                win.unlock(1)
                group.barrier()
            else:
                group.barrier()
                if group.rank == 2:
                    with win.lock(1):
                        pass
                group.barrier()

    world(program, 3)


@OWN
def test_locks_in_a_circle_end_by_an_error_on_all_ranks(world, own):
    def program(group: Group) -> None:
        with group.window(*made(1, "int64", own)) as win, win.lock(group.rank):
            group.barrier()
            win.lock(1 - group.rank, timeout_s=1)

    outcomes = world.outcomes(program, 2)
    kind = oa.DeadlockError if world.backend.endswith("simulated") else oa.DeadlineError
    assert [type(outcome) for outcome in outcomes] == [kind] * 2
    assert "window.lock at rank" in str(outcomes[0])


@OWN
def test_error_says_who_waits_for_a_lock(world, own):
    def program(group: Group) -> None:
        with group.window(*made(1, "int64", own)) as win:
            if group.rank == 1:
                win.lock(0)
            group.barrier()
            if group.rank == 1:
                group.barrier()
            else:
                win.lock(0, timeout_s=1)

    for outcome in world.outcomes(program, 2):
        told = stories(str(outcome))
        assert "window.lock at rank 0" in told[0]
        assert "barrier()" in told[1]


def test_threads_of_a_rank_use_a_window_together(world):
    def program(group: Group) -> None:
        with group.window(np.zeros(2, "int64")) as own, group.window(2, "int64") as made_:

            def work() -> None:
                for win in (own, made_):
                    for _ in range(20):
                        win.fetch_and_op(1, 0)
                        win.accumulate(1, 1, 1)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for win in (own, made_):
                win.fence()
                assert win.get(0, 0) == 80
                assert win.get(1, 1) == 80

    world(program, 2)


def test_windows_of_some_ranks_count_by_the_group(world):
    def program(group: Group) -> None:
        with group.split(group.rank % 2) as half:
            for own in (False, True):
                with half.window(*made(4, "float64", own)) as win:
                    win.put(float(group.rank), 1 - half.rank, 1)
                    win.fence()
                    assert win.local[1] == half.ranks[1 - half.rank]
                    with win.lock(1), win.lock(0, shared=True):
                        pass

    world(program, 4)


@OWN
def test_world_of_one_has_windows(world, own):
    def program(group: Group) -> None:
        with group.window(*made(3, "float64", own)) as win:
            with win.lock(0):
                win.put([1.0, 2.0], 0, 1)
            win.post([0])
            win.start([0])
            assert win.fetch_and_op(5.0, 0, 2) == 2
            win.complete()
            win.wait()
            assert win.local.tolist() == [0, 1, 7]
        with group.window(None) as empty:
            empty.fence()

    world(program, 1)


def test_ranks_mix_arrays_of_their_own_with_made_ones(world):
    def program(group: Group) -> None:
        with group.window(np.zeros(2) if group.rank == 1 else 2) as win:
            for _ in range(20):
                for target in range(3):
                    win.accumulate(1.0, target)
                with win.lock(2):
                    win.put(win.get(2, 1) + 1, 2, 1)
            win.fence()
            assert win.local.tolist() == [60, 60 if group.rank == 2 else 0]

    world(program, 3)


def test_a_handler_in_the_middle_of_a_change_is_refused():
    def program(group: Group) -> None:
        with group.window(2, "int64") as win:
            direct = win._parts.direct
            with direct.atomic(1 - group.rank, "a test", 5.0):
                with pytest.raises(oa.UsageError, match="a signal handler called window"):
                    win.accumulate(1, 1 - group.rank)
                win.put(1, 1 - group.rank)
            win.accumulate(1, 1 - group.rank)
            win.fence()
            assert win.local.tolist() == [2, 0]

    must(thread_world(program, 2, "shm"))


@pytest.mark.parametrize("backend", ["tcp", "shm", "hybrid"])
def test_flight_recorder_keeps_the_calls(backend: str) -> None:
    def program(group: Group) -> list[str]:
        with group.window(2) as made_, group.window(np.zeros(2)) as own:
            for win in (made_, own):
                win.put(1.0, 1 - group.rank)
                with win.lock(0):
                    pass
            return [str(what) for _, _, what, *_ in group._post._shorts.short()]

    calls = must(thread_world(program, 2, backend))[0]
    names = ["window.put at rank 1, [0]", "window.lock at rank 0", "window.unlock at rank 0"]
    assert [call for call in calls if not call.startswith("window.flush")] == names * 2


def test_calls_are_seen_by_name() -> None:
    from oneaccord_simulated import run

    def program(group: Group) -> None:
        with group.window(2) as win:
            win.put(1.0, 1 - group.rank)
            win.get(1 - group.rank, out=np.zeros(2))
            with win.lock(0):
                pass

    trace = run(program, 2).trace
    names = [event.operation for event in trace.calls if event.rank == 1]
    for name in ("window.put", "window.get", "window.lock", "window.unlock"):
        assert name in names
    assert "window.put at rank 1, [0]" in str([event.what for event in trace.calls])


# Parts


@settings(max_examples=300)
@given(*(st.tuples(st.integers(0, 30), st.integers(-7, 7).filter(bool), st.integers(0, 8)) for _ in range(2)))
def test_places_meet_if_they_share_an_element(first, second):
    both = [Place(*each) for each in (first, second)]
    one, other = ({place.start + place.step * index for index in range(place.size)} for place in both)
    assert both[0].meets(both[1]) == bool(one & other) == both[1].meets(both[0])


@settings(max_examples=300)
@given(
    st.integers(0, 12),
    st.slices(12) | st.integers(-14, 14),
)
def test_elements_are_those_of_numpy_or_refused(length, at):
    flat = np.arange(length)
    try:
        place = locate(at, None, length, 0)
    except oa.SizeMismatchError:
        if not isinstance(at, slice):
            with pytest.raises(IndexError):
                flat[at]
        else:
            assert any(each is not None and not -length <= each <= length for each in (at.start, at.stop))
        return
    assert place.of(flat).tolist() == flat[at].reshape(-1).tolist()
    if place.size:
        assert place.part(1, place.size - 1).of(flat).tolist() == flat[at].reshape(-1).tolist()[1:]


_CALL = st.tuples(
    st.sampled_from(["put", "get", "accumulate", "fetch_and_op", "compare_and_swap"]),
    st.integers(0, 1),
    st.integers(0, 5),
    st.integers(0, 6).map(lambda count: list(range(count))),
    st.sampled_from(["sum", "min", "xor", "replace"]),
)


@pytest.mark.parametrize("own", [False, True])
@settings(max_examples=25)
@given(st.lists(_CALL, max_size=12))
def test_calls_do_what_they_do_to_an_array(own, calls):
    model = [np.zeros(6, np.int64), np.zeros(6, np.int64)]
    ufuncs = {"sum": np.add, "min": np.minimum, "xor": np.bitwise_xor, "replace": lambda old, new: new}

    def program(group: Group) -> None:
        with group.window(*made(6, "int64", own)) as win:
            for name, target, at, values, op in calls if group.rank == 0 else ():
                array = np.array(values, np.int64) + 3 * at
                part = model[target][at : at + len(array)]
                if len(part) < len(array):
                    with pytest.raises(oa.SizeMismatchError):
                        win.put(array, target, at)
                    continue
                old = part.copy()
                if name == "put":
                    win.put(array, target, at)
                    part[:] = array
                elif name == "get":
                    assert win.get(target, np.s_[at : at + len(array)]).tolist() == old.tolist()
                elif name == "compare_and_swap":
                    expected = np.where(array % 2 == 0, old, -1)
                    assert win.compare_and_swap(expected, array, target, at).tolist() == old.tolist()
                    part[:] = np.where(expected == old, array, old)
                else:
                    result = getattr(win, name)(array, target, at, op)
                    assert result is None or result.tolist() == old.tolist()
                    part[:] = ufuncs[op](old, array)
            win.fence()
            assert win.local.tolist() == model[group.rank].tolist()

    must(thread_world(program, 2, "simulated"))
