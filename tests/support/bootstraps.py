"""A bootstrap for backends that are tested without a job around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from oneaccord.api import Backend, BackendConfig, BackendSpec, Bootstrap, Deadline


class ThreadBootstrap(Bootstrap):
    """That of a rank whose peers are threads of this process, and whose backend has neither parts nor sockets of core's."""

    def __init__(
        self, rank: int, cards: dict[str, dict[int, bytes]], together: threading.Barrier, config: BackendConfig
    ) -> None:
        self.rank = rank
        self.world_size = together.parties
        self.config = config
        self.host = "127.0.0.1"
        self.deadline = Deadline(20)
        self.shared = None
        self._cards = cards
        self._together = together

    def describe(self, name: str) -> BackendSpec:
        raise AssertionError("it is composed of nothing")

    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        raise AssertionError("it is composed of nothing")

    def exchange(self, name: str, card: bytes) -> list[bytes]:
        assert len(card) <= 1 << 16
        cards = self._cards.setdefault(name, {})
        cards[self.rank] = card
        self._together.wait(20)
        return [cards[rank] for rank in range(self.world_size)]

    def listen(self, host: str, accept: Callable[..., None]) -> tuple[str, int]:
        raise AssertionError("it needs no sockets of core's")

    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> Any:
        raise AssertionError("it needs no sockets of core's")
