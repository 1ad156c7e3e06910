"""Every algorithm keeps the promise of its collective, in every world, from every root, with any number of segments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.algorithms.registry import BUILTIN, Algorithm
from manyhands.schedule.contracts import PROMISES
from manyhands.schedule.steps import Collective, Copy
from manyhands.schedule.verify import Report, verify

each_algorithm = pytest.mark.parametrize(
    "algorithm", BUILTIN, ids=[f"{algorithm.collective.value}-{algorithm.name}" for algorithm in BUILTIN]
)


def proof(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1) -> Report:
    return verify([algorithm.build(rank, size, root, segments) for rank in range(size)])


def roots_of(algorithm: Algorithm, size: int) -> range:
    promise = PROMISES[algorithm.collective]
    return range(size if promise.input_on_root or promise.output_on_root else 1)


@each_algorithm
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_an_algorithm_is_right_in_every_small_world(algorithm: Algorithm, segments: int) -> None:
    for size in range(1, 18):
        for root in roots_of(algorithm, size):
            report = proof(algorithm, size, root, segments)
            assert report.ordered or not algorithm.ordered


@each_algorithm
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_an_algorithm_is_right_in_larger_worlds(algorithm: Algorithm, data: st.DataObject) -> None:
    size = data.draw(st.integers(18, 64), label="size")
    root = data.draw(st.sampled_from(roots_of(algorithm, size)), label="root")
    # The proof of a ring in the largest worlds with several segments takes a second.
    segments = data.draw(st.integers(1, 5 if size <= 24 else 1), label="segments")
    report = proof(algorithm, size, root, segments)
    assert report.ordered or not algorithm.ordered


@each_algorithm
def test_an_algorithm_that_gives_up_the_order_of_ranks_says_so(algorithm: Algorithm) -> None:
    assert proof(algorithm, 5).ordered == algorithm.ordered


@each_algorithm
def test_a_world_of_one_copies_or_does_nothing(algorithm: Algorithm) -> None:
    steps = algorithm.build(0, 1, 0, 1).steps
    if algorithm.collective is Collective.BARRIER:
        assert steps == ()
    else:
        assert [type(step) for step in steps] == [Copy]


@each_algorithm
def test_a_schedule_says_what_it_is(algorithm: Algorithm) -> None:
    schedule = algorithm.build(2, 5, 0, 1)
    assert (schedule.collective, schedule.algorithm) == (algorithm.collective, algorithm.name)
    assert (schedule.rank, schedule.size, schedule.root) == (2, 5, 0)


def test_names_are_unique_within_a_collective_and_every_collective_has_an_algorithm() -> None:
    names = [(algorithm.collective, algorithm.name) for algorithm in BUILTIN]
    assert len(set(names)) == len(names)
    assert {collective for collective, _ in names} == set(Collective)


@each_algorithm
def test_the_schedule_of_one_rank_of_a_large_world_does_not_need_those_of_the_others(algorithm: Algorithm) -> None:
    size = 4096
    schedule = algorithm.build(size - 1, size, 0, 1)
    assert len(schedule.steps) <= 4 * size
    assert all(earlier < index for index, step in enumerate(schedule.steps) for earlier in step.after)
