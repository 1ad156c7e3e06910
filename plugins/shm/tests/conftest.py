"""Backends that share memory inside one process, without a job around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.bootstraps import ThreadBootstrap
from support.worlds import must, on_threads

from oneaccord_shm.backend import ShmBackend
from oneaccord_shm.plugin import ShmConfig

Backends = Callable[..., list[ShmBackend]]


@pytest.fixture
def outcomes() -> Iterator[Callable[..., list[Any]]]:
    """Start a backend on every rank of a world: ``outcomes(world_size, **config)``; return each, or what it raised.

    ``own`` is the configuration in which a rank differs.
    """
    made: list[ShmBackend] = []

    def start(world_size: int = 2, own: Mapping[int, Mapping[str, Any]] = {}, **config: Any) -> list[Any]:
        cards: dict[str, dict[int, bytes]] = {}
        together = threading.Barrier(world_size)

        def begin(rank: int) -> ShmBackend:
            return ShmBackend(ThreadBootstrap(rank, cards, together, ShmConfig(**config | own.get(rank, {}))))

        results = on_threads(begin, world_size)
        made.extend(result for result in results if isinstance(result, ShmBackend))
        return results

    yield start
    for backend in made:
        backend.close()


@pytest.fixture
def backends(outcomes: Callable[..., list[Any]]) -> Backends:
    """Start a backend on every rank of a world: ``backends(world_size, **config)``."""
    return lambda world_size=2, **config: must(outcomes(world_size, **config))
