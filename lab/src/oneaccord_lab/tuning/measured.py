"""From measured times to the rows of a table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from oneaccord.common.units import bytes_text, time_text
from oneaccord.config.select import Rule
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.steps import Collective
from oneaccord_lab.tuning.plan import Point
from oneaccord_lab.tuning.ranges import Kind, kinds, losses, ranges

__all__ = ["measured_rules"]

_TOLERANCE = 0.05
"""A loss that is taken for noise, and for the sake of fewer rows: 0.05 is a time 5 % above the best."""
_LATENCY_BYTES = 4096
"""Below it, all sizes take the same time: a row for such a call also serves smaller ones."""


def measured_rules(points: Iterable[Point], world_size: int, hosts: int, algorithms: Collection[Algorithm]) -> list[Rule]:
    """Return the rows that make a selector take the fastest algorithm, in the measured world and from the least measured size to the greatest.

    Parameters
    ----------
    points
        The measured points; points without times are skipped.
    world_size, hosts
        The number of ranks, and of the hosts that they were on.
    algorithms
        The meaning of the names in ``points``.

    Returns
    -------
    list of Rule
        For each collective in the order of ``points``: rows for reproducible calls and for uneven blocks, if not all algorithms
        serve these, and then the rows for all calls.
    """
    known = {(algorithm.collective, algorithm.name): algorithm for algorithm in algorithms}
    by_collective: dict[Collective, list[Point]] = {}
    for point in points:
        if point.times:
            by_collective.setdefault(Collective(point.collective), []).append(point)
    rules: list[Rule] = []
    for collective, some in by_collective.items():
        ordered = sorted(some, key=lambda point: point.nbytes)
        everyone = {name: known[collective, name] for name in ordered[0].times}
        for kind in kinds(collective, everyone):
            rules += _rows(collective, ordered, kind, world_size, hosts)
    return rules


def _rows(
    collective: Collective,
    points: Sequence[Point],
    kind: Kind,
    world_size: int,
    hosts: int,
) -> list[Rule]:
    times = [{name: seconds for name, seconds in point.times.items() if name in kind.names} for point in points]
    found = ranges([losses(each) for each in times], _TOLERANCE)
    assert found is not None  # the best of each size loses nothing
    smallest = points[0].nbytes
    rows = []
    for each in found:
        middle = (each.first + each.last) // 2
        last = each.last == len(points) - 1
        end = points[each.last].nbytes if last else math.isqrt(points[each.last].nbytes * points[each.last + 1].nbytes)
        rows.append(
            Rule(
                collective,
                each.name,
                max_bytes=None if collective is Collective.BARRIER else end,
                max_world=world_size,
                reason=_reason(each.name, points[middle], times[middle], kind.words),
                min_bytes=smallest if smallest > _LATENCY_BYTES else None,
                min_world=world_size,
                min_hosts=hosts if hosts > 1 else None,
                max_hosts=hosts,
                reproducible=kind.reproducible,
                uneven=kind.uneven,
            )
        )
    return rows


def _reason(name: str, point: Point, times: dict[str, float], words: str) -> str:
    at = "" if point.collective == Collective.BARRIER.value else f" at {bytes_text(point.nbytes)}"
    text = f"measured here{at}{words}: {time_text(times[name])}"
    others = {other: seconds for other, seconds in times.items() if other != name}
    if not others:
        return f"{text}; there is no other"
    next_best = min(others, key=lambda other: others[other])
    return f"{text} against {time_text(others[next_best])} of {next_best}"
