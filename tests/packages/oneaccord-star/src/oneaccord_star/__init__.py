"""An example: two algorithms by which the root talks to every rank itself."""

from __future__ import annotations

from collections.abc import Sequence

from oneaccord.api import Algorithm, Buffer, Collective, Copy, Recv, RecvReduce, Ref, Schedule, Send, hookimpl

__all__ = ["broadcast", "oneaccord_register_algorithms", "reduce"]

Step = Copy | Recv | RecvReduce | Send


def broadcast(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Send the vector from the root to each rank, one segment after the other.

    Cost: (P - 1) k messages and (P - 1) n bytes of the root.
    """
    mine = Ref(Buffer.OUTPUT, 0, segments)
    steps: list[Step] = []
    if rank == root:
        steps.append(Copy(mine, Ref(Buffer.INPUT, 0, segments)))
        others = [other for other in range(size) if other != root]
        steps += [Send(other, Ref(Buffer.INPUT, segment)) for segment in range(segments) for other in others]
    else:
        steps += [Recv(root, Ref(Buffer.OUTPUT, segment)) for segment in range(segments)]
    return _schedule(Collective.BROADCAST, rank, size, root, segments, steps)


def reduce(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Combine the vectors of all ranks on the root: beginning with its own, and going around from there.

    Cost: 1 message and n bytes of each rank but the root; the root reduces (P - 1) n bytes. ``segments`` changes nothing.
    """
    own = Ref(Buffer.INPUT, 0)
    steps: list[Step] = []
    if rank != root:
        steps.append(Send(root, own))
    elif size == 1:
        steps.append(Copy(Ref(Buffer.OUTPUT, 0), own))
    for distance in range(1, size) if rank == root else ():
        # Each waits for the one before, because it reads what that one has written.
        operand, after = (own, ()) if distance == 1 else (Ref(Buffer.OUTPUT, 0), (len(steps) - 1,))
        steps.append(RecvReduce((root + distance) % size, Ref(Buffer.OUTPUT, 0), operand, after=after))
    return _schedule(Collective.REDUCE, rank, size, root, 1, steps)


def _schedule(collective: Collective, rank: int, size: int, root: int, segments: int, steps: Sequence[Step]) -> Schedule:
    return Schedule(
        collective=collective,
        algorithm="star",
        rank=rank,
        size=size,
        root=root,
        input_chunks=segments,
        output_chunks=segments,
        scratch=(),
        steps=tuple(steps),
    )


@hookimpl
def oneaccord_register_algorithms() -> list[Algorithm]:
    """Offer both. What they claim about themselves is proved, too."""
    return [
        Algorithm("star", Collective.BROADCAST, broadcast, "the root sends to every rank itself", segment_bytes=1 << 20),
        Algorithm("star", Collective.REDUCE, reduce, "every rank sends to the root itself", ordered=False),
    ]
