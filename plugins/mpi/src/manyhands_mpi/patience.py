"""Waiting for MPI: test, yield, then sleep a little between tests; nobody waits for ever.

MPI has no wait with a deadline, and moves bytes only while somebody calls it. So a wait tests again and again: giving the processor away between tests
at first, since most of what is waited for comes within microseconds, and with short sleeps later, since whoever is that late may stay
away for long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from manyhands.api import Deadline

__all__ = ["StallCallback", "wait_until"]

StallCallback = Callable[[list[int]], None]
"""Called with the ranks waited for, when a wait has lasted for a while."""

_FIRST_STALL_S = 0.4
_NEXT_STALL_S = 0.5
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3

_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait_until(
    done: Callable[[], object],
    check: Callable[[], None],
    deadline: Deadline,
    spin_s: float,
    on_stall: Callable[[], None] | None = None,
) -> None:
    """Return when ``done()`` is true.

    Parameters
    ----------
    done
        Asks MPI.
    check
        Raises when there is no point in waiting any more.
    deadline
        Until when.
    spin_s
        Seconds before the first sleep.
    on_stall
        Called when the wait has lasted for 0.4 s, and every half second from then on.

    Raises
    ------
    TimeoutError
        The deadline passed.
    """
    if done():
        return
    now = time.monotonic()
    awake_until, stalled_at, pause = now + spin_s, now + _FIRST_STALL_S, _FIRST_PAUSE_S
    while not done():
        check()
        now = time.monotonic()
        if now >= deadline.at:
            raise TimeoutError("the deadline passed")
        if now >= stalled_at and on_stall is not None:
            on_stall()
            stalled_at = now + _NEXT_STALL_S
        if now < awake_until:
            _yield()
            continue
        time.sleep(min(pause, max(0.0, deadline.at - now)))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
