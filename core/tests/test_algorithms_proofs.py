"""Every algorithm keeps the promise of its collective, in every world, from every root, with any number of segments."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.proof.verify import Report, verify
from oneaccord.schedule.steps import Collective, Copy, Schedule


def names(algorithm: Algorithm) -> str:
    return f"{algorithm.collective.value}-{algorithm.name}"


each_algorithm = pytest.mark.parametrize("algorithm", BUILTIN, ids=names)

QUADRATIC = {"ring", "chain", "pairwise", "scatter_all_gather"}
"""Those whose steps grow with the world: the proof of a large one takes long."""


def schedules(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> list[Schedule]:
    return [algorithm.schedule(rank, size, root, segments, ranks_per_host) for rank in range(size)]


def proof(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Report:
    return proved(algorithm, schedules(algorithm, size, root, segments, ranks_per_host))


def proved(algorithm: Algorithm, made: list[Schedule]) -> Report:
    return verify(made, ordered=algorithm.ordered, canonical=algorithm.canonical)


def has_root(algorithm: Algorithm) -> bool:
    promise = PROMISES[algorithm.collective]
    return promise.input_on_root or promise.output_on_root


def hosts_of(algorithm: Algorithm, size: int) -> list[int]:
    return [count for count in range(1, size + 1) if size % count == 0] if algorithm.by_host else [1]


@each_algorithm
@pytest.mark.parametrize("sizes", [range(1, 10), pytest.param(range(10, 34), marks=pytest.mark.long)], ids=str)
def test_an_algorithm_is_right_in_every_world(algorithm: Algorithm, sizes: range) -> None:
    for size in sizes:
        for ranks_per_host in hosts_of(algorithm, size):
            roots = list(range(size if has_root(algorithm) else 1))
            if size > 17 and (algorithm.by_host or algorithm.name.startswith("scatter")):
                # Every root takes minutes; these are of the first and of an inner host.
                roots = sorted({ranks_per_host - 1, size // 2} if has_root(algorithm) else {0})
            for root in roots:
                proof(algorithm, size, root, 1, ranks_per_host)


@each_algorithm
@pytest.mark.parametrize("sizes", [range(1, 8), pytest.param(range(8, 34), marks=pytest.mark.long)], ids=str)
def test_an_algorithm_is_right_with_segments(algorithm: Algorithm, sizes: range) -> None:
    for size in sizes if algorithm.name not in QUADRATIC and not algorithm.by_host else range(sizes.start, min(sizes.stop, 14)):
        for ranks_per_host in hosts_of(algorithm, size):
            for root in {0, size - 1} if has_root(algorithm) else {0}:
                alone = schedules(algorithm, size, root, 1, ranks_per_host)
                for segments in (2, 3):
                    made = schedules(algorithm, size, root, segments, ranks_per_host)
                    if made != alone:
                        proved(algorithm, made)


@pytest.mark.long
@each_algorithm
@settings(max_examples=settings().max_examples // 20)
@given(data=st.data())
def test_an_algorithm_is_right_in_larger_worlds(algorithm: Algorithm, data: st.DataObject) -> None:
    size = data.draw(st.integers(34, 80 if algorithm.name not in QUADRATIC else 48), label="size")
    root = data.draw(st.integers(0, size - 1 if has_root(algorithm) else 0), label="root")
    segments = data.draw(st.integers(1, 3 if algorithm.name not in QUADRATIC else 1), label="segments")
    ranks_per_host = data.draw(st.sampled_from(hosts_of(algorithm, size)), label="ranks per host")
    proof(algorithm, size, root, segments, ranks_per_host)


@each_algorithm
def test_an_algorithm_that_gives_up_the_order_of_ranks_says_so(algorithm: Algorithm) -> None:
    # 12 is no power of two, and neither are 3 hosts of 4 ranks or their 2 and 6.
    made = [schedules(algorithm, 12, 0, 1, ranks_per_host) for ranks_per_host in (2, 4)]
    assert all(verify(one).ordered for one in made) == algorithm.ordered


@each_algorithm
def test_an_algorithm_says_whether_it_evaluates_the_reproducible_expression(algorithm: Algorithm) -> None:
    if PROMISES[algorithm.collective].reduces:
        assert proof(algorithm, 12, 0, 1, 4).canonical == algorithm.canonical
    else:
        assert not algorithm.canonical


def test_every_reduction_has_a_reproducible_algorithm() -> None:
    reducing = {collective for collective in Collective if PROMISES[collective].reduces}
    assert {algorithm.collective for algorithm in BUILTIN if algorithm.canonical} == reducing


@each_algorithm
def test_a_world_of_one_copies_or_does_nothing(algorithm: Algorithm) -> None:
    steps = algorithm.schedule(0, 1).steps
    if algorithm.collective in (Collective.BARRIER, Collective.EXSCAN):
        assert steps == ()
    else:
        assert [type(step) for step in steps] == [Copy]


@each_algorithm
def test_a_schedule_says_what_it_is(algorithm: Algorithm) -> None:
    root = 3 if has_root(algorithm) else 0
    schedule = algorithm.schedule(2, 6, root, 1, 2)
    assert (schedule.collective, schedule.algorithm) == (algorithm.collective, algorithm.name)
    assert (schedule.rank, schedule.size, schedule.root, schedule.even) == (2, 6, root, algorithm.even)


def test_names_are_unique_within_a_collective_and_every_collective_has_an_algorithm() -> None:
    known = [(algorithm.collective, algorithm.name) for algorithm in BUILTIN]
    assert len(set(known)) == len(known)
    assert {collective for collective, _ in known} == set(Collective)


@each_algorithm
def test_the_schedule_of_one_rank_of_a_large_world_does_not_need_those_of_the_others(algorithm: Algorithm) -> None:
    size = 4096
    schedule = algorithm.schedule(size - 1, size, 0, 1, 8)
    # Bruck's all_to_all copies every block to its message, out of the one it came with, and back.
    assert len(schedule.steps) <= (6 if algorithm.collective is not Collective.ALL_TO_ALL else 8) * size
    assert all(earlier < index for index, step in enumerate(schedule.steps) for earlier in step.after)


LOGARITHMIC = [
    algorithm
    for algorithm in BUILTIN
    if algorithm.name not in QUADRATIC
    and algorithm.collective is not Collective.ALL_TO_ALL
    and (not algorithm.by_host or algorithm.collective in (Collective.ALL_REDUCE, Collective.BROADCAST))
]


@pytest.mark.parametrize("algorithm", LOGARITHMIC, ids=names)
def test_a_rank_of_65536_takes_a_few_steps_for_each_doubling(algorithm: Algorithm) -> None:
    size = 65536
    for rank in (0, 1, size // 3, size - 1):
        schedule = algorithm.schedule(rank, size, 0, 1, 8)
        assert len(schedule.steps) <= 6 * 16
        assert len(schedule.scratch) <= 4


@pytest.mark.long  # it measures memory, of which other threads take some as well
@pytest.mark.parametrize("algorithm", LOGARITHMIC, ids=names)
def test_a_rank_of_65536_takes_memory_for_its_own_steps_alone(algorithm: Algorithm) -> None:
    size = 65536
    for rank in (0, 1, size // 3, size - 1):
        algorithm.schedule(rank, size, 0, 1, 8)
        tracemalloc.start()
        algorithm.schedule(rank, size, 0, 1, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000
