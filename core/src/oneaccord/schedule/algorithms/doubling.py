"""Recursive doubling and its relatives: in round j, ranks at distance 2**j talk, so that a few short rounds are enough.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of High
Performance Computing Applications 19(1), 2005; Hensgen, Finkel and Manber, "Two Algorithms for Barrier Synchronization",
International Journal of Parallel Programming 17(1), 1988.
"""

from __future__ import annotations

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2, floor_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.algorithms.fold import Fold
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

__all__ = ["all_gather", "all_gather_cost", "all_reduce", "all_reduce_cost", "barrier", "barrier_cost"]

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange and combine the whole vector, in each round with a rank twice as far away.

    Of the P ranks, Q = 2**floor(log2 P) take part. The others, P - Q, are the odd ones among the first 2 (P - Q): each hands
    its vector to the rank before it, and gets the result from there. ``segments`` changes nothing.

    Cost: log2(Q) messages of n bytes and as many steps; if P is no power of two, 2 steps more, and 1 message more of a rank
    that acts for two. n bytes are reduced in each round, and before the first one if P is no power of two.
    Order: that of ranks, and the expression of every reproducible reduction.
    """
    # Without a `Draft`: many a program makes this call before any other, and waits for it.
    mine, result = Ref(INPUT, 0), Ref(OUTPUT, 0)
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)
    partner = rank ^ 1 if rank < 2 * folded else None
    place = rank // 2 if rank < 2 * folded else rank - folded
    steps: list[Step] = []
    scratch: tuple[Ref, ...] = ()
    ready: tuple[int, ...] = ()
    if size == 1:
        steps.append(Copy(result, mine))
    elif partner is not None and rank > partner:
        steps += Send(partner, mine), Recv(partner, result, (0,))
    else:
        if partner is not None:
            steps.append(RecvReduce(partner, result, mine))
            ready, mine = (0,), result
        scratch = (mine,) * min(2, rounds)
        reduced: list[int] = []
        for turn in range(rounds):
            other = place ^ 1 << turn
            peer = 2 * other if other < folded else other + folded
            # Two slots in turn: the next message may arrive while this one is still being combined.
            slot, free = Ref(SCRATCH, turn % 2), tuple(reduced[turn - 2 : turn - 1]) if turn > 1 else ()
            left, right = (mine, slot) if place < other else (slot, mine)
            sent = len(steps)
            steps += Send(peer, mine, ready), Recv(peer, slot, free), Reduce(result, left, right, (sent, sent + 1))
            reduced.append(sent + 2)
            ready, mine = (sent + 2,), result
        if partner is not None:
            steps.append(Send(partner, result, ready))
    return Schedule(Collective.ALL_REDUCE, "recursive_doubling", rank, size, 0, 1, 1, scratch, tuple(steps))


def all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_reduce`."""
    rounds, steps = floor_log2(size), ceil_log2(size)
    folded = steps - rounds
    return Cost(rounds + 2 * folded, (rounds + 2 * folded) * nbytes, steps * nbytes, steps * nbytes)


def all_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange all blocks that two ranks have, in each round with a rank twice as far away.

    Of the P ranks, Q = 2**floor(log2 P) take part. The others, P - Q, are the odd ones among the first 2 (P - Q): each hands
    its block to the rank before it, and gets all blocks from there. ``segments`` changes nothing.

    Cost: log2(P) messages, n (P - 1) / P bytes and log2(P) steps, the least possible, if P is a power of two. Else log2(Q) +
    2 steps: one block, then the blocks of the first of the Q, of the first two, of the first four, ..., then all n bytes.
    """
    fold = Fold(size)
    draft = Draft(Collective.ALL_GATHER, "recursive_doubling", rank, size)
    partner, place = fold.partner(rank), fold.place(rank)
    mine, everything = draft.whole(INPUT), draft.block(OUTPUT, 0, size)
    if partner is not None and rank != fold.leader(place):
        handed = draft.add(Send(partner, mine))
        draft.add(Recv(partner, everything, (handed,)))
        return draft.finish()
    have: tuple[int, ...] = (draft.copy(draft.block(OUTPUT, rank), mine),)
    if partner is not None:
        have = (*have, draft.add(Recv(partner, draft.block(OUTPUT, partner))))
    for turn in range(fold.rounds):
        first = place >> turn << turn
        other = first ^ 1 << turn
        peer = fold.leader(place ^ 1 << turn)
        blocks, theirs = (
            draft.block(OUTPUT, fold.first(start), fold.first(start + (1 << turn)) - fold.first(start))
            for start in (first, other)
        )
        # The first message need not wait until the own block was copied.
        alone = blocks.count == 1
        draft.add(Send(peer, mine if alone else blocks, () if alone else have))
        have = (*have, draft.add(Recv(peer, theirs)))
    if partner is not None:
        draft.add(Send(partner, everything, have))
    return draft.finish()


def all_gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_gather`."""
    fold = Fold(size)
    block = nbytes / size
    folded = 1 if fold.extra else 0
    doubled = sum(fold.first(1 << turn) for turn in range(fold.rounds)) * block
    return Cost(fold.rounds + 2 * folded, doubled + folded * (block + nbytes), 0.0, doubled + folded * nbytes)


def barrier(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """In each round, inform a rank twice as far away about all ranks heard of so far.

    Cost: ceil(log2 P) empty messages; ceil(log2 P) steps.
    """
    draft = Draft(Collective.BARRIER, "dissemination", rank, size, segments=0)
    heard: list[int] = []
    distance = 1
    while distance < size:
        draft.add(Send((rank + distance) % size, None, tuple(heard)))
        heard.append(draft.add(Recv((rank - distance) % size, None)))
        distance *= 2
    return draft.finish()


def barrier_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `barrier`."""
    return Cost(ceil_log2(size), 0.0, 0.0, 0.0)
