"""What the survivors of a job ask: to agree, and to continue without the others. Decisions, without input or output.

Both wait for all survivors, and for no other rank. So a death ends a wait instead of prolonging it, and all get the same answer.

If the launcher starts replacements, the joiners continue with the survivors. A newcomer gets a number behind those of the job that
has failed. Once admitted it counts as a survivor: if the others ask again, it must, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import and_

import msgspec

from oneaccord.common.ranks import show_all_ranks
from oneaccord.control import timing
from oneaccord.control.joiners import Joiners
from oneaccord.control.protocol import (
    Agree,
    Agreement,
    FromRank,
    FromStore,
    GiveUp,
    Gone,
    JobReformed,
    Join,
    Shrink,
    Shrunk,
    Verdict,
)

__all__ = ["ShrinkRequests", "Survivors"]


class Survivors(msgspec.Struct, frozen=True):
    """The state of a job after failures.

    Attributes
    ----------
    ranks
        The survivors: the ranks that have neither ended nor said goodbye.
    know_failure
        Whether all of them have learned that the job has failed.
    vanished
        The ranks that do not answer, and may live.
    has_taken_over
        Whether the store is lost, and its standby decides.
    departed
        How many ranks have said goodbye.
    lost
        The rank that was lost last, if any.
    """

    ranks: list[int]
    know_failure: bool
    vanished: Collection[int]
    has_taken_over: bool
    departed: int
    lost: int | None


class _Vote(msgspec.Struct):
    """An agreement to which some members have come."""

    members: list[int]
    flags: dict[int, Agree] = {}


class ShrinkRequests:
    """The requests of the survivors, and their answers.

    Parameters
    ----------
    send
        Sends a message to a rank that has not ended.
    tell_all
        Sends it to all ranks that have come and not ended.
    left
        Returns the survivors.
    call_later
        Calls a function after a number of seconds.
    joiners
        Where newcomers wait; None if none can come.
    first
        The number of the first newcomer.
    objection
        Returns why a newcomer does not fit the survivors; empty if it does.
    """

    def __init__(
        self,
        send: Callable[[int, FromStore], None],
        tell_all: Callable[[FromStore], None],
        left: Callable[[], Survivors],
        call_later: Callable[[float, Callable[[], None]], None],
        joiners: Joiners | None,
        first: int,
        objection: Callable[[Join], str],
    ) -> None:
        self._send = send
        self._tell_all = tell_all
        self._left = left
        self._call_later = call_later
        self._joiners = joiners
        self._first = self._next = first
        self._objection = objection
        self._asking: dict[int, Shrink] = {}
        self._votes: dict[str, _Vote] = {}
        self._waiting: set[int] = set()
        self._admitted: set[int] = set()
        self._reformed: set[int] = set()
        self._waited_s = 0.0
        self._is_looking = False

    def check(self) -> None:
        """Answer what can be answered now: a rank has ended, or the job has failed."""
        self._check_shrink()
        for name in list(self._votes):
            self._check_vote(name)

    def _refusal(self, left: Survivors, operation: str) -> Verdict | None:
        """Return why the survivors must neither continue nor agree, since others might do so without them; None if they may."""
        if self._reformed:
            them = "it" if len(self._reformed) == 1 else "them"
            text = f"{show_all_ranks(self._reformed)} continued without {show_all_ranks(left.ranks)}, which must not continue beside {them}"
            ours = [rank for rank in self._reformed if rank < self._first]  # newcomers are no ranks of this job
            peer = min(ours, default=left.lost)
            return Verdict("lost", text, peer, operation)
        others = len(left.vanished)
        if others > len(left.ranks) or (0 < others == len(left.ranks) and left.has_taken_over):
            text = (
                f"{show_all_ranks(left.vanished)} cannot be reached, and may live: they are not fewer than {show_all_ranks(left.ranks)}, which must not continue "
                "beside them; start the job anew"
            )
            return Verdict("lost", text, min(left.vanished), operation)
        return None

    # To agree

    def agree(self, rank: int, message: Agree) -> None:
        """Take in a rank's part of an agreement."""
        vote = self._votes.setdefault(message.name, _Vote(message.members))
        vote.flags[rank] = message
        self._check_vote(message.name)

    def _check_vote(self, name: str) -> None:
        vote = self._votes[name]
        left = self._left()
        living = [rank for rank in vote.members if rank in left.ranks]
        if all(rank in vote.flags for rank in living):
            problem = self._refusal(left, "agree")
            if problem is not None:
                self._end_vote(name, Agreement(name, 0, problem))
                return
            # The flags of ranks that have ended since count as well. What a former store has told one member is decided for all.
            told = [given for given in vote.flags.values() if given.is_told]
            self._end_vote(name, Agreement(name, reduce(and_, (given.flag for given in told or vote.flags.values()))))

    def _end_vote(self, name: str, message: Agreement) -> None:
        vote, left = self._votes.pop(name), self._left().ranks
        for rank, given in sorted(vote.flags.items()):
            if rank in left:
                self._send(rank, msgspec.structs.replace(message, attempt=given.attempt))

    # To continue

    def shrink(self, rank: int, message: Shrink) -> None:
        """Take in that a rank asks to continue."""
        self._asking[rank] = message
        if self._joiners is not None:
            self._joiners.open(self._admit, self._hear, self._lose)
        self._check_shrink()

    def _check_shrink(self) -> None:
        left = self._left()
        ranks = [*left.ranks, *sorted(self._admitted)]
        if not left.know_failure or not left.ranks or not all(rank in self._asking for rank in ranks):
            return
        problem = self._refusal(left, "shrink")
        if problem is not None:
            self._answer_all(Shrunk([], "", 0, problem))
        elif self._joiners is None:
            self._continue(ranks)
        else:
            self._continue_with_newcomers(ranks, left, self._joiners)

    def add_reformed(self, ranks: Collection[int]) -> None:
        """Take in that ranks are in the next job. The others have missed it, and all learn so, since the store may end with those ranks."""
        is_first, self._reformed = not self._reformed, self._reformed | {*ranks}
        if is_first:  # one message is enough
            told = JobReformed(sorted(self._reformed))
            self._tell_all(told)
            self.tell_newcomers(told)
            self._check_shrink()

    def _continue(self, ranks: list[int]) -> None:
        ranks = sorted(
            ranks, key=lambda rank: not self._asking[rank].accepts_joiners
        )  # the first gets the store, which lets others in
        first = self._asking[ranks[0]]
        self._answer_all(Shrunk(ranks, first.host, first.port, certificate=first.certificate))

    def _answer_all(self, message: Shrunk) -> None:
        asked, self._asking = self._asking, {}
        left = self._left().ranks
        self._waited_s = 0.0
        if self._joiners is not None:
            self._admitted.update(rank for rank in message.ranks if rank in self._waiting)
            self._waiting.clear()
            self._joiners.close(self._admitted.__contains__)
        for rank, question in sorted(asked.items()):
            answer = msgspec.structs.replace(message, attempt=question.attempt)
            if rank in left:
                self._send(rank, answer)
            elif rank in self._admitted and self._joiners is not None:
                self._joiners.send(rank, msgspec.structs.replace(answer, you=rank))

    # Newcomers

    def _continue_with_newcomers(self, ranks: list[int], left: Survivors, joiners: Joiners) -> None:
        """Let the survivors continue once as many newcomers have come as the launcher starts."""
        roster = joiners.roster()
        waiting = sorted(rank for rank in self._waiting if rank in self._asking)
        wanted = min(roster.running - left.departed, roster.most)
        patience_s = min(self._asking[rank].patience_s for rank in left.ranks)
        if roster.hosts > 1:  # this host does not know what others start; later newcomers are let in later
            wanted, patience_s = roster.most - left.departed, min(patience_s, timing.FAR_S if joiners.is_here else 0.0)
        if len(ranks) + len(waiting) < wanted and self._waited_s < patience_s:
            if not self._is_looking:
                self._is_looking = True
                self._call_later(timing.NEWCOMERS_LOOK_S, self._look_again)
            return
        ranks += waiting[: max(0, roster.most - len(ranks))]
        # A rank with the join address gets the store of the next job, which waits for newcomers before it counts the ranks.
        if len(ranks) >= roster.fewest or (not joiners.is_here and any(self._asking[rank].accepts_joiners for rank in ranks)):
            self._continue(ranks)
            return
        text = (
            f"{'1 rank is' if len(ranks) == 1 else f'{len(ranks)} ranks are'} left, and the job needs {roster.fewest} or more to continue (--min-ranks): "
            "start it anew"
        )
        self._answer_all(Shrunk([], "", 0, Verdict("lost", text, left.lost, "shrink")))

    def _look_again(self) -> None:
        self._is_looking = False
        self._waited_s += timing.NEWCOMERS_LOOK_S
        self._check_shrink()

    def _admit(self, join: Join) -> int | FromStore:
        problem = self._objection(join)
        if problem:
            return Shrunk([], "", 0, Verdict("rendezvous", problem))
        number, self._next = self._next, self._next + 1
        self._waiting.add(number)
        return number

    def _hear(self, number: int, message: FromRank) -> None:
        if isinstance(message, Shrink) and number in self._waiting | self._admitted:
            self.shrink(number, message)
        elif isinstance(message, GiveUp):
            self.give_up(number, message)
        elif isinstance(message, JobReformed):
            self.add_reformed(message.ranks)

    def _lose(self, number: int, reason: str) -> None:
        self._waiting.discard(number)
        self._asking.pop(number, None)
        if number in self._admitted:
            self._admitted.remove(number)
            self._tell_all(Gone(number, reason))
            self.tell_newcomers(Gone(number, reason))
            self._check_shrink()

    def tell_newcomers(self, message: Gone | JobReformed) -> None:
        """Tell the admitted newcomers which survivors have ended, or are in the next job."""
        for number in sorted(self._admitted):
            if self._joiners is not None:
                self._joiners.send(number, message)

    # To wait no longer

    def give_up(self, rank: int, message: GiveUp) -> None:
        """Take in that a rank's wait has timed out: tell all that wait which ranks have not come; they may ask again."""
        vote = self._votes.get(message.agreement)
        came: Mapping[int, Shrink | Agree] = self._asking if not message.agreement else {} if vote is None else vote.flags
        if rank not in came or came[rank].attempt != message.attempt:  # it has been answered meanwhile, or has asked again
            return
        missing = [rank for rank in self._left().ranks if rank not in came and (vote is None or rank in vote.members)]
        newcomers = [number for number in self._admitted if number not in came] if vote is None else []
        if not missing and not newcomers:  # they have just come
            return
        if vote is None:
            late = [show_all_ranks(missing)] if missing else []
            if newcomers:
                late.append("a new rank" if len(newcomers) == 1 else f"{len(newcomers)} new ranks")
            text = (
                f"the group did not shrink within {message.timeout_s:g} s: {' and '.join(late)} did not call shrink(), and did not end either; "
                "every survivor must call it"
            )
            self._answer_all(Shrunk([], "", 0, Verdict("deadline", text, missing[0] if missing else None, "shrink")))
        else:
            text = (
                f"{message.agreement} did not end within {message.timeout_s:g} s: {show_all_ranks(missing)} did not come, and did not end either; every "
                "surviving member must call it"
            )
            problem = Verdict("deadline", text, missing[0], "agree")
            self._end_vote(message.agreement, Agreement(message.agreement, 0, problem))
