"""Worlds of hosts: ranks of a host talk over fast links, and traffic between hosts is divided among these ranks.

Rank r is number ``r % ranks_per_host`` on host ``r // ranks_per_host``. A *lane* is the ranks of one number on all hosts:
each lane carries 1 / ``ranks_per_host`` of the bytes that must cross, as in Träff and Hunold, "Decomposing MPI Collectives
for Exploiting Multi-lane Communication", IEEE International Conference on Cluster Computing, 2020.

In the formulas H is the number of ranks of a host and N that of hosts. The parts are those of `quick`.
"""

from __future__ import annotations

from oneaccord.schedule.algorithms import composed, quick, tree
from oneaccord.schedule.algorithms.cost import Cost, one_after_the_other
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.steps import Buffer, Collective, Ref, Schedule

__all__ = [
    "all_gather",
    "all_gather_cost",
    "all_reduce",
    "all_reduce_cost",
    "broadcast",
    "broadcast_cost",
    "reduce_scatter",
    "reduce_scatter_cost",
]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


class _Seat:
    """The place of a rank: its host, its number there, and the numbers of its neighbours."""

    __slots__ = ("host", "hosts", "number", "ranks_per_host")

    def __init__(self, rank: int, size: int, ranks_per_host: int) -> None:
        self.hosts = size // ranks_per_host
        self.host, self.number = divmod(rank, ranks_per_host)
        self.ranks_per_host = ranks_per_host

    def beside(self, number: int) -> int:
        """Return the rank of a number on this host."""
        return self.host * self.ranks_per_host + number

    def in_lane(self, host: int) -> int:
        """Return the rank of this lane on a host."""
        return host * self.ranks_per_host + self.number


