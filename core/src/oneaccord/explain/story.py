"""A story in sentences: which rank waits for which, in which call and line, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oneaccord.common.ranks import show_ranks
from oneaccord.control.protocol import Stalled, Testimony, Wait
from oneaccord.control.waits import behind_whom, circle, still_owed
from oneaccord.explain.dump import Call, Dump
from oneaccord.explain.reading import Job
from oneaccord.timeline.events import many

__all__ = ["tell"]

_FIELDS = ("operation", "dtype", "shape", "op", "root", "counts", "reproducible", "device", "part", "algorithm")
"""The parts of a collective that may differ, in the order in which they are named; a later one may follow from an earlier one."""


@dataclass(slots=True)
class _Rank:
    """The facts about one rank."""

    dump: Dump
    running: list[Call]
    last: Call | None
    made: dict[tuple[int, int], Call]


def tell(job: Job) -> str:
    """Return the story of a job, in lines.

    The first cause that the ranks agreed on comes first, then where each rank is and what it waits for, then what differs between
    them, and last the rank for which all wait.
    """
    ranks = {rank: _known(dump) for rank, dump in sorted(job.dumps.items())}
    lines = [_head(job), *_causes(job), *_missing(job)]
    lines += _where(job, ranks)
    lines += _differences(ranks)
    lines += _in_the_end(job, ranks)
    return "\n".join(lines) + "\n"


def _known(dump: Dump) -> _Rank:
    program = [call for call in dump.calls if call.operation != "exchange" or call.finished is None]
    ended = [call for call in program if call.finished is not None]
    made = {(call.channel, call.sequence): call for call in program if call.digest}
    return _Rank(dump, [call for call in program if call.finished is None], ended[-1] if ended else None, made)


def _head(job: Job) -> str:
    count = len(job.dumps)
    files = "all" if count == job.world_size else f"{count} of them"
    return f"job {job.name}: {many(job.world_size, 'rank')}, {files} with a flight recorder file"


def _causes(job: Job) -> list[str]:
    """Say why the job failed: once, if the ranks agree."""
    lines = []
    for text, ranks in _alike(job.dumps, lambda dump: dump.verdict.text if dump.verdict else ""):
        if text:
            who = "The job failed" if len(ranks) == len(job.dumps) else f"The job failed, as {show_ranks(ranks)} learned"
            lines.append(f"{who}: {text}")
    if not lines and all(dump.reason == "closed" for dump in job.dumps.values()):
        lines.append("The job ended well" if not job.missing else "The job ended well on these ranks")
    return lines


def _missing(job: Job) -> list[str]:
    missing = job.missing
    if not missing:
        return []
    lines = []
    dead = [rank for rank in missing if rank in _lost(job)]
    others = [rank for rank in missing if rank not in dead]
    if dead:
        lines.append(f"{_Ranks(dead)} wrote nothing: {'it' if len(dead) == 1 else 'they'} died, as other ranks reported")
    if others:
        it, was = ("it", "was") if len(others) == 1 else ("they", "were")
        lines.append(
            f"{_Ranks(others)} wrote nothing: {it} {was} killed, hung (stopped, or in code that keeps the interpreter), or wrote to another "
            "place, such as another host"
        )
    return lines


def _lost(job: Job) -> set[int | None]:
    """Return the ranks that others found dead."""
    return {dump.verdict.peer for dump in job.dumps.values() if dump.verdict and dump.verdict.kind == "lost"}


def _where(job: Job, ranks: Mapping[int, _Rank]) -> list[str]:
    """Say where each rank is, once for all ranks at the same place."""
    if all(rank.dump.reason == "closed" for rank in ranks.values()):
        return []
    lines = []
    at = {number: _position(job, ranks, number) for number in ranks}
    for text, numbers in _alike(at, lambda position: position):
        longest = max((_lasting(ranks[number]) for number in numbers), default=0.0)
        duration = f", for {longest:.1f} s" if longest >= _LONG_S else ""
        is_are = "is" if len(numbers) == 1 else "are"
        lines.append(f"{_Ranks(numbers)} {is_are} {text.replace(_DURATION, duration)}")
    return lines


_DURATION = "\0"
_LONG_S = 0.05
"""The shortest time that is shown as a duration."""


def _lasting(rank: _Rank) -> float:
    return max((rank.dump.now - call.started for call in rank.running), default=0.0)


def _position(job: Job, ranks: Mapping[int, _Rank], number: int) -> str:
    rank = ranks[number]
    if not rank.running:
        places = [place.line for place in rank.dump.places]
        raised = rank.dump.raised
        line = f", since it raised at {raised}" if raised else f", at {places[0]}" if places else ""
        if rank.last is None:
            return f"in no call{line}; it made none before"
        ago = rank.dump.now - (rank.last.finished or rank.dump.now)
        return f"in no call{line}; its last was {_named(rank.last, rank.dump)}, which ended {ago:.1f} s before"
    texts = []
    for call in rank.running:
        waits_for = _awaited(job, ranks, number, call)
        waits = f", waiting for {show_ranks(waits_for)}" if waits_for else ""
        texts.append(f"in {_named(call, rank.dump)}{f' at {call.place}' if call.place else ''}{_DURATION}{waits}")
    return "; and ".join(texts)


def _named(call: Call, dump: Dump) -> str:
    """Return a call with its number and group: ``barrier() #7 of group 2 (ranks 0, 2, made by split())``."""
    return call.what if call.sequence < 0 else f"{call.what} #{call.sequence}{_of(call.channel, dump)}"


