"""GPUs and an NCCL that are made of threads, and ranks on them, without a job around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.bootstraps import ThreadBootstrap
from support.fake_gpu import fake_cupy, through_libcuda
from support.fake_gpu.fake_nccl import FakeNccl
from support.fake_gpu.through_nccl4py import BINDINGS, install
from support.worlds import must, on_threads

from oneaccord.api import Deadline, DeviceMeeting, Launch
from oneaccord_nccl import communicator
from oneaccord_nccl.backend import NcclBackend, create
from oneaccord_nccl.channel import NcclChannel
from oneaccord_nccl.plugin import NcclConfig


class OnHosts(ThreadBootstrap):
    """A bootstrap of a rank of some hosts."""

    def __init__(self, *args: Any, hosts: tuple[int, ...]) -> None:
        super().__init__(*args)
        self.shared = {}
        self.hosts = hosts
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])


class OnGpu:
    """An array on the current GPU, also of dtypes that CuPy does not have."""

    def __init__(self, array: Any, dtype: Any) -> None:
        self.array = array
        self.pointer: int = array.data.ptr
        self.dtype = np.dtype(dtype)

    @classmethod
    def copy_of(cls, array: Any) -> OnGpu:
        array = np.ascontiguousarray(array)
        return cls(fake_cupy.asarray(array.reshape(-1).view(np.uint8)), array.dtype)

    @classmethod
    def empty(cls, count: int, dtype: Any) -> OnGpu:
        return cls(fake_cupy.empty(count * np.dtype(dtype).itemsize, np.uint8), dtype)

    def get(self) -> Any:
        """Return a copy on the host, once the current stream is done."""
        return fake_cupy.asnumpy(self.array).view(self.dtype)


class Rank:
    """A rank with an open channel, in a thread of its own, on a GPU of its own."""

    def __init__(self, number: int, size: int, backend: NcclBackend, channel: NcclChannel) -> None:
        self.number = number
        self.size = size
        self.backend = backend
        self.channel = channel

    def run(self, launch: Launch, source: OnGpu | None = None, target: OnGpu | None = None, stream: int = 0) -> None:
        """Launch on arrays; None stands for no memory."""
        launch(0 if source is None else source.pointer, 0 if target is None else target.pointer, stream)

    def put(self, array: Any) -> OnGpu:
        """Return a copy on the GPU, made on the current stream."""
        return OnGpu.copy_of(array)

    def empty(self, count: int, dtype: Any) -> OnGpu:
        """Return memory that nobody has written."""
        return OnGpu.empty(count, dtype)


@pytest.fixture(params=BINDINGS)
def nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """A machine with four GPUs, and NCCL on it: the plugin calls fakes, or nccl4py and ctypes above them."""
    fake = FakeNccl()
    install(fake, request.param, monkeypatch)
    fake_cupy.install(monkeypatch, 4)
    if request.param == "nccl4py":
        through_libcuda.install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    yield fake
    fake.release()
    communicator._revoked.clear()
    fake_cupy.shut_down()
    assert fake.crimes == []
    assert fake.non_blocking == 0, "NCCL starts a thread for each call of a communicator that does not block"


Start = Callable[..., list[Any]]


@pytest.fixture
def start(nccl: FakeNccl) -> Start:
    """Make the backend of each rank: ``start(world_size, hosts=None, configs=None)``; return each, or what it raised."""

    def run(world_size: int, hosts: tuple[int, ...] | None = None, configs: list[dict[str, Any]] | None = None) -> list[Any]:
        cards: dict[str, dict[int, bytes]] = {}
        together = threading.Barrier(world_size)
        hosts, configs = hosts or (0,) * world_size, configs or [{}] * world_size
        return on_threads(
            lambda rank: create(OnHosts(rank, cards, together, NcclConfig(**configs[rank]), hosts=hosts)), world_size
        )

    return run


World = Callable[..., list[Any]]


@pytest.fixture
def outcomes(start: Start) -> World:
    """Call ``body(rank)`` on each rank of a world with an open channel; return what each returned, or raised."""

    def run(body: Callable[[Rank], Any], world_size: int, *, timeout_s: float = 20, **options: Any) -> list[Any]:
        backends = must(start(world_size, **options))
        cards: dict[str, dict[int, bytes]] = {}
        together = threading.Barrier(world_size)

        def enter(number: int) -> Any:
            backend = backends[number]
            fake_cupy.cuda.Device(backend.device).use()
            bootstrap = ThreadBootstrap(number, cards, together, NcclConfig())
            meeting = DeviceMeeting(range(world_size), number, bootstrap.exchange, Deadline(timeout_s))
            channel = backend.open_device(0, meeting)
            try:
                return body(Rank(number, world_size, backend, channel))
            finally:
                channel.close()

        return on_threads(enter, world_size)

    return run


@pytest.fixture
def world(outcomes: World) -> World:
    """Call ``body(rank)`` on each rank of a world with an open channel; return the results."""
    return lambda body, world_size, **options: must(outcomes(body, world_size, **options))
