"""Rings: every rank sends to the next one and receives from the one before, so that every link is busy all the time.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and
Distributed Computing 69(2), 2009. With segments, the reduction of one segment overlaps with the transfer of the next.
"""

from __future__ import annotations

from oneaccord.schedule.algorithms.cost import Cost
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, Recv, RecvReduce, Ref, Schedule, Send

__all__ = ["all_gather", "all_gather_cost", "all_reduce", "all_reduce_cost", "reduce_scatter", "reduce_scatter_cost"]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Reduce-scatter around the ring, then gather around it.

    The vector is divided into P blocks of k segments. Block b starts at rank b, goes once around while each rank adds its
    own part, and around again while each rank takes the result; nothing is copied before the first hop. A result is computed
    by one rank and then copied, so all ranks hold the same bits.

    Cost: 2 (P - 1) k messages; 2 n (P - 1) / P bytes, the least possible, half of them reduced; 2 (P - 1) k steps.
    Order: block b is combined in the order b, b + 1, ..., P - 1, 0, ..., b - 1: the reduction must commute.
    """
    draft = Draft(Collective.ALL_REDUCE, "ring", rank, size, segments=size * segments)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
        return draft.finish()
    following, previous = (rank + 1) % size, (rank - 1) % size
    touched: dict[int, int] = {}
    for turn in range(2 * (size - 1)):
        for segment in range(segments):
            outgoing = (rank - turn) % size * segments + segment
            incoming = (rank - turn - 1) % size * segments + segment
            source = Ref(OUTPUT if turn else INPUT, outgoing)
            touched[outgoing] = draft.add(Send(following, source, (touched[outgoing],) if turn else ()))
            target = Ref(OUTPUT, incoming)
            if turn < size - 1:
                step: Recv | RecvReduce = RecvReduce(previous, target, Ref(INPUT, incoming), incoming_first=True)
            else:
                # In the second half a chunk is overwritten that was sent on in the first.
                step = Recv(previous, target, (touched[incoming],))
            touched[incoming] = draft.add(step)
    return draft.finish()


def all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_reduce`."""
    others = nbytes * (size - 1) / size
    return Cost(2 * (size - 1) * segments, 2 * others, others, 2 * others)


def reduce_scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Let every block go around the ring to its owner, while each rank on the way adds its own part.

    Partial results wait in scratch memory between two hops, n (P - 2) / P bytes in all.

    Cost: (P - 1) k messages; all blocks but one's own, n (P - 1) / P bytes if they are even, all of them reduced; (P - 1)
    k steps.
    Order: block b is combined in the order b + 1, ..., P - 1, 0, ..., b: the reduction must commute.
    """
    draft = Draft(Collective.REDUCE_SCATTER, "ring", rank, size, segments=segments)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
        return draft.finish()
    following, previous = (rank + 1) % size, (rank - 1) % size
    source = draft.block(INPUT, previous)
    ready: list[tuple[int, ...]] = [()] * segments
    for turn in range(size - 1):
        incoming = draft.block(INPUT, (rank - turn - 2) % size)
        target = draft.whole(OUTPUT) if turn == size - 2 else draft.reserve(incoming)
        for segment in range(segments):
            draft.add(Send(following, Ref(source.buffer, source.chunk + segment), ready[segment]))
            received = RecvReduce(
                previous, Ref(target.buffer, target.chunk + segment), Ref(INPUT, incoming.chunk + segment), incoming_first=True
            )
            ready[segment] = (draft.add(received),)
        source = target
    return draft.finish()


def reduce_scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce_scatter`."""
    others = nbytes * (size - 1) / size
    return Cost((size - 1) * segments, others, others, others)


def all_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Let every block go around the ring, while each rank on the way takes a copy.

    Cost: (P - 1) k messages; all blocks but the next rank's, n (P - 1) / P bytes if they are even; (P - 1) k steps.
    """
    draft = Draft(Collective.ALL_GATHER, "ring", rank, size, segments=segments)
    draft.copy(draft.block(OUTPUT, rank), draft.whole(INPUT))
    following, previous = (rank + 1) % size, (rank - 1) % size
    source = draft.whole(INPUT)
    ready: list[tuple[int, ...]] = [()] * segments
    for turn in range(size - 1):
        target = draft.block(OUTPUT, (rank - turn - 1) % size)
        for segment in range(segments):
            draft.add(Send(following, Ref(source.buffer, source.chunk + segment), ready[segment]))
            ready[segment] = (draft.add(Recv(previous, Ref(target.buffer, target.chunk + segment))),)
        source = target
    return draft.finish()


def all_gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_gather`."""
    others = nbytes * (size - 1) / size
    return Cost((size - 1) * segments, others, 0.0, others)
