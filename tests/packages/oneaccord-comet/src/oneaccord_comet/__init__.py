"""An example of what is refused: a broadcast that nearly always works."""

from __future__ import annotations

from oneaccord.api import Algorithm, Buffer, Collective, Copy, Recv, Ref, Schedule, Send, hookimpl

__all__ = ["broadcast", "oneaccord_register_algorithms"]


def broadcast(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Send the vector from the root to the rank after it, and so on: but where the end is reached, rank 0 is forgotten."""
    mine = Ref(Buffer.OUTPUT, 0)
    first = [Copy(mine, Ref(Buffer.INPUT, 0))] if rank == root else [Recv(rank - 1, mine)] if rank > 0 else []
    onwards = [Send(rank + 1, mine, (0,))] if rank + 1 < size and first else []
    return Schedule(
        collective=Collective.BROADCAST,
        algorithm="comet",
        rank=rank,
        size=size,
        root=root,
        input_chunks=1,
        output_chunks=1,
        scratch=(),
        steps=(*first, *onwards),
    )


@hookimpl
def oneaccord_register_algorithms() -> list[Algorithm]:
    """Offer it."""
    return [Algorithm("comet", Collective.BROADCAST, broadcast, "from each rank to the next")]
