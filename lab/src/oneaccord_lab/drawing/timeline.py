"""The time of each message of a collective, and its content, if every message takes one unit of time.

The network here is the one of textbooks: a rank sends one message and receives one at a time, every message takes as long as
every other, and local steps take no time. So the drawing shows the idea of an algorithm, and is not a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oneaccord.schedule.contracts import Contract, Piece
from oneaccord.schedule.proof.flow import Address, check_flow
from oneaccord.schedule.proof.structure import check_structure
from oneaccord.schedule.proof.verify import Report, verify
from oneaccord.schedule.steps import Buffer, RecvReduce, Reduce, Ref, Schedule, reads_of, target_of

__all__ = ["Local", "Message", "Timeline", "Value", "Write", "timeline_of"]


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a chunk: its piece, and the ranks whose input is combined in it, as a bit mask."""

    piece: Piece
    ranks: int

    @property
    def contributions(self) -> int:
        """The number of ranks whose input was combined."""
        return self.ranks.bit_count()


@dataclass(frozen=True, slots=True)
class Message:
    """A message, under way from ``start`` to ``start + 1``.

    Attributes
    ----------
    start
        When it starts, in messages since the beginning.
    sender, receiver
        The two ranks.
    values
        The chunks that it carries; none in a message of a barrier.
    reduces
        Whether the receiver combines it with its own value, as soon as it is there; otherwise it is put down as it is.
    """

    start: int
    sender: int
    receiver: int
    values: tuple[Value, ...]
    reduces: bool


@dataclass(frozen=True, slots=True)
class Local:
    """A local step of a rank, in no time: a copy, or a reduction of chunks that it has, with the values that it leaves."""

    time: int
    rank: int
    values: tuple[Value, ...]
    reduces: bool


@dataclass(frozen=True, slots=True)
class Write:
    """A chunk of a rank's memory, and the value that it holds from ``time`` on: by a message that has arrived, or by a local step."""

    time: int
    rank: int
    buffer: Buffer
    chunk: int
    value: Value


@dataclass(frozen=True, slots=True)
class Timeline:
    """A collective of one world, in time.

    Attributes
    ----------
    contract
        The collective, the world, the root and the number of segments.
    algorithm
        How it is carried out.
    report
        The result of the proof: the longest chain of messages, and the messages of each rank.
    slots
        The units of time that it takes: the steps of textbooks. At least the number of messages on the longest chain, and more if a
        rank has several to send or to receive at once.
    messages, locals
        All that happens, by time and then by rank.
    writes
        What fills the memory of the ranks, by time. All writes up to a time, in this order, give the memory at that time.
    before, after
        The input and output of each rank.
    """

    contract: Contract
    algorithm: str
    report: Report
    slots: int
    messages: tuple[Message, ...]
    locals: tuple[Local, ...]
    writes: tuple[Write, ...]
    before: tuple[tuple[Value, ...], ...]
    after: tuple[tuple[Value, ...], ...]

    @property
    def complete(self) -> int:
        """The number of contributions of a chunk that is done."""
        return self.contract.size if self.contract.promise.reduces else 1


def timeline_of(schedules: Sequence[Schedule]) -> Timeline:
    """Prove schedules right and put them in time.

    Parameters
    ----------
    schedules
        The schedules of ranks 0, 1, ... in this order.

    Returns
    -------
    Timeline
        The same for the same schedules, always.

    Raises
    ------
    ScheduleError
        They do not keep the promise of their collective; see `verify`.
    """
    report = verify(schedules)
    contract, pieces = check_structure(schedules)
    events = check_flow(schedules, pieces).events
    finish = _times(schedules, events)
    memory = _Memory(contract, schedules)
    before = tuple(memory.inputs(rank) for rank in range(contract.size))
    messages: list[Message] = []
    local: list[Local] = []
    writes: list[Write] = []
    arrived: dict[Address, int] = {}
    for ((rank, index), receive), time in zip(events, finish, strict=True):
        step = schedules[rank].steps[index]
        if receive is not None:
            carried = memory.sent(rank, index)
            writes += (Write(time, *each) for each in memory.receive(*receive, carried))
            arrived[receive] = len(messages)
            reduces = isinstance(schedules[receive[0]].steps[receive[1]], RecvReduce)
            messages.append(Message(time - 1, rank, receive[0], carried, reduces))
            continue
        values, written = memory.run(rank, index)
        writes += (Write(time, *each) for each in written)
        if isinstance(step, Reduce):
            operands = [arrived[rank, earlier] for earlier in step.after if (rank, earlier) in arrived]
            just = [message for message in operands if messages[message].start + 1 == time]
            if just:
                # Received into scratch memory and reduced from there at once: for the reader it is a message that is reduced.
                messages[just[-1]] = replace(messages[just[-1]], reduces=True)
                continue
        local.append(Local(time, rank, values, isinstance(step, Reduce)))
    return Timeline(
        contract=contract,
        algorithm=schedules[0].algorithm,
        report=report,
        slots=max(finish, default=0),
        messages=tuple(sorted(messages, key=lambda message: (message.start, message.sender, message.receiver))),
        locals=tuple(sorted(local, key=lambda done: (done.time, done.rank))),
        writes=tuple(sorted(writes, key=lambda write: write.time)),
        before=before,
        after=tuple(memory.outputs(rank) for rank in range(contract.size)),
    )


