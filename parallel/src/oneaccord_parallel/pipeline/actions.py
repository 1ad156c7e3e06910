"""The actions of a rank of a pipeline, the needs of each, and the messages that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

__all__ = [
    "BACKWARD",
    "KINDS",
    "Action",
    "Actions",
    "Kind",
    "Message",
    "Placement",
    "channels",
    "incoming",
    "issued_at",
    "needs",
    "outcome",
    "outgoing",
]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

KINDS: tuple[Kind, ...] = get_args(Kind)
BACKWARD: frozenset[str] = frozenset({"backward", "backward_input"})
"""The kinds whose gradient goes to the stage before."""


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    Attributes
    ----------
    kind
        ``"forward"``; ``"backward"``, the whole backward pass; or its two halves: ``"backward_input"``, which makes the gradient for the
        stage before, and ``"backward_weight"``, which makes those of the weights.
    microbatch
        The number of the part of the batch.
    stage
        The number of the stage, in the order in which data passes.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} in stage {self.stage}"


Actions = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""
Placement = tuple[int, ...]
"""The rank of each stage."""


class Message(NamedTuple):
    """A message from one stage to a neighbour on another rank.

    Attributes
    ----------
    what
        ``"activation"``, from a stage to the next; or ``"gradient"``, from a stage to the one before.
    microbatch
        Whose it is.
    stage
        The stage that takes it.
    source
        The rank that sends it.
    dest
        The rank that receives it.
    """

    what: Literal["activation", "gradient"]
    microbatch: int
    stage: int
    source: int
    dest: int


def outcome(action: Action) -> Action:
    """Return an action under the name that dependent actions use: the first half of a divided backward pass gives the result of the whole one."""
    return action._replace(kind="backward") if action.kind == "backward_input" else action


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Return the actions that must have ended before one begins, named as `outcome` does, in a pipeline of so many stages."""
    kind, microbatch, stage = action
    if kind == "forward":
        return (Action("forward", microbatch, stage - 1),) if stage else ()
    if kind == "backward_weight":
        return (Action("backward", microbatch, stage),)
    own = Action("forward", microbatch, stage)
    return (own,) if stage == stages - 1 else (own, Action("backward", microbatch, stage + 1))


def incoming(action: Action, placement: Sequence[int]) -> Message | None:
    """Return the message from another rank for an action."""
    kind, microbatch, stage = action
    if kind == "forward" and stage:
        return _message("activation", microbatch, stage, placement[stage - 1], placement)
    if kind in BACKWARD and stage < len(placement) - 1:
        return _message("gradient", microbatch, stage, placement[stage + 1], placement)
    return None


def outgoing(action: Action, placement: Sequence[int]) -> Message | None:
    """Return the message to another rank after an action."""
    kind, microbatch, stage = action
    if kind == "forward" and stage < len(placement) - 1:
        return _message("activation", microbatch, stage + 1, placement[stage], placement)
    if kind in BACKWARD and stage:
        return _message("gradient", microbatch, stage - 1, placement[stage], placement)
    return None


def _message(
    what: Literal["activation", "gradient"], microbatch: int, stage: int, source: int, placement: Sequence[int]
) -> Message | None:
    dest = placement[stage]
    return None if source == dest else Message(what, microbatch, stage, source, dest)


def channels(actions: Actions, placement: Placement) -> dict[tuple[int, int], list[Message]]:
    """Return, for each sender and receiver, the messages between them in the order in which they are sent."""
    found: dict[tuple[int, int], list[Message]] = {}
    for each in actions:
        for action in each:
            message = outgoing(action, placement)
            if message is not None:
                found.setdefault((message.source, message.dest), []).append(message)
    return found


def issued_at(actions: Actions, placement: Placement) -> dict[Message, int]:
    """Return for each message the index of its receiver's action before which its receive must be issued.

    That is the action that takes it, or an earlier one that takes a later message of the same sender: messages do not overtake each other.
    """
    taken: dict[Message, int] = {}
    for each in actions:
        for step, action in enumerate(each):
            message = incoming(action, placement)
            if message is not None:
                taken[message] = step
    for messages in channels(actions, placement).values():
        soonest = taken[messages[-1]]
        for message in reversed(messages):
            soonest = taken[message] = min(soonest, taken[message])
    return taken
