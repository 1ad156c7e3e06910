"""What ``oneaccord bench`` takes for right: exact in every dtype and for every reduction, and what is not right is seen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oneaccord.errors import DTypeError
from oneaccord_lab.bench.cases import Arrays, Case, parse_dtype
from oneaccord_lab.bench.plan import BENCHMARKS, round_size

Array = npt.NDArray[Any]

COMBINE = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "uint8", "int32", "uint64"]
ARITHMETIC = ["sum", "product"]


def job(benchmark: str, world_size: int, nbytes: int, dtype: Any, op: str = "sum") -> tuple[list[Case], list[Arrays]]:
    dtype = np.dtype(dtype)
    size = round_size(benchmark, nbytes, world_size, dtype.itemsize)
    cases = [Case(benchmark, rank, world_size, size, dtype, op) for rank in range(world_size)]
    return cases, [case.arrays(np.empty) for case in cases]


def perform(benchmark: str, op: str, arrays: list[Arrays]) -> None:
    """Do what the collective promises, one operand after the other in the dtype itself."""
    size = len(arrays)
    given = [each.given for each in arrays]

    def total(ranks: int = size) -> Array:
        result: Any = given[0]
        for other in given[1:ranks]:
            result = COMBINE[op](result, other)
        return result / np.array(size).astype(result.dtype) if op == "mean" else result

    results: list[Any]
    match benchmark:
        case "all_reduce":
            results = [total()] * size
        case "reduce":
            results = [total()]
        case "broadcast":
            results = [given[0]] * size
        case "all_gather":
            results = [np.concatenate(given)] * size  # type: ignore[arg-type]
        case "gather":
            results = [np.concatenate(given)]  # type: ignore[arg-type]
        case "scatter":
            results = np.split(given[0], size)  # type: ignore[arg-type]
        case "reduce_scatter":
            results = np.split(total(), size)
        case "all_to_all":
            blocks = [np.split(each, size) for each in given]  # type: ignore[arg-type]
            results = [np.concatenate([blocks[sender][rank] for sender in range(size)]) for rank in range(size)]
        case "scan":
            results = [total(rank + 1) for rank in range(size)]
        case "exscan":
            results = [0, *(total(rank) for rank in range(1, size))]
        case "sendrecv":
            results = [given[rank - 1] for rank in range(size)]
        case "pingpong":
            results = [given[1], given[0]]
        case _:
            results = []
    for target, result in zip(arrays, results, strict=False):
        assert target.result is not None
        target.result[...] = result


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("nbytes", [8, 4000, 1021 * 256 * 4 + 4000])
def test_what_a_collective_promises_is_right(benchmark: str, world_size: int, nbytes: int) -> None:
    cases, arrays = job(benchmark, world_size, nbytes, "float32")
    perform(benchmark, "sum", arrays)
    assert [case.fault(own) for case, own in zip(cases, arrays, strict=True)] == [""] * world_size


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *((dtype, op) for dtype in (*FLOATS, *INTEGERS) for op in ARITHMETIC),
        *((dtype, "mean") for dtype in FLOATS),
        *((dtype, op) for dtype in ("float16", "bfloat16", "float32", *INTEGERS, "bool") for op in ("min", "max")),
        *((dtype, op) for dtype in (*INTEGERS, "bool") for op in ("and", "or", "xor")),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_reduction_is_exact_in_every_dtype(dtype: str, op: str, world_size: int) -> None:
    cases, arrays = job("reduce_scatter", world_size, 4096, parse_dtype(dtype), op)
    perform("reduce_scatter", op, arrays)
    assert [case.fault(own) for case, own in zip(cases, arrays, strict=True)] == [""] * world_size


@pytest.mark.parametrize("benchmark", [name for name in BENCHMARKS if name != "barrier"])
def test_a_result_that_nobody_wrote_is_wrong(benchmark: str) -> None:
    cases, arrays = job(benchmark, 2, 4096, "float32")
    perform(benchmark, "sum", arrays)
    for case, own in zip(cases, arrays, strict=True):
        case.spoil(own)
    faults = [case.fault(own) for case, own in zip(cases, arrays, strict=True)]
    silent = {"reduce": [1], "gather": [1], "broadcast": [0], "exscan": [0]}.get(benchmark, [])
    assert [rank for rank in range(2) if not faults[rank]] == silent


def test_a_fault_says_where_what_and_how_many() -> None:
    cases, arrays = job("all_reduce", 2, 1021 * 256 * 4 + 4096, "int32")
    perform("all_reduce", "sum", arrays)
    result = arrays[0].result
    assert result is not None
    right = int(result[150_000])
    result[[150_000, 1021 * 256 + 7]] = -1
    assert cases[0].fault(arrays[0]) == f"element 150000 is -1; expected {right}; 2 of 262400 elements are wrong"


@pytest.mark.parametrize("length", [1, 2, 4, 256, 4096])
def test_blocks_that_change_places_are_seen(length: int) -> None:
    cases, arrays = job("all_to_all", 4, length * 4 * 4, "float32")
    perform("all_to_all", "sum", arrays)
    result = arrays[1].result
    assert result is not None
    blocks = result.reshape(4, length)
    blocks[[0, 2]] = blocks[[2, 0]]
    assert cases[1].fault(arrays[1])


def test_every_rank_gives_something_else() -> None:
    _, arrays = job("all_reduce", 8, 64, "float16")
    assert len({own.given.tobytes() for own in arrays if own.given is not None}) == 8


def test_only_a_broadcast_works_in_place_and_its_root_keeps_what_it_gives() -> None:
    cases, arrays = job("broadcast", 2, 64, "float32")
    assert all(own.given is own.result for own in arrays)
    cases[0].spoil(arrays[0])
    assert not cases[0].fault(arrays[0])
    _, others = job("all_reduce", 2, 64, "float32")
    assert all(own.given is not own.result for own in others)


def test_dtypes_are_named_as_numpy_and_ml_dtypes_do() -> None:
    assert parse_dtype("float16") == np.float16
    assert parse_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    with pytest.raises(DTypeError, match="there is no dtype 'float12': give one such as float32"):
        parse_dtype("float12")
