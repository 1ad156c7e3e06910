"""Parameters of sharded stores by name: their updates, those without a gradient, and arrays that stand at several places."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import UsageError
from oneaccord_simulated import run


def zeros_of(params):
    return {name: np.zeros_like(each) for name, each in params.items()}


@pytest.mark.parametrize("strategy", ["full", "grad", "none", 1, 2])
def test_an_update_is_chosen_by_the_name_of_the_parameter(strategy):
    params = {"body": {"w": np.ones((3, 3)), "b": np.ones(3)}, "head": {"w": np.ones((3, 2)), "b": np.ones(2)}}
    update = mp.ByName(
        lambda name: {"head.w": mp.SGD(1.0, weight_decay=0.25), "head.b": None}.get(
            name, mp.AdamW(1.0, weight_decay=0.5 if name.endswith(".w") else 0.0)
        )
    )
    zero = {unit: zeros_of(inner) for unit, inner in params.items()}

    def program(group):
        if isinstance(strategy, int):
            opt = mp.ShardedOptimizer(update, params, group, strategy)
            opt.step(zero)
        else:
            opt = mp.Sharded(params, group, strategy)
            with opt.step():
                for unit in opt.units:
                    opt.reduce(unit, zero[unit])
            opt.update(update)
        prepared = mp.Sharded(params, group).state(update)["state"]
        assert {name: sorted(entries) for name, entries in prepared.items()} == {
            name: ["exp_avg", "exp_avg_sq", "step"] for name in ("body.b", "body.w")
        }
        return [set(each.ravel().tolist()) for inner in opt.full().values() for each in inner.values()]

    assert run(program, 4).results == [[{0.5}, {1.0}, {0.75}, {1.0}]] * 4


def test_functions_without_a_state_to_prepare_have_a_checkpoint_by_name_as_well(tmp_path):
    params = {"a": np.ones(3), "b": np.ones(2)}

    def descend(param, grad, state):
        param -= 0.5 * grad

    def program(group):
        found = []
        for update in (descend, mp.ByName(lambda name: descend), mp.ByName({"a": descend, "b": mp.Adam()}.get)):
            opt = mp.ShardedOptimizer(update, params, group)
            empty = {name: sorted(entries) for name, entries in opt.state()["state"].items()}
            opt.step(params)
            mp.save(opt.state(), tmp_path, group)
            again = mp.ShardedOptimizer(update, params, group)
            mp.load(tmp_path, again.state(), group)
            found.append((empty, again.params["a"].tolist()))
        return found

    halved = [0.5] * 3
    assert run(program, 2).results == [[({}, halved), ({}, halved), ({"b": ["exp_avg", "exp_avg_sq", "step"]}, halved)]] * 2


def test_a_function_gets_the_name_if_it_asks_for_it():
    params = {"a": {"w": np.zeros((2, 2)), "b": np.zeros(1)}, "c": np.zeros(0)}

    def program(group):
        seen = []

        def update(param, grad, state, *, name):
            seen.append((name, param.shape, grad.tolist()))

        opt = mp.ShardedOptimizer(update, params, group, units=[""])
        opt.step({"a": {"w": np.arange(4.0).reshape(2, 2), "b": np.array([7.0])}, "c": np.zeros(0)})
        return seen

    assert run(program, 2).results == [
        [("a.b", (1,), [7.0]), ("a.w", (2,), [0.0, 1.0]), ("c", (0,), [])],
        [("a.b", (0,), []), ("a.w", (2,), [2.0, 3.0]), ("c", (0,), [])],
    ]


def test_a_name_that_is_bound_stays():
    def program(group):
        seen = []
        update = partial(lambda param, grad, state, name: seen.append(name), name="mine")
        mp.ShardedOptimizer(update, {"a": np.zeros(2)}, group).step({"a": np.ones(2)})
        return seen

    assert run(program, 2).results == [["mine"]] * 2


@pytest.mark.parametrize("strategy", ["full", "grad", "none", 1, 2])
def test_a_parameter_without_a_gradient_on_any_rank_is_not_updated(strategy):
    params = {"layer": {"frozen": np.ones(3), "w": np.ones(3), "some": np.ones(2)}, "unused": [np.ones(2), np.ones(1)]}
    adam = mp.AdamW(1.0, weight_decay=0.5)

    def program(group):
        gradients = {"frozen": None, "w": np.zeros(3), "some": np.full(2, 4.0) if group.rank == 0 else None}
        if isinstance(strategy, int):
            opt = mp.ShardedOptimizer(adam, params, group, strategy)
            with opt.paused():
                opt.step({"layer": gradients, "unused": None})
            opt.step({"layer": None, "unused": [None, None]})
            counts = opt.state(mp.SGD())["state"]
        else:
            opt = mp.Sharded(params, group, strategy)
            for pause in (opt.paused(), contextlib.nullcontext()):
                with pause, opt.step():
                    opt.reduce("layer", gradients)
                    opt.reduce("unused", None)
            shards = sum(len(p) for p, _ in opt.shards())
            assert group.all_reduce(shards if strategy != "none" else shards / 3) == 5
            opt.update(adam)
            counts = opt.state()["state"]
        layer, unused = opt.full()["layer"], opt.full()["unused"]
        assert sorted(name for name, entries in counts.items() if "step" in entries and int(entries["step"].pieces[0][1])) == [
            "layer.some",
            "layer.w",
        ]
        return [layer[name].tolist() for name in ("frozen", "w", "some")], [each.tolist() for each in unused]

    # 1 shrinks to 0.5 by decay; where a rank has a gradient, by a step of 1 as well.
    expected = [[1.0] * 3, [0.5] * 3, [pytest.approx(-0.5, abs=1e-7)] * 2], [[1.0] * 2, [1.0]]
    assert run(program, 3).results == [expected] * 3


def test_a_step_without_any_gradient_updates_nothing_and_says_so():
    def program(group):
        opt = mp.ShardedOptimizer(mp.AdamW(1.0), {"a": np.ones(3)}, group)
        with pytest.raises(UsageError, match="no rank has given any in the last step"):
            opt.step({"a": None})
        with pytest.raises(UsageError, match=r"missing are \['a'\], unknown are none; give None for a parameter"):
            opt.step({})
        return opt.params["a"].tolist()

    assert run(program, 2).results == [[1.0] * 3] * 2


# One array at several places


def tied_params():
    w, v = np.zeros(4), np.arange(6.0)
    # A state dict of torch holds other objects, of the same memory.
    return {"embedding": w, "layer": {"a": v.reshape(2, 3), "b": v.reshape(2, 3)[:]}, "head": {"w": w[:], "c": np.zeros(1)}}


TIED_GRADIENTS = {
    "embedding": np.ones(4),
    "layer": {"a": np.ones((2, 3)), "b": np.full((2, 3), 2.0)},
    "head": {"w": np.full(4, 4.0), "c": np.ones(1)},
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("strategy", ["full", "grad", "none", 1, 2])
def test_an_array_at_several_places_stays_one_and_its_gradients_add_up(strategy, world_size, tmp_path):
    sgd = mp.SGD(1.0, momentum=0.5)

    def program(group):
        # Those of other ranks do not matter, and may all be one.
        nothing = np.zeros(6)
        params = tied_params() if group.rank == 0 else {
            "embedding": nothing[:4], "layer": {"a": nothing.reshape(2, 3), "b": nothing.reshape(2, 3)}, "head": {"w": nothing[:4], "c": nothing[:1]}
        }  # fmt: skip
        seen = None
        if isinstance(strategy, int):
            opt = mp.ShardedOptimizer(sgd, params, group, strategy)
            for _ in range(2):
                opt.step(TIED_GRADIENTS)
            seen = opt.params
        else:
            opt = mp.Sharded(params, group, strategy)
            for _ in range(2):
                with opt.step():
                    for unit in (*opt.units, *reversed(opt.units)):
                        with opt.unit(unit), opt.unit("head") as head, opt.unit("embedding") as embedding:
                            assert head["w"].tolist() == embedding.tolist()
                    for unit in opt.units:
                        opt.reduce(unit, TIED_GRADIENTS[unit])
                opt.update(sgd)
        full = opt.full()
        state = opt.state(sgd)
        assert sorted(state["state"]) == ["embedding", "head.c", "layer.a"]
        folder = tmp_path / f"{strategy}"
        mp.save(state, folder, group)
        other = mp.Sharded(tied_params(), group, units=[""])
        mp.load(folder, like=other.state(sgd), group=group)
        for each in [other.full(), *([seen] if seen else [])]:
            assert each["head"]["w"].tolist() == full["head"]["w"].tolist()
        return full["embedding"].tolist(), full["head"]["w"].tolist(), full["layer"]["a"].tolist(), full["layer"]["b"].tolist()

    # Gradients of 5 and 3, with momentum: 1 + 1.5 times.
    w, v = [-12.5] * 4, (np.arange(6.0) - 7.5).reshape(2, 3).tolist()
    assert run(program, world_size).results == [(w, w, v, v)] * world_size


@pytest.mark.parametrize("make", [mp.Sharded, lambda *given: mp.ShardedOptimizer(mp.SGD(1.0), *given)])
@pytest.mark.parametrize("other", [lambda w: w.T, lambda w: w[:1], lambda w: w[::-1], lambda w: w.view(np.float32)])
def test_parameters_that_share_some_memory_are_refused_on_every_rank(make, other):
    def program(group):
        w = np.zeros((2, 3))
        with pytest.raises(UsageError, match="share memory but are not the same array"):
            make({"a": w, "b": other(w) if group.rank == 0 else np.zeros_like(other(w))}, group)
        fixed = np.broadcast_to(np.float32(1), (2, 2))  # values that do not change are not tied
        store = mp.Sharded({"a": fixed, "b": fixed, "c": w[:, :1], "d": w[:, 1:]}, group)
        return len(store.state(mp.Adam())["state"])

    assert run(program, 2).results == [4] * 2


def test_ranks_without_a_root_must_tie_alike():
    def program(group):
        w = np.zeros(2)
        with pytest.raises(UsageError, match="first difference"):
            mp.Sharded({"a": w, "b": w if group.rank else np.zeros(2)}, group, root=None)
        return mp.Sharded({"a": w, "b": w}, group, root=None).full()["b"].tolist()

    assert run(program, 2).results == [[0.0] * 2] * 2


@pytest.mark.parametrize("strategy", ["full", "grad", "none", 1, 2])
def test_memory_that_stands_at_several_places_of_a_tied_array_counts_once_in_a_call_and_values_count_each(strategy):
    def program(group):
        w = np.zeros((2, 2))
        g = np.arange(4.0).reshape(2, 2)
        value = np.broadcast_to(np.float64(1), (2, 2))
        stands = [(g, g, None), (g[:], g.view(), g), (g, g.copy(), None), (g, g.T, None), (value, value, None)]
        found = []
        for gradients in stands:
            params = dict(zip("abc", (w, w, w), strict=True))
            if isinstance(strategy, int):
                opt = mp.ShardedOptimizer(mp.SGD(1.0), params, group, strategy)
                opt.step(dict(zip("abc", gradients, strict=True)))
            else:
                opt = mp.Sharded(params, group, strategy, units=[""])
                with opt.step():
                    opt.reduce("", dict(zip("abc", gradients, strict=True)))
                opt.update(mp.SGD(1.0))
            found.append((-opt.full()["c"]).ravel().tolist())
        return found

    once = [0.0, 1.0, 2.0, 3.0]
    assert run(program, 2).results == [[once, once, [0.0, 2.0, 4.0, 6.0], [0.0, 3.0, 3.0, 6.0], [2.0] * 4]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_that_a_program_fills_anew_is_another_gradient(stage):
    def program(group):
        w, buffer = np.zeros(2), np.empty(2)
        opt = mp.ShardedOptimizer(mp.SGD(1.0), {"a": w, "b": w}, group, stage)
        with opt.backward():
            for name, value in (("a", 1.0), ("b", 2.0)):
                buffer[...] = value
                opt.ready(name, buffer)
        opt.update()
        store = mp.Sharded({"a": w, "b": w}, group)
        with store.step():
            for name, value in (("a", 1.0), ("b", 2.0)):
                buffer[...] = value
                store.reduce(name, buffer)
        store.update(mp.SGD(1.0))
        return opt.full()["b"].tolist(), store.full()["b"].tolist()

    assert run(program, 2).results == [([-3.0] * 2, [-3.0] * 2)] * 2


@pytest.mark.parametrize("strategy", ["full", "grad", "none"])
def test_the_bits_of_a_tied_array_do_not_depend_on_the_units(strategy):
    def program(group):
        random = np.random.default_rng(group.rank)
        one, other = (random.standard_normal(1000).astype("f4") for _ in range(2))
        w = np.zeros(1000, "f4")
        params = {"a": {"w": w}, "b": {"w": w}}
        opt = mp.ShardedOptimizer(mp.SGD(1.0), params, group)
        opt.step({"a": {"w": one}, "b": {"w": other}}, weight=group.rank + 1)
        found = [opt.params["a"]["w"].tobytes()]
        for units in (["a", "b"], [""]):
            store = mp.Sharded(params, group, strategy, units=units)
            with store.step(weight=group.rank + 1):
                for unit in reversed(units):
                    store.reduce(unit, {"": {"a": {"w": one}, "b": {"w": other}}, "a": {"w": one}, "b": {"w": other}}[unit])
            store.update(mp.SGD(1.0))
            found.append(store.full()["b"]["w"].tobytes())
        return len(set(found))

    assert run(program, 3).results == [1] * 3


@pytest.mark.parametrize("strategy", ["full", "grad", "none"])
def test_a_tied_array_of_which_one_unit_is_not_reduced_gets_the_gradient_of_the_others(strategy):
    def program(group):
        w = np.zeros(3)
        store = mp.Sharded({"a": {"w": w, "v": np.zeros(1)}, "b": w, "c": [w, None]}, group, strategy)
        found = []
        for units, pause in ((["b"], False), (["c", "a"], True), (["a", "b", "c"], False)):
            with store.paused() if pause else contextlib.nullcontext(), store.step():
                for unit in units:
                    store.reduce(
                        unit, {"a": {"w": np.ones(3), "v": None}, "b": np.full(3, 2.0), "c": [np.full(3, 4.0), None]}[unit]
                    )
            if not pause:
                store.update(mp.SGD(1.0))
                found.append(-store.full()["c"][0][0])

        def fail():
            with store.step():
                store.reduce("a", {"w": np.ones(3), "v": None})
                raise RuntimeError("what was held is dropped")

        with pytest.raises(RuntimeError):
            fail()
        with store.step():
            store.reduce("c", [np.full(3, 1.0), None])
        store.update(mp.SGD(1.0))
        return [*found, -store.full()["c"][0][0]]

    # Two steps of an update add up 4 + 1 and 1 + 2 + 4; the mean is over both.
    assert run(program, 2).results == [[2.0, 2.0 + (5 + 7) / 2, 9.0]] * 2


def test_a_tied_array_of_another_dtype_is_refused_on_every_rank():
    def program(group):
        w = np.zeros(6)
        params = {"a": w, "b": w} if group.rank == 0 else {"a": np.zeros(6), "b": np.zeros(6, "f4")}
        with pytest.raises(
            UsageError, match=r"rank 0: 'b' float64\[6\] is the array 'a'\n +rank 1: 'b' float32\[6\] is the array 'a'"
        ):
            mp.Sharded(params, group)
        return True

    assert run(program, 2).results == [True] * 2


@pytest.mark.parametrize("strategy", ["full", 1])
def test_none_under_a_name_that_is_not_there_is_refused(strategy):
    def program(group):
        w = np.zeros(2)
        params = {"l": {"a": w, "b": [w, None], "none": None}, "other": {"w": w, "bias": None}}
        gradients = {"a": np.ones(2), "b": [None, None], "none": None}

        def give(gradients):
            if strategy == 1:
                mp.ShardedOptimizer(mp.SGD(1.0), params, group).step({"l": gradients, "other": None})
            else:
                store = mp.Sharded(params, group)
                with store.step():
                    store.reduce("l", gradients)

        for typo, named in (({"typo": None}, "typo"), ({"a": {"b": None}}, r"a\.b")):
            with pytest.raises(UsageError, match=rf"unknown are \['(l\.)?{named}'\]"):
                give({**gradients, **typo})
        if strategy == 1:
            opt = mp.ShardedOptimizer(mp.SGD(1.0), params, group)
            opt.step({"l": gradients, "other": {"w": None, "bias": None}})
        else:
            opt = mp.Sharded(params, group)
            with opt.step():
                opt.reduce("l", gradients)
                opt.reduce("other", {"w": None, "bias": None})
            opt.update(mp.SGD(1.0))
        return opt.full()["other"]["w"].tolist()

    assert run(program, 2).results == [[-1.0, -1.0]] * 2
