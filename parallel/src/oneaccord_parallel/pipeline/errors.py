"""The faults of a plan: one class for each promise that it can break.

::

    PlanError (OneAccordError)
        ├─ MalformedPlanError     it names a rank, stage, microbatch or kind of action that does not exist
    ├─ MissingActionError     a forward or backward pass that no rank does
    ├─ RepeatedActionError    one that is done twice
    ├─ PlanDeadlockError      ranks, or the actions of one rank, that wait for each other forever
    └─ PlanPeakError          a rank holds more activations than the plan promises
"""

from __future__ import annotations

from oneaccord.errors import OneAccordError

__all__ = [
    "MalformedPlanError",
    "MissingActionError",
    "PlanDeadlockError",
    "PlanError",
    "PlanPeakError",
    "RepeatedActionError",
]


class PlanError(OneAccordError):
    """A plan breaks a promise; the message is a counterexample.

    Parameters
    ----------
    message
        The rank and the action, what was found there and what was expected.
    rank
        The rank whose part of the plan is wrong.
    step
        The index of the action with the fault, if there is one.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.step: int | None = step


class MalformedPlanError(PlanError):
    """A plan names a rank, stage, microbatch or kind of action that is not there, or does an action on the wrong rank."""


class MissingActionError(PlanError):
    """No rank does an action that the pipeline needs."""


class RepeatedActionError(PlanError):
    """An action is done twice, or a backward pass is done whole and divided."""


class PlanDeadlockError(PlanError):
    """An action can never begin: its input comes after it on its own rank, or other ranks wait for each other."""


class PlanPeakError(PlanError):
    """A rank holds more activations at once than the plan promises."""
