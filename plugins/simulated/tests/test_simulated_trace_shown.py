"""How the trace of a simulated run is shown: its JSON for viewers, and its story for people."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord as oa
from oneaccord.api import Group, InternalError, UsageError
from oneaccord_simulated import run as run_ranks
from oneaccord_simulated.trace import CallEvent, Trace

US = 1e-6


def all_reduce(trace: Trace, rank: int, start_s: float, end_s: float | None, sequence: int, **about: Any) -> CallEvent:
    call = trace.call(rank, "all_reduce", "all_reduce(float32[4], sum)", start_s, sequence=sequence, nbytes=16, **about)
    call.end_s = end_s
    return call


def tiny() -> Trace:
    """Two ranks, one step: rank 0 computes in the background, and rank 1 dies in its second call."""
    trace = Trace(2, 7)
    trace.mark(0, 0.0, "step")
    all_reduce(trace, 0, 0.0, 2.5 * US, 0, algorithm="ring", place="train.py:31")
    trace.call(0, "compute", "compute(1e-06 s)", 1 * US, background=1).end_s = 2 * US
    all_reduce(trace, 1, 0.5 * US, 2.5 * US, 0)
    failed = trace.call(1, "send", "send to rank 0", 2.5 * US, sequence=1, group=2, nbytes=8)
    failed.end_s, failed.error = 3 * US, "PeerLostError"
    trace.mark(1, 3 * US, "power lost", "killed")
    trace.call(1, "barrier", "barrier()", 3 * US, sequence=1)
    trace.message(0, 1, 16, 0.0, 2.5 * US)
    trace.message(1, 0, 8, 2.5 * US, math.inf, 2)
    trace.duration_s = 4 * US
    return trace


TINY_JSON = """\
{"traceEvents":[
{"name":"process_name","ph":"M","pid":1,"args":{"name":"oneaccord, 2 ranks, seed 7"}},
{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"rank 0"}},
{"name":"thread_sort_index","ph":"M","pid":1,"tid":1,"args":{"sort_index":1}},
{"name":"thread_name","ph":"M","pid":1,"tid":2,"args":{"name":"rank 0, background 1"}},
{"name":"thread_sort_index","ph":"M","pid":1,"tid":2,"args":{"sort_index":2}},
{"name":"thread_name","ph":"M","pid":1,"tid":3,"args":{"name":"rank 1"}},
{"name":"thread_sort_index","ph":"M","pid":1,"tid":3,"args":{"sort_index":3}},
{"name":"message","cat":"message","ph":"f","bp":"e","ts":2.500,"pid":1,"tid":3,"id":0},
{"name":"step","cat":"mark","ph":"i","ts":0.000,"pid":1,"tid":1,"s":"t"},
{"name":"all_reduce","cat":"call","ph":"X","ts":0.000,"dur":2.500,"pid":1,"tid":1,"args":{"what":"all_reduce(float32[4], sum)",\
"sequence":0,"group":0,"bytes":16,"algorithm":"ring","place":"train.py:31"}},
{"name":"all_reduce","cat":"call","ph":"X","ts":0.500,"dur":2.000,"pid":1,"tid":3,"args":{"what":"all_reduce(float32[4], sum)",\
"sequence":0,"group":0,"bytes":16,"algorithm":"","place":""}},
{"name":"compute","cat":"call","ph":"X","ts":1.000,"dur":1.000,"pid":1,"tid":2,"args":{"what":"compute(1e-06 s)",\
"sequence":-1,"group":0,"bytes":0,"algorithm":"","place":""}},
{"name":"send","cat":"call","ph":"X","ts":2.500,"dur":0.500,"pid":1,"tid":3,"args":{"what":"send to rank 0",\
"sequence":1,"group":2,"bytes":8,"algorithm":"","place":"","error":"PeerLostError"}},
{"name":"killed: power lost","cat":"killed","ph":"i","ts":3.000,"pid":1,"tid":3,"s":"t"},
{"name":"barrier","cat":"call","ph":"X","ts":3.000,"dur":1.000,"pid":1,"tid":3,"args":{"what":"barrier()",\
"sequence":1,"group":0,"bytes":0,"algorithm":"","place":"","unfinished":true}},
{"name":"message","cat":"message","ph":"s","ts":0.000,"pid":1,"tid":1,"id":0,"args":{"bytes":16,"group":0}},
{"name":"message to rank 0 never arrived","cat":"message","ph":"i","ts":2.500,"pid":1,"tid":3,"s":"t","args":{"bytes":8,"group":2}}
],"displayTimeUnit":"ns"}
"""


# JSON

KEYS = {
    "M": ["name", "ph", "pid", "args"],
    "X": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
    "i": ["name", "cat", "ph", "ts", "pid", "tid", "s"],
    "s": ["name", "cat", "ph", "ts", "pid", "tid", "id", "args"],
    "f": ["name", "cat", "ph", "bp", "ts", "pid", "tid", "id"],
}


def check_json(trace: Trace) -> list[dict[str, Any]]:
    """Check what viewers need, and return the events."""
    text = trace.to_json()
    whole = json.loads(text, parse_float=lambda digits: int(digits.replace(".", "")))  # exact: three decimals make nanoseconds
    assert list(whole) == ["traceEvents", "displayTimeUnit"]
    events = whole["traceEvents"]
    assert len(text.splitlines()) == len(events) + 2
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    ends: dict[str, list[int]] = {"s": [], "f": []}
    for event in events:
        assert [key for key in event if key in KEYS[event["ph"]]] == KEYS[event["ph"]]
        assert event["pid"] == 1
        if event["ph"] != "M":
            assert event["tid"] in named
            assert event["ts"] >= 0
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
        elif event["ph"] in ends:
            ends[event["ph"]].append(event["id"])
    assert sorted(ends["s"]) == sorted(ends["f"])
    assert len(set(ends["s"])) == len(ends["s"])
    for slices in tracks.values():
        assert [each["ts"] for each in slices] == sorted(each["ts"] for each in slices)
        for number, a in enumerate(slices):
            for b in slices[number + 1 :]:
                a_end, b_end = a["ts"] + a["dur"], b["ts"] + b["dur"]
                assert b["ts"] >= a_end or b_end <= a_end
    return events


def test_the_json_of_a_tiny_trace():
    assert tiny().to_json() == TINY_JSON
    assert tiny().to_json().encode() == tiny().to_json().encode()
    check_json(tiny())
    check_json(Trace(1, 0))
    assert '"oneaccord, 1 rank, seed 0"' in Trace(1, 0).to_json()


times = st.floats(0, 1e-5, allow_subnormal=False)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), times, times, st.booleans(), st.booleans()), max_size=30))
def test_the_json_of_any_program_is_what_viewers_need(program):
    trace = Trace(3, 1)
    clocks: dict[tuple[int, int], float] = defaultdict(float)
    for number, (rank, background, pause, lasts, nests, marks) in enumerate(program):
        thread = rank, background
        start = clocks[thread] = clocks[thread] + pause
        if marks:
            trace.mark(rank, clocks[rank, 0], "step")
        outer = trace.call(rank, "all_reduce", "all_reduce()", start, background=background)
        outer.end_s = clocks[thread] = start + lasts
        if nests:
            trace.call(rank, "send", "send", start + lasts / 3, background=background).end_s = start + lasts / 2
        trace.message(rank, (rank + 1) % 3, number, start, outer.end_s if number % 4 else math.inf)
    trace.duration_s = max(clocks.values(), default=0.0)
    check_json(trace)


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0.5, 1.5), (-1.0, 0.5), (0.5, 0.25), (-2.0, -1.0)],
    ids=["later", "earlier", "backwards", "out of order"],
)
def test_calls_that_overlap_in_part_are_refused(begin, end):
    trace = Trace(2, 0)
    all_reduce(trace, 1, 3.0, 4.0, 0)
    all_reduce(trace, 1, 3.0 + begin, 3.0 + end, 1, background=1)
    if end > begin:
        trace.to_json()  # threads of their own may overlap
    trace.calls[-1].background = 0
    with pytest.raises(InternalError, match=r"all_reduce #1 \(float32\[4\], sum\)"):
        trace.to_json()


def test_rounding_makes_no_overlap():
    """Both times round down, and begin plus rounded duration would reach beyond the next begin."""
    trace = Trace(1, 0)
    all_reduce(trace, 0, 0.4e-9, 1.4e-9 + 0.5e-9, 0)
    all_reduce(trace, 0, 1.9e-9, 3.3e-9, 1)
    slices = [event for event in check_json(trace) if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in slices] == [(0, 2), (2, 1)]


def test_an_arrow_ties_the_call_that_sends_to_the_one_that_receives():
    """Viewers go by the order in the file at equal times: an arrow ends before the next call begins, and begins after its own did."""
    trace = Trace(2, 0)
    all_reduce(trace, 0, 0.0, 1 * US, 0)
    all_reduce(trace, 0, 1 * US, 2 * US, 1)
    trace.message(0, 1, 1, 1 * US, 2 * US)
    trace.message(1, 0, 1, 0.0, 1 * US)
    trace.message(1, 0, 1, 1 * US, 1 * US)
    order = [(event["ph"], event.get("id")) for event in check_json(trace) if event["ph"] != "M"]
    assert order == [("f", 0), ("f", 1), ("X", None), ("X", None), ("s", 0), ("s", 1), ("s", 2), ("f", 2)]


def test_an_arrow_begins_and_ends_on_the_thread_that_makes_such_a_call():
    trace = Trace(2, 0)
    trace.call(0, "compute", "compute()", 0.0).end_s = 9 * US
    all_reduce(trace, 0, 1 * US, 2 * US, 0, background=1)
    all_reduce(trace, 0, 1 * US, 4 * US, 0, background=2, group=5)
    all_reduce(trace, 0, 3 * US, 4 * US, 1, background=1)
    for sent, group in [(1, 0), (1, 5), (2.5, 0), (3, 0), (1, 4)]:
        trace.message(0, 1, 0, sent * US, 8 * US, group)
    trace.message(1, 0, 0, 0.5 * US, 2 * US)
    events = check_json(trace)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["rank 0", "rank 0, background 1", "rank 0, background 2", "rank 1"]
    starts = {event["id"]: names[event["tid"]] for event in events if event["ph"] == "s"}
    assert list(starts.values()) == [
        "rank 0, background 1",
        "rank 0, background 2",
        "rank 0",
        "rank 0, background 1",
        "rank 0",
        "rank 1",
    ]
    ends = {event["id"]: names[event["tid"]] for event in events if event["ph"] == "f"}
    assert ends == {**dict.fromkeys(range(5), "rank 1"), 5: "rank 0, background 1"}


def test_strings_of_the_program_are_escaped():
    trace = Trace(1, 0)
    trace.mark(0, 0.0, 'say "é"\n')
    all_reduce(trace, 0, 0.0, 0.0, 0, place='a"b.py:1')
    events = check_json(trace)
    assert [event["name"] for event in events if event["ph"] == "i"] == ['say "é"\n']
    assert events[-1]["args"]["place"] == 'a"b.py:1'


# Story


def test_the_story_of_a_small_world():
    trace = Trace(3, 9)
    for rank in range(3):
        for sequence in range(40):
            all_reduce(trace, rank, sequence * 1e-4, (sequence + 1) * 1e-4, sequence, place="train.py:31")
    trace.mark(1, 3 * 1e-4, "its link is 10 times slower", "fault")
    for rank in range(3):
        trace.mark(rank, 40e-4, "step 40")
        trace.call(rank, "compute", "compute(1e-05 s)", 40e-4, background=rank // 2).end_s = 41e-4
    failed = all_reduce(trace, 0, 41e-4, 43e-4, 40, place="train.py:31")
    failed.error = "PeerLostError"
    all_reduce(trace, 1, 41e-4, None, 40, place="train.py:31")
    trace.mark(1, 42e-4, "", "killed")
    trace.call(2, "recv", "recv from rank 1", 41e-4, sequence=0)
    trace.duration_s = 44e-4
    assert trace.story() == (
        "3 ranks, seed 9, 0.004400 s\n"
        "... 120 calls before, all ranks had finished all_reduce #39\n"
        "  0.000300 s  rank 1                fault: its link is 10 times slower\n"
        "  0.004000 s  ranks 0-2             mark: step 40\n"
        "  0.004000 s  ranks 0-1             compute (1e-05 s)  began\n"
        "  0.004000 s  rank 2, background 1  compute (1e-05 s)  began\n"
        "  0.004100 s  ranks 0-1             compute  ended\n"
        "  0.004100 s  rank 2, background 1  compute  ended\n"
        "  0.004100 s  ranks 0-1             all_reduce #40 (float32[4], sum)  began at train.py:31\n"
        "  0.004100 s  rank 2                recv from rank 1 #0  began\n"
        "  0.004200 s  rank 1                killed\n"
        "  0.004300 s  rank 0                all_reduce #40  ended by PeerLostError\n"
        "never ended:\n"
        "  rank 1  all_reduce #40 (float32[4], sum)  since 0.004100 s at train.py:31\n"
        "  rank 2  recv from rank 1 #0  since 0.004100 s\n"
    )
    assert trace.story(last=1).splitlines()[2:6] == [
        "  0.000300 s  rank 1  fault: its link is 10 times slower",
        "... 11 events left out",
        "  0.004100 s  rank 2  recv from rank 1 #0  began",
        "  0.004200 s  rank 1  killed",
    ]
    assert trace.story(around=2e-4, last=3).splitlines()[:7] == [
        "3 ranks, seed 9, 0.004400 s",
        "... 9 events before",
        "  0.000200 s  ranks 0-2  all_reduce #1  ended",
        "  0.000200 s  ranks 0-2  all_reduce #2 (float32[4], sum)  began at train.py:31",
        "  0.000300 s  ranks 0-2  all_reduce #2  ended",
        "... 237 events after",
        "never ended:",
    ]


def test_the_story_of_a_run_that_went_well_is_short():
    trace = Trace(2, 0)
    for rank in range(2):
        all_reduce(trace, rank, 0.0, 0.5, 0)
        trace.mark(rank, 0.5, "ended", "ended")
    trace.duration_s = 0.5
    assert trace.story() == (
        "2 ranks, seed 0, 0.500000 s\n... 2 calls before, all ranks had finished all_reduce #0\n  0.500000 s  ranks 0-1  ended\n"
    )
    assert Trace(1, 3).story() == "1 rank, seed 3, 0.000000 s\n"


def test_only_what_all_ranks_finished_well_is_summed_up():
    trace = Trace(2, 0)
    all_reduce(trace, 0, 0.0, 1.0, 0)
    all_reduce(trace, 1, 0.0, 1.0, 0).error = "DeadlineError"
    all_reduce(trace, 0, 1.0, 2.0, 0, group=1)
    all_reduce(trace, 1, 1.0, 2.0, 0, group=1)
    assert "before" not in trace.story()
    assert len(trace.story().splitlines()) == 1 + 3 + 2
    all_reduce(trace, 0, 2.0, 3.0, 1)
    all_reduce(trace, 1, 2.0, 3.0, 1)
    assert trace.story().splitlines()[1:] == ["... 6 calls before, all ranks had finished all_reduce #1"]
    all_reduce(trace, 0, 3.5, None, 2)
    all_reduce(trace, 1, 3.0, None, 2)
    assert trace.story().splitlines()[1:] == [
        "... 6 calls before, all ranks had finished all_reduce #1",
        "  3.000000 s  rank 1  all_reduce #2 (float32[4], sum)  began",
        "  3.500000 s  rank 0  all_reduce #2 (float32[4], sum)  began",
        "never ended:",
        "  ranks 0-1  all_reduce #2 (float32[4], sum)  since 3.000000 s",
    ]


def test_each_ranks_own_order_is_kept_where_lines_are_shared():
    trace = Trace(2, 0)
    for rank, labels in enumerate(["ab", "ba"]):
        for label in labels:
            trace.mark(rank, 0.0, label)
    assert trace.story().splitlines()[1:] == [
        "  0.000000 s  rank 0     mark: a",
        "  0.000000 s  ranks 0-1  mark: b",
        "  0.000000 s  rank 1     mark: a",
    ]


@pytest.mark.parametrize(
    ("around", "top", "first", "last_line"),
    [
        (
            None,
            "... 1,000 calls before, all ranks had finished all_reduce #0",
            "  1.099800 s  rank 998  fault: bit 0 flipped",
            "  1.099900 s  rank 999  send to rank 999 #9  began",
        ),
        (
            1.05,
            "  1.049900 s  rank 499  fault: bit 4 flipped",
            "  1.049900 s  rank 499  fault: bit 5 flipped",
            "  1.050200 s  rank 502  all_reduce #0  ended",
        ),
    ],
)
def test_the_story_of_a_big_world_is_short_and_says_what_it_leaves_out(around, top, first, last_line):
    trace = Trace(1000, 0)
    for rank in range(1000):
        time_s = 1.0 + rank * 1e-4
        all_reduce(trace, rank, 0.0, time_s, 0)
        for number in range(10):
            trace.mark(rank, time_s, f"bit {number} flipped", "fault")
            trace.call(rank, "send", f"send to rank {rank}", time_s, sequence=number)
    trace.duration_s = 1.1
    lines = trace.story(around=around).splitlines()
    assert len(lines) == 59
    assert lines[:2] == ["1,000 ranks, seed 0, 1.100000 s", top]
    # Forty lines, and before them the six last faults that are not among these.
    middle = next(place for place, line in enumerate(lines) if line.startswith("... ") and "event" in line)
    assert all("fault" in line for line in lines[middle - 6 : middle])
    assert (lines[middle + 1], lines[middle + 40]) == (first, last_line)
    left_out = [int(line.split()[1].replace(",", "")) for line in lines if line.startswith("... ") and "event" in line]
    assert 40 + 6 + sum(left_out) == 22_000 - (2000 if around is None else 0)
    assert lines[-10] == "never ended:"
    assert lines[-9] == "  rank 0  send to rank 0 #0  since 1.000000 s"
    assert lines[-1] == "  ... and 9,992 calls more"


def test_many_ranks_are_named_in_few_words():
    trace = Trace(42, 0)
    for rank in range(42):
        trace.mark(rank, 1.0, "everywhere")
        if rank % 3 == 0:
            trace.mark(rank, 2.0, "alone")
        if rank % 3 != 2:
            trace.mark(rank, 3.0, "in pairs")
    assert trace.story().splitlines()[1:] == [
        "  1.000000 s  ranks 0-41                    mark: everywhere",
        "  2.000000 s  ranks 0, 3, 6, 9, 12, 15 and 8 more  mark: alone",
        "  3.000000 s  ranks 0-1, 3-4, 6-7, 9-10, 12-13, 15-16 and 16 more  mark: in pairs",
    ]


@pytest.mark.parametrize("last", [0, -1])
def test_a_story_of_no_events_is_an_error(last):
    with pytest.raises(UsageError, match=f"last={last}: give"):
        tiny().story(last=last)


happenings = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 3)), max_size=60)


@given(happenings)
def test_a_story_with_room_for_all_leaves_nothing_out(happened):
    """What stands in the lines is what happened: every event once for its rank, and each rank's in order."""
    trace = Trace(4, 0)
    clocks = [0.0] * 4
    for rank, label, pause in happened[:40]:
        clocks[rank] += pause
        trace.mark(rank, clocks[rank], label)
    told: dict[int, list[str]] = defaultdict(list)
    for line in trace.story(last=100).splitlines()[1:]:
        _, who, what = line.strip().split("  ", 2)
        runs = [run.split("-") for run in who.split(maxsplit=1)[1].split(", ")]
        for rank in [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]:
            told[rank].append(what.strip().removeprefix("mark: "))
    assert told == {rank: [mark.label for mark in trace.marks_of(rank)] for rank in range(4) if trace.marks_of(rank)}


