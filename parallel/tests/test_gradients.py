"""Gradients of all ranks: the mean, its bits, and what is refused."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradient_oracles import mean, same_bits
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import AbortedError, CommError, DTypeError, LayoutError, PeerLostError, SizeMismatchError, UsageError
from oneaccord_simulated import Kill, random_faults
from oneaccord_simulated import run as simulated

SHAPES = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 2), "e": (2, 2, 2), "f": (11,)}
PARAMETERS = {name: np.zeros(shape, "f8" if name in "ce" else "f4") for name, shape in SHAPES.items()}


def gradients_of(rank, step=0, like=PARAMETERS):
    rng = np.random.default_rng((rank, *np.ravel(step)))
    return {name: np.asarray(rng.standard_normal(leaf.shape)).astype(leaf.dtype) for name, leaf in like.items()}


def expected(world_size, weights, step=0, like=PARAMETERS):
    ranks = [gradients_of(rank, step, like) for rank in range(world_size)]
    return {name: mean([each[name] for each in ranks], weights) for name in like}


def is_same(found, wanted):
    return list(found) == list(wanted) and all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("world_size", "backend"), [(1, "tcp"), (5, "simulated"), (4, "shm"), (3, "tcp")])
def test_the_bits_are_those_of_one_process_on_every_backend(backend, world_size, library):
    weights = [rank + 0.7 for rank in range(world_size)]

    def program(group):
        sync = mp.GradientSync(group, library.give(PARAMETERS), bucket_bytes=64, first_bucket_bytes=16)
        found = []
        for step in range(3):
            mine = library.give(gradients_of(group.rank, step))
            with sync.step(weight=weights[group.rank]) as s:
                order = np.random.default_rng((group.rank, step, 7)).permutation(list(mine))
                for name in order:
                    s.ready(name, mine[name])
            found.append(mine)
        found.append(sync(library.give(gradients_of(group.rank, 3)), weight=weights[group.rank]))
        return library.take(found)

    for found in must(thread_world(program, world_size, backend)):
        for step, each in enumerate(found):
            assert is_same(each, expected(world_size, weights, step))


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(1, 200), st.data())
def test_neither_bucket_size_nor_order_nor_a_pause_changes_a_bit(world_size, first, other, data):
    orders = st.permutations(list(PARAMETERS))
    arrivals = data.draw(st.lists(orders, min_size=2 * world_size, max_size=2 * world_size))
    weights = data.draw(st.lists(st.sampled_from([0, 0.3, 1, 7, 1000]), min_size=world_size, max_size=world_size))
    weights[-1] = weights[-1] or 1

    def program(group):
        sync = mp.GradientSync(group, PARAMETERS, bucket_bytes=other, first_bucket_bytes=first)
        outcomes = []
        for step in range(2):
            mine = gradients_of(group.rank, step)
            with sync.step(weight=weights[group.rank]) as s:
                for name in arrivals[2 * group.rank + step]:
                    s.ready(name, mine[name])
            assert set(s.gradients) == set(PARAMETERS)
            outcomes.append(mine)
        return outcomes

    for found in simulated(program, world_size, seed=data.draw(st.integers(0, 99))).results:
        for step, each in enumerate(found):
            assert is_same(each, expected(world_size, weights, step))


def test_paused_steps_and_one_more_are_one_step_over_all(world, library):
    counts = [3, 1, 0, 2]  # of paused steps, each rank its own

    def program(group):
        sync = mp.GradientSync(group, library.give(PARAMETERS), bucket_bytes=40)
        for turn in range(2):
            sums, weight = {name: np.zeros_like(leaf) for name, leaf in PARAMETERS.items()}, 0.0
            for micro in range(counts[group.rank] + 1):
                given = gradients_of(group.rank, (turn, micro))
                mine = library.give(given)
                factor = 0.5 + micro
                with sync.paused() if micro < counts[group.rank] else contextlib.nullcontext(), sync.step(weight=factor) as s:
                    for name, gradient in mine.items():
                        product = given[name] * gradient.dtype.type(factor)
                        sums[name] = product if micro == 0 else sums[name] + product
                        s.ready(name, gradient)
                weight += factor
                assert (s.gradients == {}) == (micro < counts[group.rank])
        return library.take(mine), sums, weight

    found = world(4).run(program).results
    total = sum(weight for _, _, weight in found)
    for mine, _, _ in found:
        for name, gradient in mine.items():
            ones = mean([sums[name] for _, sums, _ in found], [1] * 4) * 4
            assert same_bits(gradient, np.asarray(ones / ones.dtype.type(total)))


def test_what_no_rank_uses_stays_and_what_some_rank_uses_comes_to_all(world, library):
    like = {name: np.zeros(2) for name in ("everywhere", "nowhere", "on one")}

    def program(group):
        one, three = library.give([np.ones(2), np.full(2, 3.0)])
        sync = mp.GradientSync(group, library.give(like), first_bucket_bytes=16, bucket_bytes=32)
        for _ in range(2):
            nowhere = np.full(2, 5.0)
            with sync.step(weight=2) as s:
                if group.rank == 1:
                    s.ready("on one", three.copy())
                s.ready("everywhere", one + group.rank)
            assert nowhere.tolist() == [5.0, 5.0]
            tree = sync({"everywhere": one, "nowhere": None} | ({"on one": three} if group.rank == 1 else {}))
            assert tree["nowhere"] is None
            assert tree["on one"].tolist() == [1.0, 1.0]
        return {name: value.tolist() for name, value in s.gradients.items()}

    assert world(3).run(program).results == [{"everywhere": [2.0, 2.0], "on one": [1.0, 1.0]}] * 3


def test_a_rank_without_data_takes_part_and_its_numbers_do_not_matter(world):
    def program(group):
        sync = mp.GradientSync(group, np.zeros(2))
        sizes = []
        batches = [np.ones((1 + number, 2)) * number for number in range(group.rank + 1)]
        for batch in mp.until_all_done(batches, group):
            if batch is None:
                sizes.append(sync(np.full(2, np.inf), weight=0).tolist() if group.rank else sync(None, weight=0).tolist())
            else:
                sizes.append(sync(batch.mean(axis=0), weight=len(batch)).tolist())
        return sizes

    assert world(3).run(program).results == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]] * 3


def test_a_loop_without_batches_ends_at_once(world):
    assert world(3).run(lambda group: list(mp.until_all_done([], group))).results == [[]] * 3


def test_weights_of_zero_everywhere_are_refused_on_all_ranks_and_the_next_step_goes_on(world):
    def program(group, compress):
        sync = mp.GradientSync(group, np.zeros(2), compress=compress)
        mine = np.full(2, 7.0)
        with pytest.raises(UsageError, match="weights of all ranks are 0"), sync.step(weight=0) as s:
            s.ready("", mine)
        return mine.tolist(), sync(mine * group.rank).tolist()

    for compress in (None, mp.compress.Cast("float16"), mp.compress.PowerSGD()):
        assert world(3).run(program, compress).results == [([7.0, 7.0], [7.0, 7.0])] * 3


def test_short_dtypes_are_summed_in_float32_unless_told_otherwise(world, library):
    def program(group, dtype):
        mine = library.give(np.full(3, 300.0, "f2"))
        return mp.GradientSync(group, mine, reduce_dtype=dtype)(mine, weight=1000).astype("f8").tolist()

    assert world(3).run(program, None).results == [[300.0] * 3] * 3
    assert world(3).run(program, "float16").results == [[np.inf] * 3] * 3


def test_complex_gradients_are_averaged(world, library):
    def program(group):
        mine = library.give(np.array([1 + 2j, 3j], "c8")) * group.rank
        return library.take(mp.GradientSync(group, mine)(mine, weight=group.rank + 1))

    for found in world(3).run(program).results:
        assert same_bits(found, np.array([8 + 16j, 24j], "c8") / 6)


def test_an_array_that_is_used_again_for_another_gradient_keeps_the_means_apart(world, library):
    def program(group):
        scratch = library.give(np.zeros(2))
        sync = mp.GradientSync(group, {"a": scratch, "b": scratch})
        with sync.step() as step:
            for number, name in enumerate("ab"):
                scratch[...] = 10 * number + group.rank
                step.ready(name, scratch)
        return scratch.tolist(), {name: mean.tolist() for name, mean in step.gradients.items()}

    assert world(2).run(program).results == [([0.5] * 2, {"a": [0.5] * 2, "b": [10.5] * 2})] * 2


def test_gradients_that_are_not_contiguous_are_written_in_place(world, library):
    def program(group):
        whole = library.give(np.arange(12.0).reshape(3, 4)) * group.rank
        sync = mp.GradientSync(group, whole.T[:, ::2])
        with sync.step() as s:
            s.ready("", whole.T[:, ::2])
        return whole.tolist()

    zero, two = world(2).run(program).results
    wanted = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(np.array(two)[::2], wanted[::2] / 2)
    assert np.array_equal(np.array(zero)[1], np.zeros(4))


def test_buckets_leave_in_the_order_of_the_first_step_on_rank_0(world):
    like = {name: np.zeros(4) for name in "abcd"}

    def program(group):
        sync = mp.GradientSync(group, like, first_bucket_bytes=32, bucket_bytes=64)
        for step in range(3):
            group.mark(f"step {step}")
            with sync.step() as s:
                for name in "bdac" if group.rank == 0 else "abcd":
                    s.ready(name, np.ones(4))
                    group.compute(1.0)

    calls = world(2).run(program).trace.calls_of(0, "all_reduce")
    # The weight with the number of the sync, then [d], [c, b] and [a], from the second step on [b], [d, a] and [c]; each number with 8 bytes, and so each mark.
    assert [call.nbytes for call in calls] == [24, 40, 80, 40, *[24, 40, 80, 40] * 2]
    assert [call.start_s for call in calls] == [0, 1, 3, 3, 4, 4, 6, 7, 8, 8, 10, 11]


def test_a_bucket_has_one_dtype_and_comes_behind_another_if_its_last_gradient_does(world):
    like = {"a": np.zeros(4, "f4"), "b": np.zeros(4), "c": np.zeros(5, "f4"), "d": np.zeros(100, "f4")}

    def program(group):
        mp.GradientSync(group, like, first_bucket_bytes=64, bucket_bytes=64)(like)

    # The weight; d, which is too large for any other; b; then a and c, although c was expected before b.
    calls = world(2).run(program).trace.calls_of(0, "all_reduce")
    assert [call.nbytes for call in calls] == [24, 404, 40, 44]


@pytest.mark.parametrize("reproducible", [True, False])
def test_large_gradients_are_summed_in_the_order_of_ranks(world, reproducible):
    like = np.zeros(100_000, "f4")

    def program(group):
        mine = np.random.default_rng(group.rank).standard_normal(like.shape).astype("f4")
        return mine, mp.GradientSync(group, like, reproducible=reproducible)(mine, weight=3)

    results = world(5).run(program).results
    wanted = mean([mine for mine, _ in results], [3] * 5)
    assert all(same_bits(found, wanted) == reproducible for _, found in results)
    np.testing.assert_allclose(results[0][1], wanted, atol=1e-5)


@pytest.mark.parametrize("nth", range(4))
def test_a_rank_that_dies_in_a_step_is_named_and_nothing_is_half_applied(world, nth):
    like = {name: np.zeros(4) for name in "abcd"}
    kept = [{name: np.full(4, rank + 1.0) for name in like} for rank in range(3)]

    def program(group):
        mine = kept[group.rank]
        sync = mp.GradientSync(group, like, first_bucket_bytes=32, bucket_bytes=32)
        with sync.step() as s:
            for name in reversed(mine):
                s.ready(name, mine[name])
        group.barrier()
        return "the end"

    run = world(3).run(program, faults=Kill(rank=1, operation="all_reduce", nth=nth), check=False)
    for rank in (0, 2):
        assert isinstance(run.errors[rank], PeerLostError)
        assert "rank 1 was lost" in str(run.errors[rank])
        assert all(value.tolist() == [rank + 1.0] * 4 for value in kept[rank].values())


def test_the_order_of_messages_changes_nothing(world):
    def program(group):
        sync = mp.GradientSync(group, PARAMETERS, first_bucket_bytes=8, bucket_bytes=50)
        for step in range(3):
            mine = gradients_of(group.rank, step)
            with sync.step(weight=group.rank + 1) as s:
                for name in sorted(mine, key=lambda name: (ord(name) * (group.rank + 3)) % 7):
                    s.ready(name, mine[name])
                    group.compute(0.001 * group.rank)
        return mine

    world(3).explore(program, alike=True, seeds=range(10))


def test_whatever_fails_a_step_is_done_wholly_or_not_at_all(world):
    like = {name: np.zeros(6) for name in "abcd"}
    kept = {}

    def program(group):
        sync = mp.GradientSync(group, like, first_bucket_bytes=1, bucket_bytes=1)
        for step in range(3):
            mine = kept[group.rank] = {name: np.full(6, 10.0 * step + group.rank) for name in like}
            with sync.step() as s:
                for name, gradient in mine.items():
                    s.ready(name, gradient)
                    group.compute(0.05)

    def check(run):
        for rank, mine in kept.items():
            (value,) = {number for gradient in mine.values() for number in gradient.tolist()}
            assert value % 10 in (rank, 1)
        kept.clear()

    faults = functools.partial(random_faults, world_size=3, kinds=("kill", "pause", "drop"))
    world(3).explore(program, faults=faults, expected=CommError, check=check, seeds=range(20))


def test_other_trees_and_options_are_refused_on_all_ranks_with_what_differs(world):
    def program(group):
        like = {"w": np.zeros((2, 3 + (group.rank == 2))), "same": np.zeros(1)} | ({"b": np.zeros(1)} if group.rank else {})
        with pytest.raises(UsageError) as told:
            mp.GradientSync(group, like, bucket_bytes=100 + group.rank // 2)
        with pytest.raises(UsageError) as again:
            mp.broadcast(like, group, root=1)
        assert mp.GradientSync(group, np.zeros(1))(np.ones(1)).tolist() == [1.0]  # the group goes on
        return str(told.value), str(again.value)

    def swapped(group):
        import collections

        with pytest.raises(UsageError, match=r"number 0 in the order: x on rank 0; y on rank 1"):
            mp.broadcast(collections.OrderedDict((name, 1.0) for name in ("xy", "yx")[group.rank]), group)

    told = world(3).run(program).results
    assert told[0] == told[1] == told[2]
    assert "w: float64[2, 3] on ranks 0, 1; float64[2, 4] on rank 2" in told[0][0]
    assert "b: missing on rank 0; float64[1] on ranks 1, 2" in told[0][0]
    assert "(bucket_bytes): 100 on ranks 0, 1; 101 on rank 2" in told[0][0]
    assert "same" not in told[0][0].replace("the same", "")
    assert "w: float64[2, 3] on ranks 0, 1" in told[0][1]
    world(2).run(swapped)


def test_a_broadcast_writes_where_it_can_and_joins_what_is_small(world, library):
    def program(group):
        mine = group.rank + 1
        frozen = np.full(2, mine)
        frozen.flags.writeable = False
        tree = {
            "weights": library.give([np.full((2, 3), mine, "f4"), np.full(5, mine, "f4"), np.full(600_000, mine, "f8")]),
            "frozen": frozen,
            "step": 10 * mine,
            "rate": 0.5 * mine,
            "scalar": np.float32(mine),
            "strided": library.give(np.full((4, 4), mine, "f4")).T[::2],
        }
        found = mp.broadcast(tree, group, root=1)
        assert found["weights"][0] is tree["weights"][0]
        assert found["strided"] is tree["strided"]
        assert frozen.tolist() == [mine, mine]
        assert type(found["step"]) is int
        assert all((leaf == 2).all() for leaf in [*found["weights"], found["frozen"], found["strided"]])
        return found["step"], found["rate"], found["scalar"], found["scalar"].dtype

    run = world(3).run(program)
    assert run.results == [(20, 1.0, 2.0, np.dtype("f4"))] * 3
    pieces = 5 if library.name == "cupy" else 1  # of the large one, which goes through the host there
    assert run.trace.count("broadcast") == 3 + pieces  # float32, int64, float64


@pytest.mark.peers
@pytest.mark.parametrize("first", ["torch", "numpy"])
def test_a_broadcast_takes_arrays_of_several_libraries(world, first):
    import torch

    def program(group):
        tree = {"torch": torch.full((3,), float(group.rank)), "numpy": np.full(2, group.rank, "f4")}
        found = mp.broadcast({first: tree[first], **tree}, group, root=1)
        assert found["torch"] is tree["torch"]
        assert found["numpy"] is tree["numpy"]
        return {name: array.tolist() for name, array in tree.items()}

    assert world(3).run(program).results == [{"torch": [1.0] * 3, "numpy": [1.0] * 2}] * 3


def test_wrong_use_is_refused_and_says_what_to_do(world):
    def program(group):
        sync = mp.GradientSync(group, {"w": np.zeros(3), "b": np.zeros(1)})
        step = sync.step()
        for weight in (-1, np.nan, np.inf, "two", None):
            with pytest.raises(UsageError, match="finite number that is not negative"):
                sync.step(weight)
        with pytest.raises(UsageError, match="inside of the block"):
            step.ready("w", np.ones(3))
        read_only = np.ones(1)
        read_only.flags.writeable = False
        mine = np.full(3, 1.0 + group.rank)
        with step:
            for name, gradient, error, said in [
                ("v", np.ones(3), UsageError, "no gradient 'v' here; the names are those of the leaves of like=: b, w"),
                ("w", np.ones(2), SizeMismatchError, r"shape \(2,\); expected \(3,\)"),
                ("w", np.ones(3, "f4"), DTypeError, "is float32; expected float64"),
                ("w", None, DTypeError, "not a NoneType"),
                ("b", read_only, LayoutError, "read-only"),
            ]:
                with pytest.raises(error, match=said):
                    step.ready(name, gradient)
            step.ready("w", mine)
            with pytest.raises(UsageError, match="ready already in this step"):
                step.ready("w", np.ones(3))
            with pytest.raises(UsageError, match="a step is open"), sync.step():
                pass
            with pytest.raises(UsageError, match="a step is open"), sync.paused():
                pass
        with pytest.raises(UsageError, match="inside of the block"):
            step.ready("b", np.ones(1))
        with pytest.raises(SizeMismatchError):
            sync({"w": np.ones(3), "b": np.ones(2)})
        return mine.tolist(), sync({"w": mine, "b": np.ones(1)})["w"].tolist()

    assert world(2).run(program).results == [([1.5] * 3, [1.5] * 3)] * 2


def test_what_cannot_hold_its_mean_is_refused_and_a_paused_step_takes_it(world):
    def program(group):
        mine = group.rank + 1.0
        read_only = np.full(3, mine)
        read_only.flags.writeable = False
        repeated = np.lib.stride_tricks.as_strided(np.array([mine]), (3,), (0,))
        sync = mp.GradientSync(group, {"w": np.zeros(3), "b": np.float64(0)})
        for name, gradient in [("w", repeated), ("b", np.float64(mine)), ("w", read_only)]:
            with sync.paused(), sync.step() as step:
                step.ready(name, gradient)
            with sync.step(weight=0) as step:
                with pytest.raises(
                    LayoutError, match=f"the mean of '{name}' is written into its gradient.*read-only.*give a copy"
                ):
                    step.ready(name, gradient)
                step.ready(name, copy := np.array(gradient))
            assert copy.tolist() == step.gradients[name].tolist()
            assert np.ravel(copy).tolist() == [1.5] * copy.size
            assert np.ravel(gradient).tolist() == [mine] * copy.size
        return sync({"w": repeated, "b": np.float64(mine)})["w"].tolist()

    assert world(2).run(program).results == [[1.5] * 3] * 2


def test_trees_and_options_that_cannot_be_are_refused(world):
    def program(group):
        for like, options, error, said in [
            (np.zeros(3, int), {}, DTypeError, "the leaf '' is int64"),
            ({"w": "x"}, {}, DTypeError, "an array of NumPy"),
            (np.zeros(3), {"bucket_bytes": 0}, UsageError, "positive number of bytes"),
            (np.zeros(3), {"first_bucket_bytes": 1.5}, UsageError, "positive number of bytes"),
            (np.zeros(3), {"compress": "bfloat16"}, UsageError, r"such as Cast\('bfloat16'\)"),
            (np.zeros(3), {"reduce_dtype": "int32"}, DTypeError, "dtype of floats"),
            (np.zeros(3), {"reduce_dtype": "float12"}, DTypeError, "no dtype 'float12'"),
        ]:
            with pytest.raises(error, match=said):
                mp.GradientSync(group, like, **options)

    world(2).run(program)


def test_a_step_that_is_left_by_an_error_ends_the_sync_and_the_others_learn_it(world):
    kept = {}

    def program(group):
        sync = mp.GradientSync(group, {"a": np.zeros(2), "b": np.zeros(2)}, first_bucket_bytes=1)
        mine = kept[group.rank] = np.full(2, group.rank + 1.0)
        try:
            with sync.step() as s:
                s.ready("b", mine)
                if group.rank == 1:
                    raise KeyError("no such sample")
        except KeyError:
            with pytest.raises(UsageError, match=r"an error ended a step .KeyError: 'no such sample'.; make a new one"):
                sync(None, weight=0)
            raise

    run = world(3).run(program, check=False)
    assert isinstance(run.cause, KeyError)
    assert all(isinstance(run.errors[rank], AbortedError) for rank in (0, 2))
    assert [mine.tolist() for mine in kept.values()] == [[rank + 1.0] * 2 for rank in kept]


def test_memory_is_counted_and_old_buckets_are_given_back(world):
    def program(group):
        like = {name: np.zeros(100) for name in "abc"}
        sync = mp.GradientSync(group, like, first_bucket_bytes=800)
        for _ in range(2):
            with sync.step() as s:
                for name in "abc":
                    s.ready(name, np.ones(100))
        assert sync.state() == {}
        return dict(sync.memory.held), sync.memory.peak

    assert world(2).run(program).results == [({"gradients": 2424}, 2424)] * 2


def test_steps_of_two_syncs_in_another_order_on_one_rank_are_found_on_all(world):
    def program(group):
        first, second = (mp.GradientSync(group, {"w": np.zeros(3)}) for _ in range(2))
        gradient = {"w": np.ones(3)}
        with pytest.raises(
            UsageError, match=r"a step of sync number \d of its group, and other ranks are in a step of another one"
        ):
            (second if group.rank == 1 else first)(gradient)
        return gradient["w"].tolist()

    assert world(3).run(program).results == [[1.0] * 3] * 3


def test_a_step_without_with_is_told():
    with oa.init() as group, pytest.warns(RuntimeWarning, match="a step was made but never begun: write `with"):
        mp.GradientSync(group, {"w": np.zeros(3)}).step(weight=2)


def test_no_gradients_have_no_weight_and_what_is_no_group_is_told():
    with oa.init() as group, pytest.raises(UsageError, match="there are no gradients, so their weight must be 0, not 3"):
        mp.GradientSync(group, {"w": np.zeros(3)})(None, weight=3)
    for wrong in (None, {"w": np.zeros(3)}):
        with pytest.raises(UsageError, match=r"expected a Group, such as oa.init\(\) returns, not a"):
            mp.GradientSync(wrong, {"w": np.zeros(3)})


# Arrays that are distributed along other axes


def test_the_parts_of_distributed_arrays_are_averaged():
    whole = np.arange(6.0).reshape(2, 3)

    def program(group):
        with oa.DeviceMesh(group, (2, 2), ("dp", "tp")) as mesh:
            params = {"w": mp.distribute(whole, mesh, [mp.Replicate(), mp.Shard(1)]), "b": np.zeros(2)}
            sync = mp.GradientSync(mesh.group("dp"), like=params)
            dp = mesh.coordinates[0]
            # On the second rank of dp the part alone, and no gradient of w.
            w = params["w"].with_local(params["w"].local * 2)
            means = sync({"w": w, "b": np.ones(2)} if dp == 0 else {"b": np.zeros(2)}, weight=1)
            with sync.step() as step:
                step.ready("w", w if dp == 0 else w.local)
            assert step.gradients["w"].placements == params["w"].placements
            seen = step.gradients["w"].full().tolist(), w.full().tolist()
            for wrong in (
                mp.distribute(whole, mesh, [mp.Shard(0), mp.Shard(1)]),
                params["w"].redistribute([mp.Replicate()] * 2),
            ):
                with pytest.raises(UsageError, match="lies as that of like="):
                    sync({"w": wrong})
            with pytest.raises(UsageError, match="expected a DTensor in like= as well"):
                sync({"b": params["w"]})
            return means["w"].full().tolist(), means["b"].tolist(), seen

    assert simulated(program, 4).results == [(whole.tolist(), [0.5, 0.5], ((whole * 2).tolist(), (whole * 2).tolist()))] * 4


def test_parts_that_are_no_copies_of_each_other_are_refused_on_every_rank():
    def program(group):
        d = mp.distribute(np.ones((4, 3)), group, [mp.Shard(0)])
        with pytest.raises(UsageError, match=r"w: .*at \[0, 0\] of a DTensor.* on rank 0; .*at \[2, 0\] .* on rank 1"):
            mp.GradientSync(group, like={"w": d})
        with pytest.raises(UsageError, match=r"leaf 'w': .* is a reduction that is not finished"):
            mp.GradientSync(group, like={"w": d.redistribute([mp.Partial()])})
        return True

    assert simulated(program, 2).results == [True] * 2


def test_a_tree_that_is_nested_too_deep_is_refused_in_words(world):
    def program(group):
        tree = np.ones(2)
        for _ in range(3000):
            tree = {"a": tree}
        for call in (mp.broadcast, lambda tree, group: mp.GradientSync(group, like=tree), mp.Sharded):
            with pytest.raises(UsageError, match="nested too deep"):
                call(tree, group)

    world(2).run(program)
