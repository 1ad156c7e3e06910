"""`Group.agree`: one answer on all that are left, whoever dies and whenever. `Group.revoke`: nobody waits any more."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fault_tools import Nursery
from support.shrink_tools import GOING_ON, places
from support.worlds import over_sockets, thread_world

import oneaccord as oa
import oneaccord_simulated as simulated


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=4))
def test_all_get_the_bitwise_and_of_all_flags(flags: list[int]) -> None:
    done = simulated.run(lambda group: group.agree(flags[group.rank]), len(flags))
    expected = -1
    for flag in flags:
        expected &= flag
    assert done.results == [expected] * len(flags)


def test_a_bool_comes_back_as_a_bool_and_groups_do_not_disturb_each_other() -> None:
    def program(group: oa.Group) -> Any:
        with group.split(group.rank % 2) as part:
            return part.agree(group.rank != 2), group.agree(True), part.agree(True)

    assert simulated.run(program, 4).results == [(False, True, True), (True, True, True)] * 2


@pytest.mark.parametrize("flag", [None, 1.0, "1", 1 << 63])
def test_what_is_no_flag_is_refused_and_the_group_stays_usable(flag: Any) -> None:
    def program(group: oa.Group) -> Any:
        with pytest.raises(oa.UsageError, match=r"flag must be a bool or an integer of 64 bits"):
            group.agree(flag)
        return group.agree(5)

    assert thread_world(program, 2, "simulated") == [5, 5]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_whoever_dies_and_whenever_the_others_agree_on_one_answer_and_again_after_it(seed: int) -> None:
    """Each rank killed at each moment, in the order of events of a seed."""

    def program(group: oa.Group) -> Any:
        said = []
        for turn in range(3):
            group.compute(1.0)
            with contextlib.suppress(oa.PeerLostError):
                group.all_reduce(1)
            for part in range(group.rank):
                group.compute(0.1 * part)
            said.append(group.agree(7 ^ 1 << group.rank if turn == 1 else 7))
        return said

    told = set()
    for victim, moment in itertools.product(range(3), range(34)):
        fault = simulated.Kill(rank=victim, at_s=0.05 + moment / 10)
        done = simulated.run(program, 3, seed, faults=fault, check=False)
        answers = [done.results[rank] for rank in range(3) if rank != victim]
        assert answers[0] is not None, done.errors
        assert answers[0] == answers[1]
        assert (answers[0][0], answers[0][2]) == (7, 7)
        told.add((victim, answers[0][1]))
    assert told == {(victim, flag) for victim in range(3) for flag in (0, 1 << victim)}  # before its own flag came, and after


def test_it_works_on_a_group_that_has_failed() -> None:
    def program(group: oa.Group) -> Any:
        if group.rank == 1:
            group.revoke()
        with pytest.raises(oa.AbortedError, match="rank 1 revoked the group") as caught:
            group.barrier()
        assert caught.value.peer == 1
        return group.agree(True), group.agree(group.rank)

    assert thread_world(program, 3, "simulated") == [(True, 0)] * 3


def test_who_does_not_come_is_named_on_all_who_wait_and_all_may_call_again() -> None:
    asking = threading.Barrier(2)

    def program(group: oa.Group) -> Any:
        problem = None
        if group.rank != 2:
            asking.wait(30)
            with pytest.raises(oa.DeadlineError) as caught:
                group.agree(True, timeout_s=1)
            problem = caught.value.peer, str(caught.value)
        group.barrier()
        return group.agree(group.rank + 1), problem

    first, second, late = over_sockets(program, 3)
    assert first == second
    assert (first[0], late) == (0, (0, None))
    assert first[1] == (
        2,
        "agree #0 of the group of all ranks did not end within 1 s: rank 2 did not come, and did not end either; every surviving member must call it",
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_the_store_and_its_successor_may_die_in_the_midst_of_it(nursery: Nursery, victim: int) -> None:
    program = (
        GOING_ON
        + f"""
group = oa.init(timeout_s=30)
group.barrier()
tell("running")
if rank == {victim}:
    time.sleep(60)
tell("agreed", on=[group.agree(7 ^ 1 << rank), group.agree(True)])
"""
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(victim, signal.SIGKILL)
        agreed = ranks.await_facts("agreed", 3)
        ranks.wait()
    left = sum(1 << rank for rank in (0, 1, 2) if rank != victim)
    assert [fact["on"] for fact in agreed] == [[7 & ~left, True]] * 3


def test_a_revoked_group_ends_the_calls_that_wait_and_shrinks_to_the_same_ranks(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
group = oa.init(timeout_s=30)
half = group.split(rank % 2)
tell("running")
if rank == 2:
    until_told_to_go()
    group.revoke()
    group.revoke()  # once more changes nothing
attempt(half.recv if rank == 0 else group.barrier, *([1] if rank == 0 else []))
attempt(group.barrier)
assert group.agree(True) is True
with group.shrink() as new:
    check(new)
attempt(group.revoke)
attempt(group.agree, 1)
"""
    )
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        ranks.go()
        works = ranks.await_facts("works")
        ranks.wait()
    assert places(works) == {rank: (rank, 3) for rank in range(3)}
    raised = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert [(fact["type"], fact["about"]) for fact in raised if fact["type"] != "ClosedError"] == [("AbortedError", 2)] * 6
    assert len([fact for fact in raised if fact["type"] == "ClosedError"]) == 6
