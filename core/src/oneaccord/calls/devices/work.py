"""The handle of a call on devices that runs beside the program's stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from oneaccord.calls.devices.watch import DeviceWatch
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceEvent, DeviceFailure
from oneaccord.control.protocol import Report
from oneaccord.errors import DeadlineError
from oneaccord.job.job import Job

__all__ = ["DeviceWork", "Underway"]

T = TypeVar("T")

_NAP_S = 0.00005


class Underway(Generic[T]):
    """A call that was enqueued.

    Attributes
    ----------
    end
        The point at which it is done.
    hold
        Makes the caller's current stream wait for that.
    collect
        Gives the result, to the stream that waits, or after the end.
    """

    __slots__ = ("collect", "end", "hold")

    def __init__(self, end: DeviceEvent, hold: Callable[[], None], collect: Callable[[], T]) -> None:
        self.end: DeviceEvent = end
        self.hold: Callable[[], None] = hold
        self.collect: Callable[[], T] = collect


class DeviceWork(Work[T]):
    """A `Work` that is enqueued first, and ends when the device has come to its end.

    Parameters
    ----------
    what, turns, on_failure_seen
        As for `Work`.
    job, watch
        Where the call belongs, and who sees its end.
    """

    __slots__ = ("_ending", "_is_urgent", "_job", "_launched", "_underway", "_watch")

    _waits_are_told = False  # not before it has lasted for a while

    def __init__(self, what: str, turns: Turns, on_failure_seen: Callable[[], None], job: Job, watch: DeviceWatch) -> None:
        super().__init__(what, turns, on_failure_seen)
        self._job = job
        self._watch = watch
        self._launched = threading.Event()
        self._ending = threading.Lock()
        self._underway: Underway[T] | None = None
        self._is_urgent = False

    def launch(self, action: Callable[[], Underway[T]]) -> None:
        """Enqueue the call; for core."""
        try:
            self._underway = action()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller of the result
            self.fail(error)
        else:
            self._watch.follow(self)
        self._launched.set()

    def _finish(self, deadline: Deadline | None) -> T:
        self._check_process()
        self._check_ends()
        if not self._launched.wait(None if deadline is None else deadline.remaining()):
            seconds = 0.0 if deadline is None else deadline.timeout_s
            raise DeadlineError(f"{self._what} was not enqueued within {seconds:g} s; the call continues", operation=self._what)
        underway = self._underway
        if underway is None or self.done():
            return super()._finish(deadline)
        try:
            underway.hold()
        except DeviceFailure as failure:
            self.fail(self._reported(failure))
            return super()._finish(deadline)
        return underway.collect()

    def synchronize(self, timeout_s: float | None = None) -> T:
        """Wait on the host until the device has done the call; return the result. Parameters and errors are those of `Work.wait`."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        self._finish(deadline)
        while not self.done():
            if deadline is not None and deadline.passed():
                raise self._late(deadline)
            time.sleep(_NAP_S)
        return super()._finish(None)

    def done(self) -> bool:
        """Return whether the device has done the call, or it has failed. Never blocks."""
        if not self._ended:
            self._check_process()
        self.look()
        return self._ended

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call ``callback(work)`` once the device has done the call, or it has failed, as `Work.add_done_callback`."""
        super().add_done_callback(callback)
        self._expect_end()

    def _expect_end(self) -> None:
        """Look now, and let the watch look soon, and often."""
        self.look()
        with self._lock:
            first = not self._is_urgent and not self._ended
            self._is_urgent = self._is_urgent or first
        if first:
            self._watch.hurry(1)

    def look(self) -> bool:
        """Look whether the device has come to the end, and end the call if it has, or has failed; return whether the device is done with it."""
        underway = self._underway
        if underway is None:
            return self._ended
        try:
            is_past = underway.end.done()
        except DeviceFailure as failure:
            if failure.is_passing:
                return False
            self.fail(self._reported(failure))
            return True
        # In this order: what was aborted comes to its end as well, with anything in its memory, but the cause was known before that.
        if self._job.control.failed:
            if not self._ended:
                self.fail(self._job.control.ended(self._job.error(), self._what, None))
        elif is_past:
            self.run(underway.collect)
        return is_past

    def give_up(self, error: BaseException) -> None:
        """End the call, since no thread looks any more."""
        self.fail(error)

    def _reported(self, failure: DeviceFailure) -> BaseException:
        text = f"rank {self._job.rank} lost its GPU in {self._what}: {failure.reason}"
        return self._job.fail(Report("aborted", text, self._job.rank))

    def fail(self, error: BaseException) -> None:
        """End the call with an error."""

        def fail() -> T:
            raise error

        self.run(fail)

    def run(self, action: Callable[[], T]) -> None:
        """End the call once, on the first thread that sees its end; for core."""
        with self._ending:
            if self._ended:
                return
            super().run(action)
        self._launched.set()  # it may have ended in another way
        if self._is_urgent:
            self._watch.hurry(-1)
