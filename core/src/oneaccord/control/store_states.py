"""The life of a job, as its store sees it: states, events and actions in one table.

`step` looks up what an event means in a state. It knows no ranks, no contents of messages and no time. `membership` does what it says. A message of a
rank is an event by its class.
"""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import Final, NamedTuple

from oneaccord.control.protocol import (
    Agree,
    Agreed,
    Checkpoint,
    Exchange,
    GiveUp,
    JobReformed,
    Join,
    Leave,
    LeaveGroup,
    Report,
    Shrink,
    Stalled,
    Standby,
    Testimony,
)

__all__ = ["ROWS", "Action", "Event", "Row", "State", "step"]


class State(Flag):
    """How far a job has come."""

    MEETING = auto()
    """Some ranks have not come yet."""
    RUNNING = auto()
    """All ranks have come."""
    INQUEST = auto()
    """A rank has reported a failure, and all that can say more about it are asked."""
    FINISHED = auto()
    """All ranks have left, and have learned so."""
    DECIDED = auto()
    """The first cause is known, and the standby learns it before all others."""
    FAILED = auto()
    """All ranks have learned the first cause. What survivors ask is answered."""


class Event(Enum):
    """Events beside the messages of ranks."""

    ALL_CAME = "the last rank has joined"
    CONFLICT = "a failure is found that ranks can say more about"
    INQUEST_OVER = "all have answered, or time is up"
    ALL_LEFT = "every rank has left"
    CAUSE = "a first cause is found"
    STANDBY_HEARD = "the standby has answered, or does not in time, or there is none"
    LOST = "a connection ends without a goodbye"
    GONE = "a connection ends after a goodbye"


class Action(Enum):
    """What the store does."""

    WELCOME = "welcome all ranks"
    APPOINT = "appoint a standby"
    REFUSE_JOIN = "take it for an error of protocol"
    EXCHANGE = "collect the card; send all cards when all members have given theirs"
    NOTE_STALL = "compare its wait with those of others"
    WEIGH = "open an inquest, wait a moment for the reason of a lost connection, or take it for the first cause"
    COMPARE = "compare the calls of the members on GPUs"
    ASK = "ask the ranks that can say more"
    NOTE_ANSWER = "note the answer"
    CONCLUDE = "conclude the first cause from the answers"
    NOTE_LEAVE = "note it; look for ranks that wait for this one in vain"
    NOTE_GROUP = "note it; tell the members when all of them have left the group"
    FAREWELL = "tell all ranks; a message that was never received is a mismatch"
    TELL_STANDBY = "tell the standby, and wait a moment for its answer"
    HEED_STANDBY = "take the standby's first cause for the store's own"
    ANNOUNCE = "tell all ranks the first cause"
    BLAME = "take the loss for the first cause; tell all ranks which one is gone"
    REPORT_GONE = "tell all ranks which one is gone"
    CHECK_FAREWELL = "see whether all have left"
    NOTE_STANDBY = "note the new standby"
    CONFIDE = "tell it the first cause"
    PRESENT = "tell all ranks where it listens"
    SUSPECT = "suspect a failure that no rank has reported"
    SHRINK = "answer when all survivors have asked"
    AGREE = "answer when all surviving members have given their flags"
    GIVE_UP = "tell all that wait which ranks have not come"
    NOTE_REFORMED = "let no other ranks continue beside these"


class Row(NamedTuple):
    """What an event means in some states: the actions, and the next state, if that is another one."""

    on: type | Event
    during: State
    do: tuple[Action, ...]
    then: State | None = None


_ANY: Final = ~State(0)
_KNOWN: Final = State.DECIDED | State.FAILED
_UNKNOWN: Final = ~_KNOWN
"""No first cause is known."""

ROWS: Final = (
    # The ranks meet, work and leave.
    Row(Event.ALL_CAME, State.MEETING, (Action.WELCOME, Action.APPOINT), State.RUNNING),
    Row(Event.ALL_CAME, State.INQUEST, (Action.WELCOME, Action.APPOINT)),
    Row(Join, _ANY, (Action.REFUSE_JOIN,)),
    Row(Exchange, _UNKNOWN, (Action.EXCHANGE,)),  # after a verdict no rank may come out of it as if all were well
    Row(LeaveGroup, _ANY, (Action.NOTE_GROUP,)),
    Row(Leave, _ANY, (Action.NOTE_LEAVE,)),
    # Never after a verdict: a rank that leaves as others abort must learn of that.
    Row(Event.ALL_LEFT, State.RUNNING, (Action.FAREWELL,), State.FINISHED),
    # Something is wrong.
    Row(Stalled, _UNKNOWN, (Action.NOTE_STALL,)),
    Row(Checkpoint, _UNKNOWN, (Action.COMPARE,)),
    Row(Report, _UNKNOWN, (Action.WEIGH,)),
    Row(Event.CONFLICT, _UNKNOWN & ~State.INQUEST, (Action.ASK,), State.INQUEST),
    Row(Testimony, State.INQUEST, (Action.NOTE_ANSWER,)),
    Row(Event.INQUEST_OVER, State.INQUEST, (Action.CONCLUDE,)),
    Row(Event.LOST, _UNKNOWN, (Action.BLAME,)),
    Row(Event.GONE, _UNKNOWN, (Action.CHECK_FAREWELL,)),
    Row(Event.LOST, _KNOWN, (Action.REPORT_GONE,)),
    Row(Event.GONE, _KNOWN, (Action.REPORT_GONE,)),
    # The first cause: the standby learns it first, so that all ranks learn the same if the store ends as it tells them.
    Row(Event.CAUSE, _UNKNOWN, (Action.TELL_STANDBY,), State.DECIDED),
    Row(Agreed, State.DECIDED, (Action.HEED_STANDBY,)),
    Row(Event.STANDBY_HEARD, State.DECIDED, (Action.ANNOUNCE,), State.FAILED),
    Row(Standby, _UNKNOWN, (Action.NOTE_STANDBY, Action.PRESENT)),
    Row(Standby, _KNOWN, (Action.NOTE_STANDBY, Action.CONFIDE, Action.PRESENT)),
    # The survivors continue.
    Row(Agree, _ANY, (Action.AGREE,)),
    Row(Shrink, _UNKNOWN, (Action.SUSPECT, Action.SHRINK)),
    Row(Shrink, _KNOWN, (Action.SHRINK,)),
    Row(GiveUp, _ANY, (Action.GIVE_UP,)),
    Row(JobReformed, _ANY, (Action.NOTE_REFORMED,)),
)
"""An event without a row means nothing in that state."""

_TABLE: Final = {(row.on, state): row for row in ROWS for state in row.during}


def step(state: State, event: type | Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state that follows, and what is to be done."""
    row = _TABLE.get((event, state))
    return (state, ()) if row is None else (row.then or state, row.do)
