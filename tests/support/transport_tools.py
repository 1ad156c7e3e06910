"""What tests of transports share: connecting them, waiting for messages, and counting what a process still has open."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneaccord.api import Deadline, Transfer, Transport

__all__ = ["PATIENCE_S", "connected", "finish", "held"]

PATIENCE_S = 30.0
"""How long a message that must come is waited for: far more than it takes, so that only a lost one ends by it."""


def connected(backends: Sequence[Any], channel: int = 0) -> list[Transport]:
    """Return a transport of each rank, connected to all others."""
    made: list[Transport] = [backend.open_transport(channel) for backend in backends]
    for rank, transport in enumerate(made):
        transport.connect([peer for peer in range(len(made)) if peer != rank], Deadline(PATIENCE_S))
    return made


def finish(transport: Transport, *transfers: Transfer | None) -> None:
    """Wait until all transfers are done; None stands for one that was done at once."""
    while left := [transfer for transfer in transfers if transfer is not None and not transfer.done]:
        transport.wait(left, Deadline(PATIENCE_S))


def held(word: str) -> tuple[int, int]:
    """Return how many descriptors and how many mappings this process has of files whose names contain a word."""
    descriptors = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            descriptors += word in str(entry.readlink())
    return descriptors, Path("/proc/self/maps").read_text(encoding="utf-8").count(word)
