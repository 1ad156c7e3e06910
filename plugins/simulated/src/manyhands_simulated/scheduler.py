"""Who runs, and what time it is: threads that pass a baton, on a clock that jumps to whatever happens next.

Every rank is a thread, and so is what a rank does in the background, but only the one that holds the baton runs. It passes the baton on when it
has to wait, and may have to when it begins a call; who gets it is drawn from all that can run, by the seed. When none of them can, the
clock goes on to the next event. So a run follows from its seed alone: no two threads are ever in a race, and no thread sleeps.

That ends where a program has threads of its own, or waits for something that is not of this world: such a thread goes *outside*, the others
run meanwhile, and it queues up again when it next makes a call. What comes first is then up to the computer (`outside`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from manyhands.api import AbortedError, Thread, UsageError
from manyhands_simulated.outside import LOOK_S, Outside
from manyhands_simulated.task import BLOCKED, DEAD, ENDED, OUTSIDE, READY, RUNNING, Stopped, Task

__all__ = ["Scheduler"]

_EAGER, _NAP_S, _FRUITLESS_S = 100, 0.001, 1.0
"""How often those that ask again and again whether something has ended may ask in vain, while nothing else can happen, before they take
naps, and how long one lasts; and after how long, on the computer's clock, they count as waiting."""
_HOLD_BACK = 0.5
"""How likely it is that a call lets other threads of the program go first."""
_PATIENCE_S = 2.0
"""How long, on the computer's clock, a thread may take to end once the run is over."""
_STACKS_BYTES = 1 << 30
_LARGEST_STACK, _SMALLEST_STACK = 8 << 20, 256 << 10
"""Memory that is reserved, not used, for the stacks of all threads together, and the bounds of one."""

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
    on_forsaken
        Called when threads wait outside for what nobody seems to do; returns what the run is to raise.
    on_switch
        Called with the rank that runs next, whenever that is another one.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        self.now: float = 0.0
        self.on_stuck: Callable[[], None] = _nothing
        self.may_wait: Callable[[], bool] = lambda: False
        self.on_switch: Callable[[int], None] = _ignore
        self.on_forsaken: Callable[[], BaseException] = Stopped
        self._random = random.Random(seed).random  # noqa: S311 - the one method that is the same in every version of Python
        # The threads of large worlds have small stacks.
        size = max(_SMALLEST_STACK, min(_LARGEST_STACK, _STACKS_BYTES // world_size))
        self._stack_bytes = size // 4096 * 4096
        self._tasks: dict[Task, None] = {}
        self._threads: deque[threading.Thread] = deque()
        self._numbers: Counter[int] = Counter()
        self._ready: list[Task] = []
        self._held: list[Task] = []
        self._seed = seed
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
        self._fruitless = 0
        self._fruitless_since = 0.0
        self._outside = Outside()
        self._bell = threading.Event()
        self._is_over = False
        self._stopping = False
        self.crash: BaseException | None = None

    # What tasks do

    def current(self) -> Task:
        """Return the task that runs; a thread that comes from outside waits here for its turn."""
        task = self._running
        if task is None or task.ident != threading.get_ident() or (task.is_leaving and self._outside.is_gone(task)):
            self._check_stopping()
            if getattr(_home, "scheduler", self) is not self:
                raise UsageError(
                    "this group belongs to another simulated world than the rank that uses it: hand over what a rank needs as a value"
                )
            task = self._outside.come_back()
            self._bell.set()
            task.take_baton()
            self._check_stopping()
        return task

    def _check_stopping(self) -> None:
        """Do not return when the run is over."""
        if self._stopping:
            raise Stopped if self._outside.is_ours else AbortedError("the run of this simulated world is over")

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
            self.at(timer, lambda: self._ring(task, number))
        return self._wait(task, deadline, ends_job=ends_job)

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

    def _ring(self, task: Task, number: int) -> None:
        """Wake a task that still waits where it set its alarm."""
        if task.alarms == number:
            self.wake(task, woken=False)

    def give_way(self) -> None:
        """Let another task run first, if the seed says so."""
        task = self.current()
        if self._ready or task.rank in self._standing:
            self._queue_up(task)

    def hold_back(self) -> None:
        """Let other threads of the program make their calls before the one that the calling task is about to make, if the seed says so.

        Where a rank has several threads, on real backends any of them may come first. A task that is held back goes on before the clock does.
        """
        if not self._outside.are_there_threads_of_the_program():
            return
        task = self.current()
        task.calls += 1
        # From the place alone, and not from the generator that all share: when threads come is up to the computer.
        if random.Random(f"{self._seed} {task.rank} {task.number} {task.calls}").random() < _HOLD_BACK:  # noqa: S311 - as above
            task.state = READY
            self._held.append(task)
            self._pass_on(task)

    def _queue_up(self, task: Task) -> None:
        task.state = READY
        self._ready.append(task)
        self._pass_on(task)

    def poll(self) -> None:
        """Let something happen, since the calling task can do nothing but ask again: once more at any time, and then when others are done."""
        task = self.current()
        if task.heard != self._news:
            task.heard = self._news
            self._queue_up(task)
        else:
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
        return bool(self._ready or self._events)

    def throw(self, task: Task, error: BaseException) -> None:
        """Let a task that is blocked raise an error."""
        task.error = error
        if task in self._asking:
            self._asking.remove(task)
        self.wake(task, woken=False)

    def is_of_program(self, thread: threading.Thread | None) -> bool:
        """Tell whether a thread that the program has started itself uses this world."""
        return thread is not None and any(task.is_foreign and task.ident == thread.ident for task in list(self._tasks))

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
        with self._outside.watched():
            try:
                self._pass_on(None)
                while not self._is_over:
                    self._bell.wait(LOOK_S)
                    self._bell.clear()
                    self._look()
            finally:
                self._stop()
        if self.crash is not None:
            raise self.crash

    def _pass_on(self, me: Task | None) -> None:
        """Give the baton to whoever runs next, and wait until it comes back, if the calling task is to run again."""
        if self._stopping:
            raise Stopped
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
                return
            self._hand_over(following)
        if me is not None and me.state is not ENDED:
            me.take_baton()
            if self._stopping:
                raise Stopped

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
        self._outside.adopt(thread, is_ours=True)
        # The size holds for all threads that begin: those of the program, and of other runs, are to have their own.
        with _starting:
            before = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)

    def _live(self, task: Task) -> None:
        """Be the thread of a task."""
        task.ident, task.native_id = threading.get_ident(), threading.get_native_id()
        _home.scheduler = self
        self._outside.ours.add(task.ident)
        try:
            task.run()
            self.current()  # it may be outside
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - tasks do not raise: this is a bug, to be raised by the thread that waits
            self.crash, self._is_over = self.crash or error, True
            self._bell.set()
        task.state = ENDED
        self._outside.ours.discard(task.ident)
        self._tasks.pop(task, None)
        task.over.set()
        if self.crash is None:
            with suppress(Stopped):
                self._pass_on(task)

    def _choose(self) -> Task | None:
        """Return who runs next; None where nobody does now, or ever."""
        while True:
            for returning in self._outside.returned():
                self._tasks[returning] = None
                if returning.state is DEAD:
                    continue  # its rank was killed while it was outside, and it waits for the baton until the end of the run
                returning.state = READY
                self._ready.append(returning)
                self._news += 1
            task = self._draw()
            if task is not None:
                return task
            if self._held:
                if self._outside.may_come():
                    return None
                self._ready, self._held = self._ready + self._held, []
                continue
            if self._asking and self._may_ask():
                continue
            if self._events and self._is_anybody_left():
                if not self._happen():
                    return None
            elif not any(task.state is BLOCKED and task.rank not in self._standing for task in self._tasks):
                self._is_over = not self._is_rank_outside()
                return None
            elif self._may_be_helped():
                return None
            elif not ((self.may_wait() or self._is_rank_outside() or self._is_somebody_impatient()) and self._expire(math.inf)):
                self._resolve()

    def _may_ask(self) -> bool:
        """Let those that ask again and again whether something has ended ask once more, if that makes sense; tell whether it does."""
        if self._heard != self._news:
            self._heard = self._news
            self._fruitless = 0
        elif self._events or (self._fruitless > 1 and time.monotonic() - self._fruitless_since > _FRUITLESS_S):
            return False
        else:
            if not self._fruitless:
                self._fruitless_since = time.monotonic()
            self._fruitless += 1
            if self._fruitless > _EAGER:
                time.sleep(_NAP_S)  # an event loop may have something else to wait for
        asking, self._asking = self._asking, []
        for task in asking:
            task.state = READY
        self._ready += asking
        return True

    def _is_anybody_left(self) -> bool:
        """Tell whether what happens still concerns somebody."""
        return any(task.state is not DEAD and not task.is_foreign for task in self._tasks)

    def _is_rank_outside(self) -> bool:
        """Tell whether a thread of a rank does something that is not of this world."""
        return any(task.state is OUTSIDE and not task.is_foreign for task in self._tasks)

    def _may_be_helped(self) -> bool:
        """Tell whether threads outside may yet do something for those that wait, so that these must not give up.

        While a rank is outside that will come back, only those give up that go on all the same; the others would end the job, although
        nobody knows how long it takes on the virtual clock what that rank does.
        """
        return self._outside.may_help() or (self._outside.comes_back() and not self._is_somebody_impatient())

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

    def _happen(self) -> bool:
        """Let the clock go on to what happens next, be it an event or that tasks give up; not while those may yet be helped."""
        moment = self._events[0][0]
        if self._earliest <= moment and self._due(moment):
            return not self._may_be_helped() and self._expire(moment)
        self.now = moment
        while self._events and self._events[0][0] == moment:
            heapq.heappop(self._events)[2]()
        return True

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
        self._outside.expect_help()
        return True

    def _look(self) -> None:
        """Find out, in the thread that waits for the run, whether who runs has gone outside; and go on when somebody comes back."""
        task = self._running
        if self._is_over:
            return
        if task is None:
            if self._held:
                self._pass_on(None)
            elif self._outside.is_forsaken():
                self.crash, self._is_over = self.on_forsaken(), True
            elif self._outside.is_time_to_go_on():
                self._pass_on(None)
                if self._running is None:
                    self._bell.clear()  # nobody could go on: look again later, not at once
        elif task.ident and self._outside.has_gone(task, self._switches):
            if task.state is ENDED:
                self._tasks.pop(task, None)
            self._running = None
            self._pass_on(None)

    def _resolve(self) -> None:
        """End a deadlock: by what is to be told, and if that wakes nobody, by force."""
        self.on_stuck()
        if not self._ready and not self._events:
            for task in list(self._tasks):
                if task.state is BLOCKED:
                    self.throw(task, Stopped())

    def _stop(self) -> None:
        """End all threads that are left, one after the other."""
        self._stopping = True
        self._running = None
        until = time.monotonic() + _PATIENCE_S
        for task in list(self._tasks):
            if task.started and not task.is_foreign:
                task.give_baton()
                # Those outside may be there for good, and are waited for together.
                task.over.wait(max(0.0, until - time.monotonic()) if self._outside.holds(task) else _PATIENCE_S)
        self._outside.close()
        stuck = {task.ident for task in self._tasks}
        for thread in self._threads:
            if thread.ident is not None and thread.ident not in stuck:
                thread.join(_PATIENCE_S)  # it has nothing left to do, and what it holds goes with it


def _nothing() -> None:
    pass


def _ignore(_rank: int) -> None:
    pass
