"""The members of a job, and what ended it: the store's decisions, without input or output.

One `Membership` serves a job, in the process of its store. If all ranks are threads, it serves them there. It takes in what the ranks report, and
decides on one *first cause*, which all ranks learn alike. `store_states` has its states and events in a table. The rules behind them:

1. A rank whose control connection ends without a goodbye is lost.
2. A rank that broke a data connection is only suspected. Its control connection usually ends a moment later, and tells more.
3. A mismatch or a missed deadline opens an *inquest*: every rank says what it did at that place, see `inquest`. A rank that does not answer within
   `timing.INQUEST_S` is named as silent.
4. If the store does not answer, since rank 0 is stopped or cut off, each rank gives up by itself, and reports that. So a store that wakes up does
   not take these ranks for lost.
5. Ranks report long waits. Two that wait in one place with different calls are a mismatch, although neither may ever get a message of the other.
6. A rank waits for ever if it waits for what a rank that has left did not do, or in a circle: see `waits`.

After a failure it answers the survivors, once all of them have asked: see `survivors`.

The store tells its standby the first cause before all others. So all ranks learn the same one, even if the store ends as it tells them: see `standby_store`.

It also carries the exchanges in which the members of a group trade cards, and gives out the numbers of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from oneaccord.common.numbers import Numbers
from oneaccord.contract.header import POST_NUMBER
from oneaccord.control import timing, wording
from oneaccord.control.inquest import Inquest, conclude
from oneaccord.control.joiners import Joiners
from oneaccord.control.protocol import (
    Agreed,
    Cards,
    Checkpoint,
    Decided,
    Disbanded,
    Exchange,
    Farewell,
    FromRank,
    FromStore,
    Gone,
    JobReformed,
    Join,
    Leave,
    LeaveGroup,
    Prepare,
    Progress,
    Question,
    Report,
    Shrink,
    Stalled,
    Standby,
    Successor,
    Testimony,
    Verdict,
    Wait,
    Welcome,
    ranks_in,
)
from oneaccord.control.store_states import Action, Event, State, step
from oneaccord.control.survivors import ShrinkRequests, Survivors
from oneaccord.control.waits import circle, still_owed, unanswered, unread

__all__ = ["Membership"]

_NOWHERE = -2
"""The number of no call: a rank that is asked about it says what it did last. An exchange has -1."""
_INQUEST = 1
"""The number of the inquest: each ends the job, so there is one at most."""
_MAX_MISFITS = 16
"""The number of refused processes that are kept, to be named."""


class _Meeting(msgspec.Struct):
    """An exchange of which some members have come."""

    members: list[int]
    cards: dict[int, bytes] = {}


class Membership:
    """The state of one job.

    Parameters
    ----------
    world_size
        The number of ranks.
    key
        The secret that proves membership on data connections.
    send
        Sends a message to a rank.
    call_later
        Calls a function after a number of seconds.
    store
        The rank in whose process this is; None if that process has all ranks.
    joiners
        The server for newcomers; None if none can come.
    """

    def __init__(
        self,
        world_size: int,
        key: bytes,
        send: Callable[[int, FromStore], None],
        call_later: Callable[[float, Callable[[], None]], None],
        store: int | None = None,
        joiners: Joiners | None = None,
    ) -> None:
        self.world_size = world_size
        self.members: dict[int, Join] = {}
        self.verdict: Verdict | None = None
        self._state = State.MEETING
        self._misfits: set[str] = set()
        self._key = key
        self._send = send
        self._call_later = call_later
        self._store = store
        self._left: dict[int, Progress] = {}
        self._gone: dict[int, None] = {}
        self._vanished: set[int] = set()
        self._meetings: dict[str, _Meeting] = {}
        self._numbers = 1
        self._leaving: dict[int, dict[int, Progress]] = {}
        self._disbanded = Numbers()
        self._checkpoints: dict[tuple[str, int], dict[int, bytes]] = {}
        self._stalls: dict[int, Stalled] = {}
        self._waits: dict[tuple[int, int], Wait] = {}
        self._inquest: Inquest | None = None
        self._recovery = ShrinkRequests(
            send, self._tell_all, self._status, call_later, joiners, world_size, self._objection_to_newcomer
        )
        self._standby: Successor | None = None
        self._appointed: int | None = None
        self._former: int | None = None
        self._acts: dict[Action, Callable[..., None]] = {
            Action.WELCOME: self._welcome,
            Action.APPOINT: self._appoint,
            Action.REFUSE_JOIN: self._refuse_join,
            Action.EXCHANGE: self._exchange,
            Action.NOTE_STALL: self._note_stall,
            Action.WEIGH: self._weigh,
            Action.COMPARE: self._compare,
            Action.ASK: self._ask,
            Action.NOTE_ANSWER: self._note_answer,
            Action.CONCLUDE: self._conclude,
            Action.NOTE_LEAVE: self._note_leave,
            Action.NOTE_GROUP: self._note_group,
            Action.FAREWELL: self._say_farewell,
            Action.TELL_STANDBY: self._tell_standby,
            Action.HEED_STANDBY: self._heed_standby,
            Action.ANNOUNCE: self._announce,
            Action.BLAME: self._blame,
            Action.REPORT_GONE: self._report_gone,
            Action.CHECK_FAREWELL: self._check_farewell,
            Action.NOTE_STANDBY: self._note_standby,
            Action.CONFIDE: self._confide,
            Action.PRESENT: self._present,
            Action.SUSPECT: self._suspect,
            Action.SHRINK: self._recovery.shrink,
            Action.AGREE: self._recovery.agree,
            Action.GIVE_UP: self._recovery.give_up,
            Action.NOTE_REFORMED: self._note_reformed,
        }

    @property
    def complete(self) -> bool:
        """Whether every rank has come."""
        return len(self.members) == self.world_size

    @property
    def finished(self) -> bool:
        """Whether every rank has left or gone."""
        is_possible = self.complete and len(self._gone) + len(self._left) >= self.world_size
        return is_possible and len(self._gone.keys() | self._left.keys()) == self.world_size

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said goodbye."""
        return rank in self._left

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def join(self, message: Join) -> Verdict | None:
        """Take a rank in, or return why not: the job has failed, or this rank does not belong to it."""
        if self.verdict is not None:
            return self.verdict
        if not 0 <= message.rank < self.world_size:  # the job still waits for all of its ranks
            misfit = wording.outside(message, self.world_size)
            self.note_misfit(misfit)
            return Verdict("rendezvous", f"{misfit}: start all ranks alike, or give this job an address of its own")
        problem = self._objection(message)
        if problem:
            self.fail(Verdict("rendezvous", problem, peer=message.rank))
            return self.verdict
        self.members[message.rank] = message
        if self.complete:
            self._on(Event.ALL_CAME)
        return None

    def note_misfit(self, misfit: str) -> None:
        """Note in words that a process came that is no rank of this job; they are said if ranks do not come in time."""
        if len(self._misfits) < _MAX_MISFITS:
            self._misfits.add(misfit)

    def _objection(self, message: Join) -> str:
        if message.world_size != self.world_size:
            return wording.other_size(message, self.world_size)
        if message.rank in self.members:
            return wording.twice(message, self.members[message.rank])
        for other in list(self.members.values())[:1]:  # all that have come agree with the first
            return wording.difference(other, message, f"rank {message.rank}")
        return ""

    def _objection_to_newcomer(self, message: Join) -> str:
        left = [rank for rank in self._survivors() if rank in self.members]
        return wording.difference(self.members[left[0]], message, "a new rank") if left else ""

    def handle(self, rank: int, message: FromRank) -> None:
        """Take in a message of a rank that has come."""
        stranger = next((other for other in ranks_in(message) if not 0 <= other < self.world_size), None)
        if stranger is not None:
            self.fail(Verdict("protocol", wording.stranger(rank, stranger, self.world_size), rank))
            return
        self._on(type(message), rank, message)

    def _on(self, event: type | Event, *facts: object) -> None:
        """Do what an event means in this state of the job."""
        self._state, actions = step(self._state, event)
        for action in actions:
            self._acts[action](*facts)

    # The ranks meet and leave

    def _welcome(self) -> None:
        ranks = [self.members[rank] for rank in range(self.world_size)]
        names, places, certificates = zip(*((rank.host, rank.place, rank.certificate) for rank in ranks), strict=True)
        hosts = [names.index(name) for name in names]
        self._tell_all(Welcome(self._key, hosts, [*places], [*certificates] if any(certificates) else []))

    def _refuse_join(self, rank: int, _: Join) -> None:
        self.fail(Verdict("protocol", wording.joined_again(rank), peer=rank))

    def _note_leave(self, rank: int, message: Leave) -> None:
        self._left[rank] = message.progress
        self._forget_disbanded(message.progress)
        self._stalls.pop(rank, None)
        for (other, _), wait in list(self._waits.items()):
            self._check_abandoned(other, wait, {rank: message.progress})
        for name, meeting in list(self._meetings.items()):
            self._check_meeting(name, meeting)
        self._check_farewell()
        self._recovery.check()

    def _check_farewell(self, *_: object) -> None:
        if self.finished:
            self._on(Event.ALL_LEFT)

    def _say_farewell(self) -> None:
        problem = unread(self._left)
        if problem:
            self.fail(Verdict("mismatch", problem))
        else:
            self._tell_all(Farewell())

    # A rank is lost

    def lost(self, rank: int, reason: str, vanished: bool = False) -> None:
        """Take note that a rank's control connection has ended. A rank that has ``vanished`` may live, and be cut off.

        If the network splits, the larger part may continue; of equal parts, the one with the store.
        """
        self._gone[rank] = None
        if vanished:
            self._vanished.add(rank)
        self._on(Event.GONE if rank in self._left else Event.LOST, rank, reason)
        if rank == self._appointed:  # also after a failure: the survivors may take a while to continue
            self._appoint()
        self._recovery.check()

    def _blame(self, rank: int, reason: str) -> None:
        text = wording.lost(self.members[rank], reason, is_meeting=not self.complete)
        self.fail(Verdict("lost", text, rank))
        # Others may know of an earlier failure, and expect to continue with this rank.
        self._tell_all(Gone(rank, reason))

    def _report_gone(self, rank: int, reason: str) -> None:
        self._tell_all(Gone(rank, reason))
        self._recovery.tell_newcomers(Gone(rank, reason))
        if not self._has_standby():
            self._on(Event.STANDBY_HEARD)

    def make_room(self, why: str = "new ranks have come, and there is room for them") -> None:
        """End the job, unless it is ending, so that its ranks continue together with new ones."""
        if not self._left:
            self.fail(Verdict("aborted", f"{why}: shrink() makes a group with them"))

    def will_not_come(self, rank: int, reason: str) -> None:
        """Take note that a rank has ended. If it has come, the end of its connection tells that instead."""
        if rank not in self.members:
            self.fail(Verdict("lost", wording.lost_early(rank, reason), rank))

    def late(self, timeout_s: float, hint: str = "") -> None:
        """End the job if ranks have not come in time."""
        missing = self.missing()
        if missing:
            text = wording.late(missing, self.world_size, timeout_s, self._misfits, hint)
            self.fail(Verdict("deadline", text, peer=missing[0]))

    def take_over(
        self,
        former: int,
        members: dict[int, Join],
        left: dict[int, Progress],
        gone: dict[int, tuple[str, bool]],
        verdict: Verdict | None,
    ) -> None:
        """Take over from a store that is lost.

        Parameters
        ----------
        former
            The rank that had the store.
        members, left
            The ranks that have come, and those that have said goodbye.
        gone
            The ranks whose connections have ended, each with the reason, and whether it has vanished.
        verdict
            The first cause, if the former store has told it.
        """
        self._state = State.RUNNING
        self.members = members
        self._left = left
        self._former = former
        if verdict is not None:
            self.fail(verdict)
        for rank, (reason, vanished) in gone.items():
            self.lost(rank, reason, vanished)
        self._appoint()

    def _appoint(self) -> None:
        """Have a rank prepare to take over; one of another host, if there is one."""
        able = [rank for rank in self._survivors() if rank not in (self._store, self._former)]
        if self._store is not None and able:
            here = self.members[self._store].host
            away = (rank for rank in able if self.members[rank].host != here)
            self._appointed = next(away, able[0])
            ended = [*self._left, *(rank for rank in self._gone if rank not in self._vanished and rank not in self._left)]
            self._send(self._appointed, Prepare(self._store, ended))

    # The ranks work

    def _exchange(self, rank: int, message: Exchange) -> None:
        meeting = self._meetings.setdefault(message.name, _Meeting(message.members))
        meeting.cards[rank] = message.card
        if len(meeting.cards) < len(meeting.members) or any(member not in meeting.cards for member in meeting.members):
            self._check_meeting(message.name, meeting)
            return
        del self._meetings[message.name]
        self._forget_waits(lambda wait: wait.meeting == message.name)  # the next meeting may have the same name
        if self._numbers <= POST_NUMBER < self._numbers + len(meeting.members):
            self._numbers = POST_NUMBER + 1
        cards = Cards(message.name, [meeting.cards[member] for member in meeting.members], self._numbers)
        self._numbers += len(meeting.members)
        for member in meeting.members:
            if member not in self._gone:
                self._send(member, cards)

    def _check_meeting(self, name: str, meeting: _Meeting) -> None:
        if not self._left:
            return
        absent = [member for member in meeting.members if member in self._left and member not in meeting.cards]
        if absent:
            text = wording.absent_from(name, absent[0], meeting.cards)
            self._on(Event.CONFLICT, min(meeting.cards), Report("mismatch", text, absent[0], members=meeting.members))

    def _compare(self, rank: int, message: Checkpoint) -> None:
        place = message.place, message.count
        digests = self._checkpoints.setdefault(place, {})
        digests[rank] = message.digest
        other = next((each for each, digest in digests.items() if digest != message.digest), None)
        if other is not None:
            text = wording.different_devices(rank, other, message)
            self._on(Event.CONFLICT, rank, Report("mismatch", text, other, members=message.members))
        elif len(digests) == len(message.members):
            del self._checkpoints[place]

    def _note_group(self, rank: int, message: LeaveGroup) -> None:
        group, members = message.group, message.members
        left = self._leaving.setdefault(group, {})
        left[rank] = message.progress
        if any(member not in left for member in members):
            for (other, _), wait in list(self._waits.items()):
                if wait.number == group:
                    self._check_abandoned(other, wait, {rank: message.progress})
            return
        del self._leaving[group]
        # Members forget their progress in this group now, some of them before others report theirs in all groups.
        for channel in (2 * group, 2 * group + 1):
            self._disbanded.add(channel)
        for progress_of_left in self._left.values():
            self._forget_disbanded(progress_of_left)
        self._forget_waits(lambda wait: wait.channel in self._disbanded)
        problem = unread(left)
        if problem:
            self.fail(Verdict("mismatch", problem))
            return
        for member in members:
            if member not in self._gone:
                self._send(member, Disbanded(group))

    def _forget_disbanded(self, progress: Progress) -> None:
        """Leave out groups whose messages have been compared."""
        for counts in (progress.sends, progress.receives):
            for channel in [channel for channel in counts if channel in self._disbanded]:
                del counts[channel]

    def _forget_waits(self, is_over: Callable[[Wait], bool]) -> None:
        """Forget what ranks reported of waits that have ended."""
        for place in [place for place, wait in self._waits.items() if is_over(wait)]:
            del self._waits[place]
        for member in [member for member, stalled in self._stalls.items() if any(map(is_over, stalled.waits))]:
            del self._stalls[member]

    def _is_old(self, rank: int, wait: Wait) -> bool:
        """Return whether a rank reported a wait before the store told it the end of that wait, or before its group ended."""
        meeting = self._meetings.get(wait.meeting)
        return wait.channel in self._disbanded or bool(wait.meeting and (meeting is None or rank not in meeting.cards))

    def _note_stall(self, rank: int, message: Stalled) -> None:
        if any(self._is_old(rank, wait) for wait in message.waits):
            return  # with what it still waits for, it reports again
        wait = message.wait
        self._stalls[rank] = message
        self._waits[rank, wait.channel] = wait
        self._check_abandoned(rank, wait, self._left_of(wait))
        place = (wait.channel, wait.sequence)
        for (other, _), theirs in self._waits.items():
            both = wait.is_collective and theirs.is_collective
            if both and (theirs.channel, theirs.sequence) == place and theirs.digest != wait.digest:
                text = wording.different_calls(rank, other)
                self._on(Event.CONFLICT, rank, Report("mismatch", text, other, wait.operation, *place, wait.members))
                return
        waiting = circle(self._stalls, rank, self._owes, self._left_of)
        if waiting:
            text = wording.deadlock(waiting)
            self._on(Event.CONFLICT, rank, Report("deadlock", text, waiting[-1], wait.operation, wait.channel))

    def _owes(self, wait: Wait, rank: int, peer: int, progress: Progress) -> bool:
        if wait.meeting:
            meeting = self._meetings.get(wait.meeting)
            return meeting is not None and peer not in meeting.cards
        return still_owed(wait, rank, peer, progress)

    def _left_of(self, wait: Wait) -> dict[int, Progress]:
        """Return the ranks that have left the group of a wait, or all groups, with what they had done then."""
        return {**self._leaving.get(wait.number, {}), **self._left}

    def _check_abandoned(self, rank: int, wait: Wait, left: Mapping[int, Progress]) -> None:
        """Look whether ``rank`` waits for one of those that have ``left``, each of which is to be compared once with each wait."""
        stalled = self._stalls.get(rank)
        if wait.is_own and not (stalled is not None and stalled.quiet and wait in stalled.waits):
            return  # a thread of the rank itself may end it, or has done so
        wait = unanswered(wait)
        gone = self._left_of(wait) if wait.is_any else {}
        if wait.is_any and not all(peer in gone and self._owes(wait, rank, peer, gone[peer]) for peer in wait.awaiting):
            return
        for peer, progress in left.items():
            concerned = wait.members if wait.is_collective else wait.awaiting
            if self._owes(wait, rank, peer, progress) and peer in concerned:
                self.fail(Verdict("mismatch", wording.abandoned(rank, peer, wait), peer, wait.operation, wait.sequence))
                return

    # A rank reports a failure

    def _weigh(self, rank: int, message: Report) -> None:
        match message.kind:
            case "mismatch" | "deadline":
                self._on(Event.CONFLICT, rank, message)
            case "lost":
                # Both have their control connections: all that is known is that the two cannot talk.
                lost = msgspec.structs.replace(message, text=wording.lost_to(rank, message.peer, message.text))
                self._call_later(timing.SUSPICION_S, lambda: self.fail(_as_verdict(lost)))
            case _:
                self.fail(_as_verdict(message))

    def _ask(self, reporter: int, report: Report) -> None:
        asked = set(report.members or self.members)
        if self._former is not None:  # the members may have waited for its call
            asked.add(self._former)
        self._inquest = Inquest(reporter, report, asked)
        # The timer comes first: among threads the answers come while the questions are being asked.
        self._call_later(timing.INQUEST_S, lambda: self._on(Event.INQUEST_OVER))
        question = Question(_INQUEST, report.channel or 0, _NOWHERE if report.sequence is None else report.sequence)
        for rank in sorted(asked):
            if rank not in self._gone:
                self._send(rank, question)

    def _note_answer(self, rank: int, message: Testimony) -> None:
        if self._inquest is None or message.inquest != _INQUEST:
            return
        self._inquest.answers[rank] = message
        if self._inquest.is_answered(self._gone):
            self._on(Event.INQUEST_OVER)

    def _conclude(self) -> None:
        inquest = self._inquest
        assert inquest is not None
        report, meeting = inquest.report, self._meetings.get(inquest.report.operation or "")
        absent = None
        if meeting is not None:
            absent = [member for member in meeting.members if member not in meeting.cards and member not in inquest.silent]
        finding = conclude(inquest, absent)
        text = wording.verdict_of(inquest, finding)
        self.fail(Verdict(report.kind, text, finding.peer, report.operation, report.sequence))

    # The first cause

    def fail(self, verdict: Verdict) -> None:
        """End the job by a first cause, unless it has one."""
        self._on(Event.CAUSE, verdict)

    def _tell_standby(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if self._standby is not None and self._has_standby():
            self._send(self._standby.rank, Decided(verdict))
            self._call_later(timing.AGREEMENT_S, lambda: self._on(Event.STANDBY_HEARD))
        else:
            self._on(Event.STANDBY_HEARD)

    def _heed_standby(self, rank: int, message: Agreed) -> None:
        if self._standby is not None and rank == self._standby.rank:
            self.verdict = message.verdict
            self._on(Event.STANDBY_HEARD)

    def _announce(self) -> None:
        assert self.verdict is not None
        self._tell_all(self.verdict)
        self._recovery.check()

    # The standby

    def _note_standby(self, rank: int, message: Standby) -> None:
        self._standby = Successor(rank, message.host, message.port)

    def _confide(self, rank: int, _: Standby) -> None:
        assert self.verdict is not None
        self._send(rank, Decided(self.verdict))

    def _present(self, *_: object) -> None:
        assert self._standby is not None
        self._tell_all(self._standby)

    def _has_standby(self) -> bool:
        return self._standby is not None and self._standby.rank not in self._gone

    # The survivors continue

    def _suspect(self, rank: int, _: Shrink) -> None:
        self._call_later(timing.SUSPICION_S, lambda: self.fail(Verdict("failed", wording.unreported(rank), rank)))

    def _note_reformed(self, _: int, message: JobReformed) -> None:
        self._recovery.add_reformed(message.ranks)

    def _survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._gone and rank not in self._left]

    def _status(self) -> Survivors:
        lost = next(reversed(self._gone), None)
        return Survivors(
            self._survivors(), State.FAILED in self._state, self._vanished, self._former is not None, len(self._left), lost
        )

    def _tell_all(self, message: FromStore) -> None:
        for rank in sorted(self.members):
            if rank not in self._gone:
                self._send(rank, message)


def _as_verdict(report: Report) -> Verdict:
    return Verdict(report.kind, report.text, report.peer, report.operation, report.sequence)
