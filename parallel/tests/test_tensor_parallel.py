"""Layers whose weights are divided among ranks: forward and backward equal those of one process."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import CollectiveMismatchError, DTypeError, SizeMismatchError, UsageError
from oneaccord_simulated import run

WORLDS = [1, 3, 5]
TOKENS, BATCH, K, HIDDEN, N = 6, 2, 3, 7, 4
HIDDEN_COUNTS = {1: [7], 2: [2, 5], 3: [3, 0, 4], 4: [1, 2, 2, 2], 5: [0, 1, 3, 1, 2]}
TOKEN_COUNTS = {1: [6], 2: [5, 1], 3: [2, 0, 4], 4: [1, 2, 2, 1], 5: [0, 1, 3, 1, 1]}


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64)


def network(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, s).astype(float) for s in [(TOKENS, BATCH, K), (K, HIDDEN), HIDDEN, (HIDDEN, N), N]]


def one_process(x, w1, b1, w2, b2, dy):
    """Return the result of two linear layers with a square between them, and its gradients."""
    before = x @ w1 + b1
    y = before**2 @ w2 + b2
    dhidden = dy @ w2.T * 2 * before
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    return y, [
        dhidden @ w1.T,
        flat(x).T @ flat(dhidden),
        flat(dhidden).sum(0),
        flat(before**2).T @ flat(dy),
        flat(dy).sum(0),
    ]


def two_layers(group, x, w1, b1, w2, b2, dy, counts=None, sequence=False, tokens=None, whole_between=False):
    """Do as `one_process`, divided; return whole arrays."""
    w1, b1 = mp.shard_of(w1, group, 1, counts), mp.shard_of(b1, group, 0, counts)
    w2 = mp.shard_of(w2, group, 0, counts)
    options = {"sequence_axis": 0, "sequence_counts": tokens} if sequence else {}
    if sequence:
        x, dy = mp.shard_of(x, group, 0, tokens), mp.shard_of(dy, group, 0, tokens)
    before, first = mp.column_linear(x, w1, b1, group, whole_between, counts=counts if whole_between else None, **options)
    y, second = mp.row_linear(before**2, w2, b2, group, not whole_between, **options)
    dsquare, dw2, db2 = second(dy)
    dx, dw1, db1 = first(dsquare * 2 * before)
    if sequence:
        y, dx = (mp.gather_from(each, group, 0, tokens)[0] for each in (y, dx))
    joined = [mp.gather_from(each, group, axis)[0] for each, axis in [(dw1, 1), (db1, 0), (dw2, 0)]]
    return y, [dx, *joined, db2]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("way", ["plain", "sequence", "whole_between"])
@pytest.mark.parametrize("world", WORLDS)
def test_layers_of_integers_equal_one_process(world, way, uneven, library):
    given = [*network(), integers(TOKENS, BATCH, N, seed=1)]
    y, gradients = one_process(*given)
    options = {} if way == "plain" else {way: True}
    if uneven:
        options["counts"] = HIDDEN_COUNTS[world]
        options["tokens"] = TOKEN_COUNTS[world]

    def program(group):
        return library.take(two_layers(group, *library.give(given), **options))

    for found, found_gradients in run(program, world).results:
        assert np.array_equal(found, y)
        for mine, right in zip(found_gradients, gradients, strict=True):
            assert np.array_equal(mine, right)


@pytest.mark.parametrize("world", [3, 5])
def test_layers_of_floats_equal_one_process_within_the_bound_of_their_sums(world):
    rng = np.random.default_rng(3)
    x, w1, b1, w2, b2 = (rng.standard_normal(a.shape) for a in network())
    dy = rng.standard_normal((TOKENS, BATCH, N))
    y, _ = one_process(x, w1, b1, w2, b2, dy)
    # A sum of n rounded products is off by at most n u sum|terms| (Higham, Accuracy and Stability, 3.1), in any order; twice for two sums.
    u = 2.0**-53
    hidden = np.abs(x) @ np.abs(w1) + np.abs(b1)
    bound = 2 * (2 * (K + 1) + HIDDEN + 3) * u * (hidden**2 @ np.abs(w2) + np.abs(b2))
    for found, _ in run(lambda group: two_layers(group, x, w1, b1, w2, b2, dy), world).results:
        assert (np.abs(found - y) <= bound).all()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_finite_differences(world, sequence):
    rng = np.random.default_rng(5)
    given = [rng.standard_normal(a.shape) for a in network()]
    direction = [rng.standard_normal(a.shape) for a in given]
    dy = rng.standard_normal((TOKENS, BATCH, N))
    h = 1e-5

    def program(group):
        _, gradients = two_layers(group, *given, dy, sequence=sequence)
        ahead, _ = two_layers(group, *(a + h * d for a, d in zip(given, direction, strict=True)), dy, sequence=sequence)
        behind, _ = two_layers(group, *(a - h * d for a, d in zip(given, direction, strict=True)), dy, sequence=sequence)
        return sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)), ((ahead - behind) * dy).sum() / (2 * h)

    for exact, measured in run(program, world).results:
        assert measured == pytest.approx(exact, rel=1e-8)


def test_a_part_of_a_weight_does_not_keep_the_weight():
    assert run(lambda group: mp.shard_of(np.ones(4), group).base is None, 2).results == [True, True]


def test_each_pair_is_the_transpose_of_the_other(library):
    """The values of each of the operations and of its vjp, on two ranks."""

    def program(group):
        mine, whole, counts = np.full((1, 1 + group.rank), 1.0 + group.rank), np.array([[4.0, 5.0, 6.0]]), [1, 2]
        calls = {
            "copy_to": (whole + group.rank, whole + group.rank, {}),
            "reduce_from": (whole + group.rank, whole, {}),
            "gather_from": (mine, whole, {"axis": 1}),
            "scatter_to": (whole, mine, {"axis": 1, "counts": counts}),
            "gather_sequence": (mine, whole + group.rank, {"axis": 1}),
            "reduce_scatter_sequence": (whole + group.rank, mine, {"axis": 1, "counts": counts}),
        }
        found = {}
        for name, (x, dy, options) in calls.items():
            y, vjp = getattr(mp, name)(library.give(x), group, **options)
            found[name] = y.tolist()[0], vjp(library.give(dy)).tolist()[0]
        return found

    first, second = run(program, 2).results
    whole, added, joined = [4, 5, 6], [9, 11, 13], [1, 2, 2]
    assert first["copy_to"] == (whole, added)
    assert second["copy_to"] == ([5, 6, 7], added)
    assert first["reduce_from"] == second["reduce_from"] == (added, whole)
    assert (first["gather_from"], second["gather_from"]) == ((joined, [4]), (joined, [5, 6]))
    assert (first["scatter_to"], second["scatter_to"]) == (([4], joined), ([5, 6], joined))
    assert (first["gather_sequence"], second["gather_sequence"]) == ((joined, [9]), (joined, [11, 13]))
    assert (first["reduce_scatter_sequence"], second["reduce_scatter_sequence"]) == (([9], joined), ([11, 13], joined))


@pytest.mark.parametrize("sequence_axis", [None, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_an_embedding_equals_one_process(world, sequence_axis, library):
    ids = np.array([[0, 6, 2, 2], [5, 2, 1, 0]], np.uint8)
    table, dy = integers(7, 3), integers(2, 4, 3, seed=1)
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, dy)

    def program(group):
        rows = mp.shard_of(library.give(table), group, 0, HIDDEN_COUNTS[world])
        y, vjp = mp.vocab_parallel_embedding(library.give(ids), rows, group, sequence_axis=sequence_axis)
        mine = library.give(dy if sequence_axis is None else mp.shard_of(dy, group, 1))
        if sequence_axis is not None:
            y = mp.gather_from(y, group, 1)[0]
        return library.take((y, mp.gather_from(vjp(mine), group, 0)[0]))

    for y, found in run(program, world).results:
        assert np.array_equal(y, table[ids])
        assert np.array_equal(found, gradient)


def cross_entropy(z, targets, ignore_index=-100):
    counted = targets != ignore_index
    shifted = z - z.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1)
    safe = np.where(counted, targets, 0)
    losses = np.log(total) - np.take_along_axis(shifted, safe[..., None], -1)[..., 0]
    gradient = np.exp(shifted) / total[..., None] - np.eye(z.shape[-1])[safe]
    return np.where(counted, losses, 0), gradient * counted[..., None], counted.sum()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_cross_entropy_equals_one_process_also_of_large_logits(world, reduction, library):
    rng = np.random.default_rng(world)
    z = rng.standard_normal((2, 5, 7)) * np.array([1, 10, 1e3, 1e4, 1])[:, None] + 1e5
    targets = np.array([[0, 6, -100, 3, 2], [-100, 1, 5, 6, 0]])
    losses, gradient, number = cross_entropy(z, targets)
    dloss = rng.standard_normal(targets.shape) if reduction == "none" else 3.0
    right = {"mean": losses.sum() / number, "sum": losses.sum(), "none": losses}[reduction]
    scale = {"mean": 3.0 / number, "sum": 3.0, "none": np.asarray(dloss)[..., None]}[reduction]

    def program(group):
        mine = mp.shard_of(library.give(z), group, -1, HIDDEN_COUNTS[world])
        loss, vjp = mp.vocab_parallel_cross_entropy(mine, library.give(targets), group, reduction=reduction)
        return library.take((loss, mp.gather_from(vjp(library.give(dloss)), group)[0]))

    done = run(program, world)
    for loss, found in done.results:
        assert np.array_equal(loss, done.results[0][0])
        np.testing.assert_allclose(loss, right, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(found, gradient * scale, rtol=1e-12, atol=1e-14)


def test_the_gradient_of_a_cross_entropy_is_that_of_finite_differences():
    rng = np.random.default_rng(7)
    z, direction, targets, h = rng.standard_normal((4, 7)), rng.standard_normal((4, 7)), np.array([0, 3, 9, 6]), 1e-5

    def program(group):
        def loss(array):
            return mp.vocab_parallel_cross_entropy(mp.shard_of(array, group, 1), targets, group, ignore_index=9)

        gradient = mp.gather_from(loss(z)[1](), group)[0]
        return (gradient * direction).sum(), (loss(z + h * direction)[0] - loss(z - h * direction)[0]) / (2 * h)

    for exact, measured in run(program, 3).results:
        assert measured == pytest.approx(exact, rel=1e-8)


def test_infinite_logits_are_as_in_one_process_and_warn_of_nothing():
    """A class that is masked has no part in it, and what does not count may be anything."""
    inf = np.inf
    z = np.array([[1, -inf, 2, 0], [-inf, -inf, 3, -inf], [-inf] * 4, [inf, 0, 0, 1], [np.nan, 0, 0, 0]])
    targets = np.array([2, 2, -1, -1, -1])

    def program(group):
        loss, vjp = mp.vocab_parallel_cross_entropy(mp.shard_of(z, group, 1), targets, group, ignore_index=-1)
        wrong, _ = mp.vocab_parallel_cross_entropy(
            mp.shard_of(z, group, 1), np.array([1, 2, -1, -1, -1]), group, ignore_index=-1
        )
        return loss, mp.gather_from(vjp(), group)[0], wrong

    total = np.e + np.e**2 + 1
    for loss, gradient, wrong in run(program, 3).results:
        assert loss == pytest.approx((np.log(total) - 2) / 2)
        assert wrong == inf
        right = [[np.e / total / 2, 0, (np.e**2 / total - 1) / 2, 1 / total / 2], *[[0] * 4] * 4]
        np.testing.assert_allclose(gradient, right, rtol=1e-14)


def test_targets_that_are_all_ignored_have_no_loss_and_no_gradient(library):
    def program(group):
        logits, targets = library.give([np.full((3, 2), np.nan, np.float16), np.full(3, -100)])
        loss, vjp = mp.vocab_parallel_cross_entropy(logits, targets, group)
        return loss, vjp()

    for loss, gradient in run(program, 2).results:
        assert (loss, loss.dtype, gradient.dtype, gradient.tolist()) == (0, np.float32, np.float16, [[0, 0]] * 3)


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        (lambda g: mp.column_linear(np.ones((2, 3)), np.ones((4, 3)), None, g), SizeMismatchError, r"give weight\.T"),
        (lambda g: mp.row_linear(np.ones(3), np.ones((3, 4)), np.ones(3), g), SizeMismatchError, r"\(3, 4\) and \(3,\)"),
        (lambda g: mp.column_linear(np.ones(3), np.ones((3, 4)), None, g, sequence_axis=0), UsageError, "before the last"),
        (lambda g: mp.scatter_to(np.ones(3), g, counts=[1, 1]), SizeMismatchError, "rows of 2 ranks, with the sum 3"),
        (lambda g: mp.shard_of(np.ones(3), g, counts=[1.5, 1.5]), SizeMismatchError, "an integer of at least 0"),
        (lambda g: mp.shard_of(np.ones(3), g, counts=3), SizeMismatchError, "each of the 2 ranks, not 3"),
        (lambda g: mp.gather_from(np.ones(3), g, counts=[3]), SizeMismatchError, "each of the 2 ranks"),
        (lambda g: mp.shard_of(np.ones(3), g, 0.0), UsageError, r"no axis 0\.0"),
        (lambda g: mp.column_linear(np.ones((2, 2)), np.ones((2, 2)), None, None), UsageError, "expected a Group"),
        (lambda g: mp.copy_to(np.ones(2), None), UsageError, "expected a Group"),
        (lambda g: mp.gather_from(np.ones(3), g, counts=[1, 1]), SizeMismatchError, "of which rank 0 has 3"),
        (lambda g: mp.gather_from(np.ones(3), g, axis=1), UsageError, "no axis 1"),
        (lambda g: mp.vocab_parallel_embedding(np.array([4]), np.ones((2, 3)), g), UsageError, "4 is not the number"),
        (lambda g: mp.vocab_parallel_embedding(np.ones(2), np.ones((2, 3)), g), DTypeError, "float64"),
        (lambda g: mp.vocab_parallel_cross_entropy(np.ones((1, 2)), np.array([-1]), g), UsageError, "-1 is not"),
        (lambda g: mp.vocab_parallel_cross_entropy(np.ones((1, 2)), [1], g), DTypeError, "not list"),
        (lambda g: mp.vocab_parallel_cross_entropy(np.ones((1, 2)), np.array([1, 1]), g), SizeMismatchError, r"\(2,\)"),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(program, error, said):
    done = run(program, 2, check=False)
    assert [type(done.errors[rank]) for rank in range(2)] == [error] * 2
    assert done.cause is not None
    with pytest.raises(error, match=said):
        raise done.cause


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["gather_from", "gather_sequence", "reduce_scatter_sequence"])
def test_arrays_of_one_size_and_different_shapes_are_found_on_every_rank(name, axis):
    """Their elements would fit, and be mixed up."""

    def program(group):
        shape = [(4, 6, 2), (4, 4, 3)][group.rank] if axis == 0 else [(4, 6, 2), (2, 6, 4)][group.rank]
        getattr(mp, name)(np.ones(shape), group, axis)

    done = run(program, 2, check=False)
    assert [type(done.errors[rank]) for rank in range(2)] == [CollectiveMismatchError] * 2


ALL = {
    "copy_to": lambda g: mp.copy_to(np.ones((4, 2)), g),
    "reduce_from": lambda g: mp.reduce_from(np.ones((4, 2)), g),
    "gather_from": lambda g: mp.gather_from(np.ones((4, 1)), g),
    "scatter_to": lambda g: mp.scatter_to(np.ones((4, 4)), g),
    "gather_sequence": lambda g: mp.gather_sequence(np.ones((2, 2)), g),
    "reduce_scatter_sequence": lambda g: mp.reduce_scatter_sequence(np.ones((8, 2)), g),
    "column_linear": lambda g: mp.column_linear(np.ones((4, 3)), np.ones((3, 2)), None, g),
    "row_linear": lambda g: mp.row_linear(np.ones((4, 3)), np.ones((3, 2)), np.ones(2), g),
    "vocab_parallel_embedding": lambda g: mp.vocab_parallel_embedding(np.zeros(4, int), np.ones((3, 2)), g),
    "cross_entropy": lambda g: mp.vocab_parallel_cross_entropy(np.ones((4, 2, 3)), np.zeros((4, 2), int), g, reduction="none"),
}


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_of_another_shape_is_refused(name):
    """Several of these shapes would have passed as gradients of something else."""

    def program(group):
        y, vjp = ALL[name](group)
        for wrong in ((2, 4), (3, 2), (5, 2), (2,), ()):
            with pytest.raises(SizeMismatchError, match=r"the result has shape \(4, 2\)"):
                vjp(np.ones(wrong))
        vjp(np.ones_like(y))

    run(program, 2)


def test_gradients_of_small_integers_keep_their_dtype(library):
    def program(group):
        given = library.give([np.ones(shape, np.int8) for shape in [(2, 3), (3, 4), (4,)]])
        y, vjp = mp.row_linear(*given, group)
        return {each.dtype.name for each in (y, *vjp(y))}

    assert run(program, 2).results == [{"int8"}] * 2


@pytest.mark.parametrize(
    "look_up",
    [
        lambda ids, group: mp.vocab_parallel_embedding(ids, np.ones((2, 3)), group),
        lambda ids, group: mp.vocab_parallel_cross_entropy(np.ones((2, 2)), ids, group),
    ],
)
def test_ranks_that_got_other_batches_are_told_so(look_up):
    """Which is what happens if a loader of data is seeded by the rank."""

    def program(group):
        with pytest.raises(UsageError, match=r"need the same batch: .* on ranks \[1\] are not those on rank 0"):
            look_up(np.array([[0, 3], [3, 3]][group.rank]), group)
        y, _ = mp.vocab_parallel_embedding(np.zeros((0, 2), [np.uint8, np.int64][group.rank]), np.ones((2, 3)), group)
        return y.shape

    assert run(program, 2).results == [(0, 2, 3)] * 2
