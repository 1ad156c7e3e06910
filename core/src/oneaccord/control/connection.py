"""A rank's end of the control connection: exchange cards, report failures, learn the first cause."""

from __future__ import annotations

import logging
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from oneaccord._version import __version__
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import POST_CHANNEL, CallSignature
from oneaccord.contract.runtime import Runtime
from oneaccord.control import timing
from oneaccord.control.protocol import (
    MAX_CARD_BYTES,
    Agreement,
    Cards,
    Checkpoint,
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
    Progress,
    Question,
    Report,
    Shrunk,
    Stalled,
    Testimony,
    Verdict,
    Wait,
    Welcome,
)
from oneaccord.control.recorder import Counted, FlightRecorder, Record
from oneaccord.control.recovery import Recovery
from oneaccord.control.verdicts import error_from
from oneaccord.errors import CommError, DeadlineError, InternalError, OneAccordError
from oneaccord.runtime.computer import COMPUTER
from oneaccord.runtime.idle import last_move, nobody_else

__all__ = ["Control", "make_join"]

_log = logging.getLogger("oneaccord.job")

_SLICES = 10
"""The parts of a wait for the store: if this rank itself was stopped meanwhile, only one part has passed."""
_SHARED = frozenset({"lost", "deadline", "failed"})
"""Findings that tell nothing if rank 0 does not answer: a rank may be late, or break its connections, because of that."""
_MAX_WORDS = 4000
E = TypeVar("E", bound=OneAccordError)


def make_join(rank: int, world_size: int, backend: str, choices: str, runtime: Runtime = COMPUTER, job: str = "") -> Join:
    """Return what a rank says of itself when it comes."""
    return Join(rank, world_size, backend, choices, __version__, sys.byteorder, *runtime.identity(rank), job=job)


