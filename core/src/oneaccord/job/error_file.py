"""The file in which a rank reports the error that ended it to its launcher: a small JSON file, named by ``ONEACCORD_ERROR_FILE``.

What all ranks would say alike is then said once, by the launcher: a rank itself shows where it was. Tracebacks leave out the frames inside
oneaccord; see `oneaccord.common.tracebacks`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from oneaccord.common.checks import UNREADABLE, safe_str
from oneaccord.common.tracebacks import place_of, shorten
from oneaccord.common.variables import Variable, has_whole_tracebacks
from oneaccord.errors import AbortedError, CommError, InternalError, OneAccordError
from oneaccord.launchers import is_of_another

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "ErrorRecord",
    "catches",
    "gone",
    "install",
    "is_elastic",
    "mark_elastic",
    "mark_gone",
    "read",
    "read_place",
]

_ELASTIC = "elastic"
_GONE = "gone-"
_LONGEST_TRACEBACK = 1 << 16
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_BUG = f"{InternalError.__module__}.{InternalError.__qualname__}"


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
    where: str = ""
    """The last line of the program that it came to, and the call of oneaccord there: ``"in all_reduce at train.py:12"``."""
    is_short: bool = False
    """Whether frames inside oneaccord were left out of the traceback."""
    clock: float | None = None
    """The same time by `time.monotonic`, which all processes of a host share, and which cannot be set."""

    @property
    def is_told(self) -> bool:
        """Whether the rank has left it to the launcher to say the message."""
        return self.type.startswith(f"{OneAccordError.__module__}.") and self.type != _BUG


class _Hook:
    """Stands in front of the ``sys.excepthook`` that was there before."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._process = os.getpid()
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        path = os.environ.get(Variable.ERROR_FILE)
        if path and os.getpid() == self._process:  # an exception of a forked child does not end the rank
            # A full disk, or a launcher that is gone, must not hide the error itself.
            with _without_interrupts(), contextlib.suppress(OSError):
                record = _record(self.rank, kind, error, trace)
                _write(Path(path), record)
                if (
                    self._before is sys.__excepthook__
                    and not has_whole_tracebacks()
                    and (words := _brief(record, error)) is not None
                ):
                    sys.stderr.write(words)
                    return
        self._before(kind, error, trace)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let a Ctrl-C that comes now not take the place of the error that ends this process already."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _PlaceFile:
    """The file in which the interpreter writes its line just before a signal ends this process, and also while C code runs."""

    opened: ClassVar[int] = -1

    @classmethod
    def open(cls, path: str) -> None:
        if cls.opened >= 0:
            return
        import faulthandler

        with contextlib.suppress(OSError):
            fd = os.open(_place_path(Path(path)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            cls.opened = _moved_up(fd)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=cls.silence)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if not _is_taken(number):
                    faulthandler.register(number, cls.opened, all_threads=False, chain=True)

    @classmethod
    def silence(cls) -> None:
        """Leave a forked child's own ends unwritten. Its handlers stay: taking ours back would bring those of before ``init()`` with it."""
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, cls.opened, inheritable=False)
            os.close(nothing)


def _moved_up(fd: int) -> int:
    """Return a descriptor in the place of a low one: programs close all low ones, and their next file would get the text that is written here."""
    import fcntl
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 1 << 10 if limit == resource.RLIM_INFINITY else min(limit, 1 << 10)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, limit - 16))
    finally:
        os.close(fd)


def _is_taken(number: signal.Signals) -> bool:
    """Return whether a signal is ignored, or has a handler below Python's, such as one of the program's own faulthandler, which we would replace."""
    handler = signal.getsignal(number)
    if handler is None or handler == signal.SIG_IGN:
        return True
    return handler == signal.SIG_DFL and catches(os.getpid(), number)


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, as far as the system says so."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def install(rank: int = -1) -> None:
    """Write the exception that ends this process to the launcher's file, then call the former hook.

    Does nothing unless ``ONEACCORD_ERROR_FILE`` is set, and nothing in the children of a rank. Called again, it only takes over the rank. An exit by `SystemExit` writes
    nothing: its code says all.

    Parameters
    ----------
    rank
        The rank of this process; -1 while it is not known.
    """
    if not os.environ.get(Variable.ERROR_FILE) or is_of_another(os.environ):
        return
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook.rank = rank
    else:
        sys.excepthook = _Hook(rank)
    if rank >= 0 and Variable.LAUNCHED in os.environ:
        _PlaceFile.open(os.environ[Variable.ERROR_FILE])


