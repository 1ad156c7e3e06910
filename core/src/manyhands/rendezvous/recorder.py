"""The flight recorder: the last calls of this rank, kept in memory to say who was where when something failed."""

from __future__ import annotations

import threading
import time
from collections import deque

from manyhands.wire import CallSignature

__all__ = ["FlightRecorder", "Record"]


class Record:
    """One call: where, what, and when it began and ended (`time.monotonic`, 0.0 while it runs)."""

    __slots__ = ("call", "channel", "finished", "sequence", "started")

    def __init__(self, channel: int, sequence: int, call: CallSignature | str) -> None:
        self.channel: int = channel
        self.sequence: int = sequence
        self.call: CallSignature | str = call
        self.started: float = time.monotonic()
        self.finished: float = 0.0

    def describe(self) -> str:
        """Return the call in words, with its number."""
        what = self.call if isinstance(self.call, str) else self.call.describe()
        return f"{what} #{self.sequence}"


class FlightRecorder:
    """The last ``length`` calls of a rank, over all its groups.

    Attributes
    ----------
    alone
        Whether all calls so far came from one thread.
    """

    def __init__(self, length: int = 128) -> None:
        self._records: deque[Record] = deque(maxlen=length)
        self._thread = 0
        self.alone: bool = True

    def start(self, channel: int, sequence: int, call: CallSignature | str) -> Record:
        """Note that a call begins."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.alone = not self._thread
            self._thread = thread
        record = Record(channel, sequence, call)
        self._records.append(record)
        return record

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
