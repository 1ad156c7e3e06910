"""Backends of one process without a job around them: over UCX itself where it is installed, and over a libucp of Python."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.bootstraps import ThreadBootstrap
from support.worlds import must, on_threads

from oneaccord_ucx import library, worker
from oneaccord_ucx.backend import UcxBackend
from oneaccord_ucx.config import UcxConfig

RESET, UNREACHABLE = -25, -6
LATE_BYTES = 100_000
"""A longer message arrives when its receive has begun, and its send is done only then."""


@dataclass
class _Request:
    owner: int
    endpoint: int = 0
    status: int = 1


@dataclass
class _Message:
    tag: int
    address: int
    nbytes: int
    request: int | None
    copy: bytes | None


@dataclass
class _Worker:
    event_fd: int
    arriving: deque[_Message] = field(default_factory=deque)
    unexpected: list[_Message] = field(default_factory=list)
    posted: list[tuple[int, int, int, int]] = field(default_factory=list)
    failing: deque[tuple[Any, int]] = field(default_factory=deque)


class FakeUcp:
    """Workers of one process that deliver messages by tag: as much as the backend sees of `oneaccord_ucx.library.Ucp`."""

    path, version, words = "/fake/libucp.so.0", (1, 99, 0), "1.99.0"

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}

    def _new(self, value: Any) -> int:
        number = next(self._numbers) * 16
        self._objects[number] = value
        return number

    # ---------------------------------------------------------------- settings

    def set_global(self, name: str, value: str) -> bool:
        return name == "LOG_LEVEL"

    def why(self, status: int) -> str:
        return {RESET: "Connection reset by remote peer", UNREACHABLE: "Destination is unreachable"}.get(
            status, f"status {status}"
        )

    def config_read(self, prefix: object, file: object, config: Any) -> int:
        config._obj.value = 8
        return 0

    def config_modify(self, config: object, name: bytes, value: bytes) -> int:
        self.settings[name.decode()] = value.decode()
        return -5 if value == b"many" else 0

    def config_release(self, config: object) -> None:
        pass

    def init_version(self, major: int, minor: int, params: object, config: object, context: Any) -> int:
        context._obj.value = 8
        return -24 if self.settings["TLS"] == "pigeon" else 0

    def cleanup(self, context: object) -> None:
        pass

    # ---------------------------------------------------------------- workers and endpoints

    def worker_create(self, context: object, params: object, worker: Any) -> int:
        worker._obj.value = self._new(_Worker(os.eventfd(0, os.EFD_NONBLOCK)))
        return 0

    def worker_destroy(self, worker: Any) -> None:
        gone = self._objects.pop(worker.value)
        pending = [
            it for it in list(self._objects.values()) if isinstance(it, _Request) and (it.owner, it.status) == (worker.value, 1)
        ]
        assert not pending, "UCX 1.13 aborts the process here"
        os.close(gone.event_fd)
        for endpoint, value in list(self._objects.items()):
            if isinstance(value, tuple) and value[0] == worker.value:
                self._fail(endpoint)

    def _fail(self, endpoint: int) -> None:
        _, owner, handler, peer = self._objects[endpoint]
        if handler and owner in self._objects:
            self._objects[owner].failing.append((handler, peer))
            os.eventfd_write(self._objects[owner].event_fd, 1)

    def worker_get_address(self, worker: int, address: Any, length: Any) -> int:
        self._text = ctypes.create_string_buffer(b"%d" % worker)
        address._obj.value, length._obj.value = ctypes.addressof(self._text), len(self._text.value)
        return 0

    def worker_release_address(self, worker: int, address: object) -> None:
        pass

    def worker_get_efd(self, worker: int, fd: Any) -> int:
        fd._obj.value = self._objects[worker].event_fd
        return 0

    def worker_arm(self, worker: int) -> int:
        here = self._objects[worker]
        if here.arriving or here.failing:
            return -15
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(here.event_fd)
        return 0

    def ep_create(self, worker: int, params: Any, endpoint: Any) -> int:
        asked = params._obj
        other = int(asked.address)
        if other not in self._objects:
            return UNREACHABLE
        endpoint._obj.value = self._new((other, worker, asked.error_handler if asked.error_mode else None, asked.user_data))
        return 0

    def worker_progress(self, worker: int) -> int:
        here, moved = self._objects[worker], 0
        while here.failing:
            handler, peer = here.failing.popleft()
            handler(peer, None, RESET)
            moved += 1
        while here.arriving:
            message = here.arriving.popleft()
            index = next((index for index, post in enumerate(here.posted) if post[0] == message.tag), None)
            if index is None:
                here.unexpected.append(message)
            else:
                self._deliver(message, here.posted.pop(index))
            moved += 1
        return moved

    def ep_close_nbx(self, endpoint: int, params: object) -> None:
        for request in list(self._objects.values()):
            if isinstance(request, _Request) and (request.endpoint, request.status) == (endpoint, 1):
                request.status = -16
        self._objects[endpoint] = (None, None, None, None)

    # ---------------------------------------------------------------- messages

    def tag_send_nbx(self, endpoint: int, data: bytes | int, nbytes: int, tag: int, params: object) -> int | None:
        dest = self._objects.get(self._objects[endpoint][0])
        if dest is None:
            return (1 << 64) + RESET
        address = ctypes.cast(data, ctypes.c_void_p).value if isinstance(data, bytes) else data
        is_late = nbytes > LATE_BYTES
        request = self._new(_Request(self._objects[endpoint][1], endpoint)) if is_late else None
        copy = None if is_late else ctypes.string_at(address, nbytes)
        dest.arriving.append(_Message(tag, address or 0, nbytes, request, copy))
        os.eventfd_write(dest.event_fd, 1)
        return request

    def tag_recv_nbx(self, worker: int, address: int, nbytes: int, tag: int, mask: int, params: object) -> int | None:
        here = self._objects[worker]
        request = self._new(_Request(worker))
        message = next((message for message in here.unexpected if message.tag == tag), None)
        if message is None:
            here.posted.append((tag, address, nbytes, request))
            return request
        here.unexpected.remove(message)
        self._deliver(message, (tag, address, nbytes, request))
        return request

    def _deliver(self, message: _Message, post: tuple[int, int, int, int]) -> None:
        _, address, nbytes, request = post
        assert message.nbytes <= nbytes, "the message would be truncated"
        ctypes.memmove(address, message.copy if message.copy is not None else message.address, message.nbytes)
        self._objects[request].status = 0
        if message.request is not None:
            self._objects[message.request].status = 0
            for value in list(self._objects.values()):
                if isinstance(value, _Worker):
                    os.eventfd_write(value.event_fd, 1)

    def request_check_status(self, request: int) -> int:
        return int(self._objects[request].status)

    def request_cancel(self, worker: int, request: int) -> None:
        self._objects[request].status = -16

    def request_free(self, request: int) -> None:
        del self._objects[request]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.peers)])
def ucp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library of all backends of a test. Who is not woken sleeps for long."""
    monkeypatch.setattr(worker, "_LONGEST_SLEEP_S", 1000.0)
    if request.param == "real":
        return library.load()
    fake = FakeUcp()
    monkeypatch.setattr(library, "load", lambda wanted: fake)
    return fake


@pytest.fixture
def backends(ucp: Any) -> Iterator[Callable[..., list[UcxBackend]]]:
    """Start a backend on every rank of a world: ``backends(world_size, **config)``; a config may be a list, one for each rank."""
    made: list[UcxBackend] = []

    def start(world_size: int = 2, configs: Sequence[UcxConfig] | None = None, **config: Any) -> list[UcxBackend]:
        cards: dict[str, dict[int, bytes]] = {}
        together = threading.Barrier(world_size)
        each = configs or [UcxConfig(**config)] * world_size

        def begin(rank: int) -> UcxBackend:
            made.append(UcxBackend(ThreadBootstrap(rank, cards, together, each[rank])))
            return made[-1]

        return must(on_threads(begin, world_size))

    yield start
    for backend in made:
        backend.close()
