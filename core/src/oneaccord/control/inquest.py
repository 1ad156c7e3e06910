"""An inquest: one rank reports a failure, others say what they did, and the ranks that it is about are found from their answers."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import msgspec

from oneaccord.control.protocol import Report, Testimony
from oneaccord.control.waits import behind_whom

__all__ = ["Finding", "Inquest", "Outcome", "conclude"]


class Inquest(msgspec.Struct):
    """A report, and what the ranks that were asked have answered."""

    reporter: int
    report: Report
    asked: set[int]
    answers: dict[int, Testimony] = {}

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in sorted(self.asked) if rank not in self.answers]

    def is_answered(self, gone: Collection[int]) -> bool:
        """Return whether all that were asked have answered, except those that are gone."""
        return len(self.answers) >= len(self.asked - {*gone})

    def has_entered(self, rank: int) -> bool:
        """Return whether a rank has answered that it was in the call."""
        return rank in self.answers and self.answers[rank].entered


class Outcome(Enum):
    """Why a deadline passed."""

    SILENT = auto()
    """Ranks did not answer."""
    ABSENT = auto()
    """Ranks did not come."""
    PRESENT = auto()
    """All ranks were there, and the reporter waited for one of them."""
    WAITING = auto()
    """The reporter waits for one rank, perhaps through others."""
    UNKNOWN = auto()


class Finding(msgspec.Struct, frozen=True):
    """What a failure is about.

    Attributes
    ----------
    outcome
        Why a deadline passed; unknown for other failures.
    peer
        The rank that the failure names.
    missing
        Those that did not answer or come.
    """

    outcome: Outcome
    peer: int | None
    missing: list[int] = []


def conclude(inquest: Inquest, absent: list[int] | None = None) -> Finding:
    """Return what a failure is about.

    Parameters
    ----------
    inquest
        The report and the answers.
    absent
        The ranks that did not come to an exchange, if the report is about one.
    """
    report, silent = inquest.report, inquest.silent
    if report.kind != "deadline":
        return Finding(Outcome.UNKNOWN, report.peer)
    if report.sequence is None:  # between two ranks, and the peer may itself wait for another one
        peer = behind_whom(inquest.reporter, report.peer, inquest.answers, silent)
        missing = [rank for rank in silent if rank == peer]
    else:
        peer = report.peer
        missing = silent or (_furthest_behind(inquest) if absent is None else absent)
        if peer is not None and not missing:
            return Finding(Outcome.PRESENT, None)
    if missing:
        return Finding(Outcome.SILENT if silent else Outcome.ABSENT, min(missing), missing)
    return Finding(Outcome.UNKNOWN if peer is None else Outcome.WAITING, peer)


def _furthest_behind(inquest: Inquest) -> list[int]:
    """Return the ranks that the others wait for: of those that did not come, the ones that have made the fewest calls."""
    outside = {rank: answer.calls for rank, answer in inquest.answers.items() if not answer.entered}
    return [rank for rank, calls in outside.items() if calls == min(outside.values())]
