"""Short calls: a plan whose messages all fit into mailboxes, carried out one step after the other, without any bookkeeping.

What makes a short call slow is not its bytes but the objects and look-ups on its way. So all that does not depend on the call is made
once: the order of the steps, the headers but for their sequence number, and arrays that lie in the slots of the mailboxes. Operands go
from the user's array into a slot and from a slot into the reduction; there is no other copy.

Steps run in the order in which the algorithm lists them, but each send as early as its operand is there. Sends do not wait, because the
transport buffers what is short. That this cannot deadlock is a property of the algorithm: `Algorithm.in_order`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from manyhands.arrays import Array
from manyhands.backend import Mailbox, Transfer
from manyhands.engine.plan import WORK, Piece, Plan, Range, Task
from manyhands.errors import InternalError

__all__ = ["SHORT_MESSAGES", "Express", "fits", "in_order"]

SHORT_MESSAGES: int = 64
"""The most messages of a short call on one rank; beyond, it is the engine's, which takes what comes first."""

Patience = Callable[[Transfer, int, list[Transfer]], None]
"""Waits until a transfer to or from a peer is done, while others go on; or raises what `Waiter.wait` does."""

Step = tuple[int, Mailbox, bytearray, memoryview, int, tuple[Array, ...], int, int, int]
"""What to do; mailbox, header, where its sequence number stands, bytes, an array in each slot; positions of operands."""

_SEND, _RECV, _COMBINE_RIGHT, _COMBINE_LEFT, _REDUCE, _COPY = range(6)
_NO_BOX: Any = None
_NO_HEADER = bytearray()
_NO_NUMBER = memoryview(_NO_HEADER)


def fits(plan: Plan, capacity: int) -> bool:
    """Tell whether a plan is one of a short call, for mailboxes of ``capacity`` bytes a slot.

    In one direction all its messages together are no longer than a slot, so that a transport which buffers a few slots buffers all
    that can be on the way: those of this call, and of the next one.
    """
    if len(plan.pieces) > SHORT_MESSAGES:
        return False
    total = [0] * len(plan.lanes)
    for task in plan.tasks:
        if task.lane >= 0:
            total[task.lane] += sum((piece.region[2] - piece.region[1]) * plan.itemsize for piece in _pieces(plan, task))
    return max(total, default=0) <= capacity and all(len(task.pieces) == 1 for task in plan.tasks if task.lane >= 0)


def in_order(plan: Plan) -> list[int]:
    """Return the order in which the steps of a plan run: as they are listed, but sends as early as possible."""
    waits_for = list(plan.waits_for)
    following = [0] * len(plan.lanes)
    order: list[int] = []
    done = [False] * len(plan.tasks)

    def finish(index: int) -> None:
        order.append(index)
        done[index] = True
        task = plan.tasks[index]
        for dependent in task.dependents:
            waits_for[dependent] -= 1
        if task.lane >= 0:
            following[task.lane] += 1

    def send_what_can_be_sent() -> None:
        for number, lane in enumerate(plan.lanes):
            while lane.is_send and following[number] < len(lane.steps) and not waits_for[lane.steps[following[number]]]:
                finish(lane.steps[following[number]])

    for index in range(len(plan.tasks)):
        send_what_can_be_sent()
        if not done[index]:
            finish(index)
    return order


