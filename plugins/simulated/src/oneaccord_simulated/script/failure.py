"""The end of a run of a program: the last text for the user, and the exit code."""

from __future__ import annotations

import signal
import traceback

from oneaccord.api import CommError, has_whole_tracebacks, shorten_traceback, show_ranks
from oneaccord_simulated.running import Run

__all__ = ["conclude"]

_KILLED = 128 + signal.SIGKILL


def conclude(run: Run[bool], file: str) -> tuple[int, str]:
    """Return the exit code of a run, and its message; empty if it ended well.

    The code is that of the rank that failed first. If none did but the fault plan killed one, it is that of a process that gets
    SIGKILL, whether or not the others could do without it.

    Parameters
    ----------
    run
        The result of the run; each rank that ended returned True.
    file
        The file of the program.
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
    said.append(f"to repeat it, set ONEACCORD_BACKENDS__SIMULATED__SEED={run.seed}")
    return code, "-" * 80 + "\n" + "".join(f"oneaccord run: {line}\n" for line in said) + words


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _words(error: BaseException, file: str) -> str:
    """Return the text that the interpreter would print for an uncaught error, without the parts that are not the user's."""
    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, int) else f"{error.code}\n"
    story = traceback.TracebackException.from_exception(error)
    if not has_whole_tracebacks():
        _leave_out_the_launcher(story, error, file)
    shorten_traceback(story, error)
    return "".join(story.format())


def _leave_out_the_launcher(story: traceback.TracebackException, error: BaseException, file: str) -> None:
    """Take the frames that lead to the program out of a traceback."""
    files = [frame.filename for frame in story.stack]
    if file in files:
        del story.stack[: files.index(file)]
    elif isinstance(error, ImportError | SyntaxError):  # there is no program yet, as in a file that is no Python
        story.stack.clear()
