"""Counters: the turn and the numbers of calls that run one after the other, and the last of them that were short.

A fast call touches them each time. So they have a compiled form, of the module ``oneaccord_native``, which does the same; there the
interpreter's lock takes the place of theirs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Protocol

from oneaccord.control.recorder import KEPT, Short

__all__ = ["Counters", "PythonCounters", "counters_of"]

_now = time.monotonic


class Counters(Protocol):
    """The state of calls that run one after the other.

    Attributes
    ----------
    busy
        Whether a call has the turn.
    next
        The number of the next call.
    messages
        The number of calls that move messages, in any direction, if these counters count them.
    call
        The number by which the call that runs is known to the user.
    started
        When it began.
    """

    busy: bool
    next: int
    messages: int
    call: int
    started: float

    def take(self, turn: object = None, /) -> bool:
        """Take the turn if it is free; otherwise append an object for the turn to the queue, unless it is None. Return which happened."""
        ...

    def give(self) -> Any:
        """Give the turn to the first in the queue, which is returned; None if the queue is empty, and the turn is free."""
        ...

    def drop(self, turn: object, /) -> bool:
        """Take a turn out of the queue; return whether it was there."""
        ...

    def begin(self, what: object, /) -> int:
        """Begin a short call whose turn it is; return its number."""
        ...

    def leave(self) -> None:
        """End the short call that runs; whose turn it is stays so."""
        ...

    def undo(self) -> None:
        """Undo `begin`: the call was not made after all."""
        ...

    def count_message(self) -> int:
        """Count a call that moves messages; return its number."""
        ...

    def short(self) -> Iterable[Short]:
        """Return the last short calls, the oldest first, also the one that runs."""
        ...


class PythonCounters:
    """Counters in Python; also those of a queue that numbers nothing.

    Parameters
    ----------
    channel
        The channel of its calls.
    counted
        Other counters, in which the calls are counted as ones that move messages; None if they are known by their number here.
    kept
        How many of the last short calls are kept.
    """

    __slots__ = ("_channel", "_counted", "_ended", "_lock", "_queue", "_what", "busy", "call", "messages", "next", "started")

    def __init__(self, channel: int = -1, counted: Counters | None = None, kept: int = KEPT) -> None:
        self._channel = channel
        self._counted = counted
        self._lock = threading.Lock()
        self._queue: deque[object] = deque()
        self._what: object = None
        self._ended: deque[Short] = deque(maxlen=kept)
        self.busy: bool = False
        self.next: int = 0
        self.messages: int = 0
        self.call: int = 0
        self.started: float = 0.0

    def take(self, turn: object = None, /) -> bool:
        """As `Counters.take`."""
        with self._lock:
            free = not self.busy
            self.busy = True
            if not free and turn is not None:
                self._queue.append(turn)
        return free

    def give(self) -> Any:
        """As `Counters.give`."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self.busy = False
        return None

    def drop(self, turn: object, /) -> bool:
        """As `Counters.drop`."""
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
                return True
        return False

    def begin(self, what: object, /) -> int:
        """As `Counters.begin`."""
        number = self.next
        self.call = number if self._counted is None else self._counted.count_message()
        self.started = _now()
        self._what = what
        self.next = number + 1
        return number

    def leave(self) -> None:
        """As `Counters.leave`."""
        self._ended.append((self._channel, self.call, self._what, self.started, _now()))
        self._what = None

    def undo(self) -> None:
        """As `Counters.undo`."""
        self._what = None
        self.next -= 1

    def count_message(self) -> int:
        """As `Counters.count_message`; several directions may begin at once."""
        with self._lock:
            self.messages = number = self.messages + 1
        return number

    def short(self) -> Iterable[Short]:
        """As `Counters.short`."""
        what, running = self._what, (self._channel, self.call, self._what, self.started, 0.0)
        return list(self._ended) if what is None else [*self._ended, running]


def counters_of(module: ModuleType | None, channel: int, counted: Counters | None = None, kept: int = KEPT) -> Counters:
    """Return counters in the form of the job: that of the module ``oneaccord_native``, or Python's if it is None."""
    return (PythonCounters if module is None else module.Counters)(channel, counted, kept)
