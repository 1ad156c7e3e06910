"""The ranks that call NCCL together: how they meet, launch, and end, none of which may hang a rank.

NCCL's calls block here, which is what makes them fast. So each call that may wait for other ranks has a way out on another thread:

- Meeting is done by a thread of its own, which is left behind if the deadline passes: NCCL gives no handle before it is done.
- The first launch of each kind may have to connect the ranks. A timer ends it.
- Every later launch waits for this GPU alone. If the GPU's queue is full behind a kernel that hangs, an abort ends that kernel.

An abort revokes (NCCL 2.29 on): kernels and calls end, and nothing is freed that other ranks of the host may still read. The memory is given back
once the survivors have met again. Older versions know `ncclCommAbort` alone, which frees at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from oneaccord.api import Deadline, DeviceFailure, Launch, Thread, Timer
from oneaccord_nccl._cuda import Cuda
from oneaccord_nccl._nccl import Library

__all__ = ["Communicator", "destroy_revoked", "wait_for_ends"]

T = TypeVar("T")

_log = logging.getLogger("oneaccord.nccl")

_LOCK_S = 2.0
"""How long an abort waits for a launch to end, which takes microseconds unless the device's queue is full."""
_END_S = 10.0
"""How long the end of a communicator may take: NCCL's own abort is known to hang at times."""
_CAPTURED_S = 1.0
"""How long closing waits for a communicator that is part of a graph: NCCL ends it when the last such graph is gone."""

_ends: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_listing = threading.Lock()  # a set that another thread adds to cannot be listed
_revoked: list[Communicator] = []


def wait_for_ends() -> None:
    """Wait for communicators that are being ended, for seconds at most: a process that exits under NCCL's feet may crash."""
    deadline = Deadline(_END_S)
    with _listing:
        ends = list(_ends)
    for end in ends:
        end.join(deadline.remaining())


def destroy_revoked() -> None:
    """Give back what revoked communicators hold; returns at once.

    To be called when the survivors have met again. Each has then revoked its own, so that none of them reads the memory of another one any more.
    """
    while _revoked:
        _revoked.pop().destroy()


