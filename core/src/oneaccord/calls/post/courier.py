"""The thread that moves messages while no other thread waits for one.

It begins when it is first needed. It gives way to every thread that waits, and looks again after a millisecond, so that requests that a
program soon waits for cost no thread anything. In a simulated world it is a task, which waits for messages as all do. While another task does so, or
no message can come, it waits for the deadlines of the requests alone.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager
from typing import Protocol

from oneaccord.calls.engine.waiting import Overdue
from oneaccord.calls.post.messages import Operation
from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Runtime

__all__ = ["Courier"]

_PAUSE_S = 1e-3
_LINGERS = 50
"""How many pauses without anything to do there are before the thread sleeps for good."""
_DRIVES_S = 0.05
_END_S = 1.0


class Office(Protocol):
    """What a courier does for its office; as `oneaccord.calls.post.office.PostOffice` has it."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...

    @property
    def drives(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_driven(self) -> bool: ...

    def earliest(self) -> float: ...

    def check(self) -> None: ...

    def drive_in_background(self, limit: Deadline) -> bool: ...

    def overdue(self) -> Operation | None: ...

    def kept(self) -> list[Operation]: ...

    def end(self, operation: Operation, error: BaseException) -> None: ...


class Courier:
    """The thread, or task, of one office.

    Parameters
    ----------
    office
        The office.
    runtime
        The runtime of its threads.
    """

    def __init__(self, office: Office, runtime: Runtime) -> None:
        self._office = office
        self._runtime = runtime
        self._is_called = False
        self._over = threading.Event()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed = runtime.condition() if runtime.is_simulated else None

    def call(self) -> None:
        """Let it look whether there is something to do; under the lock of the office."""
        if self._is_called or self._over.is_set():
            self._look_again()
            return
        self._is_called = True
        if self._runtime.is_simulated:
            self._runtime.start(self._work)
        elif self._thread is None:
            # The rules about waiting see by the name that this thread makes no calls of its own.
            self._thread = Thread(target=self._live, name="oneaccord-post", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started: messages move while a thread waits
                self._is_called, self._thread = False, None
        else:
            self._bell.set()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._bell.set()
        self._look_again()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)

    def _look_again(self) -> None:
        """Let the task of a simulated world look again, if it waits for deadlines."""
        if self._changed is not None:
            with self._changed:
                self._changed.notify_all()

    def _work(self) -> None:
        """Drive, as a task of a simulated world, until there is nothing to do; while another task drives, end what is overdue."""
        office = self._office
        while True:
            with office.lock:
                earliest, is_driven = office.earliest(), office.is_driven
                if self._over.is_set() or not office.has_work or (is_driven and earliest == math.inf):
                    self._is_called = False
                    return
            try:
                until = earliest - self._runtime.now()
                if until > 0 and is_driven:
                    self._wait_for_deadline(earliest, until)
                elif until > 0:
                    office.drive_in_background(Deadline(min(until, 1e9), self._runtime.now))
            except BaseException as error:  # noqa: BLE001 - those that wait for the requests raise it
                self._fail(error)
            else:
                self._end_overdue()

    def _wait_for_deadline(self, earliest: float, seconds: float) -> None:
        office, changed = self._office, self._changed
        assert changed is not None

        def is_other() -> bool:
            return self._over.is_set() or not office.is_driven or office.earliest() != earliest

        with changed:
            changed.wait_for(is_other, seconds)

    def _live(self) -> None:
        office = self._office
        while not self._over.is_set():
            for _ in range(_LINGERS):
                drives = office.drives
                time.sleep(_PAUSE_S)
                if self._over.is_set():
                    return
                try:
                    if office.has_work:
                        office.check()  # also while another thread drives, or there is nothing to drive
                    while drives == office.drives and office.has_work and not office.is_driven and not self._over.is_set():
                        office.check()
                        if not office.drive_in_background(Deadline(_DRIVES_S)):
                            break
                        self._end_overdue()
                    self._end_overdue()
                except BaseException as error:  # noqa: BLE001 - those that wait for the requests raise it
                    self._fail(error)
                if office.has_work:
                    break
            else:
                with office.lock:
                    self._bell.clear()
                    self._is_called = False
                    if office.has_work:  # also what C has begun since, without the lock: from here on it is called for that
                        self._is_called = True
                        continue
                if not self._over.is_set():  # looked at after the bell was silenced, as `stop` rings it after it has said so
                    self._bell.wait()

    def _end_overdue(self) -> None:
        late = self._office.overdue()
        if late is not None:
            self._fail(Overdue(late.awaits()), late)

    def _fail(self, error: BaseException, first: object = None) -> None:
        """End all requests by the first cause of the job's failure."""
        office = self._office
        operations = office.kept()
        operations.sort(key=lambda each: each is not first)
        for operation in operations:
            assert operation.path is not None
            office.end(operation, operation.path.failure(operation, error))
        if not operations:
            self._over.set()  # answers that cannot be sent: the job has ended
