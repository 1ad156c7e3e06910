"""Measuring algorithms on the ranks of a real job: each in turn, over and over, with every result checked.

It is the program of each rank of ``oneaccord bench --tune``: ``oneaccord run -n 4 -m oneaccord_lab.tuning.measure PLAN``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from oneaccord.common.variables import of_setting
from oneaccord.config import load
from oneaccord.errors import InternalError, PluginError
from oneaccord.group.group import Group
from oneaccord.group.init import init
from oneaccord.schedule.steps import Collective
from oneaccord_lab.bench.cases import Arrays, Case
from oneaccord_lab.bench.plan import round_size
from oneaccord_lab.tuning.plan import Plan, Point

__all__ = ["main", "measure"]

_DTYPE: Final[np.dtype[np.float32]] = np.dtype(np.float32)
_FEWEST_ROUNDS: Final[int] = 3
"""With fewer, a median is no better than any one of them."""
_SAMPLE_S: Final[float] = 1e-3
_MOST_CALLS: Final[int] = 20
"""A sample is as many calls as take `_SAMPLE_S`, and no more than these."""
_HOPELESS: Final[float] = 4.0
"""A candidate that takes this many times as long as the best, when all are first timed, is left out of the rounds."""
_MISLEADING: Final[tuple[str, ...]] = (of_setting("algorithms"), of_setting("selection"), of_setting("reproducible"))
"""The beginnings of variables that would overrule the algorithm that is to be measured."""


def main(argv: Sequence[str]) -> None:
    """Measure according to the plan whose JSON is the only argument; rank 0 writes the points to the plan's file."""
    plan = Plan.load(argv[0])
    rank, points = measure(plan)
    if rank == 0:
        Path(plan.output).write_bytes(msgspec.json.encode(points))


def measure(plan: Plan) -> tuple[int, list[Point]]:
    """Measure all that the plan names; every rank of the job must call this.

    Returns
    -------
    rank
        Which rank this is.
    points
        The measured points, alike on all ranks.

    Raises
    ------
    InternalError
        An algorithm gave a wrong result; the message names the rank, the call and the element.
    CommError, ConfigError
        As `init` and the collectives raise; each of them has a deadline.
    """
    for name in [name for name in os.environ if name.startswith(_MISLEADING)]:
        os.environ.pop(name, None)
    base = load().given()
    base = {key: value for key, value in base.items() if key not in ("algorithms", "selection", "reproducible")}
    points: list[Point] = []
    with init(plan.backend, config=base) as control:
        clock = _Clock(control, plan.budget_s)
        left = sum(len(_sizes(Collective(name), plan.sizes)) for name in plan.candidates)
        for name, algorithms in plan.candidates.items():
            with ExitStack() as stack:
                groups = {
                    algorithm: stack.enter_context(init(plan.backend, config={**base, "algorithms": {name: algorithm}}))
                    for algorithm in algorithms
                }
                for size in _sizes(Collective(name), plan.sizes):
                    points.append(_measure_point(Collective(name), size, groups, clock, left, plan.rounds))
                    left -= 1
    return control.rank, points


def _sizes(collective: Collective, sizes: Sequence[int]) -> list[int]:
    return [0] if collective is Collective.BARRIER else list(sizes)


class _Clock:
    """The rest of the budget, sent by rank 0 so that all ranks do the same."""

    def __init__(self, group: Group, budget_s: float) -> None:
        self._group = group
        self._end = time.monotonic() + budget_s

    def agree(self, seconds: Sequence[float]) -> tuple[list[float], float]:
        """Return the slowest rank's value of each number of seconds, and the rest of the budget."""
        own = np.array([*seconds, self._end - time.monotonic()])
        everyone = self._group.all_gather(own).reshape(self._group.world_size, -1)
        return [float(value) for value in everyone[:, :-1].max(axis=0)], float(everyone[0, -1])


def _measure_point(collective: Collective, size: int, groups: dict[str, Group], clock: _Clock, left: int, most: int) -> Point:
    """Measure all candidates for calls of one size; ``left`` points share the rest of the budget, and ``most`` rounds are enough."""
    some = next(iter(groups.values()))
    nbytes = round_size(collective.value, size, some.world_size, _DTYPE.itemsize)
    case = Case(collective.value, some.rank, some.world_size, nbytes, _DTYPE)
    if clock.agree([])[1] <= 0:
        return Point(collective.value, case.nbytes)
    arrays = case.arrays(np.empty)
    calls = {name: case.call(group, arrays) for name, group in groups.items()}
    first = []
    for name, call in list(calls.items()):
        case.spoil(arrays)
        try:
            call()  # makes connections and the schedule
        except PluginError as error:  # alike on all ranks: this world showed that the algorithm is wrong, and no byte was sent
            del calls[name]
            if some.rank == 0:
                sys.stderr.write(f"{name} is left out: {error}\n")
            continue
        _check(case, arrays, name)
        first.append(_sample(groups[name], call, 1))
    if not calls:
        return Point(collective.value, case.nbytes)
    estimates, remaining = clock.agree(first)
    hopeful = [name for name, estimate in zip(calls, estimates, strict=True) if estimate <= _HOPELESS * min(estimates)]
    counts = {name: _calls(estimate) for name, estimate in zip(calls, estimates, strict=True)}
    one_round = sum(estimate * counts[name] for name, estimate in zip(calls, estimates, strict=True) if name in hopeful)
    rounds = max(_FEWEST_ROUNDS, min(most, int(remaining / left / max(one_round, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in hopeful}
    for turn in range(rounds):
        # Each begins as often as any other: the first finds other caches and other neighbours than the last.
        for place in range(len(hopeful)):
            name = hopeful[(turn + place) % len(hopeful)]
            samples[name].append(_sample(groups[name], calls[name], counts[name]))
    slowest, _ = clock.agree([value for name in hopeful for value in samples[name]])
    times = dict(zip(calls, estimates, strict=True))
    times |= {name: float(np.median(slowest[i * rounds : (i + 1) * rounds])) for i, name in enumerate(hopeful)}
    return Point(collective.value, case.nbytes, times, rounds)


def _calls(seconds: float) -> int:
    return max(1, min(_MOST_CALLS, int(_SAMPLE_S / max(seconds, 1e-9))))


def _check(case: Case, arrays: Arrays, algorithm: str) -> None:
    fault = case.fault(arrays)
    if fault:
        what = f"{case.benchmark} of {case.nbytes} bytes by {algorithm}"
        raise InternalError(f"rank {case.rank}: {what} gave a wrong result: {fault}", rank=case.rank)


def _sample(group: Group, call: Callable[[], object], count: int) -> float:
    """Return the seconds of one of ``count`` calls that all ranks begin together."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main(sys.argv[1:])
