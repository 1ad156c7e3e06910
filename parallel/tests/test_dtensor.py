"""Distributed arrays: where their elements lie, what a redistribution sends, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel import Partial, Replicate, Shard
from oneaccord_parallel.sharded_arrays import Distributed
from oneaccord_simulated import run

R, S, P = Replicate, Shard, Partial


def on_mesh(program, shape, **options):
    """Run ``program(mesh)`` on the ranks of a mesh; return the run."""

    def on_rank(group):
        with oa.DeviceMesh(group, shape) as mesh:
            return program(mesh)

    return run(on_rank, math.prod(shape), **options)


def sent(shape, source, targets, x, **options):
    """Return what each rank sends in a chain of redistributions, the calls that it makes, and the bytes that are explained."""

    def program(mesh, chain):
        d = mp.distribute(x, mesh, source)
        total = 0
        for target in chain:
            total += sum(step.total_bytes for step in d.explain(target))
            d = d.redistribute(target, check=False)
        return total

    runs = [on_mesh(lambda mesh, chain=chain: program(mesh, chain), shape, **options) for chain in ([], targets)]
    without, done = (each.trace for each in runs)
    ranks = range(math.prod(shape))
    calls = {call.operation for call in done.calls[len(without.calls) :]} - {"split"}
    return [done.bytes_sent(r) - without.bytes_sent(r) for r in ranks], calls, runs[1].results[0]


@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize(
    ("source", "target", "collectives", "share"),
    [
        (S(0), R(), {"all_gather"}, lambda p: (p - 1) / p),
        (S(1), R(), {"all_gather"}, lambda p: (p - 1) / p),
        (P(), R(), {"reduce_scatter", "all_gather"}, lambda p: 2 * (p - 1) / p),
        (P("max"), S(0), {"reduce_scatter"}, lambda p: (p - 1) / p),
        (P("mean"), S(1), {"reduce_scatter"}, lambda p: (p - 1) / p),
        (S(0), S(1), {"all_to_all"}, lambda p: (p - 1) / p**2),
        (S(1), S(0), {"all_to_all"}, lambda p: (p - 1) / p**2),
        (R(), S(1), set(), lambda p: 0),
        (R(), P(), set(), lambda p: 0),
        (S(1), P("min"), set(), lambda p: 0),
    ],
)
def test_each_rank_sends_the_bytes_of_the_table(p, source, target, collectives, share, library):
    x = np.arange(3.0 * (2 * p) * p).reshape(2 * p, 3 * p)
    # Of small arrays on many ranks an all_to_all sends more bytes in fewer messages, where it may.
    config = {"algorithms": {"all_to_all": "pairwise"}}
    each, calls, explained = sent((p,), [source], [[target]], library.give(x), config=config)
    assert each == [round(share(p) * x.nbytes)] * p
    assert explained == sum(each)
    assert calls == collectives


@pytest.mark.parametrize(
    ("mesh", "source", "target", "share"),
    [
        # Every rank of an axis joins what the inner one joined: as one all_gather over all ranks.
        ((2, 3), [S(0), S(0)], [R(), R()], 5 / 6),
        # A reduce_scatter along one axis, so that the other one reduces a part: as one all_reduce over all ranks.
        ((2, 3), [P(), P()], [R(), R()], 2 * 5 / 6),
        # Straight on it would be 3/4: what is sharded along both axes is joined along one.
        ((4, 4), [S(0), R()], [R(), S(0)], 3 / 16 + 3 / 16),
        # The outer axis can not be joined while the inner one divides the same, which therefore takes another axis of the array meanwhile.
        ((2, 2), [S(0), S(0)], [R(), S(0)], 1 / 8 + 1 / 4 + 1 / 4),
        ((2, 2), [S(0), S(1)], [S(1), S(0)], 1 / 4 + 1 / 4),
    ],
)
def test_the_cheapest_way_over_several_axes_is_found(mesh, source, target, share):
    x = np.arange(48.0 * 48).reshape(48, 48)
    each, _, explained = sent(mesh, source, [target], x)
    assert explained == sum(each) == round(share * x.nbytes * math.prod(mesh))


@pytest.mark.parametrize(("counts", "moved"), [([18, 12, 0, 18], [0, 6, 12, 0]), ([0, 0, 0, 48], [12, 12, 12, 0])])
def test_other_counts_of_an_axis_move_only_the_rows_that_change_places(counts, moved):
    x, sizes = np.zeros((48, 48)), 3 * 8
    each, _, explained = sent((4,), [S(0)], [[S(0, counts)]], x)
    assert each == [rows * x[0].nbytes + sizes for rows in moved]
    assert explained == sum(moved) * x[0].nbytes


def test_the_way_is_told_in_words():
    def program(mesh):
        d = mp.distribute(np.zeros((4, 6)), mesh, [S(0), S(1)])
        return [str(step) for step in d.explain([S(0), R()])], d.explain([S(0), S(-1)])

    told, nothing = on_mesh(program, (2, 2)).results[0]
    assert told == ["axis1: Shard(1) -> Replicate() by all_gather, 48 bytes sent by each rank"]
    assert nothing == []


def counts(draw, size, parts):
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@st.composite
def chains(draw):
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (1, 3), (2, 1, 2)]))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    kinds = st.sampled_from(["R", "P", "S", "S"])
    chain = []
    for _ in range(draw(st.integers(2, 4))):
        op, placements, seen = draw(st.sampled_from(["sum", "mean", "max", "min"])), [], set()
        for extent in mesh:
            kind, dim = draw(kinds), draw(st.integers(0, len(shape) - 1))
            given = None
            if kind == "S" and dim not in seen and draw(st.booleans()):
                given = counts(draw, shape[dim], extent)
            seen |= {dim} if kind == "S" else set()
            placements.append({"R": R(), "P": P(op), "S": S(dim, given)}[kind])
        chain.append(placements)
    return mesh, shape, chain


@pytest.mark.timeout(180)
@settings(max_examples=settings().max_examples // 2)
@given(chains())
@example(((2,), (0, 2), [[S(1)], [P()]]))
def test_any_chain_gives_the_original_and_sends_what_is_explained(case):
    mesh, shape, (source, *targets) = case
    # Multiples of all sizes of axes: means are exact.
    x = 900.0 * np.arange(1.0, 1 + math.prod(shape)).reshape(shape)

    def program(mesh):
        d = mp.distribute(x, mesh, source)
        for target in [*targets, [R()] * mesh.ndim]:
            e = d.redistribute(target)
            assert e.placements == mp.distribute(x, mesh, target).placements
            if not any(isinstance(each, P) for each in target):
                box = tuple(slice(o, o + n) for o, n in zip(e.offset, e.local.shape, strict=True))
                assert np.array_equal(e.local, x[box])
            assert np.array_equal(d.full(), x)
            d = e

    on_mesh(program, mesh)
    each, _, explained = sent(mesh, source, targets, x)
    # An all_to_all with parts of several sizes tells them: 8 bytes from every rank to every other along the axis.
    assert explained <= sum(each) <= explained + 8 * 3 * len(mesh) * len(targets) * sum(mesh) * math.prod(mesh)


@pytest.mark.parametrize(("n", "p", "rows"), [(5, 4, [2, 2, 1, 0]), (6, 3, [2, 2, 2]), (1, 3, [1, 0, 0]), (0, 2, [0, 0])])
def test_shards_are_those_of_torch_chunk(n, p, rows):
    x = np.arange(2.0 * n).reshape(n, 2)
    assert [len(d) for d in run(lambda g: mp.distribute(x, g, [S(0)]).local, p).results] == rows


def test_an_axis_that_two_axes_of_the_mesh_shard_is_divided_twice(library):
    """Also with counts that differ from part to part, which come back as they were given."""
    nested = [S(0, [3, 4]), S(0, [[1, 2], [4, 0]])]

    def program(mesh):
        d = mp.distribute(library.give(np.arange(7)), mesh, nested)
        return d.local.tolist(), list(d.placements), mp.from_local(d.local, mesh, [S(0), S(0)]).placements == d.placements

    done = on_mesh(program, (2, 2))
    assert [local for local, *_ in done.results] == [[0], [1, 2], [3, 4, 5, 6], []]
    assert all(found == nested and again for _, found, again in done.results)


def test_operands_of_a_reduction_are_the_array_once_and_elsewhere_nothing(library):
    x, y = np.array([-0.0, np.nan, 3.0]), np.array([5, 7, -9], np.int8)

    def program(group):
        u, v = library.give([x, y])
        found = [mp.distribute(u, group, [P()]), mp.distribute(v, group, [P("max")]), mp.distribute(v, group, [S(0)])]
        found.append(found[2].redistribute([P("min")]))
        return library.take(([each.local for each in found], [each.full() for each in found]))

    (first, full), (second, _) = run(program, 2).results
    assert [each.tobytes() for each in full] == [each.tobytes() for each in (x, y, y, y)]
    assert [each.tolist() for each in second] == [[0, 0, 0], [-128] * 3, [-9], [127, 127, -9]]
    assert first[0].tobytes() == x.tobytes()
    assert first[3].tolist() == [5, 7, 127]


def test_parts_of_any_size_make_an_array():
    def program(group):
        part = np.full((group.rank, 2), group.rank)
        d = mp.from_local(part, group, [S(0)], global_shape=(3, 2))
        mean = mp.from_local(np.full(2, 1.0 + group.rank), group, [P("avg")]).full()
        return d.placements, d.full().tolist(), mean.tolist(), d.local is part

    right = ((S(0, [0, 1, 2]),), [[1, 1], [2, 2], [2, 2]], [2, 2], True)
    assert run(program, 3).results == [right] * 3


def test_checkpoints_get_the_piece_of_each_rank():
    def program(mesh):
        d = mp.distribute(np.arange(10).reshape(5, 2), mesh, [S(0), R()])
        saved = d.sharded_array()
        ((box, piece),) = saved.pieces
        assert piece is d.local
        assert saved.shape == (5, 2)
        assert isinstance(d, Distributed)
        with pytest.raises(SizeMismatchError, match="this rank has"):
            d.with_sharded_array(mp.ShardedArray((5, 3), [((0, 0), piece)]))
        return box.offset, d.with_sharded_array(mp.ShardedArray((5, 2), [(box.offset, piece * 2)])).full().tolist()

    double = (2 * np.arange(10).reshape(5, 2)).tolist()
    assert on_mesh(program, (3, 2)).results == [((row, 0), double) for row in (0, 0, 2, 2, 4, 4)]


def test_a_checkpoint_of_one_mesh_is_loaded_on_another(tmp_path, library):
    x = np.arange(35.0).reshape(5, 7)
    x[0, 0], x[1, 1] = -0.0, np.nan

    def save(mesh):
        given = library.give(x)
        tree = {"w": mp.distribute(given, mesh, [S(0), S(0)]), "v": mp.distribute(given, mesh, [R(), S(1)])}
        mp.save(tree, tmp_path, mesh.parent)

    def load(mesh):
        zero = library.give(0 * x)
        like = {"w": mp.distribute(zero, mesh, [S(1), S(0)]), "v": mp.distribute(zero, mesh, [S(0, [5, 0, 0]), R()])}
        tree = mp.load(tmp_path, like, mesh.parent)
        assert [type(each) for each in tree.values()] == [mp.DTensor] * 2
        return [each.full().tobytes() for each in tree.values()]

    on_mesh(save, (2, 2))
    assert on_mesh(load, (3, 2)).results == [[x.tobytes()] * 2] * 6


def test_sums_have_the_same_bits_however_they_are_made(library):
    rng = np.random.default_rng(0)
    operands = rng.standard_normal((7, 40, 3)) * 10.0 ** rng.integers(-8, 8, (7, 40, 3))

    def program(group):
        d = mp.from_local(library.give(operands[group.rank]), group, [P()])
        return [
            each.tobytes() for each in (d.full(), d.redistribute([S(1)]).full(), group.all_reduce(d.local, reproducible=True))
        ]

    assert len({bits for found in run(program, 7).results for bits in found}) == 1


WRONG = {
    "placements differ": (
        lambda g: [S(g.rank)],
        lambda g: np.ones((2, 2)),
        UsageError,
        r"placements: .*\[Shard\(1\)\] on rank 1",
    ),
    "arrays differ": (lambda g: [S(0)], lambda g: np.full(2, g.rank), UsageError, "with the checksum [0-9a-f]+ on rank 1"),
    "shapes differ": (lambda g: [S(0)], lambda g: np.ones(g.rank), UsageError, r"float64\[1\] .* on rank 1"),
    "one has no array": (lambda g: [S(0)], lambda g: [np.ones(2), None][g.rank], UsageError, "NoneType on rank 1"),
    "none has an array": (lambda g: [S(0)], lambda g: None, DTypeError, "an array of NumPy, CuPy, torch or JAX"),
    "no such axis": (lambda g: [S(2)], lambda g: np.ones((2, 2)), UsageError, r"Shard\(2\) needs an axis"),
    "counts do not fit": (lambda g: [S(0, [1, 2])], lambda g: np.ones(4), UsageError, "must divide 4 rows among 2"),
    "too many": (lambda g: [S(0), R()], lambda g: np.ones(4), UsageError, "a mesh of 1 axes"),
    "no placement": (lambda g: ["Shard"], lambda g: np.ones(4), UsageError, "'Shard'"),
    "mean of integers": (lambda g: [P("mean")], lambda g: np.ones(4, int), DTypeError, "int64 has no mean"),
    "objects": (lambda g: [S(0)], lambda g: np.array([None, 1]), DTypeError, "must hold numbers, but its dtype is object"),
    "max of complex": (lambda g: [P("max")], lambda g: np.ones(4, complex), DTypeError, "complex128 has no max"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_on_every_rank_and_the_group_goes_on(case):
    placements, array, error, said = WRONG[case]

    def program(group):
        with pytest.raises(error, match=said):
            mp.distribute(array(group), group, placements(group))
        return group.all_reduce(1)

    assert run(program, 2).results == [2, 2]


@pytest.mark.parametrize(
    ("part", "placement", "shape", "said"),
    [
        (lambda r: np.ones((2, 1 + r)), S(0), None, r"axis 1 .* \(2, 1\) on rank 0, \(2, 2\) on rank 1"),
        (lambda r: np.ones(1 + r), S(0), (4,), r"make the shape \(3,\), not \[4\]"),
        (lambda r: np.ones(1 + r), S(0), 3, r"make the shape \(3,\), not 3"),
        (lambda r: np.ones(1 + r), S(0), "differs", r"global_shape: .*\[4\] on rank 1"),
        (lambda r: np.ones(1 + r), S(0, [2, 1]), None, "do not have the counts"),
        (lambda r: np.ones(2, [float, int][r]), S(0), None, "int64 on rank 1"),
        (lambda r: [np.ones(2), "text"][r], S(0), None, "str on rank 1"),
        (lambda r: np.ones((2,) * (1 + r)), S(0), None, "axes: 1 on rank 0; 2 on rank 1"),
        (lambda r: np.ones(1 + r), R(), None, "axis 0 of the array is not sharded"),
    ],
)
def test_parts_that_do_not_fit_are_refused_on_every_rank(part, placement, shape, said):
    def program(group):
        with pytest.raises(UsageError, match=said):
            mp.from_local(part(group.rank), group, [placement], (3 + group.rank,) if shape == "differs" else shape)
        return group.all_reduce(1)

    assert run(program, 2).results == [2, 2]


def test_a_redistribution_that_differs_between_ranks_is_refused_on_every_rank():
    def program(group):
        d = mp.distribute(np.ones((4, 4)), group, [S(0)])
        with pytest.raises(UsageError, match=r"to: .*\[Shard\(1\)\] on rank 1"):
            d.redistribute([[R(), S(1)][group.rank]])
        with pytest.raises(UsageError, match="several reductions"):
            mp.distribute(np.ones(2), oa.DeviceMesh(group, (2, 1)), [P(), P("max")])
        with pytest.raises(UsageError, match="redistribute it"):
            d.redistribute([P()]).sharded_array()
        with pytest.raises(SizeMismatchError, match=r"shape \(2, 4\), not \(4, 4\)"):
            d.with_local(np.ones((4, 4)))
        return d.full().sum()

    assert run(program, 2).results == [16, 16]


@pytest.mark.parametrize(
    "wrong", [lambda: S(0.5), lambda: S(0, 3), lambda: S(0, [1, -1]), lambda: S(0, [[1], [1, 2]]), lambda: P("prod")]
)
def test_impossible_placements_are_refused(wrong):
    with pytest.raises(UsageError):
        wrong()


# What it is not


@pytest.mark.parametrize(
    "use",
    [
        np.sum,
        np.all,
        np.asarray,
        np.array,
        np.shape,
        np.exp,
        lambda d: np.add(np.ones(2), d),
        lambda d: np.ones(2) @ d,
        np.add.reduce,
        lambda d: np.array([d, d]),
        lambda d: np.float64(2) * d,
        lambda d: np.concatenate([d, d]),
        lambda d: d == "d",
        lambda d: d != 0,
        lambda d: np.ones(2) == d,
        lambda d: 1 in [0, d],
        bool,
    ],
)
def test_what_takes_it_for_an_array_is_refused_in_words(use):
    def program(group):
        d = mp.distribute(np.ones(2), group, [mp.Shard(0)])
        for each in (d, d.sharded_array()):
            with pytest.raises(UsageError, match=r"is divided among ranks: .*Compute with"):
                use(each)
        return len({d, d, d.with_local(d.local)}), d is not None

    assert run(program, 2).results == [(2, True)] * 2


@pytest.mark.peers
def test_functions_of_torch_are_refused_in_words():
    import torch

    def program(group):
        d = mp.distribute(torch.ones(2), group, [mp.Shard(0)])
        for use in (torch.sum, lambda d: torch.add(torch.ones(1), d), lambda d: torch.stack([d, d])):
            with pytest.raises(UsageError, match=r"does not take a DTensor, which is divided among ranks\. Compute with"):
                use(d)

    run(program, 2)
