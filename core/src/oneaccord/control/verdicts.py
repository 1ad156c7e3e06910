"""The first cause of a job's failure, as an error."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oneaccord.control.protocol import ANOTHER_JOB, RUNS_ALREADY, Verdict
from oneaccord.errors import (
    AbortedError,
    AuthenticationError,
    CollectiveMismatchError,
    CommError,
    DeadlineError,
    DeadlockError,
    InputChangedError,
    InternalError,
    OneAccordError,
    PeerLostError,
    ProtocolError,
    RaceError,
    RendezvousError,
)

__all__ = ["KINDS", "RunsAlreadyError", "differ_in_length", "error_from"]

_GATHERING = re.compile(r"((?:all_)?gather\(\w+\[)\d+([^()=]*(?:root=\d+)?)\)")
"""A gathering without counts, in words. The length of axis 0 stands between the groups."""


class RunsAlreadyError(RendezvousError):
    """A rank came to begin a job that runs already."""


KINDS: dict[str, type[OneAccordError]] = {
    "aborted": AbortedError,
    "authentication": AuthenticationError,
    "changed": InputChangedError,
    "deadlock": DeadlockError,
    "deadline": DeadlineError,
    "internal": InternalError,
    "lost": PeerLostError,
    "silent": DeadlineError,
    "mismatch": CollectiveMismatchError,
    "protocol": ProtocolError,
    "race": RaceError,
    "rendezvous": RendezvousError,
    "failed": CommError,
    RUNS_ALREADY: RunsAlreadyError,
    ANOTHER_JOB: RendezvousError,
}
"""The error of each kind of report and verdict."""


def error_from(verdict: Verdict, rank: int) -> OneAccordError:
    """Return the error that ``rank`` raises for a verdict."""
    kind = KINDS.get(verdict.kind, CommError)
    return kind(verdict.text, rank=rank, peer=verdict.peer, operation=verdict.operation, sequence=verdict.sequence)


def differ_in_length(calls: Iterable[str]) -> bool:
    """Return whether calls, in words, are gatherings of arrays that differ along axis 0 alone."""
    found = [_GATHERING.match(call) for call in calls]
    return all(found) and len({each[0] for each in found if each}) > 1 == len({each.groups() for each in found if each})
