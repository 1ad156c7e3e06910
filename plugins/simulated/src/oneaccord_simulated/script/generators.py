"""The generators of random numbers that each rank has for itself, as a process has: those of Python, NumPy and torch's on the CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy.random  # noqa: F401 - or the first rank that draws would do so before its generator is given a seed

__all__ = ["Generators"]

_KINDS: dict[str, tuple[str, str, Callable[[Any, int], Any]]] = {
    "random": ("getstate", "setstate", lambda module, seed: module.Random(seed).getstate()),
    "numpy.random": ("get_bit_generator", "set_bit_generator", lambda module, seed: module.MT19937(seed)),
    "torch": ("get_rng_state", "set_rng_state", lambda module, seed: module.Generator().manual_seed(seed).get_state()),
}
"""For each module the functions that read its generator's state, set it, and make the first one from a seed."""


class Generators:
    """Swaps the generators of those modules that are imported.

    Parameters
    ----------
    seed
        The seed of the run: the numbers that ranks draw without a seed of their own follow from it, and differ between ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def take(self) -> dict[str, Any]:
        """Return the states of the generators."""
        return {name: getattr(module, _KINDS[name][0])() for name, module in _imported()}

    def give(self, taken: dict[str, Any], rank: int | None = None) -> None:
        """Set the generators to states; those without one begin again, if they are a rank's."""
        for name, module in _imported():
            _, give, begin = _KINDS[name]
            if name not in taken and rank is not None:
                taken[name] = begin(module, random.Random(f"{self._seed} {rank}").getrandbits(63))  # noqa: S311 - no secret
            if name in taken:
                getattr(module, give)(taken[name])


def _imported() -> list[tuple[str, Any]]:
    """Return the modules that are there, and not still being imported."""
    modules = [(name, sys.modules.get(name)) for name in _KINDS]
    return [(name, module) for name, module in modules if hasattr(module, _KINDS[name][1])]
