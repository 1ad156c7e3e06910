"""The engine: runs a schedule over a transport.

A schedule is compiled once for a kind of call (`compile_plan`): chunks become ranges of elements, and messages are cut into
pieces, so that a long one is reduced piece by piece while the kernel moves the next. A plan is then run any number of
times (`Engine.run`), each time on other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.arrays import Array, bytes_of
from manyhands.backend import Transfer, Transport
from manyhands.deadline import Deadline
from manyhands.dtypes import Reduction
from manyhands.errors import InternalError
from manyhands.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send
from manyhands.waiting import StallCallback, Waiter
from manyhands.wire import CallSignature, pack_header, split_header

__all__ = ["Engine", "Plan", "compile_plan"]

_REDUCING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER})
_PIECE_BYTES = 1 << 20
_REDUCE_PIECE_BYTES = 1 << 18
"""Both ends cut a message alike, so the size of a piece is a constant of the collective."""
_KEPT_SCRATCH_BYTES = 1 << 24
"""Scratch memory up to this size is kept from one call to the next."""

_BUFFERS = {Buffer.INPUT: 0, Buffer.OUTPUT: 1, Buffer.SCRATCH: 2}

_NOTHING = memoryview(bytearray())

Range = tuple[int, int, int]
"""Which memory (input, output, scratch), first element, one past the last."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message on the wire; the sequence number goes between the two halves of its header."""

    region: Range
    head: bytes
    tail: bytes
    offset: int
    """Elements of the step's region before this piece."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A compiled step."""

    kind: type
    lane: int
    """The (peer, direction) of a message; -1 for a local step."""
    pieces: tuple[_Piece, ...]
    target: Range
    left: Range
    right: Range
    incoming_first: bool
    waits_for: int
    dependents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule compiled for arrays of one size and dtype.

    Attributes
    ----------
    tasks
        The compiled steps.
    lanes
        For each (peer, direction): the peer, whether it is a send, and its steps in order.
    peers
        Whom the plan talks to.
    scratch_count
        Elements of scratch memory.
    staging_bytes
        The largest piece that is received to be reduced.
    itemsize, reduction
        Bytes per element, and how two are combined.
    """

    tasks: tuple[_Task, ...]
    lanes: tuple[tuple[int, bool, tuple[int, ...]], ...]
    peers: frozenset[int]
    scratch_count: int
    staging_bytes: int
    itemsize: int
    reduction: Reduction | None


def compile_plan(
    schedule: Schedule,
    signature: CallSignature,
    channel: int,
    input_offsets: Sequence[int],
    output_offsets: Sequence[int],
    itemsize: int,
    reduction: Reduction | None,
) -> Plan:
    """Bind a schedule to sizes.

    Parameters
    ----------
    schedule
        What to do.
    signature, channel
        What the headers of its messages say.
    input_offsets, output_offsets
        Where the chunks of the two buffers begin, in elements, and where the last ends.
    itemsize
        Bytes per element.
    reduction
        For collectives that reduce.
    """
    return _Compiler(schedule, signature, channel, input_offsets, output_offsets, itemsize, reduction).compile()


class _Compiler:
    def __init__(
        self,
        schedule: Schedule,
        signature: CallSignature,
        channel: int,
        input_offsets: Sequence[int],
        output_offsets: Sequence[int],
        itemsize: int,
        reduction: Reduction | None,
    ) -> None:
        if len(input_offsets) != schedule.input_chunks + 1 or len(output_offsets) != schedule.output_chunks + 1:
            raise InternalError(f"{schedule.algorithm} wants other numbers of chunks than the call provides")
        self._schedule = schedule
        self._signature = signature
        self._channel = channel
        self._itemsize = itemsize
        self._reduction = reduction
        self._offsets: list[Sequence[int]] = [input_offsets, output_offsets, [0]]
        scratch = [0]
        for ref in schedule.scratch:
            _, start, stop = self._range(ref)
            scratch.append(scratch[-1] + stop - start)
        self._offsets[2] = scratch
        self._lanes: dict[tuple[int, bool], list[int]] = {}
        self._messages: dict[tuple[int, bool], int] = {}
        piece_bytes = _REDUCE_PIECE_BYTES if schedule.collective in _REDUCING else _PIECE_BYTES
        self._piece_count = max(1, piece_bytes // max(1, itemsize))

    def compile(self) -> Plan:
        steps = self._schedule.steps
        dependents: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for earlier in step.after:
                dependents[earlier].append(index)
        tasks = []
        for index, step in enumerate(steps):
            nothing: Range = (0, 0, 0)
            lane, target, left, right, incoming_first = -1, nothing, nothing, nothing, False
            pieces: tuple[_Piece, ...] = ()
            match step:
                case Send(peer, ref) | Recv(peer, ref):
                    lane = self._lane(index, peer, isinstance(step, Send))
                    pieces = self._pieces(peer, isinstance(step, Send), self._range(ref) if ref else nothing)
                case RecvReduce(peer, target_ref, operand, incoming_first):
                    lane = self._lane(index, peer, False)
                    target, left = self._range(target_ref), self._range(operand)
                    pieces = self._pieces(peer, False, target)
                case Reduce(target_ref, left_ref, right_ref):
                    target, left, right = self._range(target_ref), self._range(left_ref), self._range(right_ref)
                case Copy(target_ref, source):
                    target, left = self._range(target_ref), self._range(source)
            task = _Task(
                type(step), lane, pieces, target, left, right, incoming_first, len(step.after), tuple(dependents[index])
            )
            tasks.append(task)
        receives = [piece for task in tasks if task.kind is RecvReduce for piece in task.pieces]
        return Plan(
            tuple(tasks),
            tuple((peer, is_send, tuple(indices)) for (peer, is_send), indices in self._lanes.items()),
            frozenset(peer for peer, _ in self._lanes),
            self._offsets[2][-1],
            max((piece.region[2] - piece.region[1] for piece in receives), default=0) * self._itemsize,
            self._itemsize,
            self._reduction,
        )

    def _range(self, ref: Ref) -> Range:
        buffer = _BUFFERS[ref.buffer]
        return buffer, self._offsets[buffer][ref.chunk], self._offsets[buffer][ref.chunk + ref.count]

    def _lane(self, index: int, peer: int, is_send: bool) -> int:
        key = (peer, is_send)
        self._lanes.setdefault(key, []).append(index)
        return list(self._lanes).index(key)

    def _pieces(self, peer: int, is_send: bool, region: Range) -> tuple[_Piece, ...]:
        buffer, start, stop = region
        sender = self._schedule.rank if is_send else peer
        pieces = []
        first = start
        while True:
            last = min(first + self._piece_count, stop)
            number = self._messages.get((peer, is_send), 0)
            self._messages[peer, is_send] = number + 1
            nbytes = (last - first) * self._itemsize
            head, tail = split_header(pack_header(self._signature, sender, self._channel, 0, nbytes, number))
            pieces.append(_Piece((buffer, first, last), head, tail, first - start))
            if last >= stop:
                return tuple(pieces)
            first = last


class Engine:
    """Runs plans over one transport, one at a time; keeps the memory that they need between runs.

    Parameters
    ----------
    transport
        A transport on which nobody else sends.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._connected: set[int] = set()
        self._scratch = np.empty(0, np.uint8)
        self._staging: list[Array] = []

    def run(self, plan: Plan, source: Array, target: Array, sequence: int, deadline: Deadline, on_stall: StallCallback) -> None:
        """Carry out a plan.

        Parameters
        ----------
        plan
            What to do.
        source, target
            The memory of ``INPUT`` and ``OUTPUT``, C-contiguous and of the plan's dtype; an empty array where the rank holds none.
        sequence
            The number of the call.
        deadline, on_stall
            As for `Waiter`.

        Raises
        ------
        Overdue, LinkLost, HeaderMismatch
            As `Waiter.wait`. ``target`` and the transport's streams are then undefined, and the engine must not be used again.
        """
        if not plan.peers <= self._connected:
            self.transport.connect(sorted(plan.peers - self._connected), deadline)
            self._connected |= plan.peers
        scratch = self._take_scratch(plan, source.dtype)
        _Run(
            self, plan, (source.reshape(-1), target.reshape(-1), scratch), sequence, Waiter(self.transport, deadline, on_stall)
        ).run()

    def _take_scratch(self, plan: Plan, dtype: np.dtype[Any]) -> Array:
        nbytes = plan.scratch_count * plan.itemsize
        if nbytes > len(self._scratch):
            memory = np.empty(nbytes, np.uint8)
            if nbytes <= _KEPT_SCRATCH_BYTES:
                self._scratch = memory
            return memory.view(dtype)
        return self._scratch[:nbytes].view(dtype)

    def take_staging(self, nbytes: int) -> Array:
        """Return memory for an incoming piece of at most ``nbytes`` bytes."""
        while self._staging:
            memory = self._staging.pop()
            if len(memory) >= nbytes:
                return memory
        return np.empty(max(nbytes, 4096), np.uint8)

    def give_staging(self, memory: Array) -> None:
        """Take memory back."""
        self._staging.append(memory)


