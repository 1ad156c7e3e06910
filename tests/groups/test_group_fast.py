"""Calls that are made again take a shorter way: what they give, refuse and find must be the same as the first time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

RANKS = 3


def again(call: Any, times: int = 3) -> list[Any]:
    return [call() for _ in range(times)]


def test_results_are_new_arrays_each_time(world):
    def program(group: Group) -> None:
        results = again(lambda: group.all_reduce(np.ones(4)))
        results[0][...] = 7
        assert [result.tolist() for result in results[1:]] == [[RANKS] * 4] * 2
        assert not any(np.may_share_memory(results[1], other) for other in (results[0], results[2]))

    world(program, RANKS)


def test_out_takes_the_result_whatever_it_shares_with_the_input(world):
    def program(group: Group) -> None:
        total = np.arange(6) * RANKS
        for _ in range(4):
            mine = np.arange(6)
            assert group.all_reduce(mine, out=mine) is mine
            np.testing.assert_array_equal(mine, total)
            memory = np.arange(8)
            assert np.shares_memory(memory[:6], memory[2:])
            group.all_reduce(memory[:6], out=memory[2:])
            np.testing.assert_array_equal(memory[2:], total)
            wide = np.zeros((6, 2), int)
            group.all_reduce(np.arange(6), out=wide[:, 1])
            np.testing.assert_array_equal(wide, np.stack([np.zeros(6, int), total], axis=1))
            backwards = np.arange(6)
            group.all_reduce(backwards, out=backwards[::-1])
            np.testing.assert_array_equal(backwards, total[::-1])

    world(program, RANKS)


def test_what_cannot_be_done_is_refused_as_the_first_time_and_changes_nothing(world):
    def program(group: Group) -> None:
        mine = np.ones(5)
        read_only = np.ones(5)
        read_only.flags.writeable = False
        for _ in range(3):
            assert group.all_reduce(mine).tolist() == [RANKS] * 5
            with pytest.raises(oa.SizeMismatchError):
                group.all_reduce(mine, out=np.ones(6))
            with pytest.raises(oa.DTypeError):
                group.all_reduce(mine, out=np.ones(5, np.float32))
            with pytest.raises(oa.LayoutError):
                group.all_reduce(mine, out=read_only)
            with pytest.raises(oa.LayoutError):
                group.all_reduce(mine, out=[0.0] * 5)
            with pytest.raises(oa.UsageError):
                group.all_reduce(mine, timeout_s=-1)
            with pytest.raises(oa.DTypeError):
                group.all_reduce(mine, ["sum"])

    world(program, RANKS)


@pytest.mark.parametrize("first_different", [1, 5])
def test_a_mismatch_is_found_on_every_rank_in_any_call(world, first_different):
    def program(group: Group) -> None:
        for number in range(8):
            group.all_reduce(np.ones(3), "max" if number == first_different and group.rank == 1 else "sum")

    outcomes = world.outcomes(program, RANKS)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * RANKS
    assert all(f"#{first_different}" in str(outcome) and 'op="max"' in str(outcome) for outcome in outcomes)


def test_a_shorter_array_and_a_barrier_instead_of_it_are_mismatches(world):
    def shorter(group: Group) -> None:
        for number in range(6):
            group.all_reduce(np.ones(2 if number == 4 and group.rank == 2 else 300))

    def barrier(group: Group) -> None:
        for number in range(6):
            if number == 4 and group.rank == 0:
                group.barrier()
            else:
                group.all_reduce(np.ones(3))

    for program in (shorter, barrier):
        outcomes = world.outcomes(program, RANKS)
        assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * RANKS


def test_a_rank_that_stays_away_ends_the_call_at_the_deadline(world):
    ready = threading.Event()

    def program(group: Group) -> None:
        again(lambda: group.all_reduce(np.ones(3)))
        again(group.barrier)
        if group.rank == 1:
            assert ready.wait(PATIENCE_S)
        else:
            try:
                group.all_reduce(np.ones(3), timeout_s=0.5)
            finally:
                ready.set()

    outcomes = world.outcomes(program, 2)
    assert isinstance(outcomes[0], oa.DeadlineError)
    assert "all_reduce #6" in str(outcomes[0])
    assert outcomes[0].rank == 0


def test_calls_after_close_are_refused(world):
    def program(group: Group) -> None:
        child = group.split(0)
        for one in (child, group):
            again(lambda one=one: one.all_reduce(np.ones(3)))
            again(one.barrier)
            one.close()
            for call in (lambda one=one: one.all_reduce(np.ones(3)), one.barrier):
                with pytest.raises(oa.ClosedError):
                    call()

    world(program, 2)


def test_a_reduction_for_one_rank_leaves_the_arrays_of_the_others_alone(world):
    def program(group: Group) -> None:
        for _ in range(4):
            mine = np.full(5, 8.0)
            result = group.reduce(mine, "mean", root=1, out=mine)
            assert (result is mine) == (group.rank == 1)
            assert mine.tolist() == [8.0] * 5
            with np.errstate(all="raise"):
                total = group.reduce(np.full(5, 3.0), "mean", root=1)
            assert (total is None) == (group.rank != 1)

    world(program, RANKS)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_collectives_give_again_what_they_gave(world, op):
    def program(group: Group) -> None:
        size = group.world_size
        for turn in range(4):
            base = np.arange(6.0 * size).reshape(2 * size, 3)
            mine = base + group.rank * 10 + turn
            everyone = [base + rank * 10 + turn for rank in range(size)]
            total = sum(everyone) / (size if op == "mean" else 1)
            part = slice(2 * group.rank, 2 * group.rank + 2)
            reduced = group.reduce(mine, op, root=2)
            if group.rank == 2:
                np.testing.assert_array_equal(reduced, total)
            np.testing.assert_array_equal(group.broadcast(mine, 1), everyone[1])
            np.testing.assert_array_equal(group.all_gather(mine), np.concatenate(everyone))
            np.testing.assert_array_equal(group.reduce_scatter(mine, op), total[part])
            np.testing.assert_array_equal(group.all_to_all(mine), np.concatenate([each[part] for each in everyone]))
            np.testing.assert_array_equal(mine, base + group.rank * 10 + turn)
            with pytest.raises(oa.InvalidRankError):
                group.broadcast(mine, True)

    world(program, RANKS)


def test_an_unusual_call_leaves_the_fast_way_of_the_usual_ones_as_it_is(world):
    """Made anew for each call that goes the long way, it would cost more than it saves."""

    def program(group: Group) -> None:
        x, other = np.ones((4, 4)), 1 - group.rank
        usual = [
            lambda: group.all_gather(x),
            lambda: group.send(x, other) if group.rank == 0 else group.recv(other),
            lambda: group.sendrecv(x, other, other),
        ]
        unusual = [
            lambda: group.all_gather(x.T),
            lambda: group.send_async(x, other).wait() if group.rank == 0 else group.recv_async(other).wait(),
            lambda: group.sendrecv(x, other, other, out=np.ones((8, 4))[::2]),
        ]
        for call in usual * 2:
            call()
        before = list(group._fast.values())
        for call in [*unusual, *usual] * 2:
            call()
        assert [id(fast) for fast in group._fast.values()] == [id(fast) for fast in before]

    world(program, 2)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("where", ["collective", "message"])
def test_a_signal_before_a_fast_call_has_begun_leaves_the_group_as_it_was(backend, monkeypatch, where):
    """Between taking its turn and drawing its number."""

    together = threading.Barrier(2)

    def interrupted() -> float:
        raise KeyboardInterrupt

    def program(group: Group) -> None:
        x, other = np.ones(3), 1 - group.rank
        call = {
            "collective": lambda: group.all_reduce(x),
            "message": lambda: group.send(x, other) if group.rank == 0 else group.recv(other),
        }[where]
        for _ in range(3):
            call()
        together.wait(PATIENCE_S)  # the other rank must make no call meanwhile
        if group.rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr("oneaccord.calls.order.counters._now", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call()
        together.wait(PATIENCE_S)
        group.barrier()
        call()

    must(thread_world(program, 2, backend, config={"native": False}))  # C is not interrupted there
