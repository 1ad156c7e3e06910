"""Steps carried out one after the other come to no halt, and `check_in_order` knows what the engine makes of a schedule."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine_tools import compiled

from oneaccord.arrays.dtypes import resolve_op
from oneaccord.calls.engine import CompiledSchedule
from oneaccord.calls.engine.program import LONG_SEND, SEND, WAIT, Instruction
from oneaccord.schedule.algorithms.doubling import barrier
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.compose import in_parallel
from oneaccord.schedule.contracts import Contract, Piece
from oneaccord.schedule.errors import ScheduleDeadlockError
from oneaccord.schedule.proof.in_order import check_in_order
from oneaccord.schedule.steps import Collective, Recv, RecvReduce, Schedule, Send

ROOTED = {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER}
INT = np.dtype(np.int32)


def as_groups_run(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Put a barrier in the shadow of schedules whose data flow one way."""
    size = len(schedules)
    if schedules[0].collective not in ROOTED or size == 1:
        return list(schedules)
    return [in_parallel(schedule, barrier(schedule.rank, size)) for schedule in schedules]


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 6, 8), pytest.param((5, 7, *range(9, 18)), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("algorithm", BUILTIN, ids=lambda each: f"{each.collective.value}-{each.name}")
def test_every_algorithm_finishes_one_step_after_the_other(algorithm: Algorithm, sizes: Sequence[int]) -> None:
    assert algorithm.in_order
    for size in sizes:
        hosts = [n for n in range(1, size + 1) if size % n == 0] if algorithm.by_host else [1]
        for root, segments, per_host in itertools.product(
            {0, size - 1} if algorithm.collective in ROOTED else {0}, (1, 3), hosts
        ):
            schedules = [algorithm.schedule(rank, size, root, segments, per_host) for rank in range(size)]
            check_in_order(as_groups_run(schedules))


# The engine's own steps, as a second opinion


def program_of(schedule: Schedule, slot_bytes: int, size_of: Callable[[Piece], int] = lambda _: 1) -> CompiledSchedule:
    """A program for int32 in which each piece has that many elements, with mailboxes of so many bytes."""
    contract = Contract.of(schedule)

    def offsets(pieces: Sequence[Piece]) -> list[int]:
        return list(itertools.accumulate((size_of(contract.extent(piece)) for piece in pieces), initial=0))

    inputs, outputs = offsets(contract.input_pieces(schedule.rank)), offsets(contract.output_pieces(schedule.rank))
    return compiled(schedule, inputs, outputs, INT, resolve_op("sum", INT), slot_bytes=slot_bytes)


def finish(ranks: Sequence[Sequence[Instruction]]) -> bool:
    """Tell whether all ranks come to the end of their steps, where each send ends no sooner than it is received."""
    position = [0] * len(ranks)
    started: dict[tuple[int, int], list[bool]] = {way: [] for way in itertools.permutations(range(len(ranks)), 2)}
    received: Counter[tuple[int, int]] = Counter()

    def run(rank: int) -> bool:
        kind, peer, _, _, _, count, _, _ = ranks[rank][position[rank]]
        there, back = (rank, peer), (peer, rank)
        if kind in (SEND, LONG_SEND):
            started[there].append(kind == LONG_SEND)
        elif kind == WAIT:
            return sum(started[there][: received[there]]) >= count
        elif peer >= 0:
            if len(started[back]) == received[back]:
                return False
            received[back] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(ranks):
            while position[rank] < len(steps) and run(rank):
                position[rank] += 1
                moved = True
    return all(done == len(steps) for done, steps in zip(position, ranks, strict=True))


def shuffled(schedule: Schedule, draw: random.Random) -> Schedule:
    """The same schedule in another order of its list: all that gives it its meaning stays."""
    previous: dict[tuple[int, bool], int] = {}
    earlier: list[set[int]] = []
    for index, step in enumerate(schedule.steps):
        earlier.append(set(step.after))
        if isinstance(step, Send | Recv | RecvReduce):
            way = step.peer, isinstance(step, Send)
            if way in previous:
                earlier[index].add(previous[way])
            previous[way] = index
    order: list[int] = []
    left = list(range(len(schedule.steps)))
    while left:
        ready = [index for index in left if not earlier[index].difference(order)]
        # Mostly the first or the last that may come: a list that is wild all over is rarely in order.
        order.append(draw.choice((ready[0], ready[0], ready[-1], draw.choice(ready))))
        left.remove(order[-1])
    moved = {old: new for new, old in enumerate(order)}
    steps = (replace(schedule.steps[old], after=tuple(moved[each] for each in schedule.steps[old].after)) for old in order)
    return replace(schedule, steps=tuple(steps))


def with_waits(schedule: Schedule, draw: random.Random) -> Schedule:
    """The same schedule, some steps of which also wait for a send before them."""
    steps = list(schedule.steps)
    sends: list[int] = []
    for index, step in enumerate(steps):
        if not isinstance(step, Send):
            added = draw.sample(sends, min(len(sends), draw.randrange(2)))
            steps[index] = replace(step, after=tuple({*step.after, *added}))
        elif not any(isinstance(steps[earlier], Send) for earlier in step.after):
            sends.append(index)
    return replace(schedule, steps=tuple(steps))


@given(
    algorithm=st.sampled_from(BUILTIN),
    size=st.integers(2, 8),
    segments=st.integers(1, 2),
    seed=st.integers(0, 1 << 32),
    capacity=st.sampled_from((0, 4, 8)),
)
@settings(max_examples=3 * settings().max_examples)
def test_the_engine_comes_to_a_halt_exactly_where_the_check_says_so(
    algorithm: Algorithm, size: int, segments: int, seed: int, capacity: int
) -> None:
    draw = random.Random(seed)
    per_host = draw.choice([n for n in range(1, size + 1) if size % n == 0])
    root = draw.randrange(size) if algorithm.collective in ROOTED else 0
    schedules = [algorithm.schedule(rank, size, root, segments, per_host) for rank in range(size)]
    schedules = [with_waits(shuffled(schedule, draw), draw) for schedule in schedules]
    try:
        check_in_order(schedules)
        finishes = True
    except ScheduleDeadlockError:
        finishes = False
    event("finishes" if finishes else "halts")
    whole = as_groups_run(schedules)
    assert finish([program_of(schedule, 0).steps for schedule in whole]) is finishes
    if finishes:  # short messages and empty chunks only make it easier
        sizes: dict[Piece, int] = {}

        def size_of(piece: Piece) -> int:
            return sizes.setdefault(piece, draw.choice((0, 1, 2, 3)))

        assert finish([program_of(schedule, capacity, size_of).steps for schedule in whole])
