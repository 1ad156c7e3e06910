"""The trace of a simulated run: what it holds, questions and assertions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.api import OPERATIONS, UsageError
from oneaccord_simulated.trace import CallEvent, MarkEvent, MessageEvent, Trace

US = 1e-6


def all_reduce(trace: Trace, rank: int, start_s: float, end_s: float | None, sequence: int, **about: Any) -> CallEvent:
    call = trace.call(rank, "all_reduce", "all_reduce(float32[4], sum)", start_s, sequence=sequence, nbytes=16, **about)
    call.end_s = end_s
    return call


def tiny() -> Trace:
    """Two ranks: rank 1 fails in its second call, and never ends its third."""
    trace = Trace(2, 7)
    trace.mark(0, 0.0, "step")
    all_reduce(trace, 0, 0.0, 2.5 * US, 0, algorithm="ring", place="train.py:31", background=1)
    all_reduce(trace, 1, 0.5 * US, 2.5 * US, 0)
    failed = trace.call(1, "send", "send to rank 0", 2.5 * US, sequence=1, group=2, nbytes=8)
    failed.end_s, failed.error = 3 * US, "PeerLostError"
    trace.mark(1, 3 * US, "power lost", "killed")
    trace.call(1, "barrier", "barrier()", 3 * US, sequence=1)
    trace.message(0, 1, 16, 0.0, 2.5 * US)
    trace.message(1, 0, 8, 2.5 * US, math.inf, 2)
    trace.duration_s = 4 * US
    return trace


# What it holds


def test_a_trace_holds_what_happened_in_order():
    trace = tiny()
    assert [(call.rank, call.operation, call.end_s) for call in trace.calls] == [
        (0, "all_reduce", 2.5 * US),
        (1, "all_reduce", 2.5 * US),
        (1, "send", 3 * US),
        (1, "barrier", None),
    ]
    assert trace.calls[0] == CallEvent(
        0, "all_reduce", "all_reduce(float32[4], sum)", 0, 0, 0.0, 2.5 * US, 16, "ring", "train.py:31", 1
    )
    assert trace.messages == [MessageEvent(0, 1, 16, 0.0, 2.5 * US, 0), MessageEvent(1, 0, 8, 2.5 * US, math.inf, 2)]
    assert trace.marks == [MarkEvent(0, 0.0, "step"), MarkEvent(1, 3 * US, "power lost", "killed", 2)]
    assert trace.marks_of(1) == trace.marks[1:]
    assert repr(trace) == "<Trace of 2 ranks, seed 7: 4 calls, 2 messages, 4e-06 s>"


@pytest.mark.parametrize(
    ("what", "sequence", "group", "name", "whole"),
    [
        ("all_reduce(float32[4], sum)", 3, 0, "all_reduce #3", "all_reduce #3 (float32[4], sum)"),
        ("barrier()", 0, 2, "barrier #0 of group 2", "barrier #0 of group 2"),
        ("sizes of gather_object(root=1)", 5, 0, "sizes of gather_object #5", "sizes of gather_object #5 (root=1)"),
        ("send to rank 3", 1, 0, "send to rank 3 #1", "send to rank 3 #1"),
        ("compute(0.1 s)", -1, 0, "compute", "compute (0.1 s)"),
        ("", -1, 0, "given", "given"),
    ],
)
def test_a_call_in_words(what, sequence, group, name, whole):
    call = CallEvent(0, "given", what, sequence, group, 0.0)
    assert (call.name, call.describe()) == (name, whole)


messages = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 1 << 40)))


@given(messages, st.booleans())
def test_counters_are_the_sums_over_messages_also_when_none_is_kept(sent, keep):
    trace = Trace(5, 0, keep_messages=keep)
    for source, dest, nbytes in sent:
        trace.message(source, dest, nbytes, 0.0, 1.0)
    for rank in range(5):
        assert trace.bytes_sent(rank) == sum(nbytes for source, _, nbytes in sent if source == rank)
        assert trace.messages_sent(rank) == sum(source == rank for source, _, _ in sent)
    assert len(trace.messages) == keep * len(sent)


# Questions


def test_calls_are_counted_on_one_rank_or_where_there_are_most():
    trace = Trace(3, 0)
    for rank, times in enumerate([1, 3, 0]):
        for sequence in range(times):
            all_reduce(trace, rank, 0.0, 0.0, sequence)
    trace.call(1, "exchange the choice of a backend", "", 0.0)
    trace.call(1, "send", "send to rank 0", 0.0)
    trace.call(1, "send_object", "send to rank 0", 0.0)
    assert [trace.count("all_reduce", rank) for rank in range(3)] == [1, 3, 0]
    assert trace.count("all_reduce") == 3
    assert trace.count("send") == trace.count("exchange") == trace.count("exchange the choice of a backend") == 1
    assert trace.count("barrier") == 0
    assert trace.calls_of(1) == trace.calls[1:]
    assert trace.calls_of(1, "all_reduce") == trace.calls[1:4]
    assert trace.calls_of(2) == []


def test_a_name_that_no_operation_has_is_an_error():
    trace = tiny()
    with pytest.raises(UsageError, match=r"^there is no operation 'allreduce'; did you mean 'all_reduce'\?$"):
        trace.count("allreduce")
    with pytest.raises(UsageError, match=r"^there is no operation 'xyzzy'; there are all_gather, all_gather_object, "):
        trace.assert_no_call("xyzzy")
    with pytest.raises(UsageError, match="there is no operation 'al_reduce'"):
        trace.assert_at_most(1, "al_reduce")
    trace.call(0, "xyzzy", "xyzzy()", 0.0)
    assert trace.count("xyzzy") == 1
    for operation in sorted(OPERATIONS):
        assert trace.count(operation, 1) == (operation in {"all_reduce", "send", "barrier"})


@pytest.mark.parametrize("rank", [-1, 2, "0", 0.5])
def test_a_rank_that_is_none_is_an_error(rank):
    trace = tiny()
    for ask in (trace.bytes_sent, trace.messages_sent, trace.calls_of, trace.marks_of, trace.steps):
        with pytest.raises(UsageError, match=f"^rank {rank!r} was given, but the ranks of this run are 0 to 1$"):
            ask(rank)
    with pytest.raises(UsageError, match="was given"):
        trace.assert_bytes_sent_at_most(10, rank=rank)
    with pytest.raises(UsageError, match="was given"):
        trace.assert_at_most(1, "send", rank=rank)


def test_a_call_belongs_to_the_step_in_which_it_begins():
    trace = Trace(2, 0)
    before = all_reduce(trace, 0, 0.0, 1.0, 0)
    trace.mark(0, 1.0, "step 0")
    first = all_reduce(trace, 0, 1.0, 3.0, 1)
    other = all_reduce(trace, 1, 1.0, 1.0, 1)
    trace.mark(1, 1.0, "step")
    trace.mark(0, 2.0, "stepping")
    trace.mark(0, 2.0, "step", "fault")
    trace.mark(0, 2.0, "epoch 1")
    second = all_reduce(trace, 0, 2.0, 2.0, 2)
    # All at one time: what came first decides.
    trace.mark(0, 2.0, "step 1")
    trace.mark(0, 2.0, "step 2")
    third = all_reduce(trace, 0, 2.0, 2.0, 3)
    assert trace.steps(0) == [[first, second], [], [third]]
    assert trace.steps(0, "epoch") == [[second, third]]
    assert trace.steps(1) == [[]]
    assert trace.steps(1, "epoch") == []
    assert [first, second, third] == [call for step in trace.steps(0) for call in step]
    assert trace.calls == [before, first, other, second, third]


@given(st.lists(st.sampled_from(["step", "call"])))
def test_steps_hold_all_calls_from_the_first_mark_on(happened):
    trace = Trace(1, 0)
    for number, what in enumerate(happened):
        if what == "step":
            trace.mark(0, 0.0, "step")
        else:
            all_reduce(trace, 0, 0.0, 0.0, number)
    before = happened.index("step") if "step" in happened else len(happened)
    assert [call for step in trace.steps(0) for call in step] == trace.calls[before:]
    assert len(trace.steps(0)) == happened.count("step")


# Assertions


def training() -> Trace:
    """Three ranks in two steps; ranks 1 and 2 reduce twice in the second."""
    trace = Trace(3, 0)
    for rank in range(3):
        for step in range(2):
            trace.mark(rank, float(step), f"step {10 * step}")
            all_reduce(trace, rank, step + 0.25, step + 0.5, step, place=f"train.py:{30 + step}")
            if step and rank:
                all_reduce(trace, rank, 1.5, 1.75 if rank == 2 else None, 2)
        trace.message(rank, (rank + 1) % 3, 1000 * rank, 0.25, 0.5)
    trace.duration_s = 2.0
    return trace


def said(assertion: Any, *args: Any, **options: Any) -> str:
    """Return the text of an assertion that fails, after a look at what pytest would show of it."""
    with pytest.raises(AssertionError) as caught:
        assertion(*args, **options)
    assert [entry.ishidden(caught) for entry in caught.traceback] == [False] + [True] * (len(caught.traceback) - 1)
    return str(caught.value)


def test_assert_at_most():
    trace = training()
    trace.assert_at_most(3, "all_reduce")
    trace.assert_at_most(2, "all_reduce", rank=0)
    trace.assert_at_most(2, "all_reduce", per="step")
    trace.assert_at_most(1, "all_reduce", per="step", rank=0)
    trace.assert_at_most(0, "barrier", per="step")
    assert said(trace.assert_at_most, 2, "all_reduce") == (
        "rank 1 called all_reduce 3 times, but at most 2 is allowed; the calls:\n"
        "  0.250000 s  all_reduce #0 (float32[4], sum)  at train.py:30\n"
        "  1.250000 s  all_reduce #1 (float32[4], sum)  at train.py:31\n"
        "  1.500000 s  all_reduce #2 (float32[4], sum), never ended\n"
        "so it is on ranks 1-2"
    )
    assert said(trace.assert_at_most, 1, "all_reduce", per="step", rank=2) == (
        'rank 2 called all_reduce 2 times in step 1 (the mark "step 10" at 1.000000 s), but at most 1 is allowed; the calls:\n'
        "  1.250000 s  all_reduce #1 (float32[4], sum)  at train.py:31\n"
        "  1.500000 s  all_reduce #2 (float32[4], sum)"
    )
    assert said(trace.assert_at_most, 0, "all_reduce", per="step").startswith(
        'rank 0 called all_reduce once in step 0 (the mark "step 0" at 0.000000 s), but at most 0 is allowed; the calls:\n'
    )
    assert said(trace.assert_at_most, 0, "all_reduce", per="step").endswith("\nso it is on ranks 0-2, in 6 steps")
    assert said(trace.assert_at_most, 0, "all_reduce", per="step", rank=1).endswith("\nso it is on rank 1, in 2 steps")


def test_assert_at_least():
    trace = training()
    trace.assert_at_least(2, "all_reduce")
    trace.assert_at_least(3, "all_reduce", rank=1)
    trace.assert_at_least(1, "all_reduce", per="step")
    assert said(trace.assert_at_least, 2, "all_reduce", per="step", rank=1) == (
        'rank 1 called all_reduce once in step 0 (the mark "step 0" at 0.000000 s), but at least 2 is expected; all its calls there:\n'
        "  0.250000 s  all_reduce #0 (float32[4], sum)  at train.py:30"
    )
    assert said(trace.assert_at_least, 1, "barrier", rank=0) == (
        "rank 0 called barrier 0 times, but at least 1 is expected; all its calls there:\n"
        "  0.250000 s  all_reduce #0 (float32[4], sum)  at train.py:30\n"
        "  1.250000 s  all_reduce #1 (float32[4], sum)  at train.py:31"
    )
    trace.mark(0, 2.0, "step 20")
    assert said(trace.assert_at_least, 1, "all_reduce", per="step").endswith(
        'in step 2 (the mark "step 20" at 2.000000 s), but at least 1 is expected; all its calls there:\n  (no call)'
    )


def test_counting_in_steps_that_nobody_marked_is_an_error():
    trace = training()
    for check in (trace.assert_at_most, trace.assert_at_least):
        with pytest.raises(UsageError) as caught:
            check(0, "all_reduce", per="epoch")
        assert str(caught.value) == (
            'per=\'epoch\' needs marks: rank 0 has none whose label is "epoch" or begins with "epoch "; its marks are '
            "'step 0', 'step 10'. Mark the beginning of each step, or leave per= out"
        )
    # One rank without marks is enough: its steps would hold for the wrong reason.
    trace = Trace(2, 0)
    trace.mark(0, 0.0, "step")
    trace.assert_at_most(0, "send", per="step", rank=0)
    with pytest.raises(UsageError, match=r"rank 1 has none .* its marks are none\."):
        trace.assert_at_most(0, "send", per="step")


def test_assert_bytes_sent_at_most():
    trace = training()
    trace.assert_bytes_sent_at_most(2000)
    trace.assert_bytes_sent_at_most(0, rank=0)
    trace.call(1, "barrier", "barrier()", 2.0)
    assert said(trace.assert_bytes_sent_at_most, 999) == (
        "rank 1 sent 1,000 bytes in 1 message, but at most 999 is allowed; its calls with data:\n"
        "  0.250000 s  all_reduce #0 (float32[4], sum)  at train.py:30\n"
        "  1.250000 s  all_reduce #1 (float32[4], sum)  at train.py:31\n"
        "  1.500000 s  all_reduce #2 (float32[4], sum), never ended\n"
        "so it is on ranks 1-2"
    )
    assert said(trace.assert_bytes_sent_at_most, 1999, rank=2).startswith(
        "rank 2 sent 2,000 bytes in 1 message, but at most 1,999 "
    )


def test_assert_no_call():
    trace = tiny()
    trace.assert_no_call("broadcast")
    trace.assert_no_call("exchange")
    assert said(trace.assert_no_call, "send") == (
        "rank 1 called send, once in all, but no such call is allowed:\n  0.000002 s  rank 1  send to rank 0 #1 of group 2, PeerLostError"
    )
    assert said(training().assert_no_call, "all_reduce").startswith("ranks 0-2 called all_reduce, 8 times in all, but no such ")


def test_a_failed_assertion_lists_twenty_calls_at_most():
    trace = Trace(1, 0)
    for sequence in range(1025):
        all_reduce(trace, 0, 0.0, 0.0, sequence)
    lines = said(trace.assert_no_call, "all_reduce").splitlines()
    assert len(lines) == 22
    assert lines[-2:] == ["  0.000000 s  rank 0  all_reduce #19 (float32[4], sum)", "  ... and 1,005 calls more"]


def test_assert_same_calls():
    trace = Trace(4, 0)
    for rank in range(4):
        all_reduce(trace, rank, rank / 4, 1.0, 0, place="train.py:1")
        # What is no collective of the world may differ.
        trace.call(rank, "send", f"send to rank {3 - rank}", 1.0)
        if rank:
            all_reduce(trace, rank, 1.0, 1.0, 0, group=rank)
    trace.assert_same_calls()
    for rank, shape in enumerate([4, 4, 5]):
        trace.call(rank, "broadcast_object", f"broadcast_object(int8[{shape}])", 2.0, sequence=1, place=f"train.py:{shape}")
    assert said(trace.assert_same_calls) == (
        "the ranks differ in collective call 1 of the world:\n"
        "  ranks 0-1 called broadcast_object #1 (int8[4])  at train.py:4\n"
        "  rank 2 called broadcast_object #1 (int8[5])  at train.py:5\n"
        "  rank 3 called none after all_reduce #0 (float32[4], sum)  at train.py:1"
    )
    silent = Trace(2, 0)
    silent.assert_same_calls()
    all_reduce(silent, 1, 0.0, 0.0, 0)
    assert said(silent.assert_same_calls) == (
        "the ranks differ in collective call 0 of the world:\n  rank 0 called none at all\n  rank 1 called all_reduce #0 (float32[4], sum)"
    )


def test_assert_duration_at_most():
    trace = training()
    trace.assert_duration_at_most(2.0)
    assert said(trace.assert_duration_at_most, 1.999999999).splitlines()[:3] == [
        "the run took 2.0 s, but at most 1.999999999 s is allowed; the longest calls:",
        "  0.500000 s from 1.500000 s  rank 1  all_reduce #2 (float32[4], sum), never ended",
        "  0.250000 s from 0.250000 s  rank 0  all_reduce #0 (float32[4], sum)  at train.py:30",
    ]
    empty = Trace(1, 0)
    empty.duration_s = 1.0
    assert said(empty.assert_duration_at_most, 0).endswith("\n  (no call)")
