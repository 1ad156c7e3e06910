"""What all kinds of calls of a group share: their turn, their deadline, and the way into the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from manyhands.arrays.memory import Array
from manyhands.calls.devices.actions import DeviceAction
from manyhands.calls.devices.shortcuts import DeviceShortcut
from manyhands.calls.devices.watch import DeviceWatch
from manyhands.calls.devices.work import DeviceWork
from manyhands.calls.failures import check_usable
from manyhands.calls.fast import Shortcut
from manyhands.calls.requests import Operations, Traded
from manyhands.calls.turns import Lane
from manyhands.calls.work import Work
from manyhands.contract.deadline import Deadline
from manyhands.errors import CommError, DeadlineError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """A group without its methods.

    Parameters
    ----------
    job, members
        Where the group lives, and who belongs to it.
    operations
        What its calls do.
    timeout_s
        Seconds that a call may last where it does not say.
    """

    def __init__(self, job: Job, members: Members, operations: Operations, timeout_s: float) -> None:
        self._job = job
        self._members = members
        self._operations = operations
        self._timeout_s = timeout_s
        self._lane = operations.collectives.lane
        self._callbacks = Lane(job.runtime)
        self._shortcuts = operations.collectives.shortcuts
        self._on_devices = operations.devices.shortcuts

    def _begin(self, timeout_s: float | None) -> Deadline:
        """Begin a call; return until when it may last."""
        self._job.runtime.enter(self._job.rank)
        return Deadline(self._timeout_s if timeout_s is None else timeout_s, self._job.runtime.now)

    def _check_open(self, what: str | None = None, sequence: int | None = None) -> None:
        try:
            check_usable(self._job, self._members.number, what, sequence)
        except CommError:
            self._saw()
            raise

    def _now(self, what: str, action: Callable[[Deadline], T], timeout_s: float | None) -> T:
        """Run a collective in this thread when its turn comes, and return its result."""
        deadline = self._begin(timeout_s)
        self._check_open(what, self._operations.collectives.sequence)  # before it waits for the turn of a group that has closed
        try:
            self._lane.take(deadline)
        except TimeoutError:
            raise DeadlineError(
                f"{what} did not begin within {deadline.timeout_s:g} s: an earlier collective on this group was still running; "
                "nothing was sent",
                rank=self._job.rank,
                operation=what,
            ) from None
        try:
            return action(deadline)
        except CommError:
            self._saw()
            raise
        finally:
            self._lane.give()

    def _quickly(self, kind: tuple[object, ...], array: Any, out: Any, timeout_s: float | None) -> Array | None:
        """Make a call the short way, if one of its kind, dtype and shape was made before; None where it must go the long way."""
        if timeout_s is not None:
            return None
        shortcut: Shortcut | DeviceShortcut | None
        try:
            if type(array) is np.ndarray:
                shortcut = self._shortcuts.get((kind, array.dtype, array.shape))
            elif self._on_devices:
                shortcut = self._on_devices.get((kind, type(array), array.dtype, array.shape))
            else:
                return None
        except (TypeError, AttributeError):  # an argument that cannot be a key, and cannot be right; no array
            return None
        if shortcut is None:
            return None
        try:
            result: Array | None = shortcut.run(array, out, self._timeout_s)
            return result
        except CommError:
            self._saw()
            raise

    def _between(self, action: Callable[[Deadline], T], timeout_s: float | None) -> T:
        """Run a call in this thread that takes turns with those in the same direction only."""
        if isinstance(action, DeviceAction):  # a device does one thing after the other
            return cast("T", self._now("a message", action, timeout_s))
        deadline = self._begin(timeout_s)
        try:
            return action(deadline)
        except CommError:
            self._saw()
            raise

    def _later(
        self,
        what: str,
        action: Callable[[Deadline], T],
        timeout_s: float | None,
        lane: Lane | None = None,
        *,
        reads: npt.ArrayLike | None = None,
        writes: Sequence[Array | None] = (),
    ) -> Work[T]:
        """Run a call in the background when its turn comes; its time begins then, since those before it have their own.

        ``reads`` and ``writes`` are the arrays of the caller's that it reads, and writes to.
        """
        seconds = self._begin(timeout_s).timeout_s
        self._check_open(what)
        if isinstance(action, DeviceAction):
            return cast("Work[T]", self._beside(what, action, seconds))
        if isinstance(action, Traded):
            return cast("Work[T]", self._trade_then_beside(what, action, seconds))
        work: Work[T] = Work(what, self._callbacks, self._saw)
        runtime, lane = self._job.runtime, lane or self._lane
        if self._operations.inputs is not None:
            action = self._operations.inputs.guard(what, action, lane, reads, writes)
        run = runtime.on_behalf(lambda: work.run(lambda: action(Deadline(seconds, runtime.now))))
        lane.submit(run)
        return work

    def _beside(self, what: str, action: DeviceAction, timeout_s: float) -> Work[Any]:
        """Enqueue a call beside the caller's stream, in this thread if its turn is now."""
        if action.is_copy:
            copied: Work[Any] = Work(what, self._callbacks, self._saw)
            copied.run(lambda: action(Deadline(timeout_s)))
            return copied
        action.begin()
        work = self._device_work(what)
        self._in_turn(lambda: work.launch(lambda: action.launch(Deadline(timeout_s))), waits=not action.is_known)
        return work

    def _trade_then_beside(self, what: str, action: Traded, timeout_s: float) -> Work[Any]:
        """Likewise, for a call whose ranks first tell each other something."""
        if self._operations.devices.channel is None:  # a world of one, where the caller's stream copies
            copied: Work[Any] = Work(what, self._callbacks, self._saw)
            copied.run(lambda: action(Deadline(timeout_s)))
            return copied
        action.begin()
        work = self._device_work(what)

        def run() -> None:
            deadline = Deadline(timeout_s)
            try:
                rest = action.trade(deadline)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for the result
                work.fail(error)
                return
            if isinstance(rest, DeviceAction) and not rest.is_copy:
                work.launch(lambda: rest.launch(deadline))
            else:
                work.run(lambda: rest(deadline))

        self._in_turn(run, waits=True)
        return work

    def _device_work(self, what: str) -> DeviceWork[Any]:
        return DeviceWork(what, self._callbacks, self._saw, self._job, DeviceWatch.of(self._job))

    def _in_turn(self, run: Callable[[], None], *, waits: bool) -> None:
        """Run something in this thread if its turn is now and it does not wait, else in the background when its turn comes."""
        if waits or not self._lane.take_if_free():
            self._lane.submit(run)
            return
        try:
            run()
        finally:
            self._lane.give()

    def _saw(self) -> None:
        """Take note that the program has seen how the job failed; a failure in a handle that was dropped has not been seen."""
        self._job.told = True

    def _lanes(self) -> list[Lane]:
        return [self._lane, *self._operations.peers.lanes(), self._callbacks]

    def _drain(self, deadline: Deadline, *, for_good: bool = True) -> bool:
        """Wait until the calls in flight, and their callbacks, have ended, as long as the deadline allows.

        Tell whether there were none. A callback that closes the group does not wait for itself.
        """
        idle = True
        for lane in self._lanes():
            if lane.runs_here:
                continue
            try:
                idle = lane.take(deadline, for_good=for_good) and idle
            except TimeoutError:
                idle = False
            else:
                lane.give()
        return self._operations.devices.finish(deadline) and idle

    def _when_idle(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the last call that is in flight has ended: mostly now. It must be known that no other one will come."""
        busy = [lane for lane in self._lanes() if lane.runs_here or not lane.is_free]
        left = len(busy)
        counting = threading.Lock()

        def ended() -> None:
            nonlocal left
            with counting:
                left -= 1
                last = left == 0
            if last:
                then()

        if not busy:
            then()
        for lane in busy:
            lane.submit(ended)
