"""Threads outside of the simulated world: those that a program starts itself, and ranks that wait for them.

While a rank waits for a lock, a queue, an event loop or a thread of its own, it holds the baton, and whoever should release it may need that.
So when the thread with the baton does nothing but wait for that, it counts as outside, and a thread that the program started does so whatever
it waits for. When it next has to do with the world, it waits for its turn like all others.
"""

from __future__ import annotations

import concurrent.futures
import dis
import os
import queue
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import manyhands.api
from manyhands.api import current_frames
from manyhands_simulated.task import ENDED, OUTSIDE, Task

__all__ = ["FORSAKEN_S", "LOOK_S", "OURS", "Outside", "Patience", "patience"]

LOOK_S: float = 0.02
"""How often, on the computer's clock, to look whether the thread with the baton waits for something outside."""
_LOOKS = 3
"""How often in a row it must have been seen waiting."""
_HELP_S = 2.5
"""For how long threads outside, of which nothing is known, may still be about to help those that can not go on."""
FORSAKEN_S: float = 30.0
"""For how long nothing at all may happen while threads outside wait."""
_ASYNCIO = os.path.join(os.path.dirname(str(selectors.__file__)), "asyncio", "")  # noqa: PTH118, PTH120 - compared with names of files
_FUTURES = os.path.dirname(str(concurrent.futures.__file__)) + os.sep  # noqa: PTH120 - compared with names of files
_WAITING_ROOMS = (str(threading.__file__), str(queue.__file__), _FUTURES, "<frozen importlib._bootstrap>")

_IDLE_S, _IDLE_SHARE = 2.0, 0.1
"""After how long a thread counts as waiting that does nearly nothing, such as look again and again and sleep in between; and how much of the
time that is."""
_BUSY_SHARE = 0.3
"""How much of the time the process computes, at least, where it counts as doing something for those that wait."""
OURS: tuple[str, ...] = tuple(str(Path(file).parent) + os.sep for file in (str(manyhands.api.__file__), __file__))
"""The folders of our own modules."""
_LIBRARY, _SITE = str(Path(str(threading.__file__)).parent) + os.sep, "-packages" + os.sep
_COMING_S = 1.0
"""For how long a thread of the program that does something else may keep those waiting that let it go first."""
_BIRTH_S = 0.001
"""How long a thread that was just started may take to be seen."""


class Patience:
    """For how many seconds in all threads of the program, which do something else, may yet be waited for in vain.

    Those that wait for a lock, a queue or the like are not waited for.

    Attributes
    ----------
    left_s
        The seconds that are left.
    """

    def __init__(self) -> None:
        self.left_s: float = _COMING_S


patience: ContextVar[Patience | None] = ContextVar("patience", default=None)
"""What the runs of one exploration share."""


_WORLD = "_manyhands_world"
"""What the attribute is called that tells the world of a thread of a rank, and of those that such threads have started."""
_watching = threading.Lock()
_watchers = 0
_start = threading.Thread.start
"""What `threading` has, or whoever else has replaced it before."""


@contextmanager
def _watched() -> Iterator[None]:
    """Let threads that are started be known as those of their world, until the context ends."""
    global _watchers, _start  # noqa: PLW0603 - worlds may run at once
    with _watching:
        _watchers += 1
        if _watchers == 1:
            _start = threading.Thread.start
            threading.Thread.start = _start_watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _watching:
            _watchers -= 1
            if _watchers == 0:
                threading.Thread.start = _start  # type: ignore[method-assign]


def _start_watched(thread: threading.Thread) -> None:
    world: Outside | None = getattr(threading.current_thread(), _WORLD, None)
    if world is not None and not hasattr(thread, _WORLD) and not thread.name.startswith("manyhands-"):
        world.adopt(thread)
    _start(thread)


