"""The arithmetic of ``oneaccord bench``: sizes, samples, bandwidths and turns, in exact numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord_lab.bench.plan import BENCHMARKS, Target, round_size
from oneaccord_lab.bench.statistics import bus_factor, order, samples, summary


@pytest.mark.parametrize(
    ("benchmark", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce", 1.0),
        ("broadcast", 1.0),
        ("all_gather", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("scan", 1.0),
        ("exscan", 1.0),
        ("sendrecv", 1.0),
        ("pingpong", 1.0),
        ("barrier", 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(benchmark: str, factor: float) -> None:
    assert bus_factor(benchmark, 4) == factor


def test_every_benchmark_has_a_factor() -> None:
    assert all(bus_factor(name, 3) > 0 for name in BENCHMARKS)


def test_a_summary_is_in_microseconds_and_in_10_to_the_9_bytes_a_second() -> None:
    times = [4000, 1000, 2000, 3000, 10_000]
    assert summary(times, 6_000_000, 1.5) == {
        "iterations": 5,
        "median_us": 3.0,
        "min_us": 1.0,
        "p95_us": 10.0,
        "algbw_GBps": 2000.0,
        "busbw_GBps": 3000.0,
    }


def test_the_95th_percentile_is_the_least_value_that_95_of_100_do_not_exceed() -> None:
    assert summary(list(range(1000, 101_000, 1000)), 0, 1.0)["p95_us"] == 95.0
    assert summary([1000] * 19 + [9000], 0, 1.0)["p95_us"] == 1.0
    assert summary([1000] * 18 + [9000] * 2, 0, 1.0)["p95_us"] == 9.0
    assert summary([7000], 0, 1.0)["p95_us"] == 7.0


def test_a_call_lasts_from_one_last_ranks_end_to_the_next() -> None:
    stamps = np.array([[0, 10, 30, 35], [5, 12, 20, 40]])
    assert samples(stamps, "all_reduce").tolist() == [7, 18, 10]


def test_a_ping_pong_counts_one_way_as_rank_0_sees_it() -> None:
    stamps = np.array([[0, 10, 30], [5, 12, 99], [1, 1, 1]])
    assert samples(stamps, "pingpong").tolist() == [5, 10]


@given(st.lists(st.lists(st.integers(1, 10**6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_samples_of_a_batch_sum_up_to_its_duration(steps: list[list[int]]) -> None:
    stamps = np.cumsum(np.array(steps, np.int64), axis=1)
    found = samples(stamps, "broadcast")
    assert (found > 0).all()
    assert found.sum() == stamps[:, -1].max() - stamps[:, 0].max()


@given(st.integers(1, 6))
def test_each_target_has_each_place_equally_often_and_follows_more_than_one_other(count: int) -> None:
    turns = [order(turn, count) for turn in range(4 * count)]
    assert all(sorted(places) == list(range(count)) for places in turns)
    for target in range(count):
        assert set(Counter(places.index(target) for places in turns).values()) == {4}
        before = {places[place - 1] for places in turns for place in range(1, count) if places[place] == target}
        assert len(before) == min(count - 1, 2)


@pytest.mark.parametrize(
    ("benchmark", "asked", "world_size", "itemsize", "measured"),
    [
        ("all_reduce", 8, 3, 4, 8),
        ("all_reduce", 7, 3, 4, 4),
        ("broadcast", 0, 3, 4, 4),
        ("all_gather", 8, 3, 4, 12),
        ("all_gather", 100, 3, 4, 96),
        ("reduce_scatter", 1 << 20, 3, 2, 1048572),
        ("all_to_all", 64, 4, 8, 64),
        ("scatter", 63, 4, 8, 32),
        ("sendrecv", 63, 4, 8, 56),
        ("pingpong", 1, 2, 1, 1),
        ("barrier", 1 << 20, 4, 4, 0),
    ],
)
def test_sizes_are_rounded_down_to_equal_blocks_of_at_least_one_element(
    benchmark: str, asked: int, world_size: int, itemsize: int, measured: int
) -> None:
    assert round_size(benchmark, asked, world_size, itemsize) == measured


def test_the_name_of_a_target_says_what_its_arrays_are_made_of() -> None:
    assert Target.parse("shm") == Target("shm")
    assert Target.parse("shm+symmetric") == Target("shm", "symmetric")
    assert [Target.parse(name).name for name in ("shm", "shm+symmetric")] == ["shm", "shm+symmetric"]
