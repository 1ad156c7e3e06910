"""A timeline of a real run, from its flight recorders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oneaccord.explain.clocks import Offset, align
from oneaccord.explain.dump import Call, Dump
from oneaccord.explain.reading import Job
from oneaccord.timeline.events import Recording
from oneaccord.timeline.perfetto import to_perfetto

__all__ = ["how_exact", "timeline"]


def timeline(job: Job) -> tuple[str, int]:
    """Return the timeline of a job in the Chrome trace event format, and the number of its calls.

    Parameters
    ----------
    job
        The files of its ranks.
    """
    offsets = align(job.dumps)
    calls = [(rank, call) for rank, dump in job.dumps.items() for call in dump.calls]
    begin = min((call.started + offsets[rank].seconds for rank, call in calls), default=0.0)
    recording = Recording(job.world_size, 0, keep_messages=False)
    for rank, dump in sorted(job.dumps.items()):
        shift = offsets[rank].seconds - begin
        recording.duration_s = max(recording.duration_s, dump.now + shift)
        for call, lane in _lanes(dump.calls, dump.now):
            event = recording.call(
                rank,
                call.operation,
                call.what,
                call.started + shift,
                sequence=call.sequence,
                group=call.channel // 2,
                nbytes=call.nbytes,
                algorithm=call.algorithm,
                place=call.place,
                background=lane,
            )
            event.end_s = None if call.finished is None else call.finished + shift
        if dump.reason != "closed":
            recording.mark(rank, dump.now + shift, dump.verdict.text if dump.verdict else "SIGUSR1", dump.reason)
    return to_perfetto(recording, f"job {job.name}"), len(calls)


def _lanes(calls: Iterable[Call], now: float) -> Iterable[tuple[Call, int]]:
    """Yield calls in the order in which they began, each with the first free row: the calls of several threads overlap."""
    ends: list[float] = []
    for call in sorted(calls, key=lambda each: each.started):
        lane = next((lane for lane, end in enumerate(ends) if end <= call.started), len(ends))
        end = max(now, call.started) if call.finished is None else call.finished
        ends[lane : lane + 1] = [end]
        yield call, lane


def how_exact(dumps: Mapping[int, Dump]) -> str:
    """Say how well the clocks of the ranks are aligned."""
    offsets = align(dumps)
    worst = max(offsets.values(), key=lambda offset: offset.error)
    if worst.error == 0.0:
        return "all ranks share a clock"
    if worst.error == float("inf"):
        lost = [rank for rank, offset in offsets.items() if offset.error == float("inf")]
        return f"no call shows how the clocks of rank {lost[0]} and rank {min(dumps)} differ: their hosts' wall clocks are used"
    return f"the clocks are aligned by the calls that the ranks made with each other, with an error of {_short(worst)} at most"


def _short(offset: Offset) -> str:
    return f"{offset.error * 1e6:.1f} us" if offset.error < 1e-3 else f"{offset.error * 1e3:.1f} ms"
