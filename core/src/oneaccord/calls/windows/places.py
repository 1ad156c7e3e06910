"""Elements of a window: which of them a call means, whether two calls mean a common one, and what a call does to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oneaccord.arrays.dtypes import OP_NAMES, resolve_op
from oneaccord.arrays.memory import Array, quiet
from oneaccord.common.checks import whole
from oneaccord.errors import DTypeError, SizeMismatchError, UsageError

__all__ = ["REPLACE", "Place", "changer", "elements", "locate", "op_number", "swapped"]

REPLACE = "replace"
"""The op that is none: the new value takes the place of the old one."""
_OPS = (*OP_NAMES, REPLACE)
_INT64 = np.dtype(np.int64)
Changer = Callable[[Array, Array], Array]


class Place(NamedTuple):
    """Elements of a flat window: ``size`` of them from ``start`` on, each ``step`` after the one before."""

    start: int
    step: int
    size: int

    def of(self, flat: Array) -> Array:
        """Return a view of the elements."""
        if not self.size:
            return flat[:0]
        stop = self.start + self.step * self.size
        return flat[self.start : stop if stop >= 0 else None : self.step]

    def part(self, first: int, count: int) -> Place:
        """Return ``count`` of the elements, from the one with the number ``first`` on."""
        return Place(self.start + self.step * first, self.step, count)

    def some(self, most: int) -> list[int]:
        """Return the numbers of the elements, ``most`` at most."""
        return [self.start + self.step * index for index in range(min(self.size, most))]

    def meets(self, other: Place) -> bool:
        """Return whether the two have an element in common."""
        if not self.size or not other.size:
            return False
        low, high, step = self._upwards()
        first, last, stride = other._upwards()
        bottom, top = max(low, first), min(high, last)
        common = math.gcd(step, stride)
        if bottom > top or (first - low) % common:
            return False
        # The first number of both progressions from `low` on, by the Chinese remainder theorem.
        module = stride // common
        meeting = low + step * ((first - low) // common * pow(step // common, -1, module) % module) if module > 1 else low
        period = step * module
        return meeting + -(-max(bottom - meeting, 0) // period) * period <= top

    def _upwards(self) -> tuple[int, int, int]:
        last = self.start + self.step * (self.size - 1)
        return min(self.start, last), max(self.start, last), abs(self.step)

    def __str__(self) -> str:
        if self.size == 1:
            return f"[{self.start}]"
        stop = self.start + self.step * self.size
        step = "" if self.step == 1 else f":{self.step}"
        return f"[{self.start}:{stop if stop >= 0 else ''}{step}]"


def locate(at: object, count: int | None, length: int, rank: int) -> Place:
    """Return the elements that a call means.

    Parameters
    ----------
    at
        An integer, where they begin, or a slice.
    count
        How many they must be; None for one from an integer on, and for all of a slice.
    length
        The number of elements of the window.
    rank
        The rank whose window it is, for messages.

    Raises
    ------
    SizeMismatchError
        They are not all in the window, or not so many.
    UsageError
        ``at`` is neither.
    """
    if isinstance(at, slice):
        try:
            start, stop, step = at.indices(length)
        except TypeError:
            raise UsageError(f"at={at!r} is no slice of integers") from None
        found = len(range(start, stop, step))
        ends = [each for each in (at.start, at.stop) if each is not None and not -length <= each <= length]
        if ends:
            raise SizeMismatchError(f"at={_words(at)} is not in the window of rank {rank}, which has {length} elements")
        if count is not None and count != found:
            raise SizeMismatchError(
                f"at={_words(at)} has {found} elements of the window of rank {rank}, but {count} were given"
            )
        return Place(start, step, found)
    number = whole(at)
    if number is None:
        raise UsageError(f"at must be an index of the flat window, or a slice such as np.s_[2:5], not {at!r}")
    start, count = number + length if number < 0 else number, 1 if count is None else count
    if start < 0 or start + count > length:
        what = f"{count} elements from {number} on are" if count != 1 else f"element {number} is"
        raise SizeMismatchError(f"{what} not in the window of rank {rank}, which has {length} elements")
    return Place(start, 1, count)


def _words(at: slice) -> str:
    parts = [at.start, at.stop] if at.step is None else [at.start, at.stop, at.step]
    return ":".join("" if each is None else str(each) for each in parts)


def elements(values: Any, dtype: np.dtype[Any], what: str = "values") -> Array:
    """Return a caller's values as an array of a window's dtype: arrays must have it, Python's numbers are converted.

    Raises
    ------
    DTypeError
        They have another one, or are not numbers of that kind.
    """
    if (type(values) is float and dtype.kind == "f") or (type(values) is int and dtype == _INT64 and abs(values) < 1 << 62):
        return np.array(values, dtype)
    if isinstance(values, np.ndarray | np.generic):
        array = np.asarray(values)
        if array.dtype == dtype:
            return array
        raise DTypeError(f"{what} is of {array.dtype}, and the window of {dtype}: convert first, with x.astype(win.dtype)")
    try:
        natural = np.asarray(values)
        if (
            natural.size
            and not np.can_cast(natural.dtype, dtype, "same_kind")
            and not (natural.dtype.kind == "i" and dtype.kind == "u")
        ):
            raise TypeError(f"they are of {natural.dtype}")
        return np.asarray(values, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise DTypeError(f"{what} cannot be elements of a window of {dtype}: {error}") from None


def op_number(op: Any, dtype: np.dtype[Any]) -> int:
    """Return the number of an op on the wire.

    Raises
    ------
    DTypeError
        There is no such op, or the dtype does not have it.
    UsageError
        It has no name, so that the target cannot know it.
    """
    known = _NUMBERS.get((op, dtype)) if type(op) is str else None
    if known is not None:
        return known
    number = _op_number(op, dtype)
    if type(op) is str and len(_NUMBERS) < _MOST_NUMBERS:
        _NUMBERS[op, dtype] = number
    return number


_NUMBERS: dict[tuple[str, np.dtype[Any]], int] = {}
_MOST_NUMBERS = 256


def _op_number(op: Any, dtype: np.dtype[Any]) -> int:
    if isinstance(op, str) and op == REPLACE:
        return len(OP_NAMES)
    reduction = resolve_op(op, dtype)
    if reduction.is_mean or reduction.name not in OP_NAMES:
        names = ", ".join(name for name in _OPS if name != "mean")
        raise UsageError(
            f"op={reduction.name} is none that a window takes: it must be one of {names}, or a ufunc with such a name"
        )
    return OP_NAMES.index(reduction.name)


def changer(number: int, dtype: np.dtype[Any]) -> Changer:
    """Return ``change(view, values)``, which changes elements of a window by an op, and returns what they were."""
    name = _OPS[number]
    combine = None if name == REPLACE else resolve_op(name, dtype).combine
    if combine is not None and dtype.kind not in "biu":
        combine = quiet(combine)

    def change(view: Array, values: Array) -> Array:
        old = view.copy()
        if combine is None:
            view[...] = values
        elif view.flags.c_contiguous:
            combine(old, values, out=view)
        else:
            new = np.empty_like(old)
            combine(old, values, out=new)
            view[...] = new
        return old

    return change


def swapped(view: Array, expected: Array, values: Array) -> Array:
    """Replace those elements that have the bits of the expected ones; return what all were."""
    old = view.copy()
    size = old.dtype.itemsize
    same = (old.view(np.uint8).reshape(-1, size) == np.ascontiguousarray(expected).view(np.uint8).reshape(-1, size)).all(axis=1)
    view[same] = values[same]
    return old
