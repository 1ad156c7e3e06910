"""The interpreter of programs in Python: one loop over their steps, which keeps no books.

A call is slow not only because of its bytes but also because of the objects and look-ups on its way. So everything that does not depend on the
call is made once: the headers except for their number, and arrays in the slots of mailboxes.

Short messages go through mailboxes: operands are copied from the user's array into a slot, and reduced from a slot; there is no other copy.
Long ones are sent from the user's memory, received into it, or reduced as they come, part by part; they are on their way while later steps
run. That this cannot deadlock, however late a send ends, is proved of every algorithm: `oneaccord.schedule.proof.in_order`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from oneaccord.arrays.low_precision import compiled_combine
from oneaccord.arrays.memory import Array, bytes_of, quiet
from oneaccord.calls.engine.adapter import cutting
from oneaccord.calls.engine.program import (
    COPY,
    INPUT,
    LONG_LEFT,
    LONG_RECV,
    LONG_SEND,
    OUTPUT,
    RECV_LEFT,
    RECV_RIGHT,
    REDUCE,
    SEND,
    WAIT,
    WORK,
    CompiledSchedule,
)
from oneaccord.calls.engine.scratch import shared_pool
from oneaccord.calls.engine.waiting import Waiter, checked_transfer, lent
from oneaccord.contract.backend import Mailbox, Sink, Transfer, Transport
from oneaccord.errors import InternalError

__all__ = ["Executable", "Patience"]

Patience = Callable[[], Waiter]
"""Makes a function that waits for transfers that are not done at once."""

_KEPT_SCRATCH_BYTES = 1 << 16
_NOTHING = memoryview(b"")

_Bound = tuple[int, int, Mailbox, bytearray, memoryview, int, tuple[Array, ...], int, int, int]
"""A step: kind, peer, mailbox, header, the offset of the call's number in it, bytes, an array in each slot, and three operands."""
_NO_BOX: Any = None
_NO_HEADER = bytearray()
_NO_NUMBER = memoryview(_NO_HEADER)


