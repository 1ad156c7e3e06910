"""An array of which each rank holds some pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from manyhands.errors import DTypeError, SizeMismatchError
from manyhands_parallel.arrays import Array, dtype_of, shape_of
from manyhands_parallel.boxes import Box, boxes_of_range, whole

__all__ = ["Distributed", "ShardedArray"]


class ShardedArray:
    """An array that is divided among ranks: this rank's pieces, and where they belong. A leaf of trees, for checkpoints.

    Parameters
    ----------
    shape
        The shape of the whole array.
    pieces
        For each piece the index of its first element in the whole array, and its array: views of what the program works on, of one dtype
        and library. A rank may have none; then give ``dtype``. Several ranks may hold the same elements.
    dtype
        The dtype, by name. By default that of the pieces.

    Attributes
    ----------
    shape
        The shape of the whole array.
    dtype
        The dtype, by name.
    pieces
        A box and an array for each piece.

    Raises
    ------
    SizeMismatchError
        A piece does not lie within the array.
    DTypeError
        The pieces have several dtypes, or there are none and ``dtype`` is not given.
    """

    def __init__(self, shape: Sequence[int], pieces: Iterable[tuple[Sequence[int], Array]], dtype: str | None = None) -> None:
        self.shape: tuple[int, ...] = tuple(int(extent) for extent in shape)
        self.pieces: tuple[tuple[Box, Array], ...] = tuple(
            (Box(tuple(offset), shape_of(array)), array) for offset, array in pieces
        )
        dtypes = {dtype_of(array) for _, array in self.pieces} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            raise DTypeError(
                f"the pieces of a sharded array must have one dtype, and have {sorted(dtypes) or 'none'}; give dtype="
            )
        self.dtype: str = dtypes.pop()
        for box, _ in self.pieces:
            inside = len(box.offset) == len(box.shape) == len(self.shape) and (
                box.size == 0 or (min(box.offset, default=0) >= 0 and box.intersection(whole(self.shape)) == box)
            )
            if not inside:
                raise SizeMismatchError(
                    f"a piece of shape {box.shape} at {box.offset} does not lie within the shape {self.shape}"
                )

    @classmethod
    def of_range(cls, shape: Sequence[int], start: int, flat: Array) -> ShardedArray:
        """Return the array of which ``flat`` holds the elements from ``start`` on, in C order, as views of ``flat``.

        Parameters
        ----------
        shape
            The shape of the whole array.
        start
            The number of the first element.
        flat
            The elements, shape ``(n,)``.

        Raises
        ------
        SizeMismatchError
            They are more than the array has from there on.
        """
        shape = tuple(shape)
        pieces: list[tuple[tuple[int, ...], Any]] = []
        done = 0
        for box in boxes_of_range(shape, start, start + shape_of(flat)[0]):
            pieces.append((box.offset, flat[done : done + box.size].reshape(box.shape)))
            done += box.size
        return cls(shape, pieces, dtype_of(flat))

    def __repr__(self) -> str:
        places = ", ".join(f"{box.shape} at {box.offset}" for box, _ in self.pieces)
        return f"ShardedArray({self.shape}, {self.dtype}, [{places}])"


@runtime_checkable
class Distributed(Protocol):
    """What may stand in a tree where a `ShardedArray` may: an object that has one, and that can be made anew of one like it."""

    def sharded_array(self) -> ShardedArray:
        """Return this rank's pieces, as views of what the object holds."""
        ...

    def with_sharded_array(self, array: ShardedArray) -> Self:
        """Return an object like this one that holds the pieces of ``array``, which lie where those of `sharded_array` do."""
        ...
