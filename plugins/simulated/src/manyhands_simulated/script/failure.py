"""How a run of a program ended: what people read last, and the exit code."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from types import TracebackType

import manyhands.api
from manyhands.api import CommError, InternalError, ManyHandsError, has_whole_tracebacks, show_ranks
from manyhands_simulated.running import Run

__all__ = ["conclude"]

_KILLED = 128 + signal.SIGKILL
_OURS = tuple(str(folder) + os.sep for folder in (Path(str(manyhands.api.__file__)).parent, Path(__file__).parent.parent))
"""The folders of our own modules."""


def conclude(run: Run[bool], file: str) -> tuple[int, str]:
    """Return the exit code of a run, and what is to be said about it; empty where it ended well.

    The code is that of the rank that failed first. Where none did but the fault plan killed one, it is that of a process that gets
    SIGKILL, whether or not the others could do without.

    Parameters
    ----------
    run
        What came of it; each rank that ended returned True.
    file
        Where the program stands.
    """
    killed = {mark.rank: mark for mark in run.trace.marks if mark.kind == "killed"}
    said = [
        f"{mark.label.replace('is killed', 'was killed by the fault plan', 1)}, after {mark.time_s:g} virtual seconds"
        for mark in killed.values()
    ]
    left = [rank for rank, has_ended in enumerate(run.results) if not has_ended and rank not in {*killed, *run.errors}]
    if left:
        said.append(f"{show_ranks(left)} had not ended when nothing could happen any more")
    code = _KILLED if killed else 1 if left else 0
    error, words = run.cause, ""
    if error is not None:
        first = next(rank for rank, each in run.errors.items() if each is error)
        others = [rank for rank, each in run.errors.items() if rank != first and not isinstance(each, CommError)]
        code = _exit_code(error)
        said.append(f"rank {first} failed first: exit code {code} (simulated world, seed {run.seed})")
        said += [f"{show_ranks(others)} failed after it"] if others else []
        words = _words(error, file)
    elif code:
        said.append(f"no rank failed by itself: exit code {code} (simulated world, seed {run.seed})")
    if not code:
        return code, ""
    said.append(f"to repeat it, set MANYHANDS_BACKENDS__SIMULATED__SEED={run.seed}")
    return code, "-" * 80 + "\n" + "".join(f"manyhands run: {line}\n" for line in said) + words


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _words(error: BaseException, file: str) -> str:
    """Return what the interpreter would print for an error that nobody caught, without what is not the user's."""
    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, int) else f"{error.code}\n"
    if not has_whole_tracebacks():
        _leave_users_part(error, file, set())
    return "".join(traceback.format_exception(error))


def _leave_users_part(error: BaseException, file: str, seen: set[int]) -> None:
    """Take our own calls out of the traceback of an error, and of those that led to it.

    An error of ours says all there is to say. Any other one may come out of our calls by a mistake of ours, and these are kept, except
    for those around the program.
    """
    seen.add(id(error))
    calls: list[TracebackType] = []
    call = error.__traceback__
    while call is not None:
        calls.append(call)
        call = call.tb_next
    files = [call.tb_frame.f_code.co_filename for call in calls]
    theirs = [each == file or not each.startswith((*_OURS, "<frozen ")) for each in files]
    if isinstance(error, ManyHandsError) and not isinstance(error, InternalError):
        kept = [call for call, is_theirs in zip(calls, theirs, strict=True) if is_theirs]
    else:
        # What comes before the program, such as a file that is no Python, has no calls of theirs.
        kept = calls[theirs.index(True) :] if True in theirs else [] if isinstance(error, ImportError | SyntaxError) else calls
    trace: TracebackType | None = None
    for call in reversed(kept):
        trace = TracebackType(trace, call.tb_frame, call.tb_lasti, call.tb_lineno)
    error.__traceback__ = trace
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None and id(earlier) not in seen:
            _leave_users_part(earlier, file, seen)
