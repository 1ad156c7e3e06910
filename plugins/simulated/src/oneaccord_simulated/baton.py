"""Threads that pass a baton: one thread of a world runs at a time.

Every rank is a thread, and so are a rank's work in the background and the threads that the program starts itself. Only the thread that holds the
baton runs. The `Scheduler` decides which thread is next.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

from oneaccord.api import AbortedError, Thread, UsageError, current_frames, inherit_rank
from oneaccord_simulated.outside import Outside
from oneaccord_simulated.primitives import World, in_earnest, installed, join, members, start, start_new
from oneaccord_simulated.task import DEAD, ENDED, RUNNING, Stopped, Task

__all__ = ["Baton"]

_PATIENCE_S = 2.0
"""How long, on the computer's clock, a thread may take to end once the run is over."""
_LOOK_S = 0.25
"""The interval, on the computer's clock, of the look for the end of threads that the world did not start, whose end it does not see, and for
the end of the run. A Ctrl-C that comes just as the waiting thread falls asleep is seen then, too."""
_REPORT_S, _FORSAKEN_S = 30.0, 300.0
"""The time on the computer's clock after which a thread that does not give up its turn is reported; and the time after which it ends the run, if the
process computes nothing either."""
_COMPUTES = 0.01
"""How much of the time a process that computes something uses a processor, at least."""
_STACKS_BYTES = 1 << 30
_LARGEST_STACK, _SMALLEST_STACK = 8 << 20, 256 << 10
"""Memory that is reserved, not used, for the stacks of all threads together, and the bounds of one."""

_log = logging.getLogger("oneaccord")
_starting = threading.Lock()
_home = threading.local()
"""Knows the scheduler that a thread belongs to."""


