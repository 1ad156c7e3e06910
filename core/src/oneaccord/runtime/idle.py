"""Which threads of this process could still come to the rescue of a rank that waits.

This must never claim more than the truth: a thread counts as blocked only until another one wakes it, not
until it runs again, which the interpreter may postpone.
"""

from __future__ import annotations

import gc
import math
import operator
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

__all__ = [
    "Helper",
    "Sleeper",
    "begin_to_help",
    "blocked",
    "current_frames",
    "end_of_help",
    "last_move",
    "nobody_else",
    "released",
    "stands_by",
]


class Helper(Protocol):
    """A background thread that makes calls for others; ``ident`` is None until it runs."""

    ident: int | None


_idle_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_blocked: set[int] = set()
_helpers: set[Helper] = set()
_move = object()
_NOBODY = 0
"""No thread has this identifier."""


def last_move() -> object:
    """Return something that is another object whenever a thread has passed work on or begun to wait in between.

    Looking at one thread after the other is no snapshot, unless nothing has moved from the first look to the last.
    """
    return _move


def stands_by(thread: threading.Thread) -> None:
    """Take note that a thread is another rank's own, or only waits for threads that are."""
    _idle_threads.add(thread)


def begin_to_help(helper: Helper) -> None:
    """Take note that a background thread has something to do."""
    global _move  # noqa: PLW0603 - assigning a new object is atomic, which counting is not
    _move = object()
    _helpers.add(helper)


def end_of_help(helper: Helper) -> None:
    """Take note that a background thread has no work any more."""
    _helpers.discard(helper)


def blocked(ident: int) -> None:
    """Take note that a thread only waits for a call to end."""
    global _move  # noqa: PLW0603 - as above
    _move = object()
    _blocked.add(ident)


def released(ident: int) -> None:
    """Take note that a thread continues."""
    _blocked.discard(ident)


_SLICE_S = 0.5
"""How long a thread sleeps at most before it looks for signals: Python does not wake it for one that came just before it fell asleep."""


class Sleeper:
    """The calling thread, which is about to wait until it is woken.

    To be called under the lock that the waking thread holds as well, so that no wake-up is missed.

    Parameters
    ----------
    for_good
        Whether it does nothing else until then, and so counts as blocked from now until it is woken.
    """

    __slots__ = ("_asleep", "_ident")

    def __init__(self, *, for_good: bool) -> None:
        # A bare lock, which is held until the thread is woken: a `threading.Event` costs ten calls of Python to make, wait for and set.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._ident = _NOBODY
        if for_good:
            self._ident = threading.get_ident()
            blocked(self._ident)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the wake-up, for at most ``timeout_s`` seconds; return whether it came. Not twice."""
        left_s = math.inf if timeout_s is None else max(timeout_s, 0.0)
        try:
            while left_s > _SLICE_S:
                if self._asleep.acquire(timeout=_SLICE_S):
                    return True
                left_s -= _SLICE_S
            return self._asleep.acquire(timeout=left_s)
        finally:
            _blocked.discard(self._ident)

    def wake(self) -> None:
        """Wake the thread; twice is fine."""
        released(self._ident)
        try:  # noqa: SIM105 - suppress() costs three calls, while the thread waits
            self._asleep.release()
        except RuntimeError:  # it has been woken before
            pass


def nobody_else(home: threading.Thread, since: object | None = None) -> bool:
    """Return whether no thread but the calling one could make a call for the rank of the thread ``home``.

    Every other thread waits for a call to end, or is oneaccord' own and has nothing to do, or is that of another rank. ``since`` is
    the result of `last_move` before the caller looked at other things that must have been so at the same time.
    """
    before = _move if since is None else since
    me = threading.get_ident()
    helpers = all(helper.ident is not None and (helper.ident == me or helper.ident in _blocked) for helper in list(_helpers))
    known = threading.enumerate()
    threads = not _strangers(known) and all(
        thread.ident == me
        or thread.ident in _blocked
        or thread.name.startswith("oneaccord")
        or (thread is not home and thread in _idle_threads)
        for thread in known
    )
    return helpers and threads and _move is before


def _strangers(known: list[threading.Thread]) -> bool:
    """Return whether there are threads that `threading` did not start, and of which nothing is known."""
    return not current_frames().keys() <= {thread.ident for thread in known}


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread of the process, by the identifier of the thread.

    All code looks at other threads through this. `sys._current_frames` holds a lock of the interpreter that every thread needs when it begins or
    ends. Before Python 3.12 its own allocations can start the garbage collector, whose callbacks and finalizers let such a thread run. That thread then
    waits for the lock and keeps the interpreter, so that everything hangs (python/cpython#106883, mended in 3.11.9). So the collector is off
    meanwhile. While it is off, no line of Python runs, so that neither another thread nor a signal can intervene.
    """
    if gc.isenabled():
        found: list[Any] = list(map(operator.call, (gc.disable, sys._current_frames, gc.enable)))  # noqa: TID251 - the one place
        frames: dict[int, FrameType] = found[1]
    else:
        frames = sys._current_frames()  # noqa: TID251 - as above
    # Its own frame would hold itself, through `frames`, and with it the frames of all threads and their arrays until the collector comes.
    frames[threading.get_ident()] = sys._getframe(1)
    return frames


def _in_child() -> None:
    """Forget the parent's threads, which a forked child does not have."""
    _blocked.clear()
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
