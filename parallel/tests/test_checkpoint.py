"""Checkpoints: what goes in comes out, bit for bit."""

from __future__ import annotations

import math
import re
import struct
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_simulated import run

DTYPES = [
    *(np.dtype(code) for code in "?bBhHiIlLefdFD"),
    *(
        np.dtype(getattr(ml_dtypes, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4")
    ),
    *(np.dtype(getattr(ml_dtypes, f"float8_{name}")) for name in ("e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e8m0fnu")),
]


class Point(NamedTuple):
    x: Any
    y: Any


def random_bits(shape, dtype, seed=0):
    """Return an array of any bits: NaNs of all kinds, both zeros."""
    size = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    return data.view(dtype).reshape(shape)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    array = random_bits((3, 5), dtype)

    def blank(*shape):
        return np.zeros(shape, dtype)

    zero, empty = random_bits((), dtype), random_bits((4, 0), dtype)
    mp.save({"a": array, "f": np.asfortranarray(array), "s": array[::-2, 1:4].T, "zero": zero, "empty": empty}, tmp_path / "c")
    for found in (
        mp.load(tmp_path / "c"),
        mp.load(tmp_path / "c", {"a": blank(3, 5), "f": blank(3, 5), "s": blank(3, 2), "zero": blank(), "empty": blank(4, 0)}),
    ):
        assert same(found["a"], array)
        assert same(found["f"], array)
        assert same(found["s"], array[::-2, 1:4].T)
        assert same(found["zero"], zero)
        assert same(found["empty"], empty)


def test_arrays_of_like_are_written_in_place_whatever_their_strides(tmp_path, library):
    array = library.give(np.arange(60.0).reshape(3, 4, 5))
    mp.save({"x": array, "y": array[0], "n": np.float32(2.5)}, tmp_path / "c")
    store = library.give(np.zeros((5, 4, 6)))
    view, fixed = store.T[::2], np.zeros((4, 5))
    fixed.flags.writeable = False
    found = mp.load(tmp_path / "c", like={"x": view, "y": fixed, "n": np.float32(0)})
    assert found["x"] is view
    assert (store.T[::2] == array).all()
    assert not store.T[1::2].any()
    assert found["y"] is not fixed
    assert found["y"].tobytes() == array[0].tobytes()
    assert type(found["n"]) is np.float32
    assert found["n"] == 2.5


VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.integers(0, 2**52 - 1).map(lambda payload: struct.unpack("d", struct.pack("Q", 0xFFF8 << 48 | payload))[0]),
)


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return [(bits(key), bits(item)) for key, item in value.items()]
    return type(value), value


@given(
    st.lists(VALUES, max_size=4),
    st.recursive(
        st.none() | VALUES,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "$int", "ü", 3, 2**70]), inner, max_size=3)
        ),
    ),
)
def test_values_come_back_exactly(tmp_path_factory, values, extra):
    path = tmp_path_factory.mktemp("c")
    mp.save(values, path, extra=extra)
    assert bits(mp.load(path, like=[0] * len(values))) == bits(values)
    assert bits(mp.describe(path).extra) == bits(extra)
    assert bits(list(mp.describe(path).values.values())) == bits(values)


def test_the_tree_comes_back_like_like_or_as_nested_dicts(tmp_path):
    one, two = np.arange(3), np.arange(4.0)
    tree = {"a.b": one, "a": {0: two, "0x": None}, "l": [one, (two, 1)], "p": Point(1, two), "o": OrderedDict(z=1, y=2)}
    mp.save(tree, tmp_path / "c")
    blank = {
        "a.b": one * 0,
        "a": {0: two * 0, "0x": None},
        "l": [one * 0, (two * 0, 0)],
        "p": Point(0, two * 0),
        "o": OrderedDict(z=0, y=0),
    }
    found = mp.load(tmp_path / "c", like=blank)
    assert list(found["o"].items()) == [("z", 1), ("y", 2)]
    assert found["l"][1][0].tolist() == found["p"].y.tolist() == two.tolist()
    assert found["p"].x == found["l"][1][1] == 1
    assert found["a"]["0x"] is None
    plain = mp.load(tmp_path / "c")
    assert set(plain) == set(tree)
    assert set(plain["a"]) == {0}
    assert set(plain["l"]) == {0, 1}
    assert (plain["l"][1][0] == two).all()
    mp.save(one, tmp_path / "c")
    assert (mp.load(tmp_path / "c") == one).all()


