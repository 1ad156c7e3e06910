"""The counters of a group: the numbers of its calls, whether it may be used, the turns of its calls, and the records of the flight recorder.

Nothing else writes any of these. The control connection reports a rank's progress, and the flight recorder reports after a failure,
only from here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from oneaccord.calls.messages.point_to_point import Kinds
from oneaccord.calls.order.counters import Counters, counters_of
from oneaccord.calls.order.turns import Turns
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Wait
from oneaccord.control.recorder import Record
from oneaccord.errors import ClosedError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["CallSequence", "Direction"]

_NOBODY = -1


class Direction(Turns):
    """The counters of the messages in one direction between this rank and another. The messages also take turns here.

    Parameters
    ----------
    call_sequence
        The counters of the group.
    job, members
        The job, and the members of the group.
    rank
        The other rank, as the world counts; -1 for no rank.
    is_send
        Whether this rank sends.
    counters
        The counters that number its messages.

    Attributes
    ----------
    rank, is_send
        As above.
    kinds
        The dtypes and shapes that have travelled.
    """

    __slots__ = ("_call_sequence", "is_send", "kinds", "rank")

    def __init__(self, call_sequence: CallSequence, job: Job, rank: int, counters: Counters, *, is_send: bool) -> None:
        super().__init__(job.runtime, f"another call of rank {job.rank} was still talking with rank {rank}", rank, counters)
        self._call_sequence = call_sequence
        self.rank: int = rank
        self.is_send: bool = is_send
        self.kinds: Kinds = Kinds()

    @property
    def call(self) -> int:
        """The number, among the calls that move messages, of the fast one that has its turn."""
        return self.counters.call

    @property
    def started(self) -> float:
        """When that began."""
        return self.counters.started

    def next(self) -> int:
        """Return the number of the next message, whose turn it is."""
        number = self.counters.next
        self.counters.next = number + 1
        return number

    def enter(self, what: object) -> int:
        """Begin a message now: its turn, and its number, which is returned; -1 if it must take the slow path."""
        if not self._call_sequence.is_usable or self._call_sequence.plugins.observed or not self.counters.take():
            return -1
        try:
            return self.counters.begin(what)
        except BaseException:  # a signal: nothing has begun
            self.give()
            raise

    def take_back(self) -> None:
        """Undo `enter`: the message was not begun after all."""
        self.counters.undo()
        self.give()

    def leave(self, gives_turn: bool) -> None:
        """End the message that `enter` or the counters began, well or badly; the former's turn is over as well."""
        counters = self.counters
        counters.leave()
        turn = counters.give() if gives_turn else None
        if turn is not None:
            self.pass_on(turn)


