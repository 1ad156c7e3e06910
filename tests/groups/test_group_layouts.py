"""Arrays as they lie in memory: no element ever changes its place, whatever the order, strides or overlap."""

from __future__ import annotations

import array as stdlib_array
import itertools

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group

SIZE = 3
SHAPE = (6, 4, 2)


def _misaligned(values: np.ndarray) -> np.ndarray:
    memory = np.zeros(values.nbytes + 1, np.uint8)
    view = memory[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


LAYOUTS = {
    "C order": lambda values: values.copy(),
    "Fortran order": np.asfortranarray,
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "axes swapped": lambda values: np.ascontiguousarray(values.swapaxes(0, 1)).swapaxes(0, 1),
    "every other row": lambda values: np.repeat(values, 2, axis=0)[::2],
    "a column of a wider array": lambda values: np.concatenate([values, values], axis=2)[:, :, :2],
    "negative strides": lambda values: np.ascontiguousarray(values[::-1, :, ::-1])[::-1, :, ::-1],
    "misaligned": _misaligned,
}


def values_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 100, SHAPE).astype(np.float64)


def calls(group: Group, array: np.ndarray, root: int = 1) -> dict[str, tuple]:
    """Return, for each collective: the method, its arguments, and what this rank must get."""
    rank, everybody = group.rank, [values_of(r) for r in range(SIZE)]
    rows = SHAPE[0] // SIZE
    mine = slice(rank * rows, (rank + 1) * rows)
    total, joined = sum(everybody), np.concatenate(everybody)
    at_root = rank == root
    return {
        "all_reduce": (group.all_reduce, (array,), total),
        "reduce": (group.reduce, (array, "sum", root), total if at_root else None),
        "broadcast": (group.broadcast, (array, root), everybody[root]),
        "all_gather": (group.all_gather, (array,), joined),
        "gather": (group.gather, (array, root), joined if at_root else None),
        "scatter": (group.scatter, (array if at_root else None, root), everybody[root][mine]),
        "reduce_scatter": (group.reduce_scatter, (array,), total[mine]),
        "all_to_all": (group.all_to_all, (array,), np.concatenate([values[mine] for values in everybody])),
        "scan": (group.scan, (array,), sum(everybody[: rank + 1])),
        "exscan": (group.exscan, (array,), sum(everybody[:rank], np.zeros_like(total))),
        "sendrecv": (group.sendrecv, (array, (rank + 1) % SIZE, (rank - 1) % SIZE), everybody[rank - 1]),
    }


COLLECTIVES = [
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("scan", "exscan", "sendrecv"),
]


def test_in_place(world):
    """``out`` may be the input itself, wherever both have one shape."""

    def program(group: Group) -> None:
        for layout, name in itertools.product(LAYOUTS, COLLECTIVES):
            array = LAYOUTS[layout](values_of(group.rank))
            method, arguments, expected = calls(group, array)[name]
            if expected is None:
                assert method(*arguments) is None
            elif expected.shape == array.shape:
                assert method(*arguments, out=array) is array
                np.testing.assert_array_equal(array, expected, err_msg=name)
            else:
                method(*arguments)

    world(program, SIZE)


def test_out_that_overlaps_the_input(world):
    """The result is right as if there were no overlap."""

    def program(group: Group) -> None:
        for name, shift in itertools.product(COLLECTIVES, (-5, -1, 1, 5)):
            overlap(group, name, shift)

    def overlap(group: Group, name: str, shift: int) -> None:
        memory = np.zeros(SIZE * values_of(0).size + 20)
        count = values_of(0).size
        array = memory[10 : 10 + count].reshape(SHAPE)
        array[...] = values_of(group.rank)
        method, arguments, expected = calls(group, array)[name]
        if expected is None:
            assert method(*arguments) is None
            return
        out = memory[10 + shift : 10 + shift + expected.size].reshape(expected.shape)
        assert method(*arguments, out=out) is out
        np.testing.assert_array_equal(out, expected)

    world(program, SIZE)


