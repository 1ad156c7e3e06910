"""Calls that NCCL has had for a while only: each is looked for by its name, and the version that brought it is named here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneaccord_nccl._nccl import Library

__all__ = ["OwnCalls"]

_MOVING_VERSION = 22803
"""NCCL 2.28.3 brought ``ncclAlltoAll``, ``ncclGather`` and ``ncclScatter`` (src/nccl.h.in of v2.28.3-1; v2.27.7-1 lacks them)."""
_REGISTERING_VERSION = 21903
"""NCCL 2.19 brought ``ncclMemAlloc`` and ``ncclCommRegister``."""
_WINDOW_VERSION = 22703
"""NCCL 2.27 brought ``ncclCommWindowRegister`` (src/nccl.h.in of v2.27.3-1; v2.26.6-1 lacks it)."""


class OwnCalls:
    """NCCL's own calls for what it can also do by grouped sends and receives; None for each that it lacks.

    A rank must not make another of the two than the others, since NCCL may carry its own call out by copy engines. All ranks have one
    version of NCCL, and the plugin demands a range of versions of the binding, so that they choose alike.

    Parameters
    ----------
    library
        NCCL. The binding has functions of newer versions too, so that the version counts as well as the name.

    Attributes
    ----------
    all_to_all
        ``all_to_all(source, target, count of a block, type, communicator, stream)``.
    registers
        Whether memory can be registered.
    has_windows
        Whether it can be so as a window.
    gather, scatter
        ``gather(source, target, count of a block, type, root, communicator, stream)``.
    """

    def __init__(self, library: Library) -> None:
        def found(name: str) -> Callable[..., None] | None:
            raw: Any = getattr(library.raw, name, None)
            return raw if library.version >= _MOVING_VERSION else None

        buffers = "mem_alloc", "mem_free", "comm_register", "comm_deregister"
        windows = "comm_window_register", "comm_window_deregister"
        self.registers: bool = library.version >= _REGISTERING_VERSION and all(hasattr(library.raw, name) for name in buffers)
        self.has_windows: bool = library.version >= _WINDOW_VERSION and all(hasattr(library.raw, name) for name in windows)
        self.all_to_all: Callable[..., None] | None = found("allto_all")
        self.gather: Callable[..., None] | None = found("gather")
        self.scatter: Callable[..., None] | None = found("scatter")
