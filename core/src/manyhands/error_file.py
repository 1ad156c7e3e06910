"""How a rank tells its launcher what ended it: a small JSON file, named by ``MANYHANDS_ERROR_FILE``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from manyhands.checks import UNREADABLE, said
from manyhands.errors import AbortedError, CommError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ErrorRecord", "install", "read"]

_LONGEST_TRACEBACK = 1 << 16


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The exception that ended a rank."""

    rank: int
    type: str
    """The name of its class, with the module unless it is a builtin."""
    message: str
    traceback: str
    time: float
    """When it reached the top of the program, in seconds since the epoch."""
    secondary: bool
    """Whether the rank only learned that another one had failed."""


class _Hook:
    """Stands in front of the ``sys.excepthook`` that was there before."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        path = os.environ.get("MANYHANDS_ERROR_FILE")
        if path:
            record = _record(self.rank, kind, error, trace)
            # A full disk, or a launcher that is gone, must not hide the error itself.
            with contextlib.suppress(OSError):
                _write(Path(path), record)
                if record.secondary:
                    # The launcher shows one traceback, that of the cause; here the words are enough.
                    sys.stderr.write("\n".join([f"{record.type}: {record.message}", *getattr(error, "__notes__", [])]) + "\n")
                    return
        self._before(kind, error, trace)


def install(rank: int) -> None:
    """Write the exception that ends this process to the launcher's file, then do what was done before.

    Does nothing unless ``MANYHANDS_ERROR_FILE`` is set. Called again, it only takes over the rank. An exit by `SystemExit` writes
    nothing: its code says all.

    Parameters
    ----------
    rank
        The rank of this process.
    """
    if not os.environ.get("MANYHANDS_ERROR_FILE"):
        return
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook.rank = rank
    else:
        sys.excepthook = _Hook(rank)


def read(path: Path) -> ErrorRecord | None:
    """Return what a rank wrote, None when it wrote nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ErrorRecord)
    except (OSError, *UNREADABLE):
        return None


def _record(rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> ErrorRecord:
    name = kind.__qualname__ if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}.{kind.__qualname__}"
    # Ranks may have been counted anew since: then the error knows what this rank is called by now.
    own = rank if not isinstance(error, CommError) or error.rank is None else error.rank
    told = isinstance(error, AbortedError) or (isinstance(error, CommError) and error.peer not in {None, own})
    text = "".join(traceback.format_exception(kind, error, trace))
    return ErrorRecord(rank, name, said(error), text[-_LONGEST_TRACEBACK:], time.time(), told)


def _write(path: Path, record: ErrorRecord) -> None:
    # Renamed into place, so that the launcher never reads half a file.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(record)), encoding="utf-8", errors="backslashreplace")
    unfinished.replace(path)