class Express:
    """A short call, made once and carried out any number of times, one after the other.

    Parameters
    ----------
    plan
        What to do; it must `fits`.
    boxes
        The mailbox of each peer.
    dtype
        The dtype of the arrays.
    shape
        The shape of input and output, where both have the same; None where they have not.

    Attributes
    ----------
    takes_any_layout
        Whether input and output may be any arrays of the call's shape, also such that share memory: every step is on whole arrays, and
        the input is not read after the output was written.
    """

    __slots__ = ("_combine", "_parts", "_peers", "_scratch", "_steps", "takes_any_layout")

    def __init__(self, plan: Plan, boxes: Mapping[int, Mailbox], dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> None:
        compiler = _Compiler(plan, boxes, dtype, shape)
        self._peers = {box: peer for peer, box in boxes.items()}
        self._combine: Callable[..., Any] = _no_reduction if plan.reduction is None else plan.reduction.combine
        self._steps = compiler.steps()
        self._scratch = compiler.scratch
        self._parts = compiler.parts
        self.takes_any_layout: bool = compiler.takes_any_layout

    def run(self, source: Array, target: Array, sequence: int, wait: Patience) -> None:
        """Carry out the call.

        Parameters
        ----------
        source, target
            Input and output, of the call's dtype and shapes; C-contiguous unless `takes_any_layout`.
        sequence
            The number of the call.
        wait
            Waits for a transfer that is not done at once.

        Raises
        ------
        LinkLost, HeaderMismatch
            As `Mailbox.fetch`; also what ``wait`` raises. ``target`` and the transport's streams are then undefined, and the transport
            must not be used again.
        """
        views = [source, target, *self._scratch]
        if self._parts:
            flat = source.reshape(-1), target.reshape(-1)
            views += [flat[memory][start:stop] for memory, start, stop in self._parts]
        combine = self._combine
        unsent: dict[Mailbox, Transfer] = {}
        for kind, box, header, number, nbytes, slots, first, second, third in self._steps:
            if kind == _SEND:
                if unsent and box in unsent:
                    wait(unsent.pop(box), self._peers[box], list(unsent.values()))
                number[0] = sequence
                if nbytes:
                    slots[box.next_out][...] = views[first]
                unfinished = box.post(header, nbytes)
                if unfinished is not None:
                    # Not waited for now: the peer may be as far, and must get what it waits for.
                    unsent[box] = unfinished
            elif kind < _REDUCE:
                number[0] = sequence
                unfinished = box.fetch(header, nbytes)
                if unfinished is not None:
                    wait(unfinished, self._peers[box], list(unsent.values()))
                if kind == _COMBINE_RIGHT:
                    combine(views[first], slots[box.next_in], out=views[second])
                elif kind == _COMBINE_LEFT:
                    combine(slots[box.next_in], views[first], out=views[second])
                elif nbytes:
                    views[first][...] = slots[box.next_in]
            elif kind == _REDUCE:
                combine(views[first], views[second], out=views[third])
            else:
                views[second][...] = views[first]
        while unsent:
            box, unfinished = unsent.popitem()
            wait(unfinished, self._peers[box], list(unsent.values()))


class _Compiler:
    """Makes the steps of a short call."""

    def __init__(self, plan: Plan, boxes: Mapping[int, Mailbox], dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> None:
        self._plan = plan
        self._boxes = boxes
        self._dtype = dtype
        self._order = in_order(plan)
        self._lent = _lent(plan, self._order)
        elements = -1 if shape is None else math.prod(shape)
        touched = [region for task in plan.tasks for region in (*_reads(plan, task), *_writes(plan, task))]
        self._whole = bool(touched) and all(
            stop - start == elements and (memory == WORK or start == 0) for memory, start, stop in touched
        )
        self._shape = shape
        self.takes_any_layout: bool = self._whole and self._reads_input_first()
        self._work = np.empty(plan.work_bytes, np.uint8)
        self._places: dict[Range, int] = {}
        self.scratch: list[Array] = []
        self.parts: list[Range] = []
        for region in dict.fromkeys(touched):
            self._place(region)

    def _place(self, region: Range) -> None:
        """Give a region its position among the views of a run: input, output, regions of the scratch memory, parts of the first two."""
        memory, start, stop = region
        if memory == WORK:
            self._places[region] = 2 + len(self.scratch)
            self.scratch.append(self._view(stop - start, self._work.data, start * self._plan.itemsize))
        elif self._whole:
            self._places[region] = memory
        else:
            self.parts.append(region)

    def _position(self, region: Range) -> int:
        place = self._places.get(region)
        return 2 + len(self.scratch) + self.parts.index(region) if place is None else place

    def _view(self, count: int, buffer: memoryview, offset: int = 0) -> Array:
        return np.ndarray(self._shape if self._whole and self._shape is not None else count, self._dtype, buffer, offset)

    def _reads_input_first(self) -> bool:
        written = False
        for index in self._order:
            task = self._plan.tasks[index]
            if written and any(memory == 0 for memory, _, _ in _reads(self._plan, task)):
                return False
            written = written or any(memory == 1 for memory, _, _ in _writes(self._plan, task))
        return True

    def steps(self) -> list[Step]:
        """Return the steps in their order."""
        spent = set(self._lent.values())
        made = (self._step(index) for index in self._order if index not in spent)
        return [step for step in made if step is not None]

    def _step(self, index: int) -> Step | None:
        task = self._plan.tasks[index]
        if task.lane >= 0:
            return self._message(index, task)
        if task.target[1] == task.target[2]:
            return None
        at = self._position
        if task.is_copy:
            return (_COPY, _NO_BOX, _NO_HEADER, _NO_NUMBER, 0, (), at(task.left), at(task.target), 0)
        return (_REDUCE, _NO_BOX, _NO_HEADER, _NO_NUMBER, 0, (), at(task.left), at(task.right), at(task.target))

    def _message(self, index: int, task: Task) -> Step:
        plan, at = self._plan, self._position
        lane, piece = plan.lanes[task.lane], plan.pieces[task.pieces.start]
        box = self._boxes[lane.peer]
        header = bytearray(piece.head + bytes(8) + piece.tail)
        number = memoryview(header)[len(piece.head) : len(piece.head) + 8].cast("Q")
        region = piece.region
        count = region[2] - region[1]
        slots = tuple(self._view(count, slot) for slot in (box.outgoing if lane.is_send else box.incoming)) if count else ()
        message = (box, header, number, count * plan.itemsize, slots)
        if lane.is_send:
            return (_SEND, *message, at(region) if count else 0, 0, 0)
        if not count:
            return (_RECV, *message, 0, 0, 0)
        if task.reduces_incoming:
            return (_COMBINE_LEFT if task.incoming_first else _COMBINE_RIGHT, *message, at(task.left), at(task.target), 0)
        if index in self._lent:
            reduction = plan.tasks[self._lent[index]]
            if reduction.left == region:
                return (_COMBINE_LEFT, *message, at(reduction.right), at(reduction.target), 0)
            return (_COMBINE_RIGHT, *message, at(reduction.left), at(reduction.target), 0)
        return (_RECV, *message, at(region), 0, 0)


def _lent(plan: Plan, order: list[int]) -> dict[int, int]:
    """Return the receives whose payload the next step reduces and nobody else reads, and that step: the slot itself is its operand."""
    lent: dict[int, int] = {}
    for position, index in enumerate(order[:-1]):
        task, following = plan.tasks[index], order[position + 1]
        reduction = plan.tasks[following]
        is_recv = task.lane >= 0 and not plan.lanes[task.lane].is_send
        if not is_recv or task.reduces_incoming or reduction.lane >= 0 or reduction.is_copy:
            continue
        slot = plan.pieces[task.pieces.start].region
        if slot[0] != WORK or (reduction.left == slot) == (reduction.right == slot):
            continue
        for later in order[position + 2 :]:
            if any(_overlap(slot, region) for region in _reads(plan, plan.tasks[later])):
                break
            if slot in _writes(plan, plan.tasks[later]):
                lent[index] = following
                break
        else:
            lent[index] = following
    return lent


def _reads(plan: Plan, task: Task) -> list[Range]:
    if task.lane >= 0 and plan.lanes[task.lane].is_send:
        regions = [piece.region for piece in _pieces(plan, task)]
    elif task.lane >= 0:
        regions = [task.left] if task.reduces_incoming else []
    else:
        regions = [task.left] if task.is_copy else [task.left, task.right]
    return [region for region in regions if region[2] > region[1]]


def _writes(plan: Plan, task: Task) -> list[Range]:
    if task.lane < 0:
        regions = [task.target]
    else:
        regions = [] if plan.lanes[task.lane].is_send else [piece.region for piece in _pieces(plan, task)]
    return [region for region in regions if region[2] > region[1]]


def _pieces(plan: Plan, task: Task) -> list[Piece]:
    return [plan.pieces[number] for number in task.pieces]


def _overlap(one: Range, other: Range) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _no_reduction(*_: Array, **__: Array) -> None:
    raise InternalError("a plan without a reduction came to a step that reduces")
