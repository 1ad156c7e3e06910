"""What a sharded model refuses, and what is left after a failure."""

from __future__ import annotations

import re

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import CommError, DTypeError, OneAccordError, PeerLostError, SizeMismatchError, UsageError
from oneaccord_simulated import Kill, explore, run


def fails(action):
    """What an action raises, as its type and text."""
    try:
        action()
    except OneAccordError as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def make(group, **options):
    return mp.Sharded({"a": np.ones(4), "b": {"w": np.ones((2, 2))}}, group, **options)


def enter(store, name):
    with store.unit(name):
        pass


STEP = [
    (lambda s: s.reduce("c", np.ones(4)), UsageError, r"there is no unit 'c'.*the units are \['a', 'b'\]"),
    (lambda s: enter(s, "aa"), UsageError, r"no unit 'aa' \(did you mean 'a'\?\)"),
    (lambda s: s.reduce("b", {"v": np.ones((2, 2))}), UsageError, r"missing are \['w'\], unknown are \['v'\]"),
    (lambda s: s.reduce("b", {"w": np.ones(4)}), SizeMismatchError, r"'b.w' has shape \(4,\), and the parameter has \(2, 2\)"),
    (lambda s: s.reduce("a", np.ones(4, "f4")), DTypeError, "'a' has dtype float32, but must have float64"),
    (lambda s: s.reduce("a", [1.0] * 4), UsageError, "missing are"),
    (lambda s: (s.reduce("a", np.ones(4)), s.reduce("a", np.ones(4))), UsageError, "'a' was reduced already in this step"),
    (lambda s: s.update(mp.SGD()), UsageError, r"update\(\) was called within step\(\)"),
    (lambda s: s.full(), UsageError, r"full\(\) was called within step\(\)"),
    (lambda s: s.step().__enter__(), UsageError, r"step\(\) was called within step\(\)"),
]
OUTSIDE = [
    (lambda s: s.reduce("a", np.ones(4)), UsageError, r"reduce\(\) belongs into `with ....step\(\):`.*outside of it"),
    (lambda s: enter(s, "a"), UsageError, "outside of a step"),
    (lambda s: s.update(mp.SGD()), UsageError, "found no gradients: no step has ended"),
    (lambda s: s.shards(), UsageError, "found no gradients"),
    (lambda s: s.step(weight=-1).__enter__(), UsageError, "a weight must be a finite number that is not negative"),
    (lambda s: s.step(weight=None).__enter__(), UsageError, "a weight must be a finite number .* not None"),
    (lambda s: s.step(weight="4").__enter__(), UsageError, "a weight must be a finite number .* not '4'"),
    (lambda s: s.step(weight=float("nan")).__enter__(), UsageError, "samples, not nan"),
    (lambda s: s.state(lambda p, g, state: None), UsageError, r"method prepare\(param, state\)"),
]


@pytest.mark.parametrize("inside", [True, False])
def test_misuse_is_refused_and_the_store_goes_on(inside):
    def program(group):
        store, found = make(group), []
        for action, *_ in STEP if inside else OUTSIDE:
            if inside:
                with store.step():
                    found.append(fails(lambda action=action: action(store)))
            else:
                found.append(fails(lambda action=action: action(store)))
        with store.step():
            store.reduce("a", np.ones(4))
        store.update(mp.SGD(1.0))
        return found, store.full()["a"].tolist()

    for found, full in run(program, 2).results:
        for (kind, text), (_, expected, said) in zip(found, STEP if inside else OUTSIDE, strict=True):
            assert kind is expected
            assert re.search(said, text), text
        assert full == [0.0] * 4


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (lambda g: {"units": ["a"]}, UsageError, "'b.w' belongs to none of the units"),
        (lambda g: {"units": ["a", "b", "c"]}, UsageError, r"units \['c'\] have no parameters"),
        (lambda g: {"units": "a"}, UsageError, "not a string"),
        (lambda g: {"strategy": "zero"}, UsageError, "not 'zero'"),
        (lambda g: {"strategy": mp.Hybrid(0, 1)}, UsageError, "needs a mesh"),
        (lambda g: {"prefetch": -1}, UsageError, "prefetch must be a number of units"),
        (lambda g: {"compute_dtype": "int8"}, UsageError, "not 'int8'"),
        (lambda g: {"root": 9}, UsageError, "root must be a rank from 0 to 1"),
        (lambda g: {"units": ["a", "b"] if g.rank else ["b", "a"]}, UsageError, r"rank 0: unit 'b'.*\n.*rank 1: unit 'a'"),
        (lambda g: {"units": ["a", "b"] if g.rank else ["a"]}, UsageError, "rank 0: refused its arguments"),
        (lambda g: {"prefetch": g.rank}, UsageError, r"'prefetch': 0.*\n.*'prefetch': 1"),
    ],
)
def test_impossible_arguments_are_refused_on_every_rank(arguments, error, said):
    def program(group):
        with pytest.raises(error) as found:
            make(group, **arguments(group))
        assert group.all_reduce(1) == 2
        return str(found.value)

    texts = run(program, 2).results
    assert any(re.search(said, text) for text in texts), texts


@pytest.mark.parametrize("tree", [{}, {"a": np.ones(2, int)}, {"a": 1.0}, {"a": "text"}])
def test_trees_without_floating_point_arrays_are_refused(tree):
    def program(group):
        with pytest.raises(UsageError):
            mp.Sharded(tree, group)

    run(program, 2)


