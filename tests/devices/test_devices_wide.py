"""Sums of narrow floats in float32 (`backends.nccl.accumulate`): exact values, streams, graphs and memory, on fakes as in test_devices."""

from __future__ import annotations

import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices.test_devices import Other
from support.device_worlds import HYBRID, NCCL, Foreign, gpus, ranks
from support.fake_gpu import fake_cuda
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import until

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["gpus"]

WIDE: dict[str, Any] = NCCL | {"backends": {"nccl": {"accumulate": "float32"}}}
WIDE_HYBRID: dict[str, Any] = HYBRID | {"backends": HYBRID["backends"] | WIDE["backends"]}
FLOAT32 = 7
"""NCCL's number of the dtype."""

LARGE_FIRST, LARGE_LAST = [2048, 1, 1, 1], [1, 1, 1, 2048]
"""What four ranks give. Their sum, 2051, is 2052 in float16; 2048 + 1 is 2048."""


def given(group: Group, values: Any, count: int = 4, dtype: Any = np.float16) -> Any:
    return cupy.full(count, values[group.rank], dtype)


@pytest.mark.parametrize(
    ("config", "first"), [(NCCL, 2048), (WIDE, 2052), (WIDE_HYBRID, 2052)], ids=["dtype", "wide", "hybrid"]
)
def test_sums_of_float16_lose_nothing_in_any_order(gpus: FakeNccl, config: Any, first: float) -> None:
    def program(group: Group) -> None:
        for values, expected in ((LARGE_FIRST, first), (LARGE_LAST, 2052)):
            x = given(group, values)
            assert group.all_reduce(x).get().tolist() == [expected] * 4
            assert group.reduce_scatter(x).get().tolist() == [expected]
            part = group.reduce_scatter(x, counts=[3, 0, 1, 0])
            assert part.get().tolist() == [expected] * [3, 0, 1, 0][group.rank]
            reduced = group.reduce(x, root=2)
            assert (None if reduced is None else reduced.get().tolist()) == ([expected] * 4 if group.rank == 2 else None)
            assert x.get().tolist() == [values[group.rank]] * 4
            assert {part.dtype.name, (part if reduced is None else reduced).dtype.name} == {"float16"}

    ranks(program, 4, config=config)


@pytest.mark.parametrize(("config", "total", "mean"), [(NCCL, np.inf, 6.99609375), (WIDE, 60000.0, 7.0)], ids=["dtype", "wide"])
def test_sums_do_not_overflow_on_their_way_and_means_are_those_of_float32(
    gpus: FakeNccl, config: Any, total: float, mean: float
) -> None:
    def program(group: Group) -> None:
        assert group.all_reduce(given(group, [60000, 60000, -60000], 1)).get().tolist() == [total]
        # A third in float16 is a bit less than a third.
        assert group.all_reduce(given(group, [7, 7, 7], 1), "mean").get().tolist() == [mean]
        assert group.reduce_scatter(given(group, [7, 7, 7], 3), "mean").get().tolist() == [mean]

    ranks(program, 3, config=config)


def test_bfloat16_is_computed_in_float32_and_min_and_float32_as_ever(gpus: FakeNccl) -> None:
    bfloat16 = np.dtype(ml_dtypes.bfloat16)

    def program(group: Group) -> None:
        low = group.all_reduce(given(group, [256, 1, 1, 1], dtype=bfloat16))
        assert low.dtype == bfloat16
        assert low.get().astype("f4").tolist() == [260] * 4  # 259 lies between 258 and 260
        types = [call[2] for call in gpus.calls if call[0] == "all_reduce"]
        assert set(types) == {FLOAT32}
        assert group.all_reduce(given(group, [1, 2, 3, 4]), "min").get().tolist() == [1] * 4
        assert group.all_reduce(given(group, [1, 2, 3, 4], dtype=np.float64)).get().tolist() == [10] * 4

    ranks(program, 4, config=WIDE)
    assert {call[2] for call in gpus.calls if call[0] == "all_reduce"} == {FLOAT32, 6, 8}


