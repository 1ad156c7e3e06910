"""Which arrays share memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.arrays import Array, dtype_of, itemsize, place_of, readable, shape_of, writable

__all__ = ["is_repeated", "memory_of", "need_apart", "ties"]

_MOST_WORK = 100_000
"""How long it may take to find out whether two arrays share an element, in steps of NumPy's solver: some 10 ms."""
_ALL = 1 << 64
"""More than any address."""


@dataclass(frozen=True)
class _Memory:
    """The elements that an array has of a memory: equal for two arrays that always have the same content."""

    place: str
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; 0 along axes of one element

    @cached_property
    def first(self) -> int:
        """The lowest address."""
        return self.address + sum(min(0, (extent - 1) * step) for extent, step in zip(self.shape, self.strides, strict=True))

    @cached_property
    def stop(self) -> int:
        """The address behind the highest one."""
        return self.first + self.span(_ALL)

    def span(self, modulus: int) -> int:
        """Return within how many bytes from ``first`` on it lies, if addresses count modulo a number."""
        axes = zip(self.shape, self.strides, strict=True)
        return sum((extent - 1) * abs(step) for extent, step in axes if step % modulus) + itemsize(self.dtype)

    def overlaps(self, other: _Memory) -> bool:
        """Return whether the two share a byte; True if that would take too long to find out."""
        try:
            return np.shares_memory(_Stand(self).array, _Stand(other).array, max_work=_MOST_WORK)  # type: ignore[arg-type]  # the stubs know two values alone
        except np.exceptions.TooHardError:
            return True


class _Stand:
    """An array of NumPy in the place of any other one, on a GPU as well. Its content must not be looked at."""

    def __init__(self, memory: _Memory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{itemsize(memory.dtype)}",
            "data": (memory.address, True),
        }

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


def memory_of(array: Array) -> Hashable:
    """Return a key that is equal for two arrays of the same elements of the same memory, as long as they are there, and for no others.

    Arrays of JAX, those that repeat an element, and conjugated ones are equal only to themselves; a number is not even that.
    """
    if isinstance(array, bool | int | float | complex | np.generic):
        return object()
    return _memory_of(array) or id(array)


def is_repeated(array: Array, before: Iterable[Array]) -> bool:
    """Return whether an array is the same memory as one before. Arrays that never change, JAX's and read-only ones, are values, which may be alike."""
    is_value = not writable(array) and not hasattr(array, "data_ptr")
    return not is_value and memory_of(array) in map(memory_of, before)


def ties(leaves: Mapping[str, Array]) -> dict[str, str]:
    """Return for each name whose array has been there before, as the same elements of the same memory, the first name.

    Arrays that cannot be written to are values, and left out.

    Raises
    ------
    UsageError
        Two arrays share some of their elements, and are not the same.
    """
    changing = {name: leaf for name, leaf in leaves.items() if writable(leaf)}
    need_apart(changing)
    firsts: dict[Hashable, str] = {}
    firsts_of = {name: firsts.setdefault(memory_of(leaf), name) for name, leaf in changing.items()}
    return {name: first for name, first in firsts_of.items() if name != first}


def need_apart(leaves: Mapping[str, Array]) -> None:
    """Refuse arrays that share some of their elements and are not the same, unless neither can be written to.

    Raises
    ------
    UsageError
        There are such arrays.
    """
    names: dict[_Memory, str] = {}
    changing: set[_Memory] = set()
    for name, leaf in leaves.items():
        memory = _memory_of(leaf)
        if memory is not None:
            names.setdefault(memory, name)
            if writable(leaf):
                changing.add(memory)
    for one, other in _overlapping(names, changing):
        first, second = (f"{names[each]!r} of shape {each.shape}" for each in (one, other))
        raise UsageError(
            f"{first} and {second} share memory but are not the same array: a change of one would not reach the other; give the memory "
            "once and make the view of it at its use, or give copies"
        )


def _overlapping(memories: Iterable[_Memory], changing: AbstractSet[_Memory]) -> Iterator[tuple[_Memory, _Memory]]:
    """Yield pairs that share a byte, of memories that are not equal and of which one changes."""
    places: dict[str, list[_Memory]] = {}
    for memory in memories:
        places.setdefault(memory.place, []).append(memory)
    for near in [some for each in places.values() for some in _apart(each, _ALL)]:
        sets = [near]
        # The columns of a matrix lie between each other, and apart modulo their stride.
        for step in sorted({abs(step) for each in near for step in each.strides if step}):
            sets = [few for some in sets for few in (_apart(some, step) if len(some) > 1 else ())]
        for some in sets:
            open_ones: list[_Memory] = []  # those that the next one may overlap
            for memory in sorted(some, key=lambda each: each.first):
                open_ones = [each for each in open_ones if each.stop > memory.first]
                changes = memory in changing
                yield from ((each, memory) for each in open_ones if (changes or each in changing) and memory.overlaps(each))
                open_ones.append(memory)


def _apart(memories: list[_Memory], modulus: int) -> list[list[_Memory]]:
    """Divide memories into sets, so that none shares a byte with one of another set: modulo a number, their addresses lie apart."""
    origin = min(each.first for each in memories)
    intervals = []
    for each in memories:
        start = (each.first - origin) % modulus
        stop = start + each.span(modulus)
        # One that goes around may meet any other.
        intervals.append((start, stop, each) if stop <= modulus else (0, modulus, each))
    sets: list[list[_Memory]] = []
    end = 0
    for start, stop, memory in sorted(intervals, key=lambda interval: interval[0]):
        if not sets or start >= end:
            sets.append([])
        sets[-1].append(memory)
        end = max(end, stop)
    return sets


def _memory_of(array: Array) -> _Memory | None:
    """Return the memory of an array; None for one of JAX, for one that repeats an element, and for one whose values differ from its memory."""
    if hasattr(array, "devices") or (hasattr(array, "is_conj") and (array.is_conj() or array.is_neg())):
        return None
    memory = _memory(readable(array))
    if memory is None or any(extent > 1 and not step for extent, step in zip(memory.shape, memory.strides, strict=True)):
        return None
    return memory


def _memory(buffer: Array) -> _Memory | None:
    """Return the memory of a buffer; None for an empty one, and for one whose elements do not lie at strides."""
    shape = shape_of(buffer)
    if not math.prod(shape):
        return None
    if isinstance(buffer, np.ndarray):
        address, strides = int(buffer.__array_interface__["data"][0]), buffer.strides
    elif hasattr(buffer, "data_ptr"):
        if str(buffer.layout) != "torch.strided":
            return None
        address, strides = buffer.data_ptr(), tuple(step * buffer.element_size() for step in buffer.stride())
    else:
        address, strides = buffer.data.ptr, buffer.strides
    steps = tuple(step if extent > 1 else 0 for extent, step in zip(shape, strides, strict=True))
    return _Memory(place_of(buffer), address, dtype_of(buffer), shape, steps) if address else None
