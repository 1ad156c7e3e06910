"""What people see of a traceback: the frames of their program, without those inside oneaccord."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from oneaccord.common.lines import OURS, STANDARD, kind_of
from oneaccord.common.variables import has_whole_tracebacks
from oneaccord.errors import InternalError, OneAccordError

__all__ = ["place_of", "shorten", "shown_path"]

_HELPERS = frozenset(
    "annotated_types cupy mpi4py msgspec numpy pluggy pydantic pydantic_core torch typing_extensions typing_inspection".split()
)


def shorten(story: traceback.TracebackException, error: BaseException) -> bool:
    """Take the frames inside oneaccord out of a traceback, and out of those that led to it; return whether there were any.

    All frames stay if ``ONEACCORD_TRACEBACK`` is ``full``, and if the error does not say all there is to say: one that is not of oneaccord,
    or that is a bug of it.

    Parameters
    ----------
    story
        The traceback, which is changed.
    error
        Whose it is.
    """
    says_all = isinstance(error, OneAccordError | KeyboardInterrupt) and not isinstance(error, InternalError)
    return says_all and not has_whole_tracebacks() and _leave_users_part(story)


def _leave_users_part(story: traceback.TracebackException) -> bool:
    """As `shorten`, whatever the error is."""
    earlier = [each for each in (story.__cause__, story.__context__) if each is not None]
    found = [_leave_users_part(each) for each in earlier]
    kept = [frame for frame, is_inside in _inside(story.stack) if not is_inside]
    if not kept or len(kept) == len(story.stack):
        return any(found)
    story.stack = traceback.StackSummary.from_list(kept)
    return True


def place_of(stack: traceback.StackSummary) -> str:
    """Return where a program was: ``"in all_reduce at train.py:12"``, the call of oneaccord and the last line of the program."""
    frames = list(_inside(stack))
    kinds = [OURS if is_inside else kind_of(frame.filename) for frame, is_inside in frames]
    kind = min(kinds, default=OURS)
    if kind == OURS:
        return ""
    at = len(kinds) - 1 - kinds[::-1].index(kind)
    last, inner = frames[at][0], [frame.name for frame, is_inside in frames[at + 1 :] if is_inside]
    call = "" if not inner else "importing oneaccord " if inner[0] == "__getattr__" else f"in {inner[0]} "
    return f"{call}at {shown_path(last.filename)}:{last.lineno}"


def shown_path(path: str) -> str:
    """Return a path as people read it best: relative where it lies in the working directory."""
    with contextlib.suppress(OSError, ValueError):  # somebody may have removed that; or it lies elsewhere
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _inside(stack: traceback.StackSummary) -> Iterator[tuple[traceback.FrameSummary, bool]]:
    """Yield each frame, and whether it is oneaccord' own, or one of the standard library or NumPy that oneaccord called."""
    is_inside = False
    for frame in stack:
        kind = kind_of(frame.filename)
        is_inside = kind == OURS or (is_inside and (kind == STANDARD or _is_of_helper(frame.filename)))
        yield frame, is_inside


def _is_of_helper(path: str) -> bool:
    """Return by its name alone whether a file is of a package that oneaccord calls: one whose import was interrupted is in no `sys.modules`."""
    _, found, rest = path.rpartition(f"-packages{os.sep}")
    return bool(found) and rest.partition(os.sep)[0].removesuffix(".py") in _HELPERS
