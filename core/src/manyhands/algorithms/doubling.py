"""Recursive doubling and its relatives: in round j, ranks at distance 2**j talk, so that a few short rounds are enough.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of
High Performance Computing Applications 19(1), 2005; Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms
for All-to-All Communications in Multiport Message-Passing Systems", IEEE Transactions on Parallel and Distributed
Systems 8(11), 1997; Hensgen, Finkel and Manber, "Two Algorithms for Barrier Synchronization", International Journal
of Parallel Programming 17(1), 1988.
"""

from __future__ import annotations

from manyhands.algorithms.draft import Draft
from manyhands.schedule.steps import Buffer, Collective, Recv, RecvReduce, Reduce, Ref, Schedule, Send

__all__ = ["all_gather", "all_reduce", "barrier"]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange and combine the whole vector, in each round with a rank twice as far away.

    Of the P ranks, Q = 2**floor(log2 P) take part. The others, E = P - Q, are the odd ones among the first 2 E: each hands its
    vector to the rank before it, and gets the result from there. Each segment goes its own way, independent of the others.

    Cost: log2(Q) k messages of a rank that takes part, k more if it has an odd one beside it, and k of an odd one; n bytes for
    each k messages; log2(Q) + k - 1 steps, and 2 more if P is no power of two.
    Order: that of ranks, and all ranks evaluate the same expression.
    """
    draft = Draft(Collective.ALL_REDUCE, "recursive_doubling", rank, size, segments=segments)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
        return draft.finish()
    rounds = size.bit_length() - 1
    extra = size - (1 << rounds)
    paired = rank < 2 * extra
    place = rank // 2 if paired else rank - extra
    slots = [draft.reserve(draft.whole(INPUT)) for _ in range(min(2, rounds))] if not (paired and rank % 2) else []
    for segment in range(segments):
        result = Ref(OUTPUT, segment)
        mine = Ref(INPUT, segment)
        if paired and rank % 2:
            handed = draft.add(Send(rank - 1, mine))
            draft.add(Recv(rank - 1, result, (handed,)))
            continue
        ready: tuple[int, ...] = ()
        if paired:
            ready = (draft.add(RecvReduce(rank + 1, result, mine)),)
            mine = result
        reduced: list[int] = []
        for turn in range(rounds):
            other = place ^ 1 << turn
            peer = 2 * other if other < extra else other + extra
            slot = Ref(Buffer.SCRATCH, slots[turn % 2].chunk + segment)
            sent = draft.add(Send(peer, mine, ready))
            # Two slots in turn: the next message may arrive while this one is still being combined.
            received = draft.add(Recv(peer, slot, tuple(reduced[turn - 2 : turn - 1]) if turn > 1 else ()))
            left, right = (mine, slot) if place < other else (slot, mine)
            reduced.append(draft.add(Reduce(result, left, right, (sent, received))))
            ready = (reduced[-1],)
            mine = result
        if paired:
            draft.add(Send(rank + 1, result, ready))
    return draft.finish()


def all_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Pass on all blocks that a rank has, in each round to a rank twice as far away.

    Before round j a rank has the blocks of itself and of the next 2**j - 1 ranks, counted around the end. They are sent from
    where they belong in the output, as two messages where they go around the end; so nothing is rotated afterwards.
    ``segments`` changes nothing: what a round sends is all that the rounds before received.

    Cost: ceil(log2 P) messages, and one more for each round that goes around the end; P - 1 blocks, n (P - 1) / P bytes where
    they are even; at least ceil(log2 P) steps and at most twice as many.
    """
    draft = Draft(Collective.ALL_GATHER, "bruck", rank, size)
    have = [draft.copy(draft.block(OUTPUT, rank), draft.whole(INPUT))]
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        ready = tuple(have)
        for blocks in _around(draft, rank, count):
            # The first message need not wait until the own block was copied.
            first = distance == 1
            draft.add(Send((rank - distance) % size, draft.whole(INPUT) if first else blocks, () if first else ready))
        source = (rank + distance) % size
        have += [draft.add(Recv(source, target)) for target in _around(draft, source, count)]
        distance *= 2
    return draft.finish()


def _around(draft: Draft, first: int, count: int) -> list[Ref]:
    """Return the blocks of ``count`` ranks from ``first`` on, in two parts where they go around the end."""
    before_end = min(count, draft.size - first)
    parts = [draft.block(OUTPUT, first, before_end)]
    if count > before_end:
        parts.append(draft.block(OUTPUT, 0, count - before_end))
    return parts


def barrier(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Tell a rank twice as far away in each round about all ranks heard of so far.

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
