"""Which steps of a rank use which memory, so that one that comes later can wait for exactly those."""

from __future__ import annotations

from bisect import bisect_left

from oneaccord.schedule.contracts import Contract, Layout
from oneaccord.schedule.steps import Buffer, Ref

__all__ = ["Footprint"]


class Footprint:
    """The last step that wrote each chunk, and the steps that have read it since.

    Input chunks that are the same memory as output chunks in an in-place call count as the same memory always. The time of a
    call grows with the number of ranges that were used differently, not with that of chunks.

    Parameters
    ----------
    contract, rank
        They determine which chunks are the same memory.
    """

    __slots__ = ("_edges", "_offsets", "_readers", "_writers")

    def __init__(self, contract: Contract, rank: int) -> None:
        promise, own = contract.promise, rank * contract.segments
        inputs = outputs = 0
        # `Contract.aliases` as two numbers: where the chunks of each buffer begin in one row of chunks.
        match promise.input, promise.output:
            case Layout.OWN_BLOCK, Layout.EVERY_BLOCK:
                inputs = own
            case Layout.EVERY_BLOCK, Layout.OWN_BLOCK:
                outputs = own
            case Layout.TO_EACH, Layout.FROM_EACH:
                outputs = contract.input_chunks
            case _:
                pass
        scratch = contract.input_chunks + contract.output_chunks
        self._offsets = {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs, Buffer.SCRATCH: scratch}
        # Range i goes from edge i to edge i + 1.
        self._edges: list[int] = [0]
        self._writers: list[tuple[int, ...]] = [()]
        self._readers: list[tuple[int, ...]] = [()]

    def use(self, index: int, reads: tuple[Ref, ...], target: Ref | None) -> set[int]:
        """Note that a step uses memory, and return the steps before it that it must wait for.

        Parameters
        ----------
        index
            The index of the step, larger than those before.
        reads, target
            The memory that the step reads and writes.
        """
        earlier: set[int] = set()
        for ref in reads:
            for part in self._ranges(ref):
                earlier.update(self._writers[part])
                self._readers[part] += (index,)
        if target is not None:
            for part in self._ranges(target):
                # A reader comes after the writer before it.
                earlier.update(self._readers[part] or self._writers[part])
                self._writers[part] = (index,)
                self._readers[part] = ()
        earlier.discard(index)
        return earlier

    def _ranges(self, ref: Ref) -> range:
        start = self._offsets[ref.buffer] + ref.chunk
        first = self._cut(start)
        return range(first, self._cut(start + ref.count))

    def _cut(self, edge: int) -> int:
        """Return the range that begins at an edge; make it if there is none."""
        place = bisect_left(self._edges, edge)
        if place == len(self._edges) or self._edges[place] != edge:
            self._edges.insert(place, edge)
            self._writers.insert(place, self._writers[place - 1])
            self._readers.insert(place, self._readers[place - 1])
        return place