def test_requests_have_rows_of_their_own_and_last_until_they_end():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(1)
            group.send(np.ones(3), 1, tag=2)
            oa.sleep(1)
            group.send_async(np.ones(3), 1, tag=1).wait()
        else:
            first, second = group.recv_async(0, tag=1), group.recv_async(0, tag=2)
            oa.sleep(1.5)
            third = group.recv_async(0, tag=3)
            assert third.cancel()
            oa.wait_all([first, second])

    trace = run_ranks(program, 2).trace
    requests = [
        (call.rank, call.what, call.row, call.start_s, call.end_s, call.error) for call in trace.calls if "request" in call.row
    ]
    assert requests == [
        (1, "recv from rank 0, tag 1", "request 1", 0.0, 2.0, ""),
        (1, "recv from rank 0, tag 2", "request 2", 0.0, 1.0, ""),
        (1, "recv from rank 0, tag 3", "request 2", 1.5, 1.5, "Cancelled"),
        (0, "send to rank 1, tag 1", "request 1", 2.0, 2.0, ""),
    ]
    names = [event["args"]["name"] for event in json.loads(trace.to_json())["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 0, request 1", "rank 1", "rank 1, request 1", "rank 1, request 2"]
    assert "0.000000 s  rank 1, request 2  recv from rank 0, tag 2 #2  began" in trace.story()
