"""The memory of a rank as cells, and the proof that no two steps use a cell at once while one of them writes it.

A *cell* is a chunk of memory that no other cell overlaps. In place, chunks of two buffers can be one cell.
"""

from __future__ import annotations

from oneaccord.schedule.contracts import Contract
from oneaccord.schedule.errors import OverlapError
from oneaccord.schedule.steps import Buffer, Copy, Ref, Schedule, reads_of, target_of

__all__ = ["Cells", "cells_of", "check_overlaps", "covered"]

Cells = dict[Buffer, tuple[int, ...]]
"""The cell of each chunk of each buffer."""


def cells_of(contract: Contract, schedule: Schedule, *, in_place: bool) -> Cells:
    """Return the cells of a rank; an input chunk that is the same memory as an output chunk has its cell."""
    aliases = contract.aliases(schedule.rank) if in_place else {}
    outputs, inputs, scratch = schedule.output_chunks, schedule.input_chunks, sum(run.count for run in schedule.scratch)
    return {
        Buffer.OUTPUT: tuple(range(outputs)),
        Buffer.INPUT: tuple(aliases.get(chunk, outputs + chunk) for chunk in range(inputs)),
        Buffer.SCRATCH: tuple(range(outputs + inputs, outputs + inputs + scratch)),
    }


def covered(cells: Cells, ref: Ref) -> tuple[int, ...]:
    """Return the cells of a reference."""
    return cells[ref.buffer][ref.chunk : ref.chunk + ref.count]


def check_overlaps(schedule: Schedule, cells: Cells, how: str) -> dict[int, int]:
    """Check that of two steps that use one cell, one of them writing it, one comes after the other.

    Parameters
    ----------
    schedule, cells
        The schedule of a rank, and its memory.
    how
        Words for the error that say in which case it is found.

    Returns
    -------
    dict
        The step that writes each cell last.

    Raises
    ------
    OverlapError
        Two steps are not ordered, or a step writes memory that it reads as another chunk.
    """
    # Sets of steps are bit masks; ``after`` names earlier steps only, so going through the list once is enough.
    before: list[int] = []
    readers: dict[int, int] = {}
    writers: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        earlier = 0
        for other in step.after:
            earlier |= before[other] | 1 << other
        before.append(earlier)
        target = target_of(step)
        written = () if target is None else covered(cells, target)
        sources = [(ref, covered(cells, ref)) for ref in reads_of(step)]
        if isinstance(step, Copy) and sources[0][1] == written:
            continue
        uses: list[tuple[Ref, tuple[int, ...], str, tuple[tuple[dict[int, int], str], ...]]] = [
            (ref, read, "reads", ((writers, "writes"),)) for ref, read in sources
        ]
        if target is not None:
            for ref, read in sources:
                if read != written and not set(read).isdisjoint(written):
                    raise OverlapError(
                        f"rank {schedule.rank}, step {index}{how} writes memory that it also reads, as another chunk of "
                        f"{ref.buffer.value}",
                        rank=schedule.rank,
                        step=index,
                    )
            uses.append((target, written, "writes", ((writers, "writes"), (readers, "reads"))))
        for ref, used, verb, others in uses:
            for offset, cell in enumerate(used):
                for users, other_verb in others:
                    clash = users.get(cell, 0) & ~earlier
                    if clash:
                        raise OverlapError(
                            f"rank {schedule.rank}, step {index}{how} {verb} {ref.buffer.value} chunk {ref.chunk + offset}, "
                            f"which step {clash.bit_length() - 1} {other_verb}, and neither comes after the other",
                            rank=schedule.rank,
                            step=index,
                        )
        for _, read in sources:
            for cell in read:
                readers[cell] = readers.get(cell, 0) | 1 << index
        for cell in written:
            writers[cell] = writers.get(cell, 0) | 1 << index
    return {cell: mask.bit_length() - 1 for cell, mask in writers.items()}