def test_ranks_with_different_parameters_learn_it_on_every_rank():
    def program(group):
        with pytest.raises(UsageError, match=r"rank 0: unit 'a': 'a' float64\[2\]\n  rank 1: unit 'a': 'a' float64\[3\]"):
            mp.Sharded({"a": np.ones(2 + group.rank)}, group)

    run(program, 2)


@pytest.mark.parametrize(("strategy", "wrong"), [("full", "enter"), ("full", "reduce"), ("grad", "reduce"), ("none", "reduce")])
def test_units_mixed_up_on_one_rank_are_found_before_a_parameter_changes(strategy, wrong):
    """The units have one size, so that no single message could tell."""

    def program(group):
        store = mp.Sharded({"a": np.ones(4), "b": np.full(4, 2.0)}, group, strategy)
        order = "ba" if group.rank == 1 else "ab"

        def step():
            with store.step():
                for name in order if wrong == "enter" else "ab":
                    enter(store, name)
                for name in order if wrong == "reduce" else "ab":
                    store.reduce(name, np.ones(4))

        with pytest.raises(UsageError, match="did different things") as found:
            step()
        with pytest.raises(UsageError, match="found no gradients"):
            store.update(mp.SGD())
        return str(found.value), {name: x.tolist() for name, x in store.full().items()}

    for text, full in run(program, 3).results:
        action = "entered" if wrong == "enter" else "reduced"
        assert text.split("\n")[1:] == [f"  rank {rank}: {action} the unit {'b' if rank == 1 else 'a'!r}" for rank in range(3)]
        assert full == {"a": [1] * 4, "b": [2] * 4}


def test_weights_that_are_all_zero_are_refused_on_every_rank():
    def program(group):
        store = make(group)
        with pytest.raises(UsageError, match="weights of all ranks are 0"), store.step(weight=0):
            store.reduce("a", np.ones(4))
        return store.full()["a"].tolist()

    assert run(program, 2).results == [[1.0] * 4] * 2


def test_an_exception_within_a_step_drops_its_gradients():
    def program(group):
        store = make(group)

        with store.paused(), store.step():
            store.reduce("a", np.ones(4))

        def step():
            with store.paused(), store.step(), store.unit("a"):
                store.reduce("a", np.ones(4))
                raise KeyError

        with pytest.raises(KeyError):
            step()
        with pytest.raises(UsageError, match="found no gradients"):
            store.shards()
        with store.step():
            store.reduce("b", {"w": np.ones((2, 2))})
        return len(store.shards()), store.memory.held["gathered"]

    assert run(program, 2).results == [(1, 0)] * 2


@pytest.mark.parametrize(
    ("strategy", "operation"),
    [("full", "all_gather"), ("full", "reduce_scatter"), ("grad", "reduce_scatter"), ("none", "all_reduce")],
)
@pytest.mark.parametrize("nth", [2, 5])
def test_a_rank_that_is_killed_in_a_step_leaves_the_parameters_of_before(strategy, operation, nth):
    def program(group):
        store = mp.Sharded({name: np.full(6, float(ord(name))) for name in "abc"}, group, strategy)
        before = [x.copy() for x in shards(store)]
        try:
            for _ in range(2):
                with store.step():
                    for name in "abc":
                        enter(store, name)
                    for name in "cba":
                        enter(store, name)
                        store.reduce(name, np.ones(6))
                store.update(mp.SGD(1.0))
                before = [x.copy() for x in shards(store)]
        except CommError as error:
            same = [x.tolist() for x in shards(store)] == [x.tolist() for x in before]
            with pytest.raises(CommError):
                store.full()
            return type(error) is PeerLostError, same
        return None

    def shards(store):
        return [array for entry in store.state()["params"].values() for _, array in entry.pieces]

    done = run(program, 3, faults=Kill(rank=1, operation=operation, nth=nth), check=False)
    assert [done.results[0], done.results[2]] == [(True, True)] * 2


def test_no_order_of_events_changes_a_training():
    def program(group):
        store = mp.Sharded({name: np.arange(6, dtype=np.float32) for name in "abc"}, group)
        for step in range(3):
            with store.step(weight=group.rank + 1):
                for name in "abc":
                    enter(store, name)
                for name in "cba":
                    with store.unit(name) as w:
                        store.reduce(name, w * np.float32(0.1 * (group.rank + step)))
            store.update(mp.Adam(0.1))
        return {name: x.tobytes() for name, x in store.full().items()}

    explore(program, 3, alike=True, seeds=range(8)).raise_failure()


def test_an_optimizer_that_keeps_what_no_checkpoint_can_hold_is_told():
    def update(param, grad, state):
        state["calls"] = state.get("calls", 0) + 1

    def program(group):
        store = make(group)
        with store.step():
            store.reduce("a", np.ones(4))
        store.update(update)
        with pytest.raises(UsageError, match=r"'calls' of the optimizer for 'a' has type int.*np.zeros\(\(\)\)"):
            store.state()

    run(program, 2)


def test_a_mesh_is_for_hybrid_alone():
    def program(group):
        with oa.DeviceMesh(group, (2, 1), ("dp", "local")) as mesh:
            for strategy, said in [
                ("full", r"takes a group, such as mesh.group\('dp'\)"),
                (mp.Hybrid("dp", 0), "both are 'dp'"),
            ]:
                with pytest.raises(UsageError, match=said):
                    make(mesh, strategy=strategy)

    run(program, 2)
