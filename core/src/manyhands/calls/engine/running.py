"""Running a plan: each step starts when those that it waits for have finished, and nothing is made twice.

What depends on the plan and on where its memory is (payloads, operands of reductions and copies) is made when a step first needs
it and stays in the `Run`, which the plan keeps for the next call on the same memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.arrays.memory import Array
from manyhands.calls.engine.memory import Memory, address_of, shared_pool
from manyhands.calls.engine.plan import WORK, Piece, Place, Plan, Task
from manyhands.calls.engine.waiting import StallCallback, Waiter, checked_mailbox, checked_transfer
from manyhands.contract.backend import Mailbox, Sink, Transfer, Transport
from manyhands.contract.deadline import Deadline
from manyhands.errors import InternalError

__all__ = ["Engine", "Run"]

_NO_PAYLOAD = memoryview(bytearray())

Operands = tuple[Array, ...]
"""Of a reduction: left, right, target; of a copy: source, target; none where there is nothing to do."""
Message = tuple[bytes, bytes, memoryview, Operands, Sink | None]
"""A piece: the two halves of its header, its payload, and how it is reduced: once it has come, or as it comes."""


def _no_reduction(*_: Array, **__: Array) -> None:
    raise InternalError("a plan without a reduction came to a step that reduces")


class Engine:
    """Runs plans over one transport, one at a time.

    Parameters
    ----------
    transport
        A transport on which nobody else sends.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._connected: set[int] = set()
        self._boxes: dict[int, Mailbox | None] = {}

    def connect(self, peers: frozenset[int], deadline: Deadline) -> None:
        """Make ready to talk to ``peers``; raises as `Transport.connect`."""
        if not peers <= self._connected:
            self.transport.connect(sorted(peers - self._connected), deadline)
            self._connected |= peers

    def mailboxes(self, peers: frozenset[int]) -> dict[int, Mailbox] | None:
        """Return the mailboxes of peers that are connected, None where one has none."""
        for peer in peers - self._boxes.keys():
            self._boxes[peer] = checked_mailbox(self.transport, peer)
        boxes = {peer: box for peer in peers if (box := self._boxes[peer]) is not None}
        return boxes if len(boxes) == len(peers) else None

    def run(
        self, plan: Plan, source: Array, target: Array, sequence: int, deadline: Deadline, on_stall: StallCallback | None
    ) -> None:
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
        self.connect(plan.peers, deadline)
        work = shared_pool.take(plan.work_bytes) if plan.work_bytes else None
        place = (
            address_of(source),
            source.nbytes,
            address_of(target),
            target.nbytes,
            0 if work is None else work.address,
        )
        run = plan.take_run(place)
        if run is None:
            run = Run(plan)
        if run.place != place or run.dtype != source.dtype:
            run.aim(place, source.dtype)
        run.carry_out(self.transport, (source, target, work), sequence, deadline, on_stall)
        # After a failure neither is kept: the transport may still have views of the memory.
        plan.keep_run(place, run)
        if work is not None:
            shared_pool.give(work)


