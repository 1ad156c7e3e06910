"""A window in memory that the ranks of a host share: the origin does all of it, and the target need not be in any call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import OP_NAMES, resolve_op
from oneaccord.arrays.memory import ALIGNMENT, NOTHING, Array
from oneaccord.calls.engine.waiting import Overdue
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.bakery import Bakery
from oneaccord.calls.windows.places import REPLACE, Place
from oneaccord.calls.windows.serving import carry_out
from oneaccord.calls.windows.words import APART, WordLocks
from oneaccord.contract.deadline import Deadline
from oneaccord.control.recorder import Record
from oneaccord.errors import DTypeError, UsageError
from oneaccord.runtime.host_memory import memory_fence

__all__ = ["Direct", "Parts"]

_TRIES = 200
"""How often a lock is looked at before the thread sleeps."""
_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3


class Parts:
    """Where the windows of the ranks of a host are in the memory that they share.

    Parameters
    ----------
    sizes
        The bytes of each, by the rank of the world.

    Attributes
    ----------
    places
        The place of each rank.
    nbytes
        The size of the whole.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.places: dict[int, int] = {rank: place for place, rank in enumerate(sizes)}
        self._changes = max(Bakery.nbytes(len(sizes)), WordLocks.nbytes(len(sizes)))
        self._starts: dict[int, int] = {}
        end = self._changes + Bakery.nbytes(len(sizes))
        self._end = end
        for rank, size in sizes.items():
            self._starts[rank] = end = -(-end // ALIGNMENT) * ALIGNMENT
            end += size
        self.nbytes: int = end

    def locks(self, memory: Array, rank: int, module: ModuleType | None) -> tuple[Bakery | WordLocks, Bakery]:
        """Return the locks of single changes and those of programs, as this rank uses them; ``module`` is the compiled executor, if all ranks have it."""
        words, size, place = memory.data.cast("B")[: self._end].cast("Q"), len(self.places), self.places[rank]
        changes, taken = words[: self._changes // 8], words[self._changes // 8 :]
        return Bakery(changes, size, place) if module is None else WordLocks(module, changes, place), Bakery(taken, size, place)

    def window(self, memory: Array, rank: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return the window of a rank."""
        start = self._starts[rank]
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return memory[start : start + nbytes].view(dtype).reshape(shape)


class Direct:
    """Makes the calls of one rank on the windows of its host.

    Parameters
    ----------
    flats
        The windows, flat, by the rank of the world.
    places
        The places of the ranks among the locks.
    atomic, locks
        The locks of single calls, and those that programs take.
    place
        The place of this rank.
    sequence
        The call sequence of the group.
    now
        The clock.
    """

    def __init__(
        self,
        flats: Mapping[int, Array],
        places: Mapping[int, int],
        atomic: Bakery | WordLocks,
        locks: Bakery,
        place: int,
        sequence: CallSequence,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flats = flats
        self._places = places
        self._ranks = list(places)
        self._place = place
        self._atomic = atomic
        self._locks = locks
        self._sequence = sequence
        self._now = now
        self._records: dict[object, Record] = {}
        self._threads = threading.RLock()  # those of this rank share its tickets
        self._is_inside = False

    def change(
        self,
        what: object,
        peer: int,
        kind: int,
        place: Place,
        values: Array,
        seconds: float,
        op: int = 0,
        expected: Array = NOTHING,
        out: Array | None = None,
    ) -> None:
        """As `Asking.change`."""
        flat = self._flats[peer]
        if kind == wire.PUT:
            place.of(flat)[...] = values
        elif kind == wire.GET:
            assert out is not None
            out[...] = place.of(flat)
        else:
            with self._threads:
                self._enter(peer, what, seconds)
                try:
                    old = carry_out(flat, kind, op, place, values, expected)
                finally:
                    self._leave(peer)
            if out is not None:
                out[...] = old

    def compiled(
        self,
        module: ModuleType,
        calls: Sequence[Any],
        held: dict[int, bool],
        shorts: object,
        ranks: Sequence[int],
        *,
        locks: bool,
    ) -> Any:
        """Return what makes the same calls in C if nothing about them is unusual.

        Parameters
        ----------
        module
            The compiled executor.
        calls
            The group's compiled calls, and the methods of a window that make all calls: on elements, flush, lock and unlock.
        held
            The locks that this rank holds.
        shorts
            The compiled counters of the group's calls.
        ranks
            The group's ranks of the world.
        locks
            Whether the locks of programs are in this memory as well.
        """
        dtype, atomic = next(iter(self._flats.values())).dtype, self._atomic
        ops = {name: ufunc for name in OP_NAMES if (ufunc := _loop_of(name, dtype)) is not None}
        return module.Window(
            *calls,
            (*ops, REPLACE),
            held,
            shorts,
            dtype,
            (*ops.values(), None),
            tuple((self._flats.get(rank), rank, self._places.get(rank, 0)) for rank in ranks),
            atomic.words if isinstance(atomic, WordLocks) else None,
            APART,
            self._locks.words if locks else None,
            self._place,
            len(self._ranks),
        )

    @contextmanager
    def atomic(self, peer: int, what: object, seconds: float) -> Iterator[None]:
        """Let no other rank change elements of a window atomically in the body."""
        with self._threads:
            try:
                self._enter(peer, what, seconds)
                try:
                    yield
                finally:
                    self._leave(peer)
            finally:
                self.end(what)

    def _enter(self, peer: int, what: object, seconds: float) -> None:
        if self._is_inside:
            raise UsageError(
                f"a signal handler called {what} while this thread was in the middle of another such call: set a flag in the handler, and make "
                "the call later; nothing has changed"
            )
        self._is_inside = True
        try:
            self._atomic.take(self._places[peer], _Pausing(self, what, seconds))
        except BaseException:
            self._is_inside = False
            raise

    def _leave(self, peer: int) -> None:
        self._atomic.give_back(self._places[peer])
        self._is_inside = False

    def flush(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """As `Asking.flush`; all is complete already, and only its order is to be seen by others."""
        memory_fence()

    def lock(self, what: object, peer: int, seconds: float, exclusive: bool) -> None:
        """As `Asking.lock`."""
        self._locks.take(self._places[peer], _Pausing(self, what, seconds), exclusive=exclusive)

    def unlock(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """As `Asking.unlock`."""
        for peer in peers:
            self._locks.give_back(self._places[peer])

    def check(self, what: object) -> None:
        """Raise if a call that waits cannot continue."""
        if what not in self._records:
            self._records[what] = self._sequence.record_message(what, self._sequence.count_message())
        self._sequence.check(what)

    def number_of(self, what: object) -> int:
        """Return the number of a call that has waited for a while; 0 for another one."""
        return self._records[what].sequence if what in self._records else 0

    def end(self, what: object) -> bool:
        """End the record of a call; return whether there is one."""
        record = self._records.pop(what, None)
        if record is not None:
            self._sequence.end(record)
        return record is not None

    def deadline(self, seconds: float) -> Deadline:
        """Return the end of so many seconds."""
        return Deadline(seconds, self._now)

    def rank_at(self, place: int) -> int:
        """Return the rank of the world at a place."""
        return self._ranks[place]


def _loop_of(name: str, dtype: np.dtype[Any]) -> np.ufunc | None:
    """Return the ufunc of an op if it has a loop of exactly this dtype."""
    try:
        reduction = resolve_op(name, dtype)
    except DTypeError:
        return None
    combine = None if reduction.is_mean else reduction.combine
    return combine if isinstance(combine, np.ufunc) and f"{dtype.char * 2}->{dtype.char}" in combine.types else None


class _Pausing:
    """Waits a moment, for a call that may last so many seconds, until another rank gives a lock back."""

    __slots__ = ("_direct", "_seconds", "_until", "_what")

    def __init__(self, direct: Direct, what: object, seconds: float) -> None:
        self._direct = direct
        self._what = what
        self._seconds = seconds
        self._until: Deadline | None = None

    def __call__(self, tries: int, owner: int) -> None:
        if self._until is None:
            self._until = self._direct.deadline(self._seconds)
        if tries <= _TRIES:
            os.sched_yield()
            return
        self._direct.check(self._what)
        if self._until.passed():
            raise Overdue([self._direct.rank_at(owner)])
        time.sleep(min(_NAP_S * (tries - _TRIES), _LONGEST_NAP_S))
