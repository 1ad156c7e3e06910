"""The parts of a timeline: calls, messages and marks, and their words. It is that of a simulated run or of a real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from oneaccord.schedule.steps import Collective

__all__ = [
    "COLLECTIVES",
    "OPERATIONS",
    "CallEvent",
    "MarkEvent",
    "MessageEvent",
    "Recording",
    "begins_with",
    "many",
    "row_name",
]

COLLECTIVES: frozenset[str] = frozenset(each.value for each in Collective)
"""The operations that all ranks of a group call together; most exist for objects as well."""
OPERATIONS: frozenset[str] = COLLECTIVES | frozenset(
    "send recv sendrecv send_object recv_object broadcast_object all_gather_object gather_object scatter_object split exchange compute sleep".split()
)
"""All operations whose names are known beforehand."""


@dataclass(slots=True)
class CallEvent:
    """One call on one rank; facts that are not known when it begins are filled in later.

    Attributes
    ----------
    rank
        The calling rank.
    operation
        The name, such as ``"all_reduce"``, ``"send"`` or ``"compute"``.
    what
        The call in words, such as ``"all_reduce(float32[4], sum)"``.
    sequence
        Its number in its group; -1 if it has none.
    group
        The number of the group; 0 is the world.
    start_s
        When it began.
    end_s
        When it ended; None if it never did.
    nbytes
        The size of the rank's array.
    algorithm
        The algorithm, or the backend's own call.
    place
        The line of the program that called, such as ``"train.py:31"``; empty if that is not known.
    background
        0 for the rank's own thread, k for its k-th background thread, -k for the k-th row of requests, which no thread runs.
    error
        The name of the exception that ended it; empty if it succeeded.
    """

    rank: int
    operation: str
    what: str
    sequence: int
    group: int
    start_s: float
    end_s: float | None = None
    nbytes: int = 0
    algorithm: str = ""
    place: str = ""
    background: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """The call without its arguments: ``"all_reduce #3"``, ``"broadcast #0 of group 2"``."""
        head = (self.what or self.operation).partition("(")[0].rstrip()
        if self.sequence >= 0:
            head += f" #{self.sequence}"
        return head if self.group == 0 else f"{head} of group {self.group}"

    @property
    def row(self) -> str:
        """The row on which it is shown: empty for the rank's own thread, else ``"background 1"`` or ``"request 1"``."""
        return row_name(self.background)

    def describe(self) -> str:
        """Return the call with its number and arguments: ``"all_reduce #3 (float32[4], sum)"``."""
        _, bracket, arguments = self.what.partition("(")
        return self.name if arguments in {"", ")"} else f"{self.name} {bracket}{arguments}"

    def is_named(self, operation: str) -> bool:
        """Return whether this is such a call.

        Parameters
        ----------
        operation
            A name; ``"exchange"`` means every ``"exchange ..."``.
        """
        return begins_with(self.operation, operation)

    def is_collective(self) -> bool:
        """Return whether all ranks of the group make this call together."""
        return self.operation.removesuffix("_object") in COLLECTIVES


class MessageEvent(NamedTuple):
    """One message from rank to rank.

    Attributes
    ----------
    source, dest
        The sender and the receiver.
    nbytes
        The size of its payload, without its header.
    sent_s
        When it left.
    arrived_s
        When it was there; infinite if it never was.
    group
        The number of the group that it belongs to.
    """

    source: int
    dest: int
    nbytes: int
    sent_s: float
    arrived_s: float
    group: int


@dataclass(slots=True)
class MarkEvent:
    """A moment in the run of one rank.

    Attributes
    ----------
    rank
        Whose moment it is.
    time_s
        When it was.
    label
        The program's label, or the name of the fault.
    kind
        ``"mark"`` for those of the program; ``"fault"``, ``"killed"``, ``"paused"``, ``"resumed"`` or ``"ended"``.
    calls_before
        The number of calls that this rank had begun. In virtual time many events happen at one moment, and this number gives their order.
    """

    rank: int
    time_s: float
    label: str
    kind: str = "mark"
    calls_before: int = 0

    def describe(self) -> str:
        """Return the text of a mark: the label of the program, or the kind and more about it, such as ``"killed: power lost"``."""
        if self.kind == "mark":
            return self.label
        return self.kind if self.label in {"", self.kind} else f"{self.kind}: {self.label}"

    def is_step(self, label: str) -> bool:
        """Return whether the program marked the beginning of a step.

        Parameters
        ----------
        label
            With which label, or with this label, a blank and more.
        """
        return self.kind == "mark" and begins_with(self.label, label)


