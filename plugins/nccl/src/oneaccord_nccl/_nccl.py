"""The one seam that touches NCCL: the library, by NVIDIA's own binding.

Two bindings were to choose from.

- ``nccl4py`` is NVIDIA's: it has what failures need, which is finalize and revoke, and it is made anew for each NCCL. Its raw layer, ``nccl.bindings.nccl``, takes addresses and numbers, costs about as much as the call in C,
  and lets other threads run meanwhile. The layer for people above it takes the default stream where none is given, looks at arrays
  anew in each call, and turns bool into bytes without a word; nothing of it is used.
- ``cupy.cuda.nccl`` blocks in init and in each first call between two ranks, so that a rank that never comes hangs the others; it
  cannot finalize, and CuPy's maintainers mean to drop it for the official one.

The raw layer promises no stable signatures: `load` looks for each function by its name, and says which one is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from oneaccord.api import BackendUnavailableError, DeviceFailure, install_command
from oneaccord_nccl.dtypes import named
from oneaccord_nccl.plugin import INSTALL

__all__ = ["Library", "load"]

_REMOTE = frozenset({6, 8})
"""Errors that blame another rank or the way to it, among them what breaks connections; and time that is up."""
_ORDER_VERSION, _ORDER_CONFIG_VERSION = 22600, 23100
_REVOKE_VERSION = 22900

_NAMES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv", "group_start", "group_end"),
    *("get_version", "get_unique_id", "get_error_string", "get_last_error", "UniqueId", "Config", "NCCLError"),
    *("comm_init_rank_config", "comm_get_async_error", "comm_finalize", "comm_destroy", "comm_abort"),
)


class Library:
    """NCCL, as its raw binding has it. What it refuses is raised as `error`.

    The collectives, ``send`` and ``recv`` take addresses, a count, NCCL's numbers of the dtype, reduction, root or peer, a communicator's
    ``handle``, and a stream.

    Parameters
    ----------
    raw
        The module ``nccl.bindings.nccl``.

    Attributes
    ----------
    raw
        That module.
    error
        What it raises: an error whose ``status`` is NCCL's number of it, or that the binding does not know the number.
    version
        The version as NCCL numbers it, such as 23203.
    name
        The same in words, ``"NCCL 2.32.3"``.
    can_revoke
        Whether it can end all that a communicator does without freeing what other ranks may still use.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.error: tuple[type[Exception], ...] = (raw.NCCLError, ValueError)
        self.version: int = raw.get_version()
        self.name: str = f"NCCL {named(self.version)}"
        self.all_reduce: Callable[..., None] = raw.all_reduce
        self.reduce: Callable[..., None] = raw.reduce
        self.broadcast: Callable[..., None] = raw.broadcast
        self.all_gather: Callable[..., None] = raw.all_gather
        self.reduce_scatter: Callable[..., None] = raw.reduce_scatter
        self.send: Callable[..., None] = raw.send
        self.recv: Callable[..., None] = raw.recv
        self.group_start: Callable[[], None] = raw.group_start
        self.group_end: Callable[[], None] = raw.group_end
        self.can_revoke: bool = self.version >= _REVOKE_VERSION and hasattr(raw, "comm_revoke")

    def is_id(self, data: bytes) -> bool:
        """Return whether these bytes can be the id of a communicator."""
        try:
            self.raw.UniqueId.from_buffer(bytearray(data))
        except (ValueError, TypeError):
            return False
        return True

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator meet by; this process is where they do so."""
        try:
            return bytes(self.raw.get_unique_id())
        except self.error as error:
            raise self.failure(error) from error

    def failure(self, error: Exception, handle: Any = None) -> DeviceFailure:
        """Return what to raise for an error of NCCL."""
        status: int | None = getattr(error, "status", None)
        return DeviceFailure(self._detailed(str(error), handle), is_remote=status in _REMOTE)

    def failure_of(self, status: int, handle: Any) -> DeviceFailure:
        """Return what to raise for the state of a communicator."""
        words = self._detailed(str(self.raw.get_error_string(status)), handle)
        return DeviceFailure(words, is_remote=status in _REMOTE)

    def _detailed(self, words: str, handle: Any) -> str:
        last = ""
        if handle is not None:
            with contextlib.suppress(*self.error):
                last = str(self.raw.get_last_error(handle)).strip()
        return f"{self.name}: {words}; {last}" if last else f"{self.name}: {words}"

    def config(self, max_ctas: int | None) -> Any:
        """Return the configuration of a communicator whose calls block until they are enqueued.

        NCCL starts a thread for each call of a communicator that does not block (src/group.cc, `ncclGroupEndInternal`, 2.27 on): 90 us in place of 5.
        """
        config = self.raw.Config()
        config.blocking = 1
        # Kernels of two groups that share GPUs may each wait for the other one, unless a GPU runs them in the order of their launches.
        if self.version >= _ORDER_CONFIG_VERSION and hasattr(config, "launch_order_implicit"):
            config.launch_order_implicit = 1
        elif self.version >= _ORDER_VERSION:
            os.environ.setdefault(
                "NCCL_LAUNCH_ORDER_IMPLICIT", "1"
            )  # read by NCCL when a communicator is made (src/enqueue.cc, 2.30.7)
        if max_ctas is not None:
            config.max_ctas = max_ctas
        return config


def load() -> Library:
    """Return NCCL.

    Raises
    ------
    BackendUnavailableError
        It is not there, or not as it is needed, in words.
    """
    remedy = install_command(INSTALL)
    try:
        raw = import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise BackendUnavailableError(f"nccl4py cannot be imported ({error}): {remedy}") from error
    missing = [name for name in _NAMES if not hasattr(raw, name)]
    if missing:
        raise BackendUnavailableError(
            f"nccl4py {getattr(raw, '__version__', '')} has no {', '.join(missing)} in nccl.bindings.nccl: pip install 'nccl4py>=0.6,<0.7'"
        )
    try:
        return Library(raw)
    except Exception as error:  # what the loader of shared libraries raises is of many types
        raise BackendUnavailableError(f"NCCL's library cannot be loaded ({error}): {remedy}") from error
