"""Trees: a rooted collective goes from (to) the root through ranks that pass on what they have.

The binomial trees here divide the *range of ranks* again and again: the part without the leader of the range gets its own
first rank as leader, a child of the other one. For a power of two they are the usual binomial tree. What is gained over
numbering ranks from the root: the ranks below each one are neighbours in rank order for any root and world, so that
reductions keep that order and gathered blocks are side by side, at no cost.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of
High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from oneaccord.schedule.algorithms.cost import Cost, ceil_log2
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.algorithms.fold import Fold
from oneaccord.schedule.steps import Buffer, Collective, Recv, RecvReduce, Ref, Schedule, Send

__all__ = [
    "Branch",
    "Place",
    "binomial_place",
    "broadcast",
    "broadcast_cost",
    "canonical_place",
    "chain",
    "chain_cost",
    "gather",
    "gather_cost",
    "reduce",
    "reduce_cost",
    "scatter",
    "scatter_cost",
]

INPUT, OUTPUT = Buffer.INPUT, Buffer.OUTPUT


class Branch(msgspec.Struct, frozen=True):
    """The ranks ``start`` to ``stop - 1``, of whom ``leader`` talks to the rest of the world."""

    leader: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.stop - self.start


class Place(msgspec.Struct, frozen=True):
    """The place of a rank in the tree.

    Attributes
    ----------
    branch
        The rank and all below it.
    parent
        The rank above; None for the root.
    children
        The branches below, the largest first.
    """

    branch: Branch
    parent: int | None
    children: tuple[Branch, ...]


def binomial_place(rank: int, size: int, root: int) -> Place:
    """Return the place of a rank in the binomial tree of a world, whose branches are halves."""

    def middle(branch: Branch) -> int:
        # The leader keeps the larger half, so that the tree is floor(log2 P) deep.
        half = (branch.count + 1) // 2
        return branch.start + half if branch.leader < branch.start + half else branch.stop - half

    return _place(rank, size, root, middle)


def canonical_place(rank: int, size: int, root: int) -> Place:
    """Return the place of a rank in the tree that is the expression of every reproducible reduction, `Terms.canonical`.

    It is ceil(log2 P) deep, and the root has as many children.
    """
    fold = Fold(size)

    def middle(branch: Branch) -> int:
        first, last = fold.place(branch.start), fold.place(branch.stop - 1)
        return branch.start + 1 if first == last else fold.first((first + last + 1) // 2)

    return _place(rank, size, root, middle)


def _place(rank: int, size: int, root: int, middle: Callable[[Branch], int]) -> Place:
    branch, parent, children = Branch(root, 0, size), None, list[Branch]()
    mine = branch
    while branch.count > 1:
        cut = middle(branch)
        if branch.leader < cut:
            kept, given = Branch(branch.leader, branch.start, cut), Branch(cut, cut, branch.stop)
        else:
            kept, given = Branch(branch.leader, cut, branch.stop), Branch(branch.start, branch.start, cut)
        if given.start <= rank < given.stop:
            if rank == given.leader:
                mine, parent = given, branch.leader
            branch = given
        else:
            if rank == branch.leader:
                children.append(given)
            branch = kept
    return Place(mine, parent, tuple(children))


def broadcast(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Send the vector down the binomial tree, each segment as soon as it is there.

    Cost: k messages and n bytes for each child, ceil(log2 P) children of the root; k ceil(log2 P) steps and ceil(log2 P) n
    bytes on the critical path, since the root serves one child after the other.
    """
    draft = Draft(Collective.BROADCAST, "binomial", rank, size, root, segments)
    place = binomial_place(rank, size, root)
    return _passed_on(draft, place.parent, [child.leader for child in place.children])


def broadcast_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `broadcast`."""
    children = ceil_log2(size)
    return Cost(children * segments, children * nbytes, 0.0, children * nbytes)


def chain(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Send the vector along all ranks in a row, beginning at the root, each segment as soon as it is there.

    Cost: k messages and n bytes, none from the last rank; P + k - 2 steps, each with n / k bytes, which costs little over
    one transfer of the vector when k is much larger than P.
    """
    draft = Draft(Collective.BROADCAST, "chain", rank, size, root, segments)
    parent = None if rank == root else (rank - 1) % size
    following = (rank + 1) % size
    return _passed_on(draft, parent, [] if following == root else [following])


