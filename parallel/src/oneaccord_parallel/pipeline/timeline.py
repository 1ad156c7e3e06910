"""When each action of a pipeline begins and ends, in exact fractions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from oneaccord.errors import UsageError
from oneaccord_parallel.pipeline.actions import Action, Actions, Message, Placement, incoming, needs, outcome

__all__ = ["Delay", "Number", "Span", "Timeline", "in_order", "timeline_of"]

Number = int | float | Fraction | Decimal
Delay = Number | Callable[[Message], Number]


class Span(NamedTuple):
    """An action, and when it begins and ends."""

    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """The times of the actions of each rank of a pipeline.

    Attributes
    ----------
    spans
        For each rank, its actions in order. The first action of the pipeline begins at 0.
    """

    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> Fraction:
        """How long all of it takes."""
        return max((span.end for spans in self.spans for span in spans), default=Fraction(0))

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """How long each rank has nothing to do, between 0 and `makespan`."""
        return tuple(self.makespan - sum((span.end - span.start for span in spans), Fraction(0)) for spans in self.spans)

    @property
    def bubble(self) -> Fraction:
        """The share of the time in which a rank has nothing to do, in the mean over the ranks."""
        whole = self.makespan * len(self.spans)
        return sum(self.idle, Fraction(0)) / whole if whole else Fraction(0)


def in_order(actions: Actions, stages: int) -> Iterator[tuple[int, Action]]:
    """Yield ranks and their actions in an order in which all of them can run; end early if none can continue."""
    ended: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ahead = [deque(each) for each in actions]
    ready = deque(range(len(actions)))
    while ready:
        rank = ready.popleft()
        while ahead[rank]:
            action = ahead[rank][0]
            missing = next((need for need in needs(action, stages) if need not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, ahead[rank].popleft()
            ended.add(outcome(action))
            ready.extend(waiting.pop(outcome(action), ()))


def timeline_of(
    actions: Actions,
    placement: Placement,
    forward: Number = 1,
    backward: Number = 2,
    weight: Number | None = None,
    message: Delay = 0,
) -> Timeline:
    """Return when each action begins: as soon as its rank is free and its input is there.

    Parameters
    ----------
    actions, placement
        As those of a `Plan` that is proved.
    forward, backward
        How long a forward pass of one microbatch through one stage takes, and a whole backward pass.
    weight
        The share of ``backward`` that makes the gradients of the weights; by default a half of it.
    message
        The time of a message, or a function that returns it for each. The ranks continue meanwhile.

    Raises
    ------
    UsageError
        A duration is negative or not finite, or ``weight`` is more than ``backward``.
    """
    whole = _exact("backward", backward)
    of_weight = whole / 2 if weight is None else _exact("weight", weight)
    if of_weight > whole:
        raise UsageError(f"weight={weight} is a part of backward={backward}, and must not be more")
    lasts = {
        "forward": _exact("forward", forward),
        "backward": whole,
        "backward_input": whole - of_weight,
        "backward_weight": of_weight,
    }
    always = Fraction(0) if callable(message) else _exact("message", message)
    ends: dict[Action, Fraction] = {}
    free = [Fraction(0)] * len(actions)
    spans: list[list[Span]] = [[] for _ in actions]
    for rank, action in in_order(actions, len(placement)):
        came = incoming(action, placement)
        delay = Fraction(0) if came is None else _exact("message", message(came)) if callable(message) else always
        # Of the two that a backward pass needs, the forward pass is the rank's own.
        there = [ends[need] + (delay if need.stage != action.stage else 0) for need in needs(action, len(placement))]
        start = max(free[rank], *there, Fraction(0))
        free[rank] = ends[outcome(action)] = start + lasts[action.kind]
        spans[rank].append(Span(action, start, free[rank]))
    return Timeline(tuple(map(tuple, spans)))


def _exact(name: str, value: Number) -> Fraction:
    try:
        exact = Fraction(value)
    except (TypeError, ValueError, OverflowError):
        exact = Fraction(-1)
    if exact < 0:
        raise UsageError(f"{name}={value}: a duration is expected, a finite number of at least 0")
    return exact
