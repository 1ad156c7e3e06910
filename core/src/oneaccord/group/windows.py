"""Making a window: what the ranks bring, and how each reaches the windows of the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.dtypes import check_dtype, dtype_from_code, dtype_name, fields_of, named_dtype
from oneaccord.arrays.memory import Array
from oneaccord.calls.windows.asking import Asking
from oneaccord.calls.windows.direct import Direct
from oneaccord.calls.windows.direct import Parts as Memory
from oneaccord.calls.windows.serving import Server
from oneaccord.common.ranks import show_ranks
from oneaccord.errors import CommError, DTypeError, LayoutError, UnsupportedError
from oneaccord.group.hosts import Hosts
from oneaccord.group.shared import SharedArray, begin_to_share, checked_array, hosts_of
from oneaccord.group.window import Window
from oneaccord.group.window_base import Parts, Windowed

__all__ = ["WindowCalls"]

_log = logging.getLogger("oneaccord.job")


@dataclass(frozen=True, slots=True)
class _Brought:
    """What a rank brings: how many elements, of which dtype, which is 0 for none; whether they are in an array of its own; and whether it has C."""

    length: int
    code: int
    fields: bytes
    is_own: bool
    is_native: bool = False


class WindowCalls:
    """What a group does with windows."""

    def window(
        self: Windowed,
        array: Array | SupportsIndex | Sequence[SupportsIndex] | None,
        dtype: npt.DTypeLike | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Window:
        """Make a window: one array of each rank, which all ranks read and change without a call of the rank that has it. Every rank must call it.

        It works on every backend. The ranks of a host read and change windows made from shapes directly, in memory that they share. All others, and arrays of
        your own, are reached by messages: the rank serves them in any of its calls, and by a thread of oneaccord while it is in none.

        Parameters
        ----------
        array
            An array of your own, C-contiguous and writable; or the shape of one to be made, which holds zeros; or None for no elements. Ranks may bring
            different lengths, and some an array of their own and others none.
        dtype
            The dtype of an array to be made, by default float64; the same on all ranks that bring elements.
        timeout_s
            Seconds that each of its steps may last.

        Returns
        -------
        Window
            Use it in a ``with`` block. Its end, like its beginning, is a call of all ranks.

        Raises
        ------
        DTypeError
            The ranks have different dtypes, alike on all ranks; or this one cannot travel. The group stays as it was.
        LayoutError
            The array is not C-contiguous, or read-only.
        OutOfMemoryError
            As for `shared`.
        """
        own, shape, brought = _brought(array, dtype)
        deadline = self._begin(timeout_s)
        trade = begin_to_share(self, "window", deadline)
        try:
            is_apart = self._job.runtime.is_simulated or self._members.size == 1
            hosts = Hosts(tuple(range(self._members.size))) if is_apart else hosts_of(self, trade)
            cards = trade("brings", replace(brought, is_native=self._paths.native is not None))
            all_bring = self._job.read_cards(cards, _Brought, trade.name, self._members.ranks)
            found = _common_dtype(all_bring, self._members.ranks)
            return _made(self, trade.number, hosts, all_bring, own, shape, found, timeout_s)
        except CommError:
            self._saw()
            raise


def _brought(array: Any, dtype: Any) -> tuple[Array | None, tuple[int, ...], _Brought]:
    """Return what this rank brings: an array of its own, the shape of one to be made, and the card."""
    if array is None:
        if dtype is None:
            return None, (0,), _Brought(0, 0, b"", is_own=False)
        array = 0
    if not isinstance(array, np.ndarray):
        if not isinstance(array, SupportsIndex | Sequence) or isinstance(array, str | bytes):
            raise LayoutError(f"a window is made from a NumPy array, a shape, or None, not from a {type(array).__name__}")
        shape, found = checked_array(array, np.float64 if dtype is None else dtype)
        return None, shape, _Brought(int(np.prod(shape, dtype=np.int64)), check_dtype(found), fields_of(found), is_own=False)
    if dtype is not None and (found := named_dtype(dtype)) != array.dtype:
        raise DTypeError(f"dtype={found} was given with an array of {array.dtype}: leave the dtype out, or convert the array")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise LayoutError("the array of a window must be C-contiguous and writable: give x.copy(), and use win.local")
    return array, array.shape, _Brought(array.size, check_dtype(array.dtype), fields_of(array.dtype), is_own=True)


def _common_dtype(brought: Sequence[_Brought], ranks: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype of a window; all ranks find the same, or the same error."""
    kinds: dict[tuple[int, bytes], list[int]] = {}
    for rank, each in zip(ranks, brought, strict=True):
        if each.code:
            kinds.setdefault((each.code, each.fields), []).append(rank)
    if len(kinds) > 1:
        words = "; ".join(f"{show_ranks(mine)} {dtype_name(*kind)}" for kind, mine in kinds.items())
        raise DTypeError(f"all ranks must bring elements of one dtype to a window, and there are {words}")
    code, fields = next(iter(kinds), (0, b""))
    if not code:
        return np.dtype(np.float64)
    found = dtype_from_code(code, fields)
    if found is None:
        raise DTypeError(f"this rank has no dtype for the window's {dtype_name(code, fields)}: pip install ml_dtypes")
    return found


