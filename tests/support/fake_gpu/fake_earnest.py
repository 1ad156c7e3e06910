"""What no simulated world sees."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["in_earnest"]


def in_earnest() -> contextlib.AbstractContextManager[None]:
    """Return a block that no simulated world sees, as it sees nothing of a driver: neither its threads nor the waits in it."""
    primitives = sys.modules.get("oneaccord_simulated.primitives")
    return contextlib.nullcontext() if primitives is None else primitives.in_earnest()