class Outside:
    """The threads outside, for one scheduler.

    Attributes
    ----------
    ours
        The identifiers of all threads that the scheduler started.
    """

    def __init__(self) -> None:
        self.ours: set[int] = set()
        self._lock = threading.Lock()
        self._returned: list[Task] = []
        self._gone: dict[int, Task] = {}
        self._seen: tuple[object, ...] = ()
        self._looks = 0
        self._since: tuple[int, float, float] = (-1, 0.0, 0.0)
        self._before = _threads()
        self._program: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._patience = patience.get() or Patience()
        self._since_coming: float | None = None
        self._idle_since: float | None = None
        self._asked = 0.0
        self._busy = 0.0
        self._gave_up = False
        self._expected = False

    @property
    def is_ours(self) -> bool:
        """Whether the scheduler started the calling thread."""
        return threading.get_ident() in self.ours

    def come_back(self) -> Task:
        """Let the calling thread queue up; return its task, to which the baton will be given."""
        ident = threading.get_ident()
        with self._lock:
            task = self._gone.pop(ident, None)
            if task is None or task.native_id != threading.get_native_id():  # one that has ended had the same name
                task = Task(-1, 0, _nothing)
                task.started = task.is_foreign = True
                task.ident, task.native_id = ident, threading.get_native_id()
            task.is_leaving = False
            self._returned.append(task)
        return task

    def is_gone(self, task: Task) -> bool:
        """Tell whether the calling thread, which was about to count as outside, does."""
        with self._lock:
            return task.is_leaving

    def returned(self) -> list[Task]:
        """Return the tasks that have queued up since the last time."""
        if not self._returned:
            return []
        with self._lock:
            returned, self._returned = self._returned, []
        if self._since_coming is not None:
            self._since_coming, self._patience.left_s = None, _COMING_S
        self.expect_help()
        return returned

    def has_gone(self, task: Task, switches: int) -> bool:
        """Tell whether the thread with the baton waits for something outside, or is no more; asked again and again.

        ``switches`` is how often the baton was passed on.
        """
        frame = current_frames().get(task.ident)
        used = _used(task)
        if frame is None or used is None:
            if task.is_foreign:
                task.state = ENDED
            return task.is_foreign
        if frame.f_code is Task.take_baton.__code__:  # it is its turn, and who passes the baton on to it has no processor
            return False
        busy, sleeps = used
        seen = (task, frame.f_code, frame.f_lasti, busy)
        self._looks = self._looks + 1 if sleeps and seen == self._seen else 0
        self._seen = seen
        waits = self._looks >= _LOOKS and (task.is_foreign or _waits(frame))
        if not waits and not self._idles(switches, busy):
            return False
        self._looks, self._seen, self._since = 0, (), (-1, 0.0, 0.0)
        with self._lock:
            # It may go on at any moment. From here on it asks first, so that one more look tells whether it has not.
            task.is_leaving = True
            frame = current_frames().get(task.ident)
            if waits:
                task.is_leaving = frame is not None and (task, frame.f_code, frame.f_lasti) == seen[:3] and _used(task) == used
            else:
                task.is_leaving = not _is_in_call(frame)
            if not task.is_leaving:
                return False
            task.state = OUTSIDE
            task.comes_back = not waits or _sleeps(frame)
            self._gone[task.ident] = task
        self._idle_since = None
        return True

    def _idles(self, switches: int, busy: float) -> bool:
        """Tell whether the thread with the baton has done next to nothing for a while."""
        now = time.monotonic()
        if switches != self._since[0]:
            self._since = (switches, now, busy)
        _, begin, before = self._since
        return sys.platform == "linux" and now - begin > _IDLE_S and busy - before < _IDLE_SHARE * (now - begin)

    def watched(self) -> AbstractContextManager[None]:
        """Take note of the threads that the program starts, until the context ends."""
        return _watched()

    def adopt(self, thread: threading.Thread, *, is_ours: bool = False) -> None:
        """Take note of a thread of this world, which is about to start."""
        setattr(thread, _WORLD, self)
        if not is_ours:
            self._program.add(thread)

    def are_there_threads_of_the_program(self) -> bool:
        """Tell whether threads live that the program has started itself."""
        return any(thread.is_alive() for thread in list(self._program))

    def may_come(self) -> bool:
        """Tell whether a thread of the program does something after which it may come by itself; asked again and again."""
        now = time.monotonic()
        if self._since_coming is not None:
            self._patience.left_s -= now - self._since_coming
        self._since_coming = None
        if self._returned:
            return True
        if self._patience.left_s > 0:
            frames = current_frames()
            frames.pop(threading.get_ident())
            others = [frames[thread.ident] for thread in list(self._program) if thread.ident in frames]
            if not all(map(_waits, others)):
                self._since_coming = now
        return self._since_coming is not None

    def expect_help(self) -> None:
        """Wait once more for help from outside: something has happened."""
        self._idle_since, self._gave_up = None, False

    def may_help(self) -> bool:
        """Tell whether threads outside may still do something for those that can not go on."""
        if self._gave_up:
            return False
        if self._are_there():
            return True
        time.sleep(_BIRTH_S)
        return self._are_there()

    def comes_back(self) -> bool:
        """Tell whether a rank is outside that will come back, as far as can be told: it sleeps, or the program has threads of its own.

        Otherwise it waits for something that another rank is to do.
        """
        with self._lock:
            ranks = [task for task in self._gone.values() if task.state is OUTSIDE and not task.is_foreign]
        expected = any(task.comes_back for task in ranks) or (bool(ranks) and not _threads() <= self.ours | self._before)
        if self._expected and not expected:  # whom it waited for has just ended, and it may be on its way
            self.expect_help()
            self._expected = False
            return True
        self._expected = expected
        return expected

    def is_time_to_go_on(self) -> bool:
        """Tell whether somebody has come back, or has not for so long that nobody will, or nobody is left; asked again and again."""
        if self._returned:
            return True
        if not self.may_help():
            return True
        now, busy = time.monotonic(), time.process_time()
        if self._idle_since is None:
            self._idle_since = self._asked = now
            self._busy = busy
        elif now - self._asked < FORSAKEN_S and (
            busy - self._busy > _BUSY_SHARE * (now - self._asked) or self._is_somebody_awake()
        ):
            self._idle_since = now  # somebody computes, or would if the machine let it
        self._gave_up = now - self._idle_since > _HELP_S
        return self._gave_up

    def is_forsaken(self) -> bool:
        """Tell whether threads outside have waited for so long, with nothing else happening, that nobody will help them."""
        return self._idle_since is not None and time.monotonic() - self._idle_since > FORSAKEN_S

    def close(self) -> None:
        """Let whoever waits for the baton go on, to find that the run is over."""
        with self._lock:
            returned, self._returned = self._returned, []
        for task in returned:
            task.give_baton()

    def _are_there(self) -> bool:
        """Tell whether there are threads that were not there before the run, and are not the scheduler's."""
        threads = _threads()
        with self._lock:
            natives = {thread.ident: thread.native_id for thread in threading.enumerate()}
            for ident, task in list(self._gone.items()):
                if (
                    ident not in threads or natives.get(ident, task.native_id) != task.native_id
                ):  # another one may have its name by now
                    self._gone.pop(ident).state = ENDED
            helpers = any(task.state is OUTSIDE for task in self._gone.values())
            return helpers or not threads <= self.ours | self._before | self._gone.keys()

    def _is_somebody_awake(self) -> bool:
        """Tell whether a thread outside does not sleep: it may be on its way here, and wait for a processor."""
        with self._lock:
            gone = [task for task in self._gone.values() if task.state is OUTSIDE]
        return any(used is not None and not used[1] for used in map(_used, gone))

    def holds(self, task: Task) -> bool:
        """Tell whether a thread is outside."""
        return self._gone.get(task.ident) is task


