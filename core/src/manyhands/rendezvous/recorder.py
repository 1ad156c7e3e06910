"""The flight recorder: the last calls of this rank, kept in memory to say who was where when something failed."""

from __future__ import annotations

import threading
import time
from collections import deque

from manyhands.rendezvous.bystanders import blocked, released
from manyhands.rendezvous.messages import Wait
from manyhands.wire import CallSignature

__all__ = ["FlightRecorder", "Record"]


class Record:
    """One call: where, what, and when it began and ended (`time.monotonic`, 0.0 while it runs).

    ``call`` is a signature, or an object whose text says what it is. ``wait`` says what it has waited for, once it has done so for a while.
    """

    __slots__ = ("call", "channel", "finished", "sequence", "started", "thread", "wait")

    def __init__(self, channel: int, sequence: int, call: CallSignature | object) -> None:
        self.channel: int = channel
        self.sequence: int = sequence
        self.call: CallSignature | object = call
        self.started: float = time.monotonic()
        self.finished: float = 0.0
        self.thread: int = threading.get_ident()
        self.wait: Wait | None = None

    def describe(self) -> str:
        """Return the call in words, with its number."""
        what = self.call.describe() if isinstance(self.call, CallSignature) else str(self.call)
        if self.sequence < 0:
            return what
        group = self.channel // 2
        return f"{what} #{self.sequence}" + (f" of group {group}" if group else "")


_Short = tuple[int, int, CallSignature, float, float]
"""A short call that has ended: channel, sequence number, signature, when it began and ended."""


def _record(channel: int, sequence: int, call: CallSignature, started: float, finished: float) -> Record:
    record = Record(channel, sequence, call)
    record.started, record.finished = started, finished
    return record


class FlightRecorder:
    """The last ``length`` calls of a rank, over all its groups.

    Attributes
    ----------
    short
        For each channel its short call that runs: signature, sequence number, and when it began. Such a call is a record of its own only
        when it has to wait, or once it has ended (`note`).
    """

    def __init__(self, length: int = 128) -> None:
        self._records: deque[Record | _Short] = deque(maxlen=length)
        self._running: set[Record] = set()
        self.short: dict[int, tuple[CallSignature, int, float]] = {}

    def start(self, channel: int, sequence: int, call: CallSignature | object) -> Record:
        """Note that a call begins; `finish` must follow, from the same thread."""
        record = Record(channel, sequence, call)
        self._records.append(record)
        self._running.add(record)
        return record

    def note(self, channel: int, sequence: int, call: CallSignature, started: float) -> None:
        """Note that a short call has ended."""
        self._records.append((channel, sequence, call, started, time.monotonic()))
        self.short.pop(channel, None)

    def finish(self, record: Record) -> None:
        """Note that a call has ended, well or badly."""
        record.finished = time.monotonic()
        self._running.discard(record)
        if record.wait is not None:
            released(record.thread)

    def stalled(self, record: Record, wait: Wait) -> None:
        """Note what a call has waited for, and that its thread waits."""
        record.wait = wait
        blocked(record.thread)

    def waits(self) -> tuple[list[Wait], bool]:
        """Return what calls have waited for a while, and whether all calls that run have."""
        running = list(self._running)
        waits = [other.wait for other in running if other.wait is not None]
        return waits, len(waits) == len(running)

    def testify(self, channel: int, sequence: int) -> tuple[bool, str]:
        """Say what this rank did at a place: whether it entered that call, and which call it was or what it did last."""
        now = time.monotonic()
        records = [record if isinstance(record, Record) else _record(*record) for record in list(self._records)]
        for begun_in, (call, number, started) in list(self.short.items()):
            if not any(record.channel == begun_in and record.sequence == number for record in records):
                records.append(_record(begun_in, number, call, started, 0.0))
        for record in reversed(records):
            if record.channel == channel and record.sequence == sequence:
                return True, record.describe()
        running = [record for record in records if not record.finished]
        if running:
            last = running[-1]
            return False, f"in {last.describe()}, for {now - last.started:.1f} s"
        if records:
            last = records[-1]
            return False, f"in no call; the last was {last.describe()}, which ended {now - last.finished:.1f} s ago"
        return False, "no call yet"
