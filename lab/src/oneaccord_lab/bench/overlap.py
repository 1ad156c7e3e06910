"""The part of an all_reduce that runs while its caller does other work.

It is the program of each rank of ``oneaccord bench overlap``: ``oneaccord run -n 2 -m oneaccord_lab.bench.overlap PLAN``. A plan's points are works,
of the names in `WORKS`, and sizes; it says how many iterations.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from oneaccord.group.group import Group
from oneaccord_lab.bench.cases import Arrays, Case
from oneaccord_lab.bench.measure import Bench, Scribe, measure
from oneaccord_lab.bench.plan import RAW, SYMMETRIC, WORKS, Overlap, Plan, Point, Target
from oneaccord_lab.bench.raw import ASYNC_RAW
from oneaccord_lab.bench.statistics import order, overlapped

__all__ = ["main", "measure_overlap"]

_TRIALS: Final[int] = 3
_SIDE: Final[int] = 192
_COUNTED: Final[int] = 2000

Work = Callable[[int], None]


def main(argv: Sequence[str]) -> None:
    """Measure according to the plan whose JSON is the only argument."""
    measure_overlap(Plan.load(argv[0]))


def measure_overlap(plan: Plan) -> None:
    """Measure all that the plan names, as `oneaccord_lab.bench.measure.measure` does, with `Overlap` records in place of rows.

    Raises
    ------
    CommError, ConfigError
        The ranks did not meet, or a rank was lost.
    """
    measure(plan, _Overlapping)


@dataclass(slots=True, eq=False)
class _Run:
    """One target behind one kind of work."""

    target: Target
    arrays: Arrays
    begin: Callable[[], Any]
    work: Work
    units: int = 0
    comm_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)

    def seconds(self, *, calls: bool, units: int) -> float:
        """Return how long it takes to begin the call, if that is wanted, to do as many units of work, and to wait for the call."""
        start = time.perf_counter()
        under_way = self.begin() if calls else None
        self.work(units)
        if under_way is not None:
            under_way.wait()
        return time.perf_counter() - start

    def fresh(self) -> None:
        """Put the operand at the place of the result, for targets that work in place; so all of them find the caches alike."""
        result, given = self.arrays.result, self.arrays.given
        assert result is not None
        assert given is not None
        result[...] = given


class _Overlapping(Bench):
    """Measures each target's call alone, work alone, and both."""

    def __init__(self, plan: Plan, control: Group, scribe: Scribe) -> None:
        super().__init__(plan, control, scribe)
        self._raw: dict[str, Any] = {}

    def close(self) -> None:
        """Close the open resources."""
        for made in self._raw.values():
            if hasattr(made, "close"):
                made.close()
        super().close()

    def _point(self, point: Point, share_s: float) -> None:
        some = self._control
        case = Case("all_reduce", some.rank, some.world_size, point.nbytes, self._dtype, self._plan.op)
        arrays = case.arrays(np.empty)
        work = _work(point.benchmark)
        runs = []
        for target in self._plan.targets:
            run = self._prepare(target, point, case, arrays, work)
            if run is not None:
                runs.append(run)
        count = self._plan.iterations or 1
        for turn in range(count):
            for run in [runs[place] for place in order(turn, len(runs))]:
                if run in runs and not self._turn(run, case, point):
                    runs.remove(run)
        for run in runs:
            comm_s, work_s, both_s = (statistics.median(each) for each in (run.comm_s, run.work_s, run.both_s))
            found = Overlap(
                run.target.name,
                point.benchmark,
                self._plan.dtype,
                some.world_size,
                point.nbytes,
                count,
                1e3 * comm_s,
                1e3 * work_s,
                1e3 * both_s,
                overlapped(comm_s, work_s, both_s),
            )
            self._scribe.say(found)

    def _prepare(self, target: Target, point: Point, case: Case, arrays: Arrays, work: Work) -> _Run | None:
        """Make a first call, check it, and find the amount of work that takes as long; None if the target fails."""
        made: list[_Run] = []

        def first() -> None:
            group: Any = self._groups[target.backend]
            own = case.arrays(group.empty) if target.variant == SYMMETRIC else arrays
            if target.variant == RAW:
                if target.backend not in self._raw:
                    folder = Path(self._plan.stream).parent
                    self._raw[target.backend] = ASYNC_RAW[target.backend](case.rank, case.world_size, case.dtype, folder)
                group = self._raw[target.backend]
            run = _Run(target, own, lambda: group.all_reduce_async(own.given, case.op, out=own.result), work)
            run.fresh()
            run.seconds(calls=True, units=0)
            made.append(run)

        if not self._works(target, point, first) or not self._is_right(target, point, case, made[0].arrays):
            return None
        run = made[0]
        comm_s = [self._slowest(run, point, calls=True) for _ in range(_TRIALS)]
        unit_s = [self._slowest(run, point, units=1) for _ in range(_TRIALS)]
        known = [each for each in comm_s if each is not None], [each for each in unit_s if each is not None]
        if len(known[0]) < _TRIALS or len(known[1]) < _TRIALS:
            return None
        run.units = max(1, round(min(known[0]) / min(known[1])))
        return run

    def _turn(self, run: _Run, case: Case, point: Point) -> bool:
        """Measure all three times once; return whether the target may continue."""
        for times, calls, units in ((run.comm_s, True, 0), (run.work_s, False, run.units), (run.both_s, True, run.units)):
            found = self._slowest(run, point, calls=calls, units=units)
            if found is None:
                return False
            times.append(found)
        return self._is_right(run.target, point, case, run.arrays)

    def _slowest(self, run: _Run, point: Point, *, calls: bool = False, units: int = 0) -> float | None:
        """Measure once, on all ranks at once; return the slowest rank's seconds, or None if the target failed."""
        own = [0.0]
        run.fresh()
        self._control.barrier()

        def measured() -> None:
            own[0] = run.seconds(calls=calls, units=units)

        if not self._works(run.target, point, measured):
            return None
        [slowest], _ = self._agree(own)
        return slowest


def _work(name: str) -> Work:
    """Return a function that does so many units of a kind of work; a unit takes some 100 microseconds."""
    if name == WORKS[0]:
        left, right, product = np.full((3, _SIDE, _SIDE), 0.5, np.float32)

        def multiply(units: int) -> None:
            for _ in range(units):
                np.matmul(left, right, out=product)

        return multiply

    def count(units: int) -> None:
        total = 0
        for _ in range(units):
            for number in range(_COUNTED):
                total += number & 7

    return count


if __name__ == "__main__":
    main(sys.argv[1:])
