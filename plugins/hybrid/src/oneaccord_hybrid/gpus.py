"""Whether a world without a table of routes has a route for arrays on GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oneaccord.api import BackendUnavailableError, Bootstrap, ConfigError, read_cards, write_card

__all__ = ["GPU_BACKEND", "Gpus", "agreed", "gpus_here", "have_one_each"]

GPU_BACKEND = "nccl"


@dataclass(frozen=True, slots=True)
class Gpus:
    """What a rank sees.

    Attributes
    ----------
    count
        How many GPUs.
    visible
        ``CUDA_VISIBLE_DEVICES``.
    """

    count: int
    visible: str = ""


def agreed(bootstrap: Bootstrap) -> bool:
    """Return whether each rank can have a GPU of its own, and the backend for it: alike on all ranks, which must all call this."""
    cards = read_cards(bootstrap.exchange("the GPUs of hybrid", write_card(_usable(bootstrap))), Gpus)
    return have_one_each(cards, bootstrap.hosts)


def have_one_each(cards: Sequence[Gpus], hosts: Sequence[int]) -> bool:
    """Return whether on each host there are as many GPUs as ranks, or the launcher shows each rank other ones."""
    for host in set(hosts):
        found = [card for card, its in zip(cards, hosts, strict=True) if its == host]
        shown = {card.visible for card in found}
        if min(card.count for card in found) < (1 if len(shown) == len(found) else len(found)):
            return False
    return True


def _usable(bootstrap: Bootstrap) -> Gpus:
    try:
        spec = bootstrap.describe(GPU_BACKEND)
    except (BackendUnavailableError, ConfigError):  # not installed, blocked, or no driver
        return Gpus(0)
    return gpus_here() if "cuda" in spec.devices else Gpus(0)


def gpus_here(devices: Path = Path("/dev")) -> Gpus:
    """Return what the driver and the variable of CUDA show this process, found without CUDA, which takes a second to begin."""
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Gpus(count)
    named = [word.strip() for word in visible.split(",")]
    ends = [at for at, word in enumerate(named) if word in ("", "-1")]  # CUDA reads no further
    return Gpus(min(count, *ends[:1], len(named)) if count else 0, visible)
