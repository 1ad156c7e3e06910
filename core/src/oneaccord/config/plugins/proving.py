"""The proof that an algorithm of a plugin must pass before it can be chosen, and again if it is used in another world."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from oneaccord.errors import DuplicatePluginError, PluginError
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES, Contract, Layout
from oneaccord.schedule.errors import ScheduleDeadlockError, ScheduleError
from oneaccord.schedule.proof.in_order import check_in_order
from oneaccord.schedule.proof.verify import verify
from oneaccord.schedule.steps import Collective, Schedule, reads_of, target_of

__all__ = ["BUDGET", "check_use", "prove", "sort_out"]

_log = logging.getLogger("oneaccord.plugins")

BUDGET: Final[int] = 200_000
"""The limit of a proof at first use, in steps of all ranks and chunks that they name: a second or two. It is not a time, because all ranks must
decide alike whether there is a proof."""

Key = tuple[str, str]
"""The names of a collective and of an algorithm for it."""

_WORLDS: Final[tuple[int, ...]] = (1, 2, 3, 4, 5, 8)
_BY_HOST: Final[tuple[tuple[int, int], ...]] = ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4))
"""The worlds of an algorithm ``by_host``, each with the ranks per host."""
_ALL_ROOTS_TO: Final[int] = 5
"""The largest world in which every root is tried; beyond it, the first and the last."""
_SEGMENTS: Final[tuple[int, ...]] = (1, 2)


@dataclass(frozen=True, slots=True)
class _Case:
    size: int
    root: int
    segments: int
    ranks_per_host: int

    def __str__(self) -> str:
        hosts = f", {self.ranks_per_host} ranks per host" if self.ranks_per_host > 1 else ""
        return f"world of {self.size}, root {self.root}, segments {self.segments}{hosts}"


def sort_out(
    offered: Iterable[Algorithm], known: Mapping[Key, Algorithm]
) -> tuple[dict[Key, Algorithm], dict[Key, PluginError]]:
    """Divide the algorithms of a plugin into right and refused ones.

    Parameters
    ----------
    offered
        The plugin's algorithms.
    known
        The algorithms of earlier plugins.

    Returns
    -------
    right
        The algorithms that were proved, by the names of their collective and their own.
    refused
        The reason for each other one: `DuplicatePluginError` if its name is taken, otherwise the error of `prove`.
    """
    builtin = {(each.collective.value, each.name) for each in BUILTIN}
    right: dict[Key, Algorithm] = {}
    refused: dict[Key, PluginError] = {}
    for algorithm in offered:
        key = ("no collective", repr(algorithm))
        try:
            _check_kind(algorithm)
            key = (algorithm.collective.value, algorithm.name)
            if key in builtin or key in known or key in right:
                owner = "oneaccord" if key in builtin else "another plugin" if key in known else "this plugin"
                raise DuplicatePluginError(f"{owner} already has an algorithm of that name; this one needs another name")
            prove(algorithm)
        except PluginError as error:
            refused[key] = error
        else:
            right[key] = algorithm
    return right, refused


def prove(algorithm: Algorithm) -> None:
    """Verify an algorithm in a few small worlds, with all that it claims about itself.

    Parameters
    ----------
    algorithm
        An object that a plugin registers.

    Raises
    ------
    PluginError
        It is not an `Algorithm`, or its schedules are wrong or do not have the properties that it claims. The message begins with the case, and
        ends with the verifier's counterexample, to which the error is chained.
    """
    _check_kind(algorithm)
    for case in _cases(algorithm):
        _prove_case(algorithm, case)


def check_use(algorithm: Algorithm, size: int, root: int, segments: int, ranks_per_host: int) -> None:
    """Prove the very schedules that a call is about to run, if registration has not; once in a process.

    Every rank proves those of all ranks, so that all come to the same end before any byte moves. A world that is too large for
    `BUDGET` is not proved, and a warning in the log says so.

    Parameters
    ----------
    algorithm
        One of a plugin's.
    size, root, segments, ranks_per_host
        As for `Algorithm.schedule`.

    Raises
    ------
    PluginError
        As `prove`, on every rank alike.
    """
    wrong = _verdict(algorithm, _Case(size, root, segments, ranks_per_host if algorithm.by_host else 1))
    if wrong is not None:
        name = f"the algorithm {algorithm.name!r} of a plugin for {algorithm.collective.value}"
        raise PluginError(
            f"{name} is wrong here, and no byte was sent: {wrong}. Leave it out of the config and of tables for this world, "
            "or report this to its author"
        ) from wrong


@lru_cache(maxsize=1024)
def _verdict(algorithm: Algorithm, case: _Case) -> PluginError | None:
    if case in _cases(algorithm):
        return None
    try:
        if _prove_case(algorithm, case, BUDGET):
            return None
    except PluginError as error:
        return error
    _log.warning(
        "the algorithm %r of a plugin for %s is not proved here (%s): its schedules have too many steps for a proof at first use, "
        "and when it was registered, it was proved in small worlds alone",
        algorithm.name, algorithm.collective.value, case,
    )  # fmt: skip
    return None


def _check_kind(algorithm: object) -> None:
    if not isinstance(algorithm, Algorithm) or not isinstance(algorithm.collective, Collective):
        raise PluginError(f"{algorithm!r} is not an Algorithm for a Collective")


def _cases(algorithm: Algorithm) -> Iterator[_Case]:
    promise = PROMISES[algorithm.collective]
    rooted = promise.input_on_root or promise.output_on_root
    for size, ranks_per_host in _BY_HOST if algorithm.by_host else [(size, 1) for size in _WORLDS]:
        roots = range(size) if size <= _ALL_ROOTS_TO else (0, size - 1)
        for root in roots if rooted else (0,):
            for segments in _SEGMENTS:
                yield _Case(size, root, segments, ranks_per_host)


def _prove_case(algorithm: Algorithm, case: _Case, budget: int | None = None) -> bool:
    """Verify one case, if that costs no more than ``budget``; return whether it was verified."""
    try:
        schedules = []
        for rank in range(case.size):
            schedules.append(_make(algorithm, rank, case))
            if budget is not None:
                budget -= _effort(schedules[-1])
                if budget < 0:
                    return False
        _verify(algorithm, case, schedules)
    except ScheduleError as error:
        raise PluginError(f"{case}: {type(error).__name__}: {error}") from error
    except PluginError:
        raise
    except Exception as error:  # a stranger's function may raise anything
        raise PluginError(f"{case}: making its schedule raised {type(error).__name__}: {error}") from error
    return True


def _effort(schedule: Schedule) -> int:
    """Return the cost of a proof for one rank: its steps, its chunks, and those that the steps name."""
    refs = [ref for step in schedule.steps for ref in (*reads_of(step), target_of(step)) if ref is not None]
    return len(schedule.steps) + schedule.input_chunks + schedule.output_chunks + sum(ref.count for ref in refs)


def _verify(algorithm: Algorithm, case: _Case, schedules: list[Schedule]) -> None:
    for rank, schedule in enumerate(schedules):
        if schedule != _make(algorithm, rank, case):
            raise PluginError(f"{case}: rank {rank} gets another schedule when it is made a second time; it must be pure")
    verify(schedules, ordered=algorithm.ordered, canonical=algorithm.canonical)
    try:
        check_in_order(schedules)
    except ScheduleDeadlockError as error:
        raise PluginError(
            f"{case}: the steps of {algorithm.name!r} cannot run in the order in which they are listed: {error}; list the steps so that each "
            "receive stands before the steps that wait for a send, if the peer may do the same"
        ) from error
    # A vector may be cut into any number of chunks; blocks are cut as the call says, and only once if it need not be more.
    contract = Contract.of(schedules[0])
    vector = contract.promise.input is Layout.VECTOR or algorithm.collective is Collective.BARRIER
    asked = case.segments == 1 or algorithm.segment_bytes is not None
    if asked and not vector and contract.segments != case.segments:
        raise PluginError(f"{case}: its schedules cut each block into {contract.segments} segments")


def _make(algorithm: Algorithm, rank: int, case: _Case) -> Schedule:
    schedule: object = algorithm.schedule(rank, case.size, case.root, case.segments, case.ranks_per_host)
    if not isinstance(schedule, Schedule):
        raise PluginError(f"{case}: rank {rank} gets {schedule!r}, which is not a Schedule")
    got = (schedule.collective, schedule.rank, schedule.size, schedule.root)
    wanted = (algorithm.collective, rank, case.size, case.root)
    for name, mine, theirs in zip(("collective", "rank", "size", "root"), wanted, got, strict=True):
        if mine != theirs:
            raise PluginError(f"{case}: the schedule of rank {rank} has {name} {theirs!r}; expected {mine!r}")
    if schedule.even and not algorithm.even:
        raise PluginError(f"{case}: the schedule of rank {rank} needs even blocks, but the algorithm does not claim even")
    return schedule
