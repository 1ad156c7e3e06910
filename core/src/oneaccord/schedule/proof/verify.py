"""The proof, without any I/O, that a schedule keeps the promise of its collective.

`verify` takes the schedules of all ranks and raises at the first broken promise, with a counterexample in words. Three
parts come one after the other, because each needs the one before: the schedules name only what exists (`structure`), the steps
can run (`flow`), and the memory ends as promised (`memory`, and here). The last part runs all steps on symbolic values,
once with separate buffers and once in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oneaccord.schedule.contracts import Contract, Piece
from oneaccord.schedule.errors import (
    MalformedScheduleError,
    OrderError,
    OverlapError,
    ScheduleDeadlockError,
    ScheduleError,
    UndefinedReadError,
    UnmatchedMessageError,
    WrongResultError,
)
from oneaccord.schedule.proof.flow import Address, Flow, check_flow
from oneaccord.schedule.proof.memory import cells_of, check_overlaps, covered
from oneaccord.schedule.proof.structure import check_structure
from oneaccord.schedule.proof.terms import Term, Terms
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
    reads_of,
    target_of,
)

__all__ = [
    "MalformedScheduleError",
    "OrderError",
    "OverlapError",
    "Report",
    "ScheduleDeadlockError",
    "ScheduleError",
    "UndefinedReadError",
    "UnmatchedMessageError",
    "WrongResultError",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a proof.

    Attributes
    ----------
    ordered
        Whether the operands of every reduction, read from left to right, are those of rank 0, 1, ...: then it is enough
        that the reduction is associative. True for a collective that reduces nothing.
    canonical
        Whether every reduction is the one expression of `Terms.canonical`, or of `Terms.folded` if each rank gets the reduction of the
        ranks before it: then floating-point results have the same bits as
        those of every other canonical algorithm. True for a collective that reduces nothing.
    synchronising
        Whether no rank can finish before every rank has started, even if a transport buffers messages.
    steps
        The number of messages on the longest chain in which each waits for the one before.
    messages
        The number of messages that each rank sends.
    chunks
        The number of chunks that each rank sends.
    """

    ordered: bool
    canonical: bool
    synchronising: bool
    steps: int
    messages: tuple[int, ...]
    chunks: tuple[int, ...]


def verify(schedules: Sequence[Schedule], *, ordered: bool = False, canonical: bool = False) -> Report:
    """Prove that schedules keep the promise of their collective, in place and not in place.

    Parameters
    ----------
    schedules
        A list or tuple of the schedules of ranks 0, 1, ... in this order. Anything else is refused as malformed.
    ordered
        Whether operands must be combined in the order of ranks.
    canonical
        Whether they must be combined, and grouped, as every reproducible reduction does.

    Returns
    -------
    Report
        The cost, and which other properties hold.

    Raises
    ------
    MalformedScheduleError
        A schedule names memory that does not exist, writes ``INPUT``, reduces in a collective without a reduction, is not plain data of
        the declared types, or is too large to be proved.
    UnmatchedMessageError
        A send and its receive do not meet, or differ in size.
    ScheduleDeadlockError
        Ranks wait for each other forever.
    OverlapError
        Two unordered steps, or the two sides of one step, touch overlapping memory, and one writes it.
    UndefinedReadError
        A step reads output or scratch memory before it is written.
    WrongResultError
        An output chunk does not hold every contribution exactly once, or a barrier lets a rank pass early.
    OrderError
        Ranks of an all_reduce combine in different orders; or ranks of a scan combine in another order than that of ranks; or what a
        rank sends depends on whether it calls in place; or ``ordered`` or ``canonical`` is given and the order is another one.
    """
    contract, pieces = check_structure(schedules)
    flow = check_flow(schedules, pieces)
    if contract.collective is Collective.BARRIER and not flow.synchronising:
        raise WrongResultError(f"a rank can leave the barrier of {contract.size} ranks before every rank has entered it")
    terms = Terms()
    apart = _Run(contract, schedules, terms, in_place=False)
    apart.execute(flow)
    disorder, deviation = apart.check_result()
    if any(contract.aliases(rank) for rank in range(contract.size)):
        in_place = _Run(contract, schedules, terms, in_place=True)
        in_place.execute(flow)
        in_place.check_result()
        _check_same(apart, in_place)
    _check_reductions(contract, schedules)
    if ordered and disorder is not None:
        raise OrderError(f"{disorder}, and the order of ranks is expected")
    if canonical and deviation is not None:
        raise OrderError(f"{deviation}, as in every reproducible reduction")
    sends = [[step for step in schedule.steps if isinstance(step, Send)] for schedule in schedules]
    return Report(
        ordered=disorder is None,
        canonical=deviation is None,
        synchronising=flow.synchronising,
        steps=flow.rounds,
        messages=tuple(len(steps) for steps in sends),
        chunks=tuple(sum(step.source.count for step in steps if step.source is not None) for steps in sends),
    )