def test_describe_tells_what_is_there(tmp_path):
    mp.save({"w": np.zeros((2, 3), "f4"), "lr": 0.5}, tmp_path / "c", step=7, extra={"run": "a"})
    info = mp.describe(tmp_path / "c")
    assert (info.step, info.world_size, info.extra, info.values) == (7, 1, {"run": "a"}, {"lr": 0.5})
    assert info.arrays == {"w": ("float32", (2, 3))}
    assert info.nbytes == info.arrays["w"].nbytes == 24
    assert sum(info.files.values()) == sum(file.stat().st_size for file in (tmp_path / "c").glob("data-*"))
    assert str(info).endswith(", step 7: 24 bytes; ranks: 1; files: 1\n  w   float32[2, 3]\n  lr  0.5")


def test_what_all_ranks_have_is_written_once_and_evenly(tmp_path, library):
    large = np.arange(3 << 18, dtype="f8").reshape(-1, 3)
    tree = {"large": large, "small": [np.full(100, k) for k in range(5)]}

    def program(group):
        mp.save(library.give(tree), tmp_path / "c", group)
        like = library.give({"large": large * 0, "small": [np.zeros(100, int)] * 5})
        return library.take(mp.load(tmp_path / "c", like=like, group=group)["large"]).tobytes() == large.tobytes()

    assert all(run(program, 3).results)
    info = mp.describe(tmp_path / "c")
    sizes = sorted(info.files.values())
    assert len(sizes) == 3
    assert sum(sizes) < info.nbytes + 3000
    assert sizes[-1] - sizes[0] < 6000
    run(lambda group: mp.save({"w": np.ones(10)}, tmp_path / "c", group), 3)
    assert len(mp.describe(tmp_path / "c").files) == 1


def test_pieces_that_several_ranks_hold_are_written_once(tmp_path):
    whole = np.arange(2**18, dtype="f8").reshape(4, -1)

    def program(group):
        half = slice(group.rank % 2 * 2, group.rank % 2 * 2 + 2)
        mp.save({"w": mp.ShardedArray(whole.shape, [((half.start, 0), whole[half])])}, tmp_path / "c", group)

    run(program, 4)
    info = mp.describe(tmp_path / "c")
    assert len(info.files) == 2
    assert sum(info.files.values()) < whole.nbytes + 1000
    assert (mp.load(tmp_path / "c")["w"] == whole).all()


def test_a_save_and_a_load_make_three_collectives_each(tmp_path):
    tree = {"w": np.ones(3), "lr": 0.1}
    calls = run(lambda group: mp.save(tree, tmp_path / "c", group), 3).trace
    assert [calls.count(name) for name in ("all_gather_object", "gather_object", "broadcast_object")] == [1, 1, 1]
    assert len(calls.calls_of(0)) == 6  # each tells the sizes first
    calls = run(lambda group: mp.load(tmp_path / "c", tree, group), 3).trace
    assert [calls.count(name) for name in ("all_gather_object", "broadcast_object")] == [2, 1]
    assert len(calls.calls_of(0)) == 6


def outcomes(program, ranks):
    done = run(program, ranks)
    assert len({str(outcome) for outcome in done.results}) == 1, done.results
    return done.results[0]


