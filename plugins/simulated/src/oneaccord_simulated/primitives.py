"""The waits of Python's threads, made the world's own while a world runs.

A simulated world moves its clock by proof: only when every thread of it waits for virtual time or for another thread of the world. So it must
see every wait. While a world runs, the blocking operations of Python look up whether the calling thread belongs to a world. In such a thread
a wait lets the others run; in any other thread it does what it always does. That holds for

- locks of both kinds, whenever and however they were made. Conditions, events, semaphores, barriers, `queue.Queue`, futures and pools are built
  on them;
- ``queue.SimpleQueue``, the start and the end of a `threading.Thread`, `time.sleep`, and event loops of asyncio.

Timeouts and naps pass virtual time. A wait for a lock that a thread outside of the world holds is real, and so is one for a file descriptor that
nothing in this process can make ready. A thread that the program has started may outlive the run; then these waits are real. All other waits in C, such as ``os.read``, are not seen: the thread keeps its turn, and the world stops
until it comes back.

The types of locks and of ``SimpleQueue`` are written in C and refuse new methods. `_replace` goes through the dictionary of such a type, which
is the only way to reach locks that were made before the world.
"""

from __future__ import annotations

import _queue
import _thread
import asyncio.base_events
import concurrent.futures.thread
import ctypes
import gc
import os
import queue
import selectors
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, Protocol

__all__ = ["World", "acquire", "in_earnest", "installed", "join", "members", "release", "start", "start_new"]


class World(Protocol):
    """The interface of its world for a thread that waits."""

    @property
    def now(self) -> float:
        """Seconds of the virtual clock."""

    @property
    def is_outlived(self) -> bool:
        """Whether the run is over, but not the calling thread."""

    @property
    def timeouts(self) -> int:
        """How many waits of the calling thread have ended by their timeout."""

    def wait_until(self, test: Callable[[], bool], timeout_s: float | None, what: str) -> bool:
        """Let other threads run until ``test()`` holds, for at most some virtual seconds; return whether it did.

        When it returns, the calling thread may belong to no world any more, or to another one.
        """

    def nap(self, seconds: float) -> None:
        """As `wait_until`, for nothing but the time."""

    def ask(self) -> None:
        """Note that the calling thread asked for something that has not happened, and may ask again and again."""

    def outside(self, what: str) -> AbstractContextManager[None]:
        """Let other threads run, but not the clock, until the context ends."""

    def start(self, thread: threading.Thread) -> None:
        """Start a thread of the world."""

    def start_new(self, action: Callable[[], None]) -> int:
        """As `start`, for a thread that `threading` does not know; return its identifier."""

    def has_ended(self, thread: threading.Thread) -> bool | None:
        """Return whether a thread of the world has ended; None for any other thread."""


_EXCESS_S = 1e-9
"""By how much a timeout is exceeded."""
_WITH_TURN_S = 5.0
"""How long, on the computer's clock, a thread waits for a lock of others without giving its turn away. The order in which the threads of the world
run does not depend on locks that others hold for a moment, such as that of a log."""

members: dict[int, World] = {}
"""The world of each thread that belongs to one, by the thread's identifier."""
_holders: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()
"""The world whose thread holds a lock."""

_Lock, _RLock = _thread.LockType, _thread.RLock
acquire: Callable[..., bool] = _Lock.acquire
release: Callable[..., None] = _Lock.release
start: Callable[[threading.Thread], None] = threading.Thread.start
start_new: Callable[..., int] = _thread.start_new_thread
join: Callable[..., None] = threading.Thread.join
"""Python's originals, for the world itself."""
_acquire_again: Callable[..., bool] = _RLock.acquire
_release_again: Callable[..., None] = _RLock.release
_get: Callable[..., Any] = _queue.SimpleQueue.get
_wait: Callable[..., bool] = threading.Condition.wait
_get_checked: Callable[..., Any] = queue.Queue.get
_put_checked: Callable[..., None] = queue.Queue.put
_is_alive: Callable[[threading.Thread], bool] = threading.Thread.is_alive
_is_done: Callable[[Any], bool] = concurrent.futures.Future.done
_shutdown: Callable[..., None] = concurrent.futures.ThreadPoolExecutor.shutdown
_waitpid: Callable[[int, int], tuple[int, int]] = os.waitpid
_sleep: Callable[[float], None] = time.sleep
_loop_time: Callable[[Any], float] = asyncio.base_events.BaseEventLoop.time
_monotonic: Callable[[], float] = time.monotonic


@contextmanager
def in_earnest() -> Iterator[None]:
    """Let the calling thread wait as in any other program, without giving its turn away, until the context ends."""
    ident = get_ident()
    world = members.pop(ident, None)
    try:
        yield
    finally:
        if world is not None and not world.is_outlived:
            members[ident] = world


