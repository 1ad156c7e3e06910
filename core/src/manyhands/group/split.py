"""Groups made of groups."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from manyhands.calls.arguments import integer
from manyhands.calls.failures import meet
from manyhands.calls.requests import Operations
from manyhands.calls.runner import Calls
from manyhands.contract.deadline import Deadline
from manyhands.control.cards import write_card
from manyhands.errors import UsageError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["DividingCalls"]

G = TypeVar("G")


class DividingCalls(Calls, ABC, Generic[G]):
    """The calls that divide a group into others of type ``G``."""

    def __init__(self, job: Job, members: Members, operations: Operations, timeout_s: float) -> None:
        super().__init__(job, members, operations, timeout_s)
        self._counting = threading.Lock()
        self._splits = 0
        self._subgroups: dict[tuple[int, ...], int] = {}

    @abstractmethod
    def _child(self, number: int, ranks: tuple[int, ...], deadline: Deadline) -> G:
        """Return the group of these ranks of the world."""

    def split(self, color: int | None, key: int | None = None, *, timeout_s: float | None = None) -> G | None:
        """Divide the group into new ones: ranks that give the same color come together. Every rank must call it.

        The new group has its own traffic and its own ranks, from 0 on; it may be used at the same time as this one and any other,
        also from other threads. Errors name ranks as the world counts them: see `ranks`. Two threads of a rank must not divide
        one group at once, since nothing tells which of their calls belong together.

        Parameters
        ----------
        color
            Which of the new groups this rank joins: any integer of 64 bits; None for none of them.
        key
            The order of ranks in the new group, those with equal keys in the order of this group; by default that of this group.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        Group or None
            The new group that this rank belongs to; None where ``color`` is None.

        Raises
        ------
        UsageError
            ``color`` or ``key`` is no integer.
        """
        card = write_card((integer(color, "color"), integer(key, "key") or 0))
        deadline = self._begin(timeout_s)
        self._check_open("split")
        # Counted last: a call that is refused must not change which calls of the ranks belong together.
        with self._counting:
            self._splits = count = self._splits + 1
        name = f"split #{count} of group {self._members.number}"
        cards, number = self._meet(name, card, self._members.ranks, deadline)
        wishes = self._job.read_cards(cards, tuple[int | None, int], name, self._members.ranks)
        if color is None:
            return None
        chosen = sorted((order, rank) for rank, (other, order) in enumerate(wishes) if other == color)
        place = sorted({other for other, _ in wishes if other is not None}).index(color)
        return self._child(number + place, tuple(self._members.ranks[rank] for _, rank in chosen), deadline)

    def subgroup(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> G | None:
        """Make a group of these ranks, in this order. All of them must call it; to the others it is free to do so.

        Parameters
        ----------
        ranks
            Ranks of this group, each once, the same list on all of them.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        Group or None
            The new group, as for `split`; None on a rank that is not in it.

        Raises
        ------
        InvalidRankError
            One of them is not in this group.
        UsageError
            One of them occurs twice, or there are none, or that is no list.
        """
        if not hasattr(ranks, "__iter__"):
            raise UsageError(f"ranks must be a list of ranks of this group, and {ranks!r} was given")
        chosen = tuple(self._operations.arguments.rank(rank, "a member of ranks") for rank in ranks)
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"ranks must name at least one rank, and each once, and {list(ranks)} was given")
        deadline = self._begin(timeout_s)
        self._check_open("subgroup")
        if self._members.rank not in chosen:
            return None
        with self._counting:
            self._subgroups[chosen] = count = self._subgroups.get(chosen, 0) + 1
        name = f"subgroup {list(chosen)} #{count} of group {self._members.number}"
        members = tuple(self._members.ranks[rank] for rank in chosen)
        _, number = self._meet(name, b"", members, deadline)
        return self._child(number, members, deadline)

    def _meet(self, name: str, card: bytes, members: tuple[int, ...], deadline: Deadline) -> tuple[list[bytes], int]:
        """Trade cards with the members of a group to be; return them, and a number that no other group has."""
        try:
            return meet(self._job, self._members, name, card, members, deadline)
        except BaseException:
            self._saw()
            raise
