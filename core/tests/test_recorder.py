"""The flight recorder: what a rank says about where it was."""

from __future__ import annotations

import threading
import time

from support.waiting import PATIENCE_S

from oneaccord.calls.order.counters import PythonCounters
from oneaccord.contract.header import CallSignature
from oneaccord.control.local import LocalHub
from oneaccord.control.protocol import Wait
from oneaccord.control.recorder import FlightRecorder, Record
from oneaccord.explain.dump import take
from oneaccord.runtime.idle import Sleeper

BARRIER = CallSignature("barrier")


def waits_of(recorder: FlightRecorder, record: Record, what: Wait) -> tuple[list[Wait], bool]:
    """Note that a call waits, and return what all calls wait for."""
    recorder.stalled(record, what)
    return recorder.waits()


def test_a_rank_that_has_done_nothing_says_so() -> None:
    assert FlightRecorder().testify(0, 0) == (False, "no call yet")


def test_a_rank_tells_its_call_at_a_place() -> None:
    recorder = FlightRecorder()
    recorder.finish(recorder.start(0, 0, BARRIER))
    recorder.start(0, 1, "recv from rank 2")
    assert recorder.testify(0, 0) == (True, "barrier() #0")
    assert recorder.testify(0, 1) == (True, "recv from rank 2 #1")


def test_a_rank_elsewhere_tells_what_it_waits_in() -> None:
    clock = [10.0]
    recorder = FlightRecorder(now=lambda: clock[0])
    recorder.start(0, 0, BARRIER)
    clock[0] += 2
    recorder.finish(recorder.start(1, 1, "a later call that has ended"))
    entered, text = recorder.testify(0, 5)
    assert not entered
    assert text == "in barrier() #0, for 2.0 s"


def test_a_rank_in_no_call_tells_its_last() -> None:
    clock = [10.0]
    recorder = FlightRecorder(now=lambda: clock[0])
    recorder.finish(recorder.start(0, 3, BARRIER))
    clock[0] += 4
    assert recorder.testify(0, 4) == (False, "in no call; the last was barrier() #3, which ended 4.0 s ago")


def test_places_of_different_channels_differ() -> None:
    recorder = FlightRecorder()
    recorder.start(2, 0, BARRIER)
    assert not recorder.testify(0, 0)[0]
    assert recorder.testify(2, 0)[0]


def test_a_short_call_that_runs_is_told_with_the_line_that_made_it() -> None:
    """Nobody notes the thread of a short call; in a world of threads other ranks are in calls as well."""
    control = LocalHub(1).connect(0, "tcp", "")
    control.counted.calls[0] = counters = PythonCounters(0)
    counters.begin(BARRIER)
    sleeper = Sleeper(for_good=False)
    other = threading.Thread(target=lambda: sleeper.wait(PATIENCE_S))  # in a call of oneaccord, as another rank is
    other.start()
    dump = take(control, "job", "signal", None, threading.get_ident())
    sleeper.wake()
    other.join()
    assert [(call.what, call.thread) for call in dump.calls] == [("barrier()", threading.get_ident())]
    assert "test_recorder.py:" in dump.calls[0].place


def test_only_the_last_calls_are_kept() -> None:
    recorder = FlightRecorder(length=3)
    for number in range(5):
        recorder.start(0, number, BARRIER)
    assert [recorder.testify(0, number)[0] for number in range(5)] == [False, False, True, True, True]


def test_a_call_of_a_group_names_it_whichever_of_its_channels_it_goes_by() -> None:
    recorder = FlightRecorder()
    recorder.start(0, 0, BARRIER)
    recorder.start(1, 0, "recv from rank 2")
    recorder.start(6, 0, BARRIER)
    recorder.start(7, 0, "recv from rank 2")
    assert recorder.testify(0, 0) == (True, "barrier() #0")
    assert recorder.testify(1, 0) == (True, "recv from rank 2 #0")
    assert recorder.testify(6, 0) == (True, "barrier() #0 of group 3")
    assert recorder.testify(7, 0) == (True, "recv from rank 2 #0 of group 3")


def wait(sequence: int, channel: int = 0) -> Wait:
    return Wait(channel, sequence, "barrier", b"digest", [1], [], [0, 1])


def test_the_only_call_that_waits_is_all_there_is() -> None:
    recorder = FlightRecorder()
    record = recorder.start(0, 0, BARRIER)
    assert waits_of(recorder, record, wait(0)) == ([wait(0)], True)
    recorder.finish(record)


