"""Who runs, and what time it is: threads that pass a baton, on a clock that jumps to whatever happens next.

Every rank is a thread, and so is what a rank does in the background and what the program starts itself, but only the one that holds the baton
runs. It passes the baton on when it has to wait, and may have to when it begins a call; the next holder is drawn from all that can run, by the
seed. When none of them can, the clock goes on to the next event. So a run follows from its seed alone: no two threads are ever in a race, and no
thread sleeps.

The clock moves by proof only. Each thread of the world either has its turn or waits for something that the scheduler knows (`primitives`). A
thread that computes, or that has no processor, keeps its turn however long that takes. While a thread is outside of the world, the others run but
the clock stands.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from manyhands.api import AbortedError, Thread, UsageError, current_frames, inherit_rank
from manyhands_simulated.outside import Outside
from manyhands_simulated.primitives import Over, in_earnest, installed, join, members, start, start_new
from manyhands_simulated.task import BLOCKED, DEAD, ENDED, READY, RUNNING, Stopped, Task

__all__ = ["Scheduler"]

_ASKS = 1000
"""How often in a row a thread may ask an event in vain, with nothing else happening, before that lets the clock go on."""
_ASKS_IN_VAIN = 10_000
"""How often in a row a thread may ask in vain, with nothing else left to happen, before it counts as one that waits."""
_HOLD_BACK, _NAP_S = 0.5, 1.0
"""How likely it is that a call lets other threads of the program go first, and how many virtual seconds of a nap it waits for."""
_PATIENCE_S = 2.0
"""How long, on the computer's clock, a thread may take to end once the run is over."""
_LOOK_S = 0.25
"""How often, on the computer's clock, to look whether a thread has ended that the world did not start, and so does not see end. Ctrl-C that comes
just as the thread falls asleep that waits for the run is heard then, too."""
_REPORT_S, _FORSAKEN_S = 30.0, 300.0
"""After how long on the computer's clock, with no thread giving up its turn, that is reported; and after how long it ends the run, if the process
computes nothing either."""
_COMPUTES = 0.01
"""How much of the time a process that computes something uses a processor, at least."""
_STACKS_BYTES = 1 << 30
_LARGEST_STACK, _SMALLEST_STACK = 8 << 20, 256 << 10
"""Memory that is reserved, not used, for the stacks of all threads together, and the bounds of one."""

_log = logging.getLogger("manyhands")
_starting = threading.Lock()
_home = threading.local()
"""Knows the scheduler that a thread belongs to."""

Event = tuple[float, int, Callable[[], None]]