class Baton(ABC):
    """Runs tasks one at a time.

    Parameters
    ----------
    world_size
        How many ranks there are.

    Attributes
    ----------
    whereabouts
        Returns words for the place of a task.
    on_forsaken
        Called with the task that has kept the world waiting for minutes; returns the error that the run is to raise.
    on_switch
        Called with the rank that runs next, whenever that is another one.
    crash
        The error that the run is to raise.
    """

    def __init__(self, world_size: int) -> None:
        self.on_switch: Callable[[int], None] = _ignore
        self.whereabouts: Callable[[Task], str] = str
        self.on_forsaken: Callable[[Task], BaseException] = lambda _: Stopped()
        # The threads of large worlds have small stacks.
        size = max(_SMALLEST_STACK, min(_LARGEST_STACK, _STACKS_BYTES // world_size))
        self._stack_bytes = size // 4096 * 4096
        self._tasks: dict[Task, None] = {}
        self._threads: deque[threading.Thread] = deque()
        self._numbers: Counter[int] = Counter()
        self._ready: list[Task] = []
        self._running: Task | None = None
        self._shown = -1
        self._news = 0
        self._switches = 0
        self._idle_naps = 0
        self._known: weakref.WeakKeyDictionary[threading.Thread, Task] = weakref.WeakKeyDictionary()
        self._of_program: set[Task] = set()
        self._strangers: set[Task] = set()
        self._ended: list[threading.Thread] = []
        self._outside = Outside()
        self._bell = threading.Event()
        self._looks_on = 0
        self._is_over = False
        self._stopping = False
        self.crash: BaseException | None = None

    @abstractmethod
    def _choose(self) -> Task | None:
        """Return the next task to run; None if there is none now, or ever."""

    @abstractmethod
    def _take_in(self) -> None:
        """Let those threads of the program take part that earlier runs have left."""

    @abstractmethod
    def _leave(self, task: Task) -> None:
        """Let a thread of the program run alone at the end of the run, or wait for its event."""

    # Having a turn

    def current(self) -> Task:
        """Return the task that runs; a thread that the world did not start waits here for its turn."""
        task = self._running
        if task is None or task.ident != threading.get_ident():
            self._check_stopping()
            if self._outside.holds(threading.get_ident()):
                raise UsageError(
                    "this thread is in oneaccord.outside(), which cannot use the simulated world: leave that block first"
                )
            if getattr(_home, "scheduler", self) is not self:
                raise UsageError(
                    "this group belongs to another simulated world than the rank that uses it: pass the data to the rank as a value"
                )
            task = Task(-1, 0, _nothing)
            task.started = task.is_foreign = True
            task.world = self
            task.ident = threading.get_ident()
            self._strangers.add(task)
            self._arrive(task)
        return task

    def _arrive(self, task: Task) -> None:
        """Wait for the calling thread's turn, which is not in the world."""
        if self._outside.come(task):
            self._bell.set()
            self._take_baton(task)
        else:
            self._check_stopping()

    def _take_baton(self, task: Task) -> None:
        """Wait for the baton; do not return when the run is over."""
        while not (has_baton := task.take_baton(_LOOK_S if task.is_foreign else -1)):
            if self._stopping:
                break
        if has_baton and task.world is not None and task.world is not self:
            task.give_baton()  # it is from a later run, which has taken the thread in
        self._go_on(task)

    def _go_on(self, task: Task) -> None:
        """Let a task that has the baton be part of the world again; do not return when the run is over."""
        if self._stopping and task.state is DEAD:
            raise Stopped
        self._check_stopping()
        self._bury()
        self._be_member(task)

    def _be_member(self, task: Task) -> None:
        """Let a thread wait in this world from now on."""
        members[task.ident] = cast("World", self)  # which a scheduler is

    def _bury(self) -> None:
        """Wait for the end of those threads that gave the baton away for good: whether they live must not depend on the machine."""
        while self._ended:
            thread = self._ended.pop()
            if thread is not threading.current_thread():
                join(thread)

    def _check_stopping(self) -> None:
        """Do not return when the run is over."""
        if self._stopping:
            raise AbortedError("the run of this simulated world is over") if self.is_outlived else Stopped

    @property
    def is_outlived(self) -> bool:
        """Whether the run is over, but not the calling thread, which the program has started itself."""
        return self._stopping and getattr(_home, "scheduler", None) is not self

    @contextmanager
    def _or_outlived(self) -> Iterator[None]:
        """End the context early when the run is over, and the calling thread continues."""
        try:
            yield
        except AbortedError:
            if not self.is_outlived:
                raise

    @contextmanager
    def outside(self, what: str = "") -> Iterator[None]:
        """Let others run, but not the clock, until the context ends."""
        if self._outside.holds(threading.get_ident()):  # it is there already
            yield
            return
        task = self.current()
        members.pop(task.ident, None)
        self._outside.leave(task)
        task.waits_for = what
        self._pass_on(None)
        try:
            yield
        finally:
            task.waits_for = ""
            with self._or_outlived():
                self._arrive(task)

    def spawn(self, rank: int, action: Callable[[], None]) -> Task:
        """Add a thread to a rank; it runs when its turn comes."""
        task = Task(rank, self._numbers[rank], action)
        self._numbers[rank] += 1
        self._tasks[task] = None
        self._ready.append(task)
        self._news += 1
        return task

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks that are not over, those of a rank in the order in which they began."""
        return iter([task for task in self._tasks if task.state is not ENDED])

    @property
    def is_stopping(self) -> bool:
        """Whether the run is being ended, so that no word of those that are stopped matters to the others."""
        return self._stopping

    # Threads that the program starts

    def start(self, thread: threading.Thread) -> None:
        """Start a thread of the program, for the rank whose thread starts it; it runs when its turn comes."""
        own = vars(thread).get("run")
        task, live, began = self._prepare(thread.run, thread)

        def restore() -> None:
            if own is None:
                del thread.run
            else:
                thread.run = own  # type: ignore[method-assign]

        def run() -> None:
            restore()
            live()

        thread.run = run  # type: ignore[method-assign]
        with in_earnest():
            try:
                start(thread)
            except BaseException:
                restore()
                raise
            began.wait()
        self._enlist(task)
        self._known[thread] = task

    def start_new(self, action: Callable[[], None]) -> int:
        """As `start`, for a thread that `threading` does not know; return its identifier."""
        task, live, began = self._prepare(action, None)
        with in_earnest():
            ident = start_new(live, ())
            began.wait()
        self._enlist(task)
        return ident

    def _prepare(
        self, action: Callable[[], None], thread: threading.Thread | None
    ) -> tuple[Task, Callable[[], None], threading.Event]:
        """Return the task of a thread that the program is about to start, the function of the thread, and the event that is set when it has begun."""
        parent = self.current()
        task = Task(parent.rank, self._numbers[parent.rank], inherit_rank(action))
        self._numbers[parent.rank] += 1
        task.is_foreign = True
        task.world = self
        task.thread = None if thread is None else weakref.ref(thread)
        began = threading.Event()

        def live() -> None:
            task.ident = threading.get_ident()
            task.started = True
            began.set()
            try:
                with self._or_outlived():  # before its turn came
                    self._take_baton(task)
                task.action()
            except (SystemExit, Stopped):
                pass
            except BaseException:  # noqa: BLE001 - as Python does when it starts a thread, but before the turn goes to another one
                if task.state is not DEAD:  # or it is the thread's way to the end, such as a lock that it does not hold
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
            finally:
                (task.world or self)._end(task, thread)

        return task, live, began

    def _enlist(self, task: Task) -> None:
        """Let a thread of the program that has begun queue up."""
        self._of_program.add(task)
        self._tasks[task] = None
        self._ready.append(task)
        self._news += 1

    def has_ended(self, thread: threading.Thread) -> bool | None:
        """Return whether a thread of this world has ended; None for one of which it knows nothing."""
        task = self._known.get(thread)
        return None if task is None else task.state is ENDED

    def is_of_program(self, thread: threading.Thread | None) -> bool:
        """Return whether a thread that the program has started itself uses this world."""
        return thread is not None and any(task.is_foreign and task.ident == thread.ident for task in list(self._tasks))

    def bystanders(self) -> list[str]:
        """Return the names of the threads that the program may have started, and that no world sees."""
        known = {task.ident for task in self._tasks} | {threading.main_thread().ident, self._looks_on, *members}
        return sorted(
            thread.name
            for thread in threading.enumerate()
            if thread.ident not in known
            and not isinstance(thread, threading._DummyThread)
            and not thread.name.startswith("oneaccord-")
        )

    def _end(self, task: Task, thread: threading.Thread | None) -> None:
        """Let the thread of a task end, and others continue."""
        members.pop(task.ident, None)
        task.state = ENDED
        self._tasks.pop(task, None)
        self._of_program.discard(task)
        task.over.set()
        if self.crash is None and not self._stopping:
            if thread is not None:
                self._ended.append(thread)
            with suppress(Stopped, AbortedError):
                self._pass_on(task)

    # The run

    def run(self) -> None:
        """Run until every task has ended, or none can; then end those that are left.

        Raises
        ------
        BaseException
            An event failed, which is a bug; or the calling thread was interrupted.
        """
        with installed(), in_earnest():
            self._looks_on = threading.get_ident()
            try:
                self._take_in()
                self._pass_on(None)
                self._look_on()
            finally:
                self._stop()
        if self.crash is not None:
            raise self.crash

    def _look_on(self) -> None:
        """Wait for the end of the run; give the free baton to a thread that comes; report a thread that keeps the world waiting."""
        switches, since, used, reported = -1, 0.0, 0.0, 0.0
        while not self._is_over:
            self._bell.wait(_LOOK_S)
            self._bell.clear()
            self._look()
            now = time.monotonic()
            if self._switches != switches:
                switches, since, used, reported = self._switches, now, time.process_time(), now
            elif now - reported >= _REPORT_S and not self._is_over:
                reported = now
                self._report(now - since)
            # Those outside said that they wait for another program, which may take as long as it likes.
            running = None if self._outside else self._running
            is_idle = time.process_time() - used < _COMPUTES * (now - since)
            if now - since >= _FORSAKEN_S and is_idle and running is not None and not self._is_over:
                self.crash, self._is_over = self.on_forsaken(running), True

    def _look(self) -> None:
        """Give the baton to a thread that has come while it was free, or when a thread has ended that the world did not start."""
        task = self._running
        if self._is_over:
            return
        if task in self._strangers and task.ident not in current_frames():
            self._tasks.pop(task, None)
            self._strangers.discard(task)
            members.pop(task.ident, None)
            task.state = ENDED
            task = self._running = None
        if task is None:
            self._pass_on(None)

    def _report(self, seconds: float) -> None:
        running = self._running
        if running is not None:
            _log.warning(
                "oneaccord: the simulated world has waited for %.0f s for one thread, which computes, or waits for something that the world does "
                "not see: %s. If it waits for another program or a file, put that into `with oneaccord.outside():`; if it asks for something "
                "again and again, call oneaccord.sleep(0) in the loop",
                seconds,
                self.whereabouts(running),
            )
        for task in self._outside.tasks():
            _log.warning(
                "oneaccord: the clock of the simulated world has waited for %.0f s for a thread outside of it: %s",
                seconds,
                self.whereabouts(task),
            )

    def _pass_on(self, me: Task | None) -> None:
        """Give the baton to the next task, and wait until it comes back, if the calling task is to run again."""
        if me is not None:
            members.pop(me.ident, None)  # the rest is not part of the program
        self._check_stopping()
        try:
            following = self._choose()
        except BaseException as error:  # noqa: BLE001 - raised again, by the thread that waits for the run
            self.crash, self._is_over, following = error, True, None
        if following is None:
            self._running = None
            self._bell.set()
        else:
            self._running = following
            self._switches += 1
            self._idle_naps = self._idle_naps + 1 if following.is_foreign else 0
            following.state = RUNNING
            if following.rank not in (self._shown, -1):
                self._shown = following.rank
                self.on_switch(following.rank)
            if following is me:
                self._be_member(me)
                return
            self._hand_over(following)
        if me is not None and me.state is not ENDED:
            self._take_baton(me)

    def _hand_over(self, task: Task) -> None:
        if task.started:
            task.give_baton()
            return
        task.started = True
        name = f"rank-{task.rank}" if task.number == 0 else f"rank-{task.rank}-{task.number}"
        thread = Thread(target=self._live, args=(task,), name=name, daemon=True)
        while self._threads and not self._threads[0].is_alive():
            self._threads.popleft()
        self._threads.append(thread)
        self._known[thread] = task
        # The size holds for all threads that begin: those of the program, and of other runs, are to have their own.
        with _starting:
            before = threading.stack_size(self._stack_bytes)
            try:
                start(thread)
            finally:
                threading.stack_size(before)

    def _live(self, task: Task) -> None:
        """Be the thread of a task."""
        task.ident = threading.get_ident()
        _home.scheduler = self
        self._bury()
        self._be_member(task)
        try:
            task.run()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - tasks do not raise: this is a bug, to be raised by the thread that waits
            self.crash, self._is_over = self.crash or error, True
            self._bell.set()
        self._end(task, threading.current_thread())

    def _stop(self) -> None:
        """End all threads that are left, one after the other; those that the program has started itself live on."""
        self._stopping = True
        self._running = None
        patience = _PATIENCE_S
        for task in list(self._tasks):
            if task.started and not task.is_foreign:
                task.give_baton()
                if not task.over.wait(patience):  # and so may be others: all of them together are waited for no longer
                    patience = _LOOK_S
        for task in [*self._tasks, *self._outside.close()]:
            if task.is_foreign:
                members.pop(task.ident, None)
                self._leave(task)
        stuck = {task.ident for task in self._tasks}
        for thread in self._threads:
            if thread.ident is not None and thread.ident not in stuck:
                join(thread, _PATIENCE_S)  # it has nothing left to do, and its references end with it


def _nothing() -> None:
    pass


def _ignore(_rank: int) -> None:
    pass
