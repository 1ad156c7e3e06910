"""How much memory of a GPU is free."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["free_bytes", "settled"]


def free_bytes(xp: Any) -> int:
    """Return how much memory of the current device is free, once its work is done."""
    xp.cuda.runtime.deviceSynchronize()
    return int(xp.cuda.runtime.memGetInfo()[0])


def settled(xp: Any, settle_s: float) -> int:
    """Return how much is free once that has not changed for a while: the other ranks of the device are closing as well."""
    found, since = free_bytes(xp), time.monotonic()
    while time.monotonic() - since < settle_s:
        time.sleep(0.05)
        if free_bytes(xp) != found:
            found, since = free_bytes(xp), time.monotonic()
    return found