class _Run:
    """One symbolic run of all ranks. A *cell* is a chunk of memory that no other cell overlaps."""

    def __init__(self, contract: Contract, schedules: Sequence[Schedule], terms: Terms, *, in_place: bool) -> None:
        self.contract = contract
        self.schedules = schedules
        self.terms = terms
        self.how = " in place" if in_place else ""
        self.cells = [cells_of(contract, schedule, in_place=in_place) for schedule in schedules]
        self.values: list[list[Term | None]] = []
        self.writers: list[dict[int, int]] = []
        self.messages: dict[Address, tuple[Term, ...]] = {}
        for schedule, cells in zip(schedules, self.cells, strict=True):
            values: list[Term | None] = [None] * (max((max(part, default=-1) for part in cells.values()), default=-1) + 1)
            if contract.holds_input(schedule.rank):
                for cell, piece in zip(cells[Buffer.INPUT], contract.input_pieces(schedule.rank), strict=True):
                    values[cell] = terms.leaf(schedule.rank, piece if contract.even else ())
            self.values.append(values)
            self.writers.append(check_overlaps(schedule, cells, self.how))

    def execute(self, flow: Flow) -> None:
        """Run every step. Any order that keeps to ``after`` gives the same, since no two unordered steps overlap."""
        for (rank, index), receive in flow.events:
            step = self.schedules[rank].steps[index]
            operands = [self._read(rank, index, ref) for ref in reads_of(step)]
            if receive is not None:
                incoming = operands[0] if operands else ()
                self.messages[rank, index] = incoming
                self._receive(*receive, incoming)
            elif isinstance(step, Copy):
                self._write(rank, step.target, operands[0])
            else:
                combined = tuple(map(self.terms.combine, operands[0], operands[1]))
                self._write(rank, target_of(step), combined)

    def check_result(self) -> tuple[str | None, str | None]:
        """Check every output chunk; return words for operands that are not in the order of ranks, or not grouped canonically."""
        disorder: str | None = None
        deviation: str | None = None
        for rank in filter(self.contract.holds_output, range(self.contract.size)):
            for chunk, piece in enumerate(self.contract.output_pieces(rank)):
                term = self._check_chunk(rank, chunk, piece)
                if self.contract.collective is Collective.ALL_REDUCE and term is not self.output(0, chunk):
                    raise OrderError(
                        f"{self._place(rank, chunk)} is {term}, and on rank 0 it is {self.output(0, chunk)}: "
                        "the results of two ranks would differ in their last bits",
                        rank=rank,
                        step=self.writers[rank].get(self.cells[rank][Buffer.OUTPUT][chunk]),
                    )
                promise = self.contract.promise
                if not promise.reduces:
                    continue
                if not term.in_order and promise.behind is not None:
                    raise OrderError(
                        f"{self._place(rank, chunk)} is {term}, and a {self.contract.collective.value} combines in the order of ranks",
                        rank=rank,
                        step=self.writers[rank].get(self.cells[rank][Buffer.OUTPUT][chunk]),
                    )
                if disorder is None and not term.in_order:
                    disorder = f"{self._place(rank, chunk)} is {term}"
                if deviation is None:
                    expected = (
                        self.terms.canonical(self.contract.size, term.piece or ())
                        if promise.behind is None
                        else self.terms.folded(rank + 1 - promise.behind)
                    )
                    if term is not expected:
                        deviation = f"{self._place(rank, chunk)} is {term}; expected {expected}"
        return disorder, deviation

    def output(self, rank: int, chunk: int) -> Term | None:
        """Return what an output chunk holds."""
        return self.values[rank][self.cells[rank][Buffer.OUTPUT][chunk]]

    def _receive(self, rank: int, index: int, incoming: tuple[Term, ...]) -> None:
        step = self.schedules[rank].steps[index]
        if isinstance(step, RecvReduce):
            operand = self._read(rank, index, step.operand)
            left, right = (incoming, operand) if step.incoming_first else (operand, incoming)
            incoming = tuple(map(self.terms.combine, left, right))
        if isinstance(step, Recv | RecvReduce) and step.target is not None:
            self._write(rank, step.target, incoming)

    def _read(self, rank: int, index: int, ref: Ref) -> tuple[Term, ...]:
        found = []
        for chunk in range(ref.chunk, ref.chunk + ref.count):
            term = self.values[rank][self.cells[rank][ref.buffer][chunk]]
            if term is None:
                raise UndefinedReadError(
                    f"rank {rank}, step {index}{self.how} reads {ref.buffer.value} chunk {chunk}, "
                    "which no step has written before",
                    rank=rank,
                    step=index,
                )
            found.append(term)
        return tuple(found)

    def _write(self, rank: int, ref: Ref | None, terms: tuple[Term, ...]) -> None:
        assert ref is not None
        for cell, term in zip(covered(self.cells[rank], ref), terms, strict=True):
            self.values[rank][cell] = term

    def _check_chunk(self, rank: int, chunk: int, piece: Piece) -> Term:
        expected = self.contract.contributors(piece, rank)
        term = self.output(rank, chunk)
        if term is None:
            found = "nothing"
        elif term.once and term.ranks == (1 << expected.stop) - (1 << expected.start):
            if not self.contract.even or term.piece == piece:
                return term
            found = f"piece {term.piece}" if term.piece else "values of different pieces, combined"
            raise WrongResultError(
                f"{self._place(rank, chunk)} holds {found}; expected piece {piece}",
                rank=rank,
                step=self.writers[rank].get(self.cells[rank][Buffer.OUTPUT][chunk]),
            )
        else:
            counts = term.counts()
            wrong = [(other, counts[other]) for other in range(self.contract.size) if counts[other] != (other in expected)]
            found = "contributions " + ", ".join(f"of rank {other} {_often(count)} times" for other, count in wrong[:8])
        wanted = f"of rank {expected[0]} alone" if len(expected) == 1 else f"of every rank 0 to {expected[-1]} once"
        raise WrongResultError(
            f"{self._place(rank, chunk)} holds {found}; expected the contribution {wanted}",
            rank=rank,
            step=self.writers[rank].get(self.cells[rank][Buffer.OUTPUT][chunk]),
        )

    def _place(self, rank: int, chunk: int) -> str:
        writer = self.writers[rank].get(self.cells[rank][Buffer.OUTPUT][chunk])
        by = "which no step writes" if writer is None else f"last written by step {writer}"
        return f"rank {rank}, output chunk {chunk}{self.how} ({by})"


