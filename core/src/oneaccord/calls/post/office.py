"""The post office of a rank: all its messages with tags, of all its groups.

Sends and receives are requests: they begin at once, and are moved by whichever thread waits for one of them. That thread *drives*: it waits for all
lines at once, takes what comes, answers it, and sends what waits. Other threads that wait are woken when their own request has ended. Only
while requests are left and no thread waits does a thread of the office drive.

The lock protects everything but the wait itself. So a thread that begins a request while another one drives starts the transfer itself,
and lets the driver look again (`Transport.interrupt`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident

import numpy as np

from oneaccord.arrays.memory import bytes_of
from oneaccord.calls.engine.adapter import mailbox_of
from oneaccord.calls.engine.waiting import Overdue, checked_wait
from oneaccord.calls.messages.point_to_point import OPENING_BYTES
from oneaccord.calls.post import envelopes
from oneaccord.calls.post.courier import Courier
from oneaccord.calls.post.envelopes import (
    ANNOUNCE,
    DATA,
    EAGER,
    GO,
    MET,
    NO_RANK,
    READY,
    SYNC,
    Envelope,
    answer,
    envelope,
    opened,
)
from oneaccord.calls.post.lines import Body, Line, Tally
from oneaccord.calls.post.matching import Matching
from oneaccord.calls.post.messages import Letter, Operation, Receive, Send
from oneaccord.contract.backend import Damaged, LinkLost, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import MET_CHANNEL, POST_CHANNEL
from oneaccord.contract.runtime import Place
from oneaccord.job.job import Job

__all__ = ["NotReady", "PostOffice"]

_FIRST_STALL_S, _NEXT_STALL_S = 0.2, 0.5
_EAGER_BYTES = 1 << 16
"""The longest message that is sent before its receive is known, if the backend does not say."""
_SLICE_S = 2e-3
"""How long a driver waits at most if the transport cannot be interrupted and several threads use the office."""


class NotReady(Exception):
    """A message in mode "ready" came from ``peer`` before its receive."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(what)
        self.peer: int = peer


