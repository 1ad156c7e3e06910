"""Which arrays share memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.errors import UsageError
from manyhands_parallel.arrays import Array, dtype_of, itemsize, place_of, readable, shape_of, writable

__all__ = ["memory_of", "ties"]

_MOST_WORK = 100_000
"""How long it may take to find out whether two arrays share an element, in steps of NumPy's solver: some 10 ms."""


@dataclass(frozen=True)
class _Memory:
    """The elements that an array has of a memory: equal for two arrays that always have the same content."""

    place: str
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; 0 along axes of one element

    @property
    def first(self) -> int:
        """The lowest address."""
        return self.address + sum(min(0, (extent - 1) * step) for extent, step in zip(self.shape, self.strides, strict=True))

    @property
    def stop(self) -> int:
        """The address behind the highest one."""
        reach = sum(max(0, (extent - 1) * step) for extent, step in zip(self.shape, self.strides, strict=True))
        return self.address + reach + itemsize(self.dtype)

    def overlaps(self, other: _Memory) -> bool:
        """Return whether the two share a byte; True if that would take too long to find out."""
        if self.stop <= other.first or other.stop <= self.first:
            return False
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
    """Return what is equal for two arrays of the same elements of the same memory, and for no others.

    An array that is not written to shares its memory with nobody: those of JAX, read-only ones, those that repeat an element.
    """
    return _memory_of(array) or id(array)


def ties(leaves: Mapping[str, Array]) -> dict[str, str]:
    """Return for each name whose array has been there before, as the same elements of the same memory, the first name.

    Raises
    ------
    UsageError
        Two arrays share some of their elements, and are not the same.
    """
    firsts: dict[_Memory, str] = {}
    found: dict[str, str] = {}
    for name, leaf in leaves.items():
        memory = _memory_of(leaf)
        if memory is not None and firsts.setdefault(memory, name) != name:
            found[name] = firsts[memory]
    for one, other in _overlapping(list(firsts)):
        first, second = (f"{firsts[each]!r} of shape {each.shape}" for each in (one, other))
        raise UsageError(
            f"{first} and {second} share memory and are not the same array: a change of one would not reach the other; give the memory "
            "once, and make the view of it where it is used, or give copies"
        )
    return found


def _overlapping(memories: Iterable[_Memory]) -> Iterator[tuple[_Memory, _Memory]]:
    """Yield pairs that share a byte, of memories that are not equal."""
    open_ones: list[_Memory] = []  # those that the next one may overlap
    for memory in sorted(memories, key=lambda each: (each.place, each.first)):
        open_ones = [each for each in open_ones if each.place == memory.place and each.stop > memory.first]
        yield from ((other, memory) for other in open_ones if memory.overlaps(other))
        open_ones.append(memory)


def _memory_of(array: Array) -> _Memory | None:
    """Return the memory of an array that can be written to; None for others, and for those that repeat an element."""
    memory = _memory(readable(array)) if writable(array) else None
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
