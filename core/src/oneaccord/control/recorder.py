"""The flight recorder: the last calls of this rank, kept in memory to say after a failure what each rank did."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Progress, Wait
from oneaccord.runtime.idle import blocked, released

__all__ = ["KEPT", "Counted", "Counters", "FlightRecorder", "Record", "Short"]

KEPT = 32
"""The number of short calls that are kept of each group, and of each direction of messages."""
_LONG = 4
"""Over all groups, this many times as many calls are kept that were not short."""

_ENDED = 128
"""The number of groups that have ended whose names are kept."""

Short = tuple[int, int, object, float, float]
"""A short call: channel, sequence number, what it is, when it began, and when it ended; 0.0 while it runs."""


class Counters(Protocol):
    """A counter of calls: ``next`` is the number of the next one."""

    next: int

    def short(self) -> Iterable[Short]:
        """Return the last short calls, the oldest first, and also the one that runs."""
        ...


class Counted:
    """The counters of a rank's calls.

    Attributes
    ----------
    calls
        For each channel of a group, the counter of its collectives.
    sends, receives
        For each channel and rank, the counter of the messages to or from it.
    tagged
        For each channel of a group, the last calls that moved messages with tags.
    answers
        Returns whether a thread of the rank's own moves messages with tags.
    calls_back
        Returns whether the end of a message with a tag, for which no thread may wait, calls a function of the program.
    members
        For each channel of a group, its ranks, as numbers of the world.
    names
        For each number of a group, the group in words; also of the last ones that have ended, whose calls are still kept.
    """

    def __init__(self) -> None:
        self.tagged: dict[int, Counters] = {}
        self.answers: Callable[[], bool] = bool
        self.calls_back: Callable[[], bool] = bool
        self.calls: dict[int, Counters] = {}
        self.sends: dict[int, dict[int, Counters]] = {}
        self.receives: dict[int, dict[int, Counters]] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self.names: dict[int, str] = {}

    def counters(self, channel: int | None = None) -> list[Counters]:
        """Return all counters, or those of a channel."""
        found = [counters for where, counters in list(self.calls.items()) if channel in (None, where)]
        found += [counters for where, counters in list(self.tagged.items()) if channel in (None, where)]
        for counts in (self.sends, self.receives):
            found += [
                counters for where, each in list(counts.items()) if channel in (None, where) for counters in list(each.values())
            ]
        return found

    def forget(self, channel: int) -> None:
        """Forget a channel."""
        for counts in (self.calls, self.sends, self.receives, self.tagged, self.members):
            counts.pop(channel, None)
        ended = [number for number in self.names if 2 * number not in self.members]
        for number in ended[:-_ENDED]:
            del self.names[number]

    def progress(self) -> Progress:
        """Return how far the rank has come. In a job of threads the store may ask while this rank makes calls."""
        sends, receives = (
            {channel: {rank: counters.next for rank, counters in list(each.items())} for channel, each in list(counts.items())}
            for counts in (self.sends, self.receives)
        )
        calls = {channel: counters.next for channel, counters in list(self.calls.items())}
        return Progress(calls, sends, receives, self.answers())


class Record:
    """One call.

    Attributes
    ----------
    channel, sequence
        The channel of its group, and its number there.
    call
        A signature, or an object whose text describes it.
    started, finished
        When it began and ended, on the recorder's clock; ``finished`` is 0.0 while it runs.
    thread
        The thread that made it; 0 if that is not known.
    wait
        What it waits for, once it has waited for a while.
    where
        The line of the program that made the call, if that is known.
    nbytes
        The size of its array.
    members
        The ranks of an exchange.
    group
        The group in words, if that is known.
    quiet_until
        When the store may hear of the wait again.
    """

    __slots__ = (
        "call",
        "channel",
        "finished",
        "group",
        "members",
        "nbytes",
        "quiet_until",
        "sequence",
        "started",
        "thread",
        "wait",
        "where",
    )

    def __init__(self, channel: int, sequence: int, call: CallSignature | object, started: float) -> None:
        self.channel: int = channel
        self.sequence: int = sequence
        self.call: CallSignature | object = call
        self.started: float = started
        self.finished: float = 0.0
        self.thread: int = threading.get_ident()
        self.wait: Wait | None = None
        self.where: str = ""
        self.nbytes: int = 0
        self.members: Sequence[int] = ()
        self.group: str = ""
        self.quiet_until: float = 0.0

    @property
    def what(self) -> str:
        """The call in words, without its number."""
        return self.call.describe() if isinstance(self.call, CallSignature) else str(self.call)

    @property
    def operation(self) -> str:
        """The name of what was called; ``"exchange"`` where this is only a part of a call."""
        if isinstance(self.call, CallSignature):
            return "exchange" if self.call.part else self.call.operation
        return str(self.call).split(maxsplit=1)[0]

    @property
    def is_of_program(self) -> bool:
        """Whether the program made the call, or a call that it is part of. False for an exchange."""
        return isinstance(self.call, CallSignature) or not str(self.call).startswith("the exchange")

    @property
    def digest(self) -> bytes:
        """Eight bytes that differ if ranks do not make the same collective call; empty for other calls."""
        return self.call.digest if isinstance(self.call, CallSignature) and self.channel % 2 == 0 else b""

    @property
    def algorithm(self) -> str:
        """The algorithm or backend that carries the call out, if it is known."""
        return self.call.algorithm if isinstance(self.call, CallSignature) else ""

    def describe(self) -> str:
        """Return the call in words, with its number, its group, and where it was made."""
        where = f" at {self.where}" if self.where else ""
        if self.sequence < 0:
            return self.what + where
        number = self.channel // 2
        return f"{self.what} #{self.sequence}" + (f" of {self.group or f'group {number}'}" if number else "") + where


class FlightRecorder:
    """The last calls of a rank, over all its groups.

    Parameters
    ----------
    length
        The number of calls that are kept.
    now
        The clock.

    Attributes
    ----------
    counted
        The counters of the rank's calls. They keep the short calls; a call becomes a record here when it has to wait.
    kept
        The number of short calls that each counter keeps.
    """

    def __init__(self, length: int = _LONG * KEPT, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.counted: Counted = Counted()
        self.kept: int = KEPT
        self._records: deque[Record | Short] = deque(maxlen=length)
        self._running: set[Record] = set()

    def keep(self, count: int) -> None:
        """Keep another number of calls; before the first group is made.

        Parameters
        ----------
        count
            The number of short calls of each group and direction; of all others, four times as many in all.
        """
        self.kept = count
        self._records = deque(self._records, maxlen=_LONG * count)

    def start(self, channel: int, sequence: int, call: CallSignature | object, nbytes: int = 0) -> Record:
        """Note that a call begins; `finish` must follow, from the same thread, or `go_on` from that one.

        Parameters
        ----------
        channel, sequence, call, nbytes
            As for `Record`.
        """
        record = Record(channel, sequence, call, self._now())
        record.nbytes = nbytes
        record.group = self.counted.names.get(channel // 2, "")
        self._records.append(record)
        self._running.add(record)
        return record

    def note(self, channel: int, sequence: int, call: CallSignature | object, started: float) -> None:
        """Note that a short call has ended.

        Parameters
        ----------
        channel, sequence, call, started
            As for `Record`.
        """
        self._records.append((channel, sequence, call, started, self._now()))

    def forget(self, channel: int) -> None:
        """Count a channel no more, but keep its last calls.

        Parameters
        ----------
        channel
            The channel of a group that has ended.
        """
        for counters in self.counted.counters(channel):
            self._records.extend(counters.short())
        self.counted.forget(channel)

    def go_on(self, record: Record) -> None:
        """Note that the thread that has begun a call goes on; the call, unless it has ended, ends in any thread.

        Parameters
        ----------
        record
            What `start` returned.
        """
        self._running.discard(record)

    def finish(self, record: Record, error: BaseException | None = None) -> None:
        """Note that a call has ended, well or badly.

        Parameters
        ----------
        record
            What `start` returned.
        error
            What it has ended with, if that is not the exception that is handled now.
        """
        record.finished = self._now()
        self._running.discard(record)
        if record.wait is not None:
            released(record.thread)

    def stalled(self, record: Record, wait: Wait) -> None:
        """Note what a call has waited for, and that its thread waits.

        Parameters
        ----------
        record
            What `start` returned.
        wait
            The wait.
        """
        record.wait = wait
        blocked(record.thread)

    def waits(self) -> tuple[list[Wait], bool]:
        """Return the waits of the calls that have waited for a while, and whether these are all running calls."""
        running = list(self._running)
        waits = [other.wait for other in running if other.wait is not None]
        return waits, len(waits) == len(running)

    def records(self) -> list[Record]:
        """Return the calls that are kept, in the order in which they began."""
        shorts = [short for counters in self.counted.counters() for short in counters.short()]
        records = [each if isinstance(each, Record) else self._record(*each) for each in [*shorts, *list(self._records)]]
        records.sort(key=lambda record: record.started)  # a short call began before it became a record
        return records

    def _record(self, channel: int, sequence: int, call: CallSignature | object, started: float, finished: float) -> Record:
        record = Record(channel, sequence, call, started)
        record.finished = finished
        record.thread = 0  # not known: short calls do not note it
        record.group = self.counted.names.get(channel // 2, "")
        return record

    def testify(self, channel: int, sequence: int) -> tuple[bool, str]:
        """Return whether this rank entered a call; and, in words, that call, or what the rank did last.

        Parameters
        ----------
        channel, sequence
            The channel of the call's group, and its number there.
        """
        now = self._now()
        records = self.records()
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
