"""Circulant graphs: log2 P rounds and the fewest bytes at once, in a world of any size.

Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234, 2024. The distances are those that
come of halving P again and again and rounding up, so that, unlike with powers of two, no rank is left over.
"""

from __future__ import annotations

from oneaccord.schedule.algorithms import bruck
from oneaccord.schedule.algorithms.bruck import chunks_around
from oneaccord.schedule.algorithms.cost import Cost, ceil_log2, one_after_the_other
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, RecvReduce, Ref, Schedule, Send

__all__ = ["all_reduce", "all_reduce_cost", "reduce_scatter", "reduce_scatter_cost"]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


def reduce_scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Hand on the farther half of the blocks that are still here, and combine the nearer half with the blocks that arrive.

    A rank counts blocks from its own one on, around the end. Of s' blocks it sends the last s' - s to the rank s further on,
    with s = ceil(s' / 2), and combines the first s' - s. Partial results are in scratch memory, ceil(P / 2) blocks; so the
    first message is sent as two if it goes around the end. ``segments`` changes nothing.

    Cost: ceil(log2 P) messages, and one more if the first goes around the end, as for some rank if P > 3; P - 1
    blocks, n (P - 1) / P bytes if they are even, the least possible, as are the bytes that are reduced; ceil(log2 P) + 1
    steps if P > 3.
    Order: far ranks before near ones: the reduction must commute.
    """
    draft = Draft(Collective.REDUCE_SCATTER, "circulant", rank, size)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
    else:
        _reduce_rounds(draft, draft.whole(OUTPUT))
    return draft.finish()


def _reduce_rounds(draft: Draft, result: Ref) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Append the rounds that reduce one chunk for each rank into ``result``.

    Returns the steps after which it is there, and those that read ``INPUT`` and may come later than that.
    """
    rank, size = draft.rank, draft.size
    here = (size + 1) // 2
    count = size - here
    farther = chunks_around(INPUT, (rank + here) % size, count, size)
    sent = tuple(draft.add(Send((rank + here) % size, given)) for given in farther)
    partial = result if size == 2 else draft.reserve(*chunks_around(INPUT, rank, here, size))
    ready: list[int] = []
    done = 0
    for blocks in chunks_around(INPUT, rank, count, size):
        ready.append(
            draft.add(RecvReduce((rank - here) % size, Ref(partial.buffer, partial.chunk + done, blocks.count), blocks))
        )
        done += blocks.count
    if count < here:
        # The last block is not combined in the first round, and later rounds expect it next to the others.
        ready.append(draft.copy(Ref(partial.buffer, partial.chunk + count), Ref(INPUT, (rank + count) % size)))
    after = tuple(ready)
    while here > 1:
        count, here = here // 2, (here + 1) // 2
        mine = Ref(partial.buffer, partial.chunk, count)
        draft.add(Send((rank + here) % size, Ref(partial.buffer, partial.chunk + here, count), after))
        target = result if here == 1 else mine
        after = (draft.add(RecvReduce((rank - here) % size, target, mine, after=after)),)
    return after, sent


def reduce_scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce_scatter`."""
    every = nbytes * (size - 1) / size
    return Cost(ceil_log2(size) + (size > 3), every, every, every)


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Do the reduce-scatter above, then gather by Bruck's algorithm.

    The vector is divided into P chunks; ``segments`` changes nothing. A result is computed by one rank and then copied, so
    all ranks hold the same bits.

    Cost: that of the two parts: 2 ceil(log2 P) messages, and one more if the first goes around the end; 2 n (P - 1) / P
    bytes, the least possible; 2 ceil(log2 P) + 1 steps if P > 3.
    Order: far ranks before near ones: the reduction must commute.
    """
    draft = Draft(Collective.ALL_REDUCE, "circulant", rank, size, segments=size)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
        return draft.finish()
    own = Ref(OUTPUT, rank)
    ready, sent = _reduce_rounds(draft, own)
    # In place, the gathered blocks go to the places that the first round reads: the blocks that it sent or combined.
    bruck.gather_rounds(draft, own, ready=ready, in_output=ready, free=(*sent, *ready))
    return draft.finish()


def all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_reduce`."""
    return one_after_the_other(reduce_scatter_cost(size, nbytes), bruck.all_gather_cost(size, nbytes))