# Locks


def _take(world: World, lock: Any, take: Callable[..., bool], blocking: bool, timeout: float, what: str = "for a lock") -> bool:
    if not blocking or (timeout < 0 and timeout != -1):  # it is not for this world to say that such a timeout is wrong
        taken = take(lock, blocking, timeout)
        if taken:
            _holders[lock] = world
        return taken
    until = None if timeout == -1 else world.now + timeout
    while not take(lock, False):
        left = None if until is None else max(0.0, until - world.now)
        if _holders.get(lock) is not world:
            return _take_from_others(world, lock, take, left, what)
        if not world.wait_until(lambda: _is_free(lock), left, what):
            return False
        if members.get(get_ident()) is not world:
            return bool(lock.acquire(True, -1 if until is None else max(0.0, until - world.now)))
    _holders[lock] = world
    return True


def _take_from_others(world: World, lock: Any, take: Callable[..., bool], left: float | None, what: str) -> bool:
    """As `_take`, of threads that do not belong to this world, for at most some seconds."""
    with_turn = _WITH_TURN_S if left is None else min(left, _WITH_TURN_S)
    taken = take(lock, True, with_turn)
    if taken:
        _holders[lock] = world
    elif left is None or left > with_turn:
        with world.outside(what):
            taken = take(lock, True, -1 if left is None else left - with_turn)
            if taken:
                _holders[lock] = world
    return taken


def _is_free(lock: Any) -> bool:
    """Return whether a lock can be had by another thread than the one that asks, without taking it."""
    return not (lock.locked() if isinstance(lock, _Lock) else repr(lock).startswith("<locked"))


