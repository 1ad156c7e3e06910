"""From schedules to arrays: the facts about all messages and reductions of all ranks that the clock needs, and no more.

Schedules are made one rank at a time, put into arrays and dropped. Copies are free, so that a step that waits for a copy waits for the
steps before the copy.

If the schedule of rank r + T is that of rank r with T added to every peer, for all ranks, the ranks are alike. If a
rotation by T also leaves the network as it is, all of them do the same at the same time, and one period of ranks represents all:
a message to a rank outside of the period is one to the similar rank inside. Nothing is approximated by this. The
same holds in a world of a power of two with ``^`` in place of ``+``, as recursive doubling has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from oneaccord.schedule.errors import UnmatchedMessageError
from oneaccord.schedule.simulation.routes import Wiring
from oneaccord.schedule.steps import Copy, Recv, Reduce, Schedule, Send

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Nodes", "Program", "Symmetry", "compile_program", "find_symmetry", "sample_ranks", "translate"]

SEND, RECV, RECV_REDUCE, REDUCE = range(4)

_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly, and no two of them are alike to a small divisor."""

Build = Callable[[int], Schedule]
"""Makes the schedule of one rank."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The steps of some ranks but copies, all as int64.

    Attributes
    ----------
    kind
        0 for a send, 1 for a receive, 2 for one that reduces, 3 for a reduction.
    step
        The place in the schedule, copies not counted.
    distance
        From the sender to the receiver of a message: ``(receiver - sender) % size``, or ``receiver ^ sender``; 0 for a reduction.
    chunks
        How many chunks are moved, or computed.
    after
        Pairs (earlier node, later node), shape (n, 2): the later one waits for the earlier one.
    """

    kind: Ints
    step: Ints
    distance: Ints
    chunks: Ints
    after: Ints

    def same_as(self, other: Nodes) -> bool:
        """Return whether two ranks do the same."""
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Which ranks stand for all.

    Attributes
    ----------
    period
        The ranks below this are simulated; all others do what the one with the same remainder does. The world size if no rank represents another.
    repeats
        The number of ranks after which schedules repeat; it divides the period. The world size if they do not.
    mirrored
        Whether ranks are alike by ``^`` and not by rotation.
    """

    period: int
    repeats: int
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """All messages and reductions of the ranks of one period.

    *Operations* are messages 0 to M - 1, ordered by the place of the sending step and then by sender, and after them reductions.

    Attributes
    ----------
    period
        How many ranks stand for all; the ranks below are within it.
    sender, receiver, message_chunks
        Of each message: its sender, its receiver, which may be outside of the period, and its chunks.
    reducer, reduction_chunks
        Of each reduction: its rank and its chunks.
    following
        For each message the next one of the same pair of ranks, -1 for the last.
    waits
        For each operation the number of operations that it waits for, counting those of ``following``.
    successors, first_successor
        Those that wait for operation i are ``successors[first_successor[i]:first_successor[i + 1]]``.
    """

    period: int
    sender: Ints
    receiver: Ints
    message_chunks: Ints
    reducer: Ints
    reduction_chunks: Ints
    following: Ints
    waits: Ints
    successors: Ints
    first_successor: Ints

    @property
    def sent_chunks(self) -> int:
        """The chunks that the rank which sends most sends."""
        return int(np.bincount(self.sender, self.message_chunks).max()) if len(self.sender) else 0


def translate(schedule: Schedule, *, mirrored: bool = False) -> Nodes:
    """Return the steps of one rank but copies; ``mirrored`` says how distances are counted."""
    rank, size = schedule.rank, schedule.size
    kinds: list[int] = []
    steps: list[int] = []
    distances: list[int] = []
    chunks: list[int] = []
    earlier: list[int] = []
    later: list[int] = []
    # For each step its node; for a copy, which is free, the nodes that it waits for.
    nodes: list[int | tuple[int, ...]] = []
    for step in schedule.steps:
        node = len(kinds)
        before: list[int] = []
        for other in step.after:
            found = nodes[other]
            if type(found) is int:
                before.append(found)
            else:
                before.extend(found)  # type: ignore[arg-type]
        if len(before) > 1:
            # How often a node is named may differ between ranks that do the same.
            before = sorted(set(before))
        if isinstance(step, Copy):
            nodes.append(tuple(before))
            continue
        if isinstance(step, Send):
            kind, distance, ref = SEND, step.peer ^ rank if mirrored else (step.peer - rank) % size, step.source
        elif isinstance(step, Reduce):
            kind, distance, ref = REDUCE, 0, step.target
        else:
            kind = RECV if isinstance(step, Recv) else RECV_REDUCE
            distance, ref = step.peer ^ rank if mirrored else (rank - step.peer) % size, step.target
        nodes.append(node)
        kinds.append(kind)
        steps.append(node)
        distances.append(distance)
        chunks.append(0 if ref is None else ref.count)
        earlier += before
        later += [node] * len(before)
    return Nodes(
        np.array(kinds, np.int64),
        np.array(steps, np.int64),
        np.array(distances, np.int64),
        np.array(chunks, np.int64),
        np.array([earlier, later], np.int64).T,
    )


def sample_ranks(size: int, count: int) -> list[int]:
    """Return ``count`` ranks that are spread without any rhythm, the first and the last among them; all if there are no more."""
    if count >= size:
        return list(range(size))
    return sorted({int(turn * _GOLDEN % 1 * size) for turn in range(count)} | {size - 1})


def find_symmetry(build: Build, wiring: Wiring, neighbours: int, budget: int) -> Symmetry:
    """Return the ranks that represent all, as far as ``budget`` steps can show.

    Parameters
    ----------
    build, wiring
        The schedule of each rank, and the network.
    neighbours
        After how many ranks schedules may repeat, if not after each.
    budget
        How many steps to compare, more or less; the steps of a few ranks always are. If all ranks have no more, all are compared.
    """
    size = wiring.size
    found = [Symmetry(size, size)]
    for mirrored, least in ((False, wiring.period), (True, wiring.mirror_period)):
        for repeats in sorted({1, neighbours}):
            period = lcm(repeats, least)
            if repeats < size and size % repeats == 0:
                found.append(Symmetry(size if size % period else period, repeats, mirrored))
    found.sort(key=lambda each: (each.period, each.repeats, each.mirrored))
    return next(each for each in found if each.repeats == size or _repeat(build, size, each, budget))


def _repeat(build: Build, size: int, symmetry: Symmetry, budget: int) -> bool:
    repeats, mirrored = symmetry.repeats, symmetry.mirrored
    if mirrored and (size & (size - 1) or repeats & (repeats - 1)):
        return False
    first = [build(rank) for rank in range(repeats)]
    base = [translate(schedule, mirrored=mirrored) for schedule in first]
    steps = max(1, *(len(schedule.steps) for schedule in first))
    # A root, or ranks at the end, may be different: the second and the last ranks of each kind are always looked at.
    compared = set(sample_ranks(size, max(3, budget // steps)))
    compared.update(range(repeats, min(size, 2 * repeats)), range(size - repeats, size))
    return all(
        translate(build(rank), mirrored=mirrored).same_as(base[rank % repeats]) for rank in sorted(compared) if rank >= repeats
    )


def compile_program(build: Build, size: int, symmetry: Symmetry) -> Program:
    """Return the program of the ranks that stand for all.

    Parameters
    ----------
    build, size
        The schedule of each rank, and the number of ranks.
    symmetry
        Which ranks stand for all.

    Raises
    ------
    UnmatchedMessageError
        A send has no receive, or a receive no send.
    """
    period, mirrored = symmetry.period, symmetry.mirrored
    nodes, owner = _gather(build, symmetry)
    is_send, is_receive = nodes.kind == SEND, (nodes.kind == RECV) | (nodes.kind == RECV_REDUCE)
    sends, receives = np.flatnonzero(is_send), np.flatnonzero(is_receive)
    # Messages of one pair of ranks meet in the order of the two lists. A pair is named by its sender and the distance.
    sending = owner[sends] * size + nodes.distance[sends]
    source = owner[receives] ^ nodes.distance[receives] if mirrored else (owner[receives] - nodes.distance[receives]) % size
    receiving = source % period * size + nodes.distance[receives]
    by_pair, receive_by_pair = np.argsort(sending, kind="stable"), np.argsort(receiving, kind="stable")
    pairs = sending[by_pair]
    if not np.array_equal(pairs, receiving[receive_by_pair]):
        raise _unmatched(pairs, receiving[receive_by_pair], size, mirrored)
    order = np.lexsort((owner[sends], nodes.step[sends]))
    message = np.empty(len(sends), np.int64)
    message[order] = np.arange(len(sends))
    # The operation of a node's end, and the one that must wait for the node.
    ends, begins = np.empty((2, len(nodes.kind)), np.int64)
    begins[sends] = message
    begins[receives[receive_by_pair]] = message[by_pair]
    reduces = np.flatnonzero((nodes.kind == RECV_REDUCE) | (nodes.kind == REDUCE))
    reductions = len(sends) + np.arange(len(reduces))
    ends[:] = begins
    ends[reduces] = reductions
    plain = nodes.kind[reduces] == REDUCE
    begins[reduces[plain]] = reductions[plain]
    following = np.full(len(sends), -1, np.int64)
    again = np.flatnonzero(pairs[1:] == pairs[:-1])
    following[message[by_pair[again]]] = message[by_pair[again + 1]]
    earlier = np.concatenate((ends[nodes.after[:, 0]], begins[reduces[~plain]]))
    later = np.concatenate((begins[nodes.after[:, 1]], reductions[~plain]))
    operations = len(sends) + len(reduces)
    waits = np.bincount(later, minlength=operations)
    waits[following[following >= 0]] += 1
    by_earlier = np.argsort(earlier, kind="stable")
    sender, distance = owner[sends][order], nodes.distance[sends][order]
    return Program(
        period=period,
        sender=sender,
        receiver=sender ^ distance if mirrored else (sender + distance) % size,
        message_chunks=nodes.chunks[sends][order],
        reducer=owner[reduces],
        reduction_chunks=nodes.chunks[reduces],
        following=following,
        waits=waits,
        successors=later[by_earlier],
        first_successor=np.concatenate(([0], np.cumsum(np.bincount(earlier, minlength=operations)))),
    )


def _gather(build: Build, symmetry: Symmetry) -> tuple[Nodes, Ints]:
    """Return the nodes of all ranks of a period, one rank after the other, and the rank of each."""
    made = [translate(build(rank), mirrored=symmetry.mirrored) for rank in range(symmetry.repeats)]
    copies = symmetry.period // symmetry.repeats
    counts = np.tile([len(each.kind) for each in made], copies)
    edges = np.tile([len(each.after) for each in made], copies)
    start = np.cumsum(counts) - counts

    def joined(name: str) -> Ints:
        return np.tile(np.concatenate([getattr(each, name) for each in made]), copies)

    after = np.tile(np.concatenate([each.after for each in made]), (copies, 1)) + np.repeat(start, edges)[:, None]
    nodes = Nodes(joined("kind"), joined("step"), joined("distance"), joined("chunks"), after)
    return nodes, np.repeat(np.arange(symmetry.period), counts)


def _unmatched(sending: Ints, receiving: Ints, size: int, mirrored: bool) -> UnmatchedMessageError:
    named = np.concatenate((sending, receiving))
    pairs, places = np.unique(named, return_inverse=True)
    sent, received = (np.bincount(part, minlength=len(pairs)) for part in np.split(places, [len(sending)]))
    wrong = int(np.flatnonzero(sent != received)[0])
    source, distance = divmod(int(pairs[wrong]), size)
    target = source ^ distance if mirrored else (source + distance) % size
    return UnmatchedMessageError(
        f"rank {source} has {sent[wrong]} sends to rank {target}, and rank {target} has {received[wrong]} receives from rank {source}",
        rank=source,
    )
