"""Who is in the job, and what ended it: the store's decisions, without input or output of its own.

One `Membership` serves a job, in the store's process (or in the one process of a job whose ranks are threads). It hears
what the ranks report and decides on one *first cause*, which every rank learns alike:

1. A rank whose control connection ends without a goodbye was lost.
2. A rank that broke a data connection is only suspected: mostly its control connection ends a moment later, and says more.
3. A mismatch or a missed deadline opens an *inquest*: every rank says what it did at that place, so that the verdict can
   say who did what. A rank that does not answer within `timing.INQUEST_S` is named as silent.
   Where the store itself does not answer, since rank 0 is stopped or cut off, each rank says that, and tells the store so, in
   case that it hears of it later: ranks that gave up for that reason are not lost.
4. Ranks that wait for long say in which call. Two that wait in one place with different calls are a mismatch, although
   neither may ever meet a message of the other.
5. Who waits for what a rank that has left did not do, or in a circle, waits for ever: see `waits`.

A job that has failed decides one thing more: who is left, once all of those have asked to go on: see `survivors`.

The store tells its successor, another rank, the first cause before it tells anybody else. So all ranks learn alike of it, also where the
store ends in the midst of telling them: see `reserve`.

It also carries the exchanges in which ranks trade cards, each among the members that it names, and gives out the numbers of groups.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from manyhands.common.numbers import Numbers
from manyhands.control import timing
from manyhands.control.lobby import Joiners
from manyhands.control.protocol import (
    ANOTHER_CALL,
    Agree,
    Agreed,
    Cards,
    Checkpoint,
    Decided,
    Disbanded,
    Exchange,
    Farewell,
    FromRank,
    FromStore,
    GiveUp,
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
from manyhands.control.survivors import ShrinkRequests, Survivors
from manyhands.control.verdicts import differ_in_length, show_ranks
from manyhands.control.waits import behind_whom, circle, still_owed, unread

__all__ = ["Membership"]

_MAX_NAMED = 4  # processes that were refused, in one error
_NOWHERE = -2
"""The number of no call: whoever is asked for it tells what it did last. Where ranks meet is -1."""
_ORDER = "every rank must make the same calls, in the same order"


class _Inquest(msgspec.Struct):
    number: int
    reporter: int
    report: Report
    asked: set[int]
    answers: dict[int, Testimony] = {}


class _Meeting(msgspec.Struct):
    """An exchange of which some members have come."""

    members: list[int]
    cards: dict[int, bytes] = {}


class Membership:
    """The state of one job.

    Parameters
    ----------
    world_size
        How many ranks must come.
    key
        What proves membership on data connections.
    send
        Gives a message to a rank.
    call_later
        Calls a function after a number of seconds.
    store
        The rank in whose process this is; None where it ends with all ranks.
    lobby
        Where newcomers wait; None where nobody comes later.
    """

    def __init__(
        self,
        world_size: int,
        key: bytes,
        send: Callable[[int, FromStore], None],
        call_later: Callable[[float, Callable[[], None]], None],
        store: int | None = None,
        lobby: Joiners | None = None,
    ) -> None:
        self.world_size = world_size
        self.members: dict[int, Join] = {}
        self.verdict: Verdict | None = None
        self._misfits: set[str] = set()
        self._key = key
        self._send = send
        self._call_later = call_later
        self._store = store
        self._left: dict[int, Progress] = {}
        self._parted = False
        self._gone: dict[int, None] = {}
        self._vanished: set[int] = set()
        self._meetings: dict[str, _Meeting] = {}
        self._numbers = 1
        self._leaving: dict[int, dict[int, Progress]] = {}
        self._disbanded = Numbers()
        self._checkpoints: dict[tuple[str, int], dict[int, bytes]] = {}
        self._stalls: dict[int, Stalled] = {}
        self._waits: dict[tuple[int, int], Wait] = {}
        self._inquest: _Inquest | None = None
        self._inquests = 0
        self._wishes = ShrinkRequests(
            send, self._tell_all, self._left_over, call_later, lobby, world_size, self._objection_to_newcomer
        )
        self._successor: Successor | None = None
        self._appointed: int | None = None
        self._announced = False
        self._former: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every rank has come."""
        return len(self.members) == self.world_size

    @property
    def finished(self) -> bool:
        """Whether every rank has left or gone."""
        return self.complete and len(self._gone.keys() | self._left.keys()) == self.world_size

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has said goodbye."""
        return rank in self._left

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def join(self, message: Join) -> Verdict | None:
        """Take a rank in; a verdict in return means that it cannot be: the job has failed, or the others wait on without it."""
        if self.verdict is not None:
            return self.verdict
        if not 0 <= message.rank < self.world_size:  # all whom the job waits for can still come
            who = f"{_show(message)} is not in a world of {self.world_size}, which rank 0 was started for"
            self._misfits.add(who)
            return Verdict("rendezvous", f"{who}: start all ranks alike, or give this job an address of its own")
        problem = self._objection(message)
        if problem:
            self.fail(Verdict("rendezvous", problem, peer=message.rank))
            return self.verdict
        self.members[message.rank] = message
        if self.complete:
            ranks = [self.members[rank] for rank in range(self.world_size)]
            names, places, certificates = zip(*((rank.host, rank.place, rank.certificate) for rank in ranks), strict=True)
            hosts = [names.index(name) for name in names]
            self._tell_all(Welcome(self._key, hosts, [*places], [*certificates] if any(certificates) else []))
            self._appoint()
        return None

    def _objection(self, message: Join) -> str:
        if message.world_size != self.world_size:
            return f"{_show(message)} was started for {message.world_size} ranks, and rank 0 for {self.world_size}: start all ranks alike"
        if message.rank in self.members:
            other = self.members[message.rank]
            return f"two processes say that they are rank {message.rank}: {other.pid} on {other.host}, {message.pid} on {message.host}"
        for other in list(self.members.values())[:1]:  # with whom all that have come agree
            return _difference(other, message, f"rank {message.rank}")
        return ""

    def _objection_to_newcomer(self, message: Join) -> str:
        left = self._survivors()
        return _difference(self.members[left[0]], message, "a rank that comes later") if left else ""

    def handle(self, rank: int, message: FromRank) -> None:
        """Take in what a rank that has come says."""
        stranger = next((other for other in ranks_in(message) if not 0 <= other < self.world_size), None)
        if stranger is not None:
            text = (
                f"rank {rank} sent the store a frame that cannot be: it names rank {stranger} in a world of {self.world_size}"
            )
            self.fail(Verdict("protocol", text, rank))
            return
        match message:
            case Exchange():
                self._exchange(rank, message)
            case Stalled():
                self._stalled(rank, message)
            case Report():
                self._reported(rank, message)
            case Testimony():
                if self._inquest is not None and message.inquest == self._inquest.number:
                    self._inquest.answers[rank] = message
                    self._close_inquest_if_complete()
            case Leave(progress):
                self._left[rank] = progress
                self._forget_disbanded(progress)
                self._stalls.pop(rank, None)
                for (other, _), wait in list(self._waits.items()):
                    self._check_abandoned(other, wait)
                for name, meeting in list(self._meetings.items()):
                    self._check_meeting(name, meeting)
                self._say_farewell()
                self._wishes.check()
            case LeaveGroup(group, members, progress):
                self._leave_group(rank, group, members, progress)
            case Checkpoint():
                self._compare(rank, message)
            case Agree() | Shrink() | GiveUp() | JobReformed() | Standby() | Agreed():
                self._handle_end(rank, message)
            case Join():
                self.fail(Verdict("protocol", f"rank {rank} joined twice", peer=rank))

    def _handle_end(self, rank: int, message: Agree | Shrink | GiveUp | JobReformed | Standby | Agreed) -> None:
        """Take in what is about the end of the job, or of this store."""
        match message:
            case Agree():
                self._wishes.agree(rank, message)
            case Shrink():
                self._shrink(rank, message)
            case GiveUp():
                self._wishes.give_up(rank, message)
            case JobReformed(ranks):
                self._wishes.went_on(ranks)
            case Standby(host, port):
                self._successor = Successor(rank, host, port)
                if self.verdict is not None:
                    self._send(rank, Decided(self.verdict))
                self._tell_all(self._successor)
            case Agreed(verdict):
                if self.verdict is not None and not self._announced and self._successor and rank == self._successor.rank:
                    self.verdict = verdict
                    self._announce()

    def lost(self, rank: int, reason: str, vanished: bool = False) -> None:
        """Take note that a rank's control connection has ended; if the rank has ``vanished``, it may live, and be cut off.

        Of two parts of a job that cannot see each other, the larger one may go on; if they are equal, that with the store.
        """
        self._gone[rank] = None
        if vanished:
            self._vanished.add(rank)
        if self.verdict is not None:
            self._tell_all(Gone(rank, reason))
            self._wishes.tell_newcomers(Gone(rank, reason))
            if not self._has_successor():
                self._announce()
        elif rank not in self._left:
            member = self.members[rank]
            when = "" if self.complete else " while the ranks were meeting"
            who = f"its process {member.pid} on {member.host}" if member.pid else "it"
            self.fail(Verdict("lost", f"rank {rank} was lost{when}: {who} died, or was cut off ({reason})", rank))
            # Others may know of an earlier failure, and have been told to go on with this rank.
            self._tell_all(Gone(rank, reason))
        else:
            self._say_farewell()
        if rank == self._appointed:  # also where the job has failed: what those that are left ask may take a while
            self._appoint()
        self._wishes.check()

    def make_room(self, why: str = "new ranks have come, and there is room for them") -> None:
        """End the job, unless it is ending, so that those that are there go on together with new ranks."""
        if not self._left:
            self.fail(Verdict("aborted", f"{why}: shrink() makes a group with them"))

    def will_not_come(self, rank: int, reason: str) -> None:
        """Take note that a rank has ended, unless it has come: then its connection will say so."""
        if rank not in self.members:
            self.fail(Verdict("lost", f"rank {rank} was lost before the ranks had met: {reason}", rank))

    def late(self, timeout_s: float, hint: str = "") -> None:
        """End the job where ranks have not come within a time."""
        missing = self.missing()
        if missing:
            text = f"the ranks did not meet within {timeout_s:g} s: {show_ranks(missing)} of {self.world_size} did not come"
            refused = f". Refused: {'; '.join(sorted(self._misfits)[:_MAX_NAMED])}" if self._misfits else ""
            self.fail(Verdict("deadline", text + refused + (f". {hint}" if hint else ""), peer=missing[0]))

    def take_over(
        self,
        former: int,
        members: dict[int, Join],
        left: dict[int, Progress],
        gone: dict[int, tuple[str, bool]],
        verdict: Verdict | None,
    ) -> None:
        """Go on where another store has ended.

        Parameters
        ----------
        former
            The rank that had it.
        members, left
            Who has come, and who has said goodbye.
        gone
            Whose connection has ended, why, and whether it has vanished.
        verdict
            The first cause, where the other store has told it.
        """
        self.members = members
        self._left = left
        self._former = former
        if verdict is not None:
            self.fail(verdict)
        for rank, (reason, vanished) in gone.items():
            self.lost(rank, reason, vanished)
        self._appoint()

    def _appoint(self) -> None:
        """Have a rank prepare to go on where this ends: one that is on another host, where there is one."""
        able = [rank for rank in self._survivors() if rank not in (self._store, self._former)]
        if self._store is not None and able:
            here = self.members[self._store].host
            away = (rank for rank in able if self.members[rank].host != here)
            self._appointed = next(away, able[0])
            ended = [*self._left, *(rank for rank in self._gone if rank not in self._vanished and rank not in self._left)]
            self._send(self._appointed, Prepare(self._store, ended))

    def _say_farewell(self) -> None:
        # Never after a verdict: a rank that leaves as others abort must learn of that, and not that all is well.
        if self._parted or not self.finished or self.verdict is not None or self._inquest is not None:
            return
        self._parted = True
        problem = unread(self._left)
        if problem:
            self.fail(Verdict("mismatch", problem))
        else:
            self._tell_all(Farewell())

    def _exchange(self, rank: int, message: Exchange) -> None:
        if self.verdict is not None:  # some have stopped waiting because of it: nobody may come out of it as if all were well
            return
        meeting = self._meetings.setdefault(message.name, _Meeting(message.members))
        meeting.cards[rank] = message.card
        if any(member not in meeting.cards for member in meeting.members):
            self._check_meeting(message.name, meeting)
            return
        del self._meetings[message.name]
        cards = Cards(message.name, [meeting.cards[member] for member in meeting.members], self._numbers)
        self._numbers += len(meeting.members)
        for member in meeting.members:
            if member not in self._gone:
                self._send(member, cards)

    def _check_meeting(self, name: str, meeting: _Meeting) -> None:
        absent = [member for member in meeting.members if member in self._left and member not in meeting.cards]
        if absent:
            who = f"{show_ranks(meeting.cards)} {'waits' if len(meeting.cards) == 1 else 'wait'}"
            text = f"rank {absent[0]} has closed its group, and {who} for it in {name}: {_ORDER}"
            self._open_inquest(min(meeting.cards), Report("mismatch", text, absent[0], members=meeting.members))

    def _compare(self, rank: int, message: Checkpoint) -> None:
        place = message.place, message.count
        digests = self._checkpoints.setdefault(place, {})
        digests[rank] = message.digest
        other = next((each for each, digest in digests.items() if digest != message.digest), None)
        if other is not None:
            text = (
                f"ranks {min(rank, other)} and {max(rank, other)} did not do the same on their GPUs: the first {message.count} {message.place} "
                f'differ, and what they brought is not to be trusted. gpu_check = "always" finds the first that does. {_ORDER}'
            )
            self._open_inquest(rank, Report("mismatch", text, other, members=message.members))
        elif len(digests) == len(message.members):
            del self._checkpoints[place]

    def _leave_group(self, rank: int, group: int, members: list[int], progress: Progress) -> None:
        left = self._leaving.setdefault(group, {})
        left[rank] = progress
        if any(member not in left for member in members):
            for (other, channel), wait in list(self._waits.items()):
                if channel // 2 == group:
                    self._check_abandoned(other, wait)
            return
        del self._leaving[group]
        # Members now forget how far they came there, some of them before others say how far they came in all.
        for channel in (2 * group, 2 * group + 1):
            self._disbanded.add(channel)
        for progress_of_left in self._left.values():
            self._forget_disbanded(progress_of_left)
        for place in [place for place in self._waits if place[1] in self._disbanded]:
            del self._waits[place]
        for member in [member for member, stalled in self._stalls.items() if self._is_over(stalled)]:
            del self._stalls[member]
        problem = unread(left)
        if problem:
            self.fail(Verdict("mismatch", problem))
            return
        for member in members:
            if member not in self._gone:
                self._send(member, Disbanded(group))

    def _forget_disbanded(self, progress: Progress) -> None:
        """Leave out groups whose messages have been compared already."""
        for counts in (progress.sends, progress.receives):
            for channel in [channel for channel in counts if channel in self._disbanded]:
                del counts[channel]

    def _is_over(self, stalled: Stalled) -> bool:
        """Tell whether a report is of a time before all had left a group, whose progress is no longer told."""
        return any(wait.channel in self._disbanded for wait in stalled.waits)

    def _stalled(self, rank: int, message: Stalled) -> None:
        if self._is_over(message):
            return
        wait = message.wait
        self._stalls[rank] = message
        self._waits[rank, wait.channel] = wait
        self._check_abandoned(rank, wait)
        place = (wait.channel, wait.sequence)
        for (other, _), theirs in self._waits.items():
            both = wait.is_collective and theirs.is_collective
            if both and (theirs.channel, theirs.sequence) == place and theirs.digest != wait.digest:
                text = f"the ranks did not make the same call, and wait for each other: rank {rank} is in {ANOTHER_CALL}, and rank {other} in {ANOTHER_CALL}: {_ORDER}"
                self._open_inquest(rank, Report("mismatch", text, other, wait.operation, *place, wait.members))
                return
        waiting = circle(self._stalls, rank, self._owes)
        if waiting:
            text = f"{show_ranks(waiting)} wait for each other, and none can go on: {_ORDER}"
            self._open_inquest(rank, Report("deadlock", text, waiting[-1], wait.operation, wait.channel))

    def _owes(self, wait: Wait, rank: int, peer: int, progress: Progress) -> bool:
        if wait.meeting:
            meeting = self._meetings.get(wait.meeting)
            return meeting is not None and peer not in meeting.cards
        return still_owed(wait, rank, peer, progress)

    def _check_abandoned(self, rank: int, wait: Wait) -> None:
        for peer, progress in {**self._leaving.get(wait.channel // 2, {}), **self._left}.items():
            concerned = peer in wait.members if wait.is_collective else peer in wait.awaiting
            if concerned and self._owes(wait, rank, peer, progress):
                text = f"rank {peer} has closed its group, and rank {rank} waits for it in {wait.operation} #{wait.sequence}: {_ORDER}"
                verdict = Verdict("mismatch", text, peer, wait.operation, wait.sequence)
                self.fail(verdict)
                return

    def _reported(self, rank: int, message: Report) -> None:
        if self.verdict is not None:
            return
        match message.kind:
            case "mismatch" | "deadline":
                self._open_inquest(rank, message)
            case "lost":
                # Its control connection is still there: what is known is that the two cannot talk.
                text = message.text if message.peer is None else f"rank {message.peer} was lost to rank {rank}: {message.text}"
                lost = msgspec.structs.replace(message, text=text)
                self._call_later(timing.SUSPICION_S, lambda: self.fail(_as_verdict(lost)))
            case _:
                self.fail(_as_verdict(message))

    def _open_inquest(self, reporter: int, report: Report) -> None:
        if self.verdict is not None or self._inquest is not None:
            return
        self._inquests += 1
        asked = set(report.members or self.members)
        if self._former is not None:  # members that are all there may have waited for a word of it
            asked.add(self._former)
        self._inquest = inquest = _Inquest(self._inquests, reporter, report, asked)
        # Armed first: in one process the answers come while the questions are being asked.
        self._call_later(timing.INQUEST_S, lambda: self._close_inquest(inquest))
        question = Question(inquest.number, report.channel or 0, _NOWHERE if report.sequence is None else report.sequence)
        for rank in sorted(asked):
            if rank not in self._gone:
                self._send(rank, question)

    def _close_inquest_if_complete(self) -> None:
        inquest = self._inquest
        if inquest is not None and len(inquest.answers) >= len(inquest.asked - self._gone.keys()):
            self._close_inquest(inquest)

    def _close_inquest(self, inquest: _Inquest) -> None:
        if self._inquest is not inquest:
            return
        self._inquest = None
        report = inquest.report
        silent = [rank for rank in sorted(inquest.asked) if rank not in inquest.answers]
        behind = min((answer.calls for answer in inquest.answers.values() if not answer.entered), default=0)
        # Of several that did not come, those that are furthest behind are waited for by the others.
        absent = [rank for rank, answer in inquest.answers.items() if not answer.entered and answer.calls == behind]
        stories: dict[str, list[int]] = {}
        for rank, answer in sorted(inquest.answers.items()):
            stories.setdefault(answer.text, []).append(rank)
        if silent:
            stories["no answer: stopped, cut off, or busy"] = silent
        lines = [f"  {show_ranks(ranks)}: {story}" for story, ranks in sorted(stories.items(), key=lambda item: min(item[1]))]
        if report.kind == "mismatch" and differ_in_length(
            [answer.text for answer in inquest.answers.values() if answer.entered]
        ):
            lines.append("  arrays of unequal lengths: give counts= or uneven=True on all ranks")
        peer, headline = report.peer, report.text
        if report.kind == "mismatch" and peer is not None:
            # Of two that are left out, the first is the reporter.
            for rank in (inquest.reporter, peer) if headline.count(ANOTHER_CALL) > 1 else (peer,):
                if rank in inquest.answers and inquest.answers[rank].entered:
                    headline = headline.replace(ANOTHER_CALL, inquest.answers[rank].text, 1)
        if report.kind == "deadline":
            meeting = self._meetings.get(report.operation or "")
            if meeting is not None:
                absent = [member for member in meeting.members if member not in meeting.cards and member not in silent]
            # Whom the reporter waits for may itself wait for another one.
            missing = silent or absent
            if report.sequence is None:
                peer = behind_whom(inquest.reporter, peer, inquest.answers, silent)
                missing = [rank for rank in silent if rank == peer]
            elif peer is not None and not missing:
                headline += f": all ranks were in it, and rank {inquest.reporter} waited for rank {peer}"
                peer = None
            if missing:
                peer = min(missing)
                headline += f": {show_ranks(missing)} did not {'answer' if silent else 'come'}"
            elif peer is not None:
                who = "" if peer == report.peer else ", in the end"
                headline += f": rank {inquest.reporter} waits for rank {peer}{who}"
            lines.append("  if they only need more time: timeout_s= of the call or of init(), or MANYHANDS_TIMEOUT_S")
        self.fail(Verdict(report.kind, "\n".join([headline, *lines]), peer, report.operation, report.sequence))

    def fail(self, verdict: Verdict) -> None:
        """End the job, unless it has ended."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        if self._successor is not None and self._has_successor():
            self._send(self._successor.rank, Decided(verdict))
            self._call_later(timing.AGREEMENT_S, self._announce)
        else:
            self._announce()

    def _has_successor(self) -> bool:
        return self._successor is not None and self._successor.rank not in self._gone

    def _announce(self) -> None:
        """Tell all ranks the first cause, once."""
        if self._announced or self.verdict is None:
            return
        self._announced = True
        self._tell_all(self.verdict)
        self._wishes.check()

    def _shrink(self, rank: int, message: Shrink) -> None:
        if self.verdict is None:  # the rank knows of a failure that nobody has reported
            text = f"rank {rank} found that the job had failed, and asked the others to go on without those that are lost"
            self._call_later(timing.SUSPICION_S, lambda: self.fail(Verdict("failed", text, rank)))
        self._wishes.shrink(rank, message)

    def _survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._gone and rank not in self._left]

    def _left_over(self) -> Survivors:
        lost = next(reversed(self._gone), None)
        return Survivors(self._survivors(), self._announced, self._vanished, self._former is not None, len(self._left), lost)

    def _tell_all(self, message: FromStore) -> None:
        for rank in sorted(self.members):
            if rank not in self._gone:
                self._send(rank, message)


def _show(message: Join) -> str:
    return f"rank {message.rank} (process {message.pid} on {message.host})"


def _difference(ours: Join, theirs: Join, who: str) -> str:
    for what in ("backend", "choices", "version", "byteorder"):
        own, other = getattr(ours, what), getattr(theirs, what)
        if own != other:
            return f"rank {ours.rank} has {what} {own!r}, and {who} has {other!r}: all ranks need the same"
    return ""


def _as_verdict(report: Report) -> Verdict:
    return Verdict(report.kind, report.text, report.peer, report.operation, report.sequence)