def _taking(take: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that takes a lock, instead of the method that does."""

    def take_in_world(self: Any, blocking: bool = True, timeout: float = -1) -> bool:
        world = members.get(get_ident())
        return take(self, blocking, timeout) if world is None else _take(world, self, take, blocking, timeout)

    return take_in_world


def _lock_release(self: Any, *_: object) -> None:
    _holders.pop(self, None)
    release(self)


def _rlock_release(self: Any, *_: object) -> None:
    world = _holders.pop(self, None) if self._is_owned() else None  # first: the next thread that takes it notes that it does
    _release_again(self)
    if world is not None and self._is_owned():
        _holders[self] = world


class _Through:
    """A method of a condition's lock, which a condition that was made before the world has kept as it was then."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, condition: Any, _: type) -> Any:
        return self if condition is None else getattr(condition._lock, self._name)

    def __set__(self, condition: Any, value: Any) -> None:
        vars(condition)[self._name] = value


def _condition_wait(self: Any, timeout: float | None = None) -> bool:
    """As `threading.Condition.wait`, whose last step takes a lock in C."""
    world = members.get(get_ident())
    if world is None:
        return _wait(self, timeout)
    if not self._is_owned():
        raise RuntimeError("cannot wait on un-acquired lock")
    waiter = _thread.allocate_lock()
    waiter.acquire()
    self._waiters.append(waiter)
    saved = self._release_save()
    _holders.pop(self._lock, None)
    told = False
    try:
        if timeout is None or timeout > 0:
            at_most = -1 if timeout is None else timeout
            told = _take(world, waiter, acquire, True, at_most, "for an event, a queue or a condition")
        else:
            told = acquire(waiter, False)
            if not told:
                world.ask()
        return told
    finally:
        if isinstance(self._lock, _RLock):
            self._lock.acquire()
            self._lock.release()  # no thread of this world can take it before the next line
        self._acquire_restore(saved)
        if isinstance(self._lock, _RLock) and members.get(get_ident()) is world:
            _holders[self._lock] = world
        if not told and waiter in self._waiters:
            self._waiters.remove(waiter)


def _event_is_set(self: Any) -> bool:
    if not self._flag:
        _asked()
    return bool(self._flag)


def _future_done(self: Any) -> bool:
    if not _is_done(self):
        _asked()
    return _is_done(self)


def _pool_shutdown(self: Any, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """As that of a pool, which keeps its threads in a set and waits for them in the order of their addresses."""
    if get_ident() not in members:
        _shutdown(self, wait, cancel_futures=cancel_futures)
        return
    _shutdown(self, False, cancel_futures=cancel_futures)
    for thread in sorted(self._threads, key=lambda thread: (len(thread.name), thread.name)) if wait else []:
        thread.join()


def _thread_is_alive(self: threading.Thread) -> bool:
    if _is_alive(self):
        _asked()
    return _is_alive(self)


def _queue_get_checked(self: Any, block: bool = True, timeout: float | None = None) -> Any:
    try:
        return _get_checked(self, block, timeout)
    except queue.Empty:
        _asked()
        raise


def _queue_put_checked(self: Any, item: Any, block: bool = True, timeout: float | None = None) -> None:
    try:
        _put_checked(self, item, block, timeout)
    except queue.Full:
        _asked()
        raise


def _wait_for_program(pid: int, options: int, /) -> tuple[int, int]:
    world = members.get(get_ident())
    if world is None or options:
        return _waitpid(pid, options)
    with world.outside("for another program"):
        return _waitpid(pid, options)


# Queues, threads, time, event loops and other programs


def _asked() -> None:
    """Note that the calling thread asked for something that is not so yet."""
    world = members.get(get_ident())
    if world is not None:
        world.ask()


def _queue_get(self: Any, block: bool = True, timeout: float | None = None) -> Any:
    world = members.get(get_ident())
    if world is not None and not block and self.empty():
        world.ask()
    if world is None or not block or (timeout is not None and timeout < 0):
        return _get(self, block, timeout)
    until = None if timeout is None else world.now + timeout
    while True:
        try:
            return _get(self, False)
        except queue.Empty:
            left = None if until is None else max(0.0, until - world.now)
            if not world.wait_until(lambda: not self.empty(), left, "for an item of a queue"):
                raise
            if members.get(get_ident()) is not world:
                return self.get(True, left)


def _thread_start(self: threading.Thread) -> None:
    world = members.get(get_ident())
    if world is None or self.name.startswith("oneaccord-"):  # those serve sockets, and are no part of any world
        with in_earnest():
            start(self)
    else:
        world.start(self)


def _thread_start_new(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /) -> int:
    world = members.get(get_ident())
    if world is None:
        return start_new(function, args, kwargs or {})

    def action() -> None:
        function(*args, **(kwargs or {}))

    return world.start_new(action)


def _thread_join(self: threading.Thread, timeout: float | None = None) -> None:
    world = members.get(get_ident())
    ended = None if world is None else world.has_ended(self)
    if world is not None and ended is not None and self is not threading.current_thread():
        if not world.wait_until(lambda: world.has_ended(self) is not False, timeout, f"for the thread {self.name} to end"):
            return
        timeout = None if world.has_ended(self) is not False else timeout
    with in_earnest():
        join(self, timeout)


def _time_sleep(seconds: float, /) -> None:
    world = members.get(get_ident())
    if world is None or not seconds >= 0:
        _sleep(seconds)
    else:
        world.nap(seconds)


def _now() -> float:
    """Return the time for those modules of Python that count the rest of a timeout."""
    world = members.get(get_ident())
    return _monotonic() if world is None else world.now


class _Clock:
    """The module `time` for `concurrent.futures`, which takes a timeout for over only when it has been exceeded."""

    @staticmethod
    def monotonic() -> float:
        world = members.get(get_ident())
        return _monotonic() if world is None else world.now + _EXCESS_S * world.timeouts


def _event_loop_time(self: Any) -> float:
    world = members.get(get_ident())
    return _loop_time(self) if world is None else world.now


def _selecting(select: Callable[..., Any]) -> Callable[..., Any]:
    def select_in_world(self: Any, timeout: float | None = None) -> Any:
        world = members.get(get_ident())
        if world is None:
            return select(self, timeout)
        ready = select(self, 0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            world.ask()
            return select(self, 0)
        if not all(map(_is_of_this_process, list(self.get_map().values()))):
            until = None if timeout is None else world.now + timeout
            with world.outside("for a file descriptor"):
                ready = select(self, timeout)
            if ready or until is None or members.get(get_ident()) is not world:
                return ready
            timeout = max(0.0, until - world.now)
        world.wait_until(lambda: bool(select(self, 0)), timeout, "in its event loop")
        return select(self, 0)

    return select_in_world


def _is_of_this_process(key: selectors.SelectorKey) -> bool:
    """Return whether only this process can make a file descriptor ready: an event loop's own, or a pipe of which it has both ends."""
    reader = key.data[0] if isinstance(key.data, tuple) and key.data else None
    if getattr(getattr(reader, "_callback", None), "__name__", "") == "_read_from_self":
        return True
    try:
        mine = os.fstat(key.fd)
        return stat.S_ISFIFO(mine.st_mode) and any(
            _is_another_end(int(each.name), key.fd, mine) for each in Path("/dev/fd").iterdir()
        )
    except OSError:
        return False


def _is_another_end(fd: int, end: int, pipe: os.stat_result) -> bool:
    try:
        return fd != end and os.path.samestat(os.fstat(fd), pipe)
    except OSError:  # such as the one that listed them
        return False


def _waiting_outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of `subprocess.Popen` wait outside: it counts on the computer's clock, and naps meanwhile."""

    def wait_outside(self: Any, *args: Any, **kwargs: Any) -> Any:
        world = members.get(get_ident())
        if world is None:
            return method(self, *args, **kwargs)
        with world.outside("for another program"):
            return method(self, *args, **kwargs)

    return wait_outside


# Putting them in place

_SELECTORS = {  # the classes that define it: some inherit it
    next(owner for owner in getattr(selectors, name).__mro__ if "select" in vars(owner))
    for name in ("EpollSelector", "PollSelector", "SelectSelector", "DevpollSelector", "KqueueSelector")
    if hasattr(selectors, name)
}
_take_lock, _take_rlock = _taking(acquire), _taking(_acquire_again)
_ours: list[tuple[Any, str, Any]] = [
    *((_Lock, name, _take_lock) for name in ("acquire", "acquire_lock", "__enter__")),
    *((_Lock, name, _lock_release) for name in ("release", "release_lock", "__exit__")),
    *((_RLock, name, _take_rlock) for name in ("acquire", "__enter__")),
    *((_RLock, name, _rlock_release) for name in ("release", "__exit__")),
    *((threading.Condition, name, _Through(name)) for name in ("acquire", "release")),
    (_queue.SimpleQueue, "get", _queue_get),
    (threading.Condition, "wait", _condition_wait),
    (threading.Event, "is_set", _event_is_set),
    (concurrent.futures.Future, "done", _future_done),
    (concurrent.futures.ThreadPoolExecutor, "shutdown", _pool_shutdown),
    (queue.Queue, "get", _queue_get_checked),
    (queue.Queue, "put", _queue_put_checked),
    (threading.Thread, "is_alive", _thread_is_alive),
    (os, "waitpid", _wait_for_program),
    (subprocess.Popen, "wait", _waiting_outside(subprocess.Popen.wait)),
    (subprocess.Popen, "communicate", _waiting_outside(subprocess.Popen.communicate)),
    (threading.Thread, "start", _thread_start),
    (_thread, "start_new_thread", _thread_start_new),
    (threading.Thread, "join", _thread_join),
    (threading, "_time", _now),
    (queue, "time", _now),
    (concurrent.futures._base, "time", _Clock),
    (time, "sleep", _time_sleep),
    (asyncio.base_events.BaseEventLoop, "time", _event_loop_time),
    *((kind, "select", _selecting(kind.select)) for kind in _SELECTORS),
]
_ABSENT = object()
_pythons = [vars(owner).get(name, _ABSENT) for owner, name, _ in _ours]
_installing = threading.Lock()
_worlds: set[object] = set()
_before: list[tuple[Any, str, Any]] = []
_seen: dict[str, int] = {name: id(sys.modules[name]) for name in ("time", __name__)}
_names: list[tuple[weakref.ref[ModuleType], str]] = []
"""The modules that have been looked through, and the names by which they call `time.sleep`."""


@contextmanager
def installed() -> Iterator[None]:
    """Let threads that belong to a world wait in it, until the context ends; worlds may run at once."""
    me = object()
    try:
        with in_earnest(), _installing:
            if not _worlds:
                _install()
            _worlds.add(me)
        yield
    finally:
        with in_earnest(), _installing:
            _worlds.discard(me)
            if not _worlds:
                _replace(_before)
                _holders.clear()


def _install() -> None:
    """Put our own members in the place of Python's; a test's own replacement, say of `time.sleep`, stays."""
    pythons = [each for each, python in zip(_ours, _pythons, strict=True) if vars(each[0]).get(each[1], _ABSENT) is python]
    ours = [*pythons, *_sleepers()]
    _before[:] = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in ours]
    _replace(ours)


def _in_child() -> None:
    """Give a forked child, which is not part of any world, Python's originals."""
    members.clear()
    _holders.clear()
    if _worlds:
        _worlds.clear()
        _replace(_before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _sleepers() -> list[tuple[Any, str, Any]]:
    """Return the replacements in modules that hold `time.sleep` by a name of their own: ``from time import sleep``."""
    for title, module in list(sys.modules.items()):
        if _seen.get(title) != id(module) and isinstance(module, ModuleType):
            _seen[title] = id(module)
            names = [name for name, value in list(vars(module).items()) if value is _sleep]
            _names.extend((weakref.ref(module), name) for name in names)
    found = [(reference(), name) for reference, name in _names]
    return [(module, name, _time_sleep) for module, name in found if module is not None and vars(module).get(name) is _sleep]


def _replace(replacements: list[tuple[Any, str, Any]]) -> None:
    """Give classes and modules other members, also those types that are written in C."""
    for owner, name, value in replacements:
        if owner in (_Lock, _RLock, _queue.SimpleQueue):
            gc.get_referents(vars(owner))[0][name] = value
        elif value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
    for kind in (_Lock, _RLock, _queue.SimpleQueue):
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
