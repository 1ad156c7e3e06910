"""Sharded models: their values, and that their bits are those of one process, whatever is sharded."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord_simulated import run

STRATEGIES = ["full", "grad", "none"]


def tree_sum(values):
    """The canonical tree of docs/guides/reductions.md."""
    values = list(values)
    pairs = len(values) - 2 ** int(math.log2(len(values)))
    values = [values[2 * i] + values[2 * i + 1] for i in range(pairs)] + values[2 * pairs :]
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


def make_params(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: {leaf: rng.standard_normal(shape).astype(np.float32) for leaf, shape in unit.items()}
        for name, unit in sizes.items()
    }


def gradient_of(rank, step, name, leaf, shape):
    rng = np.random.default_rng([rank, step, *name.encode(), *leaf.encode()])
    return rng.standard_normal(shape).astype(np.float32)


def one_process(params, optimizer, steps, weights):
    """The oracle: micro-gradients of all ranks, weighted, combined in the canonical tree and divided once."""
    params, states = json_like_copy(params), {}
    for step in range(steps):
        for name, unit in params.items():
            for leaf, value in unit.items():
                parts = [gradient_of(r, step, name, leaf, value.shape) * np.float32(w) for r, w in enumerate(weights)]
                mean = tree_sum(parts) / np.float32(sum(weights))
                optimizer(value, mean, states.setdefault((name, leaf), {}))
    return params


def json_like_copy(params):
    return {name: {leaf: value.copy() for leaf, value in unit.items()} for name, unit in params.items()}


def train(store, optimizer, steps, rank, weight, give=lambda tree: tree):
    """A forward and a backward pass over all units, in each step."""
    for step in range(steps):
        with store.step(weight=weight):
            for name in store.units:
                with store.unit(name):
                    pass
            for name in reversed(store.units):
                with store.unit(name) as w:
                    gradients = {leaf: gradient_of(rank, step, name, leaf, value.shape) for leaf, value in w.items()}
                store.reduce(name, give(gradients))
        store.update(optimizer)
    return store.full()


def same_bits(one, other):
    return all(one[name][leaf].tobytes() == other[name][leaf].tobytes() for name in one for leaf in one[name])


# Values


def test_hybrid_shards_within_an_axis_and_averages_over_the_other(library):
    def program(group):
        with oa.DeviceMesh(group, (2, 2), ("dp", "local")) as mesh:
            store = mp.Sharded(library.give({"w": np.zeros(4)}), mesh, mp.Hybrid("dp", "local"))
            node = mesh.coordinates[0]
            with store.step():
                store.reduce("w", library.give(np.array([[2.0, 4, 6, 8], [10.0, 20, 30, 40]][node])))
            ((_, g),) = store.shards()
            return g.tolist()

    assert run(program, 4).results == [[6, 12], [18, 24], [6, 12], [18, 24]]


def test_what_does_not_divide_is_padded_and_the_padding_never_shows():
    def program(group):
        store = mp.Sharded({"a": np.arange(5.0), "b": np.float64([7.0])}, group)
        with store.step():
            for name in store.units:
                store.reduce(name, np.ones(5 if name == "a" else 1))
        return [(p.tolist(), g.tolist()) for p, g in store.shards()]

    assert run(program, 3).results == [
        [([0, 1], [1, 1]), ([7], [1])],
        [([2, 3], [1, 1]), ([], [])],
        [([4], [1]), ([], [])],
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_roots_values_win_and_the_others_need_no_memory_for_theirs(strategy):
    def program(group):
        value = np.arange(6, dtype=np.float32).reshape(2, 3) if group.rank == 1 else np.broadcast_to(np.float32(0), (2, 3))
        return mp.Sharded({"w": value}, group, strategy, root=1).full()["w"].tolist()

    assert run(program, 3).results == [[[0, 1, 2], [3, 4, 5]]] * 3


def test_hybrid_takes_the_values_of_any_root():
    def program(group):
        with oa.DeviceMesh(group, (2, 3), ("dp", "local")) as mesh:
            store = mp.Sharded({"w": np.full(7, float(group.rank))}, mesh, mp.Hybrid("dp", "local"), root=4)
            return store.full()["w"].tolist()

    assert run(program, 6).results == [[4.0] * 7] * 6


def test_without_a_root_nothing_is_sent():
    def program(group):
        store = mp.Sharded({"w": np.arange(1000.0)}, group, root=None)
        return store.memory.current

    done = run(program, 2)
    assert done.results == [4000, 4000]
    assert done.trace.bytes_sent(0) < 1000


def test_a_unit_is_shown_as_the_subtree_that_it_is():
    def program(group):
        params = {
            "layers": [{"w": np.ones(2), "b": (np.zeros(1), np.ones(1))}, {"w": np.ones(3), "b": (np.zeros(1), np.ones(1))}],
            "flat.kernel": np.ones(1),
            "flat.bias": np.zeros(1),
            "scale": np.float64([3]),
            "half": np.ones(2, np.float16),
        }
        store = mp.Sharded(params, group, units=["layers", "layers.1", "flat", "scale", "half"])
        seen = {}
        with store.evaluation():
            for name in store.units:
                with store.unit(name) as w:
                    seen[name] = repr(w)
        return seen, repr(store.full()), repr(params)

    seen, full, params = run(program, 2).results[0]
    assert full == params
    assert seen == {
        "layers": repr({"0.b.0": np.zeros(1), "0.b.1": np.ones(1), "0.w": np.ones(2)}),
        "layers.1": repr({"w": np.ones(3), "b": (np.zeros(1), np.ones(1))}),
        "flat": repr({"bias": np.zeros(1), "kernel": np.ones(1)}),
        "scale": repr(np.float64([3])),
        "half": repr(np.ones(2, np.float16)),
    }


# Bits


SIZES = {"l0": {"w": (3, 5), "b": (5,)}, "l1": {"w": (5, 1), "b": (1,)}, "l2": {"s": (), "t": (2, 3)}}
OPTIMIZERS = [mp.Adam(0.05), mp.SGD(0.1, momentum=0.9)]


@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_every_strategy_gives_the_bits_of_one_process(world_size, optimizer, library):
    params, weights = make_params(SIZES), [rank + 1 for rank in range(world_size)]
    expected = one_process(params, optimizer, 3, weights)

    def program(group):
        for strategy in STRATEGIES:
            store = mp.Sharded(library.give(params), group, strategy)
            found = train(store, optimizer, 3, group.rank, weights[group.rank], library.give)
            assert same_bits(expected, found), strategy

    run(program, world_size)


@settings(max_examples=settings().max_examples // 4)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.sampled_from("wb"), st.integers(0, 9), min_size=1), min_size=1),
    st.integers(2, 4),
    st.integers(0, 3),
    st.sampled_from(STRATEGIES),
)
def test_bits_do_not_depend_on_sizes_units_and_prefetch(sizes, world_size, prefetch, strategy):
    params, adam, weights = make_params(sizes), mp.Adam(0.1), [2, 0, 3, 1][:world_size]
    expected = one_process(params, adam, 2, weights)

    def program(group):
        return train(mp.Sharded(params, group, strategy, prefetch=prefetch), adam, 2, group.rank, weights[group.rank])

    assert all(same_bits(expected, found) for found in run(program, world_size).results)


def test_hybrid_sums_in_two_stages():
    params, sgd, weights = make_params(SIZES), mp.SGD(0.1), [1, 2, 3, 4, 5, 6]

    def program(group):
        with oa.DeviceMesh(group, (2, 3), ("dp", "local")) as mesh:
            store = mp.Sharded(params, mesh, mp.Hybrid(replicate="dp", shard="local"))
            return train(store, sgd, 1, group.rank, weights[group.rank])

    expected = json_like_copy(params)
    for name, unit in expected.items():
        for leaf, value in unit.items():
            parts = [gradient_of(r, 0, name, leaf, value.shape) * np.float32(w) for r, w in enumerate(weights)]
            sgd(value, (tree_sum(parts[:3]) + tree_sum(parts[3:])) / np.float32(21), {})
    assert all(same_bits(expected, found) for found in run(program, 6).results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_paused_steps_are_one_step_over_all_micro_batches(strategy, library):
    def program(group):
        store = mp.Sharded(library.give({"a": np.zeros(3), "b": np.zeros(2)}), group, strategy)
        with store.paused():
            for micro in range(3):
                with store.step(weight=group.rank + micro):
                    store.reduce("a", library.give(np.full(3, 3.0 * micro)))
                    if micro == 1:
                        store.reduce("b", None if group.rank else library.give(np.full(2, 12.0)))
        with store.step(weight=0):
            pass
        first = [g.tolist() for _, g in store.shards()]
        store.update(mp.SGD(1.0))
        with store.step():
            store.reduce("a", library.give(np.ones(3)))
        return first, [g.tolist() for _, g in store.shards()], {name: x.tolist() for name, x in store.full().items()}

    # Weights of the three micro-batches: 0 and 1, 1 and 2, 2 and 3; so the mean of a is (3 * 3 + 5 * 6) / 9.
    a, b = (9 + 30) / 9, 12 / 9
    for rank, (first, second, full) in enumerate(run(program, 2).results):
        parts = {"none": ([a] * 3, [b] * 2)}.get(strategy, ([a] * (2 - rank), [b]))
        assert first == list(parts)
        assert second == [[1.0] * len(parts[0])]
        assert full == {"a": [-a] * 3, "b": [-b] * 2}


def test_an_infinite_gradient_of_a_rank_without_data_counts_for_nothing():
    def program(group):
        store = mp.Sharded({"w": np.zeros(2)}, group)
        with store.step(weight=group.rank):
            store.reduce("w", np.full(2, 5.0 if group.rank else np.inf))
        return store.shards()[0][1].tolist()

    assert run(program, 2).results == [[5.0], [5.0]]


def test_units_that_nobody_reduced_stay_as_they_are():
    def program(group):
        store = mp.Sharded({"used": np.ones(2), "unused": np.ones(2)}, group)
        with store.step():
            store.reduce("used", np.ones(2))
        store.update(mp.AdamW(0.1, weight_decay=0.5))
        return store.full()["unused"].tolist(), sorted(store.state()["state"])

    assert run(program, 2).results == [([1.0, 1.0], ["used"])] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_may_be_changed_by_hand(strategy):
    def program(group):
        store = mp.Sharded({"a": np.zeros(3), "b": np.zeros(2)}, group, strategy)
        with store.step():
            for name, size in (("a", 3), ("b", 2)):
                store.reduce(name, np.full(size, 2.0))
        for p, g in list(store.shards()):
            np.subtract(p, 2 * g, out=p)
        with store.evaluation(), store.unit("a") as w:
            return w.tolist()

    assert run(program, 2).results == [[-4.0] * 3] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_weighted_sums_that_the_dtype_of_the_parameters_cannot_hold_are_in_float32(strategy, reduce_dtype):
    def program(group):
        store = mp.Sharded({"w": np.ones(3, np.float16)}, group, strategy, reduce_dtype=reduce_dtype)
        for pauses in (store.paused(), contextlib.nullcontext()):
            with pauses, store.step(weight=40_000):
                store.reduce("w", np.full(3, 2 + group.rank, np.float16))
        store.update(mp.SGD(1.0))
        return store.full()["w"].tolist()

    assert run(program, 2).results == [[-1.5] * 3] * 2


def test_mixed_precision_gathers_and_reduces_in_its_own_dtypes(library):
    def program(group):
        params = library.give({"w": np.float32([1 + 2**-20, 2])})
        store = mp.Sharded(params, group, compute_dtype="float16", reduce_dtype="float16")
        with store.step(weight=2), store.unit("w") as w:
            seen = w.dtype.name, w.tolist()
            store.reduce("w", library.give(np.float16([2**-12, 1 + group.rank * 2**-10])))
        ((p, g),) = store.shards()
        return seen, p.dtype.name, g.dtype.name, p.tolist(), g.tolist()

    # (1 + 1 + 2**-10) * 2 has no place for its last bit in float16.
    assert run(program, 2).results == [
        (("float16", [1, 2]), "float32", "float32", [1 + 2**-20], [2**-12]),
        (("float16", [1, 2]), "float32", "float32", [2], [1.0]),
    ]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid"])
def test_the_norm_of_a_store_counts_each_element_once(strategy, library):
    def program(group):
        with oa.DeviceMesh(group, (2, 2), ("dp", "local")) as mesh:
            where = {"hybrid": (mesh, mp.Hybrid("dp", "local"))}.get(strategy, (group, strategy))
            store = mp.Sharded(library.give({"w": np.zeros(2), "b": np.zeros(3)}), *where)
            with store.step():
                store.reduce("w", library.give(np.array([3.0, 0.0])))
                store.reduce("b", library.give(np.array([0.0, 4.0, 0.0])))
            norm = store.clip_by_global_norm(2.5)
            store.update(mp.SGD(1.0))
            return norm, {name: each.tolist() for name, each in store.full().items()}

    assert run(program, 4).results == [(5.0, {"w": [-1.5, 0.0], "b": [0.0, -2.0, 0.0]})] * 4


# Order


def test_a_unit_within_itself_is_gathered_once_and_shared():
    def program(group):
        store = mp.Sharded({"a": np.arange(4.0), "b": np.ones(4)}, group)
        with store.evaluation(), store.unit("a") as outer:
            with store.unit("a") as inner, store.unit("b"):
                shared = np.shares_memory(outer, inner)
            rest = outer.tolist()
        return shared, rest

    done = run(program, 2)
    assert done.results == [(True, [0, 1, 2, 3])] * 2
    assert done.trace.count("all_gather", rank=0) <= 3  # one for each unit, and one message at the end


def passes(store, order):
    with store.evaluation():
        for name in order:
            with store.unit(name) as w:
                assert w.tolist() == [float(ord(name))] * 4


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_a_program_that_changes_its_order_stays_right(prefetch):
    def program(group):
        store = mp.Sharded({name: np.full(4, float(ord(name))) for name in "abcd"}, group, prefetch=prefetch)
        for order in ("abcddcba", "abcddcba", "abdc", "dcba", "dcba", "aabbaabb", "aabbaabb", ""):
            passes(store, order)

    run(program, 3)


def test_units_are_gathered_before_they_are_entered():
    """In the first step a unit of 4 MB is waited for; in the second it comes while the program computes."""

    def program(group, prefetch):
        store = mp.Sharded({name: np.ones(500_000) for name in "abc"}, group, prefetch=prefetch, root=None)
        for step in range(3):
            group.mark(str(step))
            with store.evaluation():
                for name in "abc":
                    with store.unit(name):
                        group.compute(0.1)
        group.mark("end")

    def durations(prefetch):
        times = [
            mark.time_s
            for mark in run(lambda group: program(group, prefetch), 2, network="textbook").trace.marks
            if mark.rank == 0
        ]
        return [end - begin for begin, end in itertools.pairwise(times)]

    without, with_it = durations(0), durations(1)
    assert without[1] == pytest.approx(without[2])
    wait = (without[1] - 0.3) / 3
    assert with_it[0] == pytest.approx(without[0])
    assert with_it[2] == pytest.approx(0.3 + wait, rel=1e-3)


def test_dicts_and_lists_are_emptied_at_the_end_and_arrays_are_not_to_be_written_to():
    def program(group):
        store = mp.Sharded({"a": {"b": [np.ones(2)]}}, group)
        with store.evaluation(), store.unit("a") as w:
            inner = w["b"]
            with pytest.raises(ValueError, match="read-only"):
                inner[0][:] = 0
        return w, inner

    assert run(program, 2).results == [({}, [])] * 2


@pytest.mark.parametrize(
    "make", [mp.Sharded, lambda tree, group: mp.ShardedOptimizer(mp.SGD(1.0), tree, group)], ids=["model", "optimizer"]
)
def test_arrays_that_lie_within_each_other_and_share_no_element_are_taken(make):
    def program(group):
        whole, mixed = np.arange(24.0).reshape(4, 6), np.arange(8.0)
        apart = {"a": whole[:, :3], "b": whole[:, 3:], "c": mixed[::2], "d": mixed[1::2], "e": np.zeros(0), "f": np.zeros(0)}
        found = make(apart, group).full()
        return all(np.array_equal(found[name], apart[name]) for name in apart)

    assert run(program, 2).results == [True, True]
