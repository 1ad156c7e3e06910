"""The order of the threads, and the time, on a clock that jumps to the next event.

A thread passes the baton on when it has to wait, and may have to when it begins a call; the next holder is drawn by the seed from all that can
run. When none of them can, the clock moves to the next event. So a run follows from its seed alone: no two threads are ever in a race, and no
thread sleeps.

The clock moves by proof only. Each thread of the world either has its turn or waits for an event that the scheduler knows (`primitives`). A
thread that computes, or that has no processor, keeps its turn however long that takes. While a thread is outside of the world, the others run but
the clock stops.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from oneaccord.api import AbortedError, UsageError
from oneaccord_simulated.baton import Baton
from oneaccord_simulated.outliving import claim, keep, outlive
from oneaccord_simulated.task import BLOCKED, DEAD, READY, Stopped, Task

__all__ = ["Scheduler", "never"]

_ASKS = 1000
"""The number of polls in a row that a thread may make in vain, with nothing else happening, before the clock moves."""
_ASKS_IN_VAIN = 10_000
"""The number of vain polls of a thread in a row, with nothing else left to happen, before it counts as waiting."""
_IDLE_NAPS = 10_000
"""The number of naps in a row of threads of the program, with nothing else happening, before the scheduler checks whether anything else can."""
_HOLD_BACK, _NAP_S = 0.5, 1.0
"""How likely it is that a call lets other threads of the program go first, and how many virtual seconds of a nap it waits for."""
Event = tuple[float, int, Callable[[], None]]


class Scheduler(Baton):
    """Runs tasks one at a time, in an order that follows from a seed.

    Parameters
    ----------
    seed
        The seed that decides which task runs next.
    world_size
        How many ranks there are.

    Attributes
    ----------
    now
        Seconds of the virtual clock.
    on_stuck
        Called when nothing can happen any more while tasks wait; to wake them with an error.
    may_wait
        Returns whether there is a reason for the silence, so that the clock may move to the next deadline.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        super().__init__(world_size)
        self.now: float = 0.0
        self.on_stuck: Callable[[], None] = _nothing
        self.may_wait: Callable[[], bool] = lambda: False
        self._random = random.Random(seed).random  # noqa: S311 - the one method that is the same in every version of Python
        self._held: list[Task] = []
        self._events: list[Event] = []
        self._count = itertools.count()
        self._earliest = math.inf
        self._standing: set[int] = set()
        self._asking: list[Task] = []
        self._heard = 0
        self._watching: dict[Task, None] = {}

    # The actions of tasks

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
                f"rank {task.rank} uses the group of rank {rank}: all ranks of a simulated world share the variables of a module, or of a function around the "
                "program; pass the group as an argument",
            )

    def block(self, deadline: float = math.inf, *, timer: float = math.inf, ends_job: bool = True) -> bool:
        """Let others run until the calling task is woken; return whether it was.

        Parameters
        ----------
        deadline
            When to give up, on the virtual clock.
        timer
            The time to continue, likewise, as a part of the program: nothing is wrong while that is to come.
        ends_job
            Whether to give up ends the whole job. That no task can move before one does so is a deadlock.
        """
        task = self.current()
        self._news += 1
        self._earliest = min(self._earliest, deadline)
        task.alarms += 1
        task.until = timer
        if timer < math.inf:
            number = task.alarms
            self.at(timer, _Alarm(self, task, number))
        return self._wait(task, deadline, ends_job=ends_job)

    def wait_until(self, test: Callable[[], bool], timeout_s: float | None, what: str) -> bool:
        """Let others run until something that is not of a group has happened; return whether it has.

        Parameters
        ----------
        test
            Returns whether it has. Any thread may ask, again and again.
        timeout_s
            The virtual seconds after which to give up.
        what
            The same in words, after "waiting for".
        """
        timeout_s = math.inf if timeout_s is None else timeout_s
        task = None
        try:
            task = self.current()
            if task.state is DEAD:
                self._pass_on(task)
            if timeout_s <= 0:
                self.ask()
                return test()
            task.test, task.waits_for, task.gives_up_at = test, what, math.inf
            if test is not never:
                self._watching[task] = None
            has_happened = self.block(timer=self.now + timeout_s)
        except AbortedError:
            if not self.is_outlived:
                raise
            has_happened = _outlive(task or _alone(timeout_s), test)
        finally:
            if task is not None:
                task.test, task.waits_for = None, ""
                (task.world or self)._watching.pop(task, None)
        if task is not None:
            task.timeouts += not has_happened
        return has_happened

    @property
    def timeouts(self) -> int:
        """How many waits of the calling task for something that is not of a group have ended by their timeout."""
        task = self._running
        return task.timeouts if task is not None and task.ident == threading.get_ident() else 0

    def nap(self, seconds: float) -> None:
        """Let others run for a time."""
        with self._or_outlived():
            self.current().naps += 1
        self.wait_until(never, seconds, "in time.sleep")

    def ask(self) -> None:
        """Count how often the calling task polls in vain; let others run, and the clock move, if that was too often."""
        with self._or_outlived():
            task = self.current()
            if task.heard != self._news:
                task.heard, task.asked, task.asked_in_vain = self._news, 0, 0
            task.asked += 1
            if task.asked > _ASKS:
                self.poll()

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

    def choose(self, count: int) -> int:
        """Draw a number below ``count`` by the seed."""
        return int(self._random() * count)

    def wake(self, task: Task, *, woken: bool = True) -> None:
        """Let a blocked task continue; do nothing if it is not blocked."""
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

        If a rank has several threads, on real backends any of them may come first. A task that is held back continues before the clock moves,
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
            task.until = math.inf
            self._asking.append(task)
            self._wait(task, math.inf, ends_job=True)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Run an action, which must not block, when the clock says so; those of one moment in the order in which they were given."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._count), action))

    # Threads of the program that outlive a run

    def _take_in(self) -> None:
        for number, task in enumerate(claim(self)):
            task.rank, task.number, task.until = -1, number, task.left_s
            self._tasks[task] = self._watching[task] = None
            thread = None if task.thread is None else task.thread()
            if thread is not None:
                self._known[thread] = task
            if task.until < math.inf:
                self.at(task.until, _Alarm(self, task, task.alarms))

    def _leave(self, task: Task) -> None:
        if task.state is BLOCKED and task.test is not None:
            task.left_s = max(0.0, task.until - self.now)
            task.gives_up_at = time.monotonic() + task.left_s
            if task.test is not never and task not in self._strangers:
                keep(task)
                return
        task.world = None
        task.give_baton()

    def come_back(self, task: Task) -> None:
        """Let a thread that an earlier run has left continue in this world; do not return when this run is over, too."""
        self._go_on(task)
        self._of_program.add(task)

    # The actions of faults

    def stand_still(self, rank: int) -> None:
        """Let no thread of a rank run until `go_on`."""
        self._standing.add(rank)

    def go_on(self, rank: int) -> None:
        """Let a stopped rank run again."""
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
        """Return whether a rank is stopped; None for any."""
        return bool(self._standing) if rank is None else rank in self._standing

    def end_if_killed(self) -> None:
        """Do not return to a task of a rank that was killed."""
        task = self.current()
        if task.state is DEAD:
            self._pass_on(task)

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

    def waiting(self) -> list[Task]:
        """Return the tasks that wait, without threads of the program that have nothing to do."""
        return [task for task in self._tasks if self._is_waited_for(task)]

    # The next task, and its time

    def _choose(self) -> Task | None:
        """Return the next task to run; None if there is none now, or ever."""
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
            elif self._outside and self._is_anybody_left():
                return None
            elif self._is_anything_coming() and self._is_anybody_left() and not self._is_only_napping():
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
                except Exception:  # noqa: BLE001 - the waiting thread finds the error
                    is_able = True
                if is_able:
                    self.wake(task)

    def _is_waited_for(self, task: Task) -> bool:
        """Return whether a task does not keep the run from its end: it waits, and not as threads of the program do that may continue by themselves."""
        if task.state is not BLOCKED or task.rank in self._standing:
            return False
        return not (task.is_foreign and (task.test is not None or task.until < math.inf or task in self._asking))

    def _may_ask(self) -> bool:
        """Let those that ask again and again whether something has ended ask once more, if anything has happened; return whether they do."""
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
        """Return whether later events still concern a task."""
        return any(task.state is not DEAD and not task.is_foreign for task in self._tasks)

    def _is_somebody_impatient(self) -> bool:
        """Return whether the first task to give up continues all the same, so that it may yet help the others."""
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
        """Return whether an event is due at some time; forget alarms that concern no task any more."""
        while self._events and isinstance(alarm := self._events[0][2], _Alarm) and alarm.is_stale:
            heapq.heappop(self._events)
        return bool(self._events)

    def _is_only_napping(self) -> bool:
        """Return whether all that ever happens is that threads of the program wake from naps, such as one that sends signs of life."""
        if self._idle_naps < _IDLE_NAPS:
            return False
        self._idle_naps = 0
        is_late = any(task.deadline < math.inf for task in self._tasks if task.state is BLOCKED)
        return not is_late and all(isinstance(event[2], _Alarm) and event[2].is_of_program for event in self._events)

    def _happen(self) -> None:
        """Let the clock move to what happens next: an event, or tasks that give up."""
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
        """Let the tasks with the earliest deadline, up to a time, give up; return whether there were any."""
        due = self._due(until)
        if not due:
            return False
        self.now = max(self.now, self._earliest)
        for task in due:
            self.wake(task, woken=False)
        return True

    def _resolve(self) -> None:
        """End a deadlock: by its report, and if that wakes no task, by force."""
        self.on_stuck()
        if not self.can_go_on:
            for task in self.waiting():
                self.throw(task, Stopped())


