"""The words of a job's first cause: what `membership` decides, as users read it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from oneaccord.common.ranks import show_all_ranks
from oneaccord.control.inquest import Finding, Inquest, Outcome
from oneaccord.control.protocol import ANOTHER_CALL, Checkpoint, Join, Wait
from oneaccord.control.verdicts import differ_in_length

__all__: list[str] = []

_ORDER = "every rank must make the same calls, in the same order"
_TAGS = "a receive with a tag takes only messages with a tag"
_NO_TAGS = "a receive without a tag takes only messages without one"
_MORE_TIME = (
    "  if they only need more time: timeout_s= of the call or of init(), or ONEACCORD_TIMEOUT_S;\n"
    "  in programs of torch.distributed, timeout= of init_process_group()"
)
_MAX_NAMED = 4  # processes that were refused, in one error


# The ranks do not meet.


def show_process(message: Join) -> str:
    """Return a rank that joins, with its process and host."""
    return f"rank {message.rank} (process {message.pid} on {message.host})"


def outside(message: Join, world_size: int) -> str:
    """Say that a rank's number is too large."""
    return f"{show_process(message)} is not in a world of {world_size}, which rank 0 was started for"


def another_job(message: Join, ours: str, where: str) -> str:
    """Say that a rank belongs to another job than the one whose ranks meet there."""
    return f"{show_process(message)} belongs to {_show_job(message.job)}, but {_show_job(ours)} meets at {where}"


def _show_job(name: str) -> str:
    return f"the job {name!r}" if name else "a job without a name"


def other_size(message: Join, world_size: int) -> str:
    """Say that a rank expects another number of ranks."""
    return f"{show_process(message)} was started for {message.world_size} ranks, and rank 0 for {world_size}: start all ranks alike"


def twice(message: Join, other: Join) -> str:
    """Say that two processes have one rank."""
    return f"two processes claim to be rank {message.rank}: {other.pid} on {other.host}, {message.pid} on {message.host}"


def difference(ours: Join, theirs: Join, they: str) -> str:
    """Say which setting differs that must be alike; empty if none does."""
    for what in ("backend", "choices", "version", "byteorder"):
        own, other = getattr(ours, what), getattr(theirs, what)
        if own != other:
            return f"rank {ours.rank} has {what} {own!r}, and {they} has {other!r}: all ranks need the same"
    return ""


def late(missing: Collection[int], world_size: int, timeout_s: float, misfits: Iterable[str], hint: str) -> str:
    """Say which ranks did not come in time, and which processes were refused."""
    text = f"the ranks did not meet within {timeout_s:g} s: {show_all_ranks(missing)} of {world_size} did not come"
    named = "; ".join(sorted(misfits)[:_MAX_NAMED])
    return text + (f". Refused: {named}" if named else "") + (f". {hint}" if hint else "")


def joined_again(rank: int) -> str:
    """Say that a rank has joined and joins again."""
    return f"rank {rank} joined twice"


def stranger(rank: int, named: int, world_size: int) -> str:
    """Say that a message names a rank outside the world."""
    return f"rank {rank} sent the store an impossible frame: it names rank {named} in a world of {world_size}"


# A rank is lost.


def lost_early(rank: int, reason: str) -> str:
    """Say that a rank has ended before all had come."""
    return f"rank {rank} was lost before the ranks had met: {reason}"


def lost(member: Join, reason: str, *, is_meeting: bool) -> str:
    """Say that a rank's connection has ended."""
    when = " while the ranks were meeting" if is_meeting else ""
    process = f"its process {member.pid} on {member.host}" if member.pid else "it"
    return f"rank {member.rank} was lost{when}: {process} died, or was cut off ({reason})"


def lost_to(reporter: int, peer: int | None, text: str) -> str:
    """Say that two ranks cannot talk, although both talk to the store."""
    return text if peer is None else f"rank {peer} was lost to rank {reporter}: {text}"


def unreported(rank: int) -> str:
    """Say that a rank knows of a failure that no rank has reported."""
    return f"rank {rank} found that the job had failed, and asked the others to continue without the lost ranks"


# The ranks do not make the same calls.


