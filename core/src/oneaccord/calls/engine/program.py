"""Programs: the steps of one rank in a call, as a flat list.

`compile_program` makes one from a schedule, in one pass: chunks become ranges of elements, steps stand in the order in which they run, and each
message is a short one, which goes through a mailbox, or a long one, which goes from and to the arrays themselves. A program knows no
transport and no memory. So it is all that an interpreter needs to read: `oneaccord.calls.engine.execute` is one.

An `Instruction` is a tuple of these fields:

| field | meaning |
|---|---|
| ``kind`` | one of the kinds below |
| ``peer`` | the rank in the world at the other end of a message; -1 for none |
| ``head``, ``tail`` | the header of a message, but for the 8 bytes between them: the number of the call, little-endian |
| ``nbytes`` | the size of a message's payload; 0 for none |
| ``first``, ``second``, ``third`` | operands, by their position: 0 is the call's input, 1 its output, n + 2 is ``regions[n]`` |

| kind | effect | ``first`` | ``second`` | ``third`` |
|---|---|---|---|---|
| ``SEND`` | posts a short message | the data to send | | |
| ``RECV`` | fetches one, and copies it | the target | | |
| ``RECV_RIGHT`` | fetches one: target = operand op incoming | operand | target | |
| ``RECV_LEFT`` | fetches one: target = incoming op operand | operand | target | |
| ``REDUCE`` | target = left op right | left | right | target |
| ``COPY`` | target = source | source | target | |
| ``WAIT`` | waits until so many long messages to ``peer`` have been sent since the program began | the number | | |
| ``LONG_SEND`` | starts to send a long message, after earlier messages to ``peer`` | the data to send | | |
| ``LONG_RECV`` | receives one at its place | the target | | |
| ``LONG_RIGHT`` | receives one part by part: target = operand op incoming | operand | target | |
| ``LONG_LEFT`` | the same: target = incoming op operand | operand | target | |

A program never waits for a send at its start. The data of a send do not change until it has ended, because ``WAIT`` stands before any step that
would write there; a short message that cannot go at once is copied. A program ends when all its sends have ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from oneaccord.arrays.dtypes import Reduction
from oneaccord.contract.header import CallSignature, split_headers
from oneaccord.errors import InternalError
from oneaccord.schedule import steps as listed
from oneaccord.schedule.contracts import PROMISES, Contract
from oneaccord.schedule.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, lay_out

__all__ = [
    "COPY",
    "INPUT",
    "LONG_LEFT",
    "LONG_RECV",
    "LONG_RIGHT",
    "LONG_SEND",
    "OUTPUT",
    "RECV",
    "RECV_LEFT",
    "RECV_RIGHT",
    "REDUCE",
    "SEND",
    "WAIT",
    "WORK",
    "CompiledSchedule",
    "Instruction",
    "Region",
    "compile_program",
    "peers_of",
]

SEND, RECV, RECV_RIGHT, RECV_LEFT, REDUCE, COPY, WAIT, LONG_SEND, LONG_RECV, LONG_RIGHT, LONG_LEFT = range(11)
"""The kinds of steps."""

INPUT, OUTPUT, WORK = range(3)
"""The memory of regions: the caller's input, the caller's output, and scratch memory of the program."""

_MEMORY = {Buffer.INPUT: INPUT, Buffer.OUTPUT: OUTPUT, Buffer.SCRATCH: WORK}
_PIECE_BYTES = 1 << 20
_REDUCE_PIECE_BYTES = 1 << 18

Region = tuple[int, int, int]
"""Which memory, the first element, and one past the last."""
_Message = Send | Recv | RecvReduce
_Way = tuple[int, bool]
"""A peer as the schedule counts, and whether this rank sends to it or receives from it."""


class Instruction(NamedTuple):
    """The kind of the step, as the table above explains."""

    kind: int
    peer: int
    head: bytes = b""
    tail: bytes = b""
    nbytes: int = 0
    first: int = 0
    second: int = 0
    third: int = 0


class CompiledSchedule(msgspec.Struct, frozen=True):
    """The steps of one rank in a call.

    Attributes
    ----------
    steps
        The steps, in the order in which they run.
    regions
        The parts of memory that they work on, those of scratch memory first; never any of input and output if ``shape`` is given.
    shape
        The shape, if every operand is a whole array. None if operands are vectors, which are ranges of the flattened arrays.
    dtype, reduction
        Those of all operands, and how two are combined.
    work_bytes
        The size of the scratch memory.
    piece_bytes
        The size of the pieces into which long messages are cut; 0 if they are sent whole. Both ends cut alike, so it depends only on the
        call. It is a whole number of elements, and no short message is longer.
    takes_any_layout
        Whether input and output may be any arrays of the shape, also such that share memory: every operand is a whole array, and the
        input is not read after the output was written.
    """

    steps: tuple[Instruction, ...]
    regions: tuple[Region, ...]
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    reduction: Reduction | None
    work_bytes: int
    piece_bytes: int
    takes_any_layout: bool


def peers_of(schedule: Schedule, ranks: Sequence[int] | None = None) -> frozenset[int]:
    """Return the peers of a schedule's rank; ``ranks`` as for `compile_program`."""
    peers = {step.peer for step in schedule.steps if isinstance(step, Send | Recv | RecvReduce)}
    return frozenset(peers if ranks is None else (ranks[peer] for peer in peers))


