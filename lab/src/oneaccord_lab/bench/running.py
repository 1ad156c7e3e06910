"""Starting the ranks that measure, listening to them, and starting others if a backend ends its processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from oneaccord.common.checks import UNREADABLE
from oneaccord.errors import CommError
from oneaccord.local.guard import guarded
from oneaccord_lab.bench.plan import Done, Plan, Point, Problem, Record, Target, decode_record

__all__ = ["Interrupted", "Start", "compare"]

Start = Callable[[str, int], int]
"""``start(plan, ranks)``: run the ranks with a plan as JSON, and return the exit code."""

_FROM_OUTSIDE: Final[frozenset[int]] = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


class Interrupted(Exception):
    """The ranks were ended from outside; ``code`` is the exit code that says how."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks were ended from outside (exit code {code})")
        self.code: int = code


def compare(plan: Plan, ranks: int, start: Start, listen: Callable[[Record], None]) -> None:
    """Measure according to the plan; ``stream`` and ``state`` of the plan are filled in here.

    A backend that ends its processes, or holds them up beyond all deadlines, is left out; new processes measure the rest.

    Parameters
    ----------
    plan
        The plan.
    ranks
        How many ranks.
    start
        Starts the ranks.
    listen
        Called with each record as it comes, from another thread; but for `Done`.

    Raises
    ------
    CommError
        A rank failed, and not because of a backend.
    Interrupted
        The ranks were ended from outside.
    """
    end = time.monotonic() + plan.budget_s
    targets, points = list(plan.targets), list(plan.points)
    while targets and points:
        with guarded() as guard:
            stream, state = guard.folder / "stream", guard.folder / "state"
            os.mkfifo(stream, 0o600)
            now = msgspec.structs.replace(
                plan,
                targets=targets,
                points=points,
                budget_s=max(0.0, end - time.monotonic()),
                stream=str(stream),
                state=str(state),
            )
            with _listening(stream, listen) as reader:
                code = start(now.dump(), ranks)
            culprit = state.read_text(encoding="utf-8").strip() if state.exists() else ""
        del points[: reader.done]
        if code in _FROM_OUTSIDE:
            raise Interrupted(code)
        if not points:
            return
        if not culprit:
            raise CommError(f"measuring ended early, and not by a backend: a rank failed, as shown above (exit code {code})")
        left = [target for target in targets if target.backend != culprit]
        text = f"its ranks ended, or had to be ended because a call did not return (exit code {code}); more is said above"
        _blame([target for target in targets if target not in left], points, text, listen)
        targets = left


def _blame(targets: Sequence[Target], points: Sequence[Point], text: str, listen: Callable[[Record], None]) -> None:
    for point in points:
        for target in targets:
            listen(Problem(target.name, point.benchmark, point.nbytes, text))


class _Reader:
    """The data from a named pipe."""

    def __init__(self, fd: int, listen: Callable[[Record], None]) -> None:
        self._fd = fd
        self._listen = listen
        self.done: int = 0
        self.error: Exception | None = None

    def read(self) -> None:
        """Hand over records until an empty line comes."""
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._fd, 1 << 16)).split(b"\n")
            for line in lines:
                if not line:
                    return
                try:
                    self._take(decode_record(line))
                except UNREADABLE:  # a rank that was killed did not finish its line
                    continue
                except Exception as error:  # noqa: BLE001 - printing may fail in any way, but the pipe must not fill up
                    self.error = error

    def _take(self, record: Record) -> None:
        if isinstance(record, Done):
            self.done += 1
        else:
            self._listen(record)


@contextmanager
def _listening(stream: Path, listen: Callable[[Record], None]) -> Iterator[_Reader]:
    """Hand over the records that come through a named pipe, until the context ends."""
    # Open for writing as well, so that it does not end when rank 0 does, and so that the end can be said here.
    fd = os.open(stream, os.O_RDWR)
    reader = _Reader(fd, listen)
    thread = threading.Thread(target=reader.read, name="oneaccord-bench-reader")
    thread.start()
    try:
        yield reader
    finally:
        os.write(fd, b"\n\n")  # the first ends a line that a rank did not finish
        thread.join()
        os.close(fd)
    if reader.error is not None:
        raise reader.error
