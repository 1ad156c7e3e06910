"""Recursive halving: in each round two ranks divide what they have between them, so that messages get smaller and smaller.

Rabenseifner, "Optimization of Collective Reduction Operations", International Conference on Computational Science, 2004;
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of
High Performance Computing Applications 19(1), 2005.

`all_reduce` and `reduce` halve the vector while the distance doubles: first neighbours combine, then neighbouring pairs, and
so on. The half of the vector that a rank ends with is an odd one (its place with the bits reversed), which does not matter
since all halves come together again, and in return the order is that of ranks. In `reduce_scatter` everybody must end with
the own block, so that distance halves with the data.
"""

from __future__ import annotations

import msgspec

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.algorithms.fold import Fold
from oneaccord.schedule.steps import Buffer, Collective, Recv, RecvReduce, Ref, Schedule, Send

__all__ = ["all_reduce", "all_reduce_cost", "reduce", "reduce_cost", "reduce_scatter", "reduce_scatter_cost"]

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


class _Exchange(msgspec.Struct, frozen=True):
    """A round: ``given`` went to ``peer`` by step ``sent``, and ``kept`` was combined with the same part of its vector."""

    peer: int
    kept: Ref
    given: Ref
    sent: int


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Reduce-scatter by recursive halving, then gather by going back the same way.

    The vector is divided into Q = 2**floor(log2 P) chunks; ``segments`` changes nothing. Of the other P - Q ranks each hands
    its vector to the rank before it, and gets the result from there.

    Cost: 2 log2(Q) messages and 2 n (Q - 1) / Q bytes, the least possible, in as many steps, if P is a power of two; else 2
    steps and 2 n bytes more. n (Q - 1) / Q bytes are reduced, and n more if P is no power of two.
    Order: that of ranks, and the expression of every reproducible reduction.
    """
    fold = Fold(size)
    draft = Draft(Collective.ALL_REDUCE, "rabenseifner", rank, size, segments=1 << fold.rounds)
    partner = fold.partner(rank)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
    elif partner is not None and rank != fold.leader(fold.place(rank)):
        handed = draft.add(Send(partner, draft.whole(INPUT)))
        draft.add(Recv(partner, draft.whole(OUTPUT), (handed,)))
    else:
        exchanges, ready = _halve(draft, fold, OUTPUT)
        for exchange in reversed(exchanges):
            draft.add(Send(exchange.peer, exchange.kept, ready))
            ready = (*ready, draft.add(Recv(exchange.peer, exchange.given, (exchange.sent,))))
        if partner is not None:
            draft.add(Send(partner, draft.whole(OUTPUT), ready))
    return draft.finish()


def all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_reduce`."""
    rounds, folded = _rounds(size)
    halves = nbytes * (1 - 2.0**-rounds)
    path = 2 * halves + 2 * folded * nbytes
    return Cost(2 * rounds + 2 * folded, path, halves + folded * nbytes, 2 * halves + folded * nbytes)


def reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Reduce-scatter by recursive halving, then gather up the same tree towards the root.

    The vector is divided as in `all_reduce`; ``segments`` changes nothing. A rank that is not the root keeps its partial
    results in scratch memory, n / 2 bytes, and n if it acts for two.

    Cost: at most log2(Q) + 1 messages; 2 log2(Q) steps and 2 n (Q - 1) / Q bytes on the critical path, and 1 step and n
    bytes more if P is no power of two. n (Q - 1) / Q bytes are reduced, and n more if P is no power of two.
    Order: that of ranks, and the expression of every reproducible reduction, for every root.
    """
    fold = Fold(size, root)
    draft = Draft(Collective.REDUCE, "reduce_scatter_gather", rank, size, root, 1 << fold.rounds)
    partner, place = fold.partner(rank), fold.place(rank)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
    elif partner is not None and rank != fold.leader(place):
        draft.add(Send(partner, draft.whole(INPUT)))
    else:
        exchanges, ready = _halve(draft, fold, OUTPUT if rank == root else SCRATCH)
        for turn, exchange in reversed(list(enumerate(exchanges))):
            if (place ^ fold.place(root)) >> turn & 1:
                draft.add(Send(exchange.peer, exchange.kept, ready))
                break
            ready = (*ready, draft.add(Recv(exchange.peer, exchange.given, (exchange.sent,))))
    return draft.finish()


def reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce`."""
    rounds, folded = _rounds(size)
    halves = nbytes * (1 - 2.0**-rounds)
    # The first to leave sends half of its vector, a quarter, ..., and in the end half of the vector again.
    sent = max(halves + nbytes / 2 if rounds else 0.0, folded * nbytes)
    return Cost(2 * rounds + folded, 2 * halves + folded * nbytes, halves + folded * nbytes, sent)