class Executable:
    """A program made ready for a transport, and carried out any number of times, one after the other.

    Parameters
    ----------
    program
        The program to carry out.
    transport
        The transport for its messages.
    boxes
        Its mailbox for each peer, of slots as long as the program was compiled for.

    Attributes
    ----------
    takes_any_layout
        `CompiledSchedule.takes_any_layout`.
    compiled
        The program in its compiled form, which brings the scratch memory that it needs; None if there is none.
    """

    __slots__ = (
        "_boxes",
        "_combine",
        "_compiled",
        "_is_plain",
        "_may_round",
        "_parts",
        "_program",
        "_scratch",
        "_steps",
        "_transport",
        "_work_bytes",
        "compiled",
        "takes_any_layout",
    )

    def __init__(self, program: CompiledSchedule, transport: Transport, boxes: Mapping[int, Mailbox]) -> None:
        self._program = program
        whole = transport.streams and not 64 % max(1, program.dtype.itemsize)
        self._transport = transport if whole else cutting(transport, program)
        self._steps: list[_Bound] = _bound(program, boxes)
        self._boxes = boxes
        self._parts = [region for region in program.regions if region[0] != WORK]
        self._work_bytes = program.work_bytes if len(self._parts) < len(program.regions) else 0
        self._scratch: list[Array] = []
        work: Array | None = None
        if 0 < self._work_bytes <= _KEPT_SCRATCH_BYTES:
            work = np.empty(self._work_bytes, np.uint8)
            self._scratch = self._lay_out(work)
        self._compiled, self._combine = _compile(program, boxes, work)
        reduces = any(step.kind in (RECV_LEFT, RECV_RIGHT, REDUCE) for step in program.steps)
        self._may_round = reduces and program.dtype.kind not in "biu"
        # Then the operands are given or kept arrays, and nothing has to be made.
        self._is_plain = not self._parts and self._work_bytes <= _KEPT_SCRATCH_BYTES
        self.takes_any_layout: bool = program.takes_any_layout
        self.compiled: Any = self._compiled if self._work_bytes <= _KEPT_SCRATCH_BYTES else None

    def run(self, source: Array, target: Array, sequence: int, patience: Patience) -> None:
        """Carry out the program.

        Parameters
        ----------
        source, target
            Input and output, of the call's dtype and shapes, empty if the rank holds none; C-contiguous unless `takes_any_layout`.
            They may be the very same memory if the schedule allows that.
        sequence
            The number of the call.
        patience
            Called once, if anything has to be waited for.

        Raises
        ------
        LinkLost, HeaderMismatch, Overdue
            As `Waiter.wait`; also the exception of a reduction. ``target`` and the transport's streams are then undefined, and the transport
            must not be used again.
        """
        block = shared_pool.take(self._work_bytes) if self._work_bytes > _KEPT_SCRATCH_BYTES else None
        stopped = 0 if self._compiled is None else self._compiled.run(source, target, sequence, block)
        if stopped >= 0:
            self.go_on(source, target, sequence, patience, stopped, block)
        if block is not None:
            # After a failure it is not kept: the transport may still have views of it.
            shared_pool.give(block)

    def go_on(
        self, source: Array, target: Array, sequence: int, patience: Patience, step: int, block: Array | None = None
    ) -> None:
        """Carry out the program from a step on, as `run`; if there is a compiled form, messages that it has posted may still be on their way.

        The program's settings for NumPy's floating-point errors do not apply to reductions: an exception here would end the group.
        """
        if self._may_round:
            with np.errstate(all="ignore"):
                self._carry_out(source, target, sequence, patience, step, block)
        else:
            self._carry_out(source, target, sequence, patience, step, block)

    def _carry_out(  # noqa: PLR0912 - the loop of every call
        self, source: Array, target: Array, sequence: int, patience: Patience, step: int, block: Array | None
    ) -> None:
        traffic = None if self._compiled is None else self._left_over(patience, step)
        steps = self._steps[step:] if step else self._steps
        views = [source, target, *self._scratch] if self._is_plain else self._views(source, target, block)
        combine = self._combine
        for kind, peer, box, header, number, nbytes, slots, first, second, third in steps:
            if kind == SEND:
                number[0] = sequence
                if traffic is not None and traffic.is_busy(peer):
                    traffic.send(peer, bytes(header), bytes_of(views[first].copy()) if nbytes else _NOTHING, is_long=False)
                    continue
                if nbytes:
                    slots[box.next_out][...] = views[first]
                unfinished = box.post(header, nbytes)
                if unfinished is not None:
                    # Not waited for now: the peer may be as far, and must get the message that it waits for.
                    traffic = traffic or _Traffic(self._transport, patience)
                    traffic.add(peer, checked_transfer(unfinished, box, "post"))
            elif kind < REDUCE:
                number[0] = sequence
                unfinished = box.fetch(header, nbytes)
                if unfinished is not None:
                    traffic = traffic or _Traffic(self._transport, patience)
                    traffic.wait(checked_transfer(unfinished, box, "fetch"), peer)
                if kind == RECV_RIGHT:
                    combine(views[first], slots[box.next_in], out=views[second])
                elif kind == RECV_LEFT:
                    combine(slots[box.next_in], views[first], out=views[second])
                elif nbytes:
                    views[first][...] = slots[box.next_in]
            elif kind == REDUCE:
                combine(views[first], views[second], out=views[third])
            elif kind == COPY:
                views[second][...] = views[first]
            else:
                traffic = traffic or _Traffic(self._transport, patience)
                if kind == WAIT:
                    traffic.wait_for_sends(peer, first)
                else:
                    number[0] = sequence
                    self._carry(kind, peer, bytes(header), views[first], views[second], traffic)
        if traffic is not None:
            traffic.finish()

    def _left_over(self, patience: Patience, step: int) -> _Traffic:
        """Return the messages that the compiled form has begun to send before a step, and that have not been sent."""
        traffic = _Traffic(self._transport, patience)
        long = Counter(each.peer for each in self._program.steps[:step] if each.kind == LONG_SEND)
        for peer, box in self._boxes.items():
            unfinished = box.unsent()
            # A long message is the last one of its kind, or else it has been sent before the next one was begun.
            traffic.add(peer, unfinished, long[peer])
        return traffic

    def _views(self, source: Array, target: Array, block: Array | None) -> list[Array]:
        """Return the operands: input, output, parts of the scratch memory, parts of input and output."""
        views = [source, target, *(self._scratch if block is None else self._lay_out(block))]
        if self._parts:
            flat = source.reshape(-1), target.reshape(-1)
            views += [flat[memory][start:stop] for memory, start, stop in self._parts]
        return views

    def _lay_out(self, memory: Array) -> list[Array]:
        """Return the parts of the scratch memory, which is an array of bytes."""
        itemsize = self._program.dtype.itemsize
        regions = (region for region in self._program.regions if region[0] == WORK)
        return [_array(self._program, stop - start, memory.data, start * itemsize) for _, start, stop in regions]

    def _carry(self, kind: int, peer: int, header: bytes, first: Array, second: Array, traffic: _Traffic) -> None:
        """Carry out the step of a long message."""
        if kind == LONG_SEND:
            traffic.send(peer, header, bytes_of(first), is_lent=self._program.reduction is None)
        elif kind == LONG_RECV:
            transfer = self._transport.recv(peer, header, bytes_of(first))
            traffic.wait(checked_transfer(transfer, self._transport, "recv"), peer)
        else:
            sink = self._reducer(first, second, incoming_first=kind == LONG_LEFT)
            transfer = self._transport.consume(peer, header, second.nbytes, sink)
            traffic.wait(checked_transfer(transfer, self._transport, "consume"), peer)

    def _reducer(self, operand: Array, target: Array, *, incoming_first: bool) -> Sink:
        """Return a function that reduces a message part by part, each part in place."""
        dtype, itemsize = target.dtype, target.itemsize
        combine = self._combine if dtype.kind in "biu" else quiet(self._combine)
        operand, target = operand.reshape(-1), target.reshape(-1)

        def sink(data: memoryview, offset: int) -> None:
            first = offset // itemsize
            incoming: Array = np.ndarray(len(data) // itemsize, dtype, data)
            part = slice(first, first + incoming.size)
            left, right = (incoming, operand[part]) if incoming_first else (operand[part], incoming)
            combine(left, right, out=target[part])

        return sink


class _Traffic:
    """The messages on their way during a run: at most one to each peer, while others wait for it."""

    __slots__ = ("_active", "_patience", "_queued", "_sent", "_transport", "_waiter")

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience
        self._waiter: Waiter | None = None
        # To each peer: the transfer, and whether the message is a long one.
        self._active: dict[int, tuple[Transfer, bool]] = {}
        self._queued: dict[int, deque[tuple[bytes, memoryview, bool, bool]]] = {}
        self._sent: dict[int, int] = {}

    def add(self, peer: int, transfer: Transfer | None, long: int = 0) -> None:
        """Note that a message to a peer has not been sent at once, the last of ``long`` long ones, or a short one if they are 0.

        No other one to that peer is on its way. None if they have all been sent.
        """
        if long:
            self._sent[peer] = long - (transfer is not None)
        if transfer is not None:
            self._active[peer] = transfer, long > 0

    def is_busy(self, peer: int) -> bool:
        """Return whether something is on its way to a peer."""
        return peer in self._active

    def send(self, peer: int, header: bytes, payload: memoryview, *, is_long: bool = True, is_lent: bool = False) -> None:
        """Send a message when its turn comes; the payload stays as it is until then. It is lent if the peer receives it in no other way."""
        if peer in self._active:
            self._queued.setdefault(peer, deque()).append((header, payload, is_long, is_lent))
        else:
            self._start(peer, header, payload, is_long, is_lent)

    def wait(self, transfer: Transfer, peer: int) -> None:
        """Wait until a message from a peer has come."""
        while not transfer.done:
            self._go_on(peer, transfer)

    def wait_for_sends(self, peer: int, count: int) -> None:
        """Wait until ``count`` long messages have been sent to a peer."""
        while self._sent.get(peer, 0) < count:
            self._go_on(peer)

    def finish(self) -> None:
        """Wait until all has been sent."""
        while self._active:
            self._go_on()

    def _go_on(self, peer: int | None = None, *wanted: Transfer) -> None:
        """Wait until anything has moved: for a peer, or for all peers with a message on its way."""
        if self._waiter is None:
            self._waiter = self._patience()
        transfers = [*wanted, *(transfer for transfer, _ in self._active.values())]
        self._waiter.wait(self._transport, transfers, lambda: sorted(self._active) if peer is None else [peer])
        for to, (transfer, is_long) in list(self._active.items()):
            if transfer.done:
                del self._active[to]
                self._sent[to] = self._sent.get(to, 0) + is_long
                queued = self._queued.get(to)
                if queued:
                    self._start(to, *queued.popleft())

    def _start(self, peer: int, header: bytes, payload: memoryview, is_long: bool, is_lent: bool) -> None:
        queued = self._queued.get(peer)
        while True:
            if is_lent:
                transfer = lent(self._transport, peer, header, payload)
            else:
                transfer = checked_transfer(self._transport.send(peer, header, payload), self._transport, "send")
            if not transfer.done:
                self._active[peer] = transfer, is_long
                return
            self._sent[peer] = self._sent.get(peer, 0) + is_long
            if not queued:
                return
            header, payload, is_long, is_lent = queued.popleft()


def _bound(program: CompiledSchedule, boxes: Mapping[int, Mailbox]) -> list[_Bound]:
    """Return the steps with all that does not depend on the call."""
    slots: dict[tuple[int, bool, int], tuple[Array, ...]] = {}
    bound: list[_Bound] = []
    for kind, peer, head, tail, nbytes, first, second, third in program.steps:
        if not head:
            bound.append((kind, peer, _NO_BOX, _NO_HEADER, _NO_NUMBER, 0, (), first, second, third))
            continue
        header = bytearray(head + bytes(8) + tail)
        number = memoryview(header)[len(head) : len(head) + 8].cast("Q")
        key = peer, kind == SEND, nbytes if kind < REDUCE else 0
        if key not in slots:
            count = nbytes // max(1, program.dtype.itemsize)
            memory = boxes[peer].outgoing if kind == SEND else boxes[peer].incoming
            slots[key] = tuple(_array(program, count, slot) for slot in memory) if key[2] else ()
        bound.append((kind, peer, boxes[peer], header, number, nbytes, slots[key], first, second, third))
    return bound


def _compile(program: CompiledSchedule, boxes: Mapping[int, Mailbox], work: Array | None) -> tuple[Any, Callable[..., Any]]:
    """Return the compiled form of a program, and the function that reduces.

    The former is None if there is none: its messages are long, or C does not know its mailboxes or its reduction.
    """
    dtype, reduction = program.dtype, program.reduction
    combine = None if reduction is None else reduction.combine
    modules = {box.compiled for box in boxes.values()}
    module = modules.pop() if len(modules) == 1 else None
    kernel: Any = combine
    if module is not None and combine is not None and not isinstance(combine, np.ufunc):
        kernel, combine = compiled_combine(module, combine)
    is_known = combine is None or kernel is not combine or (isinstance(combine, np.ufunc) and dtype.isnative)
    made = None
    # C does not reduce long messages, nor cut them.
    too_long = any(
        step.kind > (COPY if program.piece_bytes or program.reduction is not None else LONG_RECV) for step in program.steps
    )
    if module is not None and is_known and not too_long:
        steps = tuple((kind, boxes.get(peer), *rest) for kind, peer, *rest in program.steps)
        operands = ((INPUT, 0, -1), (OUTPUT, 0, -1), *program.regions)
        with suppress(ValueError):  # C knows no such reduction
            made = module.Program(steps, operands, kernel, dtype.num, max(1, dtype.itemsize), program.work_bytes, work)
    return made, combine or _no_reduction


def _array(program: CompiledSchedule, count: int, memory: memoryview, offset: int = 0) -> Array:
    """Return an operand in some memory."""
    return np.ndarray((count,) if program.shape is None else program.shape, program.dtype, memory, offset)


def _no_reduction(*_: Array, **__: Array) -> None:
    raise InternalError("a program without a reduction came to a step that reduces")
