"""What becomes of sends, receives and records with tags: they meet, and answer each other. All of it under the lock of the office."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from oneaccord.arrays.memory import bytes_of
from oneaccord.calls.engine.adapter import mailbox_of
from oneaccord.calls.messages.point_to_point import OPENING_BYTES
from oneaccord.calls.post import envelopes
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
from oneaccord.calls.post.messages import Letter, Receive, Send
from oneaccord.contract.backend import Damaged, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import MET_CHANNEL, POST_CHANNEL
from oneaccord.job.job import Job

__all__ = ["NotReady", "Sorter"]

_EAGER_BYTES = 1 << 16
"""The longest message that is sent before its receive is known, if the backend does not say."""


class NotReady(Exception):
    """A message in mode "ready" came from ``peer`` before its receive."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(what)
        self.peer: int = peer


class Sorter:
    """What a post office does with sends, receives and records, but for the waiting.

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
    lanes
        What the compiled executor needs of the lines to other ranks.
    deliver
        As for `Line`.
    """

    def __init__(self, job: Job) -> None:
        self.lock: AbstractContextManager[bool] = threading.RLock()
        self.matching: Matching = Matching()
        self._job = job
        self._rank = job.rank
        self._runtime = job.runtime
        self._transport: Transport | None = None
        self._lines: dict[int, Line] = {}
        self.lanes: dict[int, Any] = {}
        self.deliver: Callable[[object], int] | None = None
        self._connecting = threading.Lock()
        self._numbers = 0
        self._unanswered: dict[int, Send] = {}
        self._awaited: dict[tuple[int, int], tuple[Receive, Letter, memoryview]] = {}
        self._driver: object = None
        self._owing: set[Line] = set()
        # Messages that were sent and that have met their receives, for the store: what was never received is a mismatch.
        self._begun: dict[int, Tally] = job.control.counted.sends.setdefault(MET_CHANNEL, {})  # type: ignore[assignment]
        self._met: dict[int, Tally] = job.control.counted.receives.setdefault(MET_CHANNEL, {})  # type: ignore[assignment]

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
            box = mailbox_of(transport, peer, OPENING_BYTES)
            sent, taken, begun, met = (Tally() if box.compiled is None else box.compiled.Counters(kept=1) for _ in range(4))
            line = Line(self._rank, peer, transport, box, self._opened, sent, taken)
            allowed = transport.eager_bytes
            line.most = min(line.most, _EAGER_BYTES) if allowed is None else allowed
            counted = self._job.control.counted
            counted.sends.setdefault(POST_CHANNEL, {})[peer] = sent
            counted.receives.setdefault(POST_CHANNEL, {})[peer] = taken
            with self.lock:
                self._begun[peer], self._met[peer] = begun, met
                self._lines[peer] = line
                line.lane = line.compiled(begun, met)
                if line.lane is not None:
                    self.lanes[peer], line.deliver = line.lane, self.deliver
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
        if line.outgoing is not None and self._driver is None and self._transport is not None:
            self._transport.poll([line.outgoing])  # the line may have come free since
            line.write_on()
        head = envelope(kind, send.flags, send.context, send.tag, send.number, nbytes, send.dtype, send.shape)
        if kind == ANNOUNCE:
            line.push(head, send.data[:0])
        else:
            line.push(head, send.data, None if answered else send.finish)
        if line.outgoing is not None:
            self._is_owing(line)

    def _is_owing(self, line: Line) -> None:
        """Let a line be driven that has something to send, even if no thread waits for it."""
        self._owing.add(line)
        if self._driver is not None:
            self._interrupt()

    def send_on(self, send: Send, gone: int) -> None:
        """Go on with a send that C has begun, of which ``gone`` bytes have left."""
        self._lines[send.peer].go_on(send.data[gone:], send.finish)

    def take_on(self, receive: Receive, letter: Letter, data: memoryview, came: int) -> None:
        """Go on with a message whose opening C has taken, with the first bytes of its ``data``; that it drives no more is for the caller to say."""
        receive.letter, letter.receive = letter, receive
        self._lines[letter.source].take_rest(data[came:], partial(self._complete, letter, receive, data))

    def _to_self(self, send: Send) -> None:
        about = Envelope(send.context, EAGER, send.flags, send.tag, 0, len(send.data), send.dtype, send.shape, "", 0)
        _count(self._begun, self._rank)
        letter = Letter(self._rank, about)
        receive = self.matching.receive_for(letter.context, letter.source, letter.tag)
        if receive is not None:
            self._fill(receive, letter, send.data)
            send.finish()
            self._ended()
            return
        if send.flags & READY:
            raise NotReady(self._rank, str(send.what))
        letter.array = letter.new_memory()
        bytes_of(letter.array)[:] = send.data
        letter.is_complete = True
        self.matching.add(letter)
        self._ended()  # a thread may probe for it
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
            if letter.source == self._rank:
                self._ended()

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
            self._is_owing(line)

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

    def _ended(self) -> None:
        """Let other threads look whether what they wait for has happened, if a thread of this rank itself has done it."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """Let the driver look again: there is something new to wait for."""
        raise NotImplementedError

    def _listen(self, *, patient: bool) -> list[Transfer]:
        """Take what has come on all lines; return what they wait for."""
        raise NotImplementedError


_NOTHING = memoryview(b"")


def _count(tallies: dict[int, Tally], rank: int) -> None:
    tally = tallies.get(rank)
    if tally is None:
        tally = tallies[rank] = Tally()
    tally.next += 1
