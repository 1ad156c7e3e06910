"""Measuring backends on the ranks of one job: all of them in the same processes, each in turn, with every result checked.

It is the program of each rank of ``oneaccord bench``: ``oneaccord run -n 2 -m oneaccord_lab.bench.measure PLAN``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from oneaccord.common.native import why_not_native
from oneaccord.config import load
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.errors import OneAccordError, UnsupportedError, UsageError
from oneaccord.group.group import Group
from oneaccord.group.init import init
from oneaccord.job.threads import current_thread_rank
from oneaccord_lab.bench.cases import Arrays, Case, parse_dtype
from oneaccord_lab.bench.peers import best_settings, peer_versions
from oneaccord_lab.bench.plan import RAW, SYMMETRIC, Done, Opened, Plan, Point, Problem, Record, Row, Skipped, Target
from oneaccord_lab.bench.probes import Probes
from oneaccord_lab.bench.raw import RAW as _RAW
from oneaccord_lab.bench.statistics import bus_factor, order, samples, summary

__all__ = ["Bench", "Scribe", "main", "measure"]

_FEWEST_ROUNDS: Final[int] = 5
_MOST_ROUNDS: Final[int] = 40
_BATCH_S: Final[float] = 4e-3
_MOST_CALLS: Final[int] = 1000
"""A batch is as many calls as take `_BATCH_S`, and no more than these."""
_SHORT_S: Final[float] = 1e-3
"""A call that takes less is warmed up by several calls, and timed by several before that is believed."""
_LONG_S: Final[float] = 10e-3
"""A call that takes more moves so many bytes that none before it could have warmed anything."""
_GRACE_S: Final[float] = 5.0
_STATE_BYTES: Final[int] = 256

_FINE, _REFUSED, _BROKEN = 0, 1, 2

Stamps = list[int]


def main(argv: Sequence[str]) -> None:
    """Measure according to the plan whose JSON is the only argument."""
    measure(Plan.load(argv[0]))


def measure(plan: Plan, kind: type[Bench] | None = None) -> None:
    """Measure all points of the plan, and write down the results; every rank of the job must call this.

    A target that fails is left out from there on, as a record says; the others continue. A rank whose call hangs beyond
    all deadlines, in a library that has none, ends its process; the plan's state file says what it was doing.

    Raises
    ------
    CommError, ConfigError
        The ranks did not meet, or a rank was lost.
    """
    resolved = load()
    settings, base = resolved.settings, resolved.given()
    base["rendezvous"] = {**base.get("rendezvous", {}), "timeout_s": settings.rendezvous_timeout_s}
    carrier = "tcp" if _is_available("tcp") else plan.targets[0].backend
    # The agreements of the ranks must not fail with the measurements; they wait for the slowest of those.
    patience_s = 4 * (plan.timeout_s + _GRACE_S)
    with init(carrier, config=base, timeout_s=patience_s) as control, Scribe(plan, control.rank) as scribe:
        bench = (kind or Bench)(plan, control, scribe)
        try:
            bench.open(base, settings.rendezvous_timeout_s, _executor(settings.native))
            bench.run()
        except BaseException:
            scribe.has_ended = True
            raise
        finally:
            bench.close()


def _executor(wanted: bool) -> str:
    if not wanted:
        return "Python (native = false)"
    missing = why_not_native()
    return f"Python (oneaccord-native: {missing})" if missing else "compiled (oneaccord-native)"


def _is_available(backend: str) -> bool:
    plugins = get_plugin_manager()
    return backend in plugins.names() and plugins.available(backend) is None


class Scribe:
    """The records of rank 0, for the process that started the ranks; the others write nothing."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._writes = rank == 0
        self._stream = self._state = -1
        self.has_ended = False
        """Whether measuring has failed: then it stays written down which backend had its turn, although others are closed yet."""

    def __enter__(self) -> Self:
        if self._writes:
            self._stream = os.open(self._plan.stream, os.O_WRONLY)
            self._state = os.open(self._plan.state, os.O_WRONLY | os.O_CREAT, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._stream, self._state):
            if fd >= 0:
                os.close(fd)

    def say(self, *records: Record) -> None:
        """Write records, one a line."""
        for record in records if self._writes else ():
            line = memoryview(msgspec.json.encode(record) + b"\n")
            while line:
                line = line[os.write(self._stream, line) :]

    def begins(self, backend: str) -> None:
        """Write down which backend has its turn: it is to blame if no record follows. Wakes no process."""
        if self._writes and not self.has_ended:
            os.pwrite(self._state, backend.encode().ljust(_STATE_BYTES), 0)


