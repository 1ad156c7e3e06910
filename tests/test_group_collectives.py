"""What each collective returns, against NumPy, for every world size, root, op and count."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands_simulated
from manyhands.api import Group

WORLDS = (1, 2, 3, 8)
SHAPES = ((), (0,), (1,), (3, 0), (2, 3, 5), (1001,))
INTEGER_OPS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    **{ufunc: ufunc for ufunc in (np.add, np.multiply, np.minimum, np.maximum, np.bitwise_and, np.gcd, np.lcm)},
}
FLOAT_OPS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    **{ufunc: ufunc for ufunc in (np.add, np.maximum, np.minimum, np.fmax, np.fmin)},
}


@functools.lru_cache(4096)
def given_by(rank: int, shape: tuple[int, ...], dtype: type = np.int64, salt: int = 0) -> np.ndarray:
    """Return what a rank gives: small whole numbers, so that every sum and product is exact, in any order; nobody may write there."""
    numbers = np.asarray(np.random.default_rng((rank, salt)).integers(1, 8, shape)).astype(dtype)
    numbers.flags.writeable = False
    return numbers


def of_all(size: int, shape: tuple[int, ...], dtype: type = np.int64) -> list[np.ndarray]:
    return [given_by(rank, shape, dtype) for rank in range(size)]


def counts_for(size: int) -> list[tuple[int, ...]]:
    return [(), (0,), (1,), (size - 1,), (size + 1,), (7 * size + 3,), *SHAPES[3:]]


def check(actual: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(actual, expected, err_msg=str(what))


@pytest.mark.parametrize("size", WORLDS)
def test_all_reduce_combines_element_by_element(world, size):
    def program(group: Group) -> None:
        for turn, shape in enumerate(counts_for(size)):
            for dtype, ops in ((np.int64, INTEGER_OPS), (np.float64, FLOAT_OPS)):
                arrays = of_all(size, shape, dtype)
                mine = arrays[group.rank].copy()
                # Each with each in one world; in the others, each op and each shape has its turns.
                for op, ufunc in ops.items() if (world.backend, size) == ("simulated", 3) else list(ops.items())[turn % 3 :: 3]:
                    expected = np.asarray(functools.reduce(ufunc, arrays))
                    check(group.all_reduce(mine, op), expected, (shape, op))
                np.testing.assert_array_equal(mine, arrays[group.rank], err_msg="the input is as it was")

    world(program, size)


@pytest.mark.parametrize("size", WORLDS)
def test_mean_is_the_sum_divided_by_the_number_of_ranks(world, size):
    def program(group: Group) -> None:
        for shape in counts_for(size):
            for dtype in (np.float32, np.float64, np.complex128):
                arrays = of_all(size, shape, dtype)
                expected = np.asarray(sum(arrays[1:], arrays[0]) / dtype(size))
                check(group.all_reduce(arrays[group.rank], "mean"), expected, shape)
                root = len(shape) % size
                reduced = group.reduce(arrays[group.rank], "mean", root)
                if group.rank == root:
                    check(reduced, expected, shape)
                else:
                    assert reduced is None

    world(program, size)


@pytest.mark.parametrize("size", WORLDS)
def test_rooted_collectives(world, size):
    def program(group: Group) -> None:
        rank = group.rank
        for root in sorted({0, size // 2, size - 1}):
            for index, shape in enumerate(counts_for(size)):
                arrays = of_all(size, shape)
                # Each op has its turn, with some root and some shape.
                op, ufunc = list(INTEGER_OPS.items())[(root * len(counts_for(size)) + index) % len(INTEGER_OPS)]
                result = group.reduce(arrays[rank], op, root)
                if rank == root:
                    check(result, np.asarray(functools.reduce(ufunc, arrays)), (root, shape, op))
                else:
                    assert result is None
                check(group.broadcast(arrays[rank], root), arrays[root], (root, shape))
                gathered = group.gather(arrays[rank], root)
                if rank == root:
                    check(gathered, np.concatenate([np.atleast_1d(array) for array in arrays]), (root, shape))
                else:
                    assert gathered is None
            for rest in ((), (0,), (3,), (2, 1, 3)):
                for rows in (0, 1, 5):
                    whole = given_by(root, (rows * size, *rest))
                    part = group.scatter(whole if rank == root else None, root)
                    check(part, whole[rank * rows : (rank + 1) * rows], (root, rows, rest))

    world(program, size)


@pytest.mark.parametrize("size", WORLDS)
def test_collectives_along_axis_0(world, size):
    def program(group: Group) -> None:
        rank = group.rank
        for shape in counts_for(size):
            arrays = of_all(size, shape)
            check(group.all_gather(arrays[rank]), np.concatenate([np.atleast_1d(array) for array in arrays]), shape)
        for rest in ((), (0,), (3,), (2, 1, 3)):
            for rows in (0, 1, 5):
                arrays = of_all(size, (rows * size, *rest))
                mine = slice(rank * rows, (rank + 1) * rows)
                exchanged = np.concatenate([array[mine] for array in arrays])
                check(group.all_to_all(arrays[rank]), exchanged, (rows, rest))
                for op, ufunc in list(INTEGER_OPS.items())[rows % 3 :: 3]:  # each op has its turn
                    check(group.reduce_scatter(arrays[rank], op), functools.reduce(ufunc, arrays)[mine], (rows, rest, op))

    world(program, size)


@pytest.mark.parametrize("size", WORLDS)
def test_uneven_counts_with_zeros(world, size):
    lists = [
        tuple(range(size)),
        tuple(range(size, 0, -1)),
        tuple((rank + 1) % 2 * 7 for rank in range(size)),
        (0,) * (size - 1) + (5,),
        (0,) * size,
    ]

    def program(group: Group) -> None:
        rank = group.rank
        for counts in lists:
            starts = list(accumulate(counts, initial=0))
            mine = slice(starts[rank], starts[rank + 1])
            for rest in ((), (3,)):
                blocks = [given_by(r, (counts[r], *rest)) for r in range(size)]
                joined = np.concatenate(blocks)
                check(group.all_gather(blocks[rank], counts=counts), joined, counts)
                check(group.all_gather(blocks[rank], uneven=True), joined, counts)
                arrays = of_all(size, (sum(counts), *rest))
                check(group.reduce_scatter(arrays[rank], counts=counts), sum(arrays)[mine], counts)
                for root in {0, size // 2, size - 1}:
                    gathered = group.gather(blocks[rank], root, counts=counts)
                    if rank == root:
                        check(gathered, joined, counts)
                    else:
                        assert gathered is None
                    out = np.zeros_like(joined)
                    gathered = group.gather(blocks[rank], root, uneven=True, out=out)
                    assert gathered is (out if rank == root else None)
                    check(out, joined if rank == root else np.zeros_like(joined), counts)
                    check(
                        group.scatter(arrays[rank] if rank == root else None, root, counts=counts), arrays[root][mine], counts
                    )

    world(program, size)


@pytest.mark.parametrize("size", WORLDS)
def test_all_to_all_with_counts_that_differ_from_rank_to_rank(world, size):
    table = np.random.default_rng(size).integers(0, 4, (size, size))
    table[0] = 0
    table[:, -1] = 0

    def program(group: Group) -> None:
        rank = group.rank
        for rest in ((), (2,)):
            arrays = [given_by(r, (int(table[r].sum()), *rest)) for r in range(size)]
            parts = [np.split(array, np.cumsum(table[r])[:-1]) for r, array in enumerate(arrays)]
            expected = np.concatenate([parts[r][rank] for r in range(size)])
            sent, received = table[rank].tolist(), table[:, rank].tolist()
            check(group.all_to_all(arrays[rank], send_counts=sent), expected)
            check(group.all_to_all(arrays[rank], send_counts=sent, receive_counts=received), expected)
            out = np.zeros_like(expected)
            assert group.all_to_all(arrays[rank], send_counts=sent, out=out) is out
            check(out, expected)

    world(program, size)


def test_counts_may_be_any_sequence_of_integers_on_each_rank(world):
    """What matters is the numbers: a list on one rank and a NumPy array on another are the same counts."""
    counts = [1, 0, 3]

    def program(group: Group) -> None:
        rank = group.rank
        whole = np.arange(4)
        mine = slice([0, 1, 1][rank], [1, 1, 4][rank])
        for kind in (list, tuple, np.array):
            own = kind(counts) if rank == 1 else counts
            check(group.all_gather(whole[mine], counts=own), whole)
            check(group.reduce_scatter(whole, counts=own), 3 * whole[mine])
            for root in range(3):
                gathered = group.gather(whole[mine], root, counts=own)
                assert gathered is None or gathered.tolist() == whole.tolist()
                check(group.scatter(whole if rank == root else None, root, counts=own), whole[mine])
            sent = [kind([4, 0, 0]), kind([0, 2, 2]), kind([1, 1, 2])][rank]
            received = [kind([4, 0, 1]), kind([0, 2, 1]), kind([0, 2, 2])][rank]
            assert len(group.all_to_all(whole, send_counts=sent, receive_counts=received)) == sum(received)

    world(program, 3)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_arrays_of_more_than_a_piece(world, size):
    """1.3 MiB from each rank: messages are cut into pieces, and every algorithm for large arrays has its turn."""
    count = 170_003

    def program(group: Group) -> None:
        rank, root = group.rank, size - 1
        arrays = of_all(size, (count,), np.float64)
        total = sum(arrays)
        check(group.all_reduce(arrays[rank]), total)
        reduced = group.reduce(arrays[rank], root=root)
        assert (reduced is None) == (rank != root)
        if reduced is not None:
            check(reduced, total)
        check(group.broadcast(arrays[rank], root), arrays[root])
        check(group.all_gather(arrays[rank]), np.concatenate(arrays))
        gathered = group.gather(arrays[rank], root)
        if gathered is not None:
            check(gathered, np.concatenate(arrays))
        counts = [count - 2 * size] + [1] * (size - 2) + [size + 2]
        starts = [0, *accumulate(counts)]
        mine = slice(starts[rank], starts[rank + 1])
        check(group.scatter(arrays[rank] if rank == root else None, root, counts=counts), arrays[root][mine])
        check(group.reduce_scatter(arrays[rank], counts=counts), total[mine])
        rolled = counts[-rank:] + counts[:-rank]
        parts = [np.split(arrays[r], np.cumsum(counts[-r:] + counts[:-r])[:-1])[rank] for r in range(size)]
        check(group.all_to_all(arrays[rank], send_counts=rolled), np.concatenate(parts))

    world(program, size)


@pytest.mark.parametrize("size", [2, 5])
def test_a_barrier_holds_every_rank_until_the_last_has_come(world, size):
    entered: list[int] = []

    def program(group: Group) -> None:
        for last in range(size):
            if group.rank == last:
                # Everybody else is in the barrier or on the way to it, and nobody may get out of it before this rank has come.
                for other in range(size):
                    if other != last:
                        group.recv(other)
                assert entered.count(last) == 0
            else:
                group.send(0, last)
            if group.rank == last:
                entered.append(last)
            group.barrier()
            assert entered.count(last) == 1

    world(program, size)


def test_a_number_is_an_array_without_dimensions(world):
    def program(group: Group) -> None:
        number = np.float32(group.rank + 1)
        check(group.all_gather(number), np.array([1, 2, 3], np.float32))
        check(group.all_reduce(number), np.array(6, np.float32))
        check(group.broadcast(number), np.array(1, np.float32))
        for found, expected in ((group.gather(number), [1, 2, 3]), (group.reduce(number), 6)):
            assert (found is None) == (group.rank != 0)
            if found is not None:
                check(found, np.array(expected, np.float32))

    world(program, 3)


OPS_THAT_ROUND = ["sum", "product", "min", "max", "mean", np.hypot, np.logaddexp, np.fmax]


def test_every_rank_gets_the_same_bits(world):
    """Rough numbers, zeros of both signs, infinities and NaNs; some ranks work in place and some do not."""

    def program(group: Group) -> list[bytes]:
        rng = np.random.default_rng(group.rank)
        return [bits for op in OPS_THAT_ROUND for bits in rounded(group, op, rng)]

    def rounded(group: Group, op: Any, rng: np.random.Generator) -> Iterator[bytes]:
        dtypes = [np.float16, np.float32, np.float64]
        if op in ("sum", "product", "mean"):
            dtypes += [np.complex64, np.complex128]
        is_first = (world.backend, group.world_size) == ("simulated", 3)
        # Each with each in one world; in the others, each has its turn.
        for dtype in dtypes if is_first else [dtypes[OPS_THAT_ROUND.index(op) % len(dtypes)]]:
            for count in (1, 3, 300, *((40_001,) if op == "sum" else ())):
                for in_place in (False, group.rank % 2 == 1):
                    array = rng.standard_normal(count) * 10.0 ** rng.integers(-4, 5, count)
                    if np.dtype(dtype).kind == "c":
                        array = array + 1j * rng.standard_normal(count)
                    for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
                        array[rng.random(count) < 0.05] = value
                    with np.errstate(all="ignore"):
                        array = array.astype(dtype)
                        yield group.all_reduce(array, op, out=array if in_place else None).tobytes()

    for size in (3, 8) if world.backend == "simulated" else (2, 3):
        results = world(program, size)
        assert all(result == results[0] for result in results), size


def test_the_same_bits_where_numpy_rounds_by_memory_layout(world):
    """NumPy rounds the product of two complex numbers differently when it goes where one of them was."""

    def program(group: Group) -> list[bytes]:
        rng = np.random.default_rng(group.rank)
        numbers = rng.standard_normal((100, 2)).view(np.complex128)
        return [
            group.all_reduce(z, "product", out=z if i % 2 and group.rank == 1 else None).tobytes()
            for i, z in enumerate(numbers)
        ]

    for size in (2, 3):
        results = world(program, size)
        assert all(result == results[0] for result in results), size


@settings(max_examples=30)
@given(
    arrays=st.integers(1, 40).flatmap(
        lambda count: st.lists(st.lists(st.floats(width=32), min_size=count, max_size=count), min_size=2, max_size=6)
    ),
    op=st.sampled_from(["sum", "mean", "product", "min", "max"]),
)
def test_the_same_bits_for_any_floats(arrays, op):
    def program(group: Group) -> bytes:
        with np.errstate(all="ignore"):
            return group.all_reduce(np.array(arrays[group.rank], np.float32), op).tobytes()

    assert len(set(manyhands_simulated.run(program, len(arrays)).results)) == 1


def test_ufuncs_that_round(world):
    def program(group: Group) -> None:
        arrays = [np.random.default_rng(rank).random(100) for rank in range(group.world_size)]
        for op in (np.hypot, np.logaddexp):
            np.testing.assert_allclose(group.all_reduce(arrays[group.rank], op), functools.reduce(op, arrays), rtol=1e-12)

    world(program, 3)
