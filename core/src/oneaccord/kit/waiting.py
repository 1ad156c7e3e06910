"""Waiting for a library that has no wait with a deadline: test, yield, then sleep a little between tests.

Such a library often moves bytes only while somebody calls it. So a wait tests again and again. At first it yields the processor between
tests, since most messages come within microseconds. Later it sleeps, since a peer that is so late may be late by far.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from oneaccord.contract.deadline import Deadline

__all__ = ["StallCallback", "wait_until"]

StallCallback = Callable[[list[int]], None]
"""What a `NativeCollective` calls with the ranks that it waits for, or with an empty list, when a wait has lasted for a while."""

_FIRST_STALL_S, _NEXT_STALL_S = 0.4, 0.5
"""When core is to hear of a wait: as `NativeCollective` promises."""

_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait_until(
    done: Callable[[], object],
    check: Callable[[], None],
    deadline: Deadline,
    spin_s: float,
    on_stall: Callable[[], None] | None = None,
    pauses_s: tuple[float, float] = (20e-6, 1e-3),
) -> None:
    """Return when ``done()`` is true.

    Parameters
    ----------
    done
        Asks the library. It may itself wait for a moment; then ``spin_s`` is best infinite.
    check
        Raises when there is no point in waiting any more. Called after each test that found nothing.
    deadline
        Until when.
    spin_s
        Seconds before the first sleep.
    on_stall
        Called when the wait has lasted for 0.4 s, and every half second from then on.
    pauses_s
        Seconds of the first sleep, and of the longest; each is half as long again as the one before.

    Raises
    ------
    TimeoutError
        The deadline passed.
    """
    now = time.monotonic()
    awake_until, stalled_at, pause = now + spin_s, now + _FIRST_STALL_S, pauses_s[0]
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
        else:
            time.sleep(min(pause, max(0.0, deadline.at - now)))
            pause = min(pause * 1.5, pauses_s[1])
