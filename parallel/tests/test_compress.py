"""Compressed gradients: what travels, what comes out, and what error feedback takes back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, UsageError

LIKE = {"w": np.zeros((12, 8)), "k": np.zeros((6, 2, 5), "f4"), "b": np.zeros(5)}


def gradients_of(rank, step=0):
    rng = np.random.default_rng((rank, step))
    return {name: rng.standard_normal(leaf.shape).astype(leaf.dtype) for name, leaf in LIKE.items()}


def mean_of(world_size, step=0):
    """The mean with the weights 1, 2, ... in float64."""
    weights = np.arange(1, world_size + 1)
    ranks = [gradients_of(rank, step) for rank in range(world_size)]
    return {
        name: sum(w * each[name].astype("f8") for w, each in zip(weights, ranks, strict=True)) / weights.sum() for name in LIKE
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("float32", 1e-6)])
def test_a_cast_gives_the_mean_within_the_precision_of_its_dtype(world, dtype, tolerance, library):
    def program(group):
        like, compress = library.give(LIKE), mp.compress.Cast(dtype)
        sync = mp.GradientSync(group, like, compress=compress, bucket_bytes=300, first_bucket_bytes=300)
        for step in range(2):
            found = sync(library.give(gradients_of(group.rank, step)), weight=group.rank + 1)
        return library.take(found)

    for found in world(3).run(program).results:
        for name, wanted in mean_of(3, 1).items():
            assert found[name].dtype == LIKE[name].dtype
            assert np.abs(found[name] - wanted).max() <= tolerance * 3


def test_a_cast_halves_what_travels_and_does_not_overflow_by_weights(world):
    def program(group, compress):
        sync = mp.GradientSync(group, np.zeros(2000, "f4"), compress=compress)
        return sync(np.full(2000, 1000.0, "f4"), weight=5000)[0]

    plain, cast = world(2).run(program, None), world(2).run(program, mp.compress.Cast("float16"))
    assert plain.results == cast.results == [1000.0] * 2
    assert cast.trace.bytes_sent(0) < 0.51 * plain.trace.bytes_sent(0)


@pytest.mark.parametrize("rank", [1, 2])
def test_with_error_feedback_what_comes_out_of_powersgd_is_what_goes_in(world, rank, library):
    def program(group, compress, steps):
        sync = mp.GradientSync(group, library.give(LIKE), compress=compress)
        total = {name: np.zeros(leaf.shape) for name, leaf in LIKE.items()}
        for step in range(steps):
            found = sync(library.give(gradients_of(group.rank, step % 2)), weight=group.rank + 1)
            for name, value in library.take(found).items():
                total[name] += value
        return total, library.take(sync.state()["errors"])

    compress = mp.compress.PowerSGD(rank, min_compression_rate=0)
    sizes = []
    for steps in (20, 40):
        results = world(3).run(program, compress, steps).results
        for name in LIKE:
            # What all ranks still keep is what has not come out, and it does not grow.
            left = sum(errors.get(name, np.zeros(())).astype("f8") for _, errors in results)
            wanted = steps / 2 * (mean_of(3)[name] + mean_of(3, 1)[name])
            assert np.abs(results[0][0][name] + left - wanted).max() < 1e-4
            assert all(np.array_equal(total[name], results[0][0][name]) for total, _ in results)
            sizes.append(np.linalg.norm(left))
    assert all(late < 1.5 * early for early, late in zip(sizes[:2], sizes[3:5], strict=True))


def test_with_error_feedback_a_cast_loses_nothing_for_good(world):
    def program(group, error_feedback):
        sync = mp.GradientSync(group, np.zeros(50), compress=mp.compress.Cast("bfloat16", error_feedback))
        mine = np.random.default_rng(0).uniform(1, 2, 50) * group.rank  # so that sums are exact
        return mine, sum(sync(mine) for _ in range(50)) / 50

    def error(error_feedback):
        (_, found), (mine, _) = world(2).run(program, error_feedback).results
        return np.abs(found - mine / 2).max()

    assert error(True) < 2e-4
    assert error(False) > 1e-3


@pytest.mark.parametrize("world_size", [1, 3])
def test_powersgd_of_full_rank_is_the_mean(world, world_size, library):
    def program(group):
        found = []
        for n, m in itertools.product((1, 2, 3, 6), repeat=2):
            compress = mp.compress.PowerSGD(6, min_compression_rate=0, seed=n)  # the rank is bounded by the shape
            mine = library.give(np.random.default_rng((n, m, group.rank)).standard_normal((n, m)))
            sync = mp.GradientSync(group, mine, compress=compress)
            found.append((mine.copy(), sync(mine.copy()), sync(mine.copy())))
        return library.take(found)

    for shape in zip(*world(world_size).run(program).results, strict=True):
        wanted = np.mean([mine for mine, *_ in shape], axis=0)
        for _, *means in shape:
            for each in means:
                np.testing.assert_allclose(each, wanted, atol=1e-10)


def test_powersgd_finds_the_best_product_of_a_gradient_that_stays(world):
    def program(group):
        sync = mp.GradientSync(
            group, np.zeros((12, 8)), compress=mp.compress.PowerSGD(2, error_feedback=False, min_compression_rate=0)
        )
        for _ in range(100):
            found = sync(gradients_of(group.rank)["w"])
        return found

    u, s, vt = np.linalg.svd((gradients_of(0)["w"] + gradients_of(1)["w"]) / 2)
    for found in world(2).run(program).results:
        np.testing.assert_allclose(found, u[:, :2] * s[:2] @ vt[:2], atol=1e-6)


def test_powersgd_sends_little_and_only_of_matrices_that_are_worth_it_and_begins_late_if_told(world):
    like = {"big": np.zeros((100, 100)), "thin": np.zeros((2, 3)), "flat": np.zeros(50)}

    def program(group, start_step):
        sync = mp.GradientSync(group, like, compress=mp.compress.PowerSGD(rank=1, start_step=start_step))
        for step in range(2):
            group.mark(f"step {step}")
            rng = np.random.default_rng(group.rank)
            found = sync({name: rng.standard_normal(leaf.shape) for name, leaf in like.items()})
        return found

    trace = world(2).run(program, 0).trace
    assert [call.nbytes // 8 for call in trace.calls_of(0, "all_reduce")] == [3, 100 + 6 + 50 + 3, 100] * 2
    trace = world(2).run(program, 1).trace
    assert [call.nbytes // 8 for call in trace.calls_of(0, "all_reduce")] == [3, 10_059, 3, 159, 100]


@pytest.mark.parametrize(
    "compress", [mp.compress.Cast("float16", error_feedback=True), mp.compress.PowerSGD(min_compression_rate=0)]
)
def test_unused_and_weightless_gradients_keep_their_errors(world, compress):
    def program(group, compress):
        sync = mp.GradientSync(group, LIKE, compress=compress)
        first = sync(gradients_of(group.rank))["w"]
        before = {name: error.copy() for name, error in sync.state()["errors"].items()}
        mine = gradients_of(group.rank)
        found = sync(mine | {"k": None}) if group.rank == 0 else sync(mine, weight=0)
        assert found["k"] is None
        after = sync.state()["errors"]
        return {name: np.array_equal(before[name], after[name]) for name in after}, found, first, after["w"].copy()

    (kept, found, first, left), (kept_too, same, _, left_too) = world(2).run(program, compress).results
    assert kept["k"]
    assert not kept["w"]
    assert all(kept_too.values())
    assert np.array_equal(found["w"], same["w"])
    # What came out and what is kept is what went in.
    went_in = (gradients_of(0)["w"] + gradients_of(1)["w"]) / 2 + gradients_of(0)["w"]
    np.testing.assert_allclose(first + found["w"] + left + left_too, went_in, atol=2e-3)


def test_one_gradient_that_is_not_finite_spoils_no_later_step(world):
    for compress in (mp.compress.Cast("float16", error_feedback=True), mp.compress.PowerSGD(rank=8, min_compression_rate=0)):

        def program(group, compress):
            sync = mp.GradientSync(group, np.zeros((8, 8)), compress=compress)
            assert not np.isfinite(sync(np.full((8, 8), np.inf))).all()
            return sync(np.eye(8))

        for found in world(2).run(program, compress).results:
            np.testing.assert_allclose(found, np.eye(8), atol=1e-9)


def test_the_state_goes_on_where_it_was_and_what_is_foreign_is_refused(world, library):
    def program(group, compress):
        like = library.give(LIKE)
        one, other = (mp.GradientSync(group, like, compress=compress, first_bucket_bytes=size) for size in (1, 10_000))
        one(library.give(gradients_of(group.rank, 0)))
        other.load_state(one.state())
        for step in (1, 2):
            here, there = (sync(library.give(gradients_of(group.rank, step))) for sync in (one, other))
            assert all((here[name] == there[name]).all() for name in LIKE)
        # Also from the memory of another library.
        other.load_state(library.take(one.state()))
        plain = mp.GradientSync(group, LIKE, compress=compress)
        plain.load_state(one.state())
        other(like)
        here, again = one(library.give(gradients_of(group.rank, 3))), plain(gradients_of(group.rank, 3))
        for name in LIKE:
            np.testing.assert_allclose(library.take(here)[name], again[name], rtol=1e-6, atol=1e-6)
        with pytest.raises(UsageError, match=r"is of 'no', and there is no such"):
            one.load_state({**one.state(), "errors": {"no": np.zeros(3)}})
        with pytest.raises(UsageError, match=r"shape \(3,\) for 'b'; expected \(5,\)"):
            one.load_state({**one.state(), "errors": {"b": np.zeros(3)}})
        with pytest.raises(UsageError, match="this compression has"):
            one.load_state({"momentum": 1})

    for compress in (
        mp.compress.Cast("float16", error_feedback=True),
        mp.compress.PowerSGD(min_compression_rate=0, start_step=1),
    ):
        world(2).run(program, compress)


def test_impossible_compressions_are_refused():
    for make in (
        lambda: mp.compress.PowerSGD(0),
        lambda: mp.compress.PowerSGD(start_step=-1),
        lambda: mp.compress.Cast("int8"),
    ):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(DTypeError, match="no dtype 'float13'"):
        mp.compress.Cast("float13")


def test_a_compression_that_differs_is_found(world):
    def program(group):
        with pytest.raises(UsageError, match=r"\(compress\): PowerSGD\(rank=1, .* on rank 0; PowerSGD\(rank=2"):
            mp.GradientSync(group, LIKE, compress=mp.compress.PowerSGD(1 + group.rank))

    world(2).run(program)
