"""The order in which stores and loads of one process become visible to another.

A message is written before its sequence number, and read after it. Each sequence number is an aligned word of 8 bytes, which
CPython's memoryview reads and writes by one ``memcpy`` of 8 bytes, that is by one instruction.

x86-64 keeps loads in order among loads and stores among stores, which is enough here. On other processors, such as Arm, `fence` is between them:
Python offers none, but its locks are one. To take a lock is an acquire, to give it back a release. Accesses before the first release stay
before it, accesses after the second acquire stay after it, and a release is never passed by a later acquire, neither in Arm's memory
model nor in C's for sequentially consistent ones. So nothing passes from one side of the two pairs to the other.
"""

from __future__ import annotations

import platform
import threading

__all__ = ["ORDERED", "fence"]

ORDERED: bool = platform.machine() in {"x86_64", "AMD64"}
"""Whether this machine keeps the order that messages need."""

_lock = threading.Lock()
_take, _give = _lock.acquire, _lock.release


def fence() -> None:
    """Separate the reads and writes of this thread before the call from those after it."""
    _take()
    _give()
    _take()
    _give()
