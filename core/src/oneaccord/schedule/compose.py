"""Schedules made of schedules."""

from __future__ import annotations

from dataclasses import replace

from oneaccord.schedule.errors import MalformedScheduleError
from oneaccord.schedule.steps import Recv, RecvReduce, Schedule, Send, Step

__all__ = ["in_parallel"]


def in_parallel(first: Schedule, second: Schedule) -> Schedule:
    """Run a barrier together with another schedule, as one schedule of the first one's collective.

    The steps of ``second`` follow in the list, and depend on none of ``first``. So a barrier costs a rooted collective next to
    nothing, and then no rank returns from it before every rank has entered the call. Between two ranks, a message of ``first`` says
    that as well: then the barrier's own message of the same direction is left out.

    Free of deadlock when both are: of two messages between the same ranks, one of each schedule, that of ``first`` goes first
    on both sides. This lets steps of ``second`` wait for steps of ``first`` and never the other way round, so no circle arises.

    Parameters
    ----------
    first
        The schedule whose collective this is.
    second
        A schedule of the same rank and world that touches no memory: a barrier.

    Returns
    -------
    Schedule
        The steps of both.

    Raises
    ------
    MalformedScheduleError
        They belong to different ranks or worlds, or ``second`` has memory.
    """
    if (first.rank, first.size) != (second.rank, second.size):
        raise MalformedScheduleError(
            f"the schedules of rank {first.rank} of {first.size} and of rank {second.rank} of {second.size} cannot run as one: give schedules of one rank in one world",
            rank=first.rank,
        )
    if second.input_chunks or second.output_chunks or second.scratch:
        raise MalformedScheduleError(
            f"{second.collective.value} has input, output or scratch chunks, but only a schedule that touches no memory, "
            "a barrier, can run together with another one",
            rank=first.rank,
        )
    shift = len(first.steps)
    moved = tuple(replace(step, after=tuple(index + shift for index in step.after)) for step in second.steps)
    if first.size == 2 and not any(step.after for step in second.steps):
        told = {_direction(step) for step in first.steps}
        moved = tuple(step for step in moved if _direction(step) not in told)
    return replace(first, algorithm=f"{first.algorithm}+{second.algorithm}", steps=first.steps + moved)


def _direction(step: Step) -> type | None:
    """Return which way the message of a step goes between two ranks; None if it has none."""
    return Send if isinstance(step, Send) else Recv if isinstance(step, Recv | RecvReduce) else None
