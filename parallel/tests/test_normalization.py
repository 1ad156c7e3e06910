"""Batch normalisation over all ranks is that of one process with the batches of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.worlds import thread_world

import oneaccord_parallel as mp
from oneaccord.errors import CollectiveMismatchError, DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.trees import named
from oneaccord_simulated import explore, run

ROWS = [3, 0, 5, 1]
# The axis of the channels, the axis of the rows, and the shape of a batch without it.
LAYOUTS = [(1, 0, (3,)), (1, 0, (3, 2, 2)), (-1, 1, (2, 3)), (0, 1, (3, 2)), ((1, -1), 0, (3, 2, 2))]


def batches_of(rows, along, extents, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(2, 3, (*extents[:along], count, *extents[along:])) for count in rows]


def others_of(x, axis):
    channels = {number % x.ndim for number in np.atleast_1d(axis)}
    return tuple(number for number in range(x.ndim) if number not in channels)


def normalised(x, gamma, beta, axis, eps=1e-5):
    """Batch normalisation on one process, by its definition."""
    others = others_of(x, axis)
    mean, var = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * gamma.reshape(mean.shape) + beta.reshape(mean.shape)


def parameters_of(x, axis, seed=1):
    shape = [extent for number, extent in enumerate(x.shape) if number not in others_of(x, axis)]
    return np.random.default_rng(seed).normal(1, 0.5, (2, *shape))


def slopes(function, x, step=1e-6):
    """Return the gradient of a function by central differences."""
    found = np.empty_like(x)
    for index in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[index] += step
        behind[index] -= step
        found[index] = (function(ahead) - function(behind)) / (2 * step)
    return found


@pytest.mark.parametrize(("axis", "along", "extents"), LAYOUTS)
@pytest.mark.parametrize("rows", [[4], [2, 3], ROWS], ids=str)
def test_forward_is_that_of_one_process_and_so_are_the_running_statistics(rows, axis, along, extents, library):
    batches = batches_of(rows, along, extents)
    whole = np.concatenate(batches, along)
    gamma, beta = parameters_of(whole, axis)

    def program(group):
        x, *params = library.give([batches[group.rank], gamma, beta])
        stats = mp.RunningStats(gamma.shape, like=x)
        y, _ = mp.batch_norm(x, *params, group, axis, running=stats)
        once = stats.mean.copy(), stats.var.copy()
        mp.batch_norm(x, *params, group, axis, running=stats)
        again, _ = mp.batch_norm(x, *params, group, axis, running=stats, training=False)
        stats.mean, stats.var, stats.count = library.take((stats.mean, stats.var, stats.count))
        return *library.take((y, once, again)), stats

    done = run(program, len(rows))
    calls = 0 if library.is_cupy and len(rows) == 1 else 2  # a rank alone sends nothing of a GPU through a backend
    assert [call.operation for call in done.trace.calls_of(0)] == ["all_gather"] * calls
    ys, once, again, stats = zip(*done.results, strict=True)
    np.testing.assert_allclose(np.concatenate(ys, along), normalised(whole, gamma, beta, axis), rtol=1e-12, atol=1e-13)
    others = others_of(whole, axis)
    mean, var = whole.mean(others), whole.var(others, ddof=1)
    for (first_mean, first_var), last in zip(once, stats, strict=True):
        np.testing.assert_allclose(first_mean, 0.1 * mean, rtol=1e-13)
        np.testing.assert_allclose(first_var, 0.9 + 0.1 * var, rtol=1e-13)
        assert (last.mean.tobytes(), last.var.tobytes(), last.count) == (stats[0].mean.tobytes(), stats[0].var.tobytes(), 2)
    np.testing.assert_allclose(stats[0].mean, 0.19 * mean, rtol=1e-13)
    wide = [number in others for number in range(whole.ndim)]
    used_mean, used_var = (np.expand_dims(part, tuple(np.flatnonzero(wide))) for part in (0.19 * mean, 0.81 + 0.19 * var))
    scale, shift = (part.reshape(used_mean.shape) for part in (gamma, beta))
    np.testing.assert_allclose(
        np.concatenate(again, along), (whole - used_mean) / np.sqrt(used_var + 1e-5) * scale + shift, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(("axis", "along", "extents"), LAYOUTS)
@pytest.mark.parametrize("weights", [[1.0] * 4, [3.0, 0.0, 5.0, 1.0]])
def test_backward_is_the_slope_of_the_weighted_sum_of_the_losses_of_all_ranks(axis, along, extents, weights, library):
    batches = batches_of(ROWS, along, extents)
    whole = np.concatenate(batches, along)
    gamma, beta = parameters_of(whole, axis)
    bounds = np.cumsum(ROWS)[:-1]
    factors = np.random.default_rng(2).normal(size=whole.shape)

    def loss(x, gamma, beta):
        parts = np.split(factors * normalised(x, gamma, beta, axis) ** 2, bounds, along)
        return sum(weight * part.sum() for weight, part in zip(weights, parts, strict=True))

    def program(group):
        x, factor, *params = library.give([batches[group.rank], np.split(factors, bounds, along)[group.rank], gamma, beta])
        y, cache = mp.batch_norm(x, *params, group, axis)
        return library.take(mp.batch_norm_backward(2 * factor * y, cache, weight=weights[group.rank]))

    done = run(program, 4)
    assert [call.operation for call in done.trace.calls_of(0)] == ["all_gather", "all_reduce"]
    dx = np.concatenate([weight * part[0] for weight, part in zip(weights, done.results, strict=True)], along)
    dgamma, dbeta = (sum(w * part[place] for w, part in zip(weights, done.results, strict=True)) for place in (1, 2))
    np.testing.assert_allclose(dx, slopes(lambda x: loss(x, gamma, beta), whole), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(dgamma, slopes(lambda g: loss(whole, g, beta), gamma), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(dbeta, slopes(lambda b: loss(whole, gamma, b), beta), rtol=1e-6, atol=1e-7)


def test_backward_without_training_sends_nothing_and_takes_the_statistics_as_constants():
    (x,) = batches_of([4], 0, (3,))
    gamma = parameters_of(x, 1)[0]
    stats = mp.RunningStats(3)
    stats.mean[...], stats.var[...] = [1, 2, 3], [4, 5, 6]

    def program(group):
        y, cache = mp.batch_norm(x, gamma, None, group, running=stats, training=False)
        return y, mp.batch_norm_backward(x, cache)

    done = run(program, 2)
    assert done.trace.calls == []
    y, (dx, dgamma, dbeta) = done.results[1]
    np.testing.assert_allclose(y, (x - stats.mean) / np.sqrt(stats.var + 1e-5) * gamma, rtol=1e-14)
    np.testing.assert_allclose(dx, x * gamma / np.sqrt(stats.var + 1e-5), rtol=1e-14)
    np.testing.assert_allclose(dgamma, (x * y / gamma).sum(0), rtol=1e-13)
    assert dbeta is None


@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"),
    [("float64", 1e6, 1e-9), ("float64", 1e12, 1e-3), ("float32", 1e6, 2e-7), ("float16", 1e3, 1e-3), ("bfloat16", 1e2, 8e-3)],
)
def test_a_large_mean_costs_no_accuracy(dtype, offset, tolerance, library):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    batches = [(batch + offset).astype(dtype) for batch in batches_of([100, 7, 40], 0, (2, 5))]
    exact = np.concatenate(batches).astype("f8") - offset

    def program(group):
        y, cache = mp.batch_norm(library.give(batches[group.rank]), None, None, group)
        return library.take((y, mp.batch_norm_backward(y * y, cache)[0]))

    ys, dxs = (np.concatenate(parts) for parts in zip(*run(program, 3).results, strict=True))
    assert ys.dtype == dxs.dtype == np.dtype(dtype)
    expected = normalised(exact, np.ones(2), np.zeros(2), 1)
    np.testing.assert_allclose(ys.astype("f8"), expected, rtol=tolerance, atol=tolerance)
    square = ys.astype("f8") ** 2
    centred = square - square.mean((0, 2), keepdims=True) - expected * (square * expected).mean((0, 2), keepdims=True)
    inverse = 1 / np.sqrt(exact.var((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(dxs.astype("f8"), centred * inverse, rtol=4 * tolerance, atol=4 * tolerance)


def test_many_numbers_of_16_bits_far_from_zero_have_an_exact_mean_and_variance():
    x = np.random.default_rng(3).normal(1000, 3, (100_000, 2)).astype("f2")
    stats = mp.RunningStats(2)
    mp.batch_norm(x, None, None, None, running=stats, momentum=1)
    np.testing.assert_allclose(stats.mean, x.mean(0, dtype="f8"), rtol=1e-12)
    np.testing.assert_allclose(stats.var, x.astype("f8").var(0, ddof=1), rtol=1e-7)


@pytest.mark.parametrize("eighths", [[[0, 1, 0, 0, 3, 1, 0]], [[0, 0], [1, 1, 1]]], ids=str)
def test_a_mean_that_float64_does_not_hold_leaves_the_variance_exact(eighths):
    def program(group):
        stats = mp.RunningStats(1)
        x = 2.0**49 + np.array(eighths[group.rank])[:, None] / 8  # neighbours in float64 differ by an eighth
        mp.batch_norm(x, None, None, group, running=stats, momentum=1)
        return stats.var.item()

    exact = np.var(np.concatenate(eighths) / 8, ddof=1)
    np.testing.assert_allclose(run(program, len(eighths)).results, exact, rtol=1e-14)


def test_a_single_element_in_all_the_world_is_an_error_on_all_ranks():
    def program(group):
        stats = mp.RunningStats(2)
        with pytest.raises(UsageError, match="a single element for each channel"):
            mp.batch_norm(np.ones((int(group.rank == 1), 2)), None, None, group, running=stats)
        return stats.count.item(), stats.mean.tolist(), group.all_reduce(1).item()

    assert run(program, 3).results == [(0, [0.0, 0.0], 3)] * 3


def test_no_element_in_all_the_world_is_nothing_to_do():
    def program(group):
        stats = mp.RunningStats(2)
        y, cache = mp.batch_norm(np.ones((0, 2)), np.ones(2), None, group, running=stats)
        dx, dgamma, _ = mp.batch_norm_backward(y, cache, weight=0)
        return y.shape, dx.shape, dgamma.tolist(), stats.count.item(), stats.var.tolist()

    assert run(program, 2).results == [((0, 2), (0, 2), [0.0, 0.0], 0, [1.0, 1.0])] * 2


def test_without_momentum_the_running_statistics_are_the_mean_of_all_batches():
    stats = mp.RunningStats(3)
    batches = batches_of([4, 4, 4], 0, (3,))
    for batch in batches:
        mp.batch_norm(batch, None, None, None, running=stats, momentum=None)
    np.testing.assert_allclose(stats.mean, np.mean([batch.mean(0) for batch in batches], 0), rtol=1e-13)
    np.testing.assert_allclose(stats.var, np.mean([batch.var(0, ddof=1) for batch in batches], 0), rtol=1e-13)


def test_running_statistics_are_a_node_of_trees():
    stats = mp.RunningStats((2, 3), like=np.zeros(1, np.float16))
    leaves = named({"layer": [stats]})
    assert list(leaves) == ["layer.0.mean", "layer.0.var", "layer.0.count"]
    assert leaves["layer.0.var"] is stats.var
    assert [leaf.dtype for leaf in leaves.values()] == ["float32", "float32", "int64"]
    assert stats.var.tolist() == [[1.0] * 3] * 2


def test_no_order_of_arrival_changes_a_bit():
    batches = batches_of(ROWS, 0, (3,))

    def program(group):
        stats = mp.RunningStats(3)
        y, cache = mp.batch_norm(batches[group.rank], np.ones(3), np.zeros(3), group, running=stats)
        dx, dgamma, dbeta = mp.batch_norm_backward(y * y, cache)
        return y, dx, dgamma, dbeta, stats.mean, stats.var

    explore(program, 4, alike=True, seeds=range(10)).raise_failure()


def test_other_numbers_of_channels_are_found_on_every_rank():
    def program(group):
        mp.batch_norm(np.ones((4, 3 if group.rank == 1 else 2)), None, None, group)

    assert {type(error) for error in thread_world(program, 3, "simulated")} == {CollectiveMismatchError}


X = np.ones((4, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"x": np.ones((4, 2), int)}, DTypeError, "but x is int64"),
        ({"axis": 2}, UsageError, r"axes of an array of shape \(4, 2\), each once, not 2"),
        ({"axis": (1, -1)}, UsageError, "each once"),
        ({"gamma": np.ones(3)}, SizeMismatchError, r"gamma must have the shape of the channels, \(2,\), but has \(3,\)"),
        ({"beta": np.ones(4), "axis": 1}, SizeMismatchError, "beta must"),
        ({"running": mp.RunningStats(4)}, SizeMismatchError, "mean must"),
        ({"training": False}, UsageError, "give running="),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        mp.batch_norm(**({"x": X, "gamma": None, "beta": None, "group": None} | arguments))


def test_a_backward_pass_that_makes_no_sense_is_refused():
    _, cache = mp.batch_norm(X, None, None, None)
    with pytest.raises(SizeMismatchError, match=r"dy must have the shape of the output, \(4, 2\), but has \(2, 4\)"):
        mp.batch_norm_backward(X.T, cache)
    with pytest.raises(DTypeError, match="dy is int64"):
        mp.batch_norm_backward(X.astype(int), cache)
    for weight in (-1, np.inf, np.nan, 0):
        with pytest.raises(UsageError, match="weight must be a positive number"):
            mp.batch_norm_backward(X, cache, weight=weight)


@pytest.mark.peers
@pytest.mark.parametrize("extents", [(3,), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_torch_on_the_concatenated_batch_computes_the_same(library, extents):
    import jax.numpy as jnp
    import torch

    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[library]
    batches = [batch.astype("f4") for batch in batches_of(ROWS, 0, extents)]
    whole = torch.from_numpy(np.concatenate(batches)).requires_grad_()
    scale, shift = parameters_of(whole.detach().numpy(), 1).astype("f4")
    theirs = (torch.nn.BatchNorm1d if len(extents) == 1 else torch.nn.BatchNorm2d)(3)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(scale))
        theirs.bias.copy_(torch.from_numpy(shift))
    factors = np.random.default_rng(2).normal(size=whole.shape).astype("f4")
    expected = theirs(whole)
    expected.backward(torch.from_numpy(factors))

    def program(group):
        x, gamma, beta = (convert(part) for part in (batches[group.rank], scale, shift))
        stats = mp.RunningStats(3, like=gamma)
        y, cache = mp.batch_norm(x, gamma, beta, group, running=stats)
        dy = convert(np.split(factors, np.cumsum(ROWS)[:-1])[group.rank])
        found = y, *mp.batch_norm_backward(dy, cache), stats.mean, stats.var, stats.count
        assert {type(part) for part in found} == {type(x)}
        return [np.asarray(part) for part in found]

    y, dx, dgamma, dbeta, mean, var, count = zip(*run(program, 4).results, strict=True)
    for ours, other in (
        (np.concatenate(y), expected.detach()),
        (np.concatenate(dx), whole.grad),
        (sum(dgamma), theirs.weight.grad),
        (sum(dbeta), theirs.bias.grad),
        (mean[1], theirs.running_mean),
        (var[1], theirs.running_var),
        (count[1], theirs.num_batches_tracked),
    ):
        np.testing.assert_allclose(ours, other.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.peers
def test_torch_refuses_a_single_element_as_well():
    import torch

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(2)(torch.ones(1, 2))
    stats = mp.RunningStats(2)
    with pytest.raises(UsageError, match="mean must be of the library of x"):
        mp.batch_norm(torch.ones(3, 2), None, None, None, running=stats)