def chain_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `chain`."""
    steps = size + segments - 2 if size > 1 else 0
    return Cost(steps, steps * nbytes / segments, 0.0, nbytes if size > 1 else 0.0)


def _passed_on(draft: Draft, parent: int | None, children: list[int]) -> Schedule:
    if parent is None:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
    for segment in range(draft.segments):
        ready: tuple[int, ...] = ()
        if parent is not None:
            ready = (draft.add(Recv(parent, Ref(OUTPUT, segment))),)
        for child in children:
            draft.add(Send(child, Ref(INPUT if parent is None else OUTPUT, segment), ready))
    return draft.finish()


def reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Combine the vectors up the binomial tree, each segment as soon as it is there.

    A rank that is neither the root nor a leaf keeps its partial result in scratch memory, n bytes.

    Cost: k messages and n bytes, none from the root; k ceil(log2 P) steps, ceil(log2 P) n bytes and as many reduced on the
    critical path; with segments less is reduced on it, since one can travel while another one is reduced.
    Order: that of ranks, and the expression of every reproducible reduction, for every root.
    """
    draft = Draft(Collective.REDUCE, "binomial", rank, size, root, segments)
    place = canonical_place(rank, size, root)
    if size == 1:
        draft.copy(draft.whole(OUTPUT), draft.whole(INPUT))
        return draft.finish()
    mine = draft.whole(INPUT)
    if place.parent is None:
        mine = draft.whole(OUTPUT)
    elif place.children:
        mine = draft.reserve(draft.whole(INPUT))
    for segment in range(segments):
        target = Ref(mine.buffer, mine.chunk + segment)
        operand = Ref(INPUT, segment)
        ready: tuple[int, ...] = ()
        # The smallest branch lies next to this rank, and is the first to be ready.
        for child in reversed(place.children):
            step = RecvReduce(child.leader, target, operand, incoming_first=child.start < rank, after=ready)
            ready = (draft.add(step),)
            operand = target
        if place.parent is not None:
            draft.add(Send(place.parent, operand, ready))
    return draft.finish()


def reduce_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `reduce`."""
    children = ceil_log2(size)
    return Cost(children * segments, children * nbytes, children * nbytes, nbytes if size > 1 else 0.0)


def gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Collect blocks up the binomial tree; a rank sends all that is below it as one message.

    A rank that is neither the root nor a leaf collects in scratch memory. ``segments`` changes nothing.

    Cost: 1 message, none from the root; the blocks of a rank and of all below it, at most floor(P / 2) of them; ceil(log2 P)
    steps and n (P - 1) / P bytes on the critical path, since the root takes from one child after the other.
    """
    draft = Draft(Collective.GATHER, "binomial", rank, size, root)
    place = binomial_place(rank, size, root)
    if place.parent is not None and not place.children:
        draft.add(Send(place.parent, draft.whole(INPUT)))
        return draft.finish()
    everything = draft.block(OUTPUT, place.branch.start, place.branch.count)
    if place.parent is not None:
        everything = draft.reserve(everything)
    there = [draft.copy(_part(everything, place.branch, rank, 1), draft.whole(INPUT))]
    there += [
        draft.add(Recv(child.leader, _part(everything, place.branch, child.start, child.count))) for child in place.children
    ]
    if place.parent is not None:
        draft.add(Send(place.parent, everything, tuple(there)))
    return draft.finish()


def gather_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `gather`."""
    return Cost(ceil_log2(size), nbytes * (size - 1) / size, 0.0, nbytes * (size // 2) / size)


def scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Hand out blocks down the binomial tree; a rank gets all that is below it as one message.

    A rank that is neither the root nor a leaf keeps what it hands out in scratch memory. ``segments`` changes nothing.

    Cost: 1 message for each child, ceil(log2 P) children of the root; the blocks of all ranks below it; ceil(log2 P) steps
    and n (P - 1) / P bytes on the critical path, since the root serves one child after the other.
    """
    draft = Draft(Collective.SCATTER, "binomial", rank, size, root)
    place = binomial_place(rank, size, root)
    everything = draft.block(INPUT, place.branch.start, place.branch.count)
    there: tuple[int, ...] = ()
    if place.parent is not None:
        if not place.children:
            draft.add(Recv(place.parent, draft.whole(OUTPUT)))
            return draft.finish()
        everything = draft.reserve(everything)
        there = (draft.add(Recv(place.parent, everything)),)
    for child in place.children:
        draft.add(Send(child.leader, _part(everything, place.branch, child.start, child.count), there))
    draft.copy(draft.whole(OUTPUT), _part(everything, place.branch, rank, 1), *there)
    return draft.finish()


def scatter_cost(size: int, nbytes: float, segments: int = 1, ranks_per_host: int = 1) -> Cost:
    """Return the cost of `scatter`."""
    others = nbytes * (size - 1) / size
    return Cost(ceil_log2(size), others, 0.0, others)


def _part(everything: Ref, branch: Branch, first: int, count: int) -> Ref:
    """Return the blocks of ``count`` ranks from ``first`` on; one chunk is the block of one rank of the branch."""
    return Ref(everything.buffer, everything.chunk + first - branch.start, count)
