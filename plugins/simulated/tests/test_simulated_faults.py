"""Faults that are carried out: whatever goes wrong, all survivors learn the same first cause, in time, and no rank a wrong result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group
from oneaccord_simulated import Corrupt, Cut, Delay, Drop, FaultPlan, Kill, Partition, Pause, Slow, random_faults

X = np.ones(8)
LARGE = np.ones(20_000)
EAGER: dict[str, Any] = {"config": {"backends": {"simulated": {"eager_bytes": 65536}}}}
WAYS = [{}, EAGER, {"network": "fat-tree"}]

Program = Callable[[Group], object]
Cause = tuple[type[BaseException], str]


def causes(run: simulated.Run[Any]) -> set[Cause]:
    """Return what the ranks raised that were not killed; it must be an error of communication."""
    killed = {mark.rank for mark in run.trace.marks if mark.kind == "killed"}
    assert all(isinstance(error, oa.CommError) for error in run.errors.values()), run.errors
    return {(type(error), str(error)) for rank, error in run.errors.items() if rank not in killed}


def the_cause(run: simulated.Run[Any], survivors: set[int]) -> BaseException:
    """Return what every survivor raised, and nobody else."""
    assert set(run.errors) == survivors
    assert len(causes(run)) == 1, causes(run)
    return run.errors[min(survivors)]


# Programs that are right


def train(group: Group) -> float:
    weights = np.zeros(8)
    for step in range(3):
        group.compute(0.01)
        weights += group.all_reduce(weights + 1, op="mean")
        if step == 1:
            group.barrier()
        weights = group.broadcast(weights)
    return float(weights.sum())


def pipeline(group: Group) -> float:
    for _ in range(2):
        batch = X if group.rank == 0 else group.recv(group.rank - 1)
        if group.rank < group.world_size - 1:
            group.send(batch + 1, group.rank + 1)
    return float(group.all_gather(batch).sum())


def divided(group: Group) -> float:
    row, column = group.split(group.rank // 2), group.split(group.rank % 2)
    assert row is not None
    assert column is not None
    total = row.all_reduce(X) + column.all_reduce(LARGE)[:8]
    row.close()
    column.close()
    group.barrier()
    return float(total.sum())


def background(group: Group) -> float:
    works = [group.all_reduce_async(LARGE * size) for size in range(3)]
    group.compute(0.02)
    total = sum(work.wait()[0] for work in works)
    with group.coalesce() as batch:
        parts = [batch.all_reduce(X) for _ in range(2)]
    return float(total) + sum(part.wait()[0] for part in parts)


def exchange(group: Group) -> float:
    total = 0.0
    for _ in range(3):
        total += group.sendrecv(X * group.rank, (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size)[0]
        group.compute(0.01)
    return total


def objects(group: Group) -> float:
    table = group.broadcast_object({"a": 1})
    everyone = group.all_gather_object(group.rank)
    return float(table["a"] + sum(everyone) + group.scatter_object([1] * group.world_size))


PROGRAMS: dict[str, Program] = {
    "train": train,
    "pipeline": pipeline,
    "divided": divided,
    "background": background,
    "exchange": exchange,
    "objects": objects,
}


@functools.cache
def right(name: str, size: int) -> list[Any]:
    """Return the results of a run in which nothing goes wrong."""
    return simulated.run(PROGRAMS[name], size).results


# A rank dies


@pytest.mark.parametrize("way", [WAYS[0], pytest.param(WAYS[2], marks=pytest.mark.long)], ids=["waiting", "network"])
@pytest.mark.parametrize("ranks", [(0, 3), pytest.param((1, 2), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whoever_is_killed_at_whichever_call_every_survivor_learns_so_at_once(name, ranks, way):
    struck = 0
    for rank in ranks:
        for nth in range(10):
            run = simulated.run(PROGRAMS[name], 4, faults=Kill(rank=rank, operation="*", nth=nth), check=False, **way)
            assert run.duration_s < 0.1
            if not run.errors:  # it had no such call, or nobody needed it any more
                assert [result for other, result in enumerate(run.results) if other != rank] == [
                    result for other, result in enumerate(right(name, 4)) if other != rank
                ]
                continue
            struck += 1
            cause = the_cause(run, {0, 1, 2, 3} - {rank})
            assert type(cause) is oa.PeerLostError
            assert cause.peer == rank
            assert f"rank {rank} is killed at its call #{nth}" in str(cause)
    assert struck >= 6


def test_the_call_at_which_a_rank_dies_is_not_made():
    run = simulated.run(train, 3, faults=Kill(rank=1, operation="all_reduce", nth=1), check=False)
    assert run.trace.count("all_reduce", rank=1) == 2
    assert run.trace.calls_of(1)[-1].end_s is None
    assert [mark.describe() for mark in run.trace.marks_of(1)] == ["killed: rank 1 is killed at all_reduce #1"]
    assert run.results == [None] * 3


def test_a_rank_that_dies_as_it_computes_is_missed_when_it_is_needed():
    def program(group: Group) -> float:
        group.compute(1.0)
        if group.rank == 0:
            group.compute(1.0)
        group.barrier()
        return 0.0

    run = simulated.run(program, 3, faults=Kill(rank=2, at_s=0.5), check=False)
    assert type(the_cause(run, {0, 1})) is oa.PeerLostError
    assert [run.trace.marks_of(rank)[-1].time_s for rank in (0, 1)] == [2.0, 1.0]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_dead_from_the_beginning(rank):
    for seed in range(4):
        run = simulated.run(train, 3, seed, faults=Kill(rank=rank, at_s=0), check=False)
        cause = the_cause(run, {0, 1, 2} - {rank})
        assert type(cause) is oa.PeerLostError
        assert str(cause) == f"rank {rank} was lost before the ranks had met: rank {rank} is killed at 0 s"
        assert run.trace.calls == []


@pytest.mark.parametrize("seed", range(4))
def test_of_two_that_die_at_once_all_survivors_name_the_same(seed):
    for faults in (
        [Kill(rank=1, at_s=0.015), Kill(rank=2, at_s=0.015)],
        [Kill(rank=rank, operation="all_reduce", nth=2) for rank in (1, 3)],
        [Kill(rank=rank, operation="barrier") for rank in (0, 1, 2)],
    ):
        run = simulated.run(train, 4, seed, faults=faults, check=False)
        killed = {mark.rank for mark in run.trace.marks if mark.kind == "killed"}
        cause = the_cause(run, set(run.errors))
        assert set(run.errors).isdisjoint(killed) or len(killed) < len(faults)
        assert cause.peer in killed


@pytest.mark.parametrize("operation", ["split", "barrier"])
def test_a_rank_that_dies_as_groups_are_made(operation):
    run = simulated.run(divided, 4, faults=Kill(rank=2, operation=operation), check=False)
    assert f"rank 2 is killed at {operation} #0" in str(the_cause(run, {0, 1, 3}))


def test_a_rank_that_nobody_needs_may_die():
    def program(group: Group) -> int:
        if group.rank < 2:
            group.sendrecv(X, 1 - group.rank, 1 - group.rank)
            group.compute(1)
        else:
            group.compute(5)
        return group.rank

    with pytest.raises(oa.PeerLostError, match="rank 2 is killed at 2 s"):
        simulated.run(program, 3, faults=Kill(rank=2, at_s=2))  # the others wait for it as they leave
    assert simulated.run(program, 3, faults=Kill(rank=2, at_s=6)).results == [0, 1, 2]


# A rank stands still


@pytest.mark.parametrize("rank", range(3))
def test_a_pause_that_is_shorter_than_the_deadline_costs_time_only(rank):
    run = simulated.run(train, 3, faults=Pause(rank=rank, at_s=0.015, for_s=1.5), timeout_s=2)
    assert run.results == right("train", 3)
    assert run.duration_s == pytest.approx(0.015 + 1.5 + 0.01, abs=0.011)


@pytest.mark.parametrize("rank", range(3))
def test_a_pause_that_outlasts_the_deadline_is_told_to_all_even_to_the_rank_that_stood_still(rank):
    run = simulated.run(train, 3, faults=Pause(rank=rank, at_s=0.015, for_s=50), timeout_s=2, check=False)
    cause = the_cause(run, {0, 1, 2})
    assert type(cause) is oa.DeadlineError
    assert f"did not finish within 2 s: rank {rank} did not answer" in str(cause)
    assert f"  rank {rank}: no answer: stopped, cut off, or busy" in str(cause)
    assert run.duration_s == pytest.approx(50.015)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_stands_still_for_ever_is_named_after_the_deadline(rank):
    run = simulated.run(train, 3, faults=Pause(rank=rank, operation="broadcast", nth=1), timeout_s=2, check=False)
    cause = the_cause(run, {0, 1, 2} - {rank})
    assert type(cause) is oa.DeadlineError
    assert f"rank {rank} did not answer" in str(cause)
    assert 2 < run.duration_s < 2.6
    assert run.results == [None] * 3


def test_a_pause_before_the_ranks_have_met_lets_the_others_wait():
    run = simulated.run(train, 3, faults=Pause(rank=1, at_s=0, for_s=3))
    assert run.results == right("train", 3)
    assert run.duration_s == pytest.approx(3.03)
    assert min(call.start_s for call in run.trace.calls) == 3.0


def test_all_ranks_stand_still_for_a_while():
    run = simulated.run(train, 3, faults=[Pause(rank=rank, at_s=0.005, for_s=4) for rank in range(3)], timeout_s=2)
    assert run.results == right("train", 3)


def test_a_slow_rank_computes_for_longer_while_it_is_slow():
    def program(group: Group) -> None:
        for _ in range(3):
            group.compute(1.0)

    run = simulated.run(
        program, 2, faults=[Slow(rank=1, factor=4, from_s=0.5, until_s=2), Slow(rank=1, factor=2, from_s=1, until_s=2)]
    )
    assert [[call.end_s for call in run.trace.calls_of(rank)] for rank in range(2)] == [[1.0, 2.0, 3.0], [1.0, 9.0, 10.0]]


# Links


@pytest.mark.parametrize("sides", [((0,), (1, 2, 3)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,))])
def test_a_partition_that_heals_within_ten_seconds_costs_time_only(sides):
    run = simulated.run(train, 4, faults=Partition(sides=sides, from_s=0.015, until_s=10.015))
    assert run.results == right("train", 4)
    assert run.duration_s == pytest.approx(10.025)


@pytest.mark.parametrize("until_s", [10.1, 30, math.inf])
@pytest.mark.parametrize(
    ("sides", "lost"),
    [
        (((0,), (1, 2, 3)), "ranks 1-3 were lost: nothing has been heard between them and rank 0"),
        (((0, 1), (2, 3)), "ranks 2-3 were lost: nothing has been heard between them and rank 0"),
        (((0, 1, 2), (3,)), "rank 3 was lost: nothing has been heard between it and rank 0"),
    ],
)
def test_who_is_cut_off_from_rank_0_for_longer_is_lost_for_all(sides, lost, until_s):
    run = simulated.run(train, 4, faults=Partition(sides=sides, from_s=0.015, until_s=until_s), check=False)
    cause = the_cause(run, {0, 1, 2, 3})
    assert type(cause) is oa.PeerLostError
    assert str(cause) == f"{lost} since 0.015 s, for 10 s"
    assert cause.peer == sides[1][0]
    assert {call.end_s for call in run.trace.calls if call.error} == {10.015}


def test_a_link_that_is_cut_between_two_others_ends_by_the_deadline_of_those_that_need_it():
    def program(group: Group) -> None:
        if group.rank == 1:
            group.send(X, 2)
        elif group.rank == 2:
            group.recv(1)
        group.barrier()

    run = simulated.run(program, 4, faults=Cut(links=((1, 2),)), timeout_s=20, check=False)
    cause = the_cause(run, {0, 1, 2, 3})
    assert type(cause) is oa.DeadlineError
    assert "did not finish within 20 s" in str(cause)
    simulated.run(program, 4, faults=Cut(links=((1, 2),), until_s=19), timeout_s=20)


def test_a_cut_lets_through_what_was_on_its_way():
    def program(group: Group) -> float:
        if group.rank == 0:
            group.send(X, 1)
            group.compute(1)
            group.send(X, 1)
        else:
            group.recv(0)
            group.recv(0)
        return 0.0

    run = simulated.run(program, 2, faults=Cut(links=((0, "*"),), from_s=0.5, until_s=3))
    assert [call.end_s for call in run.trace.calls_of(1)] == [0.0, 3.0]


def test_a_delay_adds_to_each_message():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(X, 1)
            group.recv(1)
        elif group.rank == 1:
            group.recv(0)
            group.send(X, 0)

    run = simulated.run(program, 3, faults=[Delay(links=((0, 1),), by_s=0.5), Delay(links=((1, "*"),), by_s=0.25, until_s=0.6)])
    assert [call.end_s for call in run.trace.calls_of(1)] == [0.75, 1.25]
    late = simulated.run(program, 3, faults=Delay(links=((0, 1),), by_s=100), timeout_s=5, check=False)
    assert type(the_cause(late, {0, 1, 2})) is oa.DeadlineError


# Messages


def reduced(group: Group) -> float:
    group.all_reduce(LARGE)
    return float(group.all_reduce(X)[0])


def sent(group: Group) -> float:
    for _ in range(2):
        if group.rank == 0:
            group.send(X, 1)
            group.send(LARGE, 1)
        elif group.rank == 1:
            group.recv(0)
            group.recv(0)
    group.barrier()
    return 0.0


@pytest.mark.parametrize("way", WAYS, ids=["waiting", "eager", "network"])
@pytest.mark.parametrize("program", [reduced, sent, background], ids=["all_reduce", "send", "background"])
@pytest.mark.parametrize("fault", [Drop, Corrupt])
@pytest.mark.parametrize("nths", [(0, 6), pytest.param((0, 3, 6, 9), marks=pytest.mark.long)], ids=str)
def test_whichever_message_is_lost_or_damaged_all_ranks_learn_which_it_was(program, fault, nths, way):
    struck = 0
    for source in range(3):
        for dest in {0, 1, 2} - {source}:
            for nth in nths:
                plan = fault(source=source, dest=dest, nth=nth)
                run = simulated.run(program, 3, faults=plan, check=False, **way)
                marks = [mark for mark in run.trace.marks if mark.kind == "fault"]
                if not run.errors:
                    assert marks == []  # there was no such message
                    assert None not in run.results
                    continue
                struck += 1
                assert [mark.rank for mark in marks] == [source]
                cause = the_cause(run, {0, 1, 2})
                assert type(cause) is oa.ProtocolError
                assert f"message {nth} from rank {source} to rank {dest}, of " in str(cause)
                assert ("was lost on its way" if fault is Drop else "another checksum") in str(cause)
                assert run.duration_s < 0.5
    assert struck >= 2


@pytest.mark.parametrize("bit", [0, 77, 10**9])
def test_the_bit_that_changes_is_told(bit):
    with pytest.raises(oa.ProtocolError, match=rf"bit {bit % (8 * 1296)} had changed") as caught:
        simulated.run(sent, 2, faults=Corrupt(source=0, dest=1, bit=bit))
    assert caught.value.run.results == [None, None]


def test_a_lost_message_is_told_to_a_receiver_that_comes_late():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(X, 1)
        else:
            group.compute(5)
            group.recv(0)

    run = simulated.run(program, 2, faults=Drop(source=0, dest=1), check=False, **EAGER)
    assert "was lost on its way" in str(the_cause(run, {0, 1}))
    assert run.duration_s == 5


def test_a_lost_message_is_told_by_its_sender_where_the_receiver_cannot():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(X, 1)
        else:
            group.recv(0)

    faults = [Drop(source=0, dest=1), Pause(rank=1, at_s=0.1, for_s=9)]
    run = simulated.run(program, 2, faults=faults, check=False)
    cause = the_cause(run, {0, 1})
    assert cause.operation == "send to rank 1"
    assert str(cause).endswith("message 0 from rank 0 to rank 1, of 1296 bytes, was lost on its way")
    assert run.trace.calls_of(0)[0].end_s == pytest.approx(0.2)


# Anything


@pytest.mark.parametrize("seeds", [range(17, 23), pytest.param(range(25), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_goes_wrong_no_rank_hangs_and_all_survivors_agree_and_the_same_seed_gives_the_same_run(name, seeds):
    seen = set()
    for seed in seeds:
        size = 4 if name == "divided" else 2 + seed % 4
        plan = random_faults(seed, size, horizon_s=(0.05, 1.0, 30.0)[seed % 3])
        way = {**WAYS[seed % 3], "timeout_s": 2.0 if seed % 5 == 0 else 60.0}
        runs = [simulated.run(PROGRAMS[name], size, seed, faults=plan, check=False, **way) for _ in range(2)]
        assert runs[0].trace_json() == runs[1].trace_json(), plan
        for run in runs:
            assert len(causes(run)) <= 1, plan
            for result, expected in zip(run.results, right(name, size), strict=True):
                assert result in (None, expected), plan
        assert runs[0].results == runs[1].results
        assert causes(runs[0]) == causes(runs[1])
        seen |= {kind for kind, _ in causes(runs[0])}
    assert {oa.ProtocolError, oa.PeerLostError} <= seen


def test_a_plan_may_come_from_a_file(tmp_path):
    plan = FaultPlan.of([Kill(rank=1, operation="barrier"), Slow(rank=0, factor=2)])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    run = simulated.run(train, 3, faults=tmp_path / "plan.toml", check=False)
    assert "rank 1 is killed at barrier #0" in str(the_cause(run, {0, 2}))


@pytest.mark.parametrize(
    "fault", [Kill(rank=3, at_s=1), Drop(source=0, dest=3), Cut(links=((0, 5),)), Partition(sides=((0,), (7,)))]
)
def test_a_plan_that_does_not_fit_the_world_is_refused_before_anything_runs(fault):
    begun = []
    with pytest.raises(oa.ConfigError, match="a world of 3 has no rank"):
        simulated.run(begun.append, 3, faults=fault)
    assert begun == []


# Pauses that overlap, and that begin before the world does


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        ([Pause(rank=1, at_s=0.25, for_s=5), Pause(rank=1, at_s=0.25, for_s=1)], 5.25),
        ([Pause(rank=1, at_s=0.25, for_s=1), Pause(rank=1, at_s=0.25, for_s=5)], 5.25),
        ([Pause(rank=1, at_s=0.25, for_s=1), Pause(rank=1, at_s=0.5, for_s=2)], 2.5),
        ([Pause(rank=1, at_s=0.25, for_s=1), Pause(rank=1, at_s=1.5, for_s=1)], 2.5),
    ],
)
def test_a_rank_stands_still_until_its_last_pause_ends(pauses, end):
    def program(group: Group) -> float:
        group.compute(2)
        group.barrier()
        return 1.0

    run = simulated.run(program, 2, faults=pauses)
    assert run.results == [1.0, 1.0]
    assert [mark.time_s for mark in run.trace.marks if mark.kind == "resumed"][-1] == end


def test_a_pause_does_not_end_one_that_has_no_end():
    run = simulated.run(train, 4, faults=[Pause(rank=1, at_s=0.001, for_s=1), Pause(rank=1, at_s=0.002)], check=False)
    assert isinstance(the_cause(run, {0, 2, 3}), oa.DeadlineError)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_never_comes_is_named_alike_on_all_others(rank):
    run = simulated.run(train, 4, faults=Pause(rank=rank, at_s=0), check=False)
    cause = the_cause(run, {0, 1, 2, 3} - {rank})
    assert str(cause) == f"the ranks did not meet within 60 s: rank {rank} of 4 did not come"
    assert (type(cause), cause.peer) == (oa.DeadlineError, rank)
