"""From a schedule to a plan: chunks become ranges of elements, and messages are cut into pieces."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from manyhands.arrays.dtypes import Reduction
from manyhands.control.signatures import CallSignature, pack_header, split_header
from manyhands.errors import InternalError
from manyhands.schedule.contracts import PROMISES, Contract
from manyhands.schedule.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send

if TYPE_CHECKING:
    from manyhands.calls.engine.running import Run

__all__ = ["KEPT_RUNS", "WORK", "Lane", "Piece", "Place", "Plan", "Range", "Task", "compile_plan"]

KEPT_RUNS: int = 32
"""On how many places in memory a plan keeps its views."""
_KEPT_PIECES = 1 << 12
"""The most pieces of messages that these have together, where they are more than one."""

_PIECE_BYTES = 1 << 20
_REDUCE_PIECE_BYTES = 1 << 18
"""Both ends cut a message alike, so the size of a piece is a constant of the collective."""

WORK = 2
_BUFFERS = {Buffer.INPUT: 0, Buffer.OUTPUT: 1, Buffer.SCRATCH: WORK}
_ALIGNMENT = 64

Range = tuple[int, int, int]
"""Which memory (input, output, work), first element, one past the last."""

_NOTHING: Range = (0, 0, 0)

Place = tuple[int, int, int, int, int]
"""Where a run finds its memory: address and bytes of the input, of the output, and the address of the work memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message on the wire; the sequence number goes between the two halves of its header."""

    region: Range
    head: bytes
    tail: bytes
    offset: int
    """Elements of the step's region before this piece."""


@dataclass(frozen=True, slots=True)
class Task:
    """A compiled step."""

    lane: int
    """The (peer, direction) of a message; -1 for a local step."""
    pieces: range
    """Which pieces of the plan are those of a message."""
    target: Range
    left: Range
    right: Range
    is_copy: bool
    reduces_incoming: bool
    incoming_first: bool
    staging: int
    """Where in the work memory, in bytes, an incoming piece waits to be reduced."""
    dependents: tuple[int, ...]


class Lane(NamedTuple):
    """The messages in one direction between this rank and a peer, of which one moves at a time."""

    peer: int
    """A rank of the world."""
    is_send: bool
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule compiled for arrays of one size and dtype.

    Attributes
    ----------
    tasks
        The compiled steps.
    waits_for
        For each of them the number of steps that it comes after.
    first
        Those that wait for no other.
    pieces
        The messages on the wire, those of one step after those of the other.
    lanes
        For each (peer, direction) its steps in order.
    peers
        Whom the plan talks to, as ranks of the world.
    work_bytes
        Memory that a run needs beside the input and the output: scratch chunks, and room for pieces that are received to be
        reduced.
    streams
        Whether messages are not cut, and those to be reduced are handed over in parts.
    itemsize, reduction
        Bytes per element, and how two are combined.
    kept
        On how many places in memory it keeps its views; 0 where a function of the user's sees them, who may keep them as well.
    """

    tasks: tuple[Task, ...]
    waits_for: tuple[int, ...]
    pieces: tuple[Piece, ...]
    first: tuple[int, ...]
    lanes: tuple[Lane, ...]
    peers: frozenset[int]
    work_bytes: int
    streams: bool
    itemsize: int
    reduction: Reduction | None
    kept: int
    _runs: dict[Place, Run] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether no message was cut."""
        return len(self.pieces) == sum(len(lane.steps) for lane in self.lanes)

    def take_run(self, place: Place) -> Run | None:
        """Return a run for whoever calls alone: that of this place; else, where all are there, the one unused for longest."""
        runs = self._runs
        run = runs.pop(place, None)
        if run is None and 0 < self.kept <= len(runs):
            run = runs.pop(next(iter(runs)), None)
        return run

    def keep_run(self, place: Place, run: Run) -> None:
        """Keep a run that ended well for the next time, as far as there is room."""
        if len(self._runs) < self.kept:
            self._runs[place] = run


