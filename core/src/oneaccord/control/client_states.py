"""The life of a rank's control connection as a table: which rank has the store, and what to do when that is lost.

This table alone decides whether the store is dead, this rank is cut off, or the job is over. It is pure: `SocketControl` turns
what its connections, timers and threads see into events, and performs the actions.

The standby is the rank that takes over when the store is lost. The usual way is CONNECTED -> ASKING -> CONNECTED: the standby says what became of
the store. If the standby is lost as well, the survivors look for each other: SEARCHING -> GATHERING -> CONNECTED.
"""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import Final, NamedTuple

from oneaccord.errors import InternalError

__all__ = ["IMPOSSIBLE", "ROWS", "Action", "Event", "Row", "State", "transition"]


class State(Flag):
    """The rank that has the store, as this rank knows it."""

    CONNECTED = auto()
    """The rank to which this one is connected: the first store, or a standby that has taken over."""
    ORPHANED = auto()
    """None: the store is lost, and the connection to its standby is being made."""
    ASKING = auto()
    """The standby, which has not said anything yet."""
    SEARCHING = auto()
    """None: the store and its standby do not answer, and this rank looks for the other survivors."""
    GATHERING = auto()
    """The survivor at which the others gather; it has not said anything yet."""
    CUT_OFF = auto()
    """None, and no survivor was found."""
    PARTED = auto()
    """None is needed any more: all ranks have left the job."""
    CLOSED = auto()
    """None: this rank has closed its connections."""


class Event(Enum):
    """What a rank's connections, timers and threads see."""

    STORE_SPEAKS = "the store has sent a message"
    STANDBY_SPEAKS = "the standby has sent a message that only a store sends"
    STANDBY_REACHED = "a connection is made to a standby, or to the survivor at which the others gather"
    LOST = "the connection to the store has ended, and there is no standby"
    LOST_WITH_STANDBY_NAMED = "the connection to the store has ended while this rank connects to the standby"
    LOST_WITH_STANDBY = "the connection to the store has ended, and this rank is connected to the standby"
    STORE_SILENT = "the store has not answered a report, and this rank is connected to the standby"
    STANDBY_LATE = "the standby was not reached within COMING_S after the loss of the store"
    STANDBY_SILENT = "the first cause is not known ORPHAN_S after the standby was asked"
    NOBODY_TELLS = "a search began COMING_S ago"
    NOBODY_FOUND = "a search has ended without a result"
    ALL_LEFT = "the store has said that all ranks have left"
    CLOSE = "this rank closes its connections"


class Action(Enum):
    """What a rank does."""

    NONE = "nothing"
    TURN = "take the standby for the store"
    ASK = "take the standby for the store, ask it what became of the former store, and start the timer of ORPHAN_S"
    JOIN = "take the rank that was reached for the store, and tell it why"
    AWAIT = "start the timer of COMING_S"
    SEARCH = "look for the other survivors, and start the timer of COMING_S"
    FAIL = "take this rank's own finding for the first cause, unless there is one"
    GIVE_UP = (
        "take this rank's own finding for the first cause, unless there is one, and end every wait for an answer of the store"
    )
    RELAY = "as the standby, tell the others that all have left: the store may end before it has told them"


class Row(NamedTuple):
    """What an event means in some states: the action, and the next state, if that is another one."""

    on: Event
    during: State
    do: Action = Action.NONE
    then: State | None = None


_ANY: Final = ~State(0)
_USED: Final = State.CONNECTED | State.ASKING | State.GATHERING
"""This rank uses a connection to a store."""
_OPEN: Final = _USED | State.SEARCHING
_FINAL: Final = State.CUT_OFF | State.PARTED | State.CLOSED

