"""Fault plans drawn from a seed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oneaccord.api import UsageError
from oneaccord_simulated.chance import random_faults
from oneaccord_simulated.faults import Corrupt, Cut, Delay, Drop, FaultPlan, Kill, Partition, Pause, Slow

PINNED_2 = FaultPlan(
    summary="drawn from seed 2 for a world of 4",
    faults=(
        Kill(rank=0, at_s=0.735969),
        Partition(from_s=0.393531, until_s=1.388351, sides=((1, 2), (0, 3))),
        Corrupt(source=2, dest=0, nth=2),
    ),
)
PINNED_239 = FaultPlan(
    summary="drawn from seed 239 for a world of 4",
    faults=(
        Kill(rank=2, operation="*", nth=5),
        Pause(rank=1, operation="*"),
        Slow(rank=2, from_s=0.477571, factor=8.0),
        Cut(from_s=0.321554, links=((0, 3), (1, "*"))),
        Delay(from_s=0.577523, until_s=0.830184, links=((0, 3), (2, 3)), by_s=0.027646),
        Partition(from_s=0.115554, sides=((1, 2), (0, 3))),
        Drop(source=1, dest=3, nth=9),
        Drop(source=3, dest=1, nth=3),
        Corrupt(source=3, dest=2, nth=7),
    ),
)


def test_a_seed_gives_the_same_plan_on_every_machine() -> None:
    assert random_faults(2, 4) == PINNED_2
    assert random_faults(239, 4, count=9) == PINNED_239


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_drawn_plans_fit_their_world_and_leave_a_survivor(tmp_path: Path, size: int) -> None:
    kinds, lengths = set(), set()
    for seed in range(300):
        plan = random_faults(seed, size, horizon_s=2.0)
        assert plan == random_faults(seed, size, horizon_s=2.0)
        plan.check(size)
        kinds |= {type(fault).__name__.lower() for fault in plan.faults}
        lengths.add(len(plan.faults))
        gone = {f.rank for f in plan.faults if isinstance(f, Kill) or (isinstance(f, Pause) and f.for_s == math.inf)}
        assert len(gone) < size
        assert all(len(set(fault.links)) == len(fault.links) for fault in plan.faults if isinstance(fault, Cut | Delay))
        for fault in plan.faults:
            begin = fault.from_s if isinstance(fault, Slow | Cut | Delay | Partition) else getattr(fault, "at_s", None) or 0.0
            assert 0 <= begin < 2.0
            assert begin == round(begin, 6)
        assert f"seed {seed}" in plan.summary
    assert lengths == {1, 2, 3}
    every = {"kill", "pause", "slow", "cut", "delay", "partition", "drop", "corrupt"}
    assert kinds == ({"pause", "slow"} if size == 1 else every)
    (tmp_path / "faults.toml").write_text(plan.to_toml())
    assert FaultPlan.load(tmp_path / "faults.toml") == plan


def test_many_kills_leave_a_survivor_too() -> None:
    for size in (2, 3, 4):
        for seed in range(50):
            plan = random_faults(seed, size, count=20, kinds=["kill", "pause"])
            gone = {f.rank for f in plan.faults if isinstance(f, Kill) or (isinstance(f, Pause) and f.for_s == math.inf)}
            assert 1 <= len(gone) < size


def test_count_and_kinds_are_as_asked() -> None:
    plan = random_faults(3, 4, count=9, kinds=("drop", "cut"))
    assert len(plan.faults) == 9
    assert {type(fault) for fault in plan.faults} == {Cut, Drop}
    assert random_faults(3, 4, count=9, kinds=["cut", "drop", "cut"]) == plan
    assert {type(fault) for fault in random_faults(3, 4, kinds="slow").faults} == {Slow}
    assert random_faults(3, 4, count=0).faults == ()
    assert random_faults(3, 1, count=5, kinds=["drop", "kill"]).faults == ()
    assert len({random_faults(seed, 4).faults for seed in range(50)}) == 50


def test_the_shortest_horizon_will_do() -> None:
    for seed in range(50):
        random_faults(seed, 3, horizon_s=1e-6, count=5).check(3)
        random_faults(seed, 3, horizon_s=1e9, count=5).check(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"kinds": ["cut", "kil"]},
            "kinds names 'kil', which is not a kind of fault; did you mean 'kill'? Valid here: kill, pause,",
        ),
        (
            {"kinds": "meteor"},
            "kinds names 'meteor', which is not a kind of fault. Valid here: kill, pause, slow, cut, delay, partition",
        ),
        ({"seed": -1}, "seed is -1; expected an integer, 0 or more"),
        ({"seed": 1.5}, "seed is 1.5; expected an integer, 0 or more"),
        ({"world_size": 0}, "world_size is 0; expected an integer, 1 or more"),
        ({"world_size": True}, "world_size is True; expected an integer, 1 or more"),
        ({"count": -1}, "count is -1; expected an integer, 0 or more"),
        ({"horizon_s": 0.0}, "horizon_s is 0.0; expected a number of seconds from 1e-6 to 1e9"),
        ({"horizon_s": math.inf}, "horizon_s is inf; expected a number"),
        ({"horizon_s": math.nan}, "horizon_s is nan; expected a number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        random_faults(**{"seed": 0, "world_size": 4, **arguments})  # type: ignore[arg-type]
    assert words in str(caught.value)
