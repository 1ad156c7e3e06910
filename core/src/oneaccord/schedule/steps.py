"""Schedules: the steps of one collective for one rank, as plain frozen data.

A schedule knows no arrays and no sockets. It names memory by *references*: a buffer (the caller's input, the
caller's output, scratch) and a range of chunks in it. The bytes of a chunk are fixed when a schedule is bound to
arrays, so that one schedule serves every size.

The rules that give a schedule its meaning:

1. A step may start when every step that its ``after`` names has finished. Nothing else orders two steps.
2. Except messages: between two ranks the k-th send in the sender's list meets the k-th receive in the receiver's list,
   and a send (receive) to (from) a peer starts only when the one before it has finished.
3. ``INPUT`` is never written. It may be the same memory as ``OUTPUT`` (an in-place call); a schedule must be right both
   when it is and when it is not. Scratch starts undefined.
4. A send may finish only when its receive has started (rendezvous). A schedule that needs a message to be buffered is
wrong, even if a transport would buffer it.

Precedents: the rounds of libNBC (Hoefler, Lumsdaine and Rehm, 2007) and the chunk programs of MSCCL (Cowan et al.,
2023).
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from typing import NamedTuple

import msgspec

from oneaccord.common.data import as_dataclass

__all__ = [
    "Buffer",
    "Collective",
    "Copy",
    "Layout",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Ref",
    "Schedule",
    "Send",
    "Step",
    "lay_out",
    "reads_of",
    "run_order",
    "sends_before",
    "target_of",
]


class Collective(enum.Enum):
    """The collectives that have schedules, by the names that users call."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SCAN = "scan"
    EXSCAN = "exscan"
    BARRIER = "barrier"


class Buffer(enum.Enum):
    """The memory that a step can name."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@as_dataclass
class Ref(msgspec.Struct, frozen=True):
    """Some neighbouring chunks of a buffer.

    Attributes
    ----------
    buffer
        The buffer.
    chunk
        The first chunk.
    count
        How many.
    """

    buffer: Buffer
    chunk: int
    count: int = 1


@as_dataclass
class Send(msgspec.Struct, frozen=True):
    """Send chunks to another rank.

    Attributes
    ----------
    peer
        The other rank.
    source
        The chunks; None sends an empty message.
    after
        The indices of the earlier steps that this one waits for.
    """

    peer: int
    source: Ref | None
    after: tuple[int, ...] = ()


@as_dataclass
class Recv(msgspec.Struct, frozen=True):
    """Receive chunks from another rank.

    Attributes
    ----------
    peer
        The other rank.
    target
        The chunks to write; None receives an empty message.
    after
        As for `Send`.
    """

    peer: int
    target: Ref | None
    after: tuple[int, ...] = ()


@as_dataclass
class RecvReduce(msgspec.Struct, frozen=True):
    """Receive chunks from another rank and reduce them: ``target = operand op incoming``.

    Attributes
    ----------
    peer
        The other rank.
    target
        The chunks for the result; may be ``operand``.
    operand
        This rank's operand.
    incoming_first
        Whether the operands are exchanged: ``target = incoming op operand``.
    after
        As for `Send`.
    """

    peer: int
    target: Ref
    operand: Ref
    incoming_first: bool = False
    after: tuple[int, ...] = ()


@as_dataclass
class Reduce(msgspec.Struct, frozen=True):
    """Reduce without a message: ``target = left op right``.

    Attributes
    ----------
    target
        The chunks for the result; may be either of the operands.
    left, right
        The operands.
    after
        As for `Send`.
    """

    target: Ref
    left: Ref
    right: Ref
    after: tuple[int, ...] = ()


@as_dataclass
class Copy(msgspec.Struct, frozen=True):
    """Copy chunks; nothing to do if both are the same memory.

    Attributes
    ----------
    target, source
        The chunks to write, and the chunks to read.
    after
        As for `Send`.
    """

    target: Ref
    source: Ref
    after: tuple[int, ...] = ()


Step = Send | Recv | RecvReduce | Reduce | Copy


@as_dataclass
class Schedule(msgspec.Struct, frozen=True):
    """The steps of one collective for one rank.

    Attributes
    ----------
    collective, algorithm
        The collective, and the name of the algorithm.
    rank, size, root
        The rank of the schedule, its world and its root. ``root`` is 0 for collectives that have none.
    input_chunks, output_chunks
        The numbers of chunks of the caller's two buffers. All ranks know the division of a buffer, even those that do
        not hold it (the output of a gather exists on the root alone, but every rank knows its chunks).
    scratch
        The scratch chunks. Each reference names ``count`` chunks of ``INPUT`` or ``OUTPUT``, and adds ``count`` scratch chunks
        of the same sizes. Chunks with neighbouring numbers are neighbours in memory.
    steps
        The steps; ``after`` refers to them by index, and only to earlier ones.
    even
        Whether the schedule is right only if the blocks of all ranks have one size. Then the memory of any block may hold any
        other block on its way, and ranks can pass on blocks of other ranks. Only all_to_all needs that: in the other
        collectives every rank knows the size of every block.
    """

    collective: Collective
    algorithm: str
    rank: int
    size: int
    root: int
    input_chunks: int
    output_chunks: int
    scratch: tuple[Ref, ...]
    steps: tuple[Step, ...]
    even: bool = False

    @property
    def scratch_chunks(self) -> tuple[Ref, ...]:
        """The chunk of ``INPUT`` or ``OUTPUT`` that each scratch chunk is as large as."""
        return tuple(Ref(run.buffer, chunk) for run in self.scratch for chunk in range(run.chunk, run.chunk + run.count))


def reads_of(step: Step) -> tuple[Ref, ...]:
    """Return the references that a step reads."""
    match step:
        case Send():
            return () if step.source is None else (step.source,)
        case Recv():
            return ()
        case RecvReduce():
            return (step.operand,)
        case Reduce():
            return (step.left, step.right)
        case Copy():
            return (step.source,)


def target_of(step: Step) -> Ref | None:
    """Return the reference that a step writes."""
    return None if isinstance(step, Send) else step.target


# The order in which a rank carries out its steps, and the sends that must have ended before each.
#
# By the rules above, a step starts when those that it names have finished. The engine does not track that. It has one
# order, made beforehand: that of the list, but each send starts as soon as the steps before it have run. The engine never waits for a
# send at its start: the send continues, after earlier sends to the same peer. So a step that is not a send waits until the sends on which it
# depends have ended, directly or through other sends. Sends of empty messages are not waited for: they use no memory.
#
# `oneaccord.schedule.proof.in_order` proves for every algorithm that no rank waits forever in this way.


class Layout(NamedTuple):
    """All that the order of a schedule's steps follows from, and that it leads to.

    Attributes
    ----------
    order
        The result of `run_order`.
    sends
        The result of `sends_before`.
    reads, targets
        The memory that each step reads, and writes; None for nothing.
    """

    order: list[int]
    sends: list[dict[int, int]]
    reads: list[tuple[Ref, ...]]
    targets: list[Ref | None]


def lay_out(schedule: Schedule) -> Layout:
    """Return the order of a schedule's steps, with the sends that each waits for, and the memory that it reads and writes."""
    steps = schedule.steps
    order, sends = run_order(schedule), sends_before(schedule)
    return Layout(order, sends, list(map(reads_of, steps)), list(map(target_of, steps)))


