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

    ``wait`` says what it has waited for, once it has done so for a while.
    """

    __slots__ = ("call", "channel", "finished", "sequence", "started", "thread", "wait")

    def __init__(self, channel: int, sequence: int, call: CallSignature | str) -> None:
        self.channel: int = channel
        self.sequence: int = sequence
        self.call: CallSignature | str = call
        self.started: float = time.monotonic()
        self.finished: float = 0.0
        self.thread: int = threading.get_ident()
        self.wait: Wait | None = None

    def describe(self) -> str:
        """Return the call in words, with its number."""
        what = self.call if isinstance(self.call, str) else self.call.describe()
        if self.sequence < 0:
            return what
        group = self.channel // 2
        return f"{what} #{self.sequence}" + (f" of group {group}" if group else "")


class FlightRecorder:
    """The last ``length`` calls of a rank, over all its groups."""

    def __init__(self, length: int = 128) -> None:
        self._records: deque[Record] = deque(maxlen=length)
        self._running: set[Record] = set()

    def start(self, channel: int, sequence: int, call: CallSignature | str) -> Record:
        """Note that a call begins; `finish` must follow, from the same thread."""
        record = Record(channel, sequence, call)
        self._records.append(record)
        self._running.add(record)
        return record

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
        records = list(self._records)
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
