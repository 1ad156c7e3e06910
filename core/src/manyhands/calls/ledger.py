"""The books of a group: the numbers of its calls, whether it may be used, whose turn it is, and what is recorded.

Nothing else writes any of these. What the control connection says of a rank's progress, and what the flight recorder tells after a failure,
come from here alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from manyhands.calls.point_to_point import Kinds
from manyhands.calls.turns import Turns
from manyhands.config.plugins import PluginManager
from manyhands.control.protocol import Wait
from manyhands.control.recorder import Record
from manyhands.control.signatures import CallSignature
from manyhands.errors import ClosedError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["Direction", "Ledger"]

_NOBODY = -1
_now = time.monotonic


class Direction(Turns):
    """The books of the messages in one direction between this rank and another. It is also where they take turns.

    Parameters
    ----------
    ledger
        The books of the group.
    job, members
        Where it lives, and who belongs to it.
    rank
        The other rank, as the world counts; -1 for nobody.
    is_send
        Whether this rank sends.
    begun
        For each rank how many messages have begun, where the store can ask for it.

    Attributes
    ----------
    rank, is_send
        As above.
    kinds
        The dtypes and shapes that have travelled.
    call, started
        The number, among the calls that move messages, of the fast one that has its turn, and when that began.
    """

    __slots__ = (
        "_begun",
        "_control",
        "_job",
        "_ledger",
        "_noted",
        "_number",
        "_where",
        "call",
        "is_send",
        "kinds",
        "rank",
        "started",
    )

    def __init__(self, ledger: Ledger, job: Job, members: Members, rank: int, begun: dict[int, int], *, is_send: bool) -> None:
        super().__init__(job.runtime, f"another call of rank {job.rank} was still talking with rank {rank}", rank)
        self._ledger = ledger
        self._job = job
        self._control = job.control
        self._noted = job.control.recorder.records.append
        self._number = members.number
        self._where = members.channel + 1
        self._begun = begun
        self.rank: int = rank
        self.is_send: bool = is_send
        self.kinds: Kinds = Kinds()
        self.call: int = 0
        self.started: float = 0.0

    def next(self) -> int:
        """Return the number of the next message, whose turn it is."""
        number = self._begun.get(self.rank, 0)
        self._begun[self.rank] = number + 1
        return number

    def enter(self) -> int:
        """Begin a message now: its turn, and its number, which is returned; -1 where it must go the long way."""
        with self._lock:
            if self._busy:
                return -1
            self._busy = True
        try:
            job = self._job
            if job.closed or self._control.verdict or self._number in job.left:
                self.give()
                return -1
            self.call = self._ledger.count_message()
            self.started = _now()
            number = self._begun.get(self.rank, 0)
        except BaseException:  # a signal: nothing has begun
            self.give()
            raise
        self._begun[self.rank] = number + 1
        return number

    def enter_in_turn(self) -> int:
        """Begin a message whose turn it is, as `enter`; whose turn it is stays so."""
        self.call = self._ledger.count_message()
        self.started = _now()
        return self.next()

    def take_back(self) -> None:
        """Undo `enter`: the message was not begun after all."""
        self._begun[self.rank] -= 1
        self.give()

    def leave(self, what: object, gives_turn: bool) -> None:
        """End the message that `enter` or `enter_in_turn` began, well or badly; the former's turn is over as well."""
        self._noted((self._where, self.call, what, self.started, _now()))
        if gives_turn:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
            self.give()


