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
"""For each module how to take what its generator goes on from, how to give it that, and how to make the first one from a seed."""


class Generators:
    """Swaps the generators of those modules that are imported.

    Parameters
    ----------
    seed
        That of the run: what ranks draw that seed nothing themselves follows from it, and differs between them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def take(self) -> dict[str, Any]:
        """Return what the generators would go on from."""
        return {name: getattr(module, _KINDS[name][0])() for name, module in _imported()}

    def give(self, taken: dict[str, Any], rank: int | None = None) -> None:
        """Let the generators go on from what was taken; those of which nothing was begin anew, where they are a rank's."""
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
