"""The facts about a collective or a message that an observer gets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OperationEvent"]


@dataclass(frozen=True, slots=True)
class OperationEvent:
    """One collective, or one call that sends or receives a message, as one rank sees it.

    Attributes
    ----------
    group
        The group's id, alike on all its ranks.
    rank
        The rank that reports, counted in that group.
    operation
        The operation's name, such as ``"all_reduce"`` or ``"send"``.
    sequence
        The number of the operation in its group, counted from 0; of a message, its number among those of this rank, from 1.
    algorithm
        The algorithm that runs it, or the backend's name for a native collective; empty for a message.
    nbytes
        The size of this rank's array in bytes; 0 for a barrier, and for a receive or a probe that has not ended.
    dtype
        The name of the dtype, such as ``"float32"``; empty for a barrier and for an object.
    started_ns
        When it started: `time.monotonic_ns`, comparable on one host only.
    finished_ns
        When it finished, on the same clock; None while it runs.
    error
        The exception that ended it; None while it runs and when it succeeded.
    call
        A message's call in words, such as ``"recv from any rank, tag 3"``; empty for a collective.
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
    call: str = ""