def refused(path, tree_of):
    def program(group):
        with pytest.raises(UsageError) as error:
            mp.save(tree_of(group.rank), path, group)
        group.barrier()
        return f"{type(error.value).__name__}: {error.value}"

    text = outcomes(program, 3)
    assert not list(path.glob("data*"))
    return text


@pytest.mark.parametrize(
    ("tree_of", "said"),
    [
        (
            lambda rank: {"w": np.zeros(3 if rank else 2)},
            r"leaf 'w': an array of float64, shape \(2,\) on rank 0; an array of float64, shape \(3,\) on ranks 1, 2",
        ),
        (lambda rank: {"w": np.zeros(3, "f4" if rank == 1 else "f8")}, r"shape \(3,\) on ranks 0, 2; an array of float32"),
        (lambda rank: {"w": 1} | ({"v": 2} if rank == 2 else {}), r"leaf 'v': missing on ranks 0, 1; the value 2 on rank 2"),
        (
            lambda rank: {"w": rank / 2},
            r"leaf 'w': the value 0.0 on rank 0; the value 0.5 on rank 1; the value 1.0 on rank 2",
        ),
        (lambda rank: {"w": np.array(["x"])}, "rank 0: leaf 'w': a checkpoint cannot hold dtype <U1"),
        (lambda rank: {"w": np.zeros(3, ">f4") if rank == 1 else 1}, "rank 1: leaf 'w': .* >f4; convert it with x.astype"),
        (lambda rank: {"w": np.ma.zeros(3)}, "masked"),
        (lambda rank: {"w": object()}, "leaf 'w': expected an array of NumPy, CuPy, torch or JAX"),
        (
            lambda rank: {"w": mp.ShardedArray((4, 2), [((rank, 0), np.zeros((2, 2)))])},
            r"leaf 'w': the pieces \(2, 2\) at \(0, 0\) on rank 0 and \(2, 2\) at \(1, 0\) on rank 1 overlap in part",
        ),
        (
            lambda rank: {"w": mp.ShardedArray((4, 2), [((rank, 0), np.zeros((1, 2)))])},
            r"leaf 'w': no rank holds the elements of shape \(1, 2\) at \(3, 0\)",
        ),
        (lambda rank: {"a": {"b": 1}, "a.b": 2}, "two leaves of the tree have the name"),
    ],
)
def test_trees_that_cannot_be_saved_are_refused_on_every_rank(tmp_path, tree_of, said):
    text = refused(tmp_path, tree_of)
    assert re.search(said, text), text


def test_a_module_of_masked_arrays_that_another_thread_is_loading_is_of_no_concern(tmp_path, monkeypatch):
    half = ModuleType("numpy.ma")
    with monkeypatch.context() as patch:
        patch.setattr(np, "ma", half)  # first, since this asks for what is there, which NumPy loads then
        patch.setitem(sys.modules, "numpy.ma", half)
        mp.save({"w": np.ones(2)}, tmp_path)
    assert mp.load(tmp_path)["w"].tolist() == [1.0, 1.0]


def test_the_path_and_the_step_must_be_the_same_on_all_ranks(tmp_path):
    def program(group):
        with pytest.raises(UsageError, match=r"the path: .*/0 on rank 0; .*/1 on rank 1") as one:
            mp.save({}, tmp_path / str(group.rank), group)
        with pytest.raises(UsageError, match="the step: 0 on rank 0; 1 on rank 1") as two:
            mp.save({}, tmp_path, group, step=group.rank)
        with pytest.raises(UsageError, match="step must be an integer of at least 0, not -1") as three:
            mp.save({}, tmp_path, group, step=-1)
        mp.save({}, tmp_path / "0", group)
        mp.save({}, tmp_path / "1", group)
        with pytest.raises(UsageError, match="all ranks must load from one path") as four:
            mp.load(tmp_path / str(group.rank), {}, group)
        return str((one.value, two.value, three.value, four.value))

    outcomes(program, 2)


