"""Sharded optimizers, and the state that a checkpoint takes from a store: other worlds can load it."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_simulated import run

PARAMS = {
    "l0": {"w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), "b": np.zeros(5, np.float32)},
    "l1": np.ones(3, np.float32),
}


def gradients_of(rank, step):
    rng = np.random.default_rng([rank, step])
    return {
        "l0": {"w": rng.standard_normal((3, 5)).astype(np.float32), "b": rng.standard_normal(5).astype(np.float32)},
        "l1": rng.standard_normal(3).astype(np.float32),
    }


def bits(tree):
    return tree["l0"]["w"].tobytes() + tree["l0"]["b"].tobytes() + tree["l1"].tobytes()


def sharded(group, strategy="none", optimizer=None, steps=3):
    store = mp.Sharded(PARAMS, group, strategy)
    for step in range(steps):
        with store.step(weight=group.rank + 1):
            for name, gradients in gradients_of(group.rank, step).items():
                store.reduce(name, gradients)
        store.update(optimizer or mp.Adam(0.1))
    return store


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_bits_are_those_of_data_parallel_training(world_size, stage, library):
    def program(group):
        whole, early = (mp.ShardedOptimizer(mp.Adam(0.1), library.give(PARAMS), group, stage) for _ in range(2))
        seen = whole.params
        for step in range(3):
            gradients = library.give(gradients_of(group.rank, step))
            whole.step(gradients, weight=group.rank + 1)
            with early.backward(weight=group.rank + 1):
                early.ready("l1", gradients["l1"])
                early.ready("l0.b", gradients["l0"]["b"])
                early.ready("l0.w", gradients["l0"]["w"])
            early.update()
        assert bits(whole.params) == bits(seen)  # they are updated in place
        return bits(whole.params), bits(early.params), bits(sharded(group).full())

    for whole, early, expected in run(program, world_size).results:
        assert whole == early == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_a_program_holds_are_new_when_a_step_returns(stage):
    def program(group):
        opt = mp.ShardedOptimizer(mp.SGD(1.0), {"a": np.zeros(5), "b": np.zeros(2)}, group, stage)
        params, seen = opt.params, []
        for _ in range(2):
            opt.step({"a": np.ones(5), "b": params["b"] + 1})
            seen += [params["a"].tolist(), params["b"].tolist()]
        return seen

    assert run(program, 3).results == [[[-1.0] * 5, [-1.0] * 2, [-2.0] * 5, [-1.0] * 2]] * 3


@pytest.mark.parametrize("stage", [1, 2])
def test_paused_steps_are_one_step_over_all_micro_batches(stage, library):
    def program(group):
        opt = mp.ShardedOptimizer(mp.SGD(1.0), library.give({"a": np.zeros(3), "b": np.zeros(2)}), group, stage)
        with opt.paused():
            for micro in range(2):
                opt.step(library.give({"a": np.full(3, 3.0 * micro), "b": np.ones(2)}), weight=group.rank + micro)
            assert opt.params["a"].tolist() == [0.0] * 3
        opt.step(None, weight=0)
        return {name: x.tolist() for name, x in opt.params.items()}

    # Weights 0 and 1, then 1 and 2.
    assert run(program, 2).results == [{"a": [-9 / 4] * 3, "b": [-1.0] * 2}] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_what_no_rank_has_made_ready_stays_as_it_is(stage):
    def program(group):
        opt = mp.ShardedOptimizer(mp.AdamW(1.0, weight_decay=0.5), PARAMS, group, stage)
        with opt.backward():
            opt.ready("l0.w", np.zeros((3, 5), np.float32) if group.rank else None)
            opt.ready("l0.b", None)
        opt.update()
        return opt.params["l0"]["w"][0, 0].item(), opt.params["l1"].tolist()

    assert run(program, 2).results == [(-0.5, [1.0] * 3)] * 2


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("asked", "left"), [(None, [-1.0] * 4), ("float16", [-np.inf] * 4)])
def test_16_bit_gradients_are_summed_in_float32(stage, asked, left, library):
    def program(group):
        params, gradients = library.give([{"a": np.ones(4, np.float16)}, {"a": np.full(4, 20, np.float16)}])
        opt = mp.ShardedOptimizer(mp.SGD(0.1), params, group, stage, reduce_dtype=asked)
        with opt.paused():
            opt.step(gradients, weight=4096)
        opt.step(gradients, weight=4096)
        return opt.params["a"].dtype.name, opt.params["a"].tolist()

    assert run(program, 2).results == [("float16", left)] * 2


def test_misuse_is_refused_and_nothing_changes():
    def program(group):
        opt = mp.ShardedOptimizer(mp.SGD(1.0), {"a": np.zeros(3), "b": np.zeros(2)}, group, 2)
        with pytest.raises(UsageError, match=r"missing are \['b'\], unknown are \['c'\]"):
            opt.step({"a": np.ones(3), "c": np.ones(2)})
        with pytest.raises(SizeMismatchError, match="'b' has shape"):
            opt.step({"a": np.ones(3), "b": np.ones(3)})
        with pytest.raises(DTypeError, match="must have float64"):
            opt.step({"a": np.ones(3), "b": np.ones(2, "f4")})
        with pytest.raises(UsageError, match="outside of it"):
            opt.ready("a", np.ones(3))
        with opt.backward():
            opt.ready("a", np.ones(3))
            with pytest.raises(UsageError, match="'a' was already given"):
                opt.ready("a", np.ones(3))
            with pytest.raises(UsageError, match="no parameter 'z'"):
                opt.ready("z", np.ones(3))
        with pytest.raises(UsageError, match="stage must be 1 or 2"):
            mp.ShardedOptimizer(mp.SGD(), {"a": np.zeros(3)}, group, 3)
        return opt.params["a"].tolist()

    assert run(program, 2).results == [[0.0] * 3] * 2


def test_gradients_made_ready_in_another_order_on_one_rank_are_found():
    def program(group):
        opt = mp.ShardedOptimizer(mp.SGD(1.0), {"a": np.zeros(4), "b": np.zeros(4)}, group, 2)

        def step():
            with opt.backward():
                for name in "ba" if group.rank else "ab":
                    opt.ready(name, np.ones(4))

        with pytest.raises(UsageError, match="rank 1: made the gradient of 'b' ready"):
            step()
        return opt.params["a"].tolist()

    assert run(program, 2).results == [[0.0] * 4] * 2


# Checkpoints


def pieces_of(state):
    """What a rank would write: for each leaf by name, its shape, and its pieces by offset."""
    found = {}

    def visit(name, node):
        if isinstance(node, mp.ShardedArray):
            found[name] = node.shape, {box: array.copy() for box, array in node.pieces}
        else:
            for key, child in node.items():
                visit(f"{name}.{key}", child)

    visit("", state)
    return found


def load(state, ranks, give=lambda array: array):
    """Write what all ranks of another world have into a state."""
    whole = {}
    for pieces in ranks:
        for name, (shape, parts) in pieces.items():
            for box, array in parts.items():
                target = whole.setdefault(
                    name, np.full(shape, np.nan, array.dtype) if array.dtype.kind == "f" else np.zeros(shape, int)
                )
                target[box.slices] = array

    def visit(name, node):
        if isinstance(node, mp.ShardedArray):
            for box, array in node.pieces:
                array[...] = give(whole[name][box.slices]) if array.shape else whole[name][box.slices]
        else:
            for key, child in node.items():
                visit(f"{name}.{key}", child)

    visit("", state)


def test_what_is_written_into_the_state_right_after_an_update_stays():
    def program(group):
        opt = mp.ShardedOptimizer(mp.SGD(1.0), {"a": np.zeros(4)}, group)
        with opt.backward():
            opt.ready("a", np.ones(4))
        opt.update()
        for _, piece in opt.state()["params"]["a"].pieces:
            piece[...] = 7
        group.barrier()
        return opt.params["a"].tolist()

    assert run(program, 2).results == [[7.0] * 4] * 2


@pytest.mark.parametrize("strategy", ["full", "grad", "none", "optimizer"])
def test_the_state_can_be_loaded_by_another_number_of_ranks_with_other_units(strategy, library):
    adam = mp.Adam(0.1)

    saved = run(lambda group: pieces_of(sharded(group, "full", steps=2).state()), 3).results

    def go_on(group):
        if strategy == "optimizer":
            store = mp.ShardedOptimizer(adam, library.give(PARAMS), group, units=["", "l0.w"])
        else:
            store = mp.Sharded(library.give(PARAMS), group, strategy, units=["", "l0.w"])
        load(store.state(adam), saved, library.give)
        again = pieces_of(store.state())
        with store.backward() if strategy == "optimizer" else store.step():
            gradients = library.give(gradients_of(0, 2))
            flat = {"l0.b": gradients["l0"]["b"], "l0.w": gradients["l0"]["w"], "l1": gradients["l1"]}
            if strategy == "optimizer":
                for name, gradient in flat.items():
                    store.ready(name, gradient)
            else:
                store.reduce("l0.w", flat.pop("l0.w"))
                store.reduce("", flat)
        store.update(adam)
        return again, bits(store.full())

    def reference(group):
        """One rank that makes the same three steps; the first two as the three ranks did."""
        store = mp.Sharded(PARAMS, group, "none")
        load(store.state(adam), saved)
        with store.step():
            for name, gradients in gradients_of(0, 2).items():
                store.reduce(name, gradients)
        store.update(adam)
        return bits(store.full())

    (expected,) = run(reference, 1).results
    for again, found in run(go_on, 2).results:
        assert found == expected
        assert set(again) == set(saved[0])


def test_counters_of_parameters_that_were_updated_unequally_often_load_into_any_units():
    params = {"a": np.ones(3), "b": np.ones(2)}

    def train(store, steps):
        for step, names in steps:
            with store.step():
                for unit in store.units:
                    gradients = {name: np.full(params[name].shape, 1.0 + step) if name in names else None for name in params}
                    store.reduce(unit, gradients if unit == "" else gradients[unit])
            store.update(mp.Adam(0.1))

    def two_units(group):
        store = mp.Sharded(params, group)
        train(store, [(0, "ab"), (1, "a")])
        saved = pieces_of(store.state())
        train(store, [(2, "ab")])
        return saved, {name: each.tolist() for name, each in store.full().items()}

    def one_unit(group):
        store = mp.Sharded(params, group, units=[""])
        load(store.state(mp.Adam()), saved)
        counts = {name: int(entry["step"].pieces[0][1]) for name, entry in store.state()["state"].items()}
        train(store, [(2, "ab")])
        return counts, {name: each.tolist() for name, each in store.full().items()}

    saved, (expected, _) = zip(*run(two_units, 2).results, strict=True)
    assert run(one_unit, 3).results == [({"a": 2, "b": 1}, expected)] * 3