def _halve(draft: Draft, fold: Fold, buffer: Buffer) -> tuple[list[_Exchange], tuple[int, ...]]:
    """Append the reduce-scatter of a rank that acts for a place, with partial results in a buffer.

    Returns
    -------
    tuple
        The rounds, and the steps after which the last part that was kept is there.
    """
    place, partner = fold.place(draft.rank), fold.partner(draft.rank)
    source, ready = draft.whole(INPUT), tuple[int, ...]()
    start, count = 0, draft.segments
    if partner is not None:
        target = draft.whole(OUTPUT) if buffer is OUTPUT else draft.reserve(source)
        ready = (draft.add(RecvReduce(partner, target, source, incoming_first=partner < draft.rank)),)
        source = target
    exchanges = []
    for turn in range(fold.rounds):
        count //= 2
        # Chunk numbers in the vector; the source has the part that begins at ``start``.
        upper = place >> turn & 1
        lower_part, upper_part = Ref(source.buffer, source.chunk, count), Ref(source.buffer, source.chunk + count, count)
        mine, given = (upper_part, lower_part) if upper else (lower_part, upper_part)
        start += upper * count
        kept = mine
        if source.buffer is INPUT:
            kept = Ref(OUTPUT, start, count) if buffer is OUTPUT else draft.reserve(mine)
        peer = fold.leader(place ^ 1 << turn)
        sent = draft.add(Send(peer, given, ready))
        ready = (draft.add(RecvReduce(peer, kept, mine, incoming_first=bool(upper), after=ready)),)
        back = Ref(buffer, given.chunk, count) if buffer is OUTPUT else given
        exchanges.append(_Exchange(peer, kept, back, sent))
        source = kept
    return exchanges, ready


def reduce_scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Hand the other half of the world its blocks, and combine those of the own half; then do so in that half.

    Of the P ranks, Q = 2**floor(log2 P) take part. Each of the others hands its input to the rank before it, and gets its
    block from there. ``segments`` changes nothing. Partial results are in scratch memory, n / 2 bytes, and n if a rank acts
    for two.

    Cost: log2(P) messages and n (P - 1) / P bytes, the least possible, if P is a power of two. Else log2(Q) + 2 steps; n
    bytes, then those of the blocks of the first half of the Q, of the first quarter, ..., and then one block.
    Order: the two halves of the world alternate: the reduction must commute.
    """
    fold = Fold(size)
    draft = Draft(Collective.REDUCE_SCATTER, "recursive_halving", rank, size)
    partner, place = fold.partner(rank), fold.place(rank)
    everything = draft.block(INPUT, 0, size)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), everything)
        return draft.finish()
    if partner is not None and rank != fold.leader(place):
        handed = draft.add(Send(partner, everything))
        draft.add(Recv(partner, draft.whole(OUTPUT), (handed,)))
        return draft.finish()
    source, ready = everything, tuple[int, ...]()
    if partner is not None:
        source = draft.reserve(everything)
        ready = (draft.add(RecvReduce(partner, source, everything)),)
    start = 0
    for turn in reversed(range(fold.rounds)):
        middle, stop = start + (1 << turn), start + (2 << turn)
        first, cut, last = fold.first(start), fold.first(middle), fold.first(stop)
        lower_part = Ref(source.buffer, source.chunk, cut - first)
        upper_part = Ref(source.buffer, source.chunk + cut - first, last - cut)
        upper = place >= middle
        mine, given = (upper_part, lower_part) if upper else (lower_part, upper_part)
        kept = mine
        if not turn and partner is None:
            kept = draft.whole(OUTPUT)
        elif source.buffer is INPUT:
            kept = draft.reserve(mine)
        peer = fold.leader(place ^ 1 << turn)
        draft.add(Send(peer, given, ready))
        ready = (draft.add(RecvReduce(peer, kept, mine, after=ready)),)
        source, start = kept, middle if upper else start
    if partner is not None:
        draft.copy(draft.whole(OUTPUT), Ref(source.buffer, source.chunk), *ready)
        draft.add(Send(partner, Ref(source.buffer, source.chunk + 1), ready))
    return draft.finish()


def reduce_scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce_scatter`."""
    fold = Fold(size)
    block = nbytes / size
    folded = 1 if fold.extra else 0
    halves = sum(fold.first(1 << turn) for turn in range(fold.rounds)) * block
    sent = nbytes if folded else nbytes - block
    return Cost(fold.rounds + 2 * folded, halves + folded * (nbytes + block), halves + folded * nbytes, sent)


def _rounds(size: int) -> tuple[int, int]:
    """Return log2 Q, and 1 if ranks are left over."""
    rounds = size.bit_length() - 1
    return rounds, int(ceil_log2(size) != rounds)
