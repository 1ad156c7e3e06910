"""What collectives return beside what the conformance kit asks of every backend: counts of any kind, and the same bits everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, thread_world

import oneaccord_simulated
from oneaccord.api import Group


def check(actual: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(actual, expected, err_msg=str(what))


def test_counts_may_be_any_sequence_of_integers_on_each_rank():
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

    must(thread_world(program, 3, "simulated"))


BACKENDS = ["simulated", "tcp"]

OPS_THAT_ROUND = ["sum", "product", "min", "max", "mean", np.hypot, np.logaddexp, np.fmax]


def test_all_to_all_with_counts_of_rows_that_differ_from_rank_to_rank():
    table = np.array([[0, 0, 0], [2, 1, 0], [1, 3, 0]])

    def program(group: Group) -> None:
        rank = group.rank
        arrays = [np.arange(2 * row.sum()).reshape(-1, 2) + 100 * source for source, row in enumerate(table)]
        parts = [np.split(array, np.cumsum(row)[:-1]) for array, row in zip(arrays, table, strict=True)]
        expected = np.concatenate([part[rank] for part in parts])
        sent, received = table[rank].tolist(), table[:, rank].tolist()
        out = np.zeros_like(expected)
        assert group.all_to_all(arrays[rank], send_counts=sent, out=out) is out
        for found in (out, group.all_to_all(arrays[rank], send_counts=sent, receive_counts=received)):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)

    must(thread_world(program, 3, "simulated"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_gets_the_same_bits(backend):
    """Rough numbers, zeros of both signs, infinities and NaNs; some ranks work in place and some do not."""

    def program(group: Group) -> list[bytes]:
        rng = np.random.default_rng(group.rank)
        return [bits for op in OPS_THAT_ROUND for bits in rounded(group, op, rng)]

    def rounded(group: Group, op: Any, rng: np.random.Generator) -> Iterator[bytes]:
        dtypes = [np.float16, np.float32, np.float64]
        if op in ("sum", "product", "mean"):
            dtypes += [np.complex64, np.complex128]
        is_first = (backend, group.world_size) == ("simulated", 3)
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

    for size in (3, 8) if backend == "simulated" else (2, 3):
        results = must(thread_world(program, size, backend))
        assert all(result == results[0] for result in results), size


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_where_numpy_rounds_by_memory_layout(backend):
    """NumPy rounds the product of two complex numbers differently when it goes where one of them was."""

    def program(group: Group) -> list[bytes]:
        rng = np.random.default_rng(group.rank)
        numbers = rng.standard_normal((100, 2)).view(np.complex128)
        return [
            group.all_reduce(z, "product", out=z if i % 2 and group.rank == 1 else None).tobytes()
            for i, z in enumerate(numbers)
        ]

    for size in (2, 3):
        results = must(thread_world(program, size, backend))
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

    assert len(set(oneaccord_simulated.run(program, len(arrays)).results)) == 1


@pytest.mark.parametrize("backend", [*BACKENDS, "shm"])
@pytest.mark.filterwarnings("error")
def test_what_a_program_says_about_floating_point_errors_does_not_hold_for_reductions(backend: str) -> None:
    """Sums that overflow are infinite, and means that underflow are 0, of few numbers and of many, at once and in the background."""

    def program(group: Group) -> None:
        with np.errstate(all="raise"):
            for dtype in (np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
                limits = ml_dtypes.finfo(dtype)
                for count in (1, 3, 2_000, 300_000):
                    large, small = np.full(count, limits.max, dtype), np.full(count, limits.smallest_subnormal, dtype)
                    for _ in range(2):  # the second one is a call that was made before
                        for total in (
                            group.all_reduce(large),
                            group.reduce_scatter(large, counts=[count, 0]),
                            group.all_reduce_async(large).wait(),
                        ):
                            assert np.isinf(total.astype(np.complex64)).all(), (dtype, count)
                        mean = group.all_reduce(np.where(group.rank == 0, small, dtype(0)).astype(dtype), "mean")
                        assert not mean.astype(np.complex64).any(), (dtype, count)
            assert np.isinf(group.all_reduce(np.full(3, 1e300), np.multiply)).all()
            assert np.isinf(group.scan(np.full(3, 1.7e308))).all() == (group.rank == 1)

    must(thread_world(program, 2, backend))
