"""The post office of a rank: all its messages with tags, of all its groups.

Sends and receives are requests: they begin at once, and are moved by whichever thread waits for one of them. That thread *drives*: it waits for all
lines at once, takes what comes, answers it, and sends what waits. Other threads that wait are woken when their own request has ended. Only
while requests are left and no thread waits does a thread of the office drive.

The lock protects everything but the wait itself. So a thread that begins a request while another one drives starts the transfer itself,
and lets the driver look again (`Transport.interrupt`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

from oneaccord.calls.engine.waiting import Overdue, checked_wait
from oneaccord.calls.post.courier import Courier
from oneaccord.calls.post.envelopes import NO_RANK
from oneaccord.calls.post.lines import Line
from oneaccord.calls.post.messages import Letter, Operation, Receive, Send
from oneaccord.calls.post.sorting import NotReady, Sorter
from oneaccord.contract.backend import LinkLost, Transfer
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Place
from oneaccord.errors import UsageError
from oneaccord.job.job import Job

__all__ = ["FIRST_STALL_S", "NEXT_STALL_S", "NotReady", "PostOffice"]

FIRST_STALL_S, NEXT_STALL_S = 0.2, 0.5
"""After how long a wait is reported to the store, and after how long again."""
_COURIER = -1
"""Stands for the thread of the office among those that use it."""
_SLICE_S = 2e-3
"""How long a driver waits at most if the transport cannot be interrupted and several threads use the office."""


class PostOffice(Sorter):
    """The messages with tags of one rank; a part of its job.

    Parameters
    ----------
    job
        The job.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._look_at = 0.0
        self._parked: dict[Place, Callable[[], bool]] = {}
        self._kept: dict[Operation, tuple[float, float]] = {}
        self._slice_s = math.inf
        self._courier = Courier(self, job.runtime)
        self._inside: set[int] = set()
        self._moving = _Moving(self.lock, self._inside)
        self._posted: Any = None  # the receives that C keeps
        self.spun: bool = False
        """Whether C has just looked for a message for a moment."""
        self._drives = 0
        job.control.counted.answers = lambda: self.has_work
        job.control.counted.calls_back = lambda: self.calls_back
        job.control.on_failure(self._wake_all)

    def open(self, module: Any, compiled: Any, shorts: Any) -> None:
        """Let the compiled form of a group's calls use this office; it notes them in ``shorts``."""
        if self._posted is None:
            self._posted = module.Posted()
            self.matching.take_over = self._posted.hand_over
        where = self._inside, self._parked, self._kept, self._owing, self.lanes
        compiled.open(self, *where, *self.matching.waiting, shorts, self.matching, self._courier, self._posted)
        self.deliver: Callable[[object], int] | None = compiled.deliver

    # As a part of the job

    def close(self) -> Sequence[object]:
        """End the thread of the office, and the requests that a failure of the job has left; return what must be kept."""
        self._courier.stop()
        if self._job.control.failed:
            for each in self.kept():
                if each.request is not None and each.path is not None:
                    self.end(each, each.path.failure(each, LinkLost(self._rank, "the job has ended")))
        return ()

    # Calls begin

    def check_not_inside(self, what: object) -> None:
        """Refuse a call that a signal handler makes while the thread that it has interrupted uses the office.

        Raises
        ------
        UsageError
            It does: the call would find a message half written. Nothing has happened, and the interrupted call goes on.
        """
        if self.is_taken_by_caller:
            raise UsageError(
                f"a signal handler called {what} while this thread was in the middle of another call, for which it would wait forever: set a "
                "flag in the handler, and make the call later, between two calls of the program; nothing was sent",
                rank=self._rank,
                operation=str(what),
            )

    @contextmanager
    def entered(self, what: object) -> Iterator[None]:
        """Let the calling thread use the office in the body; raises as `check_not_inside`."""
        self.check_not_inside(what)
        me = get_ident()
        try:
            self._inside.add(me)
            yield
        finally:
            self._inside.discard(me)

    def pass_through(self, operation: Send | Receive) -> bool:
        """Begin an operation whose line is there, and look for its message for a moment: the short way of most calls.

        Return whether it has begun; if so, it may have ended as well. Not if the calling thread is inside.
        """
        me, lines = get_ident(), self._lines
        try:
            self._inside.add(me)
            if isinstance(operation, Send):
                if operation.peer not in lines and operation.peer != self._rank:
                    return False
                with self.lock:
                    self.send(operation)
                return True
            source = operation.key[1]
            line = lines.get(source)
            if (
                line is None
                and source != self._rank
                and (source != NO_RANK or any(peer not in lines for peer in operation.senders))
            ):
                return False
            with self.lock:
                self.receive(operation)
                if operation.done or line is None or line.incoming is not None or self._driver is not None:
                    return True
                self._driver = me
            self._look(operation, line)
            return True
        finally:
            self._inside.discard(me)

    def _is_owing(self, line: Line) -> None:
        super()._is_owing(line)
        if self._driver is None:
            self._courier.call()

    def take_on(self, receive: Receive, letter: Letter, data: memoryview, came: int) -> None:
        """As for `Sorter`; whose thread drives no more then."""
        try:
            super().take_on(receive, letter, data, came)
        finally:
            self._step_back()

    def keep(self, operation: Operation, timeout_s: float) -> None:
        """Drive for an operation that has begun, even if no thread waits for it, until it ends."""
        if not operation.done:
            operation.limits = self._kept[operation] = self._runtime.now() + timeout_s, timeout_s
            operation.kept_by = self._kept
            self._courier.call()

    def stand(self, receive: Receive) -> None:
        """Drive for a receive that is there for good, until `withdraw`; the end of a group does not wait for it."""
        receive.limits = self._kept[receive] = math.inf, math.inf
        receive.kept_by = self._kept
        self._courier.call()

    def withdraw(self, receive: Receive) -> None:
        """Drive for a receive no longer; under the lock."""
        self._kept.pop(receive, None)
        if self._driver is self._courier:
            self._interrupt()

    # Waiting

    def poll(self) -> None:
        """Move what can be moved now, without waiting; raises as `Transport.wait`."""
        with self.lock:
            if self._driver is not None or not self._lines:
                return
            self._driver = get_ident()
        try:
            with self.lock:
                transfers = self._listen(patient=False)
            assert self._transport is not None
            self._transport.poll(transfers)
            with self.lock:
                self._move()
        finally:
            self._step_back()

    def wait(
        self,
        test: Callable[[], bool],
        until: Deadline,
        on_stall: Callable[[], None] | None,
        awaits: Callable[[], list[int]],
        *,
        check: Callable[[], None] | None = None,
        gives_up: bool = False,
    ) -> None:
        """Drive, or let another thread drive, until ``test()`` holds, which is called under the lock.

        Parameters
        ----------
        test
            Returns whether what the caller waits for has happened.
        until
            Until when.
        on_stall
            Called when nothing has moved for a while.
        awaits
            Returns the ranks of the world that it waits for.
        check
            Raises if the call cannot continue although nothing is wrong with the office; by default `check`.
        gives_up
            Whether the program continues after the deadline; then a task of the office drives in a simulated world.

        Raises
        ------
        Overdue
            The deadline passed.
        LinkLost, Damaged, HeaderMismatch, NotReady
            The job cannot continue.
        """
        patience = None if on_stall is None else Deadline(FIRST_STALL_S)
        moved = -1
        drives = not (gives_up and self._runtime.is_simulated)
        while not self._wait_once(test, until if patience is None or until.at < patience.at else patience, drives=drives):
            if until.passed():
                with self.lock:
                    if test():
                        return
                raise Overdue(awaits() or [self._rank])
            (check or self.check)()
            if patience is not None and on_stall is not None and patience.passed():
                before, moved = moved, self._moved()
                if before == moved:
                    on_stall()
                patience = Deadline(FIRST_STALL_S if before != moved else NEXT_STALL_S)

    def pass_by(self, operation: Operation) -> None:
        """As `look`, for a thread that is not inside."""
        me = get_ident()
        try:
            self._inside.add(me)
            self.look(operation)
        finally:
            self._inside.discard(me)

    def look(self, operation: Operation) -> None:
        """Look for the records of the one rank that could end an operation, for a moment: the way of most receives."""
        peers = operation.awaits()
        line = self._lines.get(peers[0]) if len(peers) == 1 else None
        if line is None:
            return
        with self.lock:
            if self._driver is not None:
                return
            self._driver = get_ident()
        self._look(operation, line)

    def _look(self, operation: Operation, line: Line) -> None:
        """Look for the records of a line, whose driver this thread is, until they end an operation or one must be waited for."""
        try:
            with self.lock:
                spun, self.spun = self.spun, False
                line.recall()
                while not operation.done and line.incoming is None:
                    line.listen(patient=not spun, once=True)
        finally:
            self._step_back()

    def _wait_once(self, test: Callable[[], bool], limit: Deadline, *, drives: bool) -> bool:
        """Drive, or let another thread drive, until a limit; return whether ``test()`` holds."""
        with self.lock:
            if test():
                return True
            place: Place | None = None
            if self._driver is None and self._lines and drives:
                self._driver = get_ident()
            else:
                if self._driver is None and self.has_work:
                    self._courier.call()
                place = self._runtime.place(for_good=drives and self._runtime.is_simulated)
                self._parked[place] = test
                if self._driver is self._courier and not self._runtime.is_simulated:
                    self._interrupt()
        if place is None:
            try:
                return self._drive(test, limit)
            finally:
                self._step_back()
        try:
            place.wait(limit.remaining())
        finally:
            with self.lock:
                self._parked.pop(place, None)
        with self.lock:
            return test()

    def _drive(self, test: Callable[[], bool], limit: Deadline, *, yields: bool = False) -> bool:
        """Drive until ``test()`` holds or a limit; if it ``yields``, also until another thread wants to. Return whether the test holds."""
        transport = self._transport
        assert transport is not None
        locked = self._moving if yields else self.lock
        while True:
            with locked:
                if test():
                    return True
                transfers = self._listen(patient=not yields and len(self._lines) == 1)
                self._wake_able()
                if test():
                    return True
            until = limit
            if limit.remaining() > self._slice_s:
                until = Deadline(self._slice_s, self._runtime.now)
            try:
                checked_wait(transport, transfers, until)
            except TimeoutError:
                if limit.passed() or (yields and self._parked):
                    return False
            with locked:
                self._move()

    def drive_in_background(self, limit: Deadline) -> bool:
        """Drive for the courier, as long as there is something to do and no other thread wants to; return False if it could not begin to."""
        with self.lock:
            if self.is_driven:
                return False
            self._driver = self._courier
        try:
            self._drive(lambda: not self.has_work, limit, yields=not self._runtime.is_simulated)
        finally:
            self._step_back()
        return True

    def _step_back(self) -> None:
        """Let another thread drive."""
        with self.lock:
            if self._driver is not self._courier:
                self._drives += 1
            self._driver = None
            if self._owing:
                self._owing.difference_update([line for line in self._owing if line.is_idle])
            if self._parked:
                self._wake_able()
                for place in self._parked:
                    place.wake()
                    break
            elif self._kept or self._owing:
                self._courier.call()

    def _listen(self, *, patient: bool) -> list[Transfer]:
        """Take what has come on all lines; return what they wait for."""
        waits: list[Transfer] = []
        lines = list(self._lines.values())
        if self._runtime.is_simulated:  # no rank's messages come first for its number
            for last in range(len(lines) - 1, 0, -1):
                other = self._runtime.choose(last + 1)
                lines[last], lines[other] = lines[other], lines[last]
        for line in lines:
            if line.incoming is None:
                line.listen(patient=patient)
            assert line.incoming is not None
            waits.append(line.incoming)
        waits += [line.outgoing for line in lines if line.outgoing is not None]
        return waits

    def _move(self) -> None:
        for line in list(self._lines.values()):
            incoming, outgoing = line.incoming, line.outgoing
            if outgoing is not None and outgoing.done:
                line.write_on()
            if incoming is not None and incoming.done:
                line.read_on()
        self._wake_able()

    def _moved(self) -> int:
        with self.lock:
            return sum(line.moved for line in self._lines.values())

    def is_reading(self, peers: Sequence[int]) -> bool:
        """Return whether a message of one of some ranks is on its way: however long a link is down, no rank needs do anything for it."""
        lines = [self._lines.get(peer) for peer in peers]
        return any(line is not None and line.is_reading for line in lines)

    def check(self) -> None:
        """Raise `LinkLost` if the job has ended: nothing may come any more, even if this thread waits for another one."""
        if self._job.control.failed or self._job.closed:
            raise LinkLost(self._rank, "the job has ended")

    def _wake_able(self) -> None:
        """Wake the threads that let others drive, and need not wait any more. Under the lock."""
        if self._parked:
            for place in [place for place, test in self._parked.items() if test()]:
                del self._parked[place]
                place.wake()

    def _wake_all(self) -> None:
        """Let the threads that let others drive see that the job has failed, if it may be that nobody drives."""
        for place in tuple(self._parked):  # without the lock: those that hold it may be about to report a failure themselves
            place.wake()

    def _ended(self) -> None:
        self._wake_able()
        if self._driver is not None and self._driver != get_ident():
            self._interrupt()

    def _interrupt(self) -> None:
        """Let the driver look again: there is something new to wait for, or another thread wants to drive."""
        if self._transport is not None:
            self._slice_s = math.inf if self._transport.interrupt() else _SLICE_S

    @property
    def is_taken_by_caller(self) -> bool:
        """Whether the calling thread is in the middle of another call of the office, which a signal has interrupted."""
        return get_ident() in self._inside

    # What is kept

    @property
    def drives(self) -> int:
        """How often a thread of the program has driven, or has begun a receive in C, for which it may drive soon."""
        return self._drives if self._posted is None else self._drives + self._posted.drives

    @property
    def has_work(self) -> bool:
        """Whether there is something to do although no thread may wait for it."""
        # A copy: other threads change the set under the lock, which those who ask here need not have.
        return bool(self._kept) or bool(self._posted) or any(not line.is_idle for line in tuple(self._owing))

    @property
    def calls_back(self) -> bool:
        """Whether the end of an operation calls a function of the program."""
        self.matching.take_over()
        return any(each.request is not None and each.request.calls_back for each in tuple(self._kept))

    @property
    def has_duties(self) -> bool:
        """Whether there is something to do that ends by itself."""
        kept = tuple(self._kept.values())
        return (
            any(until < math.inf for until, _ in kept)
            or bool(self._posted)
            or any(not line.is_idle for line in tuple(self._owing))
        )

    @property
    def is_driven(self) -> bool:
        """Whether a thread drives or is about to, or there is nothing to drive."""
        return self._driver is not None or (bool(self._parked) and not self._runtime.is_simulated) or not self._lines

    def earliest(self) -> float:
        """Return when the time of the first of the operations is up for which no thread waits."""
        with self.lock:
            self.matching.take_over()
            return min((until for until, _ in list(self._kept.values())), default=float("inf"))

    def time_given(self, operation: Operation) -> float:
        """Return how many seconds an operation had in all."""
        return 0.0 if operation.done or operation.limits is None else operation.limits[1]

    def time_left(self, operations: Sequence[Operation]) -> float:
        """Return the seconds until the time of one of some operations is up."""
        with self.lock:
            limits = [each.limits[0] for each in operations if not each.done and each.limits is not None]
            until = min(limits, default=self._runtime.now())
        return until - self._runtime.now()

    def overdue(self) -> Operation | None:
        """Return an operation whose time is up and for which no thread waits."""
        now = self._runtime.now()
        with self.lock:
            if now < self._look_at:
                return None
            if not self._runtime.is_simulated:
                self._look_at = now + 0.05 + 1e-6 * len(self._kept)
            if self._posted is not None and self._posted.earliest(now) <= now:
                self.matching.take_over()
            # A copy: C hands receives over without the lock.
            return next((each for each, (until, _) in list(self._kept.items()) if until <= now), None)

    def kept(self, context: int | None = None) -> list[Operation]:
        """Return the operations for which no thread may wait, of one group or all."""
        with self.lock:
            self.matching.take_over()
            return [each for each in list(self._kept) if context in (None, each.context)]

    def end(self, operation: Operation, error: BaseException) -> None:
        """End an operation by an error."""
        me, inside = get_ident(), self._inside
        was_inside = me in inside
        try:
            inside.add(me)  # C, which takes no lock, begins no receive meanwhile
            with self.lock:
                if operation.done:
                    return
                if isinstance(operation, Receive):
                    self.matching.withdraw(operation)
                operation.error = error
                operation.finish()
                self._ended()
        finally:
            if not was_inside:
                inside.discard(me)


class _Moving:
    """The lock of an office for its own thread, during whose waits C, which takes no lock, may begin sends and receives: not in between.

    Parameters
    ----------
    lock, inside
        The lock of the office, and its threads of the program.
    """

    def __init__(self, lock: AbstractContextManager[bool], inside: set[int]) -> None:
        self._lock = lock
        self._inside = inside

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._inside.add(_COURIER)

    def __exit__(self, *error: object) -> None:
        self._inside.discard(_COURIER)
        self._lock.__exit__(None, None, None)
