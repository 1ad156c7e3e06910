"""A window in memory that the ranks of a host share: the origin does all of it, and the target need not be in any call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from oneaccord.arrays.memory import ALIGNMENT, NOTHING, Array
from oneaccord.calls.engine.waiting import Overdue
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.bakery import Bakery
from oneaccord.calls.windows.places import Place
from oneaccord.calls.windows.serving import carry_out
from oneaccord.contract.deadline import Deadline
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
        self._words = Bakery.nbytes(len(sizes))
        self._starts: dict[int, int] = {}
        end = 2 * self._words
        for rank, size in sizes.items():
            self._starts[rank] = end = -(-end // ALIGNMENT) * ALIGNMENT
            end += size
        self.nbytes: int = end

    def locks(self, memory: Array, number: int, rank: int) -> Bakery:
        """Return one of two sets of locks, as this rank uses them."""
        words = memory[number * self._words : (number + 1) * self._words].data.cast("B").cast("Q")
        return Bakery(words, len(self.places), self.places[rank])

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
    check
        Raises if the call cannot continue.
    now
        The clock.
    """

    def __init__(
        self,
        flats: Mapping[int, Array],
        places: Mapping[int, int],
        atomic: Bakery,
        locks: Bakery,
        check: Callable[[object], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flats = flats
        self._places = places
        self._ranks = list(places)
        self._atomic = atomic
        self._locks = locks
        self._check = check
        self._now = now
        self._threads = threading.RLock()  # those of this rank share its tickets

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
            with self.atomic(peer, what, seconds):
                old = carry_out(flat, kind, op, place, values, expected)
            if out is not None:
                out[...] = old

    @contextmanager
    def atomic(self, peer: int, what: object, seconds: float) -> Iterator[None]:
        """Let no other rank change elements of a window atomically in the body."""
        place = self._places[peer]
        with self._threads:
            self._atomic.take(place, self._pausing(what, seconds))
            try:
                yield
            finally:
                self._atomic.give_back(place)

    def flush(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """As `Asking.flush`; all is complete already, and only its order is to be seen by others."""
        memory_fence()

    def lock(self, what: object, peer: int, seconds: float, exclusive: bool) -> None:
        """As `Asking.lock`."""
        self._locks.take(self._places[peer], self._pausing(what, seconds), exclusive=exclusive)

    def unlock(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """As `Asking.unlock`."""
        for peer in peers:
            self._locks.give_back(self._places[peer])

    def _pausing(self, what: object, seconds: float) -> Callable[[int, int], None]:
        return partial(self._pause, what, Deadline(seconds, self._now))

    def _pause(self, what: object, until: Deadline, tries: int, owner: int) -> None:
        if tries <= _TRIES:
            os.sched_yield()
            return
        self._check(what)
        if until.passed():
            raise Overdue([self._ranks[owner]])
        time.sleep(min(_NAP_S * (tries - _TRIES), _LONGEST_NAP_S))