def _threads() -> set[int | None]:
    """Return the identifiers of all threads, also of those that `threading` does not know; but not of those that serve our sockets.

    Where the simulated backend is composed with others, ranks ask these again and again, and wait for none of their threads.
    """
    known = threading.enumerate()
    ours = {thread.ident for thread in known if thread.name.startswith("manyhands-")}
    return ({thread.ident for thread in known} | current_frames().keys()) - ours


def _used(task: Task) -> tuple[float, bool] | None:
    """Return for how many seconds a thread has had a processor or been kept waiting for one, and whether it wants none now.

    None where the thread is no more. A thread that is kept waiting does nothing either, but it is not it that waits.
    """
    if sys.platform != "linux":
        return 0.0, True
    folder = Path(f"/proc/self/task/{task.native_id}")
    try:
        state, *counts = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    try:
        busy, kept_waiting, _ = (folder / "schedstat").read_bytes().split()
    except OSError:  # the kernel does not say, and all that is left are ticks
        return (int(counts[10]) + int(counts[11])) / os.sysconf("SC_CLK_TCK"), state == b"S"
    return (int(busy) + int(kept_waiting)) / 1e9, state == b"S"


def _is_in_call(frame: FrameType | None) -> bool:
    """Tell whether a thread is in a call of ours, or no more."""
    while (
        frame is not None
        and frame.f_code.co_filename.startswith((_LIBRARY, "<frozen "))
        and _SITE not in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(OURS)


def _waits(frame: FrameType) -> bool:
    """Tell whether a thread that does nothing waits for another one."""
    file = frame.f_code.co_filename
    if file == selectors.__file__:
        return frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_ASYNCIO)
    return file.startswith(_WAITING_ROOMS) or _takes_lock(frame)


def _sleeps(frame: FrameType | None) -> bool:
    """Tell whether a thread that waits in an event loop has something to do there later."""
    timeout = frame.f_locals.get("timeout") if frame is not None and frame.f_code.co_filename == selectors.__file__ else None
    return isinstance(timeout, int | float) and timeout > 0


def _takes_lock(frame: FrameType) -> bool:
    """Tell whether a frame is at ``lock.acquire()``, or at the beginning of ``with lock:``; neither has a frame of its own."""
    name = ""
    for each in dis.get_instructions(frame.f_code):
        if each.offset >= frame.f_lasti:
            return each.opname == "BEFORE_WITH" or name == "acquire"
        if each.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_SPECIAL"):
            name = each.argval if each.opname != "LOAD_SPECIAL" else "acquire"
    return False


def _nothing() -> None:
    pass
