from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from manyhands.algorithms.doubling import barrier
from manyhands.algorithms.registry import BUILTIN, Algorithm
from manyhands.dtypes import resolve_op
from manyhands.engine import Plan, compile_plan
from manyhands.engine.steps import in_order
from manyhands.schedule.compose import in_parallel
from manyhands.schedule.steps import Collective, Schedule
from manyhands.wire import CallSignature

ROOTED = {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER}
_SIGNATURE = CallSignature("all_reduce")


def plan_of(schedule: Schedule, per_chunk: int = 1) -> Plan:
    """A plan in which every chunk has ``per_chunk`` elements of int32."""
    ends = [range(0, (count + 1) * per_chunk, per_chunk) for count in (schedule.input_chunks, schedule.output_chunks)]
    return compile_plan(schedule, _SIGNATURE, 0, tuple(ends[0]), tuple(ends[1]), 4, resolve_op("sum", np.dtype(np.int32)))


def finishes_in_order(schedules: list[Schedule]) -> bool:
    """Run the steps of each rank one after the other, with sends that go on meanwhile and end only when they are received.

    A step that comes after a send waits for its end; that is the latest that a transport may let it end.
    """
    plans = [plan_of(schedule) for schedule in schedules]
    orders = [in_order(plan) for plan in plans]
    position = [0] * len(plans)
    begun: Counter[tuple[int, int]] = Counter()
    ended: Counter[tuple[int, int]] = Counter()

    def can_run(rank: int, index: int) -> bool:
        plan = plans[rank]
        for lane in plan.lanes:
            for number, step in enumerate(lane.steps, start=1):
                if lane.is_send and index in plan.tasks[step].dependents and ended[rank, lane.peer] < number:
                    return False
        task = plan.tasks[index]
        if task.lane >= 0 and not plan.lanes[task.lane].is_send:
            way = plan.lanes[task.lane].peer, rank
            return begun[way] > ended[way]
        return True

    moved = True
    while moved:
        moved = False
        for rank, (plan, order) in enumerate(zip(plans, orders, strict=True)):
            while position[rank] < len(order) and can_run(rank, order[position[rank]]):
                task = plan.tasks[order[position[rank]]]
                if task.lane >= 0:
                    lane = plan.lanes[task.lane]
                    if lane.is_send:
                        begun[rank, lane.peer] += 1
                    else:
                        ended[lane.peer, rank] += 1
                position[rank] += 1
                moved = True
    return all(done == len(order) for done, order in zip(position, orders, strict=True))


@pytest.mark.parametrize("algorithm", BUILTIN, ids=lambda each: f"{each.collective.value}-{each.name}")
def test_every_algorithm_that_says_so_finishes_one_step_after_the_other(algorithm: Algorithm) -> None:
    assert algorithm.in_order
    for size in range(1, 18):
        hosts = [n for n in range(1, size + 1) if size % n == 0] if algorithm.by_host else [1]
        for root, segments, per_host in itertools.product({0, size // 2, size - 1}, (1, 3), hosts):
            schedules = [algorithm.schedule(rank, size, root, segments, per_host) for rank in range(size)]
            if algorithm.collective in ROOTED and size > 1:  # as groups run them, with a barrier in their shadow
                schedules = [in_parallel(schedule, barrier(schedule.rank, size)) for schedule in schedules]
            assert finishes_in_order(schedules), (size, root, segments, per_host)
