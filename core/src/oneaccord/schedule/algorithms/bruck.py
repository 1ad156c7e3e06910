"""Bruck's algorithms: log2 P rounds in a world of any size, since distances are counted around the end.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
Systems", IEEE Transactions on Parallel and Distributed Systems 8(11), 1997.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, Ref, Schedule, Send

__all__ = ["all_gather", "all_gather_cost", "all_to_all", "all_to_all_cost", "chunks_around", "gather_rounds"]

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def all_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Pass on all blocks that a rank has, in each round to a rank twice as far away.

    Before round j a rank has the blocks of itself and of the next 2**j - 1 ranks, counted around the end. Blocks are collected
    in this order in scratch memory, n bytes, so that each message is one piece of memory, and each is copied to its place in
    the output when it arrives; rank 0 needs neither. ``segments`` changes nothing: a round sends everything that the rounds
    before received.

    Cost: ceil(log2 P) messages and as many steps; P - 1 blocks, n (P - 1) / P bytes if they are even, the least possible.
    """
    draft = Draft(Collective.ALL_GATHER, "bruck", rank, size)
    copied = draft.copy(draft.block(OUTPUT, rank), draft.whole(INPUT))
    gather_rounds(draft, draft.whole(INPUT), ready=(), in_output=(copied,))
    return draft.finish()


def gather_rounds(
    draft: Draft, own: Ref, *, ready: tuple[int, ...], in_output: tuple[int, ...], free: tuple[int, ...] = ()
) -> None:
    """Append the rounds in which every rank gets the chunks of all ranks, one chunk each, into ``OUTPUT``.

    Parameters
    ----------
    draft
        The draft to append to.
    own
        The chunk of this rank.
    ready, in_output
        The steps after which the chunk is there, and after which it is in ``OUTPUT``.
    free
        The steps after which the other chunks of ``OUTPUT`` may be written.
    """
    rank, size = draft.rank, draft.size
    row, have = Ref(OUTPUT, 0, size), in_output
    if rank:
        row = draft.reserve(*chunks_around(OUTPUT, rank, size, size))
        have = (draft.copy(Ref(row.buffer, row.chunk), own, *ready),)
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        # The first message need not wait until the own block was copied.
        first = distance == 1
        draft.add(Send((rank - distance) % size, own if first else Ref(row.buffer, row.chunk, count), ready if first else have))
        source, start = (rank + distance) % size, row.chunk + distance
        received = draft.add(Recv(source, Ref(row.buffer, start, count), () if rank else free))
        have = (*have, received)
        if rank:
            for belongs in chunks_around(OUTPUT, source, count, size):
                draft.copy(belongs, Ref(row.buffer, start, belongs.count), received, *free)
                start += belongs.count
        distance *= 2


def chunks_around(buffer: Buffer, first: int, count: int, size: int) -> list[Ref]:
    """Return ``count`` chunks from ``first`` on, counted around the end: in two parts if they pass it."""
    before_end = min(count, size - first)
    parts = [Ref(buffer, first, before_end)]
    if count > before_end:
        parts.append(Ref(buffer, 0, count - before_end))
    return parts


def all_gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_gather`."""
    others = nbytes * (size - 1) / size
    return Cost(ceil_log2(size), others, 0.0, others)


def all_to_all(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Relay blocks: in round j, all those that have to go a distance with bit j set go 2**j ranks further.

    Blocks of other ranks pass through this rank's memory, so all blocks must have one size. A block waits in the output, at its
    own final place or at the place of a block that has as far to go; scratch memory holds one message out and one message in, n
    bytes at most. ``segments`` changes nothing.

    Cost: ceil(log2 P) messages and as many steps; in round j the blocks of all distances below P with bit j set, n / 2
    bytes if P is a power of two.
    """
    draft = Draft(Collective.ALL_TO_ALL, "bruck", rank, size, even=True)
    draft.copy(draft.block(OUTPUT, rank), draft.block(INPUT, rank))
    room = draft.block(INPUT, 0, size // 2)
    outgoing, incoming = (draft.reserve(room), draft.reserve(room)) if size > 1 else (room, room)
    distance = 1
    while distance < size:
        # A block with a distance d to go in all waits at the output place of the block from d ranks before: when it has arrived from
        # there, it is that block. The farthest comes first, so that blocks that are neighbours there are in order.
        moving = [far for far in reversed(range(distance, size)) if far & distance]
        homes = [draft.block(OUTPUT, (rank - far) % size) for far in moving]
        sources = [
            draft.block(INPUT, (rank + far) % size) if far & -far == distance else home
            for far, home in zip(moving, homes, strict=True)
        ]
        for place, source in _runs(sources):
            draft.follow(Copy(Ref(SCRATCH, outgoing.chunk + place, source.count), source))
        draft.follow(Send((rank + distance) % size, Ref(SCRATCH, outgoing.chunk, len(moving))))
        draft.follow(Recv((rank - distance) % size, Ref(SCRATCH, incoming.chunk, len(moving))))
        for place, home in _runs(homes):
            draft.follow(Copy(home, Ref(SCRATCH, incoming.chunk + place, home.count)))
        distance *= 2
    return draft.finish()


def all_to_all_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_to_all`."""
    rounds = ceil_log2(size)
    blocks = sum(_with_bit(size, bit) for bit in range(rounds))
    sent = blocks * nbytes / size
    return Cost(rounds, sent, 0.0, sent)


def _with_bit(stop: int, bit: int) -> int:
    """Return how many numbers below ``stop`` have a bit set."""
    period = 2 << bit
    return stop // period * (period // 2) + max(0, stop % period - period // 2)


def _runs(refs: Sequence[Ref]) -> Iterator[tuple[int, Ref]]:
    """Join neighbours that are neighbours in memory; yield each run with its place in the row."""
    place = 0
    for index, ref in enumerate(refs):
        following = refs[index + 1] if index + 1 < len(refs) else None
        if following is None or (following.buffer, following.chunk) != (ref.buffer, ref.chunk + 1):
            count = index + 1 - place
            yield place, Ref(ref.buffer, ref.chunk + 1 - count, count)
            place = index + 1
