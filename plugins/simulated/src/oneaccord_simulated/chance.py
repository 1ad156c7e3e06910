"""Fault plans drawn at random, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from oneaccord.api import UsageError
from oneaccord_simulated.faults import KINDS, Corrupt, Cut, Delay, Drop, Fault, FaultPlan, Kill, Partition, Pause, Slow, hint

__all__ = ["random_faults"]


def random_faults(
    seed: int, world_size: int, *, horizon_s: float = 1.0, count: int | None = None, kinds: Iterable[str] = tuple(KINDS)
) -> FaultPlan:
    """Draw a plan: the same arguments give the same plan on every machine and version of Python.

    One rank at least is neither killed nor stopped forever.

    Parameters
    ----------
    seed
        An integer from 0 on.
    world_size
        How many ranks; a world of one knows only ``"pause"`` and ``"slow"``.
    horizon_s
        Faults begin within so many virtual seconds, 1e-6 to 1e9. All times are rounded to microseconds.
    count
        How many faults; one to three, by the seed, by default.
    kinds
        The kinds to draw from, in any order. If the world has none of them, the plan is empty.

    Raises
    ------
    UsageError
        An argument is not as described, or a kind is unknown.
    """
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    for kind in sorted(wanted - KINDS.keys()):
        raise UsageError(f"kinds names {kind!r}, which is not a kind of fault{hint(kind, KINDS)}")
    for name, number, least in (("seed", seed, 0), ("world_size", world_size, 1), ("count", 0 if count is None else count, 0)):
        if type(number) is not int or number < least:
            raise UsageError(f"{name} is {number!r}; expected an integer, {least} or more")
    if not 1e-6 <= horizon_s <= 1e9:
        raise UsageError(f"horizon_s is {horizon_s!r}; expected a number of seconds from 1e-6 to 1e9")
    chance = _Chance(seed, world_size, round(horizon_s * 1_000_000))
    drawn = 1 + chance.below(3)
    known = [kind for kind in KINDS if kind in wanted and (world_size > 1 or kind in {"pause", "slow"})]
    total = (drawn if count is None else count) if known else 0
    faults = tuple(chance.fault(known[chance.below(len(known))]) for _ in range(total))
    return FaultPlan(summary=f"drawn from seed {seed} for a world of {world_size}", faults=faults)


class _Chance:
    """Draws faults. It takes nothing but ``random()``, the one method whose numbers Python promises never to change."""

    def __init__(self, seed: int, world_size: int, horizon_us: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - faults to be repeated, no secrets
        self._world_size = world_size
        self._horizon_us = horizon_us
        self._survivor = self.below(world_size)

    def below(self, limit: int) -> int:
        """Return an integer from 0 to ``limit - 1``; exact, since ``random()`` is a multiple of 2**-53."""
        return int(self._random.random() * 2**53) * limit >> 53

    def fault(self, kind: str) -> Fault:
        """Return a fault of a kind that the world knows."""
        match kind:
            case "kill":
                return Kill(rank=self._other(self._survivor), **self._moment())
            case "pause":
                for_ever = self._world_size > 1 and self.below(4) == 0
                rank = self._other(self._survivor) if for_ever else self.below(self._world_size)
                return Pause(rank=rank, **self._moment(), for_s=math.inf if for_ever else self._span(self._horizon_us))
            case "slow":
                return Slow(rank=self.below(self._world_size), factor=(5 + self.below(36)) / 4, **self._window())
            case "cut":
                return Cut(links=self._links(), **self._window())
            case "delay":
                return Delay(links=self._links(), by_s=self._span(1 + self._horizon_us // 10), **self._window())
            case "partition":
                return Partition(sides=self._sides(), **self._window())
        source = self.below(self._world_size)
        return (Drop if kind == "drop" else Corrupt)(source=source, dest=self._other(source), nth=self.below(10))

    def _other(self, rank: int) -> int:
        return (rank + 1 + self.below(self._world_size - 1)) % self._world_size

    def _span(self, longest_us: int) -> float:
        return (1 + self.below(longest_us)) / 1_000_000

    def _moment(self) -> dict[str, Any]:
        if self.below(2):
            return {"at_s": self.below(self._horizon_us) / 1_000_000}
        return {"operation": "*", "nth": self.below(10)}

    def _window(self) -> dict[str, float]:
        start_us = self.below(self._horizon_us)
        until_s = math.inf if self.below(4) == 0 else (start_us + 1 + self.below(self._horizon_us)) / 1_000_000
        return {"from_s": start_us / 1_000_000, "until_s": until_s}

    def _links(self) -> tuple[tuple[Any, Any], ...]:
        links: list[tuple[Any, Any]] = []
        for _ in range(1 + self.below(2)):
            a = self.below(self._world_size)
            low, high = sorted((a, self._other(a)))
            links.append((a, "*") if self.below(4) == 0 else (low, high))
        return tuple(dict.fromkeys(links))

    def _sides(self) -> tuple[tuple[int, ...], ...]:
        first = self.below(self._world_size)
        second = self._other(first)
        sides = [self.below(2) for _ in range(self._world_size)]
        sides[first], sides[second] = 0, 1
        return tuple(tuple(rank for rank, side in enumerate(sides) if side == each) for each in (0, 1))
