"""What the ranks that are left of a job ask of each other: to agree, and to go on without the others. Decisions, without input or output.

Both wait for all that are left, and for nobody else. So a death ends a wait instead of prolonging it, and what is told is alike on all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from operator import and_

import msgspec

from manyhands.control.protocol import Agree, Agreement, FromStore, GiveUp, Shrink, Shrunk, Verdict
from manyhands.control.verdicts import show_ranks

__all__ = ["Left", "Survivors"]


class Left(msgspec.Struct, frozen=True):
    """Who is left of a job.

    Attributes
    ----------
    ranks
        Those that have neither ended nor said goodbye.
    may_go_on
        Whether all have been told that the job has failed.
    vanished
        Those that do not answer any more, and may live.
    has_taken_over
        Whether this is decided in the place of a store that has ended.
    """

    ranks: list[int]
    may_go_on: bool
    vanished: Collection[int]
    has_taken_over: bool


class _Vote(msgspec.Struct):
    """An agreement of which some members have come; ``settled`` is what another store has told of it."""

    members: list[int]
    flags: dict[int, int] = {}
    settled: int | None = None


class Survivors:
    """The wishes of those that are left.

    Parameters
    ----------
    send
        Gives a message to a rank that has not ended.
    left
        Tells who is left.
    """

    def __init__(self, send: Callable[[int, FromStore], None], left: Callable[[], Left]) -> None:
        self._send = send
        self._left = left
        self._asking: dict[int, Shrink] = {}
        self._votes: dict[str, _Vote] = {}

    def check(self) -> None:
        """Look again whether anybody has got what it waits for: somebody has ended, or the job has."""
        self._check_shrink()
        for name in list(self._votes):
            self._check_vote(name)

    # To agree

    def agree(self, rank: int, message: Agree) -> None:
        """Take in a rank's part of an agreement."""
        vote = self._votes.setdefault(message.name, _Vote(message.members))
        vote.flags[rank] = message.flag
        if message.is_settled:
            vote.settled = message.flag
        self._check_vote(message.name)

    def _check_vote(self, name: str) -> None:
        vote = self._votes[name]
        living = [rank for rank in vote.members if rank in self._left().ranks]
        if all(rank in vote.flags for rank in living):
            # The flags of those that have ended since count as well: who was told by another store was told them, too.
            flag = reduce(and_, vote.flags.values()) if vote.settled is None else vote.settled
            self._tell_vote(name, Agreement(name, flag))

    def _tell_vote(self, name: str, message: Agreement) -> None:
        vote, left = self._votes.pop(name), self._left().ranks
        for rank in sorted(vote.flags):
            if rank in left:
                self._send(rank, message)

    # To go on

    def shrink(self, rank: int, message: Shrink) -> None:
        """Take in that a rank asks to go on."""
        self._asking[rank] = message
        self._check_shrink()

    def _check_shrink(self) -> None:
        left = self._left()
        if not left.may_go_on or not left.ranks or not all(rank in self._asking for rank in left.ranks):
            return
        others = len(left.vanished)
        if others > len(left.ranks) or (others == len(left.ranks) and left.has_taken_over):
            text = (
                f"{show_ranks(left.vanished)} cannot be reached, and may live: they are not fewer than {show_ranks(left.ranks)}, who must not go on "
                "beside them; start the job anew"
            )
            self._tell_shrunk(Shrunk([], "", 0, Verdict("lost", text, min(left.vanished), "shrink")))
        else:
            first = self._asking[left.ranks[0]]
            self._tell_shrunk(Shrunk(left.ranks, first.host, first.port))

    def _tell_shrunk(self, message: Shrunk) -> None:
        asked, self._asking = self._asking, {}
        left = self._left().ranks
        for rank in sorted(asked):
            if rank in left:
                self._send(rank, message)

    # To wait no longer

    def give_up(self, message: GiveUp) -> None:
        """Take in that a rank has waited for so long: name to all that wait, alike, who has not come; they may ask again."""
        vote = self._votes.get(message.agreement)
        came: Collection[int] = self._asking if not message.agreement else () if vote is None else vote.flags
        missing = [rank for rank in self._left().ranks if rank not in came and (vote is None or rank in vote.members)]
        if not came or not missing:  # they have just come
            return
        if vote is None:
            text = (
                f"the group did not shrink within {message.timeout_s:g} s: {show_ranks(missing)} did not call shrink(), and did not end either; "
                "every rank that is left must call it"
            )
            self._tell_shrunk(Shrunk([], "", 0, Verdict("deadline", text, missing[0], "shrink")))
        else:
            text = (
                f"{message.agreement} did not end within {message.timeout_s:g} s: {show_ranks(missing)} did not come, and did not end either; every "
                "member that is left must call it"
            )
            problem = Verdict("deadline", text, missing[0], "agree")
            self._tell_vote(message.agreement, Agreement(message.agreement, 0, problem))
