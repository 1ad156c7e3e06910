"""Backends that take note of what is done with them, in place of real ones."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from oneaccord.api import (
    Backend,
    BackendConfig,
    BackendSpec,
    Bootstrap,
    Deadline,
    Runtime,
    Sink,
    Transfer,
    Transport,
    hookimpl,
)
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.runtime.computer import COMPUTER
from oneaccord_hybrid.backend import HybridBackend
from oneaccord_hybrid.config import HybridConfig
from oneaccord_tcp.backend import TcpBackend
from oneaccord_tcp.plugin import TcpConfig


class Fake(Backend):
    """A backend that moves nothing, and writes down what is done with it."""

    def __init__(self, name: str, ranks: tuple[int, ...], log: list[str], *, sulks: bool) -> None:
        self.name, self.ranks = name, ranks
        self._log, self._sulks = log, sulks
        log.append(f"make {name}")

    def open_transport(self, channel: int) -> Transport:
        return FakeTransport(f"{self.name} {channel}", self._log)

    def open_device(self, channel: int, meeting: Any) -> Any:
        return f"the device channel {channel} of {self.name}"

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(f"{self.name} {nbytes}".encode())

    def abort(self) -> None:
        self._do("abort")

    def close(self) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        self._log.append(f"{what} {self.name}")
        if self._sulks:
            raise RuntimeError(f"{self.name} does not like to {what}")


class FakeTransport(Transport):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self._log.append(f"connect {self.name} to {list(peers)}")

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        raise NotImplementedError

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        raise NotImplementedError

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._log.append(f"close {self.name}")


DEVICES = {"gpu": ("cuda",), "both": ("cpu", "cuda")}


class FakeBootstrap(Bootstrap):
    """What core gives to the factory of the hybrid backend, where every other backend is a `Fake`."""

    def __init__(
        self, routes: dict[str, str], hosts: Sequence[int], rank: int, fails: str, sulks: str, runtime: Runtime = COMPUTER
    ) -> None:
        self.rank, self.world_size, self.hosts = rank, len(hosts), tuple(hosts)
        self.config: BackendConfig = HybridConfig(routes=routes)
        self.runtime = runtime
        self.shared = None
        self.log: list[str] = []
        self._fails, self._sulks = fails, sulks

    def describe(self, name: str) -> BackendSpec:
        return BackendSpec(name, "", "", devices=DEVICES.get(name, ("cpu",)))

    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        if name == self._fails:
            raise RuntimeError(f"{name} does not start")
        return Fake(name, tuple(ranks or ()), self.log, sulks=name == self._sulks)

    def exchange(self, name: str, card: bytes) -> list[bytes]:
        raise AssertionError("hybrid has nothing to tell the other ranks")

    listen = dial = exchange  # type: ignore[assignment]


class Composed:
    """A hybrid backend of fakes, and what was done with them."""

    def __init__(self, bootstrap: FakeBootstrap) -> None:
        self.bootstrap = bootstrap
        self.log = bootstrap.log
        self.backend = HybridBackend(bootstrap)


@pytest.fixture
def bootstrap() -> Callable[..., FakeBootstrap]:
    def make(
        hosts: Sequence[int] = (0, 0, 1, 1), rank: int = 2, fails: str = "", sulks: str = "", **routes: str
    ) -> FakeBootstrap:
        return FakeBootstrap(routes, hosts, rank, fails, sulks)

    return make


@pytest.fixture
def composed(bootstrap: Callable[..., FakeBootstrap]) -> Callable[..., Composed]:
    """Compose fakes: ``composed(hosts, rank, cpu="a", p2p="b")``."""
    return lambda *args, **routes: Composed(bootstrap(*args, **routes))


# Backends that do move something, over TCP, and count it.


class Counter:
    """How many messages and bytes each backend sent, how large its worlds are, and how many transports it has open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}
        self.worlds: dict[str, set[int]] = {}
        self.open: dict[str, int] = {}

    def count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.sent[name] = self.sent.get(name, 0) + 1
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def opened(self, name: str, by: int) -> None:
        with self._lock:
            self.open[name] = self.open.get(name, 0) + by

    def met(self, name: str, size: int) -> None:
        with self._lock:
            self.worlds.setdefault(name, set()).add(size)


class CountingBackend(TcpBackend):
    def __init__(self, bootstrap: Bootstrap, name: str, counter: Counter) -> None:
        super().__init__(bootstrap)
        self._name, self._counter = name, counter
        counter.met(name, bootstrap.world_size)

    def open_transport(self, channel: int) -> Any:
        return CountingTransport(super().open_transport(channel), self._name, self._counter)


class CountingTransport(Transport):
    """Without mailboxes, so that every message is seen."""

    streams = True

    def __init__(self, transport: Transport, name: str, counter: Counter) -> None:
        self._transport, self._name, self._counter = transport, name, counter
        counter.opened(name, 1)

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self._transport.connect(peers, deadline)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        self._counter.count(self._name, len(payload))
        return self._transport.send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._transport.recv(peer, header, payload)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        return self._transport.consume(peer, header, nbytes, sink)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        self._transport.wait(transfers, deadline)

    def close(self) -> None:
        self._counter.opened(self._name, -1)
        self._transport.close()


_numbers = itertools.count()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Register a backend of this process: ``register(factory, **spec)``; return its name."""

    def one(factory: Callable[[Bootstrap], Backend], **spec: Any) -> str:
        name = f"of-a-test-{next(_numbers)}"
        module = ModuleType(f"factory_of_{name}")
        module.make = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

        class Plugin:
            @hookimpl
            def oneaccord_register_backends(self) -> BackendSpec:
                return BackendSpec(name, "", f"{module.__name__}:make", **spec)

        get_plugin_manager().register(Plugin(), name)
        return name

    return one


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def counting(register: Callable[..., str], counter: Counter) -> Callable[[str], str]:
    """Register a backend that counts its messages under a word; return its name."""

    def one(word: str) -> str:
        return register(partial(CountingBackend, name=word, counter=counter), config=TcpConfig)

    return one
