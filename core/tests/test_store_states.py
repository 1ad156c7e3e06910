"""The store's table of states: complete, without contradictions, and each state is reached."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from oneaccord.control import protocol as messages
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import (
    Agree,
    Agreed,
    Checkpoint,
    Exchange,
    FromRank,
    GiveUp,
    JobReformed,
    Leave,
    LeaveGroup,
    Orphaned,
    Report,
    Shrink,
    Stalled,
    Standby,
)
from oneaccord.control.store_states import ROWS, Action, Event, State, step


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


KNOWN = State.DECIDED | State.FAILED


@pytest.mark.parametrize("state", KNOWN)
def test_a_verdict_is_final(state: State) -> None:
    """No rank may come out of an exchange or leave as if all were well, and no other finding counts."""
    unheard = (Exchange, Stalled, Checkpoint, Report, messages.Testimony, Event.ALL_LEFT, Event.ALL_CAME, Event.INQUEST_OVER)
    assert [step(state, event) for event in unheard] == [(state, ())] * len(unheard)


@pytest.mark.parametrize("state", State)
def test_each_state_answers_what_survivors_need(state: State) -> None:
    is_known = state in KNOWN
    for event, action in ((Agree, Action.AGREE), (GiveUp, Action.GIVE_UP), (JobReformed, Action.NOTE_REFORMED)):
        assert step(state, event) == (state, (action,))
    assert step(state, Shrink) == (state, (Action.SHRINK,) if is_known else (Action.SUSPECT, Action.SHRINK))
    confided = (Action.CONFIDE,) if is_known else ()
    assert step(state, Standby) == (state, (Action.NOTE_STANDBY, *confided, Action.PRESENT))
    assert step(state, Leave) == (state, (Action.NOTE_LEAVE,))
    assert step(state, LeaveGroup) == (state, (Action.NOTE_GROUP,))
    assert step(state, Agreed) == (state, (Action.HEED_STANDBY,) if state is State.DECIDED else ())
    assert step(state, Event.LOST) == (state, (Action.REPORT_GONE if is_known else Action.BLAME,))
    assert step(state, Event.GONE) == (state, (Action.REPORT_GONE if is_known else Action.CHECK_FAREWELL,))


@pytest.mark.parametrize("state", ~KNOWN)
def test_a_failure_is_taken_up_in_each_state_without_a_verdict(state: State) -> None:
    asked = (state, ()) if state is State.INQUEST else (State.INQUEST, (Action.ASK,))
    assert step(state, Event.CONFLICT) == asked
    assert step(state, Event.CAUSE) == (State.DECIDED, (Action.TELL_STANDBY,))
    assert step(state, Report) == (state, (Action.WEIGH,))
    assert step(state, Stalled) == (state, (Action.NOTE_STALL,))
    assert step(state, Exchange) == (state, (Action.EXCHANGE,))
    assert step(state, Event.ALL_LEFT) == ((State.FINISHED, (Action.FAREWELL,)) if state is State.RUNNING else (state, ()))


def test_the_standby_hears_of_a_cause_before_all_others() -> None:
    state, actions = step(State.RUNNING, Event.CAUSE)
    assert (state, actions) == (State.DECIDED, (Action.TELL_STANDBY,))
    assert step(state, Event.STANDBY_HEARD) == (State.FAILED, (Action.ANNOUNCE,))
