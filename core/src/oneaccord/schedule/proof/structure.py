"""The first part of the proof: every rank, step, chunk and buffer that a schedule names is there, and may be used so."""

from __future__ import annotations

from collections.abc import Sequence

from oneaccord.schedule.contracts import Contract, Piece
from oneaccord.schedule.errors import MalformedScheduleError
from oneaccord.schedule.proof.plain import check_plain
from oneaccord.schedule.steps import Buffer, Recv, RecvReduce, Ref, Schedule, Send, Step, reads_of, target_of

__all__ = ["Pieces", "check_structure", "name_of", "sizes"]

Pieces = dict[Buffer, tuple[Piece, ...]]


def name_of(ref: Ref) -> str:
    """Return a reference in words."""
    if ref.count == 1:
        return f"{ref.buffer.value} chunk {ref.chunk}"
    return f"{ref.buffer.value} chunks {ref.chunk} to {ref.chunk + ref.count - 1}"


def check_structure(schedules: Sequence[Schedule]) -> tuple[Contract, list[Pieces]]:
    """Check that schedules are those of all ranks of one collective, and that each can be read on its own.

    Parameters
    ----------
    schedules
        The schedules of ranks 0, 1, ... in this order.

    Returns
    -------
    tuple
        The contract, and for each rank the pieces that give the chunks of each buffer their sizes.

    Raises
    ------
    MalformedScheduleError
        They are not.
    """
    check_plain(schedules)
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        for name, found, expected in (
            ("rank", schedule.rank, rank),
            ("size", schedule.size, len(schedules)),
            ("collective", schedule.collective, first.collective),
            ("root", schedule.root, first.root),
            ("input_chunks", schedule.input_chunks, first.input_chunks),
            ("output_chunks", schedule.output_chunks, first.output_chunks),
            ("even", schedule.even, first.even),
        ):
            if found != expected:
                raise MalformedScheduleError(
                    f"the schedule at position {rank} has {name} {found}; expected {expected}", rank=rank
                )
    if not 0 <= first.root < first.size:
        raise MalformedScheduleError(f"the root is {first.root}, but the ranks are 0 to {first.size - 1}")
    contract = Contract.of(first)
    if first.root and not (contract.promise.input_on_root or contract.promise.output_on_root):
        raise MalformedScheduleError(f"the root is {first.root}; expected 0, because {first.collective.value} has no root")
    return contract, [_check_rank(contract, schedule) for schedule in schedules]


def _check_rank(contract: Contract, schedule: Schedule) -> Pieces:
    pieces: Pieces = {
        Buffer.INPUT: tuple(map(contract.extent, contract.input_pieces(schedule.rank))),
        Buffer.OUTPUT: tuple(map(contract.extent, contract.output_pieces(schedule.rank))),
    }
    for index, run in enumerate(schedule.scratch):
        if run.buffer is Buffer.SCRATCH or run.count < 1 or not 0 <= run.chunk <= len(pieces[run.buffer]) - run.count:
            raise MalformedScheduleError(
                f"rank {schedule.rank}, scratch run {index} is as large as {name_of(run)}; "
                "expected input or output chunks that are there",
                rank=schedule.rank,
            )
    pieces[Buffer.SCRATCH] = tuple(pieces[ref.buffer][ref.chunk] for ref in schedule.scratch_chunks)
    for index, step in enumerate(schedule.steps):
        problem = _problem(contract, schedule, index, step, pieces)
        if problem:
            raise MalformedScheduleError(f"rank {schedule.rank}, step {index}: {problem}", rank=schedule.rank, step=index)
    return pieces


def _problem(contract: Contract, schedule: Schedule, index: int, step: Step, pieces: Pieces) -> str | None:
    """Return what is wrong with a step, in words."""
    rank, size = schedule.rank, schedule.size
    for earlier in step.after:
        if not 0 <= earlier < index:
            return f"it comes after step {earlier}; expected one of the {index} steps before it"
    if len(set(step.after)) < len(step.after):
        return f"it names a step twice in after: {list(step.after)}"
    if isinstance(step, Send | Recv | RecvReduce) and not (0 <= step.peer < size and step.peer != rank):
        return f"its peer is rank {step.peer}; expected another rank of 0 to {size - 1}"
    held = {Buffer.INPUT: contract.holds_input(rank), Buffer.OUTPUT: contract.holds_output(rank), Buffer.SCRATCH: True}
    reads, target = reads_of(step), target_of(step)
    for ref in reads if target is None else (*reads, target):
        there = len(pieces[ref.buffer])
        if ref.count < 1 or not 0 <= ref.chunk <= there - ref.count:
            return f"it names {name_of(ref)}, but there are {there} {ref.buffer.value} chunks"
        if not held[ref.buffer]:
            return f"it names {name_of(ref)}, but this rank holds no {ref.buffer.value} in {contract.collective.value}"
    if target is None:
        return None
    if target.buffer is Buffer.INPUT:
        return f"it writes {name_of(target)}, but the input must never be written"
    for ref in reads:
        if sizes(pieces, ref) != sizes(pieces, target):
            return f"{name_of(ref)} and {name_of(target)} differ in size"
    return None


def sizes(pieces: Pieces, ref: Ref | None) -> tuple[Piece, ...]:
    """Return what gives each chunk of a reference its size; nothing for an empty message."""
    return () if ref is None else pieces[ref.buffer][ref.chunk : ref.chunk + ref.count]
