"""Which rank failed first, and how to say so."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneaccord.common.ranks import show_ranks
from oneaccord.common.tracebacks import shown_path

if TYPE_CHECKING:
    from oneaccord.job.error_file import ErrorRecord

__all__ = [
    "MISTAKES",
    "Ended",
    "Failure",
    "conclude",
    "exit_code",
    "files_of_recorders",
    "last_straw",
    "primary",
    "report",
    "report_ended",
    "report_lost",
    "report_records",
]

_TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|Fatal Python error: )", re.MULTILINE)
_CHAINED = re.compile(
    r"\n\n(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)\n\n\Z"
)
_PLACE = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
_LAST_LINES = 10
_OF_MEMORY = "; the kernel kills a process if memory runs out: see dmesg, or the scheduler's log"
_OF_CODE = "; set PYTHONFAULTHANDLER=1 to see the line"
_HINTS: dict[int, str] = {
    signal.SIGKILL: _OF_MEMORY,
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL), _OF_CODE),
}
"""What to do about a signal that leaves no traceback."""
MISTAKES = {
    f"oneaccord.errors.{name}" for name in ("CollectiveMismatchError", "DeadlockError", "InputChangedError", "RaceError")
}
"""Mistakes of the program that recur on all ranks, so that a replacement would find no rank to let it in."""
_LATE_S = 0.1
"""How much later than its consequences a death may be seen."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended, other than well."""

    rank: int
    code: int
    """Its exit code; minus the signal's number when a signal ended it, as in `subprocess`."""
    at: float
    """When it exited, by the launcher's `time.monotonic`."""
    record: ErrorRecord | None
    stderr: str
    """The end of its standard error."""
    place: str = ""
    """Its line when a signal ended it, if it reports one."""
    host: str = ""
    """The name of its host, if the job has several."""
    reason: str = ""
    """How it ended, in the place of the exit code, if that says nothing."""

    @property
    def how(self) -> str:
        """Its end in words, such as ``"killed by SIGKILL"``."""
        where = f" on {self.host}" if self.host else ""
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}{where}"
        return f"exit code {self.code}{where}"

    @property
    def where(self) -> str:
        """Its line when it ended, by its own report or by its traceback; empty if neither is there."""
        if self.record is not None and self.record.where:
            return self.record.where
        if self.place:
            return self.place
        places = _PLACE.findall(_last_traceback(self.stderr))
        return f"at {shown_path(places[-1][0])}:{places[-1][1]}" if places else ""

    @property
    def message(self) -> str:
        """The words that it has left to the launcher to say."""
        return f"{self.record.type}: {self.record.message}" if self.record is not None and self.record.is_told else ""

    @property
    def is_secondary(self) -> bool:
        """Whether the rank only learned that another one had failed."""
        return self.record is not None and self.record.secondary

    @property
    def began(self) -> float:
        """When it failed. The interpreter may take its time between the error and the exit: the error's own time is the better one."""
        return self.at if self.record is None or self.record.clock is None else self.record.clock


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a rank, be it a good one, with what its launcher has had to do with it; the attributes are those of `Child`."""

    failure: Failure
    signalled: bool = False
    needless: bool = False
    made_good: bool = False


def conclude(ranks: Sequence[Ended], told_to_end: signal.Signals | None, *, may_go_on: bool) -> tuple[str, int]:
    """Return the last text for the user, and the exit code of the job.

    Parameters
    ----------
    ranks
        The ends of all ranks.
    told_to_end
        The signal that ended the job from outside, if one did.
    may_go_on
        Whether the others may continue after a failure.
    """
    line = "-" * 80 + "\n"
    if told_to_end is not None:
        text = "" if told_to_end == signal.SIGPIPE else line + report_ended(told_to_end, [each.failure for each in ranks])
        return text, 128 + told_to_end
    needed = [each for each in ranks if not each.needless]
    failed = [each for each in needed if each.failure.code != 0]
    if not failed:
        return "", 0
    own = [each for each in failed if not each.signalled] or failed
    failures = [each.failure for each in own]
    # Who ended only because of another rank's end was left, and did not end well.
    are_left = [each.failure.is_secondary for each in own if not each.made_good]
    if may_go_on and len(failed) < len(needed) and not any(are_left):
        return line + report_lost(failures), 0
    replaced = [each.failure for each in own if each.made_good]
    first, survived = last_straw(failures, replaced) if may_go_on else (primary(failures), [])
    also = sorted({failure.rank for failure in failures if failure not in (first, *survived)})
    ended = sorted({each.failure.rank for each in failed if each.signalled and each.failure.rank != first.rank})
    others = [each.failure for each in failed if each.failure.rank != first.rank]
    text = line + report(first, also, ended, survived, others)
    if first.is_secondary and (good := sorted(each.failure.rank for each in needed if each.failure.code == 0)):
        # As by os._exit(), or by a library that ends the process: nobody else says it.
        text += f"oneaccord run: {show_ranks(good)} ended with exit code 0\n"
    return text, exit_code(first.code)


def primary(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest of those that are no mere consequence."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.began))


def last_straw(failures: Sequence[Failure], replaced: Sequence[Failure] = ()) -> tuple[Failure, list[Failure]]:
    """Return the failure that ended a job which may have survived others, and those: the last one before ranks gave up.

    If none gave up it is the first one, except for ``replaced``, those in whose place another rank came before the next one failed.
    """
    own = sorted((failure for failure in failures if not failure.is_secondary), key=lambda failure: failure.began)
    gave_up = min((failure.began for failure in failures if failure.is_secondary), default=None)
    if gave_up is None:
        rest = [failure for failure in own if failure not in replaced]
        # A rank that exits without an error of its own may do so because of a death.
        ended = rest[0].began - (_LATE_S if rest[0].record is None else 0.0) if rest else 0.0
        survived = [failure for failure in own if failure in replaced and failure.began < ended]
        return next(failure for failure in own if failure not in survived), survived
    # That a rank was killed is seen by its end alone, which others may have noticed before.
    before = [each for each in own if each.began - (_LATE_S if each.code < 0 and each.record is None else 0.0) <= gave_up]
    if not before:
        return primary(failures), []
    # Of ranks that failed at one time it is not known whether the others continued after it.
    together = [each for each in before if each.began >= before[-1].began - _LATE_S]
    return together[0], before[: -len(together)]


def exit_code(code: int) -> int:
    """Return the code of the launcher for a rank's own: 128 and the signal's number for a signal, as shells do."""
    return 128 - code if code < 0 else code


def report(
    first: Failure,
    also_failed: Sequence[int],
    ended: Sequence[int],
    survived: Sequence[Failure] = (),
    others: Sequence[Failure] = (),
) -> str:
    """Return the last text for the user: the rank that failed first, how, the fate of the others, and the traceback.

    Parameters
    ----------
    first
        The failure that caused the others.
    also_failed, ended
        The ranks that failed after it by themselves, and those that the launcher ended.
    survived
        The failures before it that the others had gone on after.
    others
        All other failures, whose words are said here, each once.
    """
    if first.record is not None and first.record.secondary:
        # The cause may be a rank of another host, whose launcher reports more.
        lines = [f"oneaccord run: rank {first.rank} failed first on this host: {first.how}"]
    else:
        lines = [
            f"oneaccord run: rank {each.rank} failed, and the others continued: {each.how}" for each in survived[-_LAST_LINES:]
        ]
        if len(survived) > _LAST_LINES:
            lines.insert(
                0, f"oneaccord run: {len(survived)} ranks failed, and the others continued; the last {_LAST_LINES} of them:"
            )
        lines.append(f"oneaccord run: rank {first.rank} failed {'then' if survived else 'first'}: {first.how}")
    if also_failed:
        lines.append(f"oneaccord run: {show_ranks(also_failed)} failed after it")
    if ended:
        lines.append(f"oneaccord run: {show_ranks(ended)} {'was' if len(ended) == 1 else 'were'} ended because of it")
    # An error that says of the first one what it said itself adds nothing.
    cause = "" if first.record is None else first.record.message.partition("\n")[0]
    lines += _said_once([each for each in others if not cause or cause not in each.message])
    text = first.record.traceback if first.record is not None else _last_traceback(first.stderr)
    if text:
        lines.append(f"oneaccord run: the error of rank {first.rank}{_left_out(first)}:")
    elif last := first.stderr.strip().splitlines()[-_LAST_LINES:]:
        lines.append(f"oneaccord run: rank {first.rank} left no traceback; the end of its standard error:")
        text = "\n".join(last)
    else:
        hint = "" if first.reason else _HINTS.get(-first.code, "")
        lines.append(f"oneaccord run: rank {first.rank} left no traceback, and wrote nothing to its standard error{hint}")
    return "\n".join(lines) + "\n" + (text.rstrip("\n") + "\n" if text else "")


def report_lost(lost: Sequence[Failure]) -> str:
    """Return the last text for the user if all other ranks ended well: the failed ranks, how they failed, and their tracebacks."""
    lines = [f"oneaccord run: {len(lost)} rank{'s' * (len(lost) > 1)} failed, and all others ended well"]
    said: dict[str, int] = {}
    if len(lost) > _LAST_LINES:
        lines.append(f"oneaccord run: the last {_LAST_LINES} of them:")
    for failure in sorted(lost, key=lambda failure: failure.at)[-_LAST_LINES:]:
        if failure.message and said.setdefault(failure.message, failure.rank) != failure.rank:
            lines.append(
                f"oneaccord run: rank {failure.rank}: {failure.how}{f', {failure.where}' if failure.where else ''}, as rank {said[failure.message]}"
            )
            continue
        lines.append(f"oneaccord run: rank {failure.rank}: {failure.how}{_left_out(failure)}")
        text = failure.record.traceback if failure.record is not None else _last_traceback(failure.stderr)
        lines += [text.rstrip("\n")] if text else []
    return "\n".join(lines) + "\n"


def report_ended(number: signal.Signals, failures: Sequence[Failure]) -> str:
    """Return the last text for the user if a signal ended the job from outside: where the ranks were, and earlier failures."""
    ranks: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        ranks.setdefault(failure.where or ("ended well" if failure.code == 0 else failure.how), []).append(failure.rank)
    lines = [f"oneaccord run: ended by {number.name}"]
    if any(failure.where for failure in failures):
        lines[0] += ", when the ranks were here:"
        lines += [f"  {show_ranks(each)}: {where}" for where, each in ranks.items()]
    # What followed from the signal needs no words.
    return "\n".join(_said_once([each for each in failures if not each.is_secondary]) + lines) + "\n"


def _said_once(failures: Sequence[Failure]) -> list[str]:
    """Return each of the words that ranks have left to say, with the ranks that they are of."""
    ranks: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure.message:
            ranks.setdefault(failure.message, []).append(failure.rank)
    return [f"oneaccord run: {show_ranks(each)}: {message}" for message, each in ranks.items()]


def _left_out(failure: Failure) -> str:
    is_short = failure.record is not None and failure.record.is_short
    return ", without the frames inside oneaccord (ONEACCORD_TRACEBACK=full shows them)" if is_short else ""


def _last_traceback(stderr: str) -> str:
    starts = [found.start() for found in _TRACEBACK.finditer(stderr)]
    if not starts:
        return ""
    start = starts.pop()
    while starts and _CHAINED.search(stderr, starts[-1], start):
        start = starts.pop()
    return stderr[start:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def files_of_recorders(directory: str) -> set[tuple[str, int]]:
    """Return the files of flight recorders in a folder, each with the time of its last change; none if there is no such folder."""
    found = set()
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if "-rank-" in entry.name:
                with suppress(OSError):  # another job may tidy up
                    found.add((entry.name, entry.stat().st_mtime_ns))
    return found


def report_records(directory: str, is_new: bool) -> str:
    """Return the last text for the user if the ranks were to record their calls in a folder: how to read it, or why there is nothing of this job."""
    if is_new:
        return f"oneaccord run: what the ranks recorded: oneaccord explain {shlex.quote(directory)}\n"
    return (
        f"oneaccord run: the ranks have recorded nothing in {directory}: SIGTERM and SIGKILL leave them no time. "
        "End a job by Ctrl-C, or send SIGUSR1 to oneaccord run before\n"
    )