def test_large_in_place_and_overlapping_arrays(world):
    """As above where messages are cut into pieces and algorithms work on segments."""
    count = 100_002

    def program(group: Group) -> None:
        rank = group.rank
        memory = np.zeros(count + 1)
        everybody = [np.arange(count) % (r + 5) * 1.0 for r in range(SIZE)]
        for start in (0, 1):
            source, out = memory[:count], memory[start : start + count]
            source[:] = everybody[rank]
            np.testing.assert_array_equal(group.all_reduce(source, out=out), sum(everybody))
            source[:] = everybody[rank]
            np.testing.assert_array_equal(group.broadcast(source, 2, out=out), everybody[2])
            source[:] = everybody[rank]
            group.all_to_all(source, out=out)
            third = count // SIZE
            np.testing.assert_array_equal(
                out, np.concatenate([other[rank * third : (rank + 1) * third] for other in everybody])
            )
            source[:] = everybody[rank]
            np.testing.assert_array_equal(
                group.reduce_scatter(source, out=out[:third]), sum(everybody)[rank * third : (rank + 1) * third]
            )
            source[:] = everybody[rank]
            np.testing.assert_array_equal(group.sendrecv(source, (rank + 1) % 3, (rank - 1) % 3, out=out), everybody[rank - 1])

    world(program, SIZE)


class WithArray:
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.array([1.0, 2.0])


class WithDlpack:
    def __dlpack__(self, **options: object) -> object:
        return np.array([1.0, 2.0]).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


READABLE = [
    (2, np.array(4)),
    (2.5, np.array(5.0)),
    (1 + 2j, np.array(2 + 4j)),
    (np.float32(1.5), np.array(3, np.float32)),
    (np.int8(3), np.array(6, np.int8)),
    ([[1, 2], [3, 4]], np.array([[2, 4], [6, 8]])),
    ((1.0, 2.0), np.array([2.0, 4.0])),
    (range(3), np.array([0, 2, 4])),
    ([], np.array([])),
    (stdlib_array.array("f", [1, 2]), np.array([2, 4], np.float32)),
    (bytearray(b"\1\2"), np.array([2, 4], np.uint8)),
    (memoryview(b"\1\2"), np.array([2, 4], np.uint8)),
    (WithArray(), np.array([2.0, 4.0])),
    (WithDlpack(), np.array([2.0, 4.0])),
    (np.ma.array([1, 2]), np.array([2, 4])),
    (np.broadcast_to(np.array([7]), (3,)), np.array([14, 14, 14])),
]


def test_what_numpy_can_read_as_an_array(world):
    def program(group: Group) -> None:
        for value, expected in READABLE:
            result = group.all_reduce(value)
            assert type(result) is np.ndarray, value
            assert result.dtype == expected.dtype, value
            assert result.shape == expected.shape, value
            np.testing.assert_array_equal(result, expected)

    world(program, 2)


def test_a_masked_array_is_refused_where_its_mask_says_something(world):
    def program(group: Group) -> None:
        with pytest.raises(oa.LayoutError, match=r"masked array.*filled"):
            group.all_reduce(np.ma.array([1, 2], mask=[True, False]))
        group.barrier()

    world(program, 2)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", [np.matrix, np.memmap, np.recarray, np.ma.MaskedArray])
def test_out_of_a_subclass(world, kind, tmp_path):
    """Where the subclass is the same memory in the same shape, it is filled; those that are more are refused in words."""

    def program(group: Group) -> None:
        array = np.arange(6.0).reshape(2, 3) * (group.rank + 1)
        if kind is np.memmap:
            out: np.ndarray = np.memmap(tmp_path / f"{group.rank}", np.float64, "w+", shape=(2, 3))
        elif kind is np.ma.MaskedArray:
            out = np.ma.array(np.zeros((2, 3)))
        else:
            out = np.zeros((2, 3)).view(kind)
        if kind in (np.ma.MaskedArray, np.matrix):
            with pytest.raises(oa.LayoutError, match=r"out= must be a NumPy array.*np\.asarray"):
                group.all_reduce(array, out=out)
        else:
            assert group.all_reduce(array, out=out) is out
            np.testing.assert_array_equal(np.asarray(out), 6 * np.arange(6.0).reshape(2, 3))
        group.barrier()

    world(program, 3)
