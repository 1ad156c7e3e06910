"""Algorithms on real numbers: uneven and empty blocks, steps in any order that the rules allow, in place or not.

This run knows nothing of the verifier: it is a second opinion on the rules of `manyhands.schedule.steps`.
"""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.schedule.algorithms.registry import BUILTIN, Algorithm
from manyhands.schedule.contracts import Contract, Piece
from manyhands.schedule.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send

Array = npt.NDArray[np.int64]
UNDEFINED = -(10**12)


class Rank:
    """The memory of one rank, and what it has done."""

    def __init__(self, schedule: Schedule, contract: Contract, size_of: dict[Piece, int], in_place: bool) -> None:
        self.schedule = schedule
        self.done: set[int] = set()
        rank = schedule.rank
        pieces = {Buffer.INPUT: contract.input_pieces(rank), Buffer.OUTPUT: contract.output_pieces(rank)}
        pieces[Buffer.SCRATCH] = tuple(pieces[ref.buffer][ref.chunk] for ref in schedule.scratch_chunks)
        self.bounds: dict[Buffer, list[int]] = {
            buffer: np.cumsum([0, *(size_of[piece] for piece in mine)]).tolist() for buffer, mine in pieces.items()
        }
        self.memory: dict[Buffer, Array] = {buffer: np.full(bounds[-1], UNDEFINED) for buffer, bounds in self.bounds.items()}
        aliases = contract.aliases(rank) if in_place else {}
        if aliases:
            wide, narrow = Buffer.OUTPUT, Buffer.INPUT
            chunks = Ref(wide, min(aliases.values()), len(aliases))
            if schedule.input_chunks > schedule.output_chunks:
                wide, narrow = narrow, wide
                chunks = Ref(wide, min(aliases), len(aliases))
            self.memory[narrow] = self[chunks]
        if contract.holds_input(rank):
            for chunk, piece in enumerate(pieces[Buffer.INPUT]):
                self[Ref(Buffer.INPUT, chunk)][:] = values(rank, piece, size_of)

    def __getitem__(self, ref: Ref) -> Array:
        bounds = self.bounds[ref.buffer]
        return self.memory[ref.buffer][bounds[ref.chunk] : bounds[ref.chunk + ref.count]]


def values(rank: int, piece: Piece, size_of: dict[Piece, int]) -> Array:
    """Return the input of a rank, different for every rank and place."""
    first = 100 * sum(part * 50**power for power, part in enumerate(piece)) + 10**6 * (rank + 1)
    return np.arange(first, first + size_of[piece], dtype=np.int64)


def run(ranks: list[Rank], order: random.Random) -> None:
    """Run all steps, each time one of those that may start, drawn by lot."""
    channels: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, mine in enumerate(ranks):
        for index, step in enumerate(mine.schedule.steps):
            if isinstance(step, Send):
                channels["send", rank, step.peer].append((rank, index))
            elif isinstance(step, Recv | RecvReduce):
                channels["receive", step.peer, rank].append((rank, index))

    def free(rank: int, index: int) -> bool:
        return index not in ranks[rank].done and ranks[rank].done.issuperset(ranks[rank].schedule.steps[index].after)

    while any(len(mine.done) < len(mine.schedule.steps) for mine in ranks):
        local = [
            (rank, index)
            for rank, mine in enumerate(ranks)
            for index, step in enumerate(mine.schedule.steps)
            if isinstance(step, Copy | Reduce) and free(rank, index)
        ]
        open_channels = [
            (sender, receiver)
            for (kind, sender, receiver), mine in channels.items()
            if kind == "send" and mine and free(*mine[0]) and free(*channels["receive", sender, receiver][0])
        ]
        drawn = order.randrange(len(local) + len(open_channels))
        if drawn < len(local):
            compute(ranks[local[drawn][0]], local[drawn][1])
        else:
            sender, receiver = open_channels[drawn - len(local)]
            sent, received = channels["send", sender, receiver].pop(0)[1], channels["receive", sender, receiver].pop(0)[1]
            message(ranks[sender], ranks[receiver], sent, received)


def compute(mine: Rank, index: int) -> None:
    step = mine.schedule.steps[index]
    mine.done.add(index)
    if isinstance(step, Copy):
        mine[step.target][:] = mine[step.source]
    elif isinstance(step, Reduce):
        mine[step.target][:] = mine[step.left] + mine[step.right]


def message(sender: Rank, receiver: Rank, sent: int, received: int) -> None:
    send, receive = sender.schedule.steps[sent], receiver.schedule.steps[received]
    sender.done.add(sent)
    receiver.done.add(received)
    assert isinstance(send, Send)
    if isinstance(receive, RecvReduce):
        assert send.source is not None
        assert receiver[receive.target].shape == sender[send.source].shape
        receiver[receive.target][:] = receiver[receive.operand] + sender[send.source]
    elif isinstance(receive, Recv) and receive.target is not None:
        assert send.source is not None
        assert receiver[receive.target].shape == sender[send.source].shape
        receiver[receive.target][:] = sender[send.source]


@pytest.mark.parametrize("algorithm", BUILTIN, ids=[f"{one.collective.value}-{one.name}" for one in BUILTIN])
@settings(max_examples=25)
@given(
    size=st.integers(1, 9),
    root=st.integers(0, 8),
    segments=st.integers(1, 3),
    host=st.integers(0, 3),
    in_place=st.lists(st.booleans(), min_size=9, max_size=9),
    seed=st.integers(0, 2**32),
)
def test_the_numbers_are_right(
    algorithm: Algorithm, size: int, root: int, segments: int, host: int, in_place: list[bool], seed: int
) -> None:
    order = random.Random(seed)
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    ranks_per_host = divisors[host % len(divisors)]
    schedules = [algorithm.schedule(rank, size, root % size, segments, ranks_per_host) for rank in range(size)]
    contract = Contract.of(schedules[0])
    all_pieces = {piece for rank in range(size) for piece in (*contract.input_pieces(rank), *contract.output_pieces(rank))}
    # Many are empty; where blocks must be even, those of one extent are drawn once.
    extents = {extent: order.randrange(4) for extent in sorted(map(contract.extent, all_pieces))}
    size_of = {piece: extents[contract.extent(piece)] for piece in all_pieces}
    # Ranks need not agree on whether they call in place.
    ranks = [Rank(schedule, contract, size_of, in_place[rank]) for rank, schedule in enumerate(schedules)]
    run(ranks, order)
    for rank in filter(contract.holds_output, range(size)):
        for chunk, piece in enumerate(contract.output_pieces(rank)):
            expected = sum(
                (values(other, piece, size_of) for other in contract.contributors(piece, rank)), np.zeros(size_of[piece], int)
            )
            assert ranks[rank][Ref(Buffer.OUTPUT, chunk)].tolist() == expected.tolist()
