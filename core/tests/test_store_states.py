"""The store's table of states: complete, without contradictions, and each state is reached."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from manyhands.control.membership import Membership
from manyhands.control.protocol import FromRank, Orphaned
from manyhands.control.store_states import ROWS, Action, Event, State, step


def test_each_event_has_one_row_per_state() -> None:
    counts = Counter((row.on, state) for row in ROWS for state in row.during)
    assert {place: count for place, count in counts.items() if count > 1} == {}


def test_each_message_of_a_rank_has_a_row() -> None:
    taken = {row.on for row in ROWS if isinstance(row.on, type)}
    assert taken == {*get_args(FromRank)} - {Orphaned}  # which the standby alone takes


def test_each_event_and_each_action_is_used() -> None:
    assert {row.on for row in ROWS} >= {*Event}
    assert {action for row in ROWS for action in row.do} == {*Action}
    assert {*Membership(1, b"", lambda *_: None, lambda *_: None)._acts} == {*Action}


def test_each_state_is_reached_and_only_a_failed_job_stays() -> None:
    reached, last = State.MEETING, State(0)
    while reached != last:
        last = reached
        for row in ROWS:
            if row.then is not None and row.during & reached:
                reached |= row.then
    assert reached == ~State(0)
    assert [state for state in State if not any(row.then and state in row.during for row in ROWS)] == [State.FAILED]


@pytest.mark.parametrize("state", [State.DECIDED, State.FAILED])
def test_a_second_cause_changes_nothing(state: State) -> None:
    assert step(state, Event.CAUSE) == (state, ())
    assert step(state, Event.CONFLICT) == (state, ())


def test_the_standby_hears_of_a_cause_before_all_others() -> None:
    state, actions = step(State.RUNNING, Event.CAUSE)
    assert (state, actions) == (State.DECIDED, (Action.TELL_STANDBY,))
    assert step(state, Event.STANDBY_HEARD) == (State.FAILED, (Action.ANNOUNCE,))