class Control(ABC):
    """One rank's membership in a job.

    Attributes
    ----------
    rank, world_size
        This rank, and the number of all ranks.
    recorder
        The last calls of this rank.
    counted
        The progress of this rank.
    host
        The address by which this rank reaches the store.
    runtime
        The clock, locks and threads of this rank.
    origins
        For each rank its number when the job began, if the ranks have been renumbered since; None for one that came later.
    gone
        The ranks that have ended since the job failed, and why.
    recovery
        The requests of this rank once the job has failed.
    raised
        The line of the program that raised the exception that ends the job; empty while there is none.
    before_failure
        Called with the first cause when the job fails, before any thread of this rank learns of it; it must not block, nor raise.
    """

    def __init__(
        self, rank: int, world_size: int, host: str, runtime: Runtime = COMPUTER, recorder: FlightRecorder | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.runtime = runtime
        self.recorder: FlightRecorder = recorder or FlightRecorder()
        self.counted: Counted = self.recorder.counted
        self.origins: tuple[int | None, ...] = ()
        self.raised: str = ""
        self.before_failure: Callable[[Verdict], None] | None = None
        self._changed = runtime.condition()
        self.verdict: Verdict | None = None
        self._welcome: Welcome | None = None
        self._cards: dict[str, Cards] = {}
        self._heard = 0
        self._ended: tuple[str, int | None] | None = None
        self._disbanding: dict[int, Callable[[], None]] = {}
        self._home = threading.current_thread()
        self._farewell = False
        self.recovery: Recovery = Recovery(rank, self._post, self._changed)
        self._on_failure: list[Callable[[], None]] = []
        self.gone: dict[int, str] = {}
        self._on_gone: list[Callable[[int, str], None]] = []

    @abstractmethod
    def _post(self, message: FromRank) -> None:
        """Send a message to the store; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release what the connection holds; twice is fine."""

    def await_successor(self, at_most_s: float) -> None:  # noqa: B027 - a store of threads ends with them
        """Wait until this rank is connected to the store's standby; return at once if there is none."""

    @property
    def cut(self) -> bool:
        """Whether this rank is cut off: the store and its standby are lost, and no survivor was found."""
        return self.recovery.cut is not None

    @property
    def failed(self) -> bool:
        """Whether the job has failed; once true it stays so."""
        return self.verdict is not None

    def error(self, operation: str | None = None, sequence: int | None = None) -> OneAccordError:
        """Return the first cause, as a new exception, which names the first call that it ended on this rank; by default the one given here."""
        if self.verdict is None:
            raise InternalError("asked for the cause of a failure that did not happen", rank=self.rank)
        error = error_from(self.verdict, self.rank)
        origin = None if not self.origins or self.verdict.peer is None else self.origins[self.verdict.peer]
        if origin not in (None, self.verdict.peer):
            error.add_note(
                f"shrink() has renumbered the ranks: rank {self.verdict.peer} is the one that began as rank {origin}"
            )
        if self._ended is None and operation is not None:
            self._ended = operation, sequence
        if self._ended is not None:
            error.operation, error.sequence = self._ended
        return error

    def ended(self, error: E, operation: str, sequence: int | None) -> E:
        """Note in an error the call that it ends on this rank, and return it; errors of later calls name the first one."""
        if self._ended is None:
            self._ended = operation, sequence
        error.operation, error.sequence = operation, sequence
        return error

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the job fails, or now if it has failed; it must not block."""
        with self._changed:
            self._on_failure.append(callback)
            late = self.verdict is not None
        if late:
            callback()

    def on_gone(self, callback: Callable[[int, str], None]) -> None:
        """Call ``callback(rank, reason)`` for each rank that has ended since the job failed, or ends later; it must not block."""
        with self._changed:
            self._on_gone.append(callback)
            before = dict(self.gone)
        for rank, reason in before.items():
            callback(rank, reason)

    def welcome(self, deadline: Deadline) -> Welcome:
        """Wait until all ranks have come."""
        self._wait(lambda: self._welcome is not None, deadline)
        if self._welcome is None:
            raise DeadlineError(
                f"the ranks did not meet within {deadline.timeout_s:g} s: rank {self.rank} of {self.world_size} came, and the store "
                "with rank 0, which knows the others, does not answer",
                rank=self.rank,
                peer=0,
            )
        hosts, places, certificates = self._welcome.hosts, self._welcome.places, self._welcome.certificates
        if not len(hosts) == len(places) == len(certificates or hosts) == self.world_size:
            told = f"{len(hosts)} hosts, {len(places)} places and {len(certificates)} certificates"
            text = f"the store named {told} to rank {self.rank}, and there are {self.world_size} ranks"
            raise self.report(Report("protocol", text, 0))
        return self._welcome

    def exchange(
        self,
        name: str,
        card: bytes,
        deadline: Deadline,
        members: Sequence[int] | None = None,
        channel: int = 0,
        call: tuple[CallSignature, int] | None = None,
        *,
        is_given: bool = False,
    ) -> tuple[list[bytes], int]:
        """Give this rank's card; return the cards of all members in their order, and the first of as many unused numbers.

        Parameters
        ----------
        name
            The name of the exchange, the same on all members; unused, or used by an exchange that has ended.
        card
            At most 64 KiB.
        deadline
            The end of the wait.
        members
            The ranks that take part, in the same order on all of them; all ranks by default.
        channel
            The channel of their group.
        call
            The call and its number, if the exchange is part of one: members in other calls are then a mismatch at once.
        is_given
            Whether `give_card` has given the card before.

        Raises
        ------
        CommError
            The first cause, the same on all ranks: a `DeadlineError` if a rank did not give its card in time.
        """
        if len(card) > MAX_CARD_BYTES:
            raise InternalError(f"a card of {len(card)} bytes, and {MAX_CARD_BYTES} are allowed")
        ranks = list(range(self.world_size) if members is None else members)
        what, digest, sequence = name, b"", -1
        if call is None:
            record = self.recorder.start(channel, -1, f"the exchange {name!r} of init" if members is None else name)
        else:
            signature, sequence = call
            what, digest = signature.operation, signature.digest
            record = self.recorder.start(channel, sequence, signature)
        record.members = ranks
        try:
            if not is_given:
                self.give_card(name, card, ranks)
            others = [rank for rank in ranks if rank != self.rank]
            patience = math.inf if self.runtime.is_simulated else timing.STALL_S
            while not self._wait(lambda: name in self._cards, deadline, patience):
                if deadline.passed():
                    text = f"not all ranks came to {name} within {deadline.timeout_s:g} s"
                    raise self.report(Report("deadline", text, None, name, channel, sequence, ranks))
                self.report_wait(record, Wait(channel, sequence, what, digest, others, [], ranks, name))
        except CommError as error:
            self.ended(error, "init" if members is None else what.partition(" ")[0], sequence if sequence >= 0 else None)
            raise
        finally:
            self.recorder.finish(record)
        cards = self._cards.pop(name)
        if len(cards.cards) != len(ranks):
            text = f"the store gave rank {self.rank} {len(cards.cards)} cards of {len(ranks)} ranks in {name}"
            raise self.ended(self.report(Report("protocol", text, 0)), what.partition(" ")[0], None)
        return cards.cards, cards.number

    def leave_group(self, number: int, members: Sequence[int], then: Callable[[], None]) -> None:
        """Say that this rank has left a group; call ``then`` once all its members have. Never blocks."""
        now = self.counted.progress()
        channels = (2 * number, 2 * number + 1)

        def disbanded() -> None:
            self.recovery.forget(channels[0])
            for channel in channels:
                self.recorder.forget(channel)
            then()

        mine = Progress(
            {channel: now.calls[channel] for channel in channels if channel in now.calls},
            # Also the records of all groups, which carry the messages with tags of this one: some may not have come yet.
            {channel: now.sends[channel] for channel in (*channels, POST_CHANNEL) if channel in now.sends},
            {channel: now.receives[channel] for channel in channels if channel in now.receives},
        )
        self._disbanding[number] = disbanded
        self._post(LeaveGroup(number, list(members), mine))

    def give_card(self, name: str, card: bytes, members: Sequence[int]) -> None:
        """Give this rank's card before it waits in the `exchange`."""
        self._post(Exchange(name, card, list(members)))

    def waits_in_background(self, wait: Wait) -> None:
        """Tell the store what this rank's device waits for, although no thread of the rank may wait."""
        self._post(Stalled(wait, [wait], self.counted.progress(), False))

    def checkpoint(self, place: str, count: int, digest: bytes, members: Sequence[int]) -> None:
        """Tell the store which calls on devices this rank has made, to be compared with those of the other members."""
        self._post(Checkpoint(place, count, digest, list(members)))

    def report_wait(self, record: Record, wait: Wait) -> None:
        """Tell the store that this rank waits in a call, unless it has done so a moment ago; the caller waits on, and asks again."""
        self.recorder.stalled(record, wait)
        now = self.runtime.now()
        if now < record.quiet_until:
            return
        record.quiet_until = now + self.world_size * timing.REPORT_PER_RANK_S
        before = last_move()
        waits, stuck = self.recorder.waits()
        quiet = stuck and nobody_else(self._home, before) and not self.counted.calls_back()
        self._post(Stalled(wait, waits, self.counted.progress(), quiet))

    def report(self, report: Report) -> OneAccordError:
        """Report a failure; return the first cause that all ranks agree on, or this finding if the store does not answer."""
        # An exception's text can have any length, and characters that cannot be encoded; a report must arrive all the same.
        words = report.text[:_MAX_WORDS].encode("utf-8", "replace").decode()
        report = msgspec.structs.replace(report, text=words)
        if not self.failed:
            self._post(report)
            self._await_verdict()
        if not self.failed and self._turn_to_successor():
            self._post(report)
            self._await_verdict()
        if not self.failed:
            self._give_up(report)
        return self.error()

    def _turn_to_successor(self) -> bool:
        """Take the standby for the store, since the store does not answer; return whether there is one."""
        return False

    def _await_verdict(self) -> None:
        """Wait for a verdict while the store says anything, for `timing.VERDICT_S` at most. The time in which this rank is stopped does not count."""
        left, waited, slice_s = _SLICES, 0.0, timing.SILENCE_S / _SLICES
        with self._changed:
            heard = self._heard

            def has_news() -> bool:
                return self.failed or self._heard != heard

            while left and waited < timing.VERDICT_S and not self.failed:
                since = self.runtime.now()
                if self._changed.wait_for(has_news, slice_s):
                    left, heard = _SLICES, self._heard
                else:
                    left -= 1
                waited += min(self.runtime.now() - since, slice_s)

    def _give_up(self, report: Report) -> None:
        """End the job on this rank: the store does not answer."""
        silence = "rank 0 does not answer: it is stopped, cut off or busy"
        if report.kind in _SHARED:
            # The same on all ranks but for the last line. Should rank 0 continue, its store must not count ranks that gave up as lost.
            text = f"{silence}, and through it the ranks find the first cause.\n  rank {self.rank}: {report.text}"
            report = msgspec.structs.replace(report, kind="silent", text=text, peer=0)
            self._post(report)
        else:
            report = msgspec.structs.replace(
                report, text=f"{report.text}\n  {silence}, so that other ranks may not know of this"
            )
        self.fail(Verdict(report.kind, report.text, report.peer, report.operation, report.sequence))

    def leave(self, deadline: Deadline) -> bool:
        """Say goodbye, and wait until all ranks have, or the deadline passes; return whether they have.

        Raises
        ------
        CommError
            The job failed before all ranks had left.
        """
        self._post(Leave(self.counted.progress()))
        self._wait(lambda: self._farewell and not self.failed, deadline)
        return self._farewell

    def report_reformed(self) -> None:  # noqa: B027 - ranks that are threads cannot shrink
        """Say that this rank is in the next job, to all that could let other ranks continue without it; never blocks."""

    def _wait(self, condition: Callable[[], bool], deadline: Deadline, at_most_s: float = math.inf) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.verdict is not None, min(deadline.remaining(), at_most_s))
        if self.verdict is not None and not condition():
            raise self.error()
        return condition()

    def fail(self, verdict: Verdict) -> None:
        """Take a verdict as the first cause, unless there is one."""
        with self._changed:
            if self.verdict is not None:
                return
            if self.before_failure is not None:
                self.before_failure(verdict)
            self.verdict = verdict
            callbacks = list(self._on_failure)
            self._changed.notify_all()
        _log.info("rank %d: the job has failed, %s: %s", self.rank, verdict.kind, verdict.text)
        for callback in callbacks:
            callback()

    def _deliver(self, message: FromStore) -> None:
        with self._changed:
            self._heard += 1
            self._changed.notify_all()
        match message:
            case Verdict():
                self.fail(message)
            case Question(inquest, channel, sequence):
                entered, text = self.recorder.testify(channel, sequence)
                progress = self.counted.progress()
                calls = progress.calls.get(channel, 0)
                if not entered and 0 <= sequence < calls:
                    # The record is too old to be kept: calls on GPUs are made ahead of what the GPU has done.
                    entered, text = True, f"has made it; {text}"
                self._post(Testimony(inquest, entered, text, calls, self.recorder.waits()[0], progress))
            case Disbanded(group):
                then = self._disbanding.pop(group, None)
                if then is not None:
                    then()
            case Gone(rank, reason):
                with self._changed:
                    self.gone[rank] = reason
                    callbacks = list(self._on_gone)
                for callback in callbacks:
                    callback(rank, reason)
            case Shrunk() | Agreement() | JobReformed():
                self.recovery.take(message)
            case Welcome() | Cards() | Farewell():
                self._answered(message)

    def _answered(self, message: Welcome | Cards | Farewell) -> None:
        """Keep an answer that a thread of this rank waits for."""
        with self._changed:
            if isinstance(message, Welcome):
                self._welcome = message
            elif isinstance(message, Cards):
                self._cards[message.name] = message
            else:
                self._farewell = True
            self._changed.notify_all()