def compile_program(
    schedule: Schedule,
    signature: CallSignature,
    channel: int,
    input_offsets: Sequence[int],
    output_offsets: Sequence[int],
    dtype: np.dtype[Any],
    reduction: Reduction | None,
    ranks: Sequence[int] | None,
    shape: tuple[int, ...] | None,
    streams: bool,
    slot_bytes: int,
    posted_bytes: int | None = None,
) -> CompiledSchedule:
    """Bind a schedule to sizes.

    Parameters
    ----------
    schedule
        A schedule of an algorithm that can run in its listed order (`oneaccord.schedule.proof.in_order`).
    signature, channel
        The contents of the headers of its messages.
    input_offsets, output_offsets
        The offsets of the chunks of the two buffers, in elements, and the end of the last chunk.
    dtype
        That of the arrays.
    reduction
        For collectives that reduce.
    ranks
        For each rank of the group, as the schedule counts, its rank in the world, as the transport counts; None if they are the same.
    shape
        The shape of input and output, if both have the same; None otherwise.
    streams
        Whether the transport streams. Then no message is cut, unless its elements do not fit: the parts of a streamed message are multiples of
        64 bytes, which need not be whole elements of a structured dtype.
    slot_bytes
        The longest message that goes through a mailbox.
    posted_bytes
        The same for collectives that do not reduce; None if it is no other.

    Raises
    ------
    InternalError
        The offsets or ranks are not those of such a schedule, or its steps cannot run in order.
    """
    if len(input_offsets) != schedule.input_chunks + 1 or len(output_offsets) != schedule.output_chunks + 1:
        raise InternalError(f"{schedule.algorithm} needs other numbers of chunks than the call provides")
    if ranks is not None and (len(ranks) != schedule.size or len(set(ranks)) != schedule.size):
        raise InternalError(
            f"the schedule of {schedule.algorithm} is for {schedule.size} ranks, and the group's are {list(ranks)}"
        )
    if any(earlier >= index for index, step in enumerate(schedule.steps) for earlier in step.after):
        raise InternalError(f"{schedule.algorithm} cannot run: a step of rank {schedule.rank} waits for a later step")
    if schedule.even:
        _check_even(schedule, input_offsets, output_offsets)
    itemsize, piece_bytes = max(1, dtype.itemsize), 0
    if posted_bytes is not None and not PROMISES[schedule.collective].reduces:
        slot_bytes = min(slot_bytes, posted_bytes)
    if not streams or 64 % itemsize:
        most = _REDUCE_PIECE_BYTES if PROMISES[schedule.collective].reduces else _PIECE_BYTES
        piece_bytes = max(1, most // itemsize) * itemsize
        # The other end must not notice which end cuts, and which has the longer slots.
        slot_bytes = min(slot_bytes, piece_bytes)
    compiler = _Compiler(schedule, input_offsets, output_offsets, dtype, ranks, shape)
    return compiler.compile(signature, channel, reduction, slot_bytes, piece_bytes)


class _Compiler:
    def __init__(
        self,
        schedule: Schedule,
        input_offsets: Sequence[int],
        output_offsets: Sequence[int],
        dtype: np.dtype[Any],
        ranks: Sequence[int] | None,
        shape: tuple[int, ...] | None,
    ) -> None:
        self._schedule = schedule
        self._steps = schedule.steps
        self._order, self._sends, reads, targets = lay_out(schedule)
        self._dtype = dtype
        self._ranks = range(schedule.size) if ranks is None else ranks
        self._offsets: list[Sequence[int]] = [input_offsets, output_offsets]
        chunks = (Ref(run.buffer, chunk) for run in schedule.scratch for chunk in range(run.chunk, run.chunk + run.count))
        scratch = (stop - start for _, start, stop in map(self._region, chunks))
        self._offsets.append(list(accumulate(scratch, initial=0)))
        self._reads = [[self._region(ref) for ref in refs if self._count(ref)] for refs in reads]
        self._writes = [[] if ref is None or not self._count(ref) else [self._region(ref)] for ref in targets]
        touched = dict.fromkeys(chain.from_iterable(chain.from_iterable(zip(self._reads, self._writes, strict=True))))
        elements = -1 if shape is None else math.prod(shape)
        is_whole = bool(touched) and all(
            stop - start == elements and (memory == WORK or start == 0) for memory, start, stop in touched
        )
        self._shape = shape if is_whole else None
        self._regions = [region for region in touched if region[0] == WORK]
        if not is_whole:
            self._regions += [region for region in touched if region[0] != WORK]
        self._position = {region: 2 + number for number, region in enumerate(self._regions)}

    def compile(
        self, signature: CallSignature, channel: int, reduction: Reduction | None, slot_bytes: int, piece_bytes: int
    ) -> CompiledSchedule:
        itemsize = self._dtype.itemsize
        long = self._long_ways(slot_bytes)
        waits = self._waits(long)
        merged = self._merged(long, waits)
        elsewhere = set(merged.values())
        # All headers at once: one for each message, in the order in which they run.
        numbers: dict[_Way, int] = defaultdict(int)
        messages: list[tuple[int, int, int]] = []
        for index in self._order:
            step = self._steps[index]
            if index not in elsewhere and isinstance(step, Send | Recv | RecvReduce):
                way = _way(step)
                sender = self._ranks[self._schedule.rank if isinstance(step, Send) else step.peer]
                messages.append((sender, self._count(_payload(step)) * itemsize, numbers[way]))
                numbers[way] += 1
        headers = zip(split_headers(signature, channel, messages), messages, strict=True)
        made: list[Instruction] = []
        for index in self._order:
            if index in elsewhere:
                continue
            step, following = self._steps[index], merged.get(index)
            for each in (index,) if following is None else (index, following):
                made += [Instruction(WAIT, self._ranks[peer], first=count) for peer, count in waits[each].items()]
            if not isinstance(step, Send | Recv | RecvReduce):
                made += self._local(index)
                continue
            header, (_, nbytes, _) = next(headers)
            kind, *operands = self._message(step, None if following is None else self._steps[following])
            if nbytes and _way(step) in long:
                kind += LONG_SEND - SEND
            made.append(Instruction(kind, self._ranks[step.peer], *header, nbytes, *operands))
        return CompiledSchedule(
            steps=tuple(made),
            regions=tuple(self._regions),
            shape=self._shape,
            dtype=self._dtype,
            reduction=reduction,
            work_bytes=self._offsets[WORK][-1] * itemsize,
            piece_bytes=piece_bytes,
            takes_any_layout=self._shape is not None and not long and self._reads_input_first(),
        )

    def _region(self, ref: Ref) -> Region:
        memory = _MEMORY[ref.buffer]
        return memory, self._offsets[memory][ref.chunk], self._offsets[memory][ref.chunk + ref.count]

    def _count(self, ref: Ref | None) -> int:
        _, start, stop = (0, 0, 0) if ref is None else self._region(ref)
        return stop - start

    def _at(self, ref: Ref) -> int:
        """Return the position of an operand."""
        region = self._region(ref)
        return region[0] if self._shape is not None and region[0] != WORK else self._position[region]

    def _local(self, index: int) -> list[Instruction]:
        """Return the instructions for a step without a message; none if it has nothing to do."""
        if self._writes[index]:
            match self._steps[index]:
                case Reduce(target, left, right):
                    return [Instruction(REDUCE, -1, first=self._at(left), second=self._at(right), third=self._at(target))]
                case Copy(target, source):
                    return [Instruction(COPY, -1, first=self._at(source), second=self._at(target))]
        return []

    def _message(self, step: _Message, following: listed.Step | None) -> tuple[int, ...]:
        """Return the kind of a step with a message, as if it were short, and its operands."""
        at = self._at
        if not self._count(_payload(step)):
            return (SEND if isinstance(step, Send) else RECV,)
        match step:
            case Send(_, Ref() as source):
                return SEND, at(source)
            case RecvReduce(_, target, operand, incoming_first):
                return RECV_LEFT if incoming_first else RECV_RIGHT, at(operand), at(target)
            case Recv(_, Ref() as target):
                if not isinstance(following, Reduce):
                    return RECV, at(target)
                if self._region(following.left) == self._region(target):
                    return RECV_LEFT, at(following.right), at(following.target)
                return RECV_RIGHT, at(following.left), at(following.target)
        raise InternalError(f"{step} does not send or receive")

    def _long_ways(self, limit: int) -> set[_Way]:
        """Return the ways of which any message has more bytes than ``limit``. All of a way's go alike, but for empty ones, which are short."""
        messages = [step for step in self._steps if isinstance(step, Send | Recv | RecvReduce)]
        return {_way(step) for step in messages if self._count(_payload(step)) * self._dtype.itemsize > limit}

    def _waits(self, long: set[_Way]) -> list[dict[int, int]]:
        """Return for each step, by peer, how many long messages must have been sent before."""
        sizes: dict[int, list[bool]] = defaultdict(list)
        for step in self._steps:
            if isinstance(step, Send) and _way(step) in long:
                sizes[step.peer].append(self._count(step.source) > 0)
        counts = {peer: list(accumulate(are_long)) for peer, are_long in sizes.items()}
        return [
            {peer: counts[peer][last] for peer, last in sent.items() if peer in counts and counts[peer][last]}
            for sent in self._sends
        ]

    def _merged(self, long: set[_Way], waits: list[dict[int, int]]) -> dict[int, int]:
        """Return the receives whose payload only the next step reads, to reduce it, and that step: the payload is reduced in its slot."""
        merged: dict[int, int] = {}
        for position, (index, following) in enumerate(pairwise(self._order)):
            step, reduction = self._steps[index], self._steps[following]
            if not isinstance(step, Recv) or step.target is None or not isinstance(reduction, Reduce):
                continue
            slot = self._region(step.target)
            if slot[0] != WORK or (self._region(reduction.left) == slot) == (self._region(reduction.right) == slot):
                continue
            # A rank that waits for its own send before it takes an incoming message could wait forever: its peer may do the same.
            if not (_way(step) in long and waits[following]) and not self._is_read(slot, self._order[position + 2 :]):
                merged[index] = following
        return merged

    def _is_read(self, region: Region, order: Sequence[int]) -> bool:
        """Return whether steps read any of a region before one writes all of it."""
        for index in order:
            if any(_overlap(region, each) for each in self._reads[index]):
                return True
            if region in self._writes[index]:
                return False
        return False

    def _reads_input_first(self) -> bool:
        """Return whether no step reads the input when one has written to the output."""
        written = False
        for index in self._order:
            if written and any(memory == INPUT for memory, _, _ in self._reads[index]):
                return False
            written = written or any(memory == OUTPUT for memory, _, _ in self._writes[index])
        return True


def _way(step: _Message) -> _Way:
    return step.peer, isinstance(step, Send)


def _payload(step: _Message) -> Ref | None:
    return step.source if isinstance(step, Send) else step.target


def _overlap(one: Region, other: Region) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _check_even(schedule: Schedule, *offsets: Sequence[int]) -> None:
    """Check that the blocks of all ranks are of one size, as the schedule needs it."""
    segments = Contract.of(schedule).segments
    sizes = [stop - start for bounds in offsets for start, stop in pairwise(bounds)]
    # Both buffers have a whole number of blocks, so that the second's chunks continue at the end of the first one's.
    if any(size != sizes[chunk % segments] for chunk, size in enumerate(sizes)):
        raise InternalError(f"{schedule.algorithm} is for blocks of one size, and the call's chunks have {sizes} elements")
