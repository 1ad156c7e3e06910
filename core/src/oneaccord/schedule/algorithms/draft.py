"""A schedule in the making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from oneaccord.schedule.algorithms.footprint import Footprint
from oneaccord.schedule.contracts import Contract
from oneaccord.schedule.steps import (
    Buffer,
    Collective,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    reads_of,
    target_of,
)

__all__ = ["Draft"]


class Draft:
    """The steps of one rank, collected one after the other.

    Parameters
    ----------
    collective, algorithm, rank, size, root
        As in `Schedule`.
    segments
        The number of chunks of a vector or of each block; see `oneaccord.schedule.contracts`.
    even
        As in `Schedule`.
    """

    def __init__(
        self,
        collective: Collective,
        algorithm: str,
        rank: int,
        size: int,
        root: int = 0,
        segments: int = 1,
        *,
        even: bool = False,
    ) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.rank = rank
        self.size = size
        self.root = root
        self.segments = segments
        self.steps: list[Step] = []
        self.even = even
        self.scratch: list[Ref] = []
        self._scratch_chunks = 0
        self._footprint: Footprint | None = None
        self._noted = 0
        self._arrivals: list[int] = []

    def add(self, step: Step) -> int:
        """Append a step and return its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def follow(self, step: Step) -> int:
        """Append a step that waits for those before it that use the same memory, and for no other; return its index."""
        footprint = self._noted_footprint()
        earlier = footprint.use(len(self.steps), reads_of(step), target_of(step))
        self._noted += 1
        return self.add(replace(step, after=tuple(sorted(earlier))))

    def reserve(self, *like: Ref) -> Ref:
        """Return new scratch memory, as large as the chunks of one reference after the other."""
        first = self._scratch_chunks
        for run in like:
            self._scratch_chunks += run.count
            self.scratch += self._sizes(run) if run.buffer is Buffer.SCRATCH else (run,)
        return Ref(Buffer.SCRATCH, first, self._scratch_chunks - first)

    def block(self, buffer: Buffer, owner: int, count: int = 1) -> Ref:
        """Return the blocks of ``count`` ranks, beginning with ``owner``, in a buffer that has a block for every rank."""
        return Ref(buffer, owner * self.segments, count * self.segments)

    def around(self, buffer: Buffer, owner: int, count: int) -> list[Ref]:
        """Return the blocks of ``count`` ranks as `block` does, in two parts if they go around the end."""
        before_end = min(count, self.size - owner)
        parts = [self.block(buffer, owner, before_end)]
        if count > before_end:
            parts.append(self.block(buffer, 0, count - before_end))
        return parts

    def whole(self, buffer: Buffer) -> Ref:
        """Return a buffer that holds a vector or the block of this rank alone."""
        return Ref(buffer, 0, self.segments)

    def copy(self, target: Ref, source: Ref, *after: int) -> int:
        """Append a local copy."""
        return self.add(Copy(target, source, after))

    def include(
        self,
        part: Schedule,
        rank_of: Callable[[int], int],
        *,
        input: Ref | None = None,  # noqa: A002 - the names of the two buffers
        output: Ref | None = None,
        scratch: Ref | None = None,
        in_turn: bool = False,
    ) -> None:
        """Append the steps of another schedule, this rank's schedule in a smaller world.

        Each step waits for those before that use the same memory, and for no other: parts overlap chunk by chunk. A copy of
        memory onto itself is left out.

        Parameters
        ----------
        part
            The schedule.
        rank_of
            Maps the number of a rank in the smaller world to its number in this one.
        input, output
            The places of the two buffers of ``part``; None for one that it does not use. Each of its chunks is as many of ours
            as divides them evenly. They may be the same memory just as in an in-place call.
        scratch
            The place of its scratch memory; None to reserve some.
        in_turn
            Whether this rank receives nothing of this part before it has received all of the part before. If messages of
            two parts go to one rank, those of the later part would delay the others, for which more ranks wait.
        """
        sizes = [
            ref.count // chunks for ref, chunks in ((input, part.input_chunks), (output, part.output_chunks)) if ref and chunks
        ]
        width = sizes[0] if sizes else 1
        at = {Buffer.INPUT: input, Buffer.OUTPUT: output, Buffer.SCRATCH: scratch}

        def ours(ref: Ref) -> Ref:
            base = at[ref.buffer]
            assert base is not None, f"the part uses its {ref.buffer.value}"
            return Ref(base.buffer, base.chunk + ref.chunk * width, ref.count * width)

        if scratch is None and part.scratch:
            at[Buffer.SCRATCH] = self.reserve(*map(ours, part.scratch))
        footprint = self._noted_footprint()
        start = len(self.steps)
        arrivals, self._arrivals = self._arrivals, []
        # The step that each step of the part became: itself, or the steps before a copy that was left out.
        became: list[tuple[int, ...]] = []
        for step in part.steps:
            reads, target = tuple(map(ours, reads_of(step))), target_of(step)
            target = None if target is None else ours(target)
            after = {index for earlier in step.after for index in became[earlier]}
            if isinstance(step, Copy) and reads[0] == target:
                became.append(tuple(after))
                continue
            index = len(self.steps)
            if isinstance(step, Recv | RecvReduce):
                self._arrivals.append(index)
                if in_turn and not after:
                    after.update(arrivals)
            after.update(earlier for earlier in footprint.use(index, reads, target) if earlier < start)
            became.append((self.add(_moved(step, rank_of, reads, target, tuple(sorted(after)))),))
        self._noted = len(self.steps)

    def finish(self) -> Schedule:
        """Return the schedule."""
        contract = self._contract()
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
            even=self.even,
        )

    def _noted_footprint(self) -> Footprint:
        """Return the memory that all steps so far use."""
        if self._footprint is None:
            self._footprint = Footprint(self._contract(), self.rank)
        while self._noted < len(self.steps):
            step = self.steps[self._noted]
            self._footprint.use(self._noted, reads_of(step), target_of(step))
            self._noted += 1
        return self._footprint

    def _contract(self) -> Contract:
        return Contract(self.collective, self.size, self.root, self.segments, self.even)

    def _sizes(self, scratch: Ref) -> list[Ref]:
        """Return what scratch chunks are as large as, in runs."""
        found, run_start, stop = list[Ref](), 0, scratch.chunk + scratch.count
        for run in self.scratch:
            first, last = max(run_start, scratch.chunk), min(run_start + run.count, stop)
            if first < last:
                found.append(Ref(run.buffer, run.chunk + first - run_start, last - first))
            run_start += run.count
        return found


def _moved(
    step: Step, rank_of: Callable[[int], int], reads: tuple[Ref, ...], target: Ref | None, after: tuple[int, ...]
) -> Step:
    """Return a step with other memory and another peer."""
    match step:
        case Send():
            return Send(rank_of(step.peer), reads[0] if reads else None, after)
        case Recv():
            return Recv(rank_of(step.peer), target, after)
    assert target is not None
    match step:
        case RecvReduce():
            return RecvReduce(rank_of(step.peer), target, reads[0], step.incoming_first, after)
        case Reduce():
            return Reduce(target, reads[0], reads[1], after)
        case Copy():
            return Copy(target, reads[0], after)
