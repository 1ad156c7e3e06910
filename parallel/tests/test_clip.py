"""The norm of gradients over all ranks, and what becomes of gradients above it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, LayoutError, UsageError
from oneaccord_simulated import run


def whole_gradients(dtype="f8"):
    random = np.random.default_rng(4)
    return {name: random.normal(size=size).astype(dtype) for name, size in (("w", (5, 3)), ("b", 7), ("e", 2))}


def norm_of(arrays, norm_type=2):
    return np.linalg.norm(np.concatenate([np.ravel(array).astype("f8") for array in arrays]), norm_type)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_the_norm_and_the_gradients_are_those_of_one_process(ranks, norm_type, library):
    whole = whole_gradients()
    norm = norm_of(whole.values(), norm_type)

    def clip(group):
        bounds = np.linspace(0, 7, ranks + 1).astype(int)
        start, stop = bounds[group.rank], bounds[group.rank + 1]
        rows = library.give(
            np.array_split(whole["w"], ranks)[group.rank].copy()
        )  # none on the last ranks, where there are more than rows
        flat = library.give(whole["b"][start:stop].copy())
        grads = {"w": rows, "b": [mp.ShardedArray.of_range((7,), start, flat)], "e": library.give(whole["e"].copy())}
        placements = {"w": "sharded", "b": ["sharded"], "e": "replicated"}
        clipped, norm = mp.clip_by_global_norm(grads, 0.25, group, placements, norm_type=norm_type)
        assert clipped["w"] is rows
        return library.take((rows, flat, clipped["e"], norm))

    done = run(clip, ranks)
    assert [call.operation for call in done.trace.calls] == ["all_reduce"] * ranks
    rows, flats, copies, norms = zip(*done.results, strict=True)
    assert norms == (norms[0],) * ranks
    np.testing.assert_allclose(norms[0], norm, rtol=1e-14)
    for got, name in ((np.concatenate(rows), "w"), (np.concatenate(flats), "b"), *((copy, "e") for copy in copies)):
        np.testing.assert_allclose(got, whole[name] * (0.25 / norm), rtol=1e-14)


@pytest.mark.parametrize(("placements", "calls"), [("replicated", 0), (set(), 0), (None, 1), ({"w": "replicated"}, 1)])
def test_what_all_ranks_hold_counts_once_and_needs_no_message_if_all_say_so(placements, calls):
    def clip(group):
        grads = {"w": np.array([3.0, 4.0]), "b": None}
        return mp.clip_by_global_norm(grads, 1.0, group, placements)[1], grads["w"]

    done = run(clip, 3)
    assert [call.operation for call in done.trace.calls] == ["all_reduce"] * 3 * calls
    assert [norm for norm, _ in done.results] == [5.0] * 3
    assert {tuple(grad) for _, grad in done.results} == {(3 * (1.0 / 5), 4 * (1.0 / 5))}


def test_on_a_mesh_each_array_is_divided_along_axes_of_its_own():
    parts = np.arange(1.0, 25).reshape(2, 3, 4)

    def clip(group):
        with oa.DeviceMesh(group, (2, 3), ("dp", "tp")) as mesh:
            dp, tp = mesh.coordinates
            places = {"all": {"dp", "tp"}, "tp": "tp", "dp": "dp", "none": "replicated", "too": {"tp", "dp"}}
            grads = {
                "all": parts[dp, tp],
                "tp": parts[0, tp].copy(),
                "dp": parts[dp, 0].copy(),
                "none": parts[1, 2].copy(),
                "too": parts[dp, tp].copy(),
            }
            norms = [
                mp.clip_by_global_norm(grads, math.inf, mesh, which)[1] for which in (places, lambda name, grad: places[name])
            ]
            with pytest.raises(UsageError, match=r"the placement of 'all' must be .* an axis of \('dp', 'tp'\).* and is 'pp'"):
                mp.clip_by_global_norm({}, 1.0, mesh, "pp")
            for placements in ("sharded", dict.fromkeys(grads, "sharded"), lambda name, grad: "sharded"):
                with pytest.raises(UsageError, match=r"does not say along which axes of \('dp', 'tp'\)"):
                    mp.clip_by_global_norm(grads, 1.0, mesh, placements)
            return norms

    norm = norm_of([parts, parts, parts[0], parts[:, 0], parts[1, 2]])
    results = run(clip, 6).results
    np.testing.assert_allclose(results, np.full((6, 2), norm), rtol=1e-14)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e154, 5e-324, 1.5e308 / 2])
def test_numbers_whose_squares_float64_does_not_hold(size):
    def clip(group):
        grads = [np.full(2, size), np.ones(1), np.zeros(3)] if size > 1 else [np.full(2, size), np.zeros(3)]
        return mp.clip_by_global_norm(grads, math.inf, group, "sharded")[1]

    exact = math.hypot(*[size] * 4, *[1.0] * (2 if size > 1 else 0))
    assert run(clip, 2).results == [pytest.approx(exact, rel=1e-14, abs=0)] * 2


def test_many_large_sums_of_squares_do_not_overflow_together():
    grads = [np.array([1e154]) for _ in range(40)]
    assert mp.clip_by_global_norm(grads, math.inf)[1] == pytest.approx(1e154 * math.sqrt(40), rel=1e-14)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize(
    ("bad", "norm", "left"),
    [
        ([[], [math.inf], []], math.inf, [[0.0], [0.0, math.nan], [0.0]]),
        ([[], [math.nan], []], math.nan, [[math.nan], [math.nan] * 2, [math.nan]]),
        ([[], [math.nan], [math.inf]], math.nan, [[math.nan], [math.nan] * 2, [math.nan] * 2]),
        ([[math.nan, math.inf], [], []], math.nan, [[math.nan] * 3, [math.nan], [math.nan]]),
    ],
)
def test_what_is_not_finite_on_one_rank_is_alike_on_all(bad, norm, left, norm_type, library):
    def clip(group):
        grad = library.give(np.array([1.0, *bad[group.rank]]))
        with pytest.raises(UsageError, match=f"the norm of the gradients is {norm}"):
            mp.clip_by_global_norm([grad], 1.0, group, "sharded", norm_type=norm_type, error_if_nonfinite=True)
        assert grad[0] == 1
        return mp.clip_by_global_norm([grad], 1.0, group, "sharded", norm_type=norm_type)[1], grad.tolist()

    np.testing.assert_equal(run(clip, 3).results, [(norm, part) for part in left])


def test_small_gradients_and_an_infinite_bound_leave_all_as_it_is():
    grads = {"w": np.array([3.0, 4.0])}
    for bound in (5.0, math.inf):
        clipped, norm = mp.clip_by_global_norm(grads, bound)
        assert (clipped, norm, grads["w"].tolist()) == (grads, 5.0, [3.0, 4.0])
    assert mp.clip_by_global_norm({"w": np.zeros(3)}, 0.0)[1] == 0
    assert mp.clip_by_global_norm({}, 1.0) == ({}, 0.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "complex64"])
def test_each_dtype_is_squared_in_float64_and_keeps_its_dtype(dtype, library):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    grad = library.give(np.full((40, 25), 300, dtype))  # its squares are beyond float16, and so is the factor
    norm = 300 * math.sqrt(1000)
    clipped, got = mp.clip_by_global_norm([grad[::2], grad[1::2]], norm * 1e-7)
    assert got == pytest.approx(norm, rel=1e-15)
    assert (clipped[0].base is grad, grad.dtype) == (True, np.dtype(dtype))
    np.testing.assert_allclose(library.take(grad).astype(complex), 3e-5, rtol=4e-3)


def test_an_array_at_two_places_counts_once_and_is_scaled_once():
    tied = np.array([3.0, 4.0])
    clipped, norm = mp.clip_by_global_norm({"in": tied, "out": tied}, 2.5)
    assert (norm, tied.tolist()) == (5.0, [1.5, 2.0])
    assert clipped["out"] is tied


def test_views_of_the_same_elements_are_one_array():
    tied = np.array([3.0, 4.0])
    clipped, norm = mp.clip_by_global_norm([tied[:], tied[:], tied], 2.5)
    assert (norm, tied.tolist()) == (5.0, [1.5, 2.0])
    assert [part.tolist() for part in clipped] == [[1.5, 2.0]] * 3
    apart = np.arange(4.0)  # views that interleave share no element
    assert mp.clip_by_global_norm([apart[::2], apart[1::2]], math.inf)[1] == math.sqrt(14)


@pytest.mark.parametrize("other", [lambda x: x[:1], lambda x: x[::-1], lambda x: x.view("f4"), lambda x: x[None]])
def test_arrays_that_share_some_memory_are_refused(other):
    tied = np.array([3.0, 4.0])
    with pytest.raises(UsageError, match="share memory but are not the same array"):
        mp.clip_by_global_norm({"a": tied, "b": other(tied)}, 2.5)
    assert tied.tolist() == [3.0, 4.0]


def test_each_element_of_a_distributed_array_counts_once(library):
    whole = np.arange(6.0).reshape(2, 3)

    def clip(group):
        given = library.give(whole)
        with oa.DeviceMesh(group, (2, 2), ("dp", "tp")) as mesh:
            grads = {
                "columns": mp.distribute(given, mesh, [mp.Replicate(), mp.Shard(1)]),
                "all": mp.distribute(given, mesh, [mp.Shard(0), mp.Shard(1)]),
                "whole": mp.distribute(given.copy(), mesh, [mp.Replicate(), mp.Replicate()]),
                "plain": library.give(np.array([2.0])),
            }
            norms = [
                mp.clip_by_global_norm(grads, math.inf, *more)[1]
                for more in ((), (mesh,), (group, {"plain": "replicated"}), (mesh, {"columns": "tp", "plain": "replicated"}))
            ]
            line = mp.distribute(given, mesh.group("tp"), [mp.Shard(1)])
            norms += [mp.clip_by_global_norm([line], math.inf, mesh, ["tp"])[1]]
            for wrong, said in (
                ((grads, 1.0, mesh, "replicated"), "placement given for 'all' is replicated, and it is DTensor"),
                (([line], 1.0, mesh), "give group= with the mesh of the array"),
                (([mp.from_local(np.ones(2), mesh, [mp.Partial(), mp.Shard(0)])], 1.0), "reduction that is not finished"),
            ):
                with pytest.raises(UsageError, match=said):
                    mp.clip_by_global_norm(*wrong)
            clipped, _ = mp.clip_by_global_norm(grads, norms[0] / 2)
            assert clipped["all"] is grads["all"]
            return norms, clipped["all"].full().tolist()

    square = (whole**2).sum()
    expected = [pytest.approx(math.sqrt(3 * square + 4), rel=1e-15)] * 4 + [pytest.approx(math.sqrt(square), rel=1e-15)]
    assert run(clip, 4).results == [(expected, (whole / 2).tolist())] * 4


def test_an_array_that_is_a_piece_of_several_leaves_is_counted_and_scaled_once():
    def clip(group):
        array = np.array([3.0, 4.0])
        one, other = (mp.ShardedArray((2,), [((0,), array)]) for _ in range(2))
        _, norm = mp.clip_by_global_norm([one, other], 2.5, group)
        return norm, array.tolist()

    assert run(clip, 1).results == [(5.0, [1.5, 2.0])]


def test_what_cannot_be_written_comes_back_as_a_new_array():
    fixed = np.array([3.0, 4.0])
    fixed.flags.writeable = False
    piece = mp.ShardedArray((2,), [((0,), fixed)])
    clipped, norm = mp.clip_by_global_norm({"w": fixed}, 2.5)
    assert (clipped["w"].tolist(), fixed.tolist(), norm) == ([1.5, 2.0], [3.0, 4.0], 5.0)
    (result,) = run(lambda group: mp.clip_by_global_norm(piece, 2.5, group)[0], 1).results
    assert (result.shape, result.pieces[0][1].tolist(), fixed.tolist()) == ((2,), [1.5, 2.0], [3.0, 4.0])


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([np.ones(2)], -1), UsageError, "max_norm must be a number of at least 0, not -1"),
        (([np.ones(2)], math.nan), UsageError, "max_norm must be"),
        (([np.ones(2, int)], 1.0), DTypeError, "dtype int64"),
        (({"a": np.ones(2)}, 1.0, None, {"b": "replicated"}), UsageError, "no placement is given for 'a'"),
        (({"a": np.ones(2)}, 1.0, None, {"a": "split"}), UsageError, "the placement of 'a' must be .* and is 'split'"),
        (({"a": np.ones(2)}, 1.0, None, "sharded"), UsageError, "no group is given"),
        ((mp.ShardedArray((2,), [((0,), np.ones(2))]), 1.0), UsageError, "no group is given"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        mp.clip_by_global_norm(*arguments)
    with pytest.raises(UsageError, match="norm_type must be 2 or infinity, not 1"):
        mp.clip_by_global_norm([], 1.0, norm_type=1)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (
            lambda x: {"a": x[:3], "b": x[1:]},
            UsageError,
            r"'a, piece 0' of shape \(3,\) and 'b, piece 0' of shape \(3,\) share memory",
        ),
        (lambda x: {"a": x, "b": np.ones(2, int)}, DTypeError, "b is an array of dtype int64"),
        (lambda x: {"a": x, "c": x}, UsageError, "the placement of 'c' must be .* and is 'split'"),
        (lambda x: {"a": x, "unknown": x}, KeyError, "'unknown'"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_every_rank(wrong, error, said, norm_type):
    placements = {"a": "sharded", "b": "sharded", "c": "split"}

    def clip(group):
        right = {"a": np.full(3, 3.0), "b": np.full(1, 3.0)}
        grads = wrong(np.ones(4)) if group.rank == 1 else right
        with pytest.raises(error if group.rank == 1 else UsageError, match=said) as caught:
            mp.clip_by_global_norm(grads, 1.0, group, lambda name, _: placements[name], norm_type=norm_type)
        assert (getattr(caught.value, "peer", None) == 1) == (group.rank != 1)
        # Nothing was scaled, and the group goes on.
        return mp.clip_by_global_norm(right, math.inf, group, "sharded", norm_type=norm_type)[1]

    assert run(clip, 3).results == [math.sqrt(9 * 12) if norm_type == 2 else 3.0] * 3


@pytest.mark.parametrize("placements", [None, {}])
def test_a_rank_that_holds_nothing_takes_part(placements):
    def clip(group):
        grads = {} if group.rank == 0 else {"a": mp.ShardedArray((4,), [((2 * group.rank - 2,), np.array([3.0, 4.0]))])}
        return mp.clip_by_global_norm(grads, math.inf, group, placements)[1]

    assert run(clip, 3).results == [math.sqrt(50)] * 3


@pytest.mark.parametrize("order", [["view", "array"], ["array", "view"]])
def test_a_read_only_view_of_an_array_counts_and_is_scaled_once(order):
    array = np.array([3.0, 4.0])
    view = array.view()
    view.flags.writeable = False
    given = {"view": view, "array": array}
    clipped, norm = mp.clip_by_global_norm([given[name] for name in order], 2.5)
    assert (norm, [each.tolist() for each in clipped], array.tolist()) == (5.0, [[1.5, 2.0]] * 2, [1.5, 2.0])
    with pytest.raises(UsageError, match="share memory but are not the same array"):
        mp.clip_by_global_norm([array, view[:1]], 2.5)
    assert mp.clip_by_global_norm([view, view[:1]], math.inf)[1] == math.sqrt(2 * 1.5**2 + 4)  # values


def test_values_that_repeat_an_element_and_numbers_count_each():
    ones = np.float64(1.0)
    repeated = np.broadcast_to(ones, 4)
    assert mp.clip_by_global_norm([repeated, np.broadcast_to(ones, 4), repeated], math.inf)[1] == math.sqrt(8)
    assert mp.clip_by_global_norm([3.0, 3.0, ones, ones], math.inf)[1] == math.sqrt(20)


@pytest.mark.parametrize(
    "views",
    [
        lambda a: [a[:, i] for i in range(200)],
        lambda a: [a[:, i::10] for i in range(10)],
        lambda a: [a[k::2, i] for i in range(200) for k in range(2)],
        lambda a: [a[6 * k : 6 * k + 6, 7 * i : 7 * i + 7][::-1] for i in range(28) for k in range(3)],
        lambda a: [a.reshape(3, 6, 200)[:, k, i : i + 3] for i in range(0, 198, 3) for k in range(6)],
        lambda a: [*a[:, :100].T, *a[:, 100:].reshape(18, 2, 50).transpose(1, 2, 0)],
    ],
    ids=["columns", "strides", "parity", "blocks", "cube", "mixed"],
)
def test_views_that_lie_between_each_other_need_no_solver(views, monkeypatch):
    solved = []

    def solve(*given, **options):
        solved.append(given)
        return False

    monkeypatch.setattr(np, "shares_memory", solve)
    some = views(np.ones((18, 200)))
    assert mp.clip_by_global_norm(some, math.inf)[1] == pytest.approx(math.sqrt(sum(each.size for each in some)), rel=1e-12)
    assert len(solved) == 0


@pytest.mark.parametrize("seed", range(20))
def test_views_that_share_an_element_are_found_among_many(seed):
    random = np.random.default_rng(seed)
    base = np.ones(600)

    def view():
        start, steps = int(random.integers(200)), sorted(random.integers(1, 40, size=2).tolist(), reverse=True)
        shape = random.integers(1, 5, size=2).tolist()
        found = np.lib.stride_tricks.as_strided(base[start:], shape, [8 * step for step in steps])
        return found[:: int(random.choice([1, -1]))]

    def elements(each):
        return {
            (int(each[i, j : j + 1].__array_interface__["data"][0])) for i in range(each.shape[0]) for j in range(each.shape[1])
        }

    for _ in range(40):
        some = [each for each in (view() for _ in range(6)) if len(elements(each)) == each.size]  # none that repeats an element
        kinds = {
            (
                each.__array_interface__["data"][0],
                each.shape,
                *(s for s, n in zip(each.strides, each.shape, strict=True) if n > 1),
            ): each
            for each in some
        }
        shares = len(set().union(*map(elements, kinds.values()))) < sum(each.size for each in kinds.values())
        try:
            mp.clip_by_global_norm(some, math.inf)
        except UsageError:
            assert shares
        else:
            assert not shares


@pytest.mark.peers
def test_tensors_without_elements_in_memory_are_refused():
    import torch

    for odd in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(LayoutError, match=r"clip_by_global_norm cannot take layer\.w, which is"):
            mp.clip_by_global_norm({"layer": {"w": odd}}, 1.0)


@pytest.mark.peers
def test_torch_computes_the_same_norm_and_gradients():
    import torch

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 1e-2)):
        grads = [torch.from_numpy(grad).to(dtype) for grad in whole_gradients().values()]
        others = [torch.nn.Parameter(grad.clone()) for grad in grads]
        for other in others:
            other.grad = other.detach().clone()
        theirs = torch.nn.utils.clip_grad_norm_(others, 0.5)
        ours = mp.clip_by_global_norm(grads, 0.5)[1]
        assert ours == pytest.approx(theirs.item(), rel=tolerance)
        for grad, other in zip(grads, others, strict=True):
            torch.testing.assert_close(grad, other.grad, rtol=max(tolerance, 1e-6), atol=0)  # torch adds 1e-6 to the norm


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_gets_new_arrays(dtype):
    import jax.numpy as jnp

    grads = {"w": jnp.full((3, 4), 2, dtype)}
    clipped, norm = mp.clip_by_global_norm(grads, norm_of([grads["w"]]) / 4)
    assert norm == norm_of([grads["w"]])
    assert isinstance(clipped["w"], type(grads["w"]))
    assert (clipped["w"].dtype, set(clipped["w"].ravel().tolist()), float(grads["w"][0, 0])) == (dtype, {0.5}, 2.0)
