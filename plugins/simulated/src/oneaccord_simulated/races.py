"""Races: two ranks use the same elements of a window, one of them changes them, and nothing puts the two in an order.

Each rank has a vector clock (Fidge 1988, Mattern 1989): how much of each rank's past it knows. What a rank sends takes its clock along, and who
receives it knows all of that from then on. So do collectives, which are messages, words that pass through the store, and locks. A call on a
window is in an order with a later one of another rank if that rank knows a moment at which it was complete. That does not depend on which of
the two came first in this run: a race is found under each seed in which both calls happen, also if the result was right.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

__all__ = ["Races"]

_PRUNED = 64
"""After so many calls on a window, those are forgotten that come before all that any rank can still do."""

Clock = list[int]


class Elements(Protocol):
    """Elements of a window."""

    def meets(self, other: Any) -> bool:
        """Return whether the two have an element in common."""
        ...


class _Access:
    """A call on a window: whose, on which elements, and when it was complete on the rank's own clock."""

    __slots__ = ("call", "elements", "end", "is_atomic", "rank", "where", "writes")

    def __init__(
        self, rank: int, elements: Elements, call: object, where: str, end: float, *, writes: bool, is_atomic: bool
    ) -> None:
        self.rank = rank
        self.elements = elements
        self.call = call
        self.where = where
        self.end = end
        self.writes = writes
        self.is_atomic = is_atomic

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.call}{f' at {self.where}' if self.where else ''}"


class Races:
    """The clocks of the ranks of one run, and what they did to windows.

    Parameters
    ----------
    world_size
        How many ranks there are.
    where
        Returns the line of the program that the calling task works for.
    """

    def __init__(self, world_size: int, where: Callable[[], str]) -> None:
        self._where = where
        self._is_on = False
        self._clocks: list[Clock] = []
        self._sent: dict[Hashable, deque[Clock | None]] = {}
        self._released: dict[Hashable, Clock] = {}
        self._accesses: dict[tuple[int, int], list[_Access]] = {}
        self._size = world_size

    # As oneaccord.contract.runtime.History

    def begins(self, backend: str) -> bool:
        """Note that there is a window; return whether all messages of its ranks are seen here, which those of another backend are not.

        Until there is one, nothing is to be found, and clocks would cost time in large worlds.
        """
        if backend != "simulated":
            return False
        if not self._is_on:
            self._is_on = True
            self._clocks = [[int(other == rank) for other in range(self._size)] for rank in range(self._size)]
        return True

    def gives(self, rank: int, key: Hashable) -> None:
        """Note that a rank sends a message."""
        self._sent.setdefault(key, deque()).append(self.snapshot(rank))

    def takes(self, rank: int, key: Hashable) -> None:
        """Note that a rank has received the next message with a key."""
        sent = self._sent.get(key)
        if sent:
            self.learn(rank, sent.popleft())
            if not sent:
                del self._sent[key]

    def releases(self, rank: int, key: Hashable) -> None:
        """Note that what a rank has done comes before all that acquires the key from now on."""
        clock = self.snapshot(rank)
        if clock is not None:
            _merge(self._released.setdefault(key, [0] * self._size), clock)

    def acquires(self, rank: int, key: Hashable) -> None:
        """Note that what has released the key comes before what a rank does from now on."""
        if key in self._released:
            self.learn(rank, self._released[key])

    def access(
        self,
        window: int,
        rank: int,
        target: int,
        elements: Elements,
        call: object,
        *,
        writes: bool,
        is_atomic: bool,
        ends: bool,
    ) -> str:
        """Note that a rank uses elements of a target's window; return words for a race, empty if there is none."""
        clock = self._clocks[rank]
        accesses = self._accesses.setdefault((window, target), [])
        now = _Access(
            rank, elements, call, self._where(), clock[rank] if ends else math.inf, writes=writes, is_atomic=is_atomic
        )
        for before in accesses:
            if (
                before.rank != rank
                and before.end > clock[before.rank]
                and (writes or before.writes)
                and not (is_atomic and before.is_atomic)
                and elements.meets(before.elements)
            ):
                return self._words(before, now, target)
        accesses.append(now)
        if len(accesses) % _PRUNED == 0:
            known = [min(clock[other] for clock in self._clocks) for other in range(self._size)]
            accesses[:] = [each for each in accesses if each.end > known[each.rank]]
        return ""

    def completes(self, window: int, rank: int, targets: Sequence[int]) -> None:
        """Note that what a rank has begun on the windows of some targets is complete."""
        now = self._clocks[rank][rank]
        for target in targets:
            for each in self._accesses.get((window, target), ()):
                if each.rank == rank and each.end == math.inf:
                    each.end = now

    # For messages of the simulated backend

    def snapshot(self, rank: int) -> Clock | None:
        """Return the clock of a rank, for what it sends now; what it does from now on is later. None if there is no window."""
        if not self._is_on:
            return None
        clock = self._clocks[rank]
        taken = list(clock)
        clock[rank] += 1
        return taken

    def learn(self, rank: int, clock: Clock | None) -> None:
        """Let a rank know what a message knows."""
        if clock is not None:
            _merge(self._clocks[rank], clock)

    def _words(self, before: _Access, now: _Access, target: int) -> str:
        ended = before.end < math.inf
        why = (
            ""
            if ended
            else f", and the call of rank {before.rank} was not complete: flush(), fence(), unlock() or complete() comes first"
        )
        return (
            f"a race for elements of the window of rank {target}: {before}, and {now}. No message, barrier or lock puts the two in an order{why}. "
            "Separate them, or let both ranks use accumulate, fetch_and_op or compare_and_swap"
        )


def _merge(into: Clock, other: Clock) -> None:
    for index, value in enumerate(other):
        into[index] = max(into[index], value)
