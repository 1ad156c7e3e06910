"""Which threads of this process could still come to the rescue of a rank that waits.

What is known here must never be better than the truth: a thread counts as blocked no longer than until somebody wakes it, not
until it runs again, which the interpreter may leave for later.
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


_bystanders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
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
    _bystanders.add(thread)


def begin_to_help(helper: Helper) -> None:
    """Take note that a background thread has something to do."""
    global _move  # noqa: PLW0603 - assigning a new object is atomic, which counting is not
    _move = object()
    _helpers.add(helper)


def end_of_help(helper: Helper) -> None:
    """Take note that a background thread has nothing to do any more."""
    _helpers.discard(helper)


def blocked(ident: int) -> None:
    """Take note that a thread waits for a call to end, and does nothing else."""
    global _move  # noqa: PLW0603 - as above
    _move = object()
    _blocked.add(ident)


def released(ident: int) -> None:
    """Take note that a thread goes on."""
    _blocked.discard(ident)


_SLICE_S = 0.5
"""How long a thread sleeps at most before it looks for signals: Python does not wake it for one that came just before it fell asleep."""


class Sleeper:
    """The calling thread, which is about to wait until it is woken.

    To be made under the lock that whoever wakes it holds as well, so that no wake-up is missed.

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
        """Wait to be woken, for at most ``timeout_s`` seconds; tell whether it was. Not twice."""
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
        try:  # noqa: SIM105 - what it says costs three calls, while the thread waits
            self._asleep.release()
        except RuntimeError:  # it has been woken before
            pass


def nobody_else(home: threading.Thread, since: object | None = None) -> bool:
    """Tell whether no thread but the calling one could make a call for the rank of the thread ``home``.

    Every other thread waits for a call to end, or is manyhands' own and has nothing to do, or is that of another rank. ``since`` is
    what `last_move` returned before the caller looked at other things that must have been so at the same time.
    """
    before = _move if since is None else since
    me = threading.get_ident()
    helpers = all(helper.ident is not None and (helper.ident == me or helper.ident in _blocked) for helper in list(_helpers))
    known = threading.enumerate()
    threads = not _strangers(known) and all(
        thread.ident == me
        or thread.ident in _blocked
        or thread.name.startswith("manyhands")
        or (thread is not home and thread in _bystanders)
        for thread in known
    )
    return helpers and threads and _move is before


def _strangers(known: list[threading.Thread]) -> bool:
    """Tell whether there are threads that `threading` did not start, and of which nothing is known."""
    return not current_frames().keys() <= {thread.ident for thread in known}


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread of the process, by the identifier of the thread.

    All look at other threads through this. `sys._current_frames` holds a lock of the interpreter, which every thread needs that begins or
    ends. Before Python 3.12 its own allocations can start the garbage collector, whose callbacks and finalizers let such a thread run; it then
    waits for that lock and keeps the interpreter, and all stands still (python/cpython#106883, mended in 3.11.9). So the collector is off
    meanwhile; and from its being off to its being on again no line of Python runs, so that neither another thread nor a signal can come between.
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