def compile_plan(
    schedule: Schedule,
    signature: CallSignature,
    channel: int,
    input_offsets: Sequence[int],
    output_offsets: Sequence[int],
    itemsize: int,
    reduction: Reduction | None,
    ranks: Sequence[int] | None = None,
    *,
    streams: bool = False,
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
    ranks
        For each rank of the group, as the schedule counts, its rank in the world, as the transport counts; by default the same.
    streams
        Whether the transport sends messages of any length whole, and hands over the parts of those that are reduced
        (`Transport.streams`); else they are cut into pieces.

    Raises
    ------
    InternalError
        The offsets or ranks are not those of such a schedule.
    """
    compiler = _Compiler(
        schedule, signature, channel, input_offsets, output_offsets, itemsize, reduction, ranks, streams=streams
    )
    return compiler.compile()


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
        ranks: Sequence[int] | None,
        *,
        streams: bool,
    ) -> None:
        if len(input_offsets) != schedule.input_chunks + 1 or len(output_offsets) != schedule.output_chunks + 1:
            raise InternalError(f"{schedule.algorithm} wants other numbers of chunks than the call provides")
        if ranks is not None and (len(ranks) != schedule.size or len(set(ranks)) != schedule.size):
            raise InternalError(f"{schedule.algorithm} is for {schedule.size} ranks, and the group's are {list(ranks)}")
        if schedule.even:
            _check_even(schedule, input_offsets, output_offsets)
        self._schedule = schedule
        self._signature = signature
        self._channel = channel
        self._itemsize = itemsize
        self._reduction = reduction
        self._ranks = range(schedule.size) if ranks is None else ranks
        self._offsets: list[Sequence[int]] = [input_offsets, output_offsets, [0]]
        scratch = [0]
        for ref in schedule.scratch_chunks:
            _, start, stop = self._range(ref)
            scratch.append(scratch[-1] + stop - start)
        self._offsets[2] = scratch
        piece_bytes = _REDUCE_PIECE_BYTES if PROMISES[schedule.collective].reduces else _PIECE_BYTES
        self._piece_count = sys.maxsize if streams else max(1, piece_bytes // max(1, itemsize))
        self._streams = streams
        self._lanes: dict[tuple[int, bool], list[int]] = {}
        self._lane_of = [-1] * len(schedule.steps)
        numbers: dict[tuple[int, bool], int] = {}
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Send | Recv | RecvReduce):
                key = (step.peer, isinstance(step, Send))
                self._lanes.setdefault(key, []).append(index)
                self._lane_of[index] = numbers.setdefault(key, len(numbers))
        self._messages = [0] * len(self._lanes)
        self._made: list[Piece] = []

    def compile(self) -> Plan:
        steps = self._schedule.steps
        dependents: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for earlier in step.after:
                dependents[earlier].append(index)
        slots, staging_start, staging_bytes = self._staging()
        tasks = []
        for index, step in enumerate(steps):
            target, left, right = _NOTHING, _NOTHING, _NOTHING
            incoming_first = False
            pieces = range(0)
            match step:
                case Send(peer, ref) | Recv(peer, ref):
                    pieces = self._pieces(index, peer, self._range(ref) if ref else _NOTHING)
                case RecvReduce(peer, target_ref, operand, incoming_first):
                    target, left = self._range(target_ref), self._range(operand)
                    pieces = self._pieces(index, peer, target)
                case Reduce(target_ref, left_ref, right_ref):
                    target, left, right = self._range(target_ref), self._range(left_ref), self._range(right_ref)
                case Copy(target_ref, source):
                    target, left = self._range(target_ref), self._range(source)
            tasks.append(
                Task(
                    lane=self._lane_of[index],
                    pieces=pieces,
                    target=target,
                    left=left,
                    right=right,
                    is_copy=isinstance(step, Copy),
                    reduces_incoming=isinstance(step, RecvReduce),
                    incoming_first=incoming_first,
                    staging=staging_start + slots.get(index, 0) * staging_bytes,
                    dependents=tuple(dependents[index]),
                )
            )
        is_users = self._reduction is not None and self._reduction.is_users
        lanes = tuple(Lane(self._ranks[peer], is_send, tuple(mine)) for (peer, is_send), mine in self._lanes.items())
        return Plan(
            tasks=tuple(tasks),
            waits_for=tuple(len(step.after) for step in steps),
            pieces=tuple(self._made),
            first=tuple(index for index, step in enumerate(steps) if not step.after),
            lanes=lanes,
            peers=frozenset(lane.peer for lane in lanes),
            streams=self._streams,
            work_bytes=staging_start + len(set(slots.values())) * staging_bytes if staging_bytes else self._scratch_bytes(),
            itemsize=self._itemsize,
            reduction=self._reduction,
            kept=0 if is_users else min(KEPT_RUNS, max(1, _KEPT_PIECES // max(1, len(self._made)))),
        )

    def _scratch_bytes(self) -> int:
        return self._offsets[2][-1] * self._itemsize

    def _staging(self) -> tuple[dict[int, int], int, int]:
        """Return the slot in which each receive that reduces puts its pieces, where the slots begin, and the bytes of each.

        A slot serves one receive after the other, where the later one cannot start before the earlier one has finished.
        """
        longest = 0
        slots: dict[int, int] = {}
        if self._streams:
            return slots, _aligned(self._scratch_bytes()), 0
        users: list[int] = []  # the last receive of each slot
        steps = self._schedule.steps
        several = len({lane for lane, step in zip(self._lane_of, steps, strict=True) if isinstance(step, RecvReduce)}) > 1
        before: list[int] = []  # for each step those that it comes after, as bit masks
        previous: dict[int, int] = {}
        for index, step in enumerate(steps):
            earlier = 0
            if several:
                lane = self._lane_of[index]
                for other in step.after if lane not in previous else (*step.after, previous[lane]):
                    earlier |= before[other] | 1 << other
                before.append(earlier)
                if lane >= 0:
                    previous[lane] = index
            if not isinstance(step, RecvReduce):
                continue
            _, start, stop = self._range(step.target)
            longest = max(longest, min(stop - start, self._piece_count))
            slot = 0
            while several and slot < len(users) and not earlier >> users[slot] & 1:
                slot += 1
            users[slot : slot + 1] = [index]
            slots[index] = slot
        return slots, _aligned(self._scratch_bytes()), _aligned(longest * self._itemsize)

    def _range(self, ref: Ref) -> Range:
        buffer = _BUFFERS[ref.buffer]
        return buffer, self._offsets[buffer][ref.chunk], self._offsets[buffer][ref.chunk + ref.count]

    def _pieces(self, index: int, peer: int, region: Range) -> range:
        """Cut a message into pieces, at least one."""
        buffer, start, stop = region
        lane = self._lane_of[index]
        sender = self._ranks[self._schedule.rank if isinstance(self._schedule.steps[index], Send) else peer]
        before = len(self._made)
        for first in range(start, max(stop, start + 1), self._piece_count):
            last = min(first + self._piece_count, stop)
            nbytes = (last - first) * self._itemsize
            header = pack_header(self._signature, sender, self._channel, 0, nbytes, self._messages[lane])
            self._messages[lane] += 1
            self._made.append(Piece((buffer, first, last), *split_header(header), first - start))
        return range(before, len(self._made))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _check_even(schedule: Schedule, *offsets: Sequence[int]) -> None:
    """Check that the blocks of all ranks are of one size, as the schedule needs it."""
    segments = Contract.of(schedule).segments
    sizes = [stop - start for bounds in offsets for start, stop in pairwise(bounds)]
    # Both buffers have a whole number of blocks, so that the second's chunks go on where the first one's end.
    if any(size != sizes[chunk % segments] for chunk, size in enumerate(sizes)):
        raise InternalError(f"{schedule.algorithm} is for blocks of one size, and the call's chunks have {sizes} elements")
