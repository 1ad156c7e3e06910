"""A trace in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

Times are whole nanoseconds, written as microseconds with three decimals: begin and end are rounded each, and the duration is their
difference, so that rounding never makes neighbours overlap.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from oneaccord.errors import InternalError
from oneaccord.timeline.events import CallEvent, MarkEvent, Recording, row_name

__all__ = ["to_perfetto"]

_PID = 1
"""Perfetto keeps process 0 and thread 0 for the idle task, and hides them."""

_SILENT = frozenset({"compute", "sleep"})


def to_perfetto(trace: Recording, title: str) -> str:
    """Return the JSON of a trace, one event in each line.

    Parameters
    ----------
    trace
        The trace.
    title
        Its title after the number of ranks, such as ``"seed 7"``.

    Raises
    ------
    InternalError
        Two calls of one thread overlap in part, which no program can do.
    """
    tracks = _Tracks(trace)
    arrivals, departures = _arrows(trace, tracks)
    # At the same time viewers use the order in the file, and tie an arrow to the slice that has begun last on a track: an arrow's
    # end belongs to the call that ends then, and its beginning to the call that begins then.
    lines = [*tracks.names(trace, title), *arrivals, *_slices(trace, tracks), *departures]
    return '{"traceEvents":[\n' + ",\n".join(lines) + '\n],"displayTimeUnit":"ns"}\n'


class _Tracks:
    """The rows that viewers show: for each rank that of its own thread, below it those in the background that it used, and its requests."""

    def __init__(self, trace: Recording) -> None:
        used = {(rank, 0) for rank in range(trace.world_size)} | {(call.rank, call.background) for call in trace.calls}
        self.ids: dict[tuple[int, int], int] = {track: number for number, track in enumerate(sorted(used, key=_order), 1)}
        self._own = [self.ids[rank, 0] for rank in range(trace.world_size)]
        # If a rank uses several threads: the calls on each that may send.
        self._talks: list[list[_Talk]] = [[] for _ in range(trace.world_size)]
        several = {rank for rank, background in used if background}
        if several:
            talks = {track: _Talk(number) for track, number in self.ids.items() if track[0] in several}
            for call in trace.calls:
                if call.rank in several and call.operation not in _SILENT:
                    talks[call.rank, call.background].add(call, _ns(call.start_s), _ns(trace.end_of(call)))
            for (rank, _), talk in talks.items():
                self._talks[rank].append(talk)

    def names(self, trace: Recording, title: str) -> Iterator[str]:
        """Return the events that name the tracks."""
        ranks = f"{trace.world_size} rank{'' if trace.world_size == 1 else 's'}"
        yield _dumps({"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": f"oneaccord, {ranks}, {title}"}})
        for (rank, background), tid in self.ids.items():
            name = f"rank {rank}, {row_name(background)}" if background else f"rank {rank}"
            yield _dumps({"name": "thread_name", "ph": "M", "pid": _PID, "tid": tid, "args": {"name": name}})
            yield _dumps({"name": "thread_sort_index", "ph": "M", "pid": _PID, "tid": tid, "args": {"sort_index": tid}})

    def of_message(self, rank: int, time_ns: int, group: int) -> int:
        """Return the track on which a message of a group begins or ends: that of a call that may have sent it, or else its own."""
        for talk in self._talks[rank]:
            if talk.runs(time_ns, group):
                return talk.tid
        return self._own[rank]


class _Talk:
    """The calls on one track that may send."""

    def __init__(self, tid: int) -> None:
        self.tid: int = tid
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._groups: list[int] = []

    def add(self, call: CallEvent, start_ns: int, end_ns: int) -> None:
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._groups.append(call.group)

    def runs(self, time_ns: int, group: int) -> bool:
        last = bisect_right(self._starts, time_ns) - 1
        return last >= 0 and time_ns <= self._ends[last] and self._groups[last] == group


def _slices(trace: Recording, tracks: _Tracks) -> list[str]:
    """Return calls and marks in order of time; of one rank at one time, in the order in which they happened."""
    open_calls: dict[int, list[tuple[int, CallEvent]]] = {tid: [] for tid in tracks.ids.values()}
    keyed: list[tuple[int, int, int, int, str]] = []
    for rank in range(trace.world_size):
        for index, call in enumerate(trace.calls_of(rank)):
            start, end, tid = _ns(call.start_s), _ns(trace.end_of(call)), tracks.ids[rank, call.background]
            _check_nesting(open_calls[tid], call, start, end)
            keyed.append((start, rank, index, 1, _slice(call, start, end, tid)))
        for mark in trace.marks_of(rank):
            time = _ns(mark.time_s)
            keyed.append((time, rank, mark.calls_before, 0, _instant(mark, time, tracks.ids[rank, 0])))
    return [line for *_, line in sorted(keyed, key=lambda each: each[:4])]


def _check_nesting(stack: list[tuple[int, CallEvent]], call: CallEvent, start: int, end: int) -> None:
    """Check that a call lies within the calls of its track that still run; viewers would drop or stretch it otherwise."""
    if end < start:
        raise InternalError(
            f"{call.describe()} of rank {call.rank} ends at {call.end_s} s, before it begins at {call.start_s} s"
        )
    while stack and stack[-1][0] <= start:
        stack.pop()
    # Calls are noted when they begin, and so none may begin before one that is still on the stack.
    if stack and (end > stack[-1][0] or start < _ns(stack[-1][1].start_s)):
        other = stack[-1][1]
        raise InternalError(
            f"calls of one thread come one after the other or within each other, and these of rank {call.rank} do not: "
            f"{other.describe()} from {other.start_s} s to {other.end_s} s, then {call.describe()} from {call.start_s} s to {call.end_s} s"
        )
    stack.append((end, call))


def _slice(call: CallEvent, start: int, end: int, tid: int) -> str:
    args: dict[str, Any] = {
        "what": call.what,
        "sequence": call.sequence,
        "group": call.group,
        **({} if call.operation == "recv" and not call.nbytes else {"bytes": call.nbytes}),
        "algorithm": call.algorithm,
        "place": call.place,
    }
    if call.error:
        args["error"] = call.error
    if call.end_s is None:
        args["unfinished"] = True
    return (
        f'{{"name":{_dumps(call.operation)},"cat":"call","ph":"X","ts":{_us(start)},"dur":{_us(end - start)},"pid":{_PID},"tid":{tid},'
        f'"args":{_dumps(args)}}}'
    )


def _instant(mark: MarkEvent, time: int, tid: int) -> str:
    return f'{{"name":{_dumps(mark.describe())},"cat":{_dumps(mark.kind)},"ph":"i","ts":{_us(time)},"pid":{_PID},"tid":{tid},"s":"t"}}'


def _arrows(trace: Recording, tracks: _Tracks) -> tuple[list[str], list[str]]:
    """Return the texts before and after the calls in the file."""
    arrivals: list[str] = []
    departures: list[str] = []
    for number, (source, dest, nbytes, sent_s, arrived_s, group) in enumerate(trace.messages):
        sent = _ns(sent_s)
        tid = tracks.of_message(source, sent, group)
        about = f'"args":{{"bytes":{nbytes},"group":{group}}}}}'
        if arrived_s == math.inf:
            departures.append(
                f'{{"name":"message to rank {dest} never arrived","cat":"message","ph":"i","ts":{_us(sent)},"pid":{_PID},"tid":{tid},"s":"t",{about}'
            )
            continue
        arrived = _ns(arrived_s)
        departures.append(
            f'{{"name":"message","cat":"message","ph":"s","ts":{_us(sent)},"pid":{_PID},"tid":{tid},"id":{number},{about}'
        )
        # An arrow must have begun before it ends, also one that takes no time.
        (arrivals if arrived > sent else departures).append(
            f'{{"name":"message","cat":"message","ph":"f","bp":"e","ts":{_us(arrived)},"pid":{_PID},'
            f'"tid":{tracks.of_message(dest, arrived, group)},"id":{number}}}'
        )
    return arrivals, departures


def _order(track: tuple[int, int]) -> tuple[int, bool, int]:
    """Return a key that sorts the rows of a rank: its own thread, those in the background, and its requests."""
    rank, background = track
    return rank, background < 0, abs(background)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