def read_place(path: Path) -> str:
    """Return the line of a rank when a signal ended it, as in `ErrorRecord.where`; empty if it wrote nothing.

    Parameters
    ----------
    path
        That of its error file.
    """
    try:
        text = _place_path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # A program may have gone on after the signals before.
    last = text.rpartition("most recent call first")[2]
    frames = [traceback.FrameSummary(name, int(line), function) for name, line, function in _DUMPED.findall(last)]
    return place_of(traceback.StackSummary.from_list(frames[::-1]))


def mark_elastic() -> None:
    """Note for the launcher that the program has an elastic function, which can continue after a failure."""
    path = os.environ.get(Variable.ERROR_FILE)
    if path and not is_of_another(os.environ):
        with contextlib.suppress(OSError):
            (Path(path).parent / _ELASTIC).touch()


def is_elastic(folder: Path) -> bool:
    """Return whether a rank has made that note in the folder of the error files."""
    return (folder / _ELASTIC).exists()


def mark_gone(path: Path, rank: int, how: str) -> None:
    """Note for the other ranks of this host that one has ended before it came into the job, if it has.

    Parameters
    ----------
    path
        Its error file.
    rank, how
        Which rank, and how it ended.
    """
    if not _place_path(path).exists():
        with contextlib.suppress(OSError):  # then the others wait in vain, for a time
            (path.parent / f"{_GONE}{rank}").write_text(
                f"its process ended ({how}) before it came into the job", encoding="utf-8"
            )


def gone() -> dict[int, str]:
    """Return the ranks of this host that have ended before they came into the job, each with how."""
    path = os.environ.get(Variable.ERROR_FILE)
    found: dict[int, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for each in Path(path).parent.glob(f"{_GONE}*") if path else ():
            found[int(each.name.removeprefix(_GONE))] = each.read_text(encoding="utf-8")
    return {rank: how for rank, how in found.items() if how}  # one that is empty is being written


def _place_path(path: Path) -> Path:
    return path.with_suffix(".place")


def read(path: Path) -> ErrorRecord | None:
    """Return the record of a rank, None if it wrote nothing that can be read."""
    import msgspec  # a launcher whose ranks end well needs none

    try:
        return msgspec.json.decode(path.read_bytes(), type=ErrorRecord)
    except (OSError, *UNREADABLE):
        return None


def _record(rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> ErrorRecord:
    name = kind.__qualname__ if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}.{kind.__qualname__}"
    # Ranks may have been renumbered since: then the error knows the present number of this rank.
    own = rank if not isinstance(error, CommError) or error.rank is None else error.rank
    told = isinstance(error, AbortedError) or (isinstance(error, CommError) and error.peer not in {None, own})
    story = traceback.TracebackException(kind, error, trace)
    where = place_of(story.stack)
    is_short = shorten(story, error)
    text = "".join(story.format())
    return ErrorRecord(
        rank, name, safe_str(error), text[-_LONGEST_TRACEBACK:], time.time(), told, where, is_short, time.monotonic()
    )


def _brief(record: ErrorRecord, error: BaseException) -> str | None:
    """Return the text that a rank shows if its launcher says the rest; None for an error that the rank shows itself."""
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", []))
    if Variable.LAUNCHED not in os.environ:  # a launcher such as mpi's, which shows one traceback, that of the cause
        return f"{record.type}: {record.message}\n{notes}" if record.secondary else None
    if isinstance(error, KeyboardInterrupt):
        return ""
    if not record.is_told:
        return None
    if record.secondary:
        return f"{record.type} {record.where}: see the end of the output of oneaccord run for the reason\n{notes}"
    above, found, _ = record.traceback.rpartition(f"{record.type}: {record.message}")
    return (
        f"{above}{record.type}: see the end of the output of oneaccord run, which shows it once for all ranks\n{notes}"
        if found
        else None
    )


def _write(path: Path, record: ErrorRecord) -> None:
    import json  # a rank that does not fail need not import it

    # Renamed into place, so that the launcher never reads half a file.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(record)), encoding="utf-8", errors="backslashreplace")
    unfinished.replace(path)
