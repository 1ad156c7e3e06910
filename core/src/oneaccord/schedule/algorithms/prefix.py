"""Prefix reductions: each rank gets the reduction of the ranks before it, with its own part (scan) or without (exscan).

Hillis and Steele, "Data Parallel Algorithms", Communications of the ACM 29(12), 1986; Träff, "Communication Round and Computation Efficient
Exclusive Prefix-Sums Algorithms (for MPI_Exscan)", arXiv:2507.04785, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send

__all__ = [
    "chain_exscan",
    "chain_exscan_cost",
    "chain_scan",
    "chain_scan_cost",
    "exscan",
    "exscan_cost",
    "scan",
    "scan_cost",
]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


def scan(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Hand the partial result to the rank 1, 2, 4, ... places further; the one that arrives goes in front of it.

    After round j a rank has combined the 2**(j + 1) ranks up to itself, or all that there are. ``segments`` changes nothing.

    Cost: ceil(log2 P) messages of n bytes and as many steps; n bytes are reduced in each. If P is not a power of two, the
    last rank may wait for one reduction less.
    Order: that of ranks.
    """
    draft = Draft(Collective.SCAN, "recursive_doubling", rank, size)
    mine, result = draft.whole(INPUT), draft.whole(OUTPUT)
    if rank == 0:
        draft.copy(result, mine)
    # Two slots in turn: the next message may arrive while this one is still being combined.
    slots = [draft.reserve(mine) for _ in range(min(2, ceil_log2(rank + 1)))]
    for turn in range(ceil_log2(size)):
        distance = 1 << turn
        if rank + distance < size:
            draft.follow(Send(rank + distance, mine))
        if rank >= distance:
            slot = slots[turn % 2]
            draft.follow(Recv(rank - distance, slot))
            draft.follow(Reduce(result, slot, mine))
            mine = result
    return draft.finish()


def scan_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `scan`."""
    sent = ceil_log2(size) * nbytes
    return Cost(ceil_log2(size), sent, sent, sent)


def chain_scan(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Pass the vector along all ranks in a row, segment after segment, while each adds its own part.

    Cost: k messages and n bytes; P + k - 2 steps of n / k bytes each, which are reduced.
    Order: from left to right, the expression of every reproducible scan.
    """
    draft = Draft(Collective.SCAN, "chain", rank, size, segments=segments)
    if rank == 0:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
    for chunk in range(segments):
        own, result = Ref(INPUT, chunk), Ref(OUTPUT, chunk)
        if rank:
            draft.follow(RecvReduce(rank - 1, result, own, incoming_first=True))
        if rank + 1 < size:
            draft.follow(Send(rank + 1, result if rank else own))
    return draft.finish()


def chain_scan_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `chain_scan`."""
    return _chain_cost(size, nbytes, segments, size + segments - 2)


def exscan(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Hand over what is there to the rank 1, 2, 3, 6, 12, ... places further: 123-doubling.

    The first message is the own part, the second the own part behind what came first; from the third on it is what came so far, which is
    that of as many ranks as the next distance has places. ``segments`` changes nothing.

    Cost: q messages of n bytes and q steps, with q the least number with 3 * 2**(q - 2) >= P - 1: ceil(log2(4 (P - 1) / 3)). n bytes
    are reduced before the second message and after each but the first, q times if q > 1. The last rank may wait for one reduction less.
    Order: that of ranks.
    """
    draft = Draft(Collective.EXSCAN, "doubling_123", rank, size)
    mine, result = draft.whole(INPUT), draft.whole(OUTPUT)
    is_last = rank + 1 == size  # it hands nothing over, so that what comes first may lie in the result
    slots = [draft.reserve(mine) for _ in range(min(2, rank - is_last))]
    before: Ref | None = None
    for turn, distance in enumerate(_distances(size)):
        if rank + distance < size:
            if turn == 1 and before is not None:
                both = draft.reserve(mine)
                draft.follow(Reduce(both, before, mine))
                draft.follow(Send(rank + distance, both))
            elif turn < 2 or before is not None:
                draft.follow(Send(rank + distance, mine if before is None else before))
        if rank < distance + (turn > 1):
            continue
        slot = result if is_last and before is None else slots[turn % len(slots)]
        draft.follow(Recv(rank - distance, slot))
        if before is None:
            before = slot
        else:
            draft.follow(Reduce(result, slot, before))
            before = result
    if before is not None and before is not result:
        draft.follow(Copy(result, before))
    return draft.finish()


def exscan_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `exscan`."""
    steps = sum(1 for _ in _distances(size))
    return Cost(steps, steps * nbytes, steps * nbytes if steps > 1 else 0.0, steps * nbytes)


def _distances(size: int) -> Iterator[int]:
    """Yield how far each round of `exscan` reaches: the ranks before the first that is reached are done."""
    distance = 1
    # From the third round on, rank 0 has nothing to say.
    while distance + (distance > 2) < size:
        yield distance
        distance = distance + 1 if distance < 3 else 2 * distance


def chain_exscan(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Pass the vector along all ranks in a row, segment by segment; each keeps what arrives, and adds its own part before it passes it on.

    The vector that arrives and the one that is passed on are in scratch memory, 2 n bytes, because the result may replace the own part.

    Cost: k messages and n bytes; P + k - 2 steps of n / k bytes each, and n / k bytes to reduce on each of P - 2 ranks.
    Order: from left to right, the expression of every reproducible scan.
    """
    draft = Draft(Collective.EXSCAN, "chain", rank, size, segments=segments)
    is_last = rank + 1 == size
    passes_on = rank > 0 and not is_last
    came, left = (draft.reserve(draft.whole(INPUT)) if passes_on else draft.whole(OUTPUT) for _ in range(2))
    for chunk in range(segments):
        own, result = Ref(INPUT, chunk), Ref(OUTPUT, chunk)
        incoming, outgoing = Ref(came.buffer, came.chunk + chunk), Ref(left.buffer, left.chunk + chunk)
        if rank:
            draft.follow(Recv(rank - 1, incoming))
        if passes_on:
            draft.follow(Reduce(outgoing, incoming, own))
        if not is_last:
            draft.follow(Send(rank + 1, outgoing if rank else own))
        if passes_on:
            draft.follow(Copy(result, incoming))
    return draft.finish()


def chain_exscan_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `chain_exscan`."""
    return _chain_cost(size, nbytes, segments, max(0, size - 2))


def _chain_cost(size: int, nbytes: float, segments: int, reductions: int) -> Cost:
    if size == 1:
        return Cost(0, 0.0, 0.0, 0.0)
    steps = size + segments - 2
    return Cost(steps, steps * nbytes / segments, reductions * nbytes / segments, nbytes)
