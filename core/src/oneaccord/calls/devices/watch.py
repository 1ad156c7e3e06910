"""Looks after what was launched on devices: deadlines, failures, waits that others should know of, and works that others wait for.

A launch costs no event. This thread records one behind the last launch of a group on each stream, asks now and then whether it has been
reached, and does so again until nothing new was launched.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

from oneaccord.calls.devices.kinds import said_call
from oneaccord.common.threads import Thread
from oneaccord.contract.device import DeviceChannel, DeviceEvent, DeviceFailure
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report, Wait
from oneaccord.errors import ClosedError, OneAccordError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["DeviceWatch", "Followed", "Launched", "Watched"]

_LOOK_S, _SOON_S = 0.05, 0.0005
"""How often to look at what runs, and where somebody waits for this thread to say that it has ended."""
_FIRST_STALL_S, _NEXT_STALL_S = 0.4, 0.5


class Launched(NamedTuple):
    """A call that was enqueued: where, what, when, and how many seconds it may take."""

    stream: int
    keep: Any
    signature: CallSignature
    sequence: int
    started: float
    timeout_s: float


class Followed(Protocol):
    """What is looked after until a device is done with it."""

    def look(self) -> bool:
        """Return whether the device is done with it; does not raise."""

    def give_up(self, error: BaseException) -> None:
        """End, since no thread will look any more."""


class Watched(Protocol):
    """Whose launches are looked after: the calls of a group on devices."""

    @property
    def channel(self) -> DeviceChannel | None:
        """What performs them."""

    @property
    def entered(self) -> Launched | None:
        """What is being launched, or was launched last."""

    @property
    def latest(self) -> dict[int, Launched]:
        """What was launched last on each stream."""

    @property
    def ended(self) -> dict[int, Launched]:
        """Of what was launched last on each stream, what the device is known to be done with."""

    def unfinished(self) -> list[Launched]:
        """Return what was launched last on each stream, where the device may not be done with it."""

    @property
    def members(self) -> Members:
        """The ranks of the group."""

    def report(self, failure: DeviceFailure, what: str) -> OneAccordError:
        """Tell all ranks that the library failed."""


class _Mark:
    """A point on a stream: behind ``known``, and maybe behind what was being launched while the point was made, up to ``last``."""

    __slots__ = ("event", "known", "last", "next_stall")

    def __init__(self, known: Launched, event: DeviceEvent, last: Launched) -> None:
        self.known = known
        self.event = event
        self.last = last
        self.next_stall = last.started + _FIRST_STALL_S


class DeviceWatch:
    """The thread that looks after the launches of a rank.

    Parameters
    ----------
    job
        Whose.

    Attributes
    ----------
    is_idle
        Whether the thread has found nothing to look after, so that it must be woken.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._groups: dict[Watched, dict[int, _Mark]] = {}
        self._followed: list[Followed] = []
        self._urgent = 0
        self._bell = threading.Event()
        self.is_idle: bool = True
        self._over = False
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._known: weakref.WeakSet[DeviceChannel] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, job: Job) -> DeviceWatch:
        """Return the watch of a job, which is made when it is first needed."""
        return job.part(cls)

    def add(self, group: Watched) -> None:
        """Look after a group, from when it first launches something."""
        self._groups[group] = {}

    def follow(self, followed: Followed) -> None:
        """Look after something: it keeps arrays alive, and wakes the threads that wait."""
        with self._lock:
            self._followed.append(followed)
        if self.is_idle:
            self.wake()

    def hurry(self, change: int) -> None:
        """Take note that somebody waits for this thread to see the end of a work, or no longer does."""
        with self._lock:
            self._urgent += change
        self.wake()

    def forget(self, group: Watched) -> None:
        """Look after a group no more."""
        self._groups.pop(group, None)

    def wait_for_look(self) -> None:
        """Wait until this thread uses no channel that a forgotten group has given up: its stream and its events may be destroyed then."""
        with self._asking:
            pass

    def close(self) -> list[Followed]:
        """End the thread, and what still waits for it to see an end; return what the device may not be done with."""
        self._over = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        with self._lock:
            left, self._followed = self._followed, []
        kept = [each for each in left if not each.look()]
        for each in kept:
            each.give_up(ClosedError("the group was closed before its GPU was done", rank=self._job.rank))
        return kept

    def wake(self) -> None:
        """Look again: something was launched, or is waited for."""
        self.is_idle = False
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._over:  # type: ignore[redundant-expr] # another thread may have made it
                    self._thread = Thread(target=self._run, name=f"oneaccord-gpus-{self._job.rank}", daemon=True)
                    self._thread.start()
        self._bell.set()

    def _run(self) -> None:
        while True:
            busy = self._look()
            if not busy:
                self.is_idle = True
                busy = self._look()  # what was launched since the last look found the thread awake
            self.is_idle = not busy
            if self._over:
                return
            self._bell.wait((_SOON_S if self._urgent else _LOOK_S) if busy else None)
            self._bell.clear()

    def _look(self) -> bool:
        """Look at everything; return whether anything is still to come."""
        for group in list(self._groups):
            channel = group.channel
            if channel is not None and channel not in self._known:
                self._known.add(channel)
                channel.watch()  # before anything is asked of the device
        with self._lock:
            followed, self._followed = self._followed, []
        left = [each for each in followed if not each.look()]
        with self._lock:
            self._followed[:0] = left
        if self._job.control.failed or self._job.closed:
            self._groups.clear()
            return bool(left)
        examined = [self._examine(group, marks) for group, marks in list(self._groups.items())]
        return any(examined) or bool(left)

    def _examine(self, group: Watched, marks: dict[int, _Mark]) -> bool:
        """Look at the launches of one group, of which ``marks`` has a point for each stream; return whether any are still to come."""
        launches: list[Launched] = []
        try:
            with self._asking:
                channel, launches = group.channel, group.unfinished()
                if channel is None or not launches:
                    marks.clear()
                    return False
                for stream in marks.keys() - {launched.stream for launched in launches}:
                    del marks[stream]  # somebody else has seen its end
                failure = channel.failure()
                if failure is not None:
                    raise failure
                for launched in launches:
                    self._look_at(channel, group, launched, marks)
        except DeviceFailure as failed:
            if failed.is_passing:
                marks.clear()  # one of them may have become part of a graph
                return True
            last = max(launches, key=lambda launched: launched.started)
            group.report(failed, said_call(last.signature, last.sequence))
            return False
        if marks:
            self._wait(group, list(marks.values()))
        return bool(group.unfinished())

    def _look_at(self, channel: DeviceChannel, group: Watched, launched: Launched, marks: dict[int, _Mark]) -> None:
        stream = launched.stream
        mark = marks.get(stream)
        if mark is None:
            if channel.is_capturing(stream):
                return  # it runs when the graph does
            event, entered = channel.record(stream), group.entered
            last = entered if entered is not None and entered.stream == stream else group.latest.get(stream, launched)
            mark = marks[stream] = _Mark(launched, event, last)
        if mark.event.done():
            del marks[stream]
            group.ended[stream] = mark.known

    def _wait(self, group: Watched, marks: list[_Mark]) -> None:
        """Tell the store of a call that is not done; end the job when the time of one is up."""
        now, members = time.monotonic(), group.members
        for mark in marks:
            call = mark.last
            if now - call.started > call.timeout_s:
                sequence = call.sequence if call.sequence >= 0 else None
                text = (
                    f"{said_call(call.signature, call.sequence)} was not done on the GPU of rank {self._job.rank} within {call.timeout_s:g} s, "
                    "with all that the GPU had to do before it"
                )
                name = call.signature.operation
                self._job.fail(Report("deadline", text, None, name, members.channel, sequence, list(members.ranks)))
                return
        mark = min(marks, key=lambda each: each.known.started)
        call = mark.last
        if call.sequence >= 0 and now >= mark.next_stall:
            mark.next_stall = now + _NEXT_STALL_S
            others = [rank for rank in members.ranks if rank != self._job.rank]
            name, digest = call.signature.operation, call.signature.digest
            wait = Wait(members.channel, call.sequence, name, digest, others, [], list(members.ranks))
            self._job.control.waits_in_background(wait)