class Recording:
    """The events of one run, as they are noted.

    Parameters
    ----------
    world_size
        The number of ranks.
    seed
        The seed of a simulated run; 0 for a real one.
    keep_messages
        Whether `messages` holds every message. Otherwise messages are only counted, which takes no memory.

    Attributes
    ----------
    world_size, seed, keep_messages
        As above.
    calls, messages, marks
        The events, in the order in which they were noted.
    duration_s
        When the last rank was done.
    """

    def __init__(self, world_size: int, seed: int, *, keep_messages: bool = True) -> None:
        self.world_size: int = world_size
        self.seed: int = seed
        self.keep_messages: bool = keep_messages
        self.duration_s: float = 0.0
        self.calls: list[CallEvent] = []
        self.messages: list[MessageEvent] = []
        self.marks: list[MarkEvent] = []
        self._calls_of: list[list[CallEvent]] = [[] for _ in range(world_size)]
        self._marks_of: list[list[MarkEvent]] = [[] for _ in range(world_size)]
        self._bytes_sent: list[int] = [0] * world_size
        self._messages_sent: list[int] = [0] * world_size

    def call(
        self,
        rank: int,
        operation: str,
        what: str,
        start_s: float,
        *,
        sequence: int = -1,
        group: int = 0,
        nbytes: int = 0,
        algorithm: str = "",
        place: str = "",
        background: int = 0,
    ) -> CallEvent:
        """Note that a call begins; the caller fills in ``end_s`` when it ends, and ``error`` if it failed.

        Parameters
        ----------
        rank, operation, what, start_s, sequence, group, nbytes, algorithm, place, background
            As for `CallEvent`.
        """
        event = CallEvent(rank, operation, what, sequence, group, start_s, None, nbytes, algorithm, place, background)
        self.calls.append(event)
        self._calls_of[rank].append(event)
        return event

    def message(self, source: int, dest: int, nbytes: int, sent_s: float, arrived_s: float, group: int = 0) -> None:
        """Count a message, and keep it if messages are kept.

        Parameters
        ----------
        source, dest, nbytes, sent_s, arrived_s, group
            As for `MessageEvent`.
        """
        self._bytes_sent[source] += nbytes
        self._messages_sent[source] += 1
        if self.keep_messages:
            self.messages.append(MessageEvent(source, dest, nbytes, sent_s, arrived_s, group))

    def mark(self, rank: int, time_s: float, label: str, kind: str = "mark") -> MarkEvent:
        """Note a moment of a rank.

        Parameters
        ----------
        rank, time_s, label, kind
            As for `MarkEvent`.
        """
        event = MarkEvent(rank, time_s, label, kind, len(self._calls_of[rank]))
        self.marks.append(event)
        self._marks_of[rank].append(event)
        return event

    def calls_of(self, rank: int) -> list[CallEvent]:
        """Return the calls of a rank in the order in which they began.

        Parameters
        ----------
        rank
            The rank.
        """
        return list(self._calls_of[rank])

    def marks_of(self, rank: int) -> list[MarkEvent]:
        """Return the marks of a rank, in order.

        Parameters
        ----------
        rank
            The rank.
        """
        return list(self._marks_of[rank])

    def end_of(self, call: CallEvent) -> float:
        """Return when a call ended; one that never did lasts as long as the run.

        Parameters
        ----------
        call
            One of `calls`.
        """
        return max(self.duration_s, call.start_s) if call.end_s is None else call.end_s


def begins_with(text: str, word: str) -> bool:
    """Return whether a text is a word, or the word, a blank and more."""
    return text == word or text.startswith(f"{word} ")


def row_name(background: int) -> str:
    """Return the name of a rank's row of calls, as `CallEvent.background` numbers them; empty for that of its own thread."""
    if not background:
        return ""
    return f"background {background}" if background > 0 else f"request {-background}"


def many(number: int, noun: str) -> str:
    """Return ``"1 call"`` or ``"4,000 calls"``.

    Parameters
    ----------
    number
        How many there are.
    noun
        The noun, in the singular.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
