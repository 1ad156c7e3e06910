"""Trees of many leaves: what a store does for each of them does not depend on how many others there are."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord_simulated import run


def calls(action):
    """How many calls of functions an action makes: its work, as far as it is in Python, and the same every time."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += "call" in event

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def step_of_optimizer(stage):
    def work(group, leaves):
        optimizer = mp.ShardedOptimizer(mp.SGD(), {"params": leaves}, group, stage)  # one unit, as of a tree of Flax
        optimizer.step({"params": leaves})

    return work


def step_of_sharded(group, leaves):
    store = mp.Sharded(leaves, group)  # as many units as leaves
    with store.step():
        for name in store.units:
            with store.unit(name):
                pass
            store.reduce(name, leaves[name])
    store.update(mp.SGD())
    store.state()


@pytest.mark.parametrize(
    "work", [step_of_optimizer(1), step_of_optimizer(2), step_of_sharded], ids=["stage 1", "stage 2", "sharded"]
)
def test_the_work_grows_with_the_number_of_leaves_and_not_with_its_square(work):
    def calls_for(count):
        leaves = {f"l{number}": np.ones(1, np.float32) for number in range(count)}
        return run(lambda group: calls(lambda: work(group, leaves)), 1).results[0]

    calls_for(1)  # what is imported late
    few = calls_for(40)
    assert calls_for(160) < 4.4 * few
