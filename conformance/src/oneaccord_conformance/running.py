"""Running checks, one after the other, and their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from oneaccord_conformance.registry import NEEDS, Check
from oneaccord_conformance.worlds import WorldMaker

__all__ = ["Report", "Result", "run_check", "run_checks", "why_skipped"]

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check.

    Attributes
    ----------
    check
        Which.
    status
        Whether the promise is kept.
    text
        The fault, or the reason why it was skipped.
    took_s
        Seconds.
    """

    check: Check
    status: Status
    text: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of all checks.

    Attributes
    ----------
    backend
        The backend's name.
    ranks
        How many ranks its worlds had.
    results
        In the order in which the checks ran.
    left
        How many checks did not run, as the user interrupted them.
    """

    backend: str
    ranks: int
    results: tuple[Result, ...]
    left: int = 0

    def count(self, status: Status, chapter: str | None = None) -> int:
        """Return how many checks, of one chapter or all, came out so."""
        return sum(each.status == status and chapter in (None, each.check.chapter) for each in self.results)

    @property
    def conforms(self) -> bool:
        """Whether all checks ran, none failed, and one passed at least."""
        return self.left == 0 == self.count("failed") < self.count("passed")


def why_skipped(check: Check, worlds: WorldMaker) -> str:
    """Return the need of a check that the backend has declared to lack; an empty text if it lacks nothing."""
    return next((f"{worlds.backend} declares so: {NEEDS[need]}" for need in check.needs if worlds.lacks(need)), "")


def run_check(check: Check, worlds: WorldMaker) -> Result:
    """Run one check; any exception is a finding."""
    began = time.monotonic()
    reason = why_skipped(check, worlds)
    if reason:
        return Result(check, "skipped", reason, 0.0)
    try:
        check.run(worlds)
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return Result(check, "failed", text, time.monotonic() - began)
    return Result(check, "passed", "", time.monotonic() - began)


def run_checks(
    checks: Sequence[Check],
    worlds: WorldMaker,
    started: Callable[[Check], None] = lambda _: None,
    finished: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Run checks one after the other.

    Parameters
    ----------
    checks, worlds
        Which, and on what.
    started, finished
        Called before and after each.

    Returns
    -------
    Report
        Also if checks failed, and if a KeyboardInterrupt ended them.
    """
    results: list[Result] = []
    with contextlib.suppress(KeyboardInterrupt):
        for check in checks:
            started(check)
            results.append(run_check(check, worlds))
            finished(results[-1])
    return Report(worlds.backend, worlds.ranks, tuple(results), len(checks) - len(results))
