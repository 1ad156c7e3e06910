"""The flight recorder: what a rank says about where it was."""

from __future__ import annotations

import threading
import time

from manyhands.rendezvous.recorder import FlightRecorder
from manyhands.wire import CallSignature

BARRIER = CallSignature("barrier")


def test_a_rank_that_has_done_nothing_says_so() -> None:
    assert FlightRecorder().testify(0, 0) == (False, "no call yet")


def test_a_rank_tells_its_call_at_a_place() -> None:
    recorder = FlightRecorder()
    recorder.start(0, 0, BARRIER).finished = time.monotonic()
    recorder.start(0, 1, "recv from rank 2")
    assert recorder.testify(0, 0) == (True, "barrier() #0")
    assert recorder.testify(0, 1) == (True, "recv from rank 2 #1")


def test_a_rank_elsewhere_tells_what_it_waits_in() -> None:
    recorder = FlightRecorder()
    recorder.start(0, 0, BARRIER).started -= 2
    recorder.start(1, 1, "a later call that has ended").finished = time.monotonic()
    entered, text = recorder.testify(0, 5)
    assert not entered
    assert text == "in barrier() #0, for 2.0 s"


def test_a_rank_in_no_call_tells_its_last() -> None:
    recorder = FlightRecorder()
    recorder.start(0, 3, BARRIER).finished = time.monotonic() - 4
    assert recorder.testify(0, 4) == (False, "in no call; the last was barrier() #3, which ended 4.0 s ago")


def test_places_of_different_channels_differ() -> None:
    recorder = FlightRecorder()
    recorder.start(2, 0, BARRIER)
    assert not recorder.testify(0, 0)[0]
    assert recorder.testify(2, 0)[0]


def test_only_the_last_calls_are_kept() -> None:
    recorder = FlightRecorder(length=3)
    for number in range(5):
        recorder.start(0, number, BARRIER)
    assert [recorder.testify(0, number)[0] for number in range(5)] == [False, False, True, True, True]


def test_it_knows_whether_one_thread_alone_made_the_calls() -> None:
    recorder = FlightRecorder()
    assert recorder.alone
    recorder.start(0, 0, BARRIER)
    recorder.start(0, 1, BARRIER)
    assert recorder.alone
    thread = threading.Thread(target=recorder.start, args=(0, 2, BARRIER))
    thread.start()
    thread.join()
    assert not recorder.alone
    recorder.start(0, 3, BARRIER)
    assert not recorder.alone


def test_one_thread_that_is_not_the_main_one_is_alone_as_well() -> None:
    recorder = FlightRecorder()
    thread = threading.Thread(target=recorder.start, args=(0, 0, BARRIER))
    thread.start()
    thread.join()
    assert recorder.alone