Event = tuple[Address, Address | None]


def _times(schedules: Sequence[Schedule], events: Sequence[Event]) -> list[int]:
    """Return when each event ends. ``events`` are in an order in which they can run."""
    number: dict[Address, int] = {}
    previous: dict[tuple[int, int], int] = {}
    waits_for: list[list[int]] = []
    for event, ((rank, index), receive) in enumerate(events):
        ends = [(rank, index)] if receive is None else [(rank, index), receive]
        earlier = [number[owner, after] for owner, step in ends for after in schedules[owner].steps[step].after]
        if receive is not None:
            channel = (rank, receive[0])
            if channel in previous:
                earlier.append(previous[channel])
            previous[channel] = event
        waits_for.append(earlier)
        number.update(dict.fromkeys(ends, event))
    return _fitted(events, waits_for)


def _fitted(events: Sequence[Event], waits_for: Sequence[Sequence[int]]) -> list[int]:
    """Start every message as early as its ranks can; if a rank has several that are ready, in the order of its list of steps."""
    finish: dict[int, int] = {}
    waiting, now = list(range(len(events))), 0
    while waiting:
        ready: list[int] = []
        for event in waiting:
            # A message that starts now ends later, so the steps that wait for it are not ready in this round.
            if all(finish.get(earlier, now + 1) <= now for earlier in waits_for[event]):
                if events[event][1] is None:
                    finish[event] = max((finish[earlier] for earlier in waits_for[event]), default=0)
                else:
                    ready.append(event)
        sending, receiving = set[int](), set[int]()
        for event in sorted(ready, key=lambda event: _turn(events[event])):
            send, receive = events[event]
            assert receive is not None
            if send[0] not in sending and receive[0] not in receiving:
                sending.add(send[0])
                receiving.add(receive[0])
                finish[event] = now + 1
        waiting = [event for event in waiting if event not in finish]
        now += 1
    return [finish[event] for event in range(len(events))]


def _turn(event: Event) -> tuple[int, int, int]:
    (sender, send), receive = event
    assert receive is not None
    return max(send, receive[1]), min(send, receive[1]), sender


Written = tuple[int, Buffer, int, Value]


class _Memory:
    """The chunks of all ranks, with input and output apart."""

    def __init__(self, contract: Contract, schedules: Sequence[Schedule]) -> None:
        self.contract = contract
        self.schedules = schedules
        self.values: dict[tuple[int, Buffer, int], Value] = {}
        for rank in filter(contract.holds_input, range(contract.size)):
            for chunk, piece in enumerate(contract.input_pieces(rank)):
                self.values[rank, Buffer.INPUT, chunk] = Value(piece, 1 << rank)

    def inputs(self, rank: int) -> tuple[Value, ...]:
        count = self.contract.input_chunks if self.contract.holds_input(rank) else 0
        return self._read(rank, Ref(Buffer.INPUT, 0, count))

    def outputs(self, rank: int) -> tuple[Value, ...]:
        count = self.contract.output_chunks if self.contract.holds_output(rank) else 0
        return self._read(rank, Ref(Buffer.OUTPUT, 0, count))

    def sent(self, rank: int, index: int) -> tuple[Value, ...]:
        return tuple(value for ref in reads_of(self.schedules[rank].steps[index]) for value in self._read(rank, ref))

    def receive(self, rank: int, index: int, incoming: tuple[Value, ...]) -> list[Written]:
        """Put a message down and return what it has written."""
        step = self.schedules[rank].steps[index]
        if isinstance(step, RecvReduce):
            incoming = _combined(self._read(rank, step.operand), incoming)
        return self._write(rank, target_of(step), incoming)

    def run(self, rank: int, index: int) -> tuple[tuple[Value, ...], list[Written]]:
        """Perform a local step and return the values that it leaves, and where."""
        step = self.schedules[rank].steps[index]
        first, *second = (self._read(rank, ref) for ref in reads_of(step))
        result = _combined(first, second[0]) if second else first
        return result, self._write(rank, target_of(step), result)

    def _read(self, rank: int, ref: Ref) -> tuple[Value, ...]:
        return tuple(self.values[rank, ref.buffer, chunk] for chunk in range(ref.chunk, ref.chunk + ref.count))

    def _write(self, rank: int, ref: Ref | None, values: tuple[Value, ...]) -> list[Written]:
        if ref is None:
            return []
        written = [(rank, ref.buffer, ref.chunk + offset, value) for offset, value in enumerate(values)]
        self.values.update({each[:3]: each[3] for each in written})
        return written


def _combined(left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(Value(one.piece, one.ranks | other.ranks) for one, other in zip(left, right, strict=True))
