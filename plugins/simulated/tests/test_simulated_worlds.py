"""Worlds in worlds, and worlds at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group


def test_a_rank_may_run_a_world_of_its_own():
    def inner(group: Group) -> int:
        oa.sleep(3.0)
        return group.all_reduce(group.rank).item()

    def outer(group: Group) -> tuple[list[int], float]:
        oa.sleep(1.0)
        run = simulated.run(inner, 3)
        group.barrier()
        return run.results, run.duration_s

    run = simulated.run(outer, 2)
    assert run.results == [([3, 3, 3], 3.0)] * 2
    assert run.duration_s == 1.0


def test_a_world_in_a_world_is_repeated_with_it():
    def outer(group: Group) -> str:
        group.barrier()
        return simulated.run(lambda inner: inner.all_gather(inner.rank), 3, seed=group.rank).trace_json()

    first = simulated.run(outer, 2, seed=9)
    again = simulated.run(outer, 2, seed=9)
    assert first.results == again.results
    assert first.trace_json() == again.trace_json()


def test_a_rank_may_not_use_the_group_of_another_world():
    def outer(group: Group) -> None:
        with pytest.raises(oa.UsageError, match="belongs to another simulated world"):
            simulated.run(lambda _: group.barrier(), 2)
        group.barrier()

    simulated.run(outer, 2)


def test_worlds_may_run_at_once_in_several_threads():
    def program(group: Group) -> list[int]:
        return [group.all_reduce(group.rank).item() for _ in range(20)]

    before = threading.stack_size()
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda seed: simulated.run(program, 4, seed, network="textbook"), range(12)))
    for seed, run in enumerate(runs):
        assert run.trace_json() == simulated.run(program, 4, seed, network="textbook").trace_json()
    assert threading.stack_size() == before
