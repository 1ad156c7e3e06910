"""The measured calls: each rank's input, its expected result, and the check of the result.

Values are small whole numbers, so that every reduction is exact in every dtype and every order. They repeat with a prime period,
begin at another one on each rank, and differ enough that a block in the wrong place is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from oneaccord.errors import DTypeError
from oneaccord.group.group import Group
from oneaccord_lab.bench.plan import PINGPONG, SENDRECV

__all__ = ["Arrays", "Case", "Maker", "parse_dtype"]

Array = npt.NDArray[Any]
Period = npt.NDArray[np.int64]
Maker = Callable[[int, np.dtype[Any]], Array]
"""Makes an array: ``make(length, dtype)``."""

_PERIOD: Final[int] = 1021
_BLOCK: Final[int] = _PERIOD * 256
_SHIFT: Final[int] = 37
_GREATEST: Final[int] = 251
_DOUBLING_RANKS: Final[int] = 3
_POISON: Final[int] = 0xA5
_WORDS: Final[frozenset[int]] = frozenset({1, 2, 4, 8})
_COMBINE: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, also of those that ml_dtypes adds.

    Raises
    ------
    DTypeError
        There is no such dtype.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found = getattr(ml_dtypes, name, None)
        if isinstance(found, type):
            return np.dtype(found)
    raise DTypeError(f"there is no dtype {name!r}: give one such as float32, float64, float16, bfloat16 or int32")


@dataclass(frozen=True, slots=True)
class Arrays:
    """The input and output of one rank's call; one array if a call works in place."""

    given: Array | None
    result: Array | None


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call on one rank.

    Attributes
    ----------
    benchmark
        A name of `BENCHMARKS`.
    rank, world_size
        The rank that makes the call.
    nbytes
        Its size, as by `round_size`.
    dtype, op
        Of the arrays, and the reduction.
    """

    benchmark: str
    rank: int
    world_size: int
    nbytes: int
    dtype: np.dtype[Any]
    op: str = "sum"

    @property
    def elements(self) -> int:
        """How many elements ``nbytes`` are."""
        return self.nbytes // self.dtype.itemsize

    @property
    def _block(self) -> int:
        return self.elements // self.world_size

    def _lengths(self) -> tuple[int | None, int | None]:
        """Return the number of elements of this rank's input and output; None if it has none."""
        whole, block, root = self.elements, self._block, self.rank == 0
        return {
            "all_reduce": (whole, whole),
            "reduce": (whole, whole if root else None),
            "all_gather": (block, whole),
            "gather": (block, whole if root else None),
            "scatter": (whole if root else None, block),
            "reduce_scatter": (whole, block),
            "all_to_all": (whole, whole),
            "scan": (whole, whole),
            "exscan": (whole, whole),
            SENDRECV: (whole, whole),
            PINGPONG: (whole, whole),
        }.get(self.benchmark, (None, None))

    @property
    def in_place(self) -> bool:
        """Whether the result replaces the input, as programs usually do it with broadcast."""
        return self.benchmark == "broadcast"

    def arrays(self, make: Maker) -> Arrays:
        """Return this rank's arrays, made by ``make(length, dtype)``, filled and so touched."""
        if self.in_place:
            both = make(self.elements, self.dtype)
            _spread(both, self._values(self.rank), 0)
            return Arrays(both, both)
        given, result = (None if length is None else make(length, self.dtype) for length in self._lengths())
        if given is not None:
            _spread(given, self._values(self.rank), 0)
        arrays = Arrays(given, result)
        self.spoil(arrays)
        return arrays

    def call(self, group: Group, arrays: Arrays) -> Callable[[], object]:
        """Return a function that makes the call once."""
        given: Any = arrays.given
        out = arrays.result
        match self.benchmark:
            case "barrier":
                return group.barrier
            case "all_reduce" | "reduce_scatter" | "scan" | "exscan":
                return partial(getattr(group, self.benchmark), given, self.op, out=out)
            case "reduce":
                return partial(group.reduce, given, self.op, 0, out=out)
            case "broadcast" | "gather" | "scatter":
                return partial(getattr(group, self.benchmark), given, 0, out=out)
            case "all_gather" | "all_to_all":
                return partial(getattr(group, self.benchmark), given, out=out)
            case "sendrecv":
                after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
                return partial(group.sendrecv, given, after, before, out=out)
            case _:
                return self._round_trip(group, given, out)

    def _round_trip(self, group: Group, given: Array, out: Array | None) -> Callable[[], object]:
        send, recv = group.send, group.recv

        def ping() -> None:
            send(given, 1)
            recv(1, out=out)

        def pong() -> None:
            recv(0, out=out)
            send(given, 0)

        return (ping, pong, lambda: None)[min(self.rank, 2)]

    def spoil(self, arrays: Arrays) -> None:
        """Overwrite the result of the call before."""
        if arrays.result is not None and not (self.in_place and self.rank == 0):
            arrays.result.view(np.uint8).fill(_POISON)

    def fault(self, arrays: Arrays) -> str:
        """Return how the result of the last call differs from the expected one; empty if it does not."""
        parts, result = self._expected(), arrays.result
        if result is None or not parts:
            return ""
        length = result.size // len(parts)
        right = np.empty(min(length, _BLOCK), self.dtype)
        wrong, said = 0, ""
        for number, (period, offset) in enumerate(parts):
            _spread(right, period, offset)
            for start in range(number * length, (number + 1) * length, _BLOCK):
                piece = result[start : min(start + _BLOCK, (number + 1) * length)]
                different = np.flatnonzero(_words(piece) != _words(right[: piece.size]))
                if different.size and not said:
                    at = int(different[0])
                    said = f"element {start + at} is {piece[at]}; expected {right[at]}"
                wrong += different.size
        return f"{said}; {wrong} of {result.size} elements are wrong" if said else ""

    def _expected(self) -> list[tuple[Period, int]]:
        """Return the parts of the result: parts of one length, each with the values that it repeats and its first one among them."""
        own = self.rank * self._block
        match self.benchmark:
            case "all_reduce" | "reduce":
                return [(self._combined(), 0)]
            case "reduce_scatter":
                return [(self._combined(), own)]
            case "scan":
                return [(self._combined(self.rank + 1), 0)]
            case "exscan" if self.rank:
                return [(self._combined(self.rank), 0)]
            case "broadcast":
                return [(self._values(0), 0)]
            case "scatter":
                return [(self._values(0), own)]
            case "all_gather" | "gather":
                return [(self._values(rank), 0) for rank in range(self.world_size)]
            case "all_to_all":
                return [(self._values(rank), own) for rank in range(self.world_size)]
            case "sendrecv":
                return [(self._values((self.rank - 1) % self.world_size), 0)]
            case "pingpong" if self.rank < 2:
                return [(self._values(1 - self.rank), 0)]
            case _:
                return []

    def _values(self, rank: int) -> Period:
        """Return the values that a rank's input repeats."""
        if self.op == "product":
            greatest = 2 if rank < _DOUBLING_RANKS else 1
            numbers = _numbers(1, greatest)
        elif self.op == "mean":
            # Multiples of the world size, so that the mean is whole; if none of them is exact, all the same number.
            n = self.world_size
            numbers = n * _numbers(1, self._greatest(n * n)) if n * n <= _limit(self.dtype) else _numbers(1, 1)
        elif self.dtype.kind == "b":
            numbers = _numbers(0, 1)
        else:
            numbers = _numbers(1, self._greatest(self.world_size if self.op == "sum" else 1))
        return np.roll(numbers, -_SHIFT * rank)

    def _greatest(self, terms: int) -> int:
        return max(1, min(_GREATEST, _limit(self.dtype) // terms))

    def _combined(self, ranks: int | None = None) -> Period:
        """Return the total of the first ``ranks`` ranks, by default of all."""
        combine = _COMBINE[self.op]
        total = np.array(combine.reduce([self._values(rank) for rank in range(ranks or self.world_size)]), np.int64)
        return total // self.world_size if self.op == "mean" else total


def _numbers(least: int, greatest: int) -> Period:
    """Return a period of numbers in no order that a mistake could have; the same ones each time."""
    return np.random.default_rng(0).integers(least, greatest, _PERIOD, np.int64, endpoint=True)


def _spread(target: Array, period: Period, offset: int) -> None:
    """Fill an array with values that repeat, from number ``offset`` on."""
    block = np.resize(np.roll(period, -(offset % _PERIOD)), min(target.size, _BLOCK)).astype(target.dtype)
    for start in range(0, target.size, _BLOCK):
        piece = target[start : start + _BLOCK]
        piece[...] = block[: piece.size]


def _words(array: Array) -> Array:
    """Return the array as numbers that NumPy compares quickly; 16-bit floats are none."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize in _WORDS else array


def _limit(dtype: np.dtype[Any]) -> int:
    """Return the number up to which a dtype holds every whole number."""
    if dtype.kind == "b":
        return 1
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    if issubclass(dtype.type, np.inexact):
        return int(2 ** (np.finfo(dtype).nmant + 1))
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    return int(2 ** (finfo(dtype).nmant + 1))
