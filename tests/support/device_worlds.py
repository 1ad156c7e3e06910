"""Ranks with GPUs that are made of threads and NumPy memory, under the real plugins, for tests on machines without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from oneaccord.api import Group
from oneaccord_nccl import plugin
from oneaccord_nccl.communicator import destroy_revoked, wait_for_ends
from support.fake_gpu import fake_cuda, fake_cupy, through_libcuda
from support.fake_gpu.fake_nccl import FakeNccl
from support.fake_gpu.through_nccl4py import BINDINGS, install
from support.waiting import until
from support.worlds import must, thread_world

__all__ = [
    "BACKENDS",
    "HYBRID",
    "NCCL",
    "Clock",
    "Foreign",
    "Watched",
    "clock",
    "gpu_world",
    "gpus",
    "mine",
    "ranks",
    "watched",
]

NCCL = {"backend": "nccl"}
HYBRID = {"backend": "hybrid", "ranks_per_host": 4, "backends": {"hybrid": {"routes": {"cpu": "tcp", "cuda": "nccl"}}}}
BACKENDS = pytest.mark.parametrize("config", [NCCL, HYBRID], ids=["nccl", "hybrid"])


@pytest.fixture(params=BINDINGS)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """A machine with four GPUs, CuPy and NCCL: the plugin calls fakes, or nccl4py and ctypes above them."""
    fake = FakeNccl()
    install(fake, request.param, monkeypatch)
    fake_cupy.install(monkeypatch, 4)
    if request.param == "nccl4py":
        through_libcuda.install(monkeypatch)
    monkeypatch.setattr(plugin, "_DRIVER", None)  # this program itself, which is always there
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    yield fake
    fake.release()
    wait_for_ends()
    destroy_revoked()  # as if the survivors had met again
    wait_for_ends()
    assert fake.open_communicators() == 0
    fake_cupy.shut_down()
    assert not fake.crimes, fake.crimes


class Foreign:
    """A stream of another library, known by its handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Clock:
    """What deadlines on GPUs take for the time: it stands still until the test moves it."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which calls on GPUs begin and come to their deadlines."""
    made = Clock()
    monkeypatch.setattr("oneaccord.calls.devices.calls._now", made.monotonic)
    monkeypatch.setattr("oneaccord.calls.devices.watch.time", made)
    return made


class Watched:
    """What the threads that watch over GPUs have done so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._recorded: set[tuple[str, int]] = set()
        self._looks: dict[str, int] = {}
        record, query = fake_cuda.event_record, fake_cuda.event_query

        def recording(event: int, stream: int) -> None:
            record(event, stream)
            self._recorded.add((threading.current_thread().name, stream))

        def asking(event: int) -> int:
            name = threading.current_thread().name
            self._looks[name] = self._looks.get(name, 0) + 1
            return query(event)

        monkeypatch.setattr(fake_cuda, "event_record", recording)
        monkeypatch.setattr(fake_cuda, "event_query", asking)

    def until_marked(self, rank: int, stream: int) -> None:
        """Wait until the watch of a rank has a point on a stream to look at."""
        until(lambda: (f"oneaccord-gpus-{rank}", stream) in self._recorded)

    def until_it_looked(self, rank: int) -> None:
        """Wait until the watch of a rank, which has something to look at, has begun to look, and has looked, after now."""
        name = f"oneaccord-gpus-{rank}"
        before = self._looks.get(name, 0)
        until(lambda: self._looks.get(name, 0) >= before + 2)


@pytest.fixture
def watched(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Tells how far the threads that watch over GPUs are."""
    return Watched(monkeypatch)


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