def _often(count: int) -> str:
    # Doubled by every step, a number gets too long for words.
    return str(count) if count < 1_000_000 else "over a million"


def _check_reductions(contract: Contract, schedules: Sequence[Schedule]) -> None:
    """Check that only a collective with a reduction reduces: in another one there is nothing to combine two operands with."""
    if contract.promise.reduces:
        return
    for schedule in schedules:
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Reduce | RecvReduce):
                raise MalformedScheduleError(
                    f"rank {schedule.rank}, step {index}: it reduces, but {contract.collective.value} has no reduction",
                    rank=schedule.rank,
                    step=index,
                )


def _check_same(apart: _Run, in_place: _Run) -> None:
    """Check that no message depends on whether its sender calls in place: ranks may differ in this, and their bits may not.

    If both cases have the same messages and are right, they have the same result: a rank's input occurs in it once, so
    its memory still held the input, and nothing else, when it was read.
    """
    for (rank, index), terms in apart.messages.items():
        others = in_place.messages[rank, index]
        if terms != others:
            shown, in_place_shown = (", ".join(map(str, some[:4])) for some in (terms, others))
            raise OrderError(
                f"rank {rank}, step {index} sends {in_place_shown} in place, and {shown} when the buffers are separate; "
                "expected the same in both cases",
                rank=rank,
                step=index,
            )
