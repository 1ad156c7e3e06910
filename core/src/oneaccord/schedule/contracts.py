"""The promise of each collective, symbolically: the pieces that are there at the start, and those that must be there at the end.

A *piece* names a part of the data alike on every rank, as a tuple; chunks that hold the same piece have the same size.
If a schedule needs even blocks, pieces with the same last number have the same size as well.

======================  =========================  ==========================================================
layout                  pieces                     used for
======================  =========================  ==========================================================
``VECTOR``              ``(chunk,)``               all_reduce, reduce, broadcast, scan, exscan
``OWN_BLOCK``           ``(rank, segment)``        the input of all_gather and gather, the output of scatter
                                                   and reduce_scatter
``EVERY_BLOCK``         ``(owner, segment)``       the other side of each of those
``TO_EACH``             ``(rank, to, segment)``    the input of all_to_all
``FROM_EACH``           ``(from, rank, segment)``  the output of all_to_all
``NOTHING``             none                       barrier
======================  =========================  ==========================================================

A vector has as many chunks as the algorithm likes; every block has the same number of segments. Chunks and blocks may
be of different sizes, and empty.
"""

from __future__ import annotations

import enum

import msgspec

from oneaccord.schedule.errors import MalformedScheduleError
from oneaccord.schedule.steps import Collective, Schedule

__all__ = ["PROMISES", "Contract", "Layout", "Piece", "Promise"]

Piece = tuple[int, ...]


class Layout(enum.Enum):
    """How a buffer is divided into chunks."""

    NOTHING = "nothing"
    VECTOR = "the whole vector"
    OWN_BLOCK = "the block of this rank"
    EVERY_BLOCK = "one block of every rank"
    TO_EACH = "one block for every rank"
    FROM_EACH = "one block from every rank"


class Promise(msgspec.Struct, frozen=True):
    """One row of `PROMISES`: the input and the output of a collective, for any world.

    Attributes
    ----------
    input, output
        The layouts of the two buffers.
    input_on_root, output_on_root
        Whether only the root holds that buffer.
    reduces
        Whether an output chunk combines the input of every rank, or of the first ones; otherwise it is a copy of one rank's input.
    behind
        If set, rank r gets only the input of ranks 0 to r - ``behind``, in their order: 0 with its own, 1 without. A rank that
        would get nothing holds no output.
    """

    input: Layout
    output: Layout
    input_on_root: bool = False
    output_on_root: bool = False
    reduces: bool = False
    behind: int | None = None


PROMISES: dict[Collective, Promise] = {
    Collective.ALL_REDUCE: Promise(Layout.VECTOR, Layout.VECTOR, reduces=True),
    Collective.REDUCE: Promise(Layout.VECTOR, Layout.VECTOR, output_on_root=True, reduces=True),
    Collective.BROADCAST: Promise(Layout.VECTOR, Layout.VECTOR, input_on_root=True),
    Collective.ALL_GATHER: Promise(Layout.OWN_BLOCK, Layout.EVERY_BLOCK),
    Collective.GATHER: Promise(Layout.OWN_BLOCK, Layout.EVERY_BLOCK, output_on_root=True),
    Collective.SCATTER: Promise(Layout.EVERY_BLOCK, Layout.OWN_BLOCK, input_on_root=True),
    Collective.REDUCE_SCATTER: Promise(Layout.EVERY_BLOCK, Layout.OWN_BLOCK, reduces=True),
    Collective.ALL_TO_ALL: Promise(Layout.TO_EACH, Layout.FROM_EACH),
    Collective.SCAN: Promise(Layout.VECTOR, Layout.VECTOR, reduces=True, behind=0),
    Collective.EXSCAN: Promise(Layout.VECTOR, Layout.VECTOR, reduces=True, behind=1),
    Collective.BARRIER: Promise(Layout.NOTHING, Layout.NOTHING),
}
"""The promise of each collective."""