def run_order(schedule: Schedule) -> list[int]:
    """Return the order in which the steps of a rank run: as they are listed, but sends as early as possible.

    Parameters
    ----------
    schedule
        One whose steps come after earlier ones alone.

    Returns
    -------
    list of int
        The indices of its steps.
    """
    waits_for = [len(step.after) for step in schedule.steps]
    dependents: list[list[int]] = [[] for _ in schedule.steps]
    unsent: dict[int, deque[int]] = defaultdict(deque)
    for index, step in enumerate(schedule.steps):
        for earlier in step.after:
            dependents[earlier].append(index)
        if isinstance(step, Send):
            unsent[step.peer].append(index)
    order: list[int] = []

    def run(index: int) -> None:
        order.append(index)
        for dependent in dependents[index]:
            waits_for[dependent] -= 1

    for index, step in enumerate(schedule.steps):
        for sends in unsent.values():
            while sends and not waits_for[sends[0]]:
                run(sends.popleft())
        if not isinstance(step, Send):
            run(index)
    return order


def sends_before(schedule: Schedule) -> list[dict[int, int]]:
    """Return which sends must have ended before each step.

    Parameters
    ----------
    schedule
        As for `run_order`.

    Returns
    -------
    list of dict
        For each step, by peer, the last such send, as its number among all those to the peer; with it end those before it. Nothing
        for sends.
    """
    found: list[dict[int, int]] = []
    ends: dict[int, dict[int, int]] = {}  # for each send what has been sent when it has ended
    numbers: dict[int, int] = defaultdict(int)
    for index, step in enumerate(schedule.steps):
        sent: dict[int, int] = {}
        for earlier in step.after:
            for peer, number in ends.get(earlier, {}).items():
                sent[peer] = max(number, sent.get(peer, 0))
        if isinstance(step, Send):
            ends[index] = sent if step.source is None else sent | {step.peer: numbers[step.peer]}
            numbers[step.peer] += 1
        found.append({} if isinstance(step, Send) else sent)
    return found