@pytest.mark.parametrize(
    ("like", "error", "said"),
    [
        (
            {"w": np.zeros(2), "lr": 0.0},
            SizeMismatchError,
            r"leaf 'w': it has shape \(3,\) in the checkpoint, but \(2,\) in like=",
        ),
        (
            {"w": np.zeros(3, "f4"), "lr": 0.0},
            DTypeError,
            "leaf 'w': it has dtype float64 in the checkpoint, but float32 in like=",
        ),
        ({"w": np.zeros(3)}, UsageError, "only like= has none; only the checkpoint has 'lr'"),
        ({"w": np.zeros(3), "lr": 0.0, "b": 1}, UsageError, "only like= has 'b'; only the checkpoint has none"),
        ({"w": 0, "lr": 0.0}, UsageError, r"leaf 'w': it is an array of shape \(3,\) in the checkpoint, but int in like="),
        ({"w": np.zeros(3), "lr": np.zeros(3)}, UsageError, "leaf 'lr': it is a value in the checkpoint, but ndarray in like="),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_is_written(tmp_path, like, error, said):
    mp.save({"w": np.ones(3), "lr": 0.5}, tmp_path)

    def program(group):
        right = {"w": np.zeros(3), "lr": 0.0}
        with pytest.raises(error, match=said) as found:
            mp.load(tmp_path, like=like if group.rank == 1 else right, group=group)
        assert not right["w"].any()
        return str(found.value)

    assert outcomes(program, 3).startswith("rank 1: ")


def test_leaves_that_only_one_side_has_can_be_left_alone(tmp_path):
    mp.save({"w": np.ones(3), "lr": 0.5}, tmp_path)
    kept, report = np.zeros(2), mp.LoadReport()
    found = mp.load(tmp_path, like={"w": np.zeros(3), "new": kept}, strict=False, report=report)
    assert found["new"] is kept
    assert found["w"].all()
    assert (report.kept, report.unused, report.bytes_read) == (("new",), ("lr",), 24)


def test_a_progress_bar_shows_bytes(tmp_path, capsys):
    tree = {"w": np.ones(1000)}
    mp.save(tree, tmp_path, progress=True)
    mp.load(tmp_path, tree, progress=True)
    said = capsys.readouterr().err
    assert "saving" in said
    assert "loading" in said
    assert "8.0/8.0 kB" in said
    mp.save(tree, tmp_path)
    assert capsys.readouterr().err == ""


def test_a_plain_safetensors_file_is_read_as_well(tmp_path):
    mp.save({"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, "i4")}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*")
    (tmp_path / "plain.safetensors").write_bytes(file.read_bytes())
    found = run(lambda group: mp.load(tmp_path / "plain.safetensors", group=group), 2).results[1]
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mp.describe(tmp_path / "plain.safetensors").arrays["b"] == ("int32", (2,))


def test_an_empty_dict_takes_all_that_is_there(tmp_path):
    tree = {
        "w": np.arange(3.0),
        "state": {0: {"m": np.ones(2, "f4"), "step": 7}, 1: {"m": np.zeros(2, "f4"), "step": 8}},
        "more": {},
    }
    mp.save(tree, tmp_path / "saved")
    report = mp.LoadReport()
    found = mp.load(tmp_path / "saved", {"w": np.zeros(3), "state": {}, "more": {}}, report=report)
    assert list(found["state"]) == [0, 1]
    assert found["state"][0]["m"].tolist() == [1, 1]
    assert [found["state"][n]["step"] for n in (0, 1)] == [7, 8]
    assert found["w"].tolist() == [0, 1, 2]
    assert found["more"] == {}
    assert (report.kept, report.unused) == ((), ())
    assert list(mp.load(tmp_path / "saved", {})) == ["state", "w"]
    with pytest.raises(UsageError, match="an empty dict in like= takes all"):
        mp.load(tmp_path / "saved", {"w": np.zeros(3)})


@pytest.mark.parametrize("strict", [True, False])
def test_an_empty_dict_does_not_stand_for_an_array_or_a_value(tmp_path, strict):
    def program(group):
        mp.save({"a": np.arange(3.0), "n": 5, "own": mp.PerRank(np.ones(2))}, tmp_path / "tree", group)
        mp.save(np.arange(3.0), tmp_path / "leaf", group)
        fits = {"a": np.zeros(3), "n": 0, "own": mp.PerRank(np.zeros(2))}
        for path, like, said in [
            ("tree", fits | {"a": {}}, "leaf 'a': it is an array in the checkpoint, but an empty dict in like="),
            ("tree", fits | {"n": {}}, "leaf 'n': it is a value in the checkpoint, but an empty dict in like="),
            ("tree", fits | {"own": mp.PerRank({})}, "leaf 'own.[01]': it is an array in the checkpoint, but an empty dict"),
            ("leaf", {}, "leaf '': it is an array in the checkpoint, but an empty dict in like="),
        ]:
            with pytest.raises(UsageError, match=said):
                mp.load(tmp_path / path, like, group, strict=strict)
        assert not fits["a"].any()
        return mp.load(tmp_path / "tree", fits, group)["a"].tolist()

    assert run(program, 2).results == [[0.0, 1.0, 2.0]] * 2


def test_what_repeats_elements_is_not_written_to(tmp_path):
    mp.save({"w": np.arange(4.0)}, tmp_path)
    one = np.zeros(1)
    found = mp.load(tmp_path, {"w": np.lib.stride_tricks.as_strided(one, (4,), (0,))})
    assert (found["w"].tolist(), one.tolist()) == ([0.0, 1.0, 2.0, 3.0], [0.0])


# What differs between the ranks


def test_an_empty_dict_takes_what_this_rank_has_for_itself(tmp_path):
    def program(group):
        own = {"state": {0: {"m": np.full(2, float(group.rank)), "step": group.rank}}, "more": {}}
        mp.save({"w": np.ones(2), "own": mp.PerRank(own)}, tmp_path, group)
        report = mp.LoadReport()
        found = mp.load(tmp_path, {"w": np.zeros(2), "own": mp.PerRank({"state": {}, "more": {}})}, group, report=report)
        all_of_it = mp.load(tmp_path, {"w": np.zeros(2), "own": mp.PerRank({})}, group)["own"].value
        assert (report.kept, report.unused) == ((), ())
        return found["own"].value["state"][0]["m"].tolist(), all_of_it["state"][0]["step"]

    assert run(program, 2).results == [([0.0, 0.0], 0), ([1.0, 1.0], 1)]


@pytest.mark.parametrize("size", [1, 1000, 1 << 17, (1 << 18) + 5])
def test_arrays_that_differ_between_ranks_are_refused_on_every_rank(tmp_path, size, library):
    def program(group):
        changed = np.arange(float(size))
        swapped = changed.copy()
        changed[-1] += group.rank == 2
        if group.rank == 1:
            swapped[[0, -1]] = swapped[[-1, 0]]
        mp.save({"w": np.zeros(size)}, tmp_path, group)
        with mp.AsyncSaver(tmp_path / "saver", group) as saver:
            for tree in library.give(({"w": changed}, {"w": [swapped[::-1]]}))[: 1 if size == 1 else 2]:
                for save in (lambda tree: mp.save(tree, tmp_path, group), lambda tree: saver.save(tree, step=1)):
                    with pytest.raises(
                        UsageError, match=r"the content of leaf 'w.*: checksum [0-9a-f]{8} on ranks? 0.*\n.*mp.PerRank\(value\)"
                    ):
                        save(tree)
        assert not mp.load(tmp_path)["w"].any()
        mp.save({"w": changed}, tmp_path, group, check=False)

    run(program, 3)


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8"])
def test_arrays_that_have_the_same_rows_and_columns_in_another_order_differ(tmp_path, dtype):
    def program(group):
        eye = np.eye(1024, dtype=dtype)
        signs = np.ones(1 << 20, dtype)
        signs[[0, 513 * 8] if group.rank else [8, 512 * 8]] *= np.array(-1 if dtype != "uint8" else 128).astype(dtype)
        for tree in ({"w": eye[::-1] if group.rank else eye}, {"w": np.roll(eye, group.rank, 0)}, {"w": signs}):
            with pytest.raises(
                UsageError, match=r"the content of leaf 'w': checksum [0-9a-f]{8} on rank 0; checksum [0-9a-f]{8} on rank 1"
            ):
                mp.save(tree, tmp_path, group)
        mp.save({"w": eye}, tmp_path, group)

    run(program, 2)


def test_each_rank_gets_back_what_it_has_for_itself(tmp_path):
    def program(group):
        rng = np.random.default_rng(group.rank)
        rng.random(group.rank)
        own = {
            "rng": rng.bit_generator.state,
            "a": np.arange(float(group.rank)),
            "big": np.full(300_000, group.rank),
            "none": None,
        }
        tree = {"w": np.ones(2), "own": mp.PerRank(own), "number": mp.PerRank(group.rank)}
        mp.save(tree, tmp_path / "c", group)
        with mp.AsyncSaver(tmp_path / "saver", group) as saver:
            saver.save(tree, step=1).wait()
        blank = {
            "rng": np.random.default_rng(7).bit_generator.state,
            "a": np.ones(group.rank),
            "big": np.zeros(300_000, int),
            "none": None,
        }
        for path in (tmp_path / "c", tmp_path / "saver" / "1"):
            found = mp.load(path, {"w": np.zeros(2), "own": mp.PerRank(blank), "number": mp.PerRank(-1)}, group)
            assert found["own"].value["rng"] == own["rng"]
            assert found["own"].value["big"] is blank["big"]
            assert set(blank["big"].tolist()) == {group.rank}
            assert found["own"].value["a"].tolist() == list(range(group.rank))
            assert found["number"].value == group.rank
        return own["rng"]

    states = run(program, 3).results
    found = mp.load(tmp_path / "c")
    assert [found["own"][rank]["rng"] for rank in range(3)] == states
    assert found["number"] == {0: 0, 1: 1, 2: 2}


def test_values_of_each_rank_are_loaded_by_as_many_ranks(tmp_path):
    run(lambda group: mp.save({"own": mp.PerRank(10 + group.rank)}, tmp_path, group), 2)

    def program(group):
        with pytest.raises(UsageError, match=f"leaf 'own': .*2 ranks have saved it, and {group.world_size} load it"):
            mp.load(tmp_path, {"own": mp.PerRank(0)}, group)
        return mp.load(tmp_path, {"own": mp.PerRank(0)}, group, strict=False)["own"].value

    assert run(program, 3).results == [10, 11, 0]
    assert run(program, 1).results == [10]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            lambda rank: {"own": mp.PerRank(1) if rank else 1},
            "leaf 'own': the value 1 on rank 0; a value of each rank on rank 1",
        ),
        (lambda rank: {"own": mp.PerRank(1), "own.1": 2}, "two leaves have the name 'own.1'"),
        (lambda rank: {"own": mp.PerRank({"a": mp.PerRank(1)})}, "leaf 'own': the value of mp.PerRank may contain arrays"),
        (lambda rank: {"own": mp.PerRank(object() if rank else 1)}, "leaf 'own': "),
    ],
)
def test_impossible_values_of_each_rank_are_refused_on_every_rank(tmp_path, tree, said):
    def program(group):
        with pytest.raises((UsageError, DTypeError), match=said):
            mp.save(tree(group.rank), tmp_path, group)

    run(program, 2)
    assert not list(tmp_path.glob("*.safetensors"))
