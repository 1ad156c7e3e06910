"""A schedule in the making."""

from __future__ import annotations

from manyhands.schedule.contracts import Contract
from manyhands.schedule.steps import Buffer, Collective, Copy, Ref, Schedule, Step

__all__ = ["Draft"]


class Draft:
    """The steps of one rank, collected one after the other.

    Parameters
    ----------
    collective, algorithm, rank, size, root
        As in `Schedule`.
    segments
        The number of chunks of a vector or of each block; see `manyhands.schedule.contracts`.
    """

    def __init__(self, collective: Collective, algorithm: str, rank: int, size: int, root: int = 0, segments: int = 1) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.rank = rank
        self.size = size
        self.root = root
        self.segments = segments
        self.steps: list[Step] = []
        self.scratch: list[Ref] = []

    def add(self, step: Step) -> int:
        """Append a step and return its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def reserve(self, like: Ref) -> Ref:
        """Return new scratch memory, as large as the chunks of ``like``."""
        first = len(self.scratch)
        self.scratch += (Ref(like.buffer, chunk) for chunk in range(like.chunk, like.chunk + like.count))
        return Ref(Buffer.SCRATCH, first, like.count)

    def block(self, buffer: Buffer, owner: int, count: int = 1) -> Ref:
        """Return the blocks of ``count`` ranks, beginning with ``owner``, in a buffer that has a block for every rank."""
        return Ref(buffer, owner * self.segments, count * self.segments)

    def whole(self, buffer: Buffer) -> Ref:
        """Return a buffer that holds a vector or the block of this rank alone."""
        return Ref(buffer, 0, self.segments)

    def copy(self, target: Ref, source: Ref, *after: int) -> int:
        """Append a local copy."""
        return self.add(Copy(target, source, after))

    def finish(self) -> Schedule:
        """Return the schedule."""
        contract = Contract(self.collective, self.size, self.root, self.segments)
        return Schedule(
            collective=self.collective,
            algorithm=self.algorithm,
            rank=self.rank,
            size=self.size,
            root=self.root,
            input_chunks=contract.input_chunks,
            output_chunks=contract.output_chunks,
            scratch=tuple(self.scratch),
            steps=tuple(self.steps),
        )
