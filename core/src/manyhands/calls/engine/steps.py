"""From a plan to the steps of one rank in their order: what runs next, and nothing to look up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from manyhands.arrays.memory import Array
from manyhands.calls.engine.plan import WORK, Piece, Plan, Range, Task
from manyhands.contract.backend import Mailbox

__all__ = [
    "COPY",
    "LONG_LEFT",
    "LONG_RECV",
    "LONG_RIGHT",
    "LONG_SEND",
    "MAX_MESSAGES",
    "RECV",
    "RECV_LEFT",
    "RECV_RIGHT",
    "REDUCE",
    "SEND",
    "WAIT",
    "Step",
    "Steps",
    "has_long",
    "in_order",
]

MAX_MESSAGES: int = 1 << 12
"""The most messages of one rank."""

SEND, RECV, RECV_RIGHT, RECV_LEFT, REDUCE, COPY, WAIT, LONG_SEND, LONG_RECV, LONG_RIGHT, LONG_LEFT = range(11)
"""Kinds of steps. A message that is received may be the right or the left operand of a reduction. Short messages go through mailboxes,
long ones do not; WAIT waits until so many long messages to a peer have been sent."""

Step = tuple[int, int, Mailbox, bytearray, memoryview, int, tuple[Array, ...], int, int, int]
"""What to do: kind, peer, mailbox, header, where its sequence number stands, bytes, an array in each slot; then the positions of operands
among the views of a run, or the number of messages that WAIT waits for."""

_NO_BOX: Any = None
_NO_HEADER = bytearray()
_NO_NUMBER = memoryview(_NO_HEADER)


def has_long(plan: Plan, capacity: int) -> bool:
    """Tell whether a plan has messages that are too long for mailboxes of ``capacity`` bytes a slot, or that were cut into pieces."""
    return any(_is_long(plan, capacity)) or any(len(task.pieces) > 1 for task in plan.tasks)


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


class Steps:
    """The steps of a plan, for arrays of one dtype and for one group's mailboxes.

    Parameters
    ----------
    plan, boxes, dtype, shape
        As for `Express`.

    Attributes
    ----------
    steps
        The steps, in their order.
    parts
        The parts of input and output that they use, which are the last of the views of a run: ``[input, output, scratch..., parts...]``.
    scratch
        The parts of the scratch memory that they use.
    has_long
        Whether a message is long.
    takes_any_layout
        As for `Express`.
    """

    __slots__ = (
        "_boxes",
        "_dtype",
        "_lent",
        "_long",
        "_long_sends",
        "_order",
        "_plan",
        "_shape",
        "_whole",
        "has_long",
        "parts",
        "scratch",
        "steps",
        "takes_any_layout",
    )

    def __init__(self, plan: Plan, boxes: Mapping[int, Mailbox], dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> None:
        self._plan = plan
        self._boxes = boxes
        self._dtype = dtype
        self._shape = shape
        self._order = in_order(plan)
        self._long = _is_long(plan, min((len(box.outgoing[0]) for box in boxes.values()), default=0))
        self.has_long: bool = any(self._long)
        self._long_sends = self._followers_of_long_sends()
        # Who waits for its own send before it takes what comes, could wait for ever: its peer may do the same.
        self._lent = {
            index: reduction
            for index, reduction in _lent(plan, self._order).items()
            if not (self._long[plan.tasks[index].lane] and self._sends_before([reduction]))
        }
        touched = [region for task in plan.tasks for region in (*_reads(plan, task), *_writes(plan, task))]
        elements = -1 if shape is None else math.prod(shape)
        self._whole = bool(touched) and all(
            stop - start == elements and (memory == WORK or start == 0) for memory, start, stop in touched
        )
        self.takes_any_layout: bool = self._whole and not self.has_long and self._reads_input_first()
        different = list(dict.fromkeys(touched))
        self.scratch: list[Range] = [region for region in different if region[0] == WORK]
        self.parts: list[Range] = [] if self._whole else [region for region in different if region[0] != WORK]
        self.steps: list[Step] = [step for index in self._order for step in self._made(index)]

    def lay_out(self, memory: Array) -> list[Array]:
        """Return the parts of the scratch memory, which is an array of bytes."""
        itemsize = self._plan.itemsize
        return [self._view(stop - start, memory.data, start * itemsize) for _, start, stop in self.scratch]

    def _view(self, count: int, buffer: memoryview, offset: int = 0) -> Array:
        shape = self._shape if self._whole and self._shape is not None else (count,)
        return np.ndarray(shape, self._dtype, buffer, offset)

    def _position(self, region: Range) -> int:
        """Return where a region is among the views of a run."""
        if region[0] == WORK:
            return 2 + self.scratch.index(region)
        return region[0] if self._whole else 2 + len(self.scratch) + self.parts.index(region)

    def _reads_input_first(self) -> bool:
        written = False
        for index in self._order:
            task = self._plan.tasks[index]
            if written and any(memory == 0 for memory, _, _ in _reads(self._plan, task)):
                return False
            written = written or any(memory == 1 for memory, _, _ in _writes(self._plan, task))
        return True

    def _made(self, index: int) -> list[Step]:
        """Return the steps that one of the plan becomes."""
        plan, at = self._plan, self._position
        task = plan.tasks[index]
        if index in self._lent.values():
            return []
        with_it = [index, self._lent[index]] if index in self._lent else [index]
        steps = [_local(WAIT, peer, count) for peer, count in self._sends_before(with_it)]
        if task.lane >= 0:
            return [*steps, self._message(index, task)]
        if task.target[1] == task.target[2]:
            return steps  # what comes after it relies on these
        if task.is_copy:
            return [*steps, _local(COPY, -1, at(task.left), at(task.target))]
        return [*steps, _local(REDUCE, -1, at(task.left), at(task.right), at(task.target))]

    def _sends_before(self, indices: list[int]) -> list[tuple[int, int]]:
        """Return how many long messages to which peers must have been sent before some steps, which are no sends themselves."""
        counts: dict[int, int] = {}
        lanes = self._plan.lanes
        if all(self._plan.tasks[index].lane >= 0 and lanes[self._plan.tasks[index].lane].is_send for index in indices):
            return []
        for peer, followers in self._long_sends:
            for number, after in enumerate(followers, start=1):
                if not after.isdisjoint(indices):
                    counts[peer] = number
        return list(counts.items())

    def _followers_of_long_sends(self) -> list[tuple[int, list[set[int]]]]:
        """Return for each peer what comes after the long messages to it, one after the other."""
        lanes = [lane for lane, is_long in zip(self._plan.lanes, self._long, strict=True) if is_long and lane.is_send]
        return [(lane.peer, [self._followers(step) for step in lane.steps if not self._is_empty(step)]) for lane in lanes]

    def _followers(self, send: int) -> set[int]:
        """Return the steps that come after a send, directly or through other sends, which do not wait for it."""
        found: set[int] = set()
        left = [send]
        while left:
            task = self._plan.tasks[left.pop()]
            if task.lane >= 0 and self._plan.lanes[task.lane].is_send:
                left += set(task.dependents) - found
                found.update(task.dependents)
        return found

    def _is_empty(self, index: int) -> bool:
        """Tell whether a message has no payload, so that it is a short one in any lane."""
        return all(piece.region[1] == piece.region[2] for piece in _pieces(self._plan, self._plan.tasks[index]))

    def _message(self, index: int, task: Task) -> Step:
        plan, at = self._plan, self._position
        lane, piece = plan.lanes[task.lane], plan.pieces[task.pieces.start]
        box = self._boxes[lane.peer]
        header = bytearray(piece.head + bytes(8) + piece.tail)
        number = memoryview(header)[len(piece.head) : len(piece.head) + 8].cast("Q")
        region = piece.region
        count = region[2] - region[1]
        is_long = self._long[task.lane]
        slots: tuple[Array, ...] = ()
        if count and not is_long:
            slots = tuple(self._view(count, slot) for slot in (box.outgoing if lane.is_send else box.incoming))
        message = (lane.peer, box, header, number, count * plan.itemsize, slots)
        kinds = (LONG_SEND, LONG_RECV, LONG_RIGHT, LONG_LEFT) if is_long and count else (SEND, RECV, RECV_RIGHT, RECV_LEFT)
        if lane.is_send:
            return (kinds[0], *message, at(region) if count else 0, 0, 0)
        if not count:
            return (kinds[1], *message, 0, 0, 0)
        if task.reduces_incoming:
            return (kinds[3 if task.incoming_first else 2], *message, at(task.left), at(task.target), 0)
        if index in self._lent:
            reduction = plan.tasks[self._lent[index]]
            if reduction.left == region:
                return (kinds[3], *message, at(reduction.right), at(reduction.target), 0)
            return (kinds[2], *message, at(reduction.left), at(reduction.target), 0)
        return (kinds[1], *message, at(region), 0, 0)


def _local(kind: int, peer: int, first: int, second: int = 0, third: int = 0) -> Step:
    return (kind, peer, _NO_BOX, _NO_HEADER, _NO_NUMBER, 0, (), first, second, third)


def _is_long(plan: Plan, capacity: int) -> list[bool]:
    """Tell for each lane whether any of its messages is long."""
    longest = [0] * len(plan.lanes)
    for task in plan.tasks:
        for piece in _pieces(plan, task):
            longest[task.lane] = max(longest[task.lane], (piece.region[2] - piece.region[1]) * plan.itemsize)
    return [nbytes > capacity for nbytes in longest]


def _lent(plan: Plan, order: list[int]) -> dict[int, int]:
    """Return the receives whose payload the next step reduces and nobody else reads, and that step: it is reduced where it came."""
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