class Scheduler:
    """Runs tasks one at a time, in an order that follows from a seed.

    Parameters
    ----------
    seed
        What decides who runs next.
    world_size
        How many ranks there are.

    Attributes
    ----------
    now
        Seconds of the virtual clock.
    on_stuck
        Called when nothing can happen any more while tasks wait; to wake them with an error.
    may_wait
        Tells whether there is a reason why nothing happens, so that the clock may go on to the next deadline.
    whereabouts
        Returns in words where a task is.
    on_forsaken
        Called with the tasks that have kept the world waiting for minutes; returns what the run is to raise.
    on_switch
        Called with the rank that runs next, whenever that is another one.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        self.now: float = 0.0
        self.on_stuck: Callable[[], None] = _nothing
        self.may_wait: Callable[[], bool] = lambda: False
        self.on_switch: Callable[[int], None] = _ignore
        self.whereabouts: Callable[[Task], str] = str
        self.on_forsaken: Callable[[list[Task]], BaseException] = lambda _: Stopped()
        self._random = random.Random(seed).random  # noqa: S311 - the one method that is the same in every version of Python
        # The threads of large worlds have small stacks.
        size = max(_SMALLEST_STACK, min(_LARGEST_STACK, _STACKS_BYTES // world_size))
        self._stack_bytes = size // 4096 * 4096
        self._tasks: dict[Task, None] = {}
        self._threads: deque[threading.Thread] = deque()
        self._numbers: Counter[int] = Counter()
        self._ready: list[Task] = []
        self._held: list[Task] = []
        self._events: list[Event] = []
        self._count = itertools.count()
        self._earliest = math.inf
        self._running: Task | None = None
        self._shown = -1
        self._standing: set[int] = set()
        self._asking: list[Task] = []
        self._news = 0
        self._switches = 0
        self._heard = 0
        self._watching: dict[Task, None] = {}
        self._known: weakref.WeakKeyDictionary[threading.Thread, Task] = weakref.WeakKeyDictionary()
        self._of_program: set[Task] = set()
        self._strangers: set[Task] = set()
        self._ended: list[threading.Thread] = []
        self._outside = Outside()
        self._bell = threading.Event()
        self._is_over = False
        self._stopping = False
        self.crash: BaseException | None = None

    # What tasks do

    def current(self) -> Task:
        """Return the task that runs; a thread that the world did not start waits here for its turn."""
        task = self._running
        if task is None or task.ident != threading.get_ident():
            self._check_stopping()
            if self._outside.holds(threading.get_ident()):
                raise UsageError(
                    "this thread is in manyhands.outside(), where nothing of the simulated world can be used: leave it first"
                )
            if getattr(_home, "scheduler", self) is not self:
                raise UsageError(
                    "this group belongs to another simulated world than the rank that uses it: hand over what a rank needs as a value"
                )
            task = Task(-1, 0, _nothing)
            task.started = task.is_foreign = True
            task.ident = threading.get_ident()
            self._strangers.add(task)
            self._arrive(task)
        return task

    def _arrive(self, task: Task) -> None:
        """Wait for the calling thread's turn, which is not in the world."""
        self._outside.come(task)
        self._bell.set()
        self._take_baton(task)

    def _take_baton(self, task: Task) -> None:
        """Wait for the baton; do not return when the run is over."""
        task.take_baton()
        self._check_stopping()
        self._bury()
        members[task.ident] = self

    def _bury(self) -> None:
        """Wait for the end of those threads that gave the baton away for good: whether they live must not depend on the machine."""
        while self._ended:
            thread = self._ended.pop()
            if thread is not threading.current_thread():
                join(thread)

    def _check_stopping(self) -> None:
        """Do not return when the run is over."""
        if self._stopping:
            is_ours = getattr(_home, "scheduler", None) is self
            raise Stopped if is_ours else AbortedError("the run of this simulated world is over")

    def belong(self, task: Task, rank: int) -> None:
        """Take note whose thread one is that came from outside; refuse a rank's own thread that uses another rank's group.

        Raises
        ------
        UsageError
            It does.
        """
        if task.rank < 0:
            task.rank = rank
            task.number = self._numbers[rank]
            self._numbers[rank] += 1
        elif task.rank != rank and not task.is_foreign:
            raise UsageError(
                f"rank {task.rank} uses the group of rank {rank}: what a module, or a function around the program, holds is the same for all "
                "ranks of a simulated world; hand the group over as an argument"
            )

    def spawn(self, rank: int, action: Callable[[], None]) -> Task:
        """Add a thread to a rank; it runs when its turn comes."""
        task = Task(rank, self._numbers[rank], action)
        self._numbers[rank] += 1
        self._tasks[task] = None
        self._ready.append(task)
        self._news += 1
        return task

    def block(self, deadline: float = math.inf, *, timer: float = math.inf, ends_job: bool = True) -> bool:
        """Let others run until the calling task is woken; tell whether it was.

        Parameters
        ----------
        deadline
            When to give up, on the virtual clock.
        timer
            When to go on, likewise, as a part of the program: nothing is wrong while that is to come.
        ends_job
            Whether to give up ends the whole job. That no task can move before one does so is a deadlock.
        """
        task = self.current()
        self._news += 1
        self._earliest = min(self._earliest, deadline)
        task.alarms += 1
        if timer < math.inf:
            number = task.alarms
            self.at(timer, _Alarm(self, task, number))
        return self._wait(task, deadline, ends_job=ends_job)

    def wait_until(self, test: Callable[[], bool], timeout_s: float | None, what: str) -> bool:
        """Let others run until something that is not of a group has happened; tell whether it has.

        Parameters
        ----------
        test
            Tells whether it has. Any thread may ask, again and again.
        timeout_s
            The virtual seconds after which to give up.
        what
            The same in words, after "waiting for".
        """
        task = self.current()
        if task.state is DEAD:
            self._pass_on(task)
        if timeout_s is not None and timeout_s <= 0:
            self.ask()
            return test()
        task.test, task.waits_for = test, what
        self._watching[task] = None
        try:
            has_happened = self.block(timer=math.inf if timeout_s is None else self.now + timeout_s)
        except AbortedError:
            if self._stopping:
                raise Over from None
            raise
        finally:
            task.test, task.waits_for = None, ""
            self._watching.pop(task, None)
        task.timeouts += not has_happened
        return has_happened

    @property
    def timeouts(self) -> int:
        """How many waits of the calling task for something that is not of a group have ended by their timeout."""
        return self.current().timeouts

    def nap(self, seconds: float) -> None:
        """Let others run for a time."""
        task = self.current()
        task.naps += 1
        self.wait_until(_never, seconds, "in time.sleep")

    def ask(self) -> None:
        """Count how often the calling task asks for something in vain; let others run, and the clock go on, if that was too often."""
        task = self.current()
        if task.heard != self._news:
            task.heard, task.asked, task.asked_in_vain = self._news, 0, 0
        task.asked += 1
        if task.asked > _ASKS:
            self.poll()

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
            self._arrive(task)

    def _wait(self, task: Task, deadline: float, *, ends_job: bool) -> bool:
        task.state = BLOCKED
        task.woken = False
        task.deadline = deadline
        task.ends_job = ends_job
        self._pass_on(task)
        if task.error is not None:
            error, task.error = task.error, None
            raise error
        return task.woken

    def wake(self, task: Task, *, woken: bool = True) -> None:
        """Let a task go on that is blocked; nothing where it is not."""
        if task.state is BLOCKED:
            task.state = READY
            task.woken = woken
            self._ready.append(task)
            self._news += 1

    def give_way(self) -> None:
        """Let another task run first, if the seed says so."""
        task = self.current()
        if self._ready or task.rank in self._standing:
            self._queue_up(task)

    def hold_back(self) -> None:
        """Let other threads of the program make their calls before the one that the calling task is about to make, if the seed says so.

        Where a rank has several threads, on real backends any of them may come first. A task that is held back goes on before the clock does,
        unless a thread of its rank is in its first nap, which is no way to come second.
        """
        if not self._of_program and not self._strangers:
            return
        task = self.current()
        if self._random() >= _HOLD_BACK:
            return
        task.state = READY
        self._held.append(task)
        self._pass_on(task)
        naps = [other for other in self._of_program if other.rank == task.rank and other.is_in_first_nap]
        if naps:
            self.wait_until(lambda: not any(other.is_in_first_nap for other in naps), _NAP_S, "for its turn")

    def _queue_up(self, task: Task) -> None:
        task.state = READY
        self._ready.append(task)
        self._pass_on(task)

    def poll(self) -> None:
        """Let something happen, since the calling task can do nothing but ask again: once more at any time, and then when others are done."""
        task = self.current()
        if task.heard != self._news:
            task.heard, task.asked_in_vain = self._news, 0
            self._queue_up(task)
        else:
            task.alarms += 1  # so that none that it set before wakes it
            self._asking.append(task)
            self._wait(task, math.inf, ends_job=True)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Run an action, which must not block, when the clock says so; those of one moment in the order in which they were given."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._count), action))

    # What faults do

    def stand_still(self, rank: int) -> None:
        """Let no thread of a rank run until `go_on`."""
        self._standing.add(rank)

    def go_on(self, rank: int) -> None:
        """Let a rank run again that stood still."""
        self._standing.discard(rank)

    def kill(self, rank: int) -> None:
        """Let no thread of a rank run any more; if one is running, it does not come back from its next wait."""
        for task in [task for task in self._tasks if task.rank == rank]:
            task.state = DEAD
            self._outside.forget(task)
            for queue in (self._ready, self._held, self._asking):
                if task in queue:
                    queue.remove(task)

    def stands(self, rank: int | None) -> bool:
        """Tell whether a rank stands still; None for any."""
        return bool(self._standing) if rank is None else rank in self._standing

    def end_if_killed(self) -> None:
        """Do not return to a task of a rank that was killed."""
        task = self.current()
        if task.state is DEAD:
            self._pass_on(task)

    @property
    def is_stopping(self) -> bool:
        """Whether the run is being ended, so that no word of those that are stopped matters to the others."""
        return self._stopping

    @property
    def can_go_on(self) -> bool:
        """Whether a task can run, or something is going to happen."""
        return bool(self._ready or self._is_anything_coming())

    def throw(self, task: Task, error: BaseException) -> None:
        """Let a task that is blocked raise an error."""
        task.error = error
        if task in self._asking:
            self._asking.remove(task)
        self.wake(task, woken=False)

    def is_of_program(self, thread: threading.Thread | None) -> bool:
        """Tell whether a thread that the program has started itself uses this world."""
        return thread is not None and any(task.is_foreign and task.ident == thread.ident for task in list(self._tasks))

    # Threads that the program starts

    def start(self, thread: threading.Thread) -> None:
        """Start a thread of the program, for the rank whose thread starts it; it runs when its turn comes."""
        own = vars(thread).get("run")
        task, live = self._prepare(thread.run, thread)

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
            self._enlist(task)
        self._known[thread] = task

    def start_new(self, action: Callable[[], None]) -> int:
        """As `start`, for a thread that `threading` does not know; return its identifier."""
        task, live = self._prepare(action, None)
        with in_earnest():
            ident = start_new(live, ())
            self._enlist(task)
        return ident

    def _prepare(self, action: Callable[[], None], thread: threading.Thread | None) -> tuple[Task, Callable[[], None]]:
        """Return the task of a thread that the program is about to start, and what the thread does."""
        parent = self.current()
        task = Task(parent.rank, self._numbers[parent.rank], inherit_rank(action))
        self._numbers[parent.rank] += 1
        task.is_foreign = True

        def live() -> None:
            task.ident = threading.get_ident()
            task.started = True
            task.over.set()  # tells the thread that starts it
            try:
                self._take_baton(task)
            except AbortedError:  # the run has ended before the thread's turn came
                task.action()
                return
            task.over.clear()
            try:
                task.action()
            except SystemExit:
                pass
            except BaseException:  # noqa: BLE001 - as Python does where it starts a thread, but before the turn goes to another one
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
            finally:
                self._end(task, thread)

        return task, live

    def _enlist(self, task: Task) -> None:
        """Let a thread of the program that has begun queue up."""
        task.over.wait()
        self._of_program.add(task)
        self._tasks[task] = None
        self._ready.append(task)
        self._news += 1

    def has_ended(self, thread: threading.Thread) -> bool | None:
        """Tell whether a thread of this world has ended; None for one of which it knows nothing."""
        task = self._known.get(thread)
        return None if task is None else task.state is ENDED

    def _end(self, task: Task, thread: threading.Thread | None) -> None:
        """Let the thread of a task end, and others go on."""
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

    def waiting(self) -> list[Task]:
        """Return the tasks that wait, without threads of the program that have nothing to do."""
        return [task for task in self._tasks if self._is_waited_for(task)]

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks that are not over, those of a rank in the order in which they began."""
        return iter([task for task in self._tasks if task.state is not ENDED])

    # The run

    def run(self) -> None:
        """Run until every task has ended, or none can; then end those that are left.

        Raises
        ------
        BaseException
            An event failed, which is a bug; or the calling thread was interrupted.
        """
        with installed(), in_earnest():
            try:
                self._pass_on(None)
                self._look_on()
            finally:
                self._stop()
        if self.crash is not None:
            raise self.crash

    def _look_on(self) -> None:
        """Wait for the end of the run; give the baton to a thread that comes when nobody has it; report what keeps the world waiting."""
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
            if now - since >= _FORSAKEN_S and time.process_time() - used < _COMPUTES * (now - since) and not self._is_over:
                waiting = self._outside.tasks() or ([] if self._running is None else [self._running])
                self.crash, self._is_over = self.on_forsaken(waiting), True

    def _look(self) -> None:
        """Give the baton to a thread that has come when nobody had it, or when a thread has ended that the world did not start."""
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
                "manyhands: the simulated world has waited for %.0f s for one thread, which computes, or waits for something that the world does "
                "not see: %s. If it waits for another program or a file, put that into `with manyhands.outside():`; if it asks for something "
                "again and again, call manyhands.sleep(0) in the loop",
                seconds,
                self.whereabouts(running),
            )
        for task in self._outside.tasks():
            _log.warning(
                "manyhands: the clock of the simulated world has stood for %.0f s for a thread outside of it: %s",
                seconds,
                self.whereabouts(task),
            )

    def _pass_on(self, me: Task | None) -> None:
        """Give the baton to whoever runs next, and wait until it comes back, if the calling task is to run again."""
        if me is not None:
            members.pop(me.ident, None)  # what follows is no part of the program
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
            following.state = RUNNING
            if following.rank not in (self._shown, -1):
                self._shown = following.rank
                self.on_switch(following.rank)
            if following is me:
                members[me.ident] = self
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
        members[task.ident] = self
        try:
            task.run()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - tasks do not raise: this is a bug, to be raised by the thread that waits
            self.crash, self._is_over = self.crash or error, True
            self._bell.set()
        self._end(task, threading.current_thread())

    def _choose(self) -> Task | None:
        """Return who runs next; None where nobody does now, or ever."""
        while True:
            for task in self._outside.arrivals():
                self._tasks[task] = None
                if (
                    task.state is not DEAD
                ):  # or its rank was killed meanwhile, and it waits for the baton until the end of the run
                    self._ready.append(task)
                    self._news += 1
            self._wake_able()
            following = self._draw()
            if following is not None:
                return following
            if self._held:
                self._ready, self._held = self._ready + self._held, []
            elif self._asking and self._may_ask():
                pass
            elif self._outside:
                return None
            elif self._is_anything_coming() and self._is_anybody_left():
                self._happen()
            elif not any(self._is_waited_for(task) for task in self._tasks):
                self._is_over = True
                return None
            elif not ((self.may_wait() or self._is_somebody_impatient()) and self._expire(math.inf)):
                self._resolve()

    def _wake_able(self) -> None:
        """Let those run that wait for something of the program's own, and can have it."""
        for task in self._watching:
            if task.state is BLOCKED and task.test is not None:
                try:
                    is_able = task.test()
                except Exception:  # noqa: BLE001 - the thread that waits finds out what is wrong
                    is_able = True
                if is_able:
                    self.wake(task)

    def _is_waited_for(self, task: Task) -> bool:
        """Tell whether the run is not over because of a task: it waits, and not as threads of the program do that have nothing to do."""
        return task.state is BLOCKED and task.rank not in self._standing and not (task.is_foreign and task.test is not None)

    def _may_ask(self) -> bool:
        """Let those that ask again and again whether something has ended ask once more, if anything has happened; tell whether they do."""
        if self._heard != self._news:
            self._heard = self._news
            asking = self._asking
        elif self._is_anything_coming():
            return False
        else:
            asking = [task for task in self._asking if task.asked_in_vain < _ASKS_IN_VAIN]
        self._asking = [task for task in self._asking if task not in asking]
        for task in asking:
            task.state = READY
            task.asked_in_vain += 1
        self._ready += asking
        return bool(asking)

    def _is_anybody_left(self) -> bool:
        """Tell whether what happens still concerns somebody."""
        return any(task.state is not DEAD and not task.is_foreign for task in self._tasks)

    def _is_somebody_impatient(self) -> bool:
        """Tell whether the first to give up goes on all the same, so that it may yet help the others."""
        waiting = [(task.deadline, task.ends_job) for task in self._tasks if task.state is BLOCKED]
        earliest = min(deadline for deadline, _ in waiting)
        return not any(ends_job for deadline, ends_job in waiting if deadline == earliest)

    def _draw(self) -> Task | None:
        """Return one of those that can run, by the seed."""
        ready = self._ready
        if self._standing:
            able = [task for task in ready if task.rank not in self._standing]
            if not able:
                return None
            task = able[int(self._random() * len(able))]
            ready.remove(task)
            return task
        if not ready:
            return None
        index = int(self._random() * len(ready)) if len(ready) > 1 else 0
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _is_anything_coming(self) -> bool:
        """Tell whether something is to happen at some time; alarms are forgotten that are for nobody any more."""
        while self._events and isinstance(alarm := self._events[0][2], _Alarm) and alarm.is_stale:
            heapq.heappop(self._events)
        return bool(self._events)

    def _happen(self) -> None:
        """Let the clock go on to what happens next, be it an event or that tasks give up."""
        moment = self._events[0][0]
        if self._earliest <= moment and self._expire(moment):
            return
        self.now = moment
        while self._events and self._events[0][0] == moment:
            heapq.heappop(self._events)[2]()

    def _due(self, until: float) -> list[Task]:
        """Return the tasks with the earliest deadline, up to a time."""
        waiting = [task for task in self._tasks if task.state is BLOCKED and task.rank not in self._standing]
        self._earliest = min((task.deadline for task in waiting), default=math.inf)
        if self._earliest > until or self._earliest == math.inf:
            return []
        return [task for task in waiting if task.deadline == self._earliest]

    def _expire(self, until: float) -> bool:
        """Let the tasks with the earliest deadline, up to a time, give up; tell whether there were any."""
        due = self._due(until)
        if not due:
            return False
        self.now = max(self.now, self._earliest)
        for task in due:
            self.wake(task, woken=False)
        return True

    def _resolve(self) -> None:
        """End a deadlock: by what is to be told, and if that wakes nobody, by force."""
        self.on_stuck()
        if not self.can_go_on:
            for task in self.waiting():
                self.throw(task, Stopped())

    def _stop(self) -> None:
        """End all threads that are left, one after the other; those that the program has started itself live on."""
        self._stopping = True
        self._running = None
        until = time.monotonic() + _PATIENCE_S
        for task in list(self._tasks):
            if task.started and not task.is_foreign:
                task.give_baton()
                # Those outside may be there for good, and are waited for together.
                task.over.wait(max(0.0, until - time.monotonic()) if self._outside.holds(task.ident) else _PATIENCE_S)
        for task in [*self._tasks, *self._outside.arrivals()]:
            if task.is_foreign:
                members.pop(task.ident, None)
                task.give_baton()
        stuck = {task.ident for task in self._tasks}
        for thread in self._threads:
            if thread.ident is not None and thread.ident not in stuck:
                join(thread, _PATIENCE_S)  # it has nothing left to do, and what it holds goes with it


class _Alarm:
    """Wakes a task, at a time, that still waits where it set its alarm."""

    __slots__ = ("_number", "_scheduler", "_task")

    def __init__(self, scheduler: Scheduler, task: Task, number: int) -> None:
        self._scheduler = scheduler
        self._task = task
        self._number = number

    def __call__(self) -> None:
        if not self.is_stale:
            self._scheduler.wake(self._task, woken=False)

    @property
    def is_stale(self) -> bool:
        """Whether the task waits for it no longer."""
        return self._task.alarms != self._number or self._task.state is not BLOCKED


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


def _ignore(_rank: int) -> None:
    pass
