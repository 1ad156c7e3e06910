"""The memory of this process, without the reserves of its allocator."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["used_mib"]

_MIB: Final = 1 << 20
_HEAP_BYTES: Final = 64 << 20
"""The heaps of glibc for threads begin at multiples of this, and their unneeded part is reserved (HEAP_MAX_SIZE of its malloc/arena.c)."""
_HEAD: Final = re.compile(r"^(?=[0-9a-f]+-[0-9a-f]+ )", re.MULTILINE)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc: ``uordblks`` are the bytes that are given out in all heaps."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


class _Mapping(NamedTuple):
    """A part of the memory of this process, of which so many bytes are no file's."""

    begin: int
    end: int
    access: str
    name: str
    nbytes: int


def used_mib() -> float | None:
    """Return the MiB of this process that belong to no file and no shared memory; None if the system does not say.

    Free memory in the heaps of the allocator is not counted if that is glibc: there, it comes and goes by many MiB from world to world, as the next thread
    may take another heap. With other allocators it is counted.
    """
    try:
        mappings = list(_mappings())
    except OSError:
        return None
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another allocator
        return sum(each.nbytes for each in mappings) / _MIB
    tell.restype = _Mallinfo
    heaps = set(_heaps(mappings))
    elsewhere = (each.nbytes for each in mappings if each.name != "[heap]" and each.begin // _HEAP_BYTES not in heaps)
    return float(tell().uordblks + sum(elsewhere)) / _MIB


def _heaps(mappings: list[_Mapping]) -> Iterator[int]:
    """Yield the numbers of the places with the heap of a thread."""
    first: _Mapping | None = None
    for each in mappings:
        if each.begin % _HEAP_BYTES == 0:
            first = each
        if first is not None and each.access == "---p" and not each.end % _HEAP_BYTES and each.end - first.begin == _HEAP_BYTES:
            yield first.begin // _HEAP_BYTES


def _mappings() -> Iterator[_Mapping]:
    for each in _HEAD.split(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace"))[1:]:
        head, *lines = each.splitlines()
        place, access, _, _, _, *name = head.split(maxsplit=5)
        begin, _, end = place.partition("-")
        facts = dict(line.split(":", 1) for line in lines)
        kinds = ["Anonymous", "Swap"] if access.endswith("p") else ["Anonymous"]
        kib = sum(int(facts[kind].split()[0]) for kind in kinds if kind in facts)
        yield _Mapping(int(begin, 16), int(end, 16), access, "".join(name), kib << 10)
