"""Calls on GPUs that cannot end well, and who learns of it: on fakes of CUDA, CuPy and NCCL, whose streams run late wherever nothing makes them wait."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.device_worlds import BACKENDS, HYBRID, gpu_world, gpus, mine
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import PATIENCE_S
from support.worlds import stories

import oneaccord as oa
from oneaccord.api import Deadline, Group

__all__ = ["gpus"]


@BACKENDS
@pytest.mark.parametrize(
    "other",
    [
        lambda group: group.all_reduce(mine(group, 6)),
        lambda group: group.all_reduce(mine(group, 5, np.float64)),
        lambda group: group.all_reduce(mine(group), "max"),
        lambda group: group.broadcast(mine(group), 0),
        lambda group: group.broadcast(mine(group), 1),
        lambda group: group.barrier(),
    ],
)
def test_a_mismatch_is_found_before_anything_is_launched(gpus: FakeNccl, config: Any, other: Any) -> None:
    def program(group: Group) -> None:
        group.all_reduce(mine(group, 2))
        if group.rank == 1:
            other(group)
        else:
            group.all_reduce(mine(group))

    outcomes = gpu_world(program, 3, config=config)
    assert [type(outcome) for outcome in outcomes] in ([oa.CollectiveMismatchError] * 3, [oa.DeadlockError] * 3)
    assert len({str(outcome) for outcome in outcomes}) == 1
    told = stories(str(outcomes[0]))
    assert sorted(told) == [0, 1, 2]
    there = {rank: story for rank, story in told.items() if "#0" not in story}  # the third rank may still be on its way
    assert len(there) >= 2
    assert [rank for rank, story in there.items() if story != 'all_reduce(float32[5] on cuda, op="sum") #1'] == [1]
    assert {call[:2] for call in gpus.calls if call[0] in ("all_reduce", "broadcast")} <= {("all_reduce", 2)}


def test_known_kinds_in_another_order_are_found_while_they_wait(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.reduce(x, root=0)
        group.synchronize()
        if group.rank == 1:
            group.all_reduce(x)
        else:
            group.reduce(x, root=0)
        group.synchronize(timeout_s=PATIENCE_S)

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_known_kinds_in_another_order_that_end_are_found_when_the_ranks_compare(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        shapes = [(2, 3), (3, 2)]  # alike for NCCL
        for shape in shapes:
            group.all_reduce(mine(group, shape))
        for shape in shapes if group.rank == 0 else shapes[::-1]:
            group.all_reduce(mine(group, shape))

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes
    assert 'gpu_check = "always"' in str(outcomes[0])


def test_every_call_is_compared_before_its_launch_if_that_is_asked_for(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        for op in ("max", "min"):
            group.all_reduce(x, op)
        for op in ("max", "min") if group.rank == 0 else ("min", "max"):
            group.all_reduce(x, op)

    outcomes = gpu_world(program, 2, config={**HYBRID, "gpu_check": "always"})
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes
    assert gpus.names().count("all_reduce") == 4
    assert 'op="max") #2' in str(outcomes[0])


def test_a_call_on_the_host_and_one_on_a_gpu_are_a_mismatch(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        group.all_reduce(mine(group) if group.rank else np.ones(5, np.float32))

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes


# What fails.


def test_a_rank_that_does_not_come_is_named_at_the_deadline(gpus: FakeNccl) -> None:
    over = threading.Event()

    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        if group.rank == 1:
            assert over.wait(PATIENCE_S)
            group.all_reduce(x)
            return
        try:
            group.all_reduce(x, timeout_s=0.5)
            group.synchronize()
        finally:
            over.set()

    outcomes = gpu_world(program, 2)
    assert isinstance(outcomes[0], oa.DeadlineError), outcomes
    assert "rank 1 did not come" in str(outcomes[0])
    assert str(outcomes[0]) == str(outcomes[1])


def test_a_rank_that_raises_ends_what_others_wait_for_on_their_gpus(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        if group.rank == 1:
            raise KeyError("mine")
        work = group.all_reduce_async(x)
        work.synchronize()

    outcomes = gpu_world(program, 3)
    assert isinstance(outcomes[1], KeyError)
    assert all(isinstance(outcomes[rank], oa.AbortedError) for rank in (0, 2)), outcomes


def test_an_asynchronous_error_of_the_library_is_told_to_all_ranks(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.synchronize()
        group.barrier()
        if group.rank == 1:
            gpus.fail(1, 2)
        group.all_reduce(x)
        deadline = Deadline(PATIENCE_S)
        while not deadline.passed():
            group.all_reduce(x)
            group.synchronize()

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.AbortedError) for outcome in outcomes), outcomes
    assert "rank 1 lost its GPU in" in str(outcomes[0])