class CallSequence(Turns):
    """The counters of one group. Its collectives also take turns here.

    Parameters
    ----------
    job, members
        The job, and the members of the group.
    plugins
        The observers.
    module
        The compiled executor, for its form of the counters; None for Python's.
    """

    __slots__ = (
        "__weakref__",
        "_channel",
        "_control",
        "_directions",
        "_job",
        "_making",
        "_members",
        "_module",
        "_number",
        "_record",
        "_recorder",
        "plugins",
    )

    def __init__(self, job: Job, members: Members, plugins: PluginManager, module: ModuleType | None = None) -> None:
        counters = counters_of(module, members.channel, kept=job.control.recorder.kept)
        super().__init__(job.runtime, "an earlier collective on this group was still running", counters=counters)
        self._job = job
        self._members = members
        self.plugins: PluginManager = plugins
        self._module = module
        self._number = members.number
        self._channel = members.channel
        self._control = job.control
        self._recorder = job.control.recorder
        self._directions: dict[tuple[int, bool], Direction] = {}
        self._making = threading.Lock()
        self._record: Record | None = None
        # Code that still holds a closed group gets an error; once no code does, its number need not be known any more.
        weakref.finalize(self, job.closed_groups.discard, members.number).atexit = False
        job.control.counted.calls[members.channel] = counters
        job.control.counted.members[members.channel] = tuple(members.ranks)
        job.control.counted.names[members.number] = members.name

    @property
    def next(self) -> int:
        """The number of the next collective."""
        return self.counters.next

    @property
    def messages(self) -> int:
        """How many calls there were that move messages."""
        return self.counters.messages

    @property
    def started(self) -> float:
        """When the fast call that has its turn began."""
        return self.counters.started

    # May the group be used?

    @property
    def is_usable(self) -> bool:
        """Whether calls may be made; if not, `check` says why."""
        job = self._job
        return not (job.closed or self._control.verdict or self._number in job.closed_groups)

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
        if not (job.closed or self._number in job.closed_groups or self._control.verdict):
            return
        name = None if operation is None else str(operation)  # made up only now
        if job.closed:
            raise job.closed_error(operation=name, sequence=sequence)
        if self._number in job.closed_groups:
            text = f"{self._members.name} is closed; make another one with split() or subgroup()"
            raise ClosedError(text, rank=job.rank, operation=name, sequence=sequence)
        raise self._control.error(name, sequence)

    # Collectives

    def number(self) -> int:
        """Return the number of the collective that begins now, whose turn it is."""
        number = self.counters.next
        self.counters.next = number + 1
        return number

    def begin(self, signature: CallSignature, nbytes: int) -> Record:
        """Note that a collective begins, on ``nbytes`` bytes; `end` must follow."""
        return self._recorder.start(self._channel, self.number(), signature, nbytes)

    def begin_message(self, what: object, nbytes: int) -> Record:
        """Note that a call begins that moves messages, ``what`` in words; `end` must follow."""
        return self.record_message(what, self.count_message(), nbytes)

    def count_message(self) -> int:
        """Return the number of a call that moves messages and begins now; several directions may begin at once."""
        return self.counters.count_message()

    def record_message(self, what: object, number: int, nbytes: int = 0, started: float | None = None) -> Record:
        """Make a call that moves messages, and ``started`` now or then, a record of its own; `end` must follow."""
        record = self._recorder.start(self._channel + 1, number, what, nbytes)
        if started is not None:
            record.started = started
        return record

    def end(self, record: Record, error: BaseException | None = None) -> None:
        """Note that a call has ended, well or badly: with an error, or with the exception that is handled now."""
        self._recorder.finish(record, error)

    def go_on(self, record: Record) -> None:
        """Note that the thread that has begun a call goes on; the call ends in any thread."""
        self._recorder.go_on(record)

    def note(self, sequence: int, signature: CallSignature, started: float) -> None:
        """Note a collective that has ended, or was launched."""
        self._recorder.note(self._channel, sequence, signature, started)

    def report_wait(self, record: Record, signature: CallSignature, peers: list[int]) -> None:
        """Report to the store that a collective waits for ``peers``."""
        name, members = signature.operation, list(self._members.ranks)
        self._control.report_wait(record, Wait(self._channel, record.sequence, name, signature.digest, peers, [], members))

    def report_message_wait(self, record: Record, messages: list[tuple[int, bool, int]], peers: list[int]) -> None:
        """Report to the store that a call waits for messages: with which rank, whether they are sent, and their numbers."""
        members = list(self._members.ranks)
        wait = Wait(self._channel + 1, record.sequence, str(record.call), b"", peers, messages, members)
        self._control.report_wait(record, wait)

    # Collectives that were made before: one visit to the counters when they begin, and one when they end

    def enter(self, signature: CallSignature) -> int:
        """Begin a call now: its turn, its number, and its place in the recorder. Return the number; -1 if it must take the slow path."""
        job, counters = self._job, self.counters
        if (
            job.closed
            or self._control.verdict
            or self._number in job.closed_groups
            or self.plugins.observed
            or not counters.take()
        ):
            return -1
        try:
            return counters.begin(signature)
        except BaseException:  # a signal: nothing has begun
            self.give()
            raise

    def record_slow(self, signature: CallSignature) -> partial[None]:
        """Give the call that has its turn a record of its own, because it must wait; return a function that reports this to the store."""
        self._record = record = self._recorder.start(self._channel, self.next - 1, signature)
        return partial(self.report_wait, record, signature)

    def leave(self, gives_turn: bool) -> None:
        """End the call that `enter` or the counters began, well or badly; the former's turn is over as well."""
        counters = self.counters
        counters.leave()
        if self._record is not None:
            self._recorder.finish(self._record)
            self._record = None
        turn = counters.give() if gives_turn else None
        if turn is not None:
            self.pass_on(turn)

    # Messages

    def direction(self, peer: int | None, is_send: bool) -> Direction:
        """Return the counters of one direction to or from a rank of the world. None is no rank, for which nothing waits."""
        key = _NOBODY if peer is None else peer, is_send
        direction = self._directions.get(key)
        if direction is None:
            with self._making:
                direction = self._directions.get(key) or self._direction(key[0], is_send)
        return direction

    def _direction(self, rank: int, is_send: bool) -> Direction:
        channel = self._channel + 1
        counters = counters_of(self._module, channel, self.counters, self._recorder.kept)
        if rank != _NOBODY:
            counted = self._control.counted.sends if is_send else self._control.counted.receives
            counted.setdefault(channel, {})[rank] = counters
        made = self._directions[rank, is_send] = Direction(self, self._job, rank, counters, is_send=is_send)
        return made

    def turns(self) -> Sequence[Turns]:
        """Return all in which calls of this group take turns."""
        return [self, *list(self._directions.values())]