class Ledger(Turns):
    """The books of one group. It is also where its collectives take turns.

    Parameters
    ----------
    job, members
        Where the group lives, and who belongs to it.
    plugins
        Who may observe.

    Attributes
    ----------
    next
        The number of the next collective.
    messages
        How many calls there were that move messages.
    started
        When the fast call that has its turn began.
    """

    __slots__ = (
        "_calls",
        "_channel",
        "_control",
        "_counting",
        "_directions",
        "_job",
        "_members",
        "_noted",
        "_number",
        "_plugins",
        "_record",
        "_recorder",
        "_short",
        "messages",
        "next",
        "started",
    )

    def __init__(self, job: Job, members: Members, plugins: PluginManager) -> None:
        super().__init__(job.runtime, "an earlier collective on this group was still running")
        self._job = job
        self._members = members
        self._plugins = plugins
        self._number = members.number
        self._channel = members.channel
        self._control = job.control
        self._recorder = job.control.recorder
        self._short = job.control.recorder.short
        self._noted = job.control.recorder.records.append
        self._calls = job.control.progress.calls
        self._directions: dict[tuple[int, bool], Direction] = {}
        self._record: Record | None = None
        self.next: int = 0
        self.messages: int = 0
        self._counting = threading.Lock()
        self.started: float = 0.0

    # May the group be used?

    @property
    def is_usable(self) -> bool:
        """Whether calls may be made; where not, `check` says why."""
        job = self._job
        return not (job.closed or self._control.verdict or self._number in job.left)

    def check(self, operation: object = None, sequence: int | None = None) -> None:
        """Refuse a call, the operation ``str(operation)`` #``sequence``, on a group that is closed or whose job has failed.

        Raises
        ------
        ClosedError
            The group was closed.
        CommError
            The first cause of the job's failure.
        """
        job = self._job
        if not (job.closed or self._number in job.left or self._control.verdict):
            return
        name = None if operation is None else str(operation)  # made up only now
        if job.closed:
            raise job.closed_error(operation=name, sequence=sequence)
        if self._number in job.left:
            text = f"group {self._number} is closed; make another one with split() or subgroup()"
            raise ClosedError(text, rank=job.rank, operation=name, sequence=sequence)
        raise self._control.error(name, sequence)

    # Collectives

    def number(self) -> int:
        """Return the number of the collective that begins now, whose turn it is."""
        number = self.next
        self.next = self._calls[self._channel] = number + 1
        return number

    def begin(self, signature: CallSignature, nbytes: int) -> Record:
        """Note that a collective begins, on ``nbytes`` bytes; `end` must follow."""
        return self._recorder.start(self._channel, self.number(), signature, nbytes)

    def begin_message(self, what: object, nbytes: int) -> Record:
        """Note that a call begins that moves messages, ``what`` in words; `end` must follow."""
        return self.record_message(what, self.count_message(), nbytes)

    def count_message(self) -> int:
        """Return the number of a call that moves messages and begins now; several directions may begin at once."""
        with self._counting:
            self.messages = number = self.messages + 1
        return number

    def record_message(self, what: object, number: int, nbytes: int = 0) -> Record:
        """Make a call that moves messages a record of its own; `end` must follow."""
        return self._recorder.start(self._channel + 1, number, what, nbytes)

    def end(self, record: Record) -> None:
        """Note that a call has ended, well or badly."""
        self._recorder.finish(record)

    def note(self, sequence: int, signature: CallSignature, started: float) -> None:
        """Note a collective that has ended, or was launched."""
        self._recorder.note(self._channel, sequence, signature, started)

    def report_wait(self, record: Record, signature: CallSignature, peers: list[int]) -> None:
        """Tell the store that a collective waits for ``peers``."""
        name, members = signature.operation, list(self._members.ranks)
        self._control.report_wait(record, Wait(self._channel, record.sequence, name, signature.digest, peers, [], members))

    def report_message_wait(self, record: Record, messages: list[tuple[int, bool, int]], peers: list[int]) -> None:
        """Tell the store that a call waits for messages: with which rank, whether they are sent, and their numbers."""
        members = list(self._members.ranks)
        wait = Wait(self._channel + 1, record.sequence, str(record.call), b"", peers, messages, members)
        self._control.report_wait(record, wait)

    # Collectives that were made before: one visit to the books when they begin, and one when they end

    def enter(self, signature: CallSignature) -> int:
        """Begin a call now: its turn, its number, and its place in the recorder. Return the number; -1 where it must go the long way."""
        with self._lock:
            if self._busy:
                return -1
            self._busy = True
        try:
            job = self._job
            if job.closed or self._control.verdict or self._number in job.left or self._plugins.observed:
                self.give()
                return -1
            number = self.next
            self.started = started = _now()
            self._short[self._channel] = signature, number, started
        except BaseException:  # a signal: nothing has begun
            self.give()
            raise
        self.next = self._calls[self._channel] = number + 1
        return number

    def enter_in_turn(self, signature: CallSignature) -> int:
        """Begin a call whose turn it is, as `enter`; whose turn it is stays so."""
        number = self.number()
        self.started = _now()
        self._short[self._channel] = signature, number, self.started
        return number

    def record_slow(self, signature: CallSignature) -> partial[None]:
        """Make the call that has its turn a record of its own, since it must wait; return what tells the store of that."""
        self._record = record = self._recorder.start(self._channel, self.next - 1, signature)
        return partial(self.report_wait, record, signature)

    def leave(self, signature: CallSignature, gives_turn: bool) -> None:
        """End the call that `enter` or `enter_in_turn` began, well or badly; the former's turn is over as well."""
        self._noted((self._channel, self.next - 1, signature, self.started, _now()))
        self._short.pop(self._channel, None)
        if self._record is not None:
            self._recorder.finish(self._record)
            self._record = None
        if gives_turn:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
            self.give()

    # Messages

    def direction(self, peer: int | None, is_send: bool) -> Direction:
        """Return the books of one direction to or from a rank of the world. None is nobody, for whom nothing waits."""
        key = _NOBODY if peer is None else peer, is_send
        direction = self._directions.get(key)
        if direction is None:
            progress = self._control.progress
            begun = (progress.sends if is_send else progress.receives).setdefault(self._channel + 1, {})
            direction = Direction(self, self._job, self._members, key[0], begun, is_send=is_send)
            direction = self._directions.setdefault(key, direction)
        return direction

    def turns(self) -> Sequence[Turns]:
        """Return all in which calls of this group take turns."""
        return [self, *list(self._directions.values())]