ROWS: Final = (
    # The store answers. In a search it was only slow.
    Row(Event.STORE_SPEAKS, State.ASKING | State.SEARCHING | State.GATHERING, then=State.CONNECTED),
    Row(Event.STORE_SPEAKS, State.CONNECTED | _FINAL),
    Row(Event.ALL_LEFT, State.CONNECTED, Action.RELAY, State.PARTED),
    Row(Event.ALL_LEFT, State.CUT_OFF, Action.RELAY),
    Row(Event.ALL_LEFT, State.PARTED | State.CLOSED),
    # A standby that speaks as the store does has taken over, and so does one that gets a report.
    Row(Event.STANDBY_SPEAKS, _OPEN, Action.TURN, State.CONNECTED),
    Row(Event.STANDBY_SPEAKS, State.CUT_OFF | State.PARTED, Action.TURN),
    Row(Event.STANDBY_SPEAKS, State.CLOSED),
    Row(Event.STORE_SILENT, _OPEN, Action.TURN, State.CONNECTED),
    Row(Event.STORE_SILENT, State.CUT_OFF | State.PARTED, Action.TURN),
    Row(Event.STORE_SILENT, State.CLOSED),
    # The store is lost: the standby says why, else the survivors gather.
    Row(Event.LOST_WITH_STANDBY, _OPEN, Action.ASK, State.ASKING),
    Row(Event.LOST_WITH_STANDBY, _FINAL),
    Row(Event.LOST_WITH_STANDBY_NAMED, _USED, Action.AWAIT, State.ORPHANED),
    Row(Event.LOST_WITH_STANDBY_NAMED, State.SEARCHING | _FINAL),
    Row(Event.LOST, _USED, Action.SEARCH, State.SEARCHING),
    Row(Event.LOST, State.SEARCHING | _FINAL),
    Row(Event.STANDBY_LATE, State.ORPHANED, Action.SEARCH, State.SEARCHING),
    Row(Event.STANDBY_LATE, State.CLOSED),
    Row(Event.STANDBY_SILENT, State.ASKING, Action.SEARCH, State.SEARCHING),
    Row(Event.STANDBY_SILENT, State.CONNECTED | State.ORPHANED | State.SEARCHING | _FINAL),
    # A rank that is cut off does not go back. It joins the others all the same, so that they see it leave.
    Row(Event.STANDBY_REACHED, State.ORPHANED, Action.ASK, State.ASKING),
    Row(Event.STANDBY_REACHED, State.SEARCHING, Action.JOIN, State.GATHERING),
    Row(Event.STANDBY_REACHED, State.CUT_OFF, Action.JOIN),
    Row(Event.STANDBY_REACHED, _USED | State.PARTED),
    # A search ends. After a close another thread may still wait for its end.
    Row(Event.NOBODY_TELLS, State.SEARCHING | State.GATHERING, Action.FAIL),
    Row(Event.NOBODY_TELLS, State.CONNECTED | State.ORPHANED | State.ASKING | _FINAL),
    Row(Event.NOBODY_FOUND, State.SEARCHING, Action.GIVE_UP, State.CUT_OFF),
    Row(Event.NOBODY_FOUND, State.CLOSED, Action.GIVE_UP),
    Row(Event.NOBODY_FOUND, _USED | State.ORPHANED | State.CUT_OFF | State.PARTED),
    Row(Event.CLOSE, _ANY, then=State.CLOSED),
)

IMPOSSIBLE: Final = {
    # An orphan has neither a store nor a standby that could do anything.
    Event.STORE_SPEAKS: State.ORPHANED,
    Event.STANDBY_SPEAKS: State.ORPHANED,
    Event.STORE_SILENT: State.ORPHANED,
    Event.LOST: State.ORPHANED,
    Event.LOST_WITH_STANDBY_NAMED: State.ORPHANED,
    Event.LOST_WITH_STANDBY: State.ORPHANED,
    # The message itself has made the rank CONNECTED.
    Event.ALL_LEFT: State.ORPHANED | State.ASKING | State.SEARCHING | State.GATHERING,
    # These timers end with the connection that they concern.
    Event.STANDBY_LATE: ~(State.ORPHANED | State.CLOSED),
    Event.STANDBY_SILENT: State.GATHERING,
    # A closed control makes no connection.
    Event.STANDBY_REACHED: State.CLOSED,
}
"""The states in which an event cannot come. Each other pair of a state and an event is in one row."""

_TABLE: Final = {(state, row.on): row for row in ROWS for state in row.during}


def transition(state: State, event: Event) -> tuple[State, Action]:
    """Return the state after an event, and what to do."""
    row = _TABLE.get((state, event))
    if row is None:
        raise InternalError(
            f"the control connection in the state {state.name} got the event {event.name}, which cannot come there"
        )
    return row.then or state, row.do
