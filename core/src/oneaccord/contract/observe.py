"""The facts about a collective that an observer gets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OperationEvent"]


@dataclass(frozen=True, slots=True)
class OperationEvent:
    """One collective, as one rank sees it.

    Attributes
    ----------
    group
        The group's id, alike on all its ranks.
    rank
        The rank that reports, counted in that group.
    operation
        The operation's name, such as ``"all_reduce"``.
    sequence
        The number of the operation in its group, counted from 0.
    algorithm
        The algorithm that runs it, or the backend's name for a native collective.
    nbytes
        The size of this rank's array in bytes; 0 for a barrier.
    dtype
        The name of the dtype, such as ``"float32"``; empty for a barrier.
    started_ns
        When it started: `time.monotonic_ns`, comparable on one host only.
    finished_ns
        When it finished, on the same clock; None while it runs.
    error
        The exception that ended it; None while it runs and when it succeeded.
    """

    group: str
    rank: int
    operation: str
    sequence: int
    algorithm: str
    nbytes: int
    dtype: str
    started_ns: int
    finished_ns: int | None = None
    error: BaseException | None = None
