"""Contenders that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import oneaccord as oa

Row = dict[str, Any]
Action = Callable[[], object]


def in_turns(
    actions: Mapping[str, Action], rounds: int, group: oa.Group, before: Callable[[str], object] = lambda _: None
) -> dict[str, list[float]]:
    """Call each action once a round, after ``before(name)``, in an order that rotates and turns round.

    Return the seconds of each call on the slowest rank.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            before(name)
            group.barrier()
            begun = time.perf_counter()
            actions[name]()
            lasted = float(group.all_reduce(time.perf_counter() - begun, op="max"))
            if number:  # the first round is to warm up
                seconds[name].append(lasted)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each."""
    return {name: statistics.median(each) for name, each in seconds.items()}