def test_a_call_that_runs_and_has_not_waited_is_on_the_move() -> None:
    recorder = FlightRecorder()
    waits, moves = recorder.start(0, 0, BARRIER), recorder.start(2, 0, BARRIER)
    assert waits_of(recorder, waits, wait(0)) == ([wait(0)], False)
    found, stuck = waits_of(recorder, moves, wait(0, 2))
    assert (sorted(found, key=lambda each: each.channel), stuck) == ([wait(0), wait(0, 2)], True)
    recorder.finish(moves)
    assert waits_of(recorder, waits, wait(0)) == ([wait(0)], True)
    recorder.finish(waits)


def test_the_last_word_of_a_call_counts() -> None:
    recorder = FlightRecorder()
    record = recorder.start(1, 0, "sendrecv")
    first = Wait(1, 0, "sendrecv", b"", [1, 2], [(1, True, 0), (2, False, 0)], [0, 1, 2])
    later = Wait(1, 0, "sendrecv", b"", [2], [(2, False, 0)], [0, 1, 2])
    recorder.stalled(record, first)
    assert waits_of(recorder, record, later) == ([later], True)
    recorder.finish(record)


def test_a_call_that_has_ended_waits_no_more() -> None:
    recorder = FlightRecorder()
    ended, record = recorder.start(0, 0, BARRIER), recorder.start(0, 1, BARRIER)
    recorder.stalled(ended, wait(0))
    recorder.finish(ended)
    assert waits_of(recorder, record, wait(1)) == ([wait(1)], True)
    recorder.finish(record)


def test_a_call_is_known_to_wait_even_where_later_ones_have_pushed_it_out_of_the_record() -> None:
    recorder = FlightRecorder(length=2)
    old = recorder.start(0, 0, BARRIER)
    recorder.stalled(old, wait(0))
    for number in range(1, 4):
        recorder.finish(recorder.start(0, number, BARRIER))
    late = recorder.start(0, 4, BARRIER)
    found, stuck = waits_of(recorder, late, wait(4))
    assert (sorted(found, key=lambda each: each.sequence), stuck) == ([wait(0), wait(4)], True)
    recorder.finish(late)
    recorder.finish(old)


def test_recorders_of_different_ranks_know_nothing_of_each_other() -> None:
    one, other = FlightRecorder(), FlightRecorder()
    moves, record = one.start(0, 0, BARRIER), other.start(0, 0, BARRIER)
    assert waits_of(other, record, wait(0)) == ([wait(0)], True)
    other.finish(record)
    one.finish(moves)


def test_a_group_keeps_its_name_after_it_was_closed() -> None:
    recorder = FlightRecorder()
    for number in range(1, 200):
        recorder.counted.members[2 * number] = (0, 2)
        recorder.counted.names[number] = f"group {number} (ranks 0, 2)"
        recorder.finish(recorder.start(2 * number, 0, BARRIER))
        recorder.forget(2 * number)
        assert recorder.testify(2 * number, 0) == (True, f"barrier() #0 of group {number} (ranks 0, 2)")
    assert len(recorder.counted.names) == 128  # and no more: programs make groups for days


def test_a_short_call_is_told_while_it_runs_and_after_it_has_ended() -> None:
    recorder, counters = FlightRecorder(length=4), PythonCounters(2)
    counters.next = 7
    recorder.counted.calls[2] = counters
    assert counters.begin(BARRIER) == 7
    assert recorder.testify(2, 7) == (True, "barrier() #7 of group 1")
    entered, text = recorder.testify(2, 8)
    assert not entered
    assert text.startswith("in barrier() #7 of group 1, for ")
    counters.leave()
    assert recorder.testify(2, 7) == (True, "barrier() #7 of group 1")
    assert recorder.testify(2, 8)[1].startswith("in no call; the last was barrier() #7 of group 1, which ended ")
    recorder.forget(2)  # its group has been closed
    assert recorder.testify(2, 7) == (True, "barrier() #7 of group 1")
    for number in range(10):  # it is forgotten in time
        recorder.note(0, number, BARRIER, time.monotonic())
    assert recorder.testify(2, 7)[0] is False
    assert recorder.testify(0, 20)[1].startswith("in no call; the last was barrier() #9, which ended ")
