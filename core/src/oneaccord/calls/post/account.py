"""What others learn of calls with tags that no thread runs: observers, the flight recorder, and the trace of a simulated run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from oneaccord.calls.observed import Observation
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.order.counters import Counters
from oneaccord.calls.post.messages import Letter, Operation, Receive, Send
from oneaccord.control.recorder import Record, Short

__all__ = ["Account", "Kept", "about", "came"]


class Kept:
    """The last calls of a group that were short, for the flight recorder, and its requests.

    Parameters
    ----------
    kept
        How many are kept.
    compiled
        Those of the calls that C has made; None if it makes none.

    Attributes
    ----------
    compiled
        As above.
    calls
        Those that have ended, the oldest first.
    running
        The requests that have begun and not ended.
    """

    def __init__(self, kept: int, compiled: Counters | None) -> None:
        self.next: int = 0
        self.compiled: Counters | None = compiled
        self.calls: deque[Short] = deque(maxlen=kept)
        self.running: dict[object, Short] = {}
        self._kept = kept

    def short(self) -> list[Short]:
        """Return them, the oldest first; of the requests that run, as many as are kept of the others."""
        ended: list[Short] = list(self.calls)
        if self.compiled is not None:
            ended = sorted([*ended, *self.compiled.short()], key=lambda call: call[3])[-self._kept :]
        return [*ended, *list(self.running.values())[-self._kept :]]

    def end(self, request: object, now: float) -> None:
        """Note that a request has ended."""
        begun = self.running.pop(request, None)
        if begun is not None:
            self.calls.append((*begun[:4], now))


class Account(NamedTuple):
    """The beginning of a call, of which those learn that see all of them.

    Attributes
    ----------
    call_sequence
        The call sequence of its group.
    observation, record
        What observers, and what the trace of a simulated run, know of it; None if nobody is there.
    """

    call_sequence: CallSequence
    observation: Observation | None
    record: Record | None

    def end(self, error: BaseException | None, operations: Sequence[Operation]) -> None:
        """Let them learn of its end."""
        if self.observation is not None:
            self.observation.end(error, **({} if error is not None else came(operations)))
        if self.record is not None:
            self.call_sequence.end(self.record, error)


def about(letter: Letter) -> dict[str, Any]:
    """Return what observers learn of a message that has come."""
    return {"nbytes": letter.nbytes, "dtype": "" if letter.dtype is None else str(letter.dtype)}


def came(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return what observers learn at the end of a call that only receives; nothing of another one."""
    letters = [each.letter for each in operations if isinstance(each, Receive) and each.letter is not None]
    return about(letters[0]) if letters and not any(isinstance(each, Send) for each in operations) else {}
