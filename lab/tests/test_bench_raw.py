"""mpi4py called without oneaccord, as ``mpi+raw``: which function of MPI each call is, and what MPI cannot do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oneaccord.errors import UnsupportedError
from oneaccord_lab.bench.cases import Case
from oneaccord_lab.bench.plan import BENCHMARKS
from oneaccord_lab.bench.raw import RawMpi


class World:
    """MPI's world, which writes down what it is asked for."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            self.calls.append((name, *arguments, options))

        return call


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    mpi, dtlib = ModuleType("mpi4py.MPI"), ModuleType("mpi4py.util.dtlib")
    world = World()

    def from_numpy_dtype(dtype: Any) -> str:
        if dtype == np.longdouble:
            raise ValueError(dtype)
        return "none" if dtype == np.float16 else "some"

    monkeypatch.setattr(mpi, "COMM_WORLD", world, raising=False)
    monkeypatch.setattr(mpi, "DATATYPE_NULL", "none", raising=False)
    monkeypatch.setattr(mpi, "SUM", "SUM", raising=False)
    monkeypatch.setattr(dtlib, "from_numpy_dtype", from_numpy_dtype, raising=False)
    for module in (mpi, dtlib):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("mpi4py", "mpi4py.util"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    return world


def test_each_benchmark_is_one_function_of_mpi_on_the_arrays_themselves(world: World) -> None:
    raw: Any = RawMpi(1, 2, np.dtype(np.float32))
    arrays: dict[str, Any] = {}
    for benchmark in BENCHMARKS:
        case = Case(benchmark, 1, 2, 64, np.dtype(np.float32))
        arrays[benchmark] = own = case.arrays(np.empty)
        case.call(raw, own)()

    def pair(name: str) -> tuple[Any, Any]:
        return arrays[name].given, arrays[name].result

    ping = arrays["pingpong"]
    expected = [
        ("Allreduce", *pair("all_reduce"), "SUM", {}),
        ("Allgather", *pair("all_gather"), {}),
        ("Reduce_scatter_block", *pair("reduce_scatter"), "SUM", {}),
        ("Bcast", arrays["broadcast"].result, 0, {}),
        ("Reduce", *pair("reduce"), "SUM", 0, {}),
        ("Gather", *pair("gather"), 0, {}),
        ("Scatter", *pair("scatter"), 0, {}),
        ("Alltoall", *pair("all_to_all"), {}),
        ("Scan", *pair("scan"), "SUM", {}),
        ("Exscan", *pair("exscan"), "SUM", {}),
        ("Sendrecv", arrays["sendrecv"].given, 0, {"recvbuf": arrays["sendrecv"].result, "source": 0}),
        ("Recv", ping.result, 0, {}),
        ("Send", ping.given, 0, {}),
        ("Barrier", {}),
    ]

    def shown(calls: list[tuple[Any, ...]]) -> set[str]:
        return {" ".join(str(id(part)) if isinstance(part, np.ndarray) else str(part) for part in call[:-1]) for call in calls}

    assert shown(world.calls) == shown(expected)
    [options] = [call[-1] for call in world.calls if call[0] == "Sendrecv"]
    assert options["recvbuf"] is arrays["sendrecv"].result
    assert options["source"] == 0


@pytest.mark.parametrize(("dtype", "message"), [(np.longdouble, "MPI has no"), (np.float16, "this MPI has no float16")])
def test_a_dtype_that_mpi_lacks_is_refused(world: World, dtype: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        RawMpi(1, 2, np.dtype(dtype))


def test_a_reduction_that_mpi_lacks_is_refused(world: World) -> None:
    raw = RawMpi(1, 2, np.dtype(np.float32))
    with pytest.raises(UnsupportedError, match="MPI has no reduction 'mean'"):
        raw.all_reduce(np.ones(1), "mean", out=np.ones(1))
    assert not world.calls


def test_a_world_that_counts_otherwise_is_refused(world: World) -> None:
    with pytest.raises(UnsupportedError, match="MPI says that this is rank 1 of 2, but oneaccord says rank 0 of 2"):
        RawMpi(0, 2, np.dtype(np.float32))