def _of(channel: int, dump: Dump) -> str:
    number = channel // 2
    return f" of {dump.names.get(number, f'group {number}')}" if number else ""


def _waits_of(rank: _Rank) -> list[Wait]:
    """Return the ranks for which a rank waits; a collective waits for all its members, also one that has only begun."""
    waits = []
    for call in rank.running:
        if call.wait is not None:
            waits.append(call.wait)
        elif call.digest:
            members = list(rank.dump.groups.get(call.channel, ()))
            others = [member for member in members if member != rank.dump.rank]
            waits.append(Wait(call.channel, call.sequence, call.operation, call.digest, others, [], members))
    return waits


def _awaited(job: Job, ranks: Mapping[int, _Rank], number: int, call: Call) -> list[int]:
    """Return the ranks that have yet to do their part of a call; ranks without a file are included."""
    rank = ranks[number]
    found = []
    for wait in _waits_of(_Rank(rank.dump, [call], None, {})):
        peers = wait.members if wait.is_collective else wait.awaiting
        for peer in peers:
            if peer == number or peer >= job.world_size:
                continue
            if peer not in ranks or (not wait.meeting and still_owed(wait, number, peer, ranks[peer].dump.progress)):
                found.append(peer)
        if not found:  # all have come, and some made another call there, or have not sent all
            found = [
                peer for peer in peers if peer in ranks and _differ(call, ranks[peer].made.get((call.channel, call.sequence)))
            ]
    return sorted(set(found))


def _differ(call: Call, other: Call | None) -> bool:
    return other is not None and other.digest != call.digest


def _differences(ranks: Mapping[int, _Rank]) -> list[str]:
    """Say where ranks of one group made different collective calls: the first such call of each group, and what differs."""
    lines = []
    for channel in sorted({channel for rank in ranks.values() for channel, _ in rank.made}):
        numbers = sorted({number for rank in ranks.values() for at, number in rank.made if at == channel})
        for sequence in numbers:
            calls = {at: rank.made[channel, sequence] for at, rank in ranks.items() if (channel, sequence) in rank.made}
            if len({call.digest for call in calls.values()}) > 1:
                lines += _difference(ranks, channel, sequence, calls)
                break
    return lines


