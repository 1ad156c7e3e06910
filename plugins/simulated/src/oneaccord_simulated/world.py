"""The runtime of simulated ranks, through which core waits, with the network and the faults of one run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from types import TracebackType

import oneaccord.api
from oneaccord.api import Condition, FlightRecorder, Network, Place, Record, Runtime, ThreadWorld
from oneaccord_simulated.deadlock import doing, explain, positions, story
from oneaccord_simulated.faults import FaultPlan
from oneaccord_simulated.injecting import Injector
from oneaccord_simulated.primitives import members
from oneaccord_simulated.races import Races
from oneaccord_simulated.scheduler import Scheduler, never
from oneaccord_simulated.state import State
from oneaccord_simulated.task import BLOCKED, DEAD, Task
from oneaccord_simulated.trace import CallEvent

__all__ = ["SHARED", "SimulatedRuntime"]

SHARED = "simulated"
"""The key under which the ranks of a `ThreadWorld` find their runtime."""


class SimulatedRuntime(State, Runtime):
    """The runtime of one run.

    Parameters
    ----------
    world_size, seed, network, faults
        As for `run`.
    keep_messages
        Whether the trace keeps every message.

    Attributes
    ----------
    faults
        Carries the fault plan out.
    history
        Finds races for windows.
    """

    is_simulated: bool = True

    def __init__(
        self, world_size: int, seed: int, network: Network | None, faults: FaultPlan, *, keep_messages: bool = True
    ) -> None:
        world = ThreadWorld(world_size, "simulated", self, lambda rank: _Recorder(self, rank))
        super().__init__(world, seed, network, faults, keep_messages=keep_messages)
        world.shared[SHARED] = self
        self.history: Races = Races(world_size, self.where)
        self.faults: Injector = Injector(faults, seed, self)
        self._ranks_per_host = 1 if network is None else network.neighbours(world_size)
        self._explained: list[str] = []
        self.scheduler.on_stuck = self._stuck
        self.scheduler.on_forsaken = self._forsaken
        self.scheduler.whereabouts = lambda task: f"rank {task.rank} is {doing(self, task)}"
        self.scheduler.may_wait = lambda: self.faults.is_blocking

    def run(self, body: Callable[[int], None]) -> None:
        """Run ``body(rank)``, which must not raise, on all ranks."""

        def live(rank: int) -> None:
            body(rank)
            self.over.add(rank)
            self.trace.mark(rank, self.scheduler.now, "ended", "ended")

        for rank in range(self.world.world_size):
            self.scheduler.spawn(rank, lambda rank=rank: live(rank))  # type: ignore[misc]
        self.faults.begin()
        try:
            self.scheduler.run()
        finally:
            self.trace.duration_s = self.scheduler.now

    # As Runtime

    def now(self) -> float:
        """Return the virtual time."""
        return self.scheduler.now

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass; in a thread that outlives the run, real time."""
        if self.scheduler.is_outlived:
            time.sleep(seconds)
        else:
            self._pass_time("sleep", seconds, seconds)

    def compute(self, seconds: float) -> None:
        """Let virtual time pass, more of it on a rank that is slow."""
        factor = self.faults.factor(self.scheduler.current().rank)
        self._pass_time("compute", seconds, seconds * factor)

    def mark(self, label: str) -> None:
        """Note a mark of the program in the trace."""
        self.trace.mark(self.scheduler.current().rank, self.scheduler.now, label)

    def place(self, *, for_good: bool) -> Place:
        """Return the place where the calling task waits."""
        return _Place(self.scheduler, ends_job=for_good)

    def condition(self) -> Condition:
        """Return a condition whose lock is the baton."""
        return _Condition(self.scheduler)

    def start(self, action: Callable[[], None]) -> None:
        """Run an action in a further task of the calling rank."""
        self.scheduler.spawn(self.scheduler.current().rank, action)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action when the virtual clock says so."""
        self.scheduler.at(self.scheduler.now + delay_s, action)

    def outside(self) -> AbstractContextManager[None]:
        """Let other ranks run, but not the clock, until the context ends."""
        if self.scheduler.is_outlived:  # and the calling thread may belong to a later run
            world = members.get(get_ident())
            return nullcontext() if world is None else world.outside("")
        return self.scheduler.outside()

    def choose(self, count: int) -> int:
        """Draw one of several things by the seed."""
        return self.scheduler.choose(count)

    def glance(self) -> None:
        """Let something else happen, if anything can."""
        self.scheduler.poll()

    def enter(self, rank: int) -> None:
        """As `belong`; if the program has threads of its own, the seed decides whether those make a call first."""
        self.belong(rank)
        if not self.scheduler.is_stopping:
            self.scheduler.hold_back()

    def belong(self, rank: int) -> None:
        """Take note for which rank a thread from outside makes a call; refuse a rank's own thread that makes one for another rank."""
        if not self.scheduler.is_stopping:  # then the group is closed, and says so itself
            task = self.scheduler.current()
            self.scheduler.belong(task, rank)
            if rank in self.killed:  # a thread of the program's own, which was not known to be this rank's
                task.state = DEAD
                self.scheduler.end_if_killed()

    def on_behalf(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return the action, to be traced to the line that makes the call now."""
        where = self.where()

        def run() -> None:
            task = self.scheduler.current()
            before, task.where = task.where, where
            try:
                action()
            finally:
                task.where = before

        return run

    def carry(self, source: int, dest: int, action: Callable[[], None]) -> None:
        """Bring word to or from the store, as faults allow."""
        if not self.scheduler.is_stopping:
            races = self.history
            if source >= 0:
                races.releases(source, SHARED)

            def come() -> None:
                if dest >= 0:
                    races.acquires(dest, SHARED)
                action()

            self.faults.carry(dest, come)

    def identity(self, rank: int) -> tuple[str, int]:
        """Return names that are alike on every computer."""
        return f"host{rank // self._ranks_per_host}", rank

    def _pass_time(self, operation: str, seconds: float, lasting: float) -> None:
        task = self.scheduler.current()
        with self._noted(task, operation, f"{operation}({seconds:g} s)"):
            self.scheduler.end_if_killed()
            if lasting > 0 and task.is_foreign and operation == "sleep":
                self.scheduler.wait_until(never, lasting, "in sleep")
            elif lasting > 0:
                self.scheduler.block(timer=self.scheduler.now + lasting)
            elif operation == "compute":
                self.scheduler.give_way()
            else:  # a task that sleeps for no time usually does so again and again, until an event comes
                self.scheduler.poll()

    def _noted(self, task: Task, operation: str, what: str) -> _Noted:
        event = self.trace.call(task.rank, operation, what, self.scheduler.now, place=self.where(), background=task.number)
        self.faults.on_call(task.rank, operation)
        return _Noted(self, event)

    def _forsaken(self, task: Task) -> BaseException:
        headline = (
            f"{self.scheduler.whereabouts(task)}, and nothing has happened for minutes: it waits for an event outside of the simulated world. "
            "If that comes from another program or a file, put the wait into `with oneaccord.outside():`"
        )
        return oneaccord.api.DeadlockError("\n".join([headline, *positions(self)]), rank=task.rank if task.rank >= 0 else None)

    def _stuck(self) -> None:
        if not self._explained:
            kind, text, rank = explain(self)
            self._explained = text.split("\n")
            self.abort(kind, text, rank)
            if self.scheduler.can_go_on:
                return
        for task in self.scheduler.waiting():
            if task.state is BLOCKED:
                words = [f"rank {task.rank} is {doing(self, task)}, and this wait can never end", *self._explained[1:]]
                if not task.waits_for:
                    words = self._explained
                self.scheduler.throw(task, oneaccord.api.DeadlockError("\n".join(words), rank=task.rank))


class _Noted:
    """Notes when a call ends, and how."""

    __slots__ = ("_event", "_runtime")

    def __init__(self, runtime: SimulatedRuntime, event: CallEvent) -> None:
        self._runtime = runtime
        self._event = event

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._event.end_s = self._runtime.scheduler.now
        self._event.error = "" if error is None else type(error).__name__


class _Place:
    """The place where a task waits once."""

    __slots__ = ("_ends_job", "_scheduler", "_task", "_woken")

    def __init__(self, scheduler: Scheduler, *, ends_job: bool) -> None:
        self._ends_job = ends_job
        self._scheduler = scheduler
        self._task: Task | None = None
        self._woken = False

    def wait(self, timeout_s: float | None) -> bool:
        self._task = self._scheduler.current()  # first: a task that comes from outside waits here
        until = math.inf if timeout_s is None else self._scheduler.now + timeout_s
        try:
            while not self._woken and self._scheduler.block(until, ends_job=self._ends_job):
                pass
        finally:
            self._task = None
        return self._woken

    def wake(self) -> None:
        self._woken = True
        if self._task is not None:
            self._scheduler.wake(self._task)


class _Condition:
    """A condition; its lock is the baton."""

    __slots__ = ("_scheduler", "_waiting")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[Task] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        task = scheduler.current()  # first: a task that comes from outside waits here, and the predicate may be true by then
        until = math.inf if timeout is None else scheduler.now + timeout
        while not predicate():
            self._waiting.append(task)
            woken = False
            try:
                woken = scheduler.block(until)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
            if not woken:
                return predicate()
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)


class _Recorder(FlightRecorder):
    """Records calls in the trace as well; each of them is a moment at which another task may run, and faults strike."""

    def __init__(self, runtime: SimulatedRuntime, rank: int) -> None:
        super().__init__(now=runtime.now)
        self._runtime = runtime
        self._rank = rank
        self._events: dict[Record, CallEvent] = {}
        self._rows: set[int] = set()

    def start(self, channel: int, sequence: int, call: object, nbytes: int = 0) -> Record:
        runtime, scheduler = self._runtime, self._runtime.scheduler
        task = scheduler.current()
        runtime.belong(self._rank)
        record = super().start(channel, sequence, call, nbytes)
        record.where = runtime.where()
        task.doing = record
        if record.is_of_program:
            runtime.last_calls[self._rank] = record
            operation = record.operation
            self._events[record] = runtime.trace.call(
                self._rank,
                operation,
                record.what,
                scheduler.now,
                sequence=sequence,
                group=channel // 2,
                nbytes=nbytes,
                algorithm=record.algorithm,
                place=record.where,
                background=task.number,
            )
            runtime.faults.on_call(self._rank, operation)
            scheduler.end_if_killed()
        scheduler.give_way()
        return record

    def testify(self, channel: int, sequence: int) -> tuple[bool, str]:
        """Return where this rank was at a place; if it was not there, where it is, and where the messages that others receive come from."""
        entered, text = super().testify(channel, sequence)
        if entered:
            return True, text
        return False, "; ".join([story(self._runtime, self._rank), *self._runtime.sent(channel, self._rank)])

    def go_on(self, record: Record) -> None:
        """Note that a request has begun, which no thread runs: it gets a row of its own."""
        super().go_on(record)
        self._runtime.scheduler.current().doing = None
        event = self._events.get(record)
        if event is not None:
            event.background = -next(row for row in range(1, len(self._rows) + 2) if row not in self._rows)
            self._rows.add(-event.background)

    def finish(self, record: Record, error: BaseException | None = None) -> None:
        super().finish(record, error)
        event = self._events.pop(record, None)
        if event is None or event.background >= 0:
            self._runtime.scheduler.current().doing = None
        if event is not None:
            self._rows.discard(-event.background)
            error = error or sys.exception()
            event.end_s = self._runtime.scheduler.now
            event.error = "" if error is None else type(error).__name__
