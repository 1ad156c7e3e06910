"""Ranks with GPUs that are made of threads and NumPy memory, under the real plugins, for tests on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import fake_cupy
from fake_gpu.fake_nccl import FakeNccl
from worlds import must, thread_world

from manyhands.api import Group
from manyhands_nccl import plugin
from manyhands_nccl._nccl import wait_for_ends

__all__ = ["BACKENDS", "HYBRID", "NCCL", "gpu_world", "gpus", "mine", "ranks"]

NCCL = {"backend": "nccl"}
HYBRID = {"backend": "hybrid", "ranks_per_host": 4, "backends": {"hybrid": {"routes": {"cpu": "tcp", "cuda": "nccl"}}}}
BACKENDS = pytest.mark.parametrize("config", [NCCL, HYBRID], ids=["nccl", "hybrid"])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """A machine with four GPUs, CuPy and NCCL."""
    fake = FakeNccl()
    fake.install(monkeypatch)
    fake_cupy.install(monkeypatch, 4)
    monkeypatch.setattr(plugin, "_DRIVER", None)  # this program itself, which is always there
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    yield fake
    fake.release()
    wait_for_ends()
    assert fake.open_communicators() == 0
    fake_cupy.shut_down()
    assert fake.crimes == []


def gpu_world(program: Callable[[Group], Any], world_size: int, **options: Any) -> list[Any]:
    """Run ``program`` on ranks that are threads, each with a GPU of its own; return what each returned or raised."""

    def on_gpu(group: Group) -> Any:
        fake_cupy.cuda.Device(group.rank).use()
        return program(group)

    config = options.pop("config", HYBRID)
    return thread_world(on_gpu, world_size, config.get("backend", "nccl"), config=config, **options)


def ranks(program: Callable[[Group], Any], world_size: int, **options: Any) -> list[Any]:
    """Do likewise; return what each returned, or raise the exception that is the cause of the others."""
    return must(gpu_world(program, world_size, **options))


def mine(group: Group, shape: Any = 5, dtype: Any = np.float32) -> Any:
    """Return an array on this rank's GPU, full of its rank + 1."""
    return fake_cupy.full(shape, group.rank + 1, dtype)
