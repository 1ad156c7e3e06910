"""The one seam that touches NCCL: the library, by NVIDIA's own binding, and its communicators.

Two bindings were to choose from.

- ``nccl4py`` is NVIDIA's: it has what failures need, which is communicators that never block, finalize and revoke, and it is
  made anew for each NCCL. Its raw layer, ``nccl.bindings.nccl``, takes addresses and numbers, costs about as much as the call in C,
  and lets other threads run meanwhile. The layer for people above it takes the default stream where none is given, looks at arrays
  anew in each call, and turns bool into bytes without a word; nothing of it is used.
- ``cupy.cuda.nccl`` blocks in init and in each first call between two ranks, so that a rank that never comes hangs the others; it
  cannot finalize, and CuPy's maintainers mean to drop it for the official one.

The raw layer promises no stable signatures: `load` looks for each function by its name, and says which one is missing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from manyhands.api import BackendUnavailableError, Deadline, DeviceFailure, Launch, Thread, Timer, install_command
from manyhands_nccl._cuda import Cuda
from manyhands_nccl.dtypes import named
from manyhands_nccl.plugin import INSTALL

__all__ = ["Communicator", "Library", "load", "wait_for_ends"]

_log = logging.getLogger("manyhands.nccl")

_IN_PROGRESS = 7
_REMOTE = frozenset({6, 8})
"""Errors that blame another rank or the way to it, among them what breaks connections; and time that is up."""
_ORDER_VERSION = 22600
_REVOKE_VERSION = 22900

_EAGER_S = 0.002
"""How long to ask without a pause whether a launch is done: NCCL 2.27 and newer makes each on a thread that it starts for it."""
_PAUSE_S = 0.0005
_LOCK_S = 2.0
"""How long an abort waits for a launch to end, which takes microseconds unless the device's queue is full."""
_FINALIZE_S = 5.0
_END_S = 10.0
"""How long the end of a communicator may take: NCCL's own abort is known to hang at times."""

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

    def is_id(self, data: bytes) -> bool:
        """Tell whether these bytes can be the id of a communicator."""
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
        """Return the configuration of a communicator that never blocks."""
        config = self.raw.Config()
        config.blocking = 0
        if self.version >= _ORDER_VERSION and hasattr(config, "launch_order_implicit"):
            # Kernels of two groups that share GPUs may each wait for the other one, unless a GPU runs them in the order of their launches.
            config.launch_order_implicit = 1
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


_ends: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_for_ends() -> None:
    """Wait for communicators that are being ended, for seconds at most: a process that exits under NCCL's feet may crash."""
    deadline = Deadline(_END_S)
    for end in list(_ends):
        end.join(deadline.remaining())