class PostOffice:
    """The messages with tags of one rank; a part of its job.

    Parameters
    ----------
    job
        The job.

    Attributes
    ----------
    lock
        Protects all that follows.
    matching
        The receives and messages that wait for each other.
    """

    def __init__(self, job: Job) -> None:
        self.lock: AbstractContextManager[bool] = threading.RLock()
        self.matching: Matching = Matching()
        self._job = job
        self._rank = job.rank
        self._runtime = job.runtime
        self._transport: Transport | None = None
        self._lines: dict[int, Line] = {}
        self._connecting = threading.Lock()
        self._numbers = 0
        self._unanswered: dict[int, Send] = {}
        self._awaited: dict[tuple[int, int], tuple[Receive, Letter, memoryview]] = {}
        self._driver: object = None
        self._parked: dict[Place, Callable[[], bool]] = {}
        self._slice_s = math.inf
        self._kept: dict[Operation, tuple[float, float]] = {}
        self._owing: set[Line] = set()
        self._look_at = 0.0
        self._courier = Courier(self, job.runtime)
        # Messages that were sent and that have met their receives, for the store: what was never received is a mismatch.
        job.control.counted.answers = lambda: self.has_work
        self._begun: dict[int, Tally] = job.control.counted.sends.setdefault(MET_CHANNEL, {})  # type: ignore[assignment]
        self._met: dict[int, Tally] = job.control.counted.receives.setdefault(MET_CHANNEL, {})  # type: ignore[assignment]

    # As a part of the job

    def close(self) -> Sequence[object]:
        """End the thread of the office; return what must be kept."""
        self._courier.stop()
        return ()

    # Lines

    def connect(self, peers: Sequence[int], deadline: Callable[[], Deadline]) -> None:
        """Make the lines to some ranks of the world; raises as `Transport.connect`."""
        lines = self._lines
        for peer in peers:
            if peer not in lines and peer != self._rank:
                self._connect(peer, deadline())

    def _connect(self, peer: int, deadline: Deadline) -> None:
        with self._connecting:
            if self._transport is None:
                self._transport = self._job.open_transport(POST_CHANNEL)
            transport = self._transport
        transport.connect([peer], deadline)
        with self._connecting:
            if peer in self._lines:
                return
            line = Line(self._rank, peer, transport, mailbox_of(transport, peer, OPENING_BYTES), self._opened)
            allowed = transport.eager_bytes
            line.most = min(line.most, _EAGER_BYTES) if allowed is None else allowed
            counted = self._job.control.counted
            counted.sends.setdefault(POST_CHANNEL, {})[peer] = line.sent
            counted.receives.setdefault(POST_CHANNEL, {})[peer] = line.taken
            with self.lock:
                self._lines[peer] = line
            self._interrupt()

    def counts(self, peer: int) -> tuple[int, int]:
        """Return how many records came from a rank, and how many were sent to it."""
        line = self._lines.get(peer)
        return (0, 0) if line is None else (line.taken.next, line.sent.next)

    # Requests begin. All under the lock.

    def send(self, send: Send) -> None:
        """Begin to send a message, to a rank that is connected."""
        if send.peer == self._rank:
            self._to_self(send)
            return
        _count(self._begun, send.peer)
        line, nbytes = self._lines[send.peer], len(send.data)
        answered = send.flags & SYNC
        kind = EAGER if nbytes <= line.most else ANNOUNCE
        if kind == ANNOUNCE or answered:
            self._numbers = send.number = self._numbers + 1
            self._unanswered[send.number] = send
        head = envelope(kind, send.flags, send.context, send.tag, send.number, nbytes, send.dtype, send.shape)
        if kind == ANNOUNCE:
            line.push(head, send.data[:0])
        else:
            line.push(head, send.data, None if answered else send.finish)
        if line.outgoing is not None and self._driver is not None:
            self._interrupt()

    def _to_self(self, send: Send) -> None:
        about = Envelope(send.context, EAGER, send.flags, send.tag, 0, len(send.data), send.dtype, send.shape, "", 0)
        _count(self._begun, self._rank)
        letter = Letter(self._rank, about)
        receive = self.matching.receive_for(letter.context, letter.source, letter.tag)
        if receive is not None:
            self._fill(receive, letter, send.data)
            send.finish()
            return
        if send.flags & READY:
            raise NotReady(self._rank, str(send.what))
        letter.array = letter.new_memory()
        bytes_of(letter.array)[:] = send.data
        letter.is_complete = True
        self.matching.add(letter)
        if send.flags & SYNC:
            self._numbers = letter.number = send.number = self._numbers + 1
            self._unanswered[send.number] = send
        else:
            send.finish()

    def receive(self, receive: Receive) -> None:
        """Let a receive meet a message that has come, or wait for one."""
        if self._runtime.is_simulated and self._driver is None:
            self._listen(patient=False)  # all that could meet it, for the seed to choose
        letter = self.find(receive)
        if letter is None:
            self.matching.post(receive)
        else:
            self.matching.remove(letter)
            self.meet(receive, letter)

    def find(self, receive: Receive) -> Letter | None:
        """Return the message that a receive would meet now."""
        letter = self.matching.letter_for(receive.key)
        if letter is not None and receive.key[1] == NO_RANK and self._runtime.is_simulated:
            able = self.matching.letters_for(receive.key)
            if len(able) > 1:
                letter = able[self._runtime.choose(len(able))]
                senders = ", ".join(str(rank) for rank in sorted(each.source for each in able))
                self._runtime.mark(
                    f"{receive.what}: of the messages of ranks {senders}, the seed draws that of rank {letter.source}"
                )
        return letter

    def pass_through(self, operation: Send | Receive) -> bool:
        """Begin an operation whose line is there, and look for its message for a moment: the short way of most calls.

        Return whether it has begun; if so, it may have ended as well.
        """
        lines, peers = self._lines, operation.awaits()
        for peer in peers:
            if peer not in lines and peer != self._rank:
                return False
        line = lines.get(peers[0]) if len(peers) == 1 else None
        with self.lock:
            if isinstance(operation, Send):
                self.send(operation)
                return True
            self.receive(operation)
            waits = not operation.done and line is not None and line.incoming is None and self._driver is None
        if waits:
            self.look(operation)
        return True

    def keep(self, operation: Operation, timeout_s: float) -> None:
        """Drive for an operation that has begun, even if no thread waits for it, until it ends."""
        if not operation.done:
            self._kept[operation] = self._runtime.now() + timeout_s, timeout_s
            operation.kept_by = self._kept
            self._courier.call()

    # Messages meet receives

    def meet(self, receive: Receive, letter: Letter) -> None:
        """Let a receive have a message that waits no longer."""
        _count(self._met, letter.source)
        if letter.array is not None:  # it came, or is on its way, without a receive
            target = receive.memory_for(letter)
            self._answer(letter, MET)
            if letter.is_complete:
                if target is not None and receive.array is not letter.array:
                    target[:] = bytes_of(letter.array)
                self._arrived(receive)
            return
        target = receive.memory_for(letter)
        wanted = 0 if target is None else letter.nbytes
        if wanted:
            assert target is not None
            self._awaited[letter.source, letter.number] = receive, letter, target
        self._answer(letter, GO, wanted)
        if not wanted:
            self._arrived(receive)

    def _arrived(self, receive: Receive) -> None:
        if receive.error is None:
            receive.arrive()
        else:
            receive.finish()

    def _answer(self, letter: Letter, kind: int, nbytes: int = 0) -> None:
        if not letter.number:
            return
        if letter.source == self._rank:
            self._answered(letter.number)
            return
        line = self._lines[letter.source]
        line.push(answer(kind, letter.number, nbytes), _NOTHING)
        if not line.is_idle:
            self._owing.add(line)
            if self._driver is not None:
                self._interrupt()

    def _answered(self, number: int) -> Send | None:
        send = self._unanswered.pop(number, None)
        if send is not None:
            send.finish()
        return send

    def _fill(self, receive: Receive, letter: Letter, data: memoryview) -> None:
        """Let a receive have a message whose bytes are all there."""
        _count(self._met, letter.source)
        target = receive.memory_for(letter)
        if target is not None:
            target[:] = data
        self._answer(letter, MET)
        self._arrived(receive)

    # Records come

    def _opened(self, line: Line, opening: memoryview) -> Body | None:
        about = opened(opening, line.peer)
        match about.kind:
            case envelopes.EAGER:
                return self._eager(line, about, opening)
            case envelopes.ANNOUNCE:
                self._announced(line, about)
            case envelopes.GO:
                self._go(line, about)
            case envelopes.DATA:
                return self._data(line, about, opening)
            case _:
                if self._answered(about.number) is None:
                    raise Damaged(line.peer, f"rank {line.peer} answered message {about.number}, which waits for no answer")
        return None

    def _eager(self, line: Line, about: Envelope, opening: memoryview) -> Body | None:
        letter, nbytes = Letter(line.peer, about), about.nbytes
        data = opening[about.start : about.start + min(nbytes, OPENING_BYTES - about.start)]
        receive = self.matching.receive_for(letter.context, letter.source, letter.tag)
        if receive is not None and len(data) == nbytes:
            self._fill(receive, letter, data)
            return None
        target: memoryview | None
        if receive is not None:
            _count(self._met, letter.source)
            target = receive.memory_for(letter)
            self._answer(letter, MET)
        else:
            if about.flags & READY:
                raise NotReady(line.peer, str(letter))
            letter.array = np.empty(nbytes, np.uint8) if letter.words else letter.new_memory()
            target = bytes_of(letter.array)
            self.matching.add(letter)
        if target is None:  # the receive cannot have it, but it comes
            target = memoryview(bytearray(nbytes))
        target[: len(data)] = data
        if len(data) == nbytes:
            letter.is_complete = True
            return None
        return target[len(data) :], partial(self._complete, letter, receive, target)

    def _complete(self, letter: Letter, receive: Receive | None, data: memoryview) -> None:
        letter.is_complete = True
        if receive is None and letter.receive is not None:  # it has met one while it came
            receive = letter.receive
            if receive.error is None and receive.array is not letter.array and receive.array is not None:
                bytes_of(receive.array)[: letter.nbytes] = data
        if receive is not None:
            self._arrived(receive)

    def _announced(self, line: Line, about: Envelope) -> None:
        letter = Letter(line.peer, about)
        receive = self.matching.receive_for(letter.context, letter.source, letter.tag)
        if receive is not None:
            self.meet(receive, letter)
            return
        if about.flags & READY:
            raise NotReady(line.peer, str(letter))
        self.matching.add(letter)

    def _go(self, line: Line, about: Envelope) -> None:
        send = self._unanswered.get(about.number)
        if send is None or about.nbytes not in (0, len(send.data)):
            raise Damaged(
                line.peer, f"rank {line.peer} asked for {about.nbytes} bytes of message {about.number}, which are not there"
            )
        if not about.nbytes:
            self._answered(about.number)
            return
        del self._unanswered[about.number]
        line.push(answer(DATA, about.number, about.nbytes), send.data, send.finish)

    def _data(self, line: Line, about: Envelope, opening: memoryview) -> Body | None:
        found = self._awaited.pop((line.peer, about.number), None)
        if found is None or found[1].nbytes != about.nbytes:
            raise Damaged(
                line.peer, f"rank {line.peer} sent {about.nbytes} bytes of message {about.number}, which no call awaits"
            )
        receive, letter, target = found
        letter.is_complete = True
        data = opening[about.start : about.start + min(about.nbytes, OPENING_BYTES - about.start)]
        target[: len(data)] = data
        if len(data) == about.nbytes:
            self._arrived(receive)
            return None
        return target[len(data) :], partial(self._arrived, receive)

    # Waiting

    def poll(self) -> None:
        """Move what can be moved now, without waiting; raises as `Transport.wait`."""
        with self.lock:
            if self._driver is not None or not self._lines:
                return
            self._driver = get_ident()
        try:
            with self.lock:
                transfers = self._listen(patient=False)
            assert self._transport is not None
            self._transport.poll(transfers)
            with self.lock:
                self._move()
        finally:
            self._step_back()

    def wait(
        self,
        test: Callable[[], bool],
        until: Deadline,
        on_stall: Callable[[], None] | None,
        awaits: Callable[[], list[int]],
        *,
        gives_up: bool = False,
    ) -> None:
        """Drive, or let another thread drive, until ``test()`` holds, which is called under the lock.

        Parameters
        ----------
        test
            Returns whether what the caller waits for has happened.
        until
            Until when.
        on_stall
            Called when nothing has moved for a while.
        awaits
            Returns the ranks of the world that it waits for.
        gives_up
            Whether the program continues after the deadline; then a task of the office drives in a simulated world.

        Raises
        ------
        Overdue
            The deadline passed.
        LinkLost, Damaged, HeaderMismatch, NotReady
            The job cannot continue.
        """
        patience = None if on_stall is None else Deadline(_FIRST_STALL_S)
        moved = -1
        drives = not (gives_up and self._runtime.is_simulated)
        while not self._wait_once(test, until if patience is None or until.at < patience.at else patience, drives=drives):
            if until.passed():
                with self.lock:
                    if test():
                        return
                raise Overdue(awaits() or [self._rank])
            self.check()
            if patience is not None and on_stall is not None and patience.passed():
                before, moved = moved, self._moved()
                if before == moved:
                    on_stall()
                patience = Deadline(_FIRST_STALL_S if before != moved else _NEXT_STALL_S)

    def look(self, operation: Operation) -> None:
        """Look for the records of the one rank that could end an operation, for a moment: the way of most receives."""
        peers = operation.awaits()
        line = self._lines.get(peers[0]) if len(peers) == 1 else None
        if line is None:
            return
        with self.lock:
            if self._driver is not None:
                return
            self._driver = get_ident()
        try:
            with self.lock:
                while not operation.done and line.incoming is None:
                    line.listen(patient=True, once=True)
        finally:
            self._step_back()

    def _wait_once(self, test: Callable[[], bool], limit: Deadline, *, drives: bool) -> bool:
        """Drive, or let another thread drive, until a limit; return whether ``test()`` holds."""
        with self.lock:
            if test():
                return True
            place: Place | None = None
            if self._driver is None and self._lines and drives:
                self._driver = get_ident()
            else:
                if self._driver is None and self.has_work:
                    self._courier.call()
                place = self._runtime.place(for_good=False)
                self._parked[place] = test
                if self._driver is self._courier and not self._runtime.is_simulated:
                    self._interrupt()
        if place is None:
            try:
                return self._drive(test, limit)
            finally:
                self._step_back()
        try:
            place.wait(limit.remaining())
        finally:
            with self.lock:
                self._parked.pop(place, None)
        with self.lock:
            return test()

    def _drive(self, test: Callable[[], bool], limit: Deadline, *, yields: bool = False) -> bool:
        """Drive until ``test()`` holds or a limit; if it ``yields``, also until another thread wants to. Return whether the test holds."""
        transport = self._transport
        assert transport is not None
        while True:
            with self.lock:
                if test():
                    return True
                transfers = self._listen(patient=not yields and len(self._lines) == 1)
                self._wake_able()
                if test():
                    return True
            until = limit
            if limit.remaining() > self._slice_s:
                until = Deadline(self._slice_s, self._runtime.now)
            try:
                checked_wait(transport, transfers, until)
            except TimeoutError:
                if limit.passed() or (yields and self._parked):
                    return False
            with self.lock:
                self._move()

    def drive_in_background(self, limit: Deadline) -> bool:
        """Drive for the courier, as long as there is something to do and no other thread wants to; return False if it could not begin to."""
        with self.lock:
            if self.is_driven:
                return False
            self._driver = self._courier
        try:
            self._drive(lambda: not self.has_work, limit, yields=not self._runtime.is_simulated)
        finally:
            self._step_back()
        return True

    def _step_back(self) -> None:
        """Let another thread drive."""
        with self.lock:
            self._driver = None
            if self._parked:
                self._wake_able()
                for place in self._parked:
                    place.wake()
                    break
            elif self._kept or self._owing:
                self._courier.call()

    def _listen(self, *, patient: bool) -> list[Transfer]:
        """Take what has come on all lines; return what they wait for."""
        waits: list[Transfer] = []
        lines = list(self._lines.values())
        if self._runtime.is_simulated:  # no rank's messages come first for its number
            for last in range(len(lines) - 1, 0, -1):
                other = self._runtime.choose(last + 1)
                lines[last], lines[other] = lines[other], lines[last]
        for line in lines:
            if line.incoming is None:
                line.listen(patient=patient)
            assert line.incoming is not None
            waits.append(line.incoming)
        waits += [line.outgoing for line in lines if line.outgoing is not None]
        return waits

    def _move(self) -> None:
        for line in list(self._lines.values()):
            incoming, outgoing = line.incoming, line.outgoing
            if outgoing is not None and outgoing.done:
                line.write_on()
            if incoming is not None and incoming.done:
                line.read_on()
        self._wake_able()

    def _moved(self) -> int:
        with self.lock:
            return sum(line.moved for line in self._lines.values())

    def check(self) -> None:
        """Raise `LinkLost` if the job has ended: nothing may come any more, even if this thread waits for another one."""
        if self._job.control.failed or self._job.closed:
            raise LinkLost(self._rank, "the job has ended")

    def _wake_able(self) -> None:
        """Wake the threads that let others drive, and need not wait any more. Under the lock."""
        for place in [place for place, test in self._parked.items() if test()]:
            del self._parked[place]
            place.wake()

    def _interrupt(self) -> None:
        """Let the driver look again: there is something new to wait for, or another thread wants to drive."""
        if self._transport is not None:
            self._slice_s = math.inf if self._transport.interrupt() else _SLICE_S

    @property
    def is_taken_by_caller(self) -> bool:
        """Whether the calling thread is in the middle of another call of the office, which a signal has interrupted."""
        return self._driver == get_ident()

    # What is kept

    @property
    def has_work(self) -> bool:
        """Whether there is something to do although no thread may wait for it."""
        if self._owing:
            self._owing = {line for line in self._owing if not line.is_idle}
        return bool(self._kept or self._owing)

    @property
    def is_driven(self) -> bool:
        """Whether a thread drives or is about to, or there is nothing to drive."""
        return self._driver is not None or (bool(self._parked) and not self._runtime.is_simulated) or not self._lines

    def earliest(self) -> float:
        """Return when the time of the first of the operations is up for which no thread waits."""
        with self.lock:
            return min((until for until, _ in self._kept.values()), default=float("inf"))

    def time_given(self, operation: Operation) -> float:
        """Return how many seconds an operation had in all."""
        return self._kept[operation][1] if operation in self._kept else 0.0

    def time_left(self, operations: Sequence[Operation]) -> float:
        """Return the seconds until the time of one of some operations is up."""
        with self.lock:
            until = min((self._kept[each][0] for each in operations if each in self._kept), default=self._runtime.now())
        return until - self._runtime.now()

    def overdue(self) -> Operation | None:
        """Return an operation whose time is up and for which no thread waits."""
        now = self._runtime.now()
        with self.lock:
            if now < self._look_at:
                return None
            if not self._runtime.is_simulated:
                self._look_at = now + 0.05 + 1e-6 * len(self._kept)
            return next((each for each, (until, _) in self._kept.items() if until <= now), None)

    def kept(self, context: int | None = None) -> list[Operation]:
        """Return the operations for which no thread may wait, of one group or all."""
        with self.lock:
            return [each for each in self._kept if context in (None, each.context)]

    def end(self, operation: Operation, error: BaseException) -> None:
        """End an operation by an error."""
        with self.lock:
            if operation.done:
                return
            if isinstance(operation, Receive):
                self.matching.withdraw(operation)
            operation.error = error
            operation.finish()
            self._wake_able()


_NOTHING = memoryview(b"")


def _count(tallies: dict[int, Tally], rank: int) -> None:
    tally = tallies.get(rank)
    if tally is None:
        tally = tallies[rank] = Tally()
    tally.next += 1