def different_devices(rank: int, other: int, message: Checkpoint) -> str:
    """Say that two ranks differ in what they called on GPUs."""
    return (
        f"ranks {min(rank, other)} and {max(rank, other)} did not do the same on their GPUs: the first {message.count} {message.place} "
        f'differ, and their results cannot be trusted. gpu_check = "always" finds the first that does. {_ORDER}'
    )


def different_calls(rank: int, other: int) -> str:
    """Say that two ranks wait in one place with different calls; an inquest fills these in."""
    return f"the ranks did not make the same call, and wait for each other: rank {rank} is in {ANOTHER_CALL}, and rank {other} in {ANOTHER_CALL}: {_ORDER}"


def deadlock(ranks: Collection[int]) -> str:
    """Say that ranks wait for each other, or that one waits for itself."""
    if len(ranks) == 1:
        return f"{show_all_ranks(ranks)} waits for a message between its own threads, and none of them can send or receive one"
    return f"{show_all_ranks(ranks)} wait for each other, and none can continue: {_ORDER}"


def absent_from(exchange: str, absent: int, waiting: Collection[int]) -> str:
    """Say that others wait in an exchange for a rank that has left."""
    others = f"{show_all_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return f"rank {absent} has closed its group, and {others} for it in {exchange}: {_ORDER}"


def abandoned(rank: int, peer: int, wait: Wait) -> str:
    """Say that a rank waits for one that has left."""
    rule = f"; {_TAGS if ' tag' in wait.operation else _NO_TAGS}" if wait.operation.startswith("recv ") else ""
    return (
        f"rank {peer} has closed its group, and rank {rank} waits for it in {wait.operation} #{wait.sequence}: {_ORDER}{rule}"
    )


# After an inquest.


def verdict_of(inquest: Inquest, finding: Finding) -> str:
    """Say what a failure is about, and what each rank did."""
    report = inquest.report
    lines = [_headline(inquest, finding), *_stories(inquest)]
    if report.kind == "mismatch" and differ_in_length([answer.text for answer in inquest.answers.values() if answer.entered]):
        lines.append("  arrays of unequal lengths: give counts= or uneven=True on all ranks")
    if report.kind == "deadline":
        lines.append(_MORE_TIME)
    return "\n".join(lines)


def _headline(inquest: Inquest, finding: Finding) -> str:
    report, reporter = inquest.report, inquest.reporter
    missing = show_all_ranks(finding.missing)
    match finding.outcome:
        case Outcome.SILENT:
            return f"{report.text}: {missing} did not answer"
        case Outcome.ABSENT:
            return f"{report.text}: {missing} did not come"
        case Outcome.PRESENT:
            return f"{report.text}: all ranks were in it, and rank {reporter} waited for rank {report.peer}"
        case Outcome.WAITING:
            in_the_end = "" if finding.peer == report.peer else ", in the end"
            return f"{report.text}: rank {reporter} waits for rank {finding.peer}{in_the_end}"
        case Outcome.UNKNOWN:
            return _with_calls(inquest) if report.kind == "mismatch" and report.peer is not None else report.text


def _with_calls(inquest: Inquest) -> str:
    """Return a report with its gaps filled by the calls that ranks have answered; the first of two gaps is the reporter's."""
    *gaps, last = inquest.report.text.split(ANOTHER_CALL, 2)
    ranks = (inquest.reporter, inquest.report.peer)[-len(gaps) :]
    calls = [inquest.answers[rank].text if rank is not None and inquest.has_entered(rank) else ANOTHER_CALL for rank in ranks]
    return "".join(text + call for text, call in zip(gaps, calls, strict=False)) + last


def _stories(inquest: Inquest) -> Iterable[str]:
    """Say what each rank did, in the order of the first rank that did it."""
    stories: dict[str, list[int]] = {}
    for rank, answer in sorted(inquest.answers.items()):
        stories.setdefault(answer.text, []).append(rank)
    if inquest.silent:
        stories["no answer: stopped, cut off, or busy"] = inquest.silent
    return [f"  {show_all_ranks(ranks)}: {story}" for story, ranks in sorted(stories.items(), key=lambda item: min(item[1]))]