def test_results_go_where_out_says(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = given(group, LARGE_FIRST)
        strided = cupy.zeros((4, 2), np.float16)[:, 0]
        assert group.all_reduce(x, out=strided) is strided
        assert strided.get().tolist() == [2052] * 4
        assert group.all_reduce(cupy.asarray(np.stack([x.get()] * 2, 1))[:, 1]).get().tolist() == [2052] * 4
        assert group.all_reduce(x, out=x) is x
        assert x.get().tolist() == [2052] * 4
        with pytest.raises(oa.DTypeError, match="out= has dtype float32, and the result has float16"):
            group.all_reduce(x, out=cupy.zeros(4, np.float32))
        with pytest.raises(oa.SizeMismatchError):
            group.all_reduce(x, out=cupy.zeros(3, np.float16))
        with pytest.raises(oa.LayoutError, match="must be C-contiguous"):
            group.all_reduce_async(x, out=strided)
        assert group.all_reduce(cupy.zeros((0, 3), np.float16)).shape == (0, 3)

    ranks(program, 4, config=WIDE)


def test_calls_beside_the_stream_are_in_order_with_it_and_with_each_other(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = cupy.zeros(4, np.float16)
        stream = cupy.get_current_stream()
        with cupy.held(stream.ptr):
            x += LARGE_FIRST[group.rank]  # late
            first = group.all_reduce_async(x, out=x)
            second = group.all_reduce_async(x)  # of what the first will have written
        assert second.wait().get().tolist() == [4 * 2052] * 4
        assert first.wait() is x
        for _ in range(20):  # nobody keeps what these work with
            group.all_reduce_async(given(group, LARGE_FIRST))
        group.synchronize()

    ranks(program, 4, config=WIDE)


def test_the_default_stream_of_a_thread_and_other_libraries_arrays(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with cupy.cuda.Stream.from_external(Foreign(2)):
            x = given(group, LARGE_FIRST)
            assert group.all_reduce(x).get().tolist() == [2052] * 4
        result = group.all_reduce(Other(given(group, LARGE_FIRST)))
        assert result.get().tolist() == [2052] * 4
        assert group.all_reduce_async(Other(given(group, LARGE_FIRST))).wait().get().tolist() == [2052] * 4

    ranks(program, 4, config=WIDE)


@pytest.mark.parametrize("wait", [True, False], ids=["here", "beside"])
def test_batches_take_wide_and_plain_calls(gpus: FakeNccl, wait: bool) -> None:
    def program(group: Group) -> None:
        x, y = given(group, LARGE_FIRST), given(group, LARGE_FIRST, dtype=np.float32)
        for _ in range(2):
            with group.coalesce(wait=wait) as batch:
                works = [batch.all_reduce(x), batch.all_reduce(y), batch.all_reduce(x, "max")]
            assert [work.wait().get().tolist() for work in works] == [[2052] * 4, [2051] * 4, [2048] * 4]

    ranks(program, 4, config=WIDE)


def test_graphs_hold_the_conversions_and_their_memory(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = given(group, LARGE_FIRST)
        group.all_reduce(x)
        x.get()
        result = cupy.zeros(4, np.float16)
        result.get()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            group.all_reduce(x, out=result)
            group.reduce(x, root=3)
            x += result
            graph = stream.end_capture()
            expected = [float(value) for value in LARGE_FIRST]
            for _ in range(2):
                taken = [cupy.full(4, 77, np.float32) for _ in range(4)]  # as much as the graph works with
                graph.launch(stream)
                total = float(np.float16(sum(expected)))
                expected = [float(np.float16(value + total)) for value in expected]
                assert result.get().tolist() == [total] * 4
                assert x.get().tolist() == [expected[group.rank]] * 4
                assert group.all_reduce(given(group, LARGE_FIRST)).get().tolist() == [2052] * 4
                assert [each.get().tolist() for each in taken] == [[77.0] * 4] * 4
        del graph
        group.synchronize()

    ranks(program, 4, config=WIDE)


def test_synchronize_waits_for_a_conversion_whose_call_is_known_to_have_ended(
    gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["cupy"]
    copyto, query = module.copyto, fake_cuda.event_query
    ended: set[str] = set()
    gates = [threading.Event() for _ in range(4)]

    def asked(event: int) -> int:
        status = query(event)
        if not status:
            ended.add(threading.current_thread().name)
        return status

    def late(target: Any, source: Any) -> None:
        if target.dtype == np.float16:
            rank = cupy.cuda.runtime.getDevice()
            until(lambda: f"oneaccord-gpus-{rank}" in ended)  # of the call before it, the only one
            fake_cuda.enqueue(cupy.cuda.get_current_stream().ptr, gates[rank].wait)
        copyto(target, source)

    def program(group: Group) -> None:
        out = cupy.zeros(4, np.float16)
        group.all_reduce(given(group, LARGE_FIRST), out=out)
        with pytest.raises(oa.DeadlineError):
            group.synchronize(timeout_s=0.2)
        gates[group.rank].set()
        group.synchronize()
        assert out._view.tolist() == [2052] * 4, "read without waiting for any stream"

    monkeypatch.setattr(module, "copyto", late)
    monkeypatch.setattr(fake_cuda, "event_query", asked)
    ranks(program, 4, config=WIDE)
