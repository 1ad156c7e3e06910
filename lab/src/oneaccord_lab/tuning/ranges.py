"""From times to few rows: neighbouring sizes share a row if little is lost by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective

__all__ = ["Kind", "Range", "kinds", "losses", "ranges"]


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes number ``first`` to ``last`` of a list, and the algorithm to use for them."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Algorithms that may serve some kind of call, and the condition of its rows."""

    names: frozenset[str]
    words: str = ""
    reproducible: bool = False
    uneven: bool = False


def kinds(collective: Collective, algorithms: Mapping[str, Algorithm]) -> list[Kind]:
    """Return the kinds of calls that need rows of their own, those that are for all calls last."""
    flat = {name: each for name, each in algorithms.items() if not each.even}
    found = [Kind(frozenset(flat), ", uneven blocks", uneven=True), Kind(frozenset(algorithms))]
    if PROMISES[collective].reduces:
        canonical = frozenset(name for name, each in flat.items() if each.canonical)
        found.insert(0, Kind(canonical, ", reproducible", reproducible=True))
    return [kind for kind in found if kind.names and (not kind.words or kind.names != found[-1].names)]


def losses(times: Mapping[str, float]) -> dict[str, float]:
    """Return for each algorithm how much longer it takes than the best, 0 for the best and 0.5 for half as long again."""
    best = min(times.values())
    return {name: (seconds / best - 1 if best > 0 else float(seconds > 0)) for name, seconds in times.items()}


def ranges(cases: Sequence[Mapping[str, float]], tolerance: float) -> list[Range] | None:
    """Divide a list of sizes into as few ranges as possible, each with one algorithm that is good for all of it.

    Parameters
    ----------
    cases
        For each size, ascending, the loss of every algorithm, as by `losses`; the worst of several worlds, if these are to
        share rows.
    tolerance
        The greatest loss that is taken.

    Returns
    -------
    list of Range
        They cover all sizes; None if for some size every algorithm loses more. Of several algorithms that are good for a
        range, it gets the one with the least loss in sum, or else the first by name.
    """
    found: list[Range] = []
    start = 0
    while start < len(cases):
        good: dict[str, float] = {}
        stop = start
        while stop < len(cases):
            allowed = {name: loss for name, loss in cases[stop].items() if loss <= tolerance}
            common = {name: good.get(name, 0.0) + loss for name, loss in allowed.items() if stop == start or name in good}
            if not common:
                break
            good, stop = common, stop + 1
        if stop == start:
            return None
        # To reach as far as possible at each turn gives the fewest ranges.
        found.append(Range(min(good, key=lambda name: (good[name], name)), start, stop - 1))
        start = stop
    return found
