"""The life of a rank's control connection as a table: who has the store, and what a rank does when the store is lost.

This table alone decides whether the store is dead, this rank is cut off, or the job is over. It is pure: `SocketControl` turns
what its connections, timers and threads see into events, and performs the actions.

The standby is the rank that takes over when the store is lost. The usual way is CONNECTED -> ASKING -> CONNECTED: the standby says what became of
the store. If the standby is lost as well, the survivors look for each other: SEARCHING -> GATHERING -> CONNECTED.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from manyhands.errors import InternalError

__all__ = ["TABLE", "Action", "Event", "Row", "State", "transition"]


class State(Enum):
    """Who has the store for this rank."""

    CONNECTED = auto()
    """A rank that this one is connected to: the first store, or a standby that has taken over."""
    ORPHANED = auto()
    """Nobody: the store is lost, and the connection to its standby is being made."""
    ASKING = auto()
    """The standby, which has not said anything yet."""
    SEARCHING = auto()
    """Nobody: the store and its standby do not answer, and this rank looks for the other survivors."""
    GATHERING = auto()
    """The survivor at which the others gather; it has not said anything yet."""
    CUT_OFF = auto()
    """Nobody, and nobody was found."""
    PARTED = auto()
    """Nobody needs it any more: all ranks have left the job."""
    CLOSED = auto()
    """Nobody: this rank has closed its connections."""


class Event(Enum):
    """What a rank's connections, timers and threads see."""

    STORE_SPEAKS = auto()
    """The store has sent a message."""
    STANDBY_SPEAKS = auto()
    """The standby has sent a message that only a store sends."""
    STANDBY_REACHED = auto()
    """A connection to a standby, or to the survivor at which the others gather, has been made."""
    LOST = auto()
    """The connection to the store has ended, and there is no standby."""
    LOST_WITH_STANDBY_NAMED = auto()
    """The same, while this rank connects to the standby."""
    LOST_WITH_STANDBY = auto()
    """The same, while this rank is connected to the standby."""
    STORE_SILENT = auto()
    """The store has not answered a report, and this rank is connected to the standby."""
    STANDBY_LATE = auto()
    """The connection to the standby has not been made within `timing.COMING_S` after the store was lost."""
    STANDBY_SILENT = auto()
    """The first cause is not known `timing.ORPHAN_S` after the standby was asked."""
    NOBODY_TELLS = auto()
    """The search began `timing.COMING_S` ago."""
    NOBODY_FOUND = auto()
    """The search has ended without a result."""
    ALL_LEFT = auto()
    """The store has said that all ranks have left."""
    CLOSE = auto()
    """This rank closes its connections."""


class Action(Enum):
    """What a rank does in a transition."""

    NONE = auto()
    TURN = auto()
    """Take the standby for the store."""
    ASK = auto()
    """Take the standby for the store, ask it what became of the former one, and start the timer of STANDBY_SILENT."""
    JOIN = auto()
    """Take the survivor at which the others gather for the store, and tell it why."""
    AWAIT = auto()
    """Start the timer of STANDBY_LATE."""
    SEARCH = auto()
    """Look for the other survivors, and start the timer of NOBODY_TELLS."""
    FAIL = auto()
    """Take this rank's own finding for the first cause, unless there is one."""
    GIVE_UP = auto()
    """The same, and end every wait for an answer of the store."""
    PASS_ON = auto()
    """Tell those that are connected to this rank, if it is the standby, that all ranks have left: the store may end before it has told them."""


class Row(msgspec.Struct, frozen=True):
    """What happens in one state.

    Attributes
    ----------
    moves
        For each event that matters the next state and the action.
    ignored
        The events that change nothing.
    impossible
        The events that cannot come.
    """

    moves: dict[Event, tuple[State, Action]]
    ignored: frozenset[Event] = frozenset()
    impossible: frozenset[Event] = frozenset()


_LOSSES = {Event.LOST, Event.LOST_WITH_STANDBY_NAMED, Event.LOST_WITH_STANDBY}
_CLOSE = {Event.CLOSE: (State.CLOSED, Action.NONE)}
# Wherever a connection to the store is used, its loss leads to the standby, and without one to the other survivors.
_ON_LOSS = {
    Event.LOST: (State.SEARCHING, Action.SEARCH),
    Event.LOST_WITH_STANDBY_NAMED: (State.ORPHANED, Action.AWAIT),
    Event.LOST_WITH_STANDBY: (State.ASKING, Action.ASK),
}
# A standby that speaks as the store does has taken over; a report that the store does not answer makes it take over.
_ON_TAKEOVER = {
    Event.STANDBY_SPEAKS: (State.CONNECTED, Action.TURN),
    Event.STORE_SILENT: (State.CONNECTED, Action.TURN),
}

