"""An array of which each rank holds some pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.arrays import Array, dtype_of, shape_of
from oneaccord_parallel.boxes import Box, boxes_of_range, whole

__all__ = ["Distributed", "Inert", "PerRank", "ShardedArray"]


class Inert:
    """An object that looks like an array but is not one: functions of NumPy and torch, comparisons and truth values raise an error."""

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise self._refusal("an array of NumPy cannot be made of it")

    def __array_ufunc__(self, ufunc: Any, method: str, *_: Any, **__: Any) -> NoReturn:
        raise self._refusal(f"np.{ufunc.__name__} does not take it")

    def __array_function__(self, func: Any, *_: Any) -> NoReturn:
        raise self._refusal(f"np.{func.__name__} does not take it")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"torch.{getattr(func, '__name__', func)} does not take a {cls.__name__}, which is divided among ranks. {cls._advice}"
        )

    def __eq__(self, other: object) -> bool:
        raise self._refusal("== and != do not compare it; `is` checks whether two are one object")

    def __bool__(self) -> bool:
        raise self._refusal("it is neither true nor false; write `is not None`")

    def __hash__(self) -> int:
        return id(self)

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"{self!r} is divided among ranks: {reason}. {self._advice}")

    _advice: str = ""


class ShardedArray(Inert):
    """An array that is divided among ranks: this rank's pieces, and their places. A leaf of trees, for checkpoints.

    Parameters
    ----------
    shape
        The shape of the whole array.
    pieces
        For each piece the index of its first element in the whole array, and its array: views of the program's arrays, of one dtype
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

    _advice = "Compute with the arrays of its pieces"

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


class PerRank:
    """A value that each rank has for itself, such as the state of its random numbers: a leaf of trees, for checkpoints.

    >>> rng = np.random.default_rng(group.rank)
    >>> state = {"params": params, "rng": mp.PerRank(rng.bit_generator.state)}
    >>> mp.save(state, "ckpt/100", group)
    >>> state = mp.load("ckpt/100", like=state, group=group)  # on as many ranks
    >>> rng.bit_generator.state = state["rng"].value

    Each rank saves its value, and gets it back; trees, shapes and dtypes may differ between the ranks. In the checkpoint the names have the number
    of the rank in them: ``"rng.0.state.inc"``.

    Parameters
    ----------
    value
        An array, a bool, int, float, complex, str or bytes, or a tree of these.

    Attributes
    ----------
    value
        The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r:.80})"


@runtime_checkable
class Distributed(Protocol):
    """An object that a tree may hold in place of a `ShardedArray`: it has one, and another like it can be made of one."""

    def sharded_array(self) -> ShardedArray:
        """Return this rank's pieces, as views of the object's memory."""
        ...

    def with_sharded_array(self, array: ShardedArray) -> Self:
        """Return an object like this one that holds the pieces of ``array``, at the same places as those of `sharded_array`."""
        ...