class _Run:
    """One run of a plan."""

    __slots__ = (
        "_active",
        "_bytes",
        "_engine",
        "_memory",
        "_plan",
        "_position",
        "_ready",
        "_sequence",
        "_staging",
        "_unfinished",
        "_waiter",
        "_waits_for",
    )

    def __init__(self, engine: Engine, plan: Plan, memory: tuple[Array, Array, Array], sequence: int, waiter: Waiter) -> None:
        self._engine = engine
        self._plan = plan
        self._memory = memory
        self._bytes = (bytes_of(memory[0]), bytes_of(memory[1]), bytes_of(memory[2]))
        self._sequence = sequence.to_bytes(8, "little")
        self._waiter = waiter
        self._waits_for = [task.waits_for for task in plan.tasks]
        self._position = [0] * len(plan.lanes)
        # Per lane: the transfer on its way, its step and its piece; None when the lane is idle.
        self._active: list[tuple[Transfer, int, int] | None] = [None] * len(plan.lanes)
        self._staging: dict[int, Array] = {}
        self._ready = [index for index, task in reversed(list(enumerate(plan.tasks))) if not task.waits_for]
        self._unfinished = len(plan.tasks)

    def run(self) -> None:
        while True:
            while self._ready:
                index = self._ready.pop()
                lane = self._plan.tasks[index].lane
                if lane < 0:
                    self._perform(self._plan.tasks[index])
                    self._finish(index)
                elif self._active[lane] is None and self._is_next(lane, index):
                    self._start(lane, index)
                # Else its lane is busy, and starts the step when it comes to it.
            if not self._unfinished:
                return
            active = [entry for entry in self._active if entry is not None]
            if not active:
                raise InternalError("a schedule came to a halt although no message was on its way")
            self._waiter.wait([entry[0] for entry in active], self._peers)
            for lane, entry in enumerate(self._active):
                if entry is not None and entry[0].done:
                    self._advance(lane, entry[1], entry[2])

    def _is_next(self, lane: int, index: int) -> bool:
        steps = self._plan.lanes[lane][2]
        return self._position[lane] < len(steps) and steps[self._position[lane]] == index

    def _peers(self) -> list[int]:
        """Return whom the run waits for: those it receives from, else those it sends to."""
        lanes = [self._plan.lanes[lane] for lane, entry in enumerate(self._active) if entry is not None]
        return sorted({peer for peer, is_send, _ in lanes if not is_send}) or sorted({peer for peer, _, _ in lanes})

    def _start(self, lane: int, index: int) -> None:
        transfer = self._transfer(lane, index, 0)
        self._active[lane] = (transfer, index, 0)
        if transfer.done:
            self._advance(lane, index, 0)

    def _transfer(self, lane: int, index: int, number: int) -> Transfer:
        """Start one piece of a message step."""
        task = self._plan.tasks[index]
        piece = task.pieces[number]
        peer, is_send, _ = self._plan.lanes[lane]
        header = piece.head + self._sequence + piece.tail
        buffer, start, stop = piece.region
        itemsize = self._plan.itemsize
        if start == stop:
            payload = _NOTHING
        elif task.kind is RecvReduce:
            staging = self._staging.get(lane)
            if staging is None:
                staging = self._staging[lane] = self._engine.take_staging(self._plan.staging_bytes)
            payload = memoryview(staging)[: (stop - start) * itemsize]  # type: ignore[arg-type]
        else:
            payload = self._bytes[buffer][start * itemsize : stop * itemsize]
        if is_send:
            return self._engine.transport.send(peer, header, payload)
        return self._engine.transport.recv(peer, header, payload)

    def _advance(self, lane: int, index: int, number: int) -> None:
        """Go on after a piece has moved: the lane's next pieces and steps, as far as they move at once."""
        task = self._plan.tasks[index]
        while True:
            if task.kind is RecvReduce:
                self._reduce_incoming(lane, task, task.pieces[number])
            number += 1
            if number == len(task.pieces):
                break
            transfer = self._transfer(lane, index, number)
            if not transfer.done:
                self._active[lane] = (transfer, index, number)
                return
        self._active[lane] = None
        self._position[lane] += 1
        staging = self._staging.pop(lane, None)
        if staging is not None:
            self._engine.give_staging(staging)
        self._finish(index)
        steps = self._plan.lanes[lane][2]
        if self._position[lane] < len(steps):
            following = steps[self._position[lane]]
            if not self._waits_for[following]:
                self._ready.append(following)

    def _finish(self, index: int) -> None:
        self._unfinished -= 1
        for dependent in self._plan.tasks[index].dependents:
            self._waits_for[dependent] -= 1
            if not self._waits_for[dependent]:
                self._ready.append(dependent)

    def _reduce_incoming(self, lane: int, task: _Task, piece: _Piece) -> None:
        buffer, start, stop = piece.region
        count = stop - start
        if not count or self._plan.reduction is None:
            return
        target = self._memory[buffer][start:stop]
        first = task.left[1] + piece.offset
        operand = self._memory[task.left[0]][first : first + count]
        incoming = self._staging[lane][: count * self._plan.itemsize].view(target.dtype)
        if task.incoming_first:
            self._plan.reduction.combine(incoming, operand, out=target)
        else:
            self._plan.reduction.combine(operand, incoming, out=target)

    def _perform(self, task: _Task) -> None:
        target = self._view(task.target)
        left = self._view(task.left)
        if task.kind is Copy:
            # In place, source and target are the same memory; NumPy would copy it onto itself.
            if target.size and target.__array_interface__["data"] != left.__array_interface__["data"]:
                target[...] = left
        elif self._plan.reduction is not None and target.size:
            self._plan.reduction.combine(left, self._view(task.right), out=target)

    def _view(self, region: Range) -> Array:
        return self._memory[region[0]][region[1] : region[2]]
