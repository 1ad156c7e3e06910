"""The faults of a schedule: one class for each promise that it can break.

::

    ScheduleError (OneAccordError)
        ├─ MalformedScheduleError    a step names memory that is not there, or writes memory that it must not
    ├─ UnmatchedMessageError     a send without its receive, or of another size
    ├─ ScheduleDeadlockError     ranks that wait for each other forever
    ├─ OverlapError              two steps that may run at once touch the same memory, and one writes it
        ├─ UndefinedReadError        a step reads memory that has not been written
        ├─ WrongResultError          the output does not hold what the collective promises
    └─ OrderError                the right operands in the wrong order, or in another order on another rank
"""

from __future__ import annotations

from oneaccord.errors import OneAccordError

__all__ = [
    "MalformedScheduleError",
    "OrderError",
    "OverlapError",
    "ScheduleDeadlockError",
    "ScheduleError",
    "UndefinedReadError",
    "UnmatchedMessageError",
    "WrongResultError",
]


class ScheduleError(OneAccordError):
    """A schedule breaks a promise; the message is a counterexample.

    Parameters
    ----------
    message
        The rank, the step and the chunk, what was found there and what was expected.
    rank
        The rank whose schedule is wrong.
    step
        The index of the step with the fault, if there is one.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.step: int | None = step


class MalformedScheduleError(ScheduleError):
    """A schedule names a rank, step, chunk, buffer or reduction that is not there, writes ``INPUT``, or is no plain data."""


class UnmatchedMessageError(ScheduleError):
    """A send without a receive, a receive without a send, or a pair whose sizes differ."""


class ScheduleDeadlockError(ScheduleError):
    """Ranks wait for each other forever when a send waits for its receive."""


class OverlapError(ScheduleError):
    """Two steps, neither of which comes after the other, touch the same memory, and one of them writes it."""


class UndefinedReadError(ScheduleError):
    """A step reads output or scratch memory before anything was written there."""


class WrongResultError(ScheduleError):
    """An output chunk does not hold exactly what the collective promises."""


class OrderError(ScheduleError):
    """Operands are combined in an order that was excluded, or not in the same order for every rank."""
