"""The table of a control connection's life, alone: no network, no thread, no clock."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from oneaccord.control.client_states import IMPOSSIBLE, ROWS, Action, Event, State, transition
from oneaccord.errors import InternalError

FINAL = (State.CUT_OFF, State.PARTED, State.CLOSED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_event_and_state_is_in_one_row_or_impossible(state: State, event: Event) -> None:
    rows = [row for row in ROWS if row.on is event and state in row.during]
    if state in IMPOSSIBLE.get(event, State(0)):
        assert rows == []
        with pytest.raises(InternalError, match=f"in the state {state.name} got the event {event.name}"):
            transition(state, event)
    else:
        assert len(rows) == 1
        assert transition(state, event) == (rows[0].then or state, rows[0].do)


@pytest.mark.parametrize("state", FINAL)
def test_a_final_state_is_left_for_closed_alone(state: State) -> None:
    assert {row.then for row in ROWS if state in row.during} <= {None, State.CLOSED}


STORIES = {
    "the standby takes over": [
        (Event.STANDBY_REACHED, State.CONNECTED, Action.NONE),
        (Event.LOST_WITH_STANDBY, State.ASKING, Action.ASK),
        (Event.STORE_SPEAKS, State.CONNECTED, Action.NONE),
        (Event.ALL_LEFT, State.PARTED, Action.RELAY),
        (Event.LOST, State.PARTED, Action.NONE),
    ],
    "the standby is reached late": [
        (Event.LOST_WITH_STANDBY_NAMED, State.ORPHANED, Action.AWAIT),
        (Event.STANDBY_REACHED, State.ASKING, Action.ASK),
        (Event.STANDBY_SILENT, State.SEARCHING, Action.SEARCH),
        (Event.STORE_SPEAKS, State.CONNECTED, Action.NONE),
    ],
    "the store does not answer a report": [
        (Event.STORE_SILENT, State.CONNECTED, Action.TURN),
        (Event.STANDBY_SPEAKS, State.CONNECTED, Action.TURN),
    ],
    "the survivors gather": [
        (Event.LOST, State.SEARCHING, Action.SEARCH),
        (Event.NOBODY_TELLS, State.SEARCHING, Action.FAIL),
        (Event.STANDBY_REACHED, State.GATHERING, Action.JOIN),
        (Event.STORE_SPEAKS, State.CONNECTED, Action.NONE),
        (Event.NOBODY_FOUND, State.CONNECTED, Action.NONE),
    ],
    "the survivor at which they gather dies": [
        (Event.LOST, State.SEARCHING, Action.SEARCH),
        (Event.STANDBY_REACHED, State.GATHERING, Action.JOIN),
        (Event.LOST, State.SEARCHING, Action.SEARCH),
    ],
    "nobody is found": [
        (Event.LOST_WITH_STANDBY_NAMED, State.ORPHANED, Action.AWAIT),
        (Event.STANDBY_LATE, State.SEARCHING, Action.SEARCH),
        (Event.NOBODY_FOUND, State.CUT_OFF, Action.GIVE_UP),
        (Event.STANDBY_REACHED, State.CUT_OFF, Action.JOIN),
        (Event.STORE_SPEAKS, State.CUT_OFF, Action.NONE),
        (Event.CLOSE, State.CLOSED, Action.NONE),
        (Event.CLOSE, State.CLOSED, Action.NONE),
    ],
    "a rank closes while it looks for the others": [
        (Event.LOST, State.SEARCHING, Action.SEARCH),
        (Event.CLOSE, State.CLOSED, Action.NONE),
        (Event.NOBODY_FOUND, State.CLOSED, Action.GIVE_UP),
    ],
}


@pytest.mark.parametrize("story", STORIES)
def test_a_story_goes_through_its_states(story: str) -> None:
    state = State.CONNECTED
    for event, expected, action in STORIES[story]:
        assert transition(state, event) == (expected, action)
        state = expected


class World(msgspec.Struct, frozen=True):
    """A model of what `SocketControl` knows beside the state, and of what can therefore happen to it."""

    state: State = State.CONNECTED
    is_store_there: bool = True
    has_standby: bool = False
    is_named: bool = False
    timers: frozenset[Event] = frozenset()

    def after(self, event: Event, **changes: bool) -> World:
        world = msgspec.structs.replace(self, **changes)
        state, action = transition(self.state, event)
        self._check(event, state, action)
        there, standby, timers = world.is_store_there, world.has_standby, {*self.timers} - {event}
        if action in (Action.TURN, Action.ASK, Action.JOIN):
            assert standby  # there is one to turn to
            there, standby = True, False
            timers -= {Event.STANDBY_LATE, Event.STANDBY_SILENT}  # those of another store
        if action is Action.ASK:
            timers |= {Event.STANDBY_SILENT}
        elif action is Action.AWAIT:
            timers |= {Event.STANDBY_LATE}
        elif action is Action.SEARCH:
            timers |= {Event.NOBODY_TELLS, Event.NOBODY_FOUND}
        return World(state, there, standby, world.is_named, frozenset(timers))

    def _check(self, event: Event, state: State, action: Action) -> None:
        """Laws that hold for every row."""
        if event is Event.CLOSE or self.state is State.CLOSED:
            assert state is State.CLOSED
            assert action is (Action.GIVE_UP if event is Event.NOBODY_FOUND else Action.NONE)
            return
        if event in (Event.STANDBY_SPEAKS, Event.STORE_SILENT):
            assert action is Action.TURN
            assert state is (self.state if self.state in FINAL else State.CONNECTED)
        # A rank gives its store up only when it is lost, and looks for others only then.
        losses = {event for event in Event if event.name.startswith("LOST")} | {Event.STANDBY_LATE, Event.STANDBY_SILENT}
        if event not in losses:
            assert action not in (Action.AWAIT, Action.SEARCH)
            assert state not in (State.ORPHANED, State.SEARCHING) or state is self.state
        assert (action is Action.FAIL) == (event is Event.NOBODY_TELLS and self.state in State.SEARCHING | State.GATHERING)
        assert (action is Action.GIVE_UP) == (event is Event.NOBODY_FOUND and self.state is State.SEARCHING)
        assert (action is Action.RELAY) == (event is Event.ALL_LEFT and self.state in State.CONNECTED | State.CUT_OFF)

    def next(self) -> Iterator[World]:
        yield self.after(Event.CLOSE)
        for event in self.timers:
            yield self.after(event)
        if self.is_store_there:
            spoken = self.after(Event.STORE_SPEAKS)
            yield spoken
            yield msgspec.structs.replace(spoken, is_named=True)
            yield spoken.after(Event.ALL_LEFT)
            loss = Event.LOST_WITH_STANDBY_NAMED if self.is_named else Event.LOST
            yield self.after(Event.LOST_WITH_STANDBY if self.has_standby else loss, is_store_there=False)
        if self.has_standby:
            yield msgspec.structs.replace(self, has_standby=False)  # it is lost
            yield self.after(Event.STANDBY_SPEAKS)
            yield self.after(Event.STORE_SILENT)
        if self.state is not State.CLOSED:
            for is_named in (False, self.is_named):  # the named one, or another
                yield self.after(Event.STANDBY_REACHED, has_standby=True, is_named=is_named)


def test_no_impossible_event_comes_and_each_wait_ends() -> None:
    found, new = {World()}, [World()]
    while new:
        new = [after for world in new for after in world.next()]
        new = [*{world for world in new if world not in found}]
        found.update(new)
    ends = {
        State.ORPHANED: Event.STANDBY_LATE,
        State.ASKING: Event.STANDBY_SILENT,
        State.SEARCHING: Event.NOBODY_FOUND,
    }
    assert {world.state for world in found} == {*State}
    for world in found:
        assert world.state not in ends or ends[world.state] in world.timers, world
        if world.state in (State.CONNECTED, State.GATHERING):  # this ends with the connection to the store
            assert world.is_store_there, world
