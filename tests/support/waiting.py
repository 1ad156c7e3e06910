"""Waiting for a state that can be observed: the one way in which a test waits for what must happen and has no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE_S", "until"]

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a test waits for what must happen: far more than it takes, so that only a hang ends the wait."""


def until(condition: Callable[[], T], what: str = "", patience_s: float = PATIENCE_S) -> T:
    """Poll ``condition`` until it is true; return what it returned.

    Parameters
    ----------
    condition
        Looks at the state; must not change it.
    what
        What the test waits for, for the error.
    patience_s
        Seconds. Shorter only to test this function.

    Raises
    ------
    AssertionError
        The time is up. The last look comes after that, so that a test which was not given the processor in between does not fail.
    """
    limit = time.monotonic() + patience_s
    while True:
        late = time.monotonic() >= limit
        if found := condition():
            return found
        assert not late, f"waited {patience_s:g} s in vain for {what or 'what must happen'}; the last answer was {found!r}"
        time.sleep(0.002)
