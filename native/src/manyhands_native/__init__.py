"""The compiled executor of manyhands. Core finds it by itself where it is installed; a program need not import it."""

from manyhands_native._core import (
    Books,
    Call,
    Caller,
    Exchange,
    Low,
    Program,
    Recv,
    Ring,
    Send,
    Stream,
    measure_add,
    measure_copy,
    measure_flags,
    measure_pings,
    measure_stream,
)

__all__ = [
    "Books",
    "Call",
    "Caller",
    "Exchange",
    "Low",
    "Program",
    "Recv",
    "Ring",
    "Send",
    "Stream",
    "measure_add",
    "measure_copy",
    "measure_flags",
    "measure_pings",
    "measure_stream",
]
