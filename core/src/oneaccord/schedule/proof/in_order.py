"""The proof that steps may be carried out one after the other, as the engine does: a duty of every algorithm.

`oneaccord.schedule.steps` says what the engine does. Here its worst case is played for all ranks together:

1. A send ends when it is received: that is the latest that a transport may let it end.
2. A receive waits until its send has started.
3. A step that is no send waits until the sends have ended that it comes after.

So a rank waits more than the rules of `oneaccord.schedule.steps` ask, and schedules without a circle there may come to a halt here. This is the
worst case of any call: short messages, which the engine copies, and chunks without elements only take waits away, and a barrier that runs
beside a schedule (`oneaccord.schedule.compose`) adds none, because its messages are empty and its receives come last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from oneaccord.schedule.errors import ScheduleDeadlockError
from oneaccord.schedule.steps import Recv, RecvReduce, Schedule, Send, run_order, sends_before

__all__ = ["check_in_order"]

Way = tuple[int, int]
"""The rank that sends and the one that receives."""


class _Wait(NamedTuple):
    """For a message, given by its place among those of its way: until it has been sent, or else until its send has ended."""

    way: Way
    number: int
    is_end: bool


def check_in_order(schedules: Sequence[Schedule]) -> None:
    """Check that no rank waits forever when each carries out its steps one after the other, however late sends end.

    Parameters
    ----------
    schedules
        The schedules of ranks 0, 1, ... in this order, which `oneaccord.schedule.proof.verify.verify` has proved.

    Raises
    ------
    ScheduleDeadlockError
        Some rank does. The message says which rank waits for which, and at which step.
    """
    ranks = [_Rank(schedule) for schedule in schedules]
    started: dict[Way, int] = defaultdict(int)
    received: dict[Way, int] = defaultdict(int)
    while any(rank.go_on(started, received) for rank in ranks):
        pass
    halted = {rank.number: rank for rank in ranks if rank.wait is not None}
    if halted:
        raise _halt(ranks, halted)


class _Rank:
    """A rank on its way through its steps; ``wait`` is what it waits for, None when it has run them all."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.number: int = schedule.rank
        self.steps = schedule.steps
        self.order: list[int] = run_order(schedule)
        self.position: int = 0
        self.wait: _Wait | None = None
        self.messages: dict[Way, list[int]] = defaultdict(list)
        self._places: dict[int, tuple[Way, int]] = {}
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Send | Recv | RecvReduce):
                way = (self.number, step.peer) if isinstance(step, Send) else (step.peer, self.number)
                self._places[index] = way, len(self.messages[way])
                self.messages[way].append(index)
        self._waits: list[list[_Wait]] = self._find_waits()

    def _find_waits(self) -> list[list[_Wait]]:
        """Return what each step waits for."""
        found: list[list[_Wait]] = []
        for index, sent in enumerate(sends_before(self._schedule)):
            waits = [_Wait((self.number, peer), number, is_end=True) for peer, number in sent.items()]
            if index in self._places and not isinstance(self.steps[index], Send):
                waits.append(_Wait(*self._places[index], is_end=False))
            found.append(waits)
        return found

    def go_on(self, started: dict[Way, int], received: dict[Way, int]) -> bool:
        """Run steps until one has to wait; return whether any has run."""
        first = self.position
        while self.position < len(self.order):
            index = self.order[self.position]
            for wait in self._waits[index]:
                if (received if wait.is_end else started)[wait.way] <= wait.number:
                    self.wait = wait
                    return self.position > first
            if index in self._places:
                (started if isinstance(self.steps[index], Send) else received)[self._places[index][0]] += 1
            self.position += 1
        self.wait = None
        return self.position > first


def _halt(ranks: Sequence[_Rank], halted: dict[int, _Rank]) -> ScheduleDeadlockError:
    """Follow ranks that wait for each other until one comes again."""
    path: list[int] = []
    number = min(halted)
    while number in halted and number not in path:
        path.append(number)
        wait = halted[number].wait
        assert wait is not None
        number = wait.way[0] if wait.way[0] != number else wait.way[1]
    circle = path[path.index(number) :] if number in path else path
    shown = [_words(ranks, halted[each]) for each in circle[:16]]
    left_out = [f"({len(circle) - 16} more)"] if len(circle) > 16 else []
    run, there = sum(rank.position for rank in ranks), sum(len(rank.order) for rank in ranks)
    return ScheduleDeadlockError(
        f"one after the other, {run} of {there} steps can run, and then each of these ranks waits for the next: "
        + " -> ".join([*shown, *left_out, f"rank {number}"]),
        rank=circle[0],
        step=halted[circle[0]].order[halted[circle[0]].position],
    )


def _words(ranks: Sequence[_Rank], rank: _Rank) -> str:
    wait = rank.wait
    assert wait is not None
    index = rank.order[rank.position]
    source, target = wait.way
    where = f"rank {rank.number}, step {index} ({type(rank.steps[index]).__name__})"
    if wait.is_end:
        sent, taken = ranks[source].messages[wait.way][wait.number], ranks[target].messages[wait.way][wait.number]
        return f"{where} waits until rank {target} receives by step {taken} the message that step {sent} sends"
    return f"{where} waits for the message that rank {source} sends by step {ranks[source].messages[wait.way][wait.number]}"