def all_reduce(rank: int, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Schedule:
    """Reduce-scatter in the host, all_reduce in every lane, all_gather in the host.

    With segments, one can be in the host while another one is in the lanes.

    Cost: that of the parts, of which the one in the lane is for n / H bytes. With k segments, k times the steps, and at
    least as many if H or N is no power of two.
    Order: as in the parts: the reduction must commute.
    """
    seat = _Seat(rank, size, ranks_per_host)
    lane = quick.all_reduce(seat.host, seat.hosts)
    width = lane.input_chunks
    draft = Draft(Collective.ALL_REDUCE, "hierarchical", rank, size, segments=segments * ranks_per_host * width)
    for start in range(0, draft.segments, ranks_per_host * width):
        given, taken = (Ref(buffer, start, ranks_per_host * width) for buffer in (INPUT, OUTPUT))
        own = Ref(OUTPUT, start + seat.number * width, width)
        draft.include(quick.reduce_scatter(seat.number, ranks_per_host), seat.beside, input=given, output=own)
        draft.include(lane, seat.in_lane, input=own, output=own)
        draft.include(quick.all_gather(seat.number, ranks_per_host), seat.beside, input=own, output=taken)
    return draft.finish()


def all_reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_reduce`."""
    hosts = size // ranks_per_host
    part = nbytes / segments
    return one_after_the_other(
        *[
            quick.reduce_scatter_cost(ranks_per_host, part),
            quick.all_reduce_cost(hosts, part / ranks_per_host),
            quick.all_gather_cost(ranks_per_host, part),
        ]
        * segments
    )


def all_gather(rank: int, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Schedule:
    """Gather in every lane, then, as the blocks of each host come in, gather them in the host.

    Blocks from the lane wait in scratch memory, n / H bytes. ``segments`` changes nothing.

    Cost: that of the all_gather of n / H bytes in the lane, and N times that of n / N bytes in the host.
    """
    seat = _Seat(rank, size, ranks_per_host)
    draft = Draft(Collective.ALL_GATHER, "hierarchical", rank, size)
    came = _row(draft, seat, OUTPUT)
    draft.include(quick.all_gather(seat.host, seat.hosts), seat.in_lane, input=draft.whole(INPUT), output=came)
    for distance in range(seat.hosts):
        # In the order in which blocks come through the lane.
        host = (seat.host + distance) % seat.hosts
        block = Ref(came.buffer, came.chunk + host)
        blocks = draft.block(OUTPUT, host * ranks_per_host, ranks_per_host)
        draft.include(quick.all_gather(seat.number, ranks_per_host), seat.beside, input=block, output=blocks)
    return draft.finish()


def all_gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `all_gather`."""
    hosts = size // ranks_per_host
    beside = quick.all_gather_cost(ranks_per_host, nbytes / hosts)
    return one_after_the_other(quick.all_gather_cost(hosts, nbytes / ranks_per_host), *[beside] * hosts)


def reduce_scatter(rank: int, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Schedule:
    """Reduce-scatter the blocks of each host in the own host, then what they are combined to in every lane.

    Blocks for the lane wait in scratch memory, n / H bytes, in addition to the memory that the parts need. ``segments`` changes
    nothing.

    Cost: N times that of the reduce_scatter of n / N bytes in the host, and that of n / H bytes in the lane.
    Order: as in the parts: the reduction must commute.
    """
    seat = _Seat(rank, size, ranks_per_host)
    draft = Draft(Collective.REDUCE_SCATTER, "hierarchical", rank, size)
    combined = _row(draft, seat, INPUT)
    beside = quick.reduce_scatter(seat.number, ranks_per_host)
    for distance in reversed(range(seat.hosts)):
        # In the order in which blocks leave through the lane.
        host = (seat.host + distance) % seat.hosts
        block = Ref(combined.buffer, combined.chunk + host)
        blocks = draft.block(INPUT, host * ranks_per_host, ranks_per_host)
        draft.include(beside, seat.beside, input=blocks, output=block, in_turn=True)
    lane = quick.reduce_scatter(seat.host, seat.hosts)
    draft.include(lane, seat.in_lane, input=combined, output=draft.whole(OUTPUT), in_turn=True)
    return draft.finish()


def reduce_scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce_scatter`."""
    hosts = size // ranks_per_host
    beside = quick.reduce_scatter_cost(ranks_per_host, nbytes / hosts)
    return one_after_the_other(*[beside] * hosts, quick.reduce_scatter_cost(hosts, nbytes / ranks_per_host))


def broadcast(rank: int, size: int, root: int = 0, segments: int = 1, ranks_per_host: int = 1) -> Schedule:
    """Scatter in the root's host, broadcast in every lane, all_gather in every host.

    The vector is divided into H blocks, of N chunks each; ``segments`` changes nothing. In a lane the broadcast is itself a
    scatter and an all_gather.

    Cost: that of the parts, of which the one in the lane is for n / H bytes; at least that if H or N is no power of two.
    """
    seat = _Seat(rank, size, ranks_per_host)
    root_host, root_number = divmod(root, ranks_per_host)
    draft = Draft(Collective.BROADCAST, "hierarchical", rank, size, root, size)
    own, vector = Ref(OUTPUT, seat.number * seat.hosts, seat.hosts), draft.whole(OUTPUT)
    if seat.host == root_host:
        given = draft.whole(INPUT)
        part = tree.scatter(seat.number, ranks_per_host, root_number)
        draft.include(part, seat.beside, input=given, output=own)
    lane = composed.scatter_doubling(seat.host, seat.hosts, root_host)
    draft.include(lane, seat.in_lane, input=own, output=own, in_turn=True)
    draft.include(quick.all_gather(seat.number, ranks_per_host), seat.beside, input=own, output=vector, in_turn=True)
    return draft.finish()


def broadcast_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `broadcast`."""
    return one_after_the_other(
        tree.scatter_cost(ranks_per_host, nbytes),
        composed.scatter_doubling_cost(size // ranks_per_host, nbytes / ranks_per_host),
        quick.all_gather_cost(ranks_per_host, nbytes),
    )


def _row(draft: Draft, seat: _Seat, buffer: Buffer) -> Ref:
    """Return memory in which the blocks of a lane lie side by side: new, unless they already do so in a buffer."""
    if seat.ranks_per_host == 1:
        return draft.block(buffer, 0, seat.hosts)
    return draft.reserve(*(draft.block(buffer, seat.in_lane(host)) for host in range(seat.hosts)))
