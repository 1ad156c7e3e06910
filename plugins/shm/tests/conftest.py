"""Backends that share memory inside one process, without a job around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from worlds import must, on_threads

from manyhands.api import Backend, BackendSpec, Bootstrap, Deadline
from manyhands_shm.backend import ShmBackend
from manyhands_shm.plugin import ShmConfig

Backends = Callable[..., list[ShmBackend]]


class ThreadBootstrap(Bootstrap):
    """A bootstrap of a rank whose peers are threads of this process."""

    def __init__(self, rank: int, cards: dict[str, dict[int, bytes]], together: threading.Barrier, config: ShmConfig) -> None:
        self.rank = rank
        self.world_size = together.parties
        self.config = config
        self.host = "127.0.0.1"
        self.deadline = Deadline(20)
        self.shared = None
        self._cards = cards
        self._together = together

    def describe(self, name: str) -> BackendSpec:
        raise AssertionError("shared memory is composed of nothing")

    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        raise AssertionError("shared memory is composed of nothing")

    def exchange(self, name: str, card: bytes) -> list[bytes]:
        assert len(card) <= 1 << 16
        cards = self._cards.setdefault(name, {})
        cards[self.rank] = card
        self._together.wait(20)
        return [cards[rank] for rank in range(self.world_size)]

    def listen(self, host: str, accept: Callable[..., None]) -> tuple[str, int]:
        raise AssertionError("shared memory needs no sockets")

    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> Any:
        raise AssertionError("shared memory needs no sockets")


@pytest.fixture
def outcomes() -> Iterator[Callable[..., list[Any]]]:
    """Start a backend on every rank of a world: ``outcomes(world_size, **config)``; return each, or what it raised."""
    made: list[ShmBackend] = []

    def start(world_size: int = 2, **config: Any) -> list[Any]:
        cards: dict[str, dict[int, bytes]] = {}
        together = threading.Barrier(world_size)
        results = on_threads(lambda rank: ShmBackend(ThreadBootstrap(rank, cards, together, ShmConfig(**config))), world_size)
        made.extend(result for result in results if isinstance(result, ShmBackend))
        return results

    yield start
    for backend in made:
        backend.close()


@pytest.fixture
def backends(outcomes: Callable[..., list[Any]]) -> Backends:
    """Start a backend on every rank of a world: ``backends(world_size, **config)``."""
    return lambda world_size=2, **config: must(outcomes(world_size, **config))
