"""Carries a fault plan out: at times of the virtual clock, at calls, and on messages."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from oneaccord.api import show_ranks
from oneaccord_simulated.faults import Corrupt, Drop, FaultPlan, Kill, Pause, Slow
from oneaccord_simulated.flight import Line
from oneaccord_simulated.state import State

__all__ = ["Injector"]

_NOTICE_S = 0.2
"""After how long, on the virtual clock, both ends know that a message was lost."""
_SILENCE_S = 10.0
"""After how long a rank that cannot be reached counts as lost."""


class Injector:
    """The faults of one run.

    Parameters
    ----------
    plan, seed
        The faults; the seed decides which bits change if the plan does not.
    state
        The run that it happens to.
    """

    def __init__(self, plan: FaultPlan, seed: int, state: State) -> None:
        self._state = state
        self._random = random.Random(seed + 1).random  # noqa: S311 - to be repeated
        self._calls: list[Counter[str]] = [Counter() for _ in range(state.world.world_size)]
        self._at_calls: dict[tuple[int, str, int], list[Kill | Pause]] = {}
        self._timed: list[Kill | Pause] = []
        self._slow: dict[int, list[Slow]] = {}
        self._dropped: set[tuple[int, int, int]] = set()
        self._corrupted: dict[tuple[int, int, int], int | None] = {}
        self._messages: Counter[tuple[int, int]] = Counter()
        self._counts_messages = False
        self._still_until: dict[int, float] = {}
        self._held_words: dict[int, list[Callable[[], None]]] = {}
        for fault in plan.faults:
            if isinstance(fault, Kill | Pause):
                if fault.operation is None:
                    self._timed.append(fault)
                else:
                    self._at_calls.setdefault((fault.rank, fault.operation, fault.nth), []).append(fault)
            elif isinstance(fault, Slow):
                self._slow.setdefault(fault.rank, []).append(fault)
            elif isinstance(fault, Drop):
                self._dropped.add((fault.source, fault.dest, fault.nth))
            elif isinstance(fault, Corrupt):
                self._corrupted[fault.source, fault.dest, fault.nth] = fault.bit
        self._counts_messages = bool(self._dropped or self._corrupted)

    def begin(self) -> None:
        """Put the faults with a time on the clock; those at time 0 come before anything else."""
        scheduler = self._state.scheduler
        for fault in self._timed:
            if fault.at_s:
                scheduler.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            else:
                self._strike(fault)
        for time in self._state.links.changes:
            self._watch(time)

    @property
    def is_blocking(self) -> bool:
        """Whether ranks wait in vain because of a fault, and not of their own making."""
        return bool(self._state.flights.held) or self._state.scheduler.stands(None)

    # Ranks

    def on_call(self, rank: int, operation: str) -> None:
        """Take note of a call that begins, and start the faults that are due then."""
        if not self._at_calls:
            return
        calls = self._calls[rank]
        for name in (operation, "*"):
            for fault in self._at_calls.get((rank, name, calls[name]), ()):
                self._strike(fault)
            calls[name] += 1

    def factor(self, rank: int) -> float:
        """Return how many times as long as it should a rank computes."""
        now = self._state.scheduler.now
        return math.prod(slow.factor for slow in self._slow.get(rank, ()) if slow.from_s <= now < slow.until_s)

    def _strike(self, fault: Kill | Pause) -> None:
        state, rank = self._state, fault.rank
        scheduler = state.scheduler
        if rank in state.killed or state.is_over(rank):
            return
        if isinstance(fault, Kill):
            state.killed[rank] = fault.describe()
            state.trace.mark(rank, scheduler.now, fault.describe(), "killed")
            scheduler.kill(rank)
            state.lose(rank, fault.describe())
            return
        state.trace.mark(rank, scheduler.now, fault.describe(), "paused")
        scheduler.stand_still(rank)
        end = scheduler.now + fault.for_s
        self._still_until[rank] = max(end, self._still_until.get(rank, 0.0))
        if end < math.inf:
            scheduler.at(end, lambda: self._resume(rank))

    def _resume(self, rank: int) -> None:
        if self._state.scheduler.now < self._still_until[rank]:
            return  # another pause lasts longer
        self._state.trace.mark(rank, self._state.scheduler.now, "goes on", "resumed")
        self._state.scheduler.go_on(rank)
        for word in self._held_words.pop(rank, []):
            word()

    # Messages

    def count_message(self, line: Line) -> int:
        """Return the number of a message between two ranks; always 0 if no fault needs it."""
        if not self._counts_messages:
            return 0
        pair = line.source, line.dest
        self._messages[pair] += 1
        return self._messages[pair] - 1

    def drops(self, line: Line, number: int) -> bool:
        """Return whether a message is lost."""
        return bool(self._dropped) and (line.source, line.dest, number) in self._dropped

    def lose(self, line: Line, nbytes: int, notice: Callable[[], None]) -> None:
        """Lose a message; call ``notice`` when that shows."""
        now = self._state.scheduler.now
        self._state.trace.message(line.source, line.dest, nbytes, now, math.inf, line.group)
        self._state.trace.mark(line.source, now, f"a message to rank {line.dest} is lost", "fault")
        self._state.scheduler.at(now + _NOTICE_S, notice)

    def corrupts(self, line: Line, number: int, nbytes: int) -> int | None:
        """Return which bit of a message changes on its way; None if it arrives as it was sent."""
        place = line.source, line.dest, number
        if place not in self._corrupted:
            return None
        bit = self._corrupted[place]
        bits = max(1, 8 * nbytes)
        self._state.trace.mark(line.source, self._state.scheduler.now, f"a message to rank {line.dest} is corrupted", "fault")
        return int(self._random() * bits) if bit is None else bit % bits

    # Words between a rank and the store

    def carry(self, dest: int, word: Callable[[], None]) -> None:
        """Bring a message from a rank to the store (-1), or back: at once, unless the receiver is stopped or gone."""
        if self._state.scheduler.stands(dest):
            self._held_words.setdefault(dest, []).append(word)
        elif dest not in self._state.killed:
            word()

    def _watch(self, time: float) -> None:
        """At a time when links are cut, find the ranks that will be silent for long."""
        silent = [rank for rank in range(1, len(self._calls)) if self._state.links.cut_until(0, rank, time) > time + _SILENCE_S]
        if silent:
            self._state.scheduler.at(time + _SILENCE_S, lambda: self._give_up(silent, time))

    def _give_up(self, silent: list[int], since: float) -> None:
        """Let the ranks know that they cannot hear each other: all learn the same, although none of them could know what the others learn."""
        lost = [rank for rank in silent if rank not in self._state.killed and not self._state.is_over(rank)]
        if lost:
            who = f"{show_ranks(lost)} {'was' if len(lost) == 1 else 'were'}"
            between = "it" if len(lost) == 1 else "them"
            words = f"{who} lost: nothing has been heard between {between} and rank 0 since {since:g} s, for {_SILENCE_S:g} s"
            self._state.abort("lost", words, lost[0])