class Communicator:
    """The ranks that call NCCL together, for one of them; it never blocks in NCCL for longer than it was told to.

    One thread at a time launches. `failure` and `abort` may be called by others meanwhile.

    Parameters
    ----------
    library, cuda, device
        NCCL, CUDA, and the device that this rank calls on.
    patience_s
        How long a launch may take that first has to connect the ranks: until they all make it.

    Attributes
    ----------
    library
        NCCL.
    handle
        What NCCL knows it by; None while it is not connected.
    """

    def __init__(self, library: Library, cuda: Cuda, device: int, patience_s: float) -> None:
        self.library: Library = library
        self.handle: Any = None
        self._cuda = cuda
        self._device = device
        self._patience_s = patience_s
        self._size = 0
        # Reentrant: whoever launches several calls together holds it meanwhile.
        self._lock = threading.RLock()
        self._ending = threading.Lock()
        self._failure: DeviceFailure | None = None
        self._ended: str | None = None
        self._is_aborting = False
        self._end: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted."""
        return self._ended is not None

    def connect(self, unique_id: bytes, size: int, rank: int, deadline: Deadline, max_ctas: int | None) -> None:
        """Meet the other ranks.

        Raises
        ------
        DeviceFailure
            NCCL does not come up, or `abort` was called; the half-made communicator is aborted.
        TimeoutError
            The deadline passed; likewise.
        """
        raw = self.library.raw
        self._size = size
        try:
            with self._lock, self._cuda.on(self._device):
                self._check()
                config = self.library.config(max_ctas)
                self.handle = raw.comm_init_rank_config(size, raw.UniqueId.from_buffer(bytearray(unique_id)), rank, config.ptr)
                self._settle(self.handle, deadline)
        except BaseException as error:
            self.abort("it did not come up")
            if isinstance(error, self.library.error):
                raise self.library.failure(error) from error
            raise

    def guard(self, enqueue: Launch) -> Launch:
        """Return what calls NCCL by ``enqueue(source, target, stream)``, and raises what comes of it as `DeviceFailure`."""
        lock, look, handle, error_type = self._lock, self.library.raw.comm_get_async_error, self.handle, self.library.error
        if self._size == 1:
            enqueue = self._on_device(enqueue)

        def launch(source: int, target: int, stream: int) -> None:
            with lock:
                if self._ended is not None:
                    self._check()
                try:
                    enqueue(source, target, stream)
                    # The binding does not tell a call that is still in progress from one that is done.
                    if look(handle):
                        self._settle_launch()
                except error_type as error:
                    raise self._failed(self.library.failure(error, handle)) from error

        return launch

    def _on_device(self, enqueue: Launch) -> Launch:
        """Return what launches on the communicator's device, which NCCL makes the current one by itself unless it is the only rank's."""

        def launch(source: int, target: int, stream: int) -> None:
            with self._cuda.on(self._device):
                enqueue(source, target, stream)

        return launch

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Enqueue the launches of a block as one, at its end."""
        with self._lock:
            self._check()
            self.library.group_start()
            try:
                yield
            except BaseException:
                # A group cannot be given up: NCCL ends it, with what was enqueued so far, and the other error is the one to tell.
                with contextlib.suppress(DeviceFailure, TimeoutError):
                    self._end_group()
                raise
            self._end_group()

    def _end_group(self) -> None:
        try:
            with contextlib.nullcontext() if self._size > 1 else self._cuda.on(self._device):
                self.library.group_end()
            if self.library.raw.comm_get_async_error(self.handle):
                self._settle_launch()
        except self.library.error as error:
            raise self._failed(self.library.failure(error, self.handle)) from error

    def failure(self) -> DeviceFailure | None:
        """Return what failed since a launch. Never blocks."""
        # NCCL is for one thread at a time, and completes in a look what is in progress. Whoever launches looks itself.
        if self._failure is None and self._lock.acquire(blocking=False):
            try:
                if self._ended is None and self.handle is not None:
                    self._look()
            finally:
                self._lock.release()
        return self._failure

    def _look(self) -> None:
        try:
            state = self.library.raw.comm_get_async_error(self.handle)
        except self.library.error as error:
            self._failed(self.library.failure(error, self.handle))
            return
        if state not in {0, _IN_PROGRESS}:
            self._failed(self.library.failure_of(state, self.handle))

    def abort(self, reason: str) -> None:
        """Begin to end all that is under way, on this rank; returns at once.

        NCCL needs every rank to abort, and no other call of this communicator meanwhile. It does not reach communicators that were made of
        this one by splitting it, which is why manyhands never splits.
        """
        self._is_aborting = True
        self._begin_end(self._abort, reason)

    def close(self) -> None:
        """Give back what NCCL holds, once all ranks have ended their launches; takes seconds at most."""
        self._begin_end(self._finish, "it was closed")
        if self._end is not None:
            self._end.join(_END_S)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._failure or DeviceFailure(
                f"{self.library.name}: the communicator cannot be used any more: {self._ended}"
            )

    def _failed(self, failure: DeviceFailure) -> DeviceFailure:
        self._failure = self._failure or failure
        return failure

    def _settle_launch(self) -> None:
        try:
            self._settle(self.handle, Deadline(self._patience_s))
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.library.name}: not launched within {self._patience_s:g} s: another rank did not make this call, or cannot be reached, or "
                "this GPU has too much to do"
            ) from error

    def _settle(self, handle: Any, deadline: Deadline) -> None:
        """Return when nothing is in progress any more, and all went well."""
        state = self._quiet(handle, deadline)
        if state:
            raise self._failed(self.library.failure_of(state, handle))

    def _quiet(self, handle: Any, deadline: Deadline) -> int:
        """Return the state of a communicator when nothing is in progress any more."""
        look = self.library.raw.comm_get_async_error
        eager = time.monotonic() + _EAGER_S
        while (state := look(handle)) == _IN_PROGRESS:
            if self._is_aborting:
                raise DeviceFailure(f"{self.library.name}: the communicator was aborted: {self._ended}")
            if deadline.passed():
                raise TimeoutError(f"{self.library.name} is still in progress after {deadline.timeout_s:g} s")
            time.sleep(0 if time.monotonic() < eager else _PAUSE_S)
        return int(state)

    def _begin_end(self, body: Callable[[], None], reason: str) -> None:
        """Run what ends the communicator, once, on a thread of its own: it may hang in NCCL, which then is said."""

        def run() -> None:
            known: tuple[type[Exception], ...] = (*self.library.error, DeviceFailure)
            late = Timer(_END_S, _log.warning, ("%s: ending a communicator hangs, and is left alone", self.library.name))
            late.daemon = True
            late.start()
            try:
                with self._cuda.on(self._device):
                    body()
            except known as error:
                _log.warning("%s: ending a communicator failed: %s", self.library.name, error)
            finally:
                late.cancel()

        with self._ending:
            if self._ended is not None:
                return
            self._ended = reason
            end = Thread(target=run, name="manyhands nccl end", daemon=True)
            # An interpreter that ends refuses new threads; all that NCCL and CUDA hold ends with the process.
            with contextlib.suppress(RuntimeError):
                end.start()
                self._end = end
                _ends.add(end)

    def _abort(self) -> None:
        raw = self.library.raw
        is_ours = self._lock.acquire(timeout=_LOCK_S)
        if not is_ours and self.handle is not None and self.library.version >= _REVOKE_VERSION and hasattr(raw, "comm_revoke"):
            # A launch that is stuck in a full queue of the device comes back once the kernels have ended, and this frees nothing.
            with contextlib.suppress(*self.library.error):
                raw.comm_revoke(self.handle, 0)
            is_ours = self._lock.acquire(timeout=_LOCK_S)
        try:
            if self.handle is not None:
                raw.comm_abort(self.handle)
        finally:
            if is_ours:
                self._lock.release()

    def _finish(self) -> None:
        raw = self.library.raw
        known: tuple[type[Exception], ...] = (*self.library.error, DeviceFailure, TimeoutError)
        with self._lock:
            if self.handle is None:
                return
            try:
                raw.comm_finalize(self.handle)
                self._settle(self.handle, Deadline(_FINALIZE_S))
            except known as error:
                _log.warning("%s: closing a communicator failed, so that it is aborted: %s", self.library.name, error)
                raw.comm_abort(self.handle)
            else:
                raw.comm_destroy(self.handle)
