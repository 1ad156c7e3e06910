"""What the files of flight recorders say together."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.cli.main import main
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Progress, Verdict, Wait
from oneaccord.explain.clocks import align
from oneaccord.explain.dump import FORMAT, Call, Dump, Place, decode
from oneaccord.explain.reading import Job, read_jobs
from oneaccord.explain.story import tell
from oneaccord.explain.timeline import how_exact, timeline

FLOAT32, FLOAT64 = "float32", "float64"


def call(operation: str, sequence: int, started: float = 0.0, finished: float | None = None, **more: Any) -> Call:
    """Return a collective of the world."""
    what = more.pop("what", f"{operation}({more.get('dtype', '')})")
    digest = CallSignature(operation + what).digest
    return Call(0, sequence, operation, what, started, finished, digest=digest, **more)


def dump(rank: int, calls: Sequence[Call], world_size: int = 3, **more: Any) -> Dump:
    """Return what a rank wrote."""
    count = max((each.sequence + 1 for each in calls if each.channel == 0), default=0)
    facts: dict[str, Any] = {
        "job": "abcd",
        "clock": "one",
        "now": 10.0,
        "time": 1000.0,
        "reason": "signal",
        "verdict": None,
        "raised": "",
        "groups": {0: tuple(range(world_size))},
        "progress": Progress({0: count}, {}, {}),
        "places": [],
    }
    facts |= more
    return Dump(format=FORMAT, rank=rank, world_size=world_size, origin=rank, host="node", pid=1, calls=list(calls), **facts)


def told(*dumps: Dump) -> list[str]:
    """Return the lines about a job."""
    return tell(Job("abcd", dumps[0].world_size, {each.rank: each for each in dumps})).splitlines()


def test_who_waits_is_told_once_with_line_and_duration_and_who_is_late_with_its_own() -> None:
    before, now = call("barrier", 0, 1.0, 2.0), call("all_reduce", 1, 7.5, dtype=FLOAT32, place="train.py:31")
    late = dump(1, [before], places=[Place(5, "MainThread", "load.py:8")])
    assert told(dump(0, [before, now]), late, dump(2, [before, now])) == [
        "job abcd: 3 ranks, all with a flight recorder file",
        "Ranks 0, 2 are in all_reduce(float32) #1 at train.py:31, for 2.5 s, waiting for rank 1",
        "Rank 1 is in no call, at load.py:8; its last was barrier() #0, which ended 8.0 s before",
        "In the end all wait for rank 1",
    ]


@pytest.mark.parametrize("kind", ["lost", "deadline"])
def test_a_rank_without_a_file_is_named_and_waited_for(kind: str) -> None:
    verdict = Verdict(kind, "rank 2 was lost", 2)
    running = call("all_reduce", 0, 9.99)
    lines = told(*(dump(rank, [running], reason="failed", verdict=verdict) for rank in (0, 1)))
    assert lines[1] == "The job failed: rank 2 was lost"
    died = "Rank 2 wrote nothing: it died, as other ranks reported"
    assert (lines[2] == died) == (kind == "lost")
    assert lines[2].startswith("Rank 2 wrote nothing: it ")
    assert lines[3:] == ["Ranks 0-1 are in all_reduce() #0, waiting for rank 2", "In the end all wait for rank 2"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", (FLOAT32, FLOAT64)),
        ("shape", ((4,), (2, 2))),
        ("op", ("sum", "max")),
        ("root", (0, 1)),
        ("counts", (None, (1, 2, 3))),
        ("reproducible", (False, True)),
        ("device", ("", "cuda")),
    ],
)
def test_what_differs_is_named(field: str, values: tuple[Any, Any]) -> None:
    one, other = (
        call("reduce", 0, what=str(value), place=f"a.py:{number}", algorithm=str(number), **{field: value})
        for number, value in enumerate(values)
    )
    lines = told(dump(0, [one]), dump(1, [other]), dump(2, [one]))
    assert lines[-3:] == [
        f"The ranks differ in call #0, in the {field}:",
        f"  ranks 0, 2: {values[0]} at a.py:0",
        f"  rank 1: {values[1]} at a.py:1",
    ]


def test_a_group_is_told_as_the_program_made_it() -> None:
    one, other = (msgspec.structs.replace(call("reduce", 0, op=op, what=op), channel=42) for op in ("sum", "max"))
    facts: dict[str, Any] = {"groups": {42: (0, 2)}, "names": {21: "group 21 (ranks 0, 2, made by split())"}}
    lines = told(dump(0, [one], **facts), dump(2, [other], **facts))
    assert "sum #0 of group 21 (ranks 0, 2, made by split())" in lines[2]
    assert "The ranks differ in call #0 of group 21 (ranks 0, 2, made by split()), in the op:" in lines
    assert "sum #0 of group 21, for" in told(dump(0, [one], groups={42: (0, 2)}))[2]  # of a version that wrote no names


def test_another_order_is_told_apart_from_a_call_left_out() -> None:
    here = [call("barrier", 3, 1, 2), call("all_gather", 4, 3, 4), call("all_reduce", 5, 5)]
    swapped = [call("all_gather", 3, 1, 2), call("barrier", 4, 3, 4)]
    short = [call("all_gather", 3, 1, 2), call("all_reduce", 4, 3, 4)]
    assert "  so rank 1 made the same calls as ranks 0, 2 in another order" in told(
        dump(0, here), dump(1, swapped), dump(2, here)
    )
    assert "  so rank 1 left out barrier() #3, or ranks 0, 2 made it one time too many" in told(
        dump(0, here), dump(1, short), dump(2, here)
    )


def test_a_circle_of_waits_is_found_where_no_call_is_a_collective() -> None:
    def waiting(rank: int) -> Dump:
        peer = (rank + 1) % 3
        wait = Wait(1, 1, "recv", b"", [peer], [(peer, False, 0)], [0, 1, 2])
        receives = Progress({0: 0}, {}, {1: {peer: 1}})
        return dump(rank, [Call(1, 1, "recv", f"recv from rank {peer}", 1.0, wait=wait)], progress=receives)

    assert told(*map(waiting, range(3)))[-1] == (
        "They wait for each other in a circle: rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0"
    )


def test_a_job_that_ended_well_says_no_more() -> None:
    assert told(*(dump(rank, [call("barrier", 0, 1, 2)], reason="closed") for rank in range(3)))[1:] == ["The job ended well"]


@given(data=st.data(), worlds=st.integers(2, 4))
def test_clocks_that_differ_are_put_together_within_the_error_that_is_told(data: st.DataObject, worlds: int) -> None:
    """Calls are made in true time; each rank writes them on a clock of its own, which is off by any number of seconds."""
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    offsets = [0.0, *(chance.uniform(-1e6, 1e6) for _ in range(worlds - 1))]
    calls: list[list[Call]] = [[] for _ in range(worlds)]
    free = [0.0] * worlds
    for number in range(data.draw(st.integers(1, 6))):
        begun = [at + chance.uniform(0, 1e-3) for at in free]
        free = [max(begun) + chance.uniform(0, 1e-3) for _ in begun]  # nobody ends before all have begun
        for rank in range(worlds):
            calls[rank].append(call("all_reduce", number, begun[rank] - offsets[rank], free[rank] - offsets[rank]))
    found = align({rank: dump(rank, each, clock=f"clock {rank}") for rank, each in enumerate(calls)})
    for rank, offset in found.items():
        assert abs(offset.seconds - offsets[rank]) <= offset.error + 1e-9
        assert offset.error <= 3e-3 * worlds
    assert found[0].error == 0.0


def test_calls_that_do_not_wait_for_all_tell_nothing_of_clocks() -> None:
    def world(*calls: Call) -> dict[int, Dump]:
        return {rank: dump(rank, calls, clock=str(rank), now=10.0 * rank, time=1000.0) for rank in range(2)}

    for silent in (
        call("broadcast", 0, 1, 2),
        call("all_reduce", 0, 1, 2, shape=(0, 3)),
        call("all_reduce", 0, 1, 2, device="cuda"),
        call("all_gather", 0, 1, 2, counts=(2, 0)),
    ):
        assert align(world(silent))[1] == (-10.0, math.inf), silent.what
        assert "wall clocks are used" in how_exact(world(silent))
    assert align(world(call("barrier", 0, 1, 2)))[1] == (0.0, 1.0)
    assert "error of 1000.0 ms at most" in how_exact(world(call("barrier", 0, 1, 2)))


def test_a_timeline_has_a_row_for_calls_that_overlap_and_times_on_one_clock() -> None:
    there = [
        call("barrier", 0, 101.0, 102.0),
        call("all_reduce", 1, 103.0, 105.0, place="b.py:2"),
        Call(1, 1, "send", "send", 104.0),
    ]
    here = [call("barrier", 0, 1.0, 2.0), call("all_reduce", 1, 3.0, 5.0)]
    dumps = {0: dump(0, here, 2), 1: dump(1, there, 2, clock="other", now=110.0)}
    text, count = timeline(Job("abcd", 2, dumps))
    events = json.loads(text)["traceEvents"]
    slices = {(each["tid"], each["name"]): (each["ts"], each["dur"]) for each in events if each["ph"] == "X"}
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert count == 5
    assert sorted(names.values()) == ["rank 0", "rank 1", "rank 1, background 1"]
    rows = {names[tid]: (name, *times) for (tid, name), times in slices.items() if name != "barrier"}
    assert rows == {
        "rank 0": ("all_reduce", 2e6, 2e6),
        "rank 1": ("all_reduce", 2e6, 2e6),
        "rank 1, background 1": ("send", 3e6, 6e6),
    }


def test_files_of_a_job_are_joined_and_unreadable_ones_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(job: str, rank: int, time: float) -> None:
        data = msgspec.json.encode(dump(rank, [call("barrier", 0, 1, 2)], 1, job=job, time=time, reason="closed"))
        (tmp_path / f"{job}-rank-{rank}.json").write_bytes(data)

    write("old", 0, 5.0)
    write("new", 0, 6.0)
    (tmp_path / "x-rank-1.json").write_text("{}")
    jobs, left_out = read_jobs([tmp_path])
    assert [job.name for job in jobs] == ["new", "old"]
    assert [text.partition(": ")[0] for text in left_out] == [str(tmp_path / "x-rank-1.json")]
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(tmp_path), "--trace", str(tmp_path / "trace")])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("job new: 1 rank, all with")
    assert "1 older job as well; see --job: old" in out
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]


EVIL = "\x1b]0;title\x07\x9b31m\rX\u202eY\u2066"
SHOWN = r"\x1b]0;title\x07\u009b31m\x0dX\u202eY\u2066"


def test_what_others_have_put_into_a_record_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = call("all_reduce", 0, 9.0, what=f"what {EVIL}", place=f"place {EVIL}")
    idle = dump(1, [], 2, job=f"job {EVIL}", places=[Place(5, "MainThread", f"line {EVIL}")])
    verdict = Verdict("lost", f"first\nsecond {EVIL}", 1)
    one = dump(0, [running], 2, job=f"job {EVIL}", reason="failed", verdict=verdict)
    for each in (one, idle):
        (tmp_path / f"x-rank-{each.rank}.json").write_bytes(msgspec.json.encode(each))
    older = dump(0, [], 1, job=f"old {EVIL}", time=5.0)
    (tmp_path / "y-rank-0.json").write_bytes(msgspec.json.encode(older))
    (tmp_path / f"{EVIL}-rank-1.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path)])
    seen = capsys.readouterr()
    assert not set("\x1b\x07\x9b\r\u202e\u2066") & set(seen.out + seen.err)
    for words in ("job ", "first\nsecond ", "what ", "place ", "line ", "old "):
        assert words + SHOWN in seen.out
    assert f"{SHOWN}-rank-1.json" in seen.err


def test_a_pipe_among_the_records_is_left_out_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x-rank-1.json")
    (tmp_path / "x-rank-0.json").write_bytes(msgspec.json.encode(dump(0, [], 1)))
    jobs, left_out = read_jobs([tmp_path])
    assert [job.name for job in jobs] == ["abcd"]
    assert "not a regular file" in left_out[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [(["there"], "no folder or file"), (["."], "--record DIR"), ([".", "--job", "x"], "--record DIR")],
)
def test_where_nothing_was_recorded_the_command_says_what_to_do(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words]) == 2
    assert says in capsys.readouterr().err


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_what_nobody_wrote_is_no_dump(data: bytes) -> None:
    assert decode(data) is None
