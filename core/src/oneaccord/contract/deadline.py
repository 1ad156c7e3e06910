"""Deadlines: a point in time until which an operation may last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from oneaccord.common.checks import is_number
from oneaccord.errors import UsageError

__all__ = ["Deadline"]

_LONGEST_S = 2_000_000.0
"""23 days; the system calls that wait take no longer times."""


class Deadline:
    """A point on a clock, and the number of seconds it was made of.

    Parameters
    ----------
    timeout_s
        Seconds from now; positive and finite.
    now
        The clock; the computer's monotonic one by default.

    Attributes
    ----------
    at
        The point on the clock.

    Raises
    ------
    UsageError
        ``timeout_s`` is not a positive, finite number.
    """

    __slots__ = ("_now", "at", "timeout_s")

    def __init__(self, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        if not (type(timeout_s) is float or is_number(timeout_s)) or not 0 < timeout_s < math.inf:
            raise UsageError(
                f"timeout_s must be a positive, finite number of seconds, not {timeout_s!r}: no call of oneaccord "
                "may block forever; give a large number, such as 86400 for a day"
            )
        self.timeout_s: float = float(timeout_s)
        self._now = now
        self.at: float = now() + min(self.timeout_s, _LONGEST_S)

    def remaining(self) -> float:
        """Return the seconds left, 0.0 once the deadline has passed."""
        return max(0.0, self.at - self._now())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self._now() >= self.at