def _made(
    group: Any,
    number: int,
    hosts: Hosts,
    brought: Sequence[_Brought],
    own: Array | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    timeout_s: float | None,
) -> Window:
    """Make the memory, and what carries the calls."""
    job, ranks = group._job, group._members.ranks
    shared: SharedArray[Any] | None = None
    direct: Direct | None = None
    flats: dict[int, Array] = {}
    parts = hosts.parts()
    layouts = {
        first: Memory({ranks[rank]: 0 if brought[rank].is_own else brought[rank].length * dtype.itemsize for rank in mine})
        for first, mine in parts.items()
    }
    local = own
    atomic: AbstractContextManager[object] | None = None
    if len(parts) < len(ranks) and not all(each.is_own for each in brought):  # some ranks may share memory
        try:
            shared = group.shared(max(layout.nbytes for layout in layouts.values()), np.uint8, timeout_s=timeout_s)
        except UnsupportedError as error:  # alike on all ranks
            _log.info("windows are reached by messages: %s", error)
    if shared is not None:
        first = hosts.firsts[group._members.rank]
        layout, memory = layouts[first], shared.array
        flats = {
            ranks[rank]: layout.window(memory, ranks[rank], (brought[rank].length,), dtype)
            for rank in parts[first]
            if not brought[rank].is_own
        }
        module = group._paths.native if all(each.is_native for each in brought) else None
        changes, taken = layout.locks(memory, job.rank, module)
        direct = Direct(flats, layout.places, changes, taken, layout.places[job.rank], group._call_sequence, job.runtime.now)
        if own is None:
            local = flats[job.rank].reshape(shape)
    if local is None:
        local = np.zeros(shape, dtype)
    flat = local.reshape(-1)
    if job.rank in flats and direct is not None:
        atomic = _Atomic(direct, job.rank, group._limit(timeout_s))
    post = group._post
    server = Server(post.office, number, flat, atomic)
    asking = Asking(post.run, job.runtime.now, number, job.rank, server, post.office.lock)
    locks_directly = len(parts) == 1 and not any(each.is_own for each in brought) and direct is not None
    if not locks_directly:
        post.office.connect(post.others, partial(group._begin, timeout_s))
        server.begin(ranks, post)
    made = Parts(
        number,
        local,
        tuple(each.length for each in brought),
        server,
        asking,
        direct,
        frozenset(flats),
        locks_directly=locks_directly,
        release=_nothing if shared is None else shared.close,
    )
    return Window(group, made)


class _Atomic:
    """Keeps the other ranks of this host from changing this rank's window atomically while a request does."""

    def __init__(self, direct: Direct, rank: int, seconds: float) -> None:
        self._direct = direct
        self._rank = rank
        self._seconds = seconds
        self._inside: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        inside = self._direct.atomic(self._rank, "a request to a window", self._seconds)
        inside.__enter__()
        self._inside.append(inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside.pop().__exit__(kind, error, trace)


def _nothing() -> None:
    pass