class Contract(msgspec.Struct, frozen=True):
    """The promise of a collective in one world.

    Attributes
    ----------
    collective, size, root
        The collective, the number of ranks and the root, 0 if there is none.
    segments
        The number of chunks of a vector or of each block; 0 for a barrier.
    even
        Whether the blocks of all ranks have one size.
    """

    collective: Collective
    size: int
    root: int
    segments: int
    even: bool = False

    @classmethod
    def of(cls, schedule: Schedule) -> Contract:
        """Return the contract that a schedule's chunks are those of.

        Raises
        ------
        MalformedScheduleError
            Its numbers of chunks fit no number of segments.
        """
        promise = PROMISES[schedule.collective]
        given = (schedule.input_chunks, schedule.output_chunks)
        # An own block has as many chunks as it has segments, and so has a vector; else the input has one block per rank.
        segments = max(0, given[1] if promise.output is Layout.OWN_BLOCK else given[0])
        if promise.input is Layout.TO_EACH:
            segments //= schedule.size
        contract = cls(schedule.collective, schedule.size, schedule.root, segments, schedule.even)
        lowest = 0 if schedule.collective is Collective.BARRIER else 1
        if segments < lowest or given != (contract.input_chunks, contract.output_chunks):
            raise MalformedScheduleError(
                f"{schedule.collective.value} of {schedule.size} ranks: rank {schedule.rank} declares {given[0]} input chunks "
                f"and {given[1]} output chunks; expected {_chunks(promise.input)} and {_chunks(promise.output)}",
                rank=schedule.rank,
            )
        return contract

    @property
    def promise(self) -> Promise:
        """The row of `PROMISES` of this collective."""
        return PROMISES[self.collective]

    @property
    def input_chunks(self) -> int:
        """The number of chunks of ``INPUT``."""
        return self._count(self.promise.input)

    @property
    def output_chunks(self) -> int:
        """The number of chunks of ``OUTPUT``."""
        return self._count(self.promise.output)

    def input_pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the piece in each input chunk of a rank, whether or not it holds the buffer."""
        return self._pieces(self.promise.input, rank)

    def output_pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the piece that each output chunk of a rank must end with, whether or not it holds the buffer."""
        return self._pieces(self.promise.output, rank)

    def extent(self, piece: Piece) -> Piece:
        """Return a value for the size of a piece: two pieces have one size if it is the same."""
        return piece[-1:] if self.even else piece

    def holds_input(self, rank: int) -> bool:
        """Return whether a rank holds ``INPUT``."""
        return self.promise.input is not Layout.NOTHING and (not self.promise.input_on_root or rank == self.root)

    def holds_output(self, rank: int) -> bool:
        """Return whether a rank holds ``OUTPUT``."""
        promise = self.promise
        return promise.output is not Layout.NOTHING and (
            rank == self.root if promise.output_on_root else promise.behind is None or rank >= promise.behind
        )

    def contributors(self, piece: Piece, rank: int) -> range:
        """Return the ranks whose input an output chunk of ``rank`` with that piece must hold, each exactly once."""
        if self.promise.reduces:
            return range(self.size if self.promise.behind is None else rank + 1 - self.promise.behind)
        source = self.root if self.promise.input_on_root else piece[0]
        return range(source, source + 1)

    def aliases(self, rank: int) -> dict[int, int]:
        """Return the input chunks that an in-place call shares with the output, each with its output chunk."""
        if not (self.holds_input(rank) and self.holds_output(rank)):
            return {}
        own = range(rank * self.segments, (rank + 1) * self.segments)
        match self.promise.input, self.promise.output:
            case Layout.VECTOR, Layout.VECTOR:
                return {chunk: chunk for chunk in range(self.segments)}
            case Layout.OWN_BLOCK, Layout.EVERY_BLOCK:
                return dict(enumerate(own))
            case Layout.EVERY_BLOCK, Layout.OWN_BLOCK:
                return {chunk: segment for segment, chunk in enumerate(own)}
            case _:
                return {}

    def _count(self, layout: Layout) -> int:
        match layout:
            case Layout.NOTHING:
                return 0
            case Layout.VECTOR | Layout.OWN_BLOCK:
                return self.segments
            case _:
                return self.size * self.segments

    def _pieces(self, layout: Layout, rank: int) -> tuple[Piece, ...]:
        segments, ranks = range(self.segments), range(self.size)
        match layout:
            case Layout.NOTHING:
                return ()
            case Layout.VECTOR:
                return tuple((segment,) for segment in segments)
            case Layout.OWN_BLOCK:
                return tuple((rank, segment) for segment in segments)
            case Layout.EVERY_BLOCK:
                return tuple((owner, segment) for owner in ranks for segment in segments)
            case Layout.TO_EACH:
                return tuple((rank, to, segment) for to in ranks for segment in segments)
            case Layout.FROM_EACH:
                return tuple((source, rank, segment) for source in ranks for segment in segments)


def _chunks(layout: Layout) -> str:
    if layout is Layout.NOTHING:
        return "0"
    return "k" if layout in (Layout.VECTOR, Layout.OWN_BLOCK) else "size * k"
