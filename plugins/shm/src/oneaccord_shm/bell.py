"""How the threads of a rank sleep, and how their peers wake them.

Each rank has two words in the first page of its memory: how many of its threads sleep or are about to, and a 32-bit *call* that changes
with every wake-up. A thread that goes to sleep

1. counts itself among the sleepers,
2. reads the call,
3. passes a barrier that every thread of every rank passes with it,
4. looks once more whether what it waits for has come, and
5. sleeps in the kernel for as long as the call is what it read.

A thread that has published a message reads the number of sleepers; if there are any, it changes the call and wakes them.

No wake-up is lost. x86-64 and Arm both may let the peer's look at the sleepers overtake its publication, but not across the barrier of
step 3: either what it published before that is seen in step 4; or it looks at the sleepers after the barrier, so finds one, and changes the call
after step 2, so that step 5 ends. No two changes write the same value, so that a late one never brings back the call that a sleeper
has read. Publishing costs no fence for it: the barrier is the sleeper's, which has time.

If a system has no such barrier (`membarrier`), ranks pass a fence of their own after each publication. A sleeper looks again after
`SLICE_S` in any case.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from oneaccord_shm import kernel
from oneaccord_shm.order import fence

__all__ = ["CALL_OFFSET", "SLEEPERS_OFFSET", "SLICE_S", "Bell", "Ringer"]

SLEEPERS_OFFSET: int = 64
CALL_OFFSET: int = 72
"""The positions of the two words in a rank's first page."""
SLICE_S: float = 0.1
"""The longest that anyone sleeps without a look, in seconds."""
_NAP_S = 0.001
_CALLS = 1 << 32


class Ringer:
    """Wakes the sleepers of one rank.

    Parameters
    ----------
    page
        The first page of that rank's memory.
    calls
        Values that no other process writes, and that this one writes once.

    Attributes
    ----------
    sleepers
        A view of one word: how many threads of that rank sleep.
    """

    __slots__ = ("_address", "_call", "_calls", "sleepers")

    def __init__(self, page: memoryview, calls: itertools.count[int]) -> None:
        self.sleepers: memoryview = page[SLEEPERS_OFFSET : SLEEPERS_OFFSET + 8].cast("Q")
        self._call = page[CALL_OFFSET : CALL_OFFSET + 4].cast("I")
        self._address = kernel.address_of(self._call)
        self._calls = calls

    def ring(self) -> None:
        """Wake the sleepers."""
        self._call[0] = next(self._calls) % _CALLS
        kernel.futex_wake(self._address)


class Bell(Ringer):
    """The place where the threads of this rank sleep.

    Parameters
    ----------
    page, calls
        As for `Ringer`, of this rank.
    has_barrier
        Whether all ranks are registered for barriers.
    """

    __slots__ = ("_changing", "_count", "_has_barrier")

    def __init__(self, page: memoryview, calls: itertools.count[int], *, has_barrier: bool) -> None:
        super().__init__(page, calls)
        self._has_barrier = has_barrier
        self._changing = threading.Lock()
        self._count = 0

    def sleep(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until a peer or `ring` wakes this thread, or the time is up; not at all if ``ready()`` returns True.

        Exceptions of ``ready`` are raised as they are.
        """
        self._change(1)
        try:
            seen = self._call[0]
            if self._has_barrier:
                kernel.barrier()
            else:
                fence()
            seconds = min(seconds, SLICE_S)
            if not ready() and not kernel.futex_wait(self._address, seen, seconds):
                time.sleep(min(seconds, _NAP_S))
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._changing:
            self._count += by
            self.sleepers[0] = self._count
