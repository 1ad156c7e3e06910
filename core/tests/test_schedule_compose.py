"""Schedules run beside each other keep their promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oneaccord.schedule.algorithms import doubling, prefix, tree
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.compose import in_parallel
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.proof.verify import MalformedScheduleError, ScheduleDeadlockError, verify
from oneaccord.schedule.steps import Send

ROOTED = [
    algorithm
    for algorithm in BUILTIN
    if PROMISES[algorithm.collective].input_on_root or PROMISES[algorithm.collective].output_on_root
]


@pytest.mark.parametrize("algorithm", ROOTED, ids=lambda algorithm: f"{algorithm.collective.value}-{algorithm.name}")
@pytest.mark.parametrize("sizes", [range(1, 7), pytest.param(range(7, 10), marks=pytest.mark.long)], ids=str)
def test_a_barrier_beside_a_rooted_collective_holds_every_rank_until_all_have_entered(
    algorithm: Algorithm, sizes: range
) -> None:
    for size in sizes:
        for root in range(size):
            alone = [algorithm.build(rank, size, root, 2) for rank in range(size)]
            both = [in_parallel(one, doubling.barrier(rank, size)) for rank, one in enumerate(alone)]
            report = verify(both, ordered=True)
            assert report.synchronising
            # Alone, one whose ranks all hear of all others does so, too; up or down a tree none does.
            assert size == 1 or not verify(alone).synchronising or algorithm.name not in ("binomial", "chain")
            assert report.chunks == verify(alone).chunks


def test_the_parts_depend_on_nothing_of_each_other() -> None:
    first, second = tree.broadcast(0, 5), doubling.barrier(0, 5)
    both = in_parallel(first, second)
    count = len(first.steps)
    assert both.steps[:count] == first.steps
    assert [replace(step, after=tuple(index - count for index in step.after)) for step in both.steps[count:]] == list(
        second.steps
    )
    assert both.algorithm == "binomial+dissemination"
    assert (both.collective, both.root, both.input_chunks) == (first.collective, first.root, first.input_chunks)


def test_between_two_ranks_the_vector_is_the_word_of_its_sender() -> None:
    for first in (tree.broadcast, tree.reduce, prefix.scan):
        alone = [first(rank, 2) for rank in range(2)]
        both = [in_parallel(one, doubling.barrier(rank, 2)) for rank, one in enumerate(alone)]
        sends = [sum(isinstance(step, Send) for step in one.steps) for one in both]
        assert sends == [1, 1]
        assert verify(both, ordered=True).synchronising
    # Nothing is left out where both directions are the barrier's own.
    silent = [replace(one, steps=()) for one in alone]
    assert [len(in_parallel(one, doubling.barrier(rank, 2)).steps) for rank, one in enumerate(silent)] == [2, 2]


def test_one_rank_that_puts_the_barrier_first_is_found() -> None:
    schedules = [in_parallel(tree.broadcast(rank, 2), doubling.barrier(rank, 2)) for rank in range(2)]
    # Rank 1 answers in the barrier only after it has the vector, and rank 0 sends it only after that answer: a circle.
    copy, send, hear = schedules[0].steps
    assert isinstance(send, Send)
    spoiled = replace(schedules[0], steps=(copy, hear, replace(send, after=(1,))))
    receive, answer = schedules[1].steps
    late = replace(schedules[1], steps=(receive, replace(answer, after=(0,))))
    with pytest.raises(ScheduleDeadlockError):
        verify([spoiled, late])


def test_schedules_of_different_ranks_or_worlds_are_refused() -> None:
    for other in (doubling.barrier(1, 3), doubling.barrier(0, 4)):
        with pytest.raises(MalformedScheduleError, match="rank 0 of 3 and of rank"):
            in_parallel(tree.broadcast(0, 3), other)


def test_only_a_schedule_without_memory_runs_beside_another_one() -> None:
    with pytest.raises(MalformedScheduleError, match="broadcast has input"):
        in_parallel(doubling.barrier(0, 3), tree.broadcast(0, 3))
