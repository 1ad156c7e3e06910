"""The order in which stores and loads of one process become visible to another.

A message is written before its sequence number, and read after it. Each sequence number is an aligned word of 8 bytes, which
CPython's memoryview reads and writes by one ``memcpy`` of 8 bytes, that is by one instruction.

x86-64 keeps loads in order among loads and stores among stores, which is enough here. On other processors, such as Arm, a `fence` is between
them.
"""

from __future__ import annotations

import platform

from oneaccord.api import memory_fence as fence

__all__ = ["ORDERED", "fence"]

ORDERED: bool = platform.machine() in {"x86_64", "AMD64"}
"""Whether this machine keeps the order that messages need."""
