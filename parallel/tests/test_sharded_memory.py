"""What a rank holds, in bytes, against the formulas; and how much it sends."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.waiting import until

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord_simulated import run

UNITS, SIZE, RANKS = 5, 240, 4
"""Units of equal size, which the number of ranks divides."""
N = UNITS * SIZE


def train_step(store, adam):
    """A forward and a backward pass; return the peak."""
    store.memory.reset_peak()
    with store.step():
        for name in store.units:
            with store.unit(name) as w:
                w.sum()
        for name in reversed(store.units):
            with store.unit(name) as w:
                gradient = np.ones(w.size, np.float32)
            del w
            store.reduce(name, gradient)
    store.update(adam)
    return store.memory.peak


def steady(group, most, step, *given):
    """The least that a step holds once all is there, after as many steps as it takes until no rank held more than ``most``.

    Another thread may let go of an array an instant later than this one; a step that always holds too much does so each time.
    """
    step(*given)
    step(*given)
    least = step(*given)
    for _ in range(200):
        if not group.all_reduce(int(least > most), "max"):
            break
        least = min(least, step(*given))
    return least


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("none", 16 * N),
        ("grad", 4 * N + 12 * N // RANKS + 4 * SIZE),
        ("full", 16 * N // RANKS + 4 * SIZE),
        ("hybrid", 16 * N // 2 + 4 * SIZE),
    ],
)
def test_peak_of_a_training_step_with_adam(strategy, expected):
    """ZeRO-3 also has the unit and those prefetched, but not while the last unit is reduced; it is then at most ``expected``."""

    most = expected + (4 * 2 * SIZE if strategy in ("full", "hybrid") else 0)

    def program(group):
        params = {f"layer{k}": np.broadcast_to(np.float32(1), SIZE) for k in range(UNITS)}
        if strategy == "hybrid":
            with oa.DeviceMesh(group, (2, 2), ("dp", "local")) as mesh:
                return steady(group, most, train_step, mp.Sharded(params, mesh, mp.Hybrid("dp", "local")), mp.Adam())
        return steady(group, most, train_step, mp.Sharded(params, group, strategy), mp.Adam())

    for peak in run(program, RANKS).results:
        assert expected <= peak <= most


@pytest.mark.parametrize("stage", [1, 2])
def test_peak_of_a_sharded_optimizer(stage):
    def step(opt):
        opt.memory.reset_peak()
        opt.step({name: np.ones(SIZE, np.float32) for name in opt.params})
        return opt.memory.peak

    whole = {1: 8 * N + 8 * N // RANKS, 2: 4 * N + 12 * N // RANKS + 4 * SIZE}[stage]
    most = whole + 4 * SIZE // RANKS  # the part of the sum of one unit

    def program(group):
        params = {f"layer{k}": np.broadcast_to(np.float32(1), SIZE) for k in range(UNITS)}
        return steady(group, most, step, mp.ShardedOptimizer(mp.Adam(), params, group, stage))

    for peak in run(program, RANKS).results:
        assert whole <= peak <= most


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_is_gathered_is_the_unit_and_those_prefetched_and_then_truly_gone(prefetch):
    def program(group):
        params = {f"layer{k}": np.broadcast_to(np.float32(1), SIZE) for k in range(UNITS)}
        store = mp.Sharded(params, group, prefetch=prefetch)

        def step():
            most = 0
            with store.evaluation():
                for name in [*store.units, *reversed(store.units)]:
                    with store.unit(name):
                        most = max(most, store.memory.held["gathered"])
            until(lambda: not store.memory.held["gathered"], "what was gathered to be freed")
            return most

        return steady(group, promised, step)

    promised = 4 * SIZE * (1 + prefetch)
    assert run(program, RANKS).results == [promised] * RANKS


def test_padding_is_held_as_well():
    def program(group):
        store = mp.Sharded({"a": np.ones(5, np.float32), "b": np.ones(2, np.float32)}, group)
        with store.step():
            store.reduce("a", np.ones(5, np.float32))
            store.reduce("b", np.ones(2, np.float32))
        store.update(mp.Adam())
        return store.memory.held["parameters"], store.memory.held["state"]

    # Shards of 2 and 1 elements; the state is only of what is no padding.
    assert run(program, 3).results == [(12, 24), (12, 24), (12, 8)]


def test_a_dropped_store_holds_nothing():
    def program(group):
        store = mp.Sharded({"a": np.ones(64, np.float32)}, group)
        train_step(store, mp.Adam())
        memory = store.memory
        del store
        until(lambda: set(memory.held.values()) == {0}, "all that the store held to be freed")

    run(program, 2)


@pytest.mark.parametrize(
    ("strategy", "elements"),
    [
        ("none", 2.0),  # 2 (N - 1) / N for large messages, which this one is not
        ("grad", 2 * 3 / 4),
        ("full", (3 - 2 / UNITS) * 3 / 4),  # the last two units of the forward pass are not gathered again
    ],
)
def test_bytes_that_a_step_sends(strategy, elements):
    """In n elements: DDP and ZeRO-2 a sum and a gather, 2 (N - 1) / N; ZeRO-3 at most 3 (N - 1) / N."""

    def program(group, steps):
        params = {f"layer{k}": np.broadcast_to(np.float32(1), SIZE * 50) for k in range(UNITS)}
        store = mp.Sharded(params, group, strategy, root=None)
        for _ in range(steps):
            train_step(store, mp.SGD())

    few, many = (run(partial(program, steps=steps), RANKS).trace.bytes_sent(1) for steps in (1, 2))
    assert (many - few) / (4 * 50 * N) == pytest.approx(elements, rel=0.01)