class Communicator:
    """The ranks that call NCCL together, for one of them.

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
        # Reentrant: launching several calls together holds it meanwhile.
        self._lock = threading.RLock()
        self._news = threading.Condition()
        self._failure: DeviceFailure | None = None
        self._ended: str | None = None
        self._is_aborting = False
        self._is_captured = False
        self._has_stopped = False
        self._is_freed = False
        self._at_free: list[Callable[[], None]] = []
        self._connects = False
        self._end: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it was closed or aborted."""
        return self._ended is not None

    @property
    def is_freed(self) -> bool:
        """Whether NCCL holds nothing for it any more, neither the memory that was registered nor that of other ranks."""
        return self._is_freed

    def connect(self, unique_id: bytes, size: int, rank: int, deadline: Deadline, max_ctas: int | None) -> None:
        """Meet the other ranks.

        Raises
        ------
        DeviceFailure
            NCCL does not come up, or `abort` was called.
        TimeoutError
            The deadline passed. A communicator that comes up later is aborted then.
        """
        raw, errors = self.library.raw, []
        self._size = size

        def meet() -> None:
            handle = None
            try:
                with self._cuda.on(self._device):
                    config = self.library.config(max_ctas)
                    identity = raw.UniqueId.from_buffer(bytearray(unique_id))
                    handle = raw.comm_init_rank_config(size, identity, rank, config.ptr)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                errors.append(error)
            with self._news:
                is_late = self._ended is not None
                self.handle = handle
                self._news.notify_all()
            if is_late:
                with contextlib.suppress(*self.library.error, DeviceFailure), self._cuda.on(self._device):
                    self._abort()

        try:
            with self._news:
                self._check()
                Thread(target=meet, name="oneaccord nccl meeting", daemon=True).start()
                came = self._news.wait_for(
                    lambda: self.handle is not None or errors or self._ended is not None, deadline.remaining()
                )
                self._check()
            if errors:
                raise errors[0]
            if not came:
                raise TimeoutError(f"{self.library.name}: the ranks did not meet within {deadline.timeout_s:g} s")
        except BaseException as error:
            self.abort("it did not come up")
            if isinstance(error, self.library.error):
                raise self.library.failure(error) from error
            raise

    def guard(self, enqueue: Launch, captured: Callable[[int, int], None]) -> Launch:
        """Return what calls NCCL by ``enqueue(source, target, stream)``, and raises what comes of it as `DeviceFailure`.

        It calls ``captured(source, target)`` before a launch that becomes part of a graph.
        """
        lock, handle, error_type = self._lock, self.handle, self.library.error
        is_capturing = self._cuda.driver.capture_watch()  # one launch at a time asks
        is_new = True
        if self._size == 1:
            enqueue = self._on_device(enqueue)

        def launch(source: int, target: int, stream: int) -> None:
            nonlocal is_new
            with lock:
                if self._ended is not None:
                    self._check()
                if is_capturing(stream):
                    self._is_captured = True
                    captured(source, target)
                try:
                    if is_new:
                        with self._bounded():
                            enqueue(source, target, stream)
                        is_new, self._connects = False, True
                    else:
                        enqueue(source, target, stream)
                except error_type as error:
                    raise self._failed(error, handle) from error

        return launch

    def perform(self, call: Callable[[Any], T]) -> T:
        """Return what ``call(handle)`` of NCCL returns, which all ranks make, and which waits for them."""
        with self._lock, self._cuda.on(self._device):
            self._check()
            try:
                with self._bounded():
                    result = call(self.handle)
            except self.library.error as error:
                raise self._failed(error, self.handle) from error
        return result

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
            self._connects = False
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
            # What is new in the group connects the ranks here.
            bounded = self._bounded() if self._connects else contextlib.nullcontext()
            with bounded, contextlib.nullcontext() if self._size > 1 else self._cuda.on(self._device):
                self.library.group_end()
        except self.library.error as error:
            raise self._failed(error, self.handle) from error

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """End a call that waits for other ranks in vain."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.abort("a launch did not come to its end in time")

        timer = Timer(self._patience_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except self.library.error:
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(
                f"{self.library.name}: not launched within {self._patience_s:g} s: another rank did not make this call, or cannot be reached, or "
                "this GPU has too much to do"
            )

    def failure(self) -> DeviceFailure | None:
        """Return what failed since a launch. Never blocks."""
        # NCCL is for one thread at a time. The launching thread learns of a failure by the launch.
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
            self._failure = self.library.failure(error, self.handle)
            return
        if state:
            self._failure = self.library.failure_of(state, self.handle)

    def abort(self, reason: str) -> None:
        """Begin to end all that is under way, on this rank; returns at once.

        NCCL needs every rank to abort. It does not reach communicators that were made of this one by splitting it, which is why oneaccord never
        splits.
        """
        self._is_aborting = True
        self._begin_end(self._abort, reason)

    def close(self) -> None:
        """Give back what NCCL holds, once all ranks have ended their launches; takes seconds at most."""
        self._begin_end(self._finish, "it was closed")
        end = self._end
        if end is None:
            return
        end.join(_CAPTURED_S if self._is_captured else _END_S)
        if self._is_captured and end.is_alive():
            _log.warning(
                "%s: a CUDA graph holds calls of this group, and NCCL gives the group's memory back when the graph is gone: drop graphs before closing "
                "the group",
                self.library.name,
            )

    def destroy(self) -> None:
        """Begin to give back what NCCL holds after an abort that has revoked; returns at once."""
        self._start_end(self._destroy)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Call once NCCL holds nothing for the communicator any more: at once if that is so, else on the thread that ends it; never if its end hangs.

        NCCL itself forgets then what is still registered (`ncclDevrFinalize` and `ncclRegCleanup` in `commFree`, src/init.cc of 2.30.7).
        """
        with self._news:
            if not self._is_freed:
                self._at_free.append(call)
                return
        call()

    def _note_freed(self) -> None:
        with self._news:
            self._is_freed = True
            calls, self._at_free = self._at_free, []
        for call in calls:
            call()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._failure or DeviceFailure(
                f"{self.library.name}: the communicator cannot be used any more: {self._ended}"
            )

    def _failed(self, error: Exception, handle: Any) -> DeviceFailure:
        if self._is_aborting:
            return DeviceFailure(f"{self.library.name}: the communicator was aborted: {self._ended}")
        self._failure = self._failure or self.library.failure(error, handle)
        return self._failure

    def _begin_end(self, body: Callable[[], bool], reason: str) -> None:
        with self._news:
            if self._ended is not None:
                return
            self._ended = reason
            self._news.notify_all()
            self._start_end(body)

    def _start_end(self, body: Callable[[], bool]) -> None:
        """Run what ends the communicator on a thread of its own: it may hang in NCCL, which then is said. It returns whether NCCL holds nothing any more."""

        def run() -> None:
            is_freed = False
            known: tuple[type[Exception], ...] = (*self.library.error, DeviceFailure)
            late = Timer(_END_S, _log.warning, ("%s: ending a communicator hangs, and is left alone", self.library.name))
            late.daemon = True
            if not self._is_captured:  # else a graph may live for long
                late.start()
            try:
                with self._cuda.on(self._device):
                    is_freed = body()
            except known as error:
                _log.warning("%s: ending a communicator failed: %s", self.library.name, error)
            finally:
                late.cancel()
            if is_freed:
                self._note_freed()

        end = Thread(target=run, name="oneaccord nccl end", daemon=True)
        # An interpreter that ends refuses new threads; all that NCCL and CUDA hold ends with the process.
        with contextlib.suppress(RuntimeError):
            end.start()
            self._end = end
            if not self._is_captured:
                with _listing:
                    _ends.add(end)

    def _abort(self) -> bool:
        raw = self.library.raw
        with self._news:
            if self.handle is None or self._has_stopped:
                return False
            self._has_stopped = True
        # NCCL takes a revocation back when the kernels have ended (src/init.cc of 2.30.7, `commRevokeAsync`), so that replays of a graph which are
        # queued behind them would hang.
        if self.library.can_revoke and not self._is_captured:
            raw.comm_revoke(self.handle, 0)
            _revoked.append(self)
            return False
        # This frees the communicator, which a launch should not use meanwhile; one that is stuck comes back by it alone.
        is_ours = self._lock.acquire(timeout=_LOCK_S)
        try:
            raw.comm_abort(self.handle)
        finally:
            if is_ours:
                self._lock.release()
        return True

    def _destroy(self) -> bool:
        raw = self.library.raw
        with self._lock:
            try:
                raw.comm_destroy(self.handle)
            except self.library.error:  # one that has failed
                raw.comm_abort(self.handle)
        return True

    def _finish(self) -> bool:
        raw = self.library.raw
        with self._lock:
            if self.handle is None:
                return False
            try:
                raw.comm_finalize(self.handle)
            except self.library.error as error:
                _log.warning("%s: closing a communicator failed, so that it is aborted: %s", self.library.name, error)
                raw.comm_abort(self.handle)
            else:
                raw.comm_destroy(self.handle)
        return True
