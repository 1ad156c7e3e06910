"""The events of a simulated run, with questions and assertions for tests.

All times are virtual seconds. Nothing here decides anything: a scheduler fills a trace (`Recording`), and people and tests read it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from itertools import pairwise

from oneaccord.api import OPERATIONS, CallEvent, MarkEvent, MessageEvent, Recording, UsageError, many, show_ranks, to_perfetto
from oneaccord_simulated.story import tell

__all__ = ["CallEvent", "MarkEvent", "MessageEvent", "Trace"]

_LISTED = 20
"""How many calls the text of a failed assertion lists, at most."""


class Trace(Recording):
    """All that happened in one run.

    Parameters
    ----------
    world_size
        The number of ranks.
    seed
        The seed of the run; the same program and seed give the same trace.
    keep_messages
        Whether `messages` holds every message. Otherwise messages are only counted, which takes no memory.

    Attributes
    ----------
    calls, messages, marks
        The events, in the order in which they happened.
    duration_s
        When the last rank was done.
    """

    def __repr__(self) -> str:
        messages = sum(self._messages_sent)
        return f"<Trace of {self.world_size} ranks, seed {self.seed}: {len(self.calls)} calls, {messages} messages, {self.duration_s:g} s>"

    # Questions.

    def bytes_sent(self, rank: int) -> int:
        """Return how many bytes a rank sent, headers not counted."""
        return self._bytes_sent[self._rank(rank)]

    def messages_sent(self, rank: int) -> int:
        """Return how many messages a rank sent."""
        return self._messages_sent[self._rank(rank)]

    def count(self, operation: str, rank: int | None = None) -> int:
        """Return how often a rank called an operation; without ``rank``, the most that any rank did.

        Raises
        ------
        UsageError
            There is no such rank or no such operation.
        """
        return max(len(self.calls_of(each, operation)) for each in self._ranks(rank))

    def calls_of(self, rank: int, operation: str | None = None) -> list[CallEvent]:
        """Return the calls of a rank in the order in which they began, those of one operation or all.

        Raises
        ------
        UsageError
            There is no such rank or no such operation.
        """
        calls = super().calls_of(self._rank(rank))
        if operation is None:
            return calls
        self._check_operation(operation)
        return [call for call in calls if call.is_named(operation)]

    def marks_of(self, rank: int) -> list[MarkEvent]:
        """Return the marks of a rank, in order.

        Raises
        ------
        UsageError
            There is no such rank.
        """
        return super().marks_of(self._rank(rank))

    def steps(self, rank: int, label: str = "step") -> list[list[CallEvent]]:
        """Return the calls of a rank step by step.

        A step begins with a mark of the program whose label is ``label``, or begins with it and a blank, as in ``"step 3"``. A call
        belongs to the step in which it begins. Calls before the first such mark belong to none.

        Raises
        ------
        UsageError
            There is no such rank.
        """
        return [calls for _, calls in self._steps(rank, label)]

    # Assertions.

    def assert_at_most(self, count: int, operation: str, *, rank: int | None = None, per: str | None = None) -> None:
        """Check that no rank called an operation more often.

        Parameters
        ----------
        count
            How often is allowed.
        operation
            The name of the operation.
        rank
            The rank that is meant; every rank if None.
        per
            The label of the marks that begin a step: then the count is for each step (see `steps`). None for the whole run.

        Raises
        ------
        AssertionError
            It was called more often; the text says by which rank, at which place, and from which lines.
        UsageError
            There is no such rank or operation, or a rank has no mark with that label.
        """
        __tracebackhide__ = True
        self._assert_count(operation, rank, per, lambda found: found <= count, f"at most {count} is allowed")

    def assert_at_least(self, count: int, operation: str, *, rank: int | None = None, per: str | None = None) -> None:
        """Check that no rank called an operation less often.

        Parameters
        ----------
        count
            How often is expected.
        operation
            The name of the operation.
        rank
            The rank that is meant; every rank if None.
        per
            The label of the marks that begin a step: then the count is for each step (see `steps`). None for the whole run.

        Raises
        ------
        AssertionError
            It was called less often; the text says by which rank, at which place, and which calls were made there instead.
        UsageError
            There is no such rank or operation, or a rank has no mark with that label.
        """
        __tracebackhide__ = True
        self._assert_count(operation, rank, per, lambda found: found >= count, f"at least {count} is expected", list_all=True)

    def assert_bytes_sent_at_most(self, nbytes: int, *, rank: int | None = None) -> None:
        """Check that no rank sent more bytes, headers not counted.

        Parameters
        ----------
        nbytes
            How many are allowed.
        rank
            The rank that is meant; every rank if None.

        Raises
        ------
        AssertionError
            A rank sent more; the text says which, and lists its calls.
        UsageError
            There is no such rank.
        """
        __tracebackhide__ = True
        over = [each for each in self._ranks(rank) if self._bytes_sent[each] > nbytes]
        if over:
            first = over[0]
            with_data = [call for call in self._calls_of[first] if call.nbytes]
            raise AssertionError(
                f"rank {first} sent {many(self._bytes_sent[first], 'byte')} in {many(self._messages_sent[first], 'message')}, but at most "
                f"{nbytes:,} is allowed; its calls with data:\n{_listed(with_data)}{_elsewhere(over)}"
            )

    def assert_no_call(self, operation: str) -> None:
        """Check that no rank called an operation.

        Raises
        ------
        AssertionError
            It was called; the text says by which ranks, and from which lines.
        UsageError
            There is no such operation.
        """
        __tracebackhide__ = True
        self._check_operation(operation)
        found = [call for call in self.calls if call.is_named(operation)]
        if found:
            ranks = show_ranks(call.rank for call in found)
            raise AssertionError(
                f"{ranks} called {operation}, {_times(len(found))} in all, but no such call is allowed:\n{_listed(found, ranks=True)}"
            )

    def assert_same_calls(self) -> None:
        """Check that all ranks made the same collective calls of the world, in the same order and in the same words.

        Raises
        ------
        AssertionError
            They did not; the text shows the first call that differs, and the calls of the ranks.
        """
        __tracebackhide__ = True
        rows = [[call for call in calls if call.group == 0 and call.is_collective()] for calls in self._calls_of]
        for position in range(max(map(len, rows), default=0)):
            called: dict[str, list[int]] = {}
            for rank, row in enumerate(rows):
                called.setdefault(row[position].what if position < len(row) else "", []).append(rank)
            if len(called) > 1:
                lines = [_called(ranks, rows[ranks[0]], position) for ranks in called.values()]
                raise AssertionError(f"the ranks differ in collective call {position} of the world:\n" + "\n".join(lines))

    def assert_duration_at_most(self, seconds: float) -> None:
        """Check that the run took no longer, in virtual seconds.

        Raises
        ------
        AssertionError
            It took longer; the text lists the longest calls.
        """
        __tracebackhide__ = True
        if self.duration_s > seconds:
            longest = sorted(self.calls, key=lambda call: self.end_of(call) - call.start_s, reverse=True)[:_LISTED]
            lines = [f"  {self.end_of(call) - call.start_s:.6f} s from {_line(call, rank=True).lstrip()}" for call in longest]
            raise AssertionError(
                f"the run took {self.duration_s!r} s, but at most {seconds!r} s is allowed; the longest calls:\n"
                + "\n".join(lines or ["  (no call)"])
            )

    # The parts of other texts.

    def to_json(self) -> str:
        """Return the trace in the Chrome trace event format, which https://ui.perfetto.dev and chrome://tracing open.

        The same trace gives the same text, byte for byte.

        Raises
        ------
        InternalError
            Two calls of one thread overlap in part, which no program can do.
        """
        return to_perfetto(self, f"seed {self.seed}")

    def story(self, *, around: float | None = None, last: int = 20) -> str:
        """Return the end of the run, in lines.

        The events before the last collective of the world that all ranks finished are summed up; unfinished calls are shown last. The text
        stays below some sixty lines however large the world is, and says how much it leaves out.

        Parameters
        ----------
        around
            A virtual time in seconds: show the events around it instead.
        last
            The most events of each rank to show.

        Raises
        ------
        UsageError
            ``last`` is not positive.
        """
        return tell(self, around, last)

    def _rank(self, rank: int) -> int:
        __tracebackhide__ = True
        if rank not in range(self.world_size):
            raise UsageError(f"rank {rank!r} was given, but the ranks of this run are 0 to {self.world_size - 1}")
        return rank

    def _ranks(self, rank: int | None) -> Sequence[int]:
        __tracebackhide__ = True
        return range(self.world_size) if rank is None else (self._rank(rank),)

    def _check_operation(self, operation: str) -> None:
        """Refuse a name that nothing has: an assertion about it would hold for the wrong reason."""
        __tracebackhide__ = True
        if not isinstance(operation, str):
            raise UsageError(f"the name of an operation must be a text, such as 'all_reduce', not {operation!r}")
        if operation.partition(" ")[0] in OPERATIONS:
            return
        names = OPERATIONS | {call.operation for call in self.calls}
        if operation not in names:
            close = difflib.get_close_matches(operation, sorted(names), 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(names))}"
            raise UsageError(f"there is no operation {operation!r}{hint}")

    def _steps(self, rank: int, label: str) -> list[tuple[MarkEvent, list[CallEvent]]]:
        calls = self._calls_of[self._rank(rank)]
        marks = [each for each in self._marks_of[rank] if each.is_step(label)]
        bounds = [*(each.calls_before for each in marks), len(calls)]
        return [(each, calls[begin:end]) for each, (begin, end) in zip(marks, pairwise(bounds), strict=True)]

    def _parts(self, rank: int, per: str | None) -> list[tuple[str, list[CallEvent]]]:
        """Return the units of a count: the place, in words, and the calls."""
        __tracebackhide__ = True
        if per is None:
            return [("", self._calls_of[rank])]
        steps = self._steps(rank, per)
        if not steps:
            found = sorted({mark.label for mark in self._marks_of[rank] if mark.kind == "mark"})
            raise UsageError(
                f'per={per!r} needs marks: rank {rank} has none whose label is "{per}" or begins with "{per} "; its marks are '
                f"{', '.join(map(repr, found[:_LISTED])) or 'none'}. Mark the beginning of each step, or leave per= out"
            )
        return [
            (f' in {per} {number} (the mark "{mark.label}" at {mark.time_s:.6f} s)', calls)
            for number, (mark, calls) in enumerate(steps)
        ]

    def _assert_count(
        self,
        operation: str,
        rank: int | None,
        per: str | None,
        holds: Callable[[int], bool],
        expected: str,
        *,
        list_all: bool = False,
    ) -> None:
        __tracebackhide__ = True
        self._check_operation(operation)
        wrong: list[tuple[int, str, list[CallEvent], int]] = []
        for each in self._ranks(rank):
            for where, calls in self._parts(each, per):
                found = [call for call in calls if call.is_named(operation)]
                if not holds(len(found)):
                    wrong.append((each, where, calls if list_all else found, len(found)))
        if wrong:
            first, where, calls, number = wrong[0]
            elsewhere = _elsewhere([each for each, *_ in wrong], len(wrong) if per else 0)
            raise AssertionError(
                f"rank {first} called {operation} {_times(number)}{where}, but {expected}; "
                f"{'all its calls there' if list_all else 'the calls'}:\n{_listed(calls)}{elsewhere}"
            )


def _elsewhere(ranks: Sequence[int], steps: int = 0) -> str:
    """Return a line with the other places of the failure; empty if there are none."""
    if len(ranks) < 2:
        return ""
    return f"\nso it is on {show_ranks(ranks)}{f', in {steps:,} steps' if steps else ''}"


def _called(ranks: Sequence[int], row: Sequence[CallEvent], position: int) -> str:
    if position < len(row):
        return f"  {show_ranks(ranks)} called {row[position].describe()}{_at(row[position])}"
    before = f"after {row[-1].describe()}{_at(row[-1])}" if row else "at all"
    return f"  {show_ranks(ranks)} called none {before}"


def _listed(calls: Sequence[CallEvent], *, ranks: bool = False) -> str:
    lines = [_line(call, rank=ranks) for call in calls[:_LISTED]]
    if len(calls) > _LISTED:
        lines.append(f"  ... and {many(len(calls) - _LISTED, 'call')} more")
    return "\n".join(lines or ["  (no call)"])


def _line(call: CallEvent, *, rank: bool) -> str:
    who = f"rank {call.rank}  " if rank else ""
    outcome = f", {call.error}" if call.error else ", never ended" if call.end_s is None else ""
    return f"{call.start_s:10.6f} s  {who}{call.describe()}{_at(call)}{outcome}"


def _at(call: CallEvent) -> str:
    return f"  at {call.place}" if call.place else ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"