def _difference(ranks: Mapping[int, _Rank], channel: int, sequence: int, calls: Mapping[int, Call]) -> list[str]:
    where = f"call #{sequence}{_of(channel, ranks[min(calls)].dump)}"
    names = [name for name in _FIELDS if len({repr(getattr(call, name)) for call in calls.values()}) > 1]
    # Another operation has other arguments, and another algorithm follows from all of these.
    told = ["operation"] if "operation" in names else [name for name in names if name != "algorithm"] or names
    lines = [
        f"The ranks differ in {where}, in {' and '.join('the ' + name for name in told)}:"
        if told
        else f"The ranks differ in {where}:"
    ]
    for text, numbers in _alike(calls, lambda call: call.what + (f" at {call.place}" if call.place else "")):
        lines.append(f"  {show_ranks(numbers)}: {text}")
    kinds = _alike(calls, lambda call: call.digest.hex())
    (_, most), (_, few) = kinds[0], kinds[1]
    lines += _order(ranks, channel, sequence, most, few)
    return lines


def _order(ranks: Mapping[int, _Rank], channel: int, sequence: int, most: Sequence[int], few: Sequence[int]) -> list[str]:
    """Say whether the calls are the same in another order, or one was left out, if the kept calls show it."""

    def digest(number: int, at: int) -> bytes | None:
        call = ranks[number].made.get((channel, at))
        return None if call is None else call.digest

    one, other = most[0], few[0]
    here, there = digest(one, sequence), digest(other, sequence)
    if digest(one, sequence + 1) == there and digest(other, sequence + 1) == here:
        return [f"  so {show_ranks(few)} made the same calls as {show_ranks(most)} in another order"]
    for who, whom, what in ((few, most, there), (most, few, here)):
        if digest(whom[0], sequence + 1) == what and what is not None:
            left_out = ranks[whom[0]].made[channel, sequence]
            return [
                f"  so {show_ranks(who)} left out {_named(left_out, ranks[whom[0]].dump)}, or {show_ranks(whom)} made it one time too many"
            ]
    return []


def _in_the_end(job: Job, ranks: Mapping[int, _Rank]) -> list[str]:
    """Say which rank all wait for, or that ranks wait for each other in a circle."""
    waits = {number: _waits_of(rank) for number, rank in ranks.items()}
    waiting = [number for number in ranks if waits[number]]
    if not waiting:
        return []
    stalls = {number: Stalled(waits[number][0], waits[number], ranks[number].dump.progress, True) for number in waiting}
    for start in waiting:
        found = circle(stalls, start)
        if len(found) == 1:
            return [f"Rank {found[0]} waits for a message between its own threads"]
        if found:
            steps = ", ".join(f"rank {one} for rank {other}" for one, other in zip(found, [*found[1:], found[0]], strict=True))
            return [f"They wait for each other in a circle: {steps}"]
    answers = {number: Testimony(0, True, "", 0, waits[number], rank.dump.progress) for number, rank in ranks.items()}
    ends = set()
    for number in waiting:
        awaited = [peer for call in ranks[number].running for peer in _awaited(job, ranks, number, call)]
        if awaited:
            silent = [peer for peer in awaited if peer not in ranks]
            end = behind_whom(number, awaited[0], answers, [peer for peer in silent if peer in _lost(job)] or silent)
            if end is not None and end != number:
                ends.add(end)
    if len(ends) != 1:
        return []
    (end,) = ends
    return [f"In the end all wait for rank {end}"] if len(waiting) > 1 else []


def _alike(items: Mapping[int, object] | Mapping[int, Call], text: Callable[..., str]) -> list[tuple[str, list[int]]]:
    """Return the ranks grouped by their texts, the largest group first."""
    found: dict[str, list[int]] = {}
    for rank, item in items.items():
        found.setdefault(text(item), []).append(rank)
    return sorted(found.items(), key=lambda each: (-len(each[1]), each[1][0]))


def _Ranks(ranks: Iterable[int]) -> str:  # noqa: N802 - it begins a sentence
    text = show_ranks(ranks)
    return text[0].upper() + text[1:]