TABLE: dict[State, Row] = {
    State.CONNECTED: Row(
        _ON_LOSS | _ON_TAKEOVER | _CLOSE | {Event.ALL_LEFT: (State.PARTED, Action.PASS_ON)},
        ignored=frozenset(
            # The standby has answered, if with something else; and a search has ended because the store was only slow.
            {Event.STORE_SPEAKS, Event.STANDBY_REACHED, Event.STANDBY_SILENT, Event.NOBODY_TELLS, Event.NOBODY_FOUND}
        ),
        impossible=frozenset({Event.STANDBY_LATE}),
    ),
    State.ORPHANED: Row(
        _CLOSE
        | {
            Event.STANDBY_REACHED: (State.ASKING, Action.ASK),
            Event.STANDBY_LATE: (State.SEARCHING, Action.SEARCH),
        },
        ignored=frozenset({Event.STANDBY_SILENT, Event.NOBODY_TELLS, Event.NOBODY_FOUND}),
        # There is neither a store nor a standby that could do anything.
        impossible=frozenset({*_LOSSES, Event.STORE_SPEAKS, Event.STANDBY_SPEAKS, Event.STORE_SILENT, Event.ALL_LEFT}),
    ),
    State.ASKING: Row(
        _ON_LOSS
        | _ON_TAKEOVER
        | _CLOSE
        | {
            Event.STORE_SPEAKS: (State.CONNECTED, Action.NONE),
            Event.STANDBY_SILENT: (State.SEARCHING, Action.SEARCH),
        },
        ignored=frozenset({Event.STANDBY_REACHED, Event.NOBODY_TELLS, Event.NOBODY_FOUND}),
        impossible=frozenset({Event.STANDBY_LATE, Event.ALL_LEFT}),
    ),
    State.SEARCHING: Row(
        _ON_TAKEOVER
        | _CLOSE
        | {
            Event.STORE_SPEAKS: (State.CONNECTED, Action.NONE),  # it was only slow
            Event.STANDBY_REACHED: (State.GATHERING, Action.JOIN),
            Event.LOST_WITH_STANDBY: (State.ASKING, Action.ASK),
            Event.NOBODY_TELLS: (State.SEARCHING, Action.FAIL),
            Event.NOBODY_FOUND: (State.CUT_OFF, Action.GIVE_UP),
        },
        ignored=frozenset({Event.LOST, Event.LOST_WITH_STANDBY_NAMED, Event.STANDBY_SILENT}),
        impossible=frozenset({Event.STANDBY_LATE, Event.ALL_LEFT}),
    ),
    State.GATHERING: Row(
        _ON_LOSS
        | _ON_TAKEOVER
        | _CLOSE
        | {
            Event.STORE_SPEAKS: (State.CONNECTED, Action.NONE),
            Event.NOBODY_TELLS: (State.GATHERING, Action.FAIL),
        },
        ignored=frozenset({Event.STANDBY_REACHED, Event.NOBODY_FOUND}),
        impossible=frozenset({Event.STANDBY_LATE, Event.STANDBY_SILENT, Event.ALL_LEFT}),
    ),
    State.CUT_OFF: Row(
        # This rank has ended its waits, and does not go back. It joins the others all the same, so that they see it leave.
        _CLOSE
        | {
            Event.STANDBY_SPEAKS: (State.CUT_OFF, Action.TURN),
            Event.STORE_SILENT: (State.CUT_OFF, Action.TURN),
            Event.STANDBY_REACHED: (State.CUT_OFF, Action.JOIN),
            Event.ALL_LEFT: (State.CUT_OFF, Action.PASS_ON),
        },
        ignored=frozenset({*_LOSSES, Event.STORE_SPEAKS, Event.STANDBY_SILENT, Event.NOBODY_TELLS, Event.NOBODY_FOUND}),
        impossible=frozenset({Event.STANDBY_LATE}),
    ),
    State.PARTED: Row(
        _CLOSE
        | {
            Event.STANDBY_SPEAKS: (State.PARTED, Action.TURN),
            Event.STORE_SILENT: (State.PARTED, Action.TURN),
        },
        ignored=frozenset(
            # The standby hears the goodbye of a rank also when it is reached late.
            {
                *_LOSSES,
                Event.STORE_SPEAKS,
                Event.STANDBY_REACHED,
                Event.STANDBY_SILENT,
                Event.NOBODY_TELLS,
                Event.NOBODY_FOUND,
                Event.ALL_LEFT,
            }
        ),
        impossible=frozenset({Event.STANDBY_LATE}),
    ),
    State.CLOSED: Row(
        {Event.NOBODY_FOUND: (State.CLOSED, Action.GIVE_UP)},  # another thread may still wait
        ignored=frozenset(Event) - {Event.STANDBY_REACHED, Event.NOBODY_FOUND},
        impossible=frozenset({Event.STANDBY_REACHED}),  # a closed control connects to nobody
    ),
}
"""Each event is in one of the three parts of each row."""


def transition(state: State, event: Event) -> tuple[State, Action]:
    """Return the state after an event, and what to do."""
    row = TABLE[state]
    if event in row.ignored:
        return state, Action.NONE
    move = row.moves.get(event)
    if move is None:
        raise InternalError(
            f"the control connection got the event {event.name} in the state {state.name}, where it cannot come"
        )
    return move