class _Alarm:
    """At its time, wakes a task that still waits as when it set its alarm."""

    __slots__ = ("_number", "_scheduler", "_task")

    def __init__(self, scheduler: Scheduler, task: Task, number: int) -> None:
        self._scheduler = scheduler
        self._task = task
        self._number = number

    def __call__(self) -> None:
        if not self.is_stale:
            self._scheduler.wake(self._task, woken=False)

    @property
    def is_of_program(self) -> bool:
        """Whether it wakes no thread but one that the program has started itself."""
        return self._task.is_foreign or self.is_stale

    @property
    def is_stale(self) -> bool:
        """Whether the task waits for it no longer."""
        return self._task.alarms != self._number or self._task.state is not BLOCKED


def never() -> bool:
    """Return that the awaited event has not happened: the wait is only for the time."""
    return False


def _alone(timeout_s: float) -> Task:
    """Return the task of a thread of the program that waits when the run is over."""
    task = Task(-1, 0, _nothing)
    task.gives_up_at = time.monotonic() + timeout_s
    return task


def _outlive(task: Task, test: Callable[[], bool]) -> bool:
    """Wait in a thread whose run is over; return whether the awaited event has happened."""
    while True:
        is_able = outlive(task, test)
        if is_able is not None:
            return is_able
        world = task.world
        if world is not None:  # or it was woken by the end of a run
            with suppress(AbortedError):
                world.come_back(task)
                return task.woken


def _nothing() -> None:
    pass