class Run:
    """A plan on memory at one place, to be carried out any number of times, one after the other.

    Parameters
    ----------
    plan
        What to do.

    Attributes
    ----------
    place, dtype
        Where its memory is, None before it was first aimed, and the dtype of the arrays.
    """

    __slots__ = (
        "_busy",
        "_combine",
        "_memory",
        "_messages",
        "_next",
        "_operands",
        "_piece",
        "_plan",
        "_ready",
        "_sequence",
        "_transport",
        "_unfinished",
        "_waits_for",
        "dtype",
        "place",
    )

    def __init__(self, plan: Plan) -> None:
        self.place: Place | None = None
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._plan = plan
        self._combine = _no_reduction if plan.reduction is None else plan.reduction.combine
        self._memory: tuple[Memory, ...] = ()
        # Made as they are needed.
        self._operands: list[Operands | None] = []
        self._messages: list[Message | None] = []
        # What changes while a run goes on. Each step puts its own part back when it has finished, so that after a run that ends
        # well all is as it was before.
        self._waits_for = list(plan.waits_for)
        self._next = [0] * len(plan.lanes)
        self._piece = [0] * len(plan.lanes)
        self._busy: dict[int, Transfer] = {}
        self._ready: list[int] = []

    def aim(self, place: Place, dtype: np.dtype[Any]) -> None:
        """Be for the memory at a place from now on, and for arrays of this dtype."""
        source, source_bytes, target, target_bytes, work = place
        plan = self._plan
        self.place = place
        self.dtype = dtype
        memory = Memory(source, source_bytes, writable=False), Memory(target, target_bytes, writable=True)
        self._memory = (*memory, Memory(work, plan.work_bytes, writable=True)) if work else memory
        self._operands = [None] * len(plan.tasks)
        self._messages = [None] * len(plan.pieces)

    def carry_out(
        self,
        transport: Transport,
        owners: tuple[object, object, object],
        sequence: int,
        deadline: Deadline,
        on_stall: StallCallback | None,
    ) -> None:
        """Run every step; ``owners`` are those of the memory, and `Engine.run` says the rest."""
        for memory, owner in zip(self._memory, owners, strict=False):
            memory.hold(owner)
        self._transport = transport
        self._sequence = sequence.to_bytes(8, "little")
        self._unfinished = len(self._plan.tasks)
        ready, busy = self._ready, self._busy
        for index in self._plan.first:
            ready.append(index)
            while ready:
                self._begin(ready.pop())
        waiter = None
        while self._unfinished:
            if not busy:
                raise InternalError("a schedule came to a halt although no message was on its way")
            if waiter is None:
                waiter = Waiter(transport, deadline, on_stall)
            waiter.wait(list(busy.values()), self._peers)
            for lane in [lane for lane, transfer in busy.items() if transfer.done]:
                del busy[lane]
                self._arrived(lane)
            while ready:
                self._begin(ready.pop())
        if self._plan.kept:
            for memory in self._memory:
                memory.hold(None)

    def _peers(self) -> list[int]:
        """Return whom the run waits for: those it receives from, else those it sends to."""
        lanes = [self._plan.lanes[lane] for lane in self._busy]
        return sorted({lane.peer for lane in lanes if not lane.is_send}) or sorted({lane.peer for lane in lanes})

    def _begin(self, index: int) -> None:
        """Carry out a step that waits for no other, or leave it to its lane where that is not so far."""
        task = self._plan.tasks[index]
        lane = task.lane
        if lane < 0:
            operands = self._operands[index]
            if operands is None:
                operands = self._operands[index] = self._bind_local(task)
            self._compute(operands)
            self._finish(index, task)
        elif lane not in self._busy and self._plan.lanes[lane].steps[self._next[lane]] == index:
            self._move(lane, index, task, task.pieces.start)

    def _arrived(self, lane: int) -> None:
        """Go on with a lane whose piece has moved."""
        index = self._plan.lanes[lane].steps[self._next[lane]]
        number = self._piece[lane]
        message = self._messages[number]
        assert message is not None
        self._compute(message[3])
        self._move(lane, index, self._plan.tasks[index], number + 1)

    def _move(self, lane: int, index: int, task: Task, number: int) -> None:
        """Move the pieces of a message from ``number`` on, as far as they move at once."""
        peer, is_send, steps = self._plan.lanes[lane]
        start = self._transport.send if is_send else self._transport.recv
        messages, stop = self._messages, task.pieces.stop
        while number < stop:
            message = messages[number]
            is_new = message is None
            if message is None:
                message = messages[number] = self._bind_piece(task, self._plan.pieces[number])
            head, tail, payload, operands, sink = message
            header = head + self._sequence + tail
            if sink is None:
                transfer = start(peer, header, payload)
            else:
                transfer = self._transport.consume(peer, header, len(payload), sink)
            if is_new:
                checked_transfer(transfer, self._transport, "send" if is_send else "recv" if sink is None else "consume")
            if not transfer.done:
                self._busy[lane] = transfer
                self._piece[lane] = number
                return
            if operands:
                self._compute(operands)
            number += 1
        following = self._next[lane] + 1
        if following == len(steps):
            following = 0
        elif not self._waits_for[steps[following]]:
            self._ready.append(steps[following])
        self._next[lane] = following
        self._finish(index, task)

    def _finish(self, index: int, task: Task) -> None:
        waits_for = self._waits_for
        waits_for[index] = self._plan.waits_for[index]
        self._unfinished -= 1
        for dependent in task.dependents:
            waits_for[dependent] -= 1
            if not waits_for[dependent]:
                self._ready.append(dependent)

    def _compute(self, operands: Operands) -> None:
        if len(operands) == 3:
            left, right, target = operands
            self._combine(left, right, out=target)
        elif operands:
            source, target = operands
            target[...] = source

    def _bind_local(self, task: Task) -> Operands:
        """Return the operands of a reduction or copy."""
        (to, start, stop), (source, first, _) = task.target, task.left
        if start == stop:
            return ()
        target, left = self._elements(to, start, stop - start), self._elements(source, first, stop - start)
        if not task.is_copy:
            return left, self._elements(task.right[0], task.right[1], stop - start), target
        # In place, source and target are the same memory; NumPy would copy it onto itself.
        itemsize = self._plan.itemsize
        same = self._memory[to].address + start * itemsize == self._memory[source].address + first * itemsize
        return () if same else (left, target)

    def _bind_piece(self, task: Task, piece: Piece) -> Message:
        """Return what is sent or received for a piece of a message."""
        memory, start, stop = piece.region
        if start == stop:
            return piece.head, piece.tail, _NO_PAYLOAD, (), None
        itemsize, count = self._plan.itemsize, stop - start
        if not task.reduces_incoming:
            return piece.head, piece.tail, self._memory[memory].payload(start * itemsize, stop * itemsize), (), None
        if self._plan.streams:
            payload = self._memory[memory].payload(start * itemsize, stop * itemsize)
            return piece.head, piece.tail, payload, (), self._reducer(task, count)
        work, staging = self._memory[WORK], task.staging
        incoming = work.elements(staging, count, self.dtype)
        operand = self._elements(task.left[0], task.left[1] + piece.offset, count)
        left, right = (incoming, operand) if task.incoming_first else (operand, incoming)
        operands = (left, right, self._elements(memory, start, count))
        return piece.head, piece.tail, work.payload(staging, staging + count * itemsize), operands, None

    def _reducer(self, task: Task, count: int) -> Sink:
        """Return what reduces a message part by part, where each lies."""
        target = self._elements(task.target[0], task.target[1], count)
        operand = self._elements(task.left[0], task.left[1], count)
        combine, dtype, itemsize, incoming_first = self._combine, self.dtype, self._plan.itemsize, task.incoming_first

        def sink(data: memoryview, offset: int) -> None:
            first = offset // itemsize
            incoming: Array = np.ndarray(len(data) // itemsize, dtype, data)
            part = slice(first, first + incoming.size)
            left, right = (incoming, operand[part]) if incoming_first else (operand[part], incoming)
            combine(left, right, out=target[part])

        return sink

    def _elements(self, memory: int, first: int, count: int) -> Array:
        return self._memory[memory].elements(first * self._plan.itemsize, count, self.dtype)
