"""Barriers between GPUs, the communicator for libraries of one's own, and streams that a program brings."""

from __future__ import annotations

import re
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device_worlds import BACKENDS, gpu_world, gpus, mine, ranks
from support.fake_gpu import fake_cuda, fake_cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import PATIENCE_S
from support.worlds import thread_world

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["gpus"]


@BACKENDS
def test_streams_wait_for_those_of_all_ranks_and_the_host_does_not(gpus: FakeNccl, config: dict[str, Any]) -> None:
    done: list[int] = []
    have_queued, has_passed = threading.Barrier(3, timeout=20), threading.Event()

    def program(group: Group) -> list[int]:
        group.barrier(device="cuda")  # the first of its kind asks the store
        group.synchronize()
        stream, seen = fake_cupy.cuda.Stream(non_blocking=True), []
        with stream, fake_cupy.held(stream.ptr) if group.rank == 0 else stream:
            fake_cupy.enqueue(stream.ptr, lambda: done.append(group.rank))
            group.barrier(device=group.rank)
            fake_cupy.enqueue(stream.ptr, lambda: (has_passed.set(), seen.extend(done)))
            have_queued.wait()  # so that all hosts are here, while the stream of rank 0 is held
            if group.rank == 0:
                assert not has_passed.wait(0.3)
        stream.synchronize()
        return seen

    for seen in ranks(program, 3, config=config):
        assert sorted(seen) == [0, 1, 2]


def test_a_rank_in_another_call_is_a_mismatch(gpus: FakeNccl) -> None:
    def program(group: Group) -> str:
        with pytest.raises(oa.CollectiveMismatchError) as caught:
            group.barrier(device="cuda") if group.rank else group.all_reduce(mine(group))
        return str(caught.value)

    for text in ranks(program, 2):
        assert "barrier(" in text


def test_it_is_refused_in_a_capture_and_for_a_device_that_is_none(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError, match="'gpu' was given"):
            group.barrier(device="gpu")
        with pytest.raises(oa.LayoutError, match="this rank's group uses"):
            group.barrier(device=3)
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(
                oa.UnsupportedError, match=r"barrier\(device=\) cannot become part of a CUDA graph: call it before"
            ):
                group.barrier(device="cuda")
            stream.end_capture()
        group.barrier(device="cuda")
        group.barrier(device="cpu")

    ranks(program, 2)


@pytest.mark.parametrize(("backend", "size"), [("simulated", 2), ("tcp", 2), ("tcp", 1)])
def test_backends_without_gpus_wait_on_the_host(gpus: FakeNccl, backend: str, size: int) -> None:
    done: list[int] = []

    def program(group: Group) -> int:
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        with stream:
            fake_cupy.enqueue(stream.ptr, lambda: done.append(group.rank))
            group.barrier(device="cuda")
        return len(done)

    assert thread_world(program, size, backend) == [size] * size
    assert gpus.names() == []


def test_the_communicator_is_there_for_other_libraries(gpus: FakeNccl) -> None:
    def program(group: Group) -> Any:
        address = group.communicator()
        x = mine(group)
        # As a library of one's own does, which has its own binding of NCCL.
        stream = fake_cupy.cuda.get_current_stream().ptr
        binding: Any = import_module("nccl.bindings.nccl")
        binding.all_reduce(x.data.ptr, x.data.ptr, 5, 7, 0, binding.Comm(address), stream)
        half = group.split(group.rank)
        assert half is not None
        other = half.communicator()
        half.close()
        with pytest.raises(oa.ClosedError):
            half.communicator()
        return x.get().tolist(), address != other

    assert ranks(program, 2) == [([3.0] * 5, True)] * 2


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_other_backends_have_none(backend: str) -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.UnsupportedError, match='backend = "nccl" or "hybrid"'):
            group.communicator()

    for outcome in thread_world(program, 2, backend):
        assert outcome is None, outcome


def test_a_failed_group_tells_why_instead(gpus: FakeNccl) -> None:
    has_launched = threading.Event()

    def program(group: Group) -> None:
        group.all_reduce(mine(group))
        if group.rank:
            assert has_launched.wait(PATIENCE_S)
            raise RuntimeError("gone")
        has_launched.set()
        with pytest.raises(oa.AbortedError):
            group.barrier(device="cuda")
        with pytest.raises(oa.AbortedError):
            group.communicator()

    outcomes = gpu_world(program, 2)
    assert outcomes[0] is None, outcomes[0]


RECIPE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "gpu-details.md").read_text(encoding="utf-8")
OWN_STREAM = re.findall(r"^```python\n# A stream of your own\n(.*?)^```$", RECIPE, re.DOTALL | re.MULTILINE)


def test_a_stream_of_ones_own_is_used_as_the_page_shows(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        handle = fake_cuda.stream_create(is_blocking=False)  # as a library does that knows nothing of CuPy
        x = mine(group)
        weights = fake_cupy.zeros(5, np.float32)
        (text,) = OWN_STREAM
        names: dict[str, Any] = {"group": group, "gradient": x, "handle": handle, "weights": weights}
        exec(compile(text, "docs/guides/gpu-details.md", "exec"), names)
        assert ("all_reduce", 5, 7, 4, -1, handle) in gpus.calls  # the mean, on that stream
        assert weights.get().tolist() == [-0.75] * 5
        assert x.get().tolist() == [1.5] * 5
        fake_cuda.stream_destroy(handle)
        group.synchronize()

    ranks(program, 2)