@dataclass(slots=True, eq=False)
class _Run:
    """One target at one point."""

    target: Target
    group: Group
    arrays: Arrays
    call: Callable[[], object]
    estimate_s: float = 0.0
    calls: int = 1
    warmup: int = 0
    batches: list[Stamps] = field(default_factory=list)


class Bench:
    """The work of one rank for a plan; `run` measures all points, and `_point` one of them."""

    def __init__(self, plan: Plan, control: Group, scribe: Scribe) -> None:
        self._plan = plan
        self._control = control
        self._scribe = scribe
        self._end = time.monotonic() + plan.budget_s
        self._groups: dict[str, Group] = {}
        self._broken: dict[str, str] = {}
        self._dtype = parse_dtype(plan.dtype)
        self._probes: Probes | None = None
        # Of threads there is one process, which others watch.
        self._watches = current_thread_rank() is None

    # The common work of all ranks

    def open(self, base: dict[str, Any], patience_s: float, executor: str) -> None:
        """Make one group for each backend, each of which has ``patience_s`` seconds to meet."""
        if self._plan.limits:
            self._probes = Probes(self._control, Path(self._plan.stream).parent, self._plan.timeout_s)
        configured = base.get("backends", {})
        tables = {each.backend: best_settings(each.backend, configured.get(each.backend, {})) for each in self._plan.targets}
        for name, table in tables.items():

            def join(name: str = name, table: dict[str, Any] = table) -> None:
                tuned = {**base, "backends": {**configured, name: table}}
                self._groups[name] = init(name, config=tuned, timeout_s=self._plan.timeout_s)

            text, _ = self._attempt(name, join, patience_s)
            if text:
                self._give_up(name, text)
        self._scribe.say(Opened(peer_versions(), {name: table for name, table in tables.items() if table}, executor))

    def close(self) -> None:
        """Close the open resources."""
        for name in list(self._groups):
            self._close(name)
        if self._probes is not None:
            self._probes.close()

    def run(self) -> None:
        """Measure all points."""
        for index, point in enumerate(self._plan.points):
            left_s = self._agree([], self._end - time.monotonic())[1]
            if left_s <= 0:
                self._scribe.say(Skipped(point.benchmark, point.nbytes), Done())
                continue
            self._point(point, left_s / (len(self._plan.points) - index))
            self._scribe.say(Done())

    def _point(self, point: Point, share_s: float) -> None:
        """Measure all targets at a point, in about ``share_s`` seconds."""
        some = self._control
        case = Case(point.benchmark, some.rank, some.world_size, point.nbytes, self._dtype, self._plan.op)
        runs: list[_Run] = []
        shared: list[Arrays] = []
        for target in self._plan.targets:
            run = self._begin(target, point, case, shared)
            if run is not None:
                runs.append(run)
        self._estimate(runs, point)
        probes = self._probes if runs else None
        probes_s = 0.0 if probes is None else self._agree([probes.begin(point.nbytes)])[0][0]
        rounds = self._rounds(runs, share_s, probes_s)
        for turn in range(rounds):
            for run in [runs[place] for place in order(turn, len(runs))]:
                if run in runs and not self._batch(run, case, point, turn, rounds):
                    runs.remove(run)
            if probes is not None:
                probes.turn()
        limits = None if probes is None else probes.result(point)
        if limits is not None:
            self._scribe.say(limits)
        for run in runs:
            self._scribe.say(*self._row(run, point))

    def _begin(self, target: Target, point: Point, case: Case, shared: list[Arrays]) -> _Run | None:
        """Make a target's arrays and its first call, and check that; None if it fails."""
        made: list[_Run] = []

        def first() -> None:
            group = self._groups[target.backend]
            if target.variant == SYMMETRIC:
                arrays = case.arrays(group.empty)
            else:
                arrays = shared[0] if shared else case.arrays(np.empty)
                shared[:] = [arrays]
            if target.variant == RAW:
                group = _RAW[target.backend](case.rank, case.world_size, case.dtype)
            case.spoil(arrays)
            run = _Run(target, group, arrays, case.call(group, arrays))
            run.call()
            made.append(run)

        if not self._works(target, point, first) or not self._is_right(target, point, case, made[0].arrays):
            return None
        return made[0]

    def _estimate(self, runs: list[_Run], point: Point) -> None:
        """Find roughly how long a call takes: by two calls, and if it is short, then by more."""
        for count, shortest in ((2, 0.0), (20, _SHORT_S)):
            seconds = []
            for run in list(runs):
                if (shortest and run.estimate_s > shortest) or self._works(run.target, point, partial(_estimate, run, count)):
                    seconds.append(run.estimate_s)
                else:
                    runs.remove(run)
            slowest, _ = self._agree(seconds)
            for run, estimate in zip(runs, slowest, strict=True):
                run.estimate_s = estimate

    def _rounds(self, runs: list[_Run], share_s: float, more_s: float) -> int:
        """Decide how many calls make a batch of each target, and how many batches there are, with ``more_s`` seconds after each of all."""
        most = self._plan.iterations
        for run in runs:
            estimate = max(run.estimate_s, 1e-9)
            run.calls = max(1, min(_MOST_CALLS, int(_BATCH_S / estimate)))
            run.warmup = 0 if estimate > _LONG_S else 1 if estimate > _SHORT_S else 3
            if self._plan.warmup is not None:
                run.warmup = self._plan.warmup
        if most is not None:
            calls = -(-most // _MOST_ROUNDS)
            for run in runs:
                run.calls = calls
            return -(-most // calls)  # the last batch may be shorter
        one_round = more_s + sum(run.estimate_s * (run.calls + run.warmup + 1) for run in runs)
        return max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(share_s / max(one_round, 1e-9))))

    def _batch(self, run: _Run, case: Case, point: Point, turn: int, rounds: int) -> bool:
        """Make one batch of calls; the last one's result is checked. Returns whether the target may continue."""
        is_last = turn == rounds - 1
        count = run.calls
        if self._plan.iterations is not None:
            done = sum(len(batch) - 1 for batch in run.batches)
            count = min(count, self._plan.iterations - done)
        if is_last:
            case.spoil(run.arrays)
        expected_s = (count + run.warmup) * run.estimate_s
        if not self._works(run.target, point, lambda: run.batches.append(_timed(run, run.warmup, count)), expected_s):
            return False
        return not is_last or self._is_right(run.target, point, case, run.arrays)

    def _row(self, run: _Run, point: Point) -> list[Record]:
        """Return the row of a target, on rank 0."""
        own = np.array([stamp for batch in run.batches for stamp in batch], np.int64)
        everyone = self._control.gather(own)
        if everyone is None:
            return []
        stamps = everyone.reshape(self._control.world_size, -1)
        times: list[int] = []
        start = 0
        for batch in run.batches:
            times += samples(stamps[:, start : start + len(batch)], point.benchmark).tolist()
            start += len(batch)
        numbers = summary(times, point.nbytes, bus_factor(point.benchmark, self._control.world_size))
        where = (run.target.name, point.benchmark, self._plan.dtype, self._control.world_size, point.nbytes)
        return [Row(*where, **numbers)]

    # The parts that may fail

    def _works(self, target: Target, point: Point, action: Callable[[], None], expected_s: float = 0.0) -> bool:
        """Do something with a target's group; return whether that went well on all ranks."""
        if target.backend in self._broken:  # while another target of the same backend had its turn
            self._problem(target, point, self._broken[target.backend])
            return False
        text, severity = self._attempt(target.backend, action, expected_s)
        if severity == _BROKEN:
            self._give_up(target.backend, text)
        if severity != _FINE:
            self._problem(target, point, text)
        return severity == _FINE

    def _is_right(self, target: Target, point: Point, case: Case, arrays: Arrays) -> bool:
        fault = case.fault(arrays)
        found = self._first_text(fault, int(bool(fault)))
        if found:
            self._scribe.say(Problem(target.name, point.benchmark, point.nbytes, found, wrong=True))
        return not found

    def _attempt(self, backend: str, action: Callable[[], None], expected_s: float = 0.0) -> tuple[str, int]:
        """Do work that may fail on any rank; return the error of the first rank that failed, and its severity."""
        self._scribe.begins(backend)
        text, severity = "", _FINE
        self._watch(2 * self._plan.timeout_s + _GRACE_S + 10 * expected_s)
        try:
            action()
        except (UsageError, UnsupportedError, MemoryError) as error:
            text, severity = _words(error), _REFUSED
        except Exception as error:  # noqa: BLE001 - any exception of a plugin ends only that plugin's part
            text, severity = _words(error), _BROKEN
        severities = self._control.all_gather(np.array([severity], np.int8))
        self._scribe.begins("")
        self._unwatch()
        worst = int(severities.max())
        if worst == _REFUSED and severities.min() == _FINE:
            worst = _BROKEN  # some ranks made the call, and wait for the others
        return (self._first_text(text, severity) if worst else ""), worst

    def _first_text(self, text: str, severity: int) -> str:
        """Return the worst report of all ranks, of several the lowest; all ranks must call this together."""
        own = np.array([severity], np.int8)
        severities = self._control.all_gather(own)
        if not severities.any():
            return ""
        rank = int(severities.argmax())
        said = self._control.broadcast_object(f"rank {rank}: {text}" if rank == self._control.rank else None, rank)
        return str(said)

    def _problem(self, target: Target, point: Point, text: str) -> None:
        self._scribe.say(Problem(target.name, point.benchmark, point.nbytes, text))

    def _give_up(self, backend: str, text: str) -> None:
        self._broken[backend] = text
        self._close(backend)

    def _close(self, backend: str) -> None:
        group = self._groups.pop(backend, None)
        if group is not None:
            self._scribe.begins(backend)
            self._watch(2 * self._plan.timeout_s + _GRACE_S)
            with contextlib.suppress(OneAccordError):
                group.close(timeout_s=_GRACE_S)
            self._scribe.begins("")
            self._unwatch()

    def _agree(self, seconds: Sequence[float], rank_0: float = 0.0) -> tuple[list[float], float]:
        """Return the slowest rank's value of each number of seconds, and the number of rank 0."""
        everyone = self._control.all_gather(np.array([*seconds, rank_0])).reshape(self._control.world_size, -1)
        return [float(value) for value in everyone[:, :-1].max(axis=0)], float(everyone[0, -1])

    def _watch(self, limit_s: float) -> None:
        """End this process if it is still here after so long: a call that sits in a library cannot be ended otherwise."""
        if self._watches:
            faulthandler.dump_traceback_later(limit_s, exit=True)

    def _unwatch(self) -> None:
        if self._watches:
            faulthandler.cancel_dump_traceback_later()


def _timed(run: _Run, warmup: int, count: int) -> Stamps:
    """Make a batch of calls back to back; return when this rank was ready, and when each call was over."""
    call, clock = run.call, time.perf_counter_ns
    run.group.barrier()
    for _ in repeat(None, warmup):
        call()
    stamps = [clock()]
    for _ in repeat(None, count):
        call()
        stamps.append(clock())
    return stamps


def _estimate(run: _Run, count: int) -> None:
    stamps = _timed(run, 0, count)
    run.estimate_s = (stamps[-1] - stamps[0]) / count / 1e9


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
