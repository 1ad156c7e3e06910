"""Deadlines: a point in time until which an operation may last."""

from __future__ import annotations

import math
import time

from manyhands.checks import is_number
from manyhands.errors import UsageError

__all__ = ["Deadline"]

_LONGEST_S = 2_000_000.0
"""23 days; the system calls that wait take no longer times."""


class Deadline:
    """A point on the monotonic clock, and the number of seconds it was made of.

    Parameters
    ----------
    timeout_s
        Seconds from now; positive and finite.

    Raises
    ------
    UsageError
        ``timeout_s`` is not a positive, finite number.
    """

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        if not is_number(timeout_s) or not 0 < timeout_s < math.inf:
            raise UsageError(
                f"timeout_s must be a positive, finite number of seconds, and {timeout_s!r} was given: no call of manyhands "
                "may block for ever; give a large number, such as 86400 for a day"
            )
        self.timeout_s: float = float(timeout_s)
        self.at: float = time.monotonic() + min(self.timeout_s, _LONGEST_S)

    def remaining(self) -> float:
        """Return the seconds left, 0.0 once the deadline has passed."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Tell whether the deadline has passed."""
        return time.monotonic() >= self.at
