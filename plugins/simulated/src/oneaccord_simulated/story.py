"""A trace in words: the end of a run, or a part of it, in some sixty lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from oneaccord.api import CallEvent, MarkEvent, Recording, UsageError, many, show_ranks

__all__ = ["tell"]

_LINES = 40
_FAULT_LINES = 6
_OPEN_LINES = 8
_WIDEST = 28
"""How wide the column of ranks may be for the others to be aligned with it."""

_FAULTS = frozenset({"fault", "killed", "paused", "resumed"})
_MARK, _BEGIN, _END = -1, 0, 1


class _Event(NamedTuple):
    """One event. At one time, the calls of a rank and the events between them are in the order of ``place, phase``."""

    time_s: float
    place: int
    phase: int
    rank: int
    about: CallEvent | MarkEvent

    @property
    def order(self) -> tuple[float, int, int]:
        return self[:3]

    @property
    def is_fault(self) -> bool:
        return isinstance(self.about, MarkEvent) and self.about.kind in _FAULTS

    def text(self) -> str:
        about = self.about
        if isinstance(about, MarkEvent):
            return about.describe() if about.kind != "mark" else f"mark: {about.label}"
        if self.phase == _BEGIN:
            return f"{about.describe()}  began{f' at {about.place}' if about.place else ''}"
        return f"{about.name}  ended{f' by {about.error}' if about.error else ''}"

    def thread(self) -> str:
        row = self.about.row if isinstance(self.about, CallEvent) else ""
        return f", {row}" if row else ""


@dataclass(slots=True)
class _Line:
    """The same thing on several ranks, at the same time."""

    time_s: float
    text: str
    thread: str
    events: list[_Event] = field(default_factory=list)

    @property
    def who(self) -> str:
        return show_ranks(event.rank for event in self.events) + self.thread


def tell(trace: Recording, around: float | None, last: int) -> str:
    """Return the story of a trace; see `Trace.story`."""
    if last < 1:
        raise UsageError(f"last={last!r}: give a positive number of events for each rank")
    finished = _last_finished(trace) if around is None else None
    settled: list[_Event] = []
    earlier: list[_Event] = []
    later: list[_Event] = []
    told: list[_Event] = []
    for rank in range(trace.world_size):
        events = _events(trace, rank)
        first = 0 if finished is None else 1 + _position(events, finished[rank])
        if around is None:
            begin, end = max(first, len(events) - last), len(events)
        else:
            begin = max(0, bisect_right(events, around, key=lambda event: event.time_s) - (last + 1) // 2)
            end = begin + last
        settled += events[:first]
        earlier += events[first:begin]
        told += events[begin:end]
        later += events[end:]
    lines = _merged(told)
    # Too many lines: the last ones, or those around the time asked for.
    middle = len(lines) if around is None else bisect_right(lines, around, key=lambda line: line.time_s)
    start = max(0, min(middle - _LINES // 2, len(lines) - _LINES))
    earlier += [event for line in lines[:start] for event in line.events]
    later += [event for line in lines[start + _LINES :] for event in line.events]
    lines = lines[start : start + _LINES]
    faults = _merged([event for event in settled + earlier if event.is_fault])[-_FAULT_LINES:]
    width = min(_WIDEST, max((len(line.who) for line in faults + lines), default=0))

    text = [f"{many(trace.world_size, 'rank')}, seed {trace.seed}, {trace.duration_s:.6f} s"]
    if finished is not None:
        calls = sum(event.phase == _BEGIN for event in settled)
        text.append(f"... {many(calls, 'call')} before, all ranks had finished {finished[0].name}")
    text += [_shown(line, width) for line in faults]
    told_early = {id(event) for line in faults for event in line.events}
    left_out = sum(id(event) not in told_early for event in earlier)
    if left_out:
        text.append(f"... {many(left_out, 'event')} {'left out' if around is None else 'before'}")
    text += [_shown(line, width) for line in lines]
    if later:
        text.append(f"... {many(len(later), 'event')} after")
    return "\n".join(text + _never_ended(trace)) + "\n"


def _last_finished(trace: Recording) -> list[CallEvent] | None:
    """Return the last collective of the world that all ranks have finished, as each rank called it."""
    rows = [
        {
            call.sequence: call
            for call in trace.calls_of(rank)
            if call.group == 0 and call.is_collective() and call.end_s is not None and not call.error
        }
        for rank in range(trace.world_size)
    ]
    common = set(rows[0]).intersection(*rows[1:]) if rows else set()
    if not common:
        return None
    last = max(common)
    return [row[last] for row in rows]


def _events(trace: Recording, rank: int) -> list[_Event]:
    """Return the events of a rank, in order."""
    events = [_Event(mark.time_s, mark.calls_before, _MARK, rank, mark) for mark in trace.marks_of(rank)]
    for index, call in enumerate(trace.calls_of(rank)):
        events.append(_Event(call.start_s, index, _BEGIN, rank, call))
        if call.end_s is not None:
            events.append(_Event(call.end_s, index, _END, rank, call))
    return sorted(events, key=lambda event: event.order)


def _position(events: Sequence[_Event], call: CallEvent) -> int:
    """Return the place of the end of a call."""
    return next(place for place, event in enumerate(events) if event.phase == _END and event.about is call)


def _merged(events: list[_Event]) -> list[_Line]:
    """Return one line for several ranks at the same time, each rank's own events in their order."""
    lines: list[_Line] = []
    reached: dict[int, int] = {}
    places: dict[tuple[float, str, str], list[int]] = {}
    for event in sorted(events, key=lambda event: (event.order, event.rank)):
        key = event.time_s, event.text(), event.thread()
        same = places.setdefault(key, [])
        # The first such line that comes after the earlier events of this rank.
        found = bisect_right(same, reached.get(event.rank, -1))
        if found == len(same):
            same.append(len(lines))
            lines.append(_Line(*key))
        reached[event.rank] = same[found]
        lines[same[found]].events.append(event)
    return lines


def _shown(line: _Line, width: int) -> str:
    return f"{line.time_s:10.6f} s  {line.who:{width}}  {line.text}"


def _never_ended(trace: Recording) -> list[str]:
    """Return the unfinished calls at the end, alike calls together."""
    alike: dict[tuple[str, str, str], list[CallEvent]] = {}
    for call in trace.calls:
        if call.end_s is None:
            alike.setdefault((call.describe(), call.place, call.row), []).append(call)
    if not alike:
        return []
    lines = ["never ended:"]
    for (what, place, row), calls in list(alike.items())[:_OPEN_LINES]:
        who = show_ranks({call.rank for call in calls}) + (f", {row}" if row else "")
        since = min(call.start_s for call in calls)
        lines.append(f"  {who}  {what}  since {since:.6f} s{f' at {place}' if place else ''}")
    rest = sum(len(calls) for calls in list(alike.values())[_OPEN_LINES:])
    if rest:
        lines.append(f"  ... and {many(rest, 'call')} more")
    return lines
