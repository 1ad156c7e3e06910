"""Memory that NCCL knows beforehand: it is allocated, registered and freed here."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from manyhands.api import Deadline, DeviceFailure, Thread
from manyhands_nccl._cuda import Cuda
from manyhands_nccl.communicator import Communicator
from manyhands_nccl.own_calls import OwnCalls

__all__ = ["Memory"]

_SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC."""
_NO_MEMORY = frozenset({1, 2})
"""How ``ncclMemAlloc`` answers where CUDA has no more: ncclUnhandledCudaError, ncclSystemError (src/allocator.cc of NCCL 2.30.7)."""


class Memory:
    """The memory of one channel.

    NCCL gives windows their offsets by counting on each rank by itself (``symMemoryObtain``, src/dev_runtime.cc of NCCL 2.30.7), and finds a
    mismatch in its debugging modes alone. So whoever calls `register` and `free` must do so in one order on all ranks.

    Parameters
    ----------
    communicator
        Whose.
    cuda, device
        The CUDA runtime, and the number of the GPU.
    """

    def __init__(self, communicator: Communicator, cuda: Cuda, device: int) -> None:
        self._communicator = communicator
        self._cuda = cuda
        self._device = device
        self._own = OwnCalls(communicator.library)
        self._raw: Any = communicator.library.raw
        self._alive: dict[int, tuple[str, Any]] = {}
        self._abandoned: deque[int] = deque()
        # NCCL writes into them when the call is done, which may be after its deadline.
        self._windows: list[Any] = []
        self._is_closed = False

    def allocate(self, nbytes: int) -> int | None:
        """Return the address of new memory; None where NCCL cannot register any."""
        if not self._own.registers:
            return None
        try:
            with self._cuda.on(self._device):
                pointer = int(self._raw.mem_alloc(nbytes))
        except self._communicator.library.error as error:
            if getattr(error, "status", None) in _NO_MEMORY:
                raise MemoryError(f"ncclMemAlloc of {nbytes} bytes failed: {error}") from error
            raise self._communicator.library.failure(error) from error
        self._alive[pointer] = "", None
        return pointer

    def register(self, pointer: int, nbytes: int) -> None:
        """Register memory, as a window where NCCL has these and the GPUs reach each other, else as a buffer of the network."""
        raw = self._raw

        def register_window(comm: Any) -> Any:
            window = raw.comm_window_register(comm, pointer, nbytes, _SYMMETRIC)
            self._windows.append(window)
            return window

        if self._own.has_windows:
            window = self._communicator.perform(register_window)
            # NCCL leaves the handle empty, alike on all ranks, where it has no symmetric memory among them.
            if getattr(window, "handle", window):
                self._alive[pointer] = "comm_window_deregister", window
                return
        handle = self._communicator.perform(lambda comm: raw.comm_register(comm, pointer, nbytes))
        self._alive[pointer] = ("comm_deregister", handle) if handle else ("", None)

    def free(self, pointers: Sequence[int]) -> None:
        """Deregister and free memory that the device is done with."""
        for pointer in pointers:
            self._deregister(*self._alive.pop(pointer, ("", None)))
            self._free(pointer)

    def _deregister(self, name: str, handle: Any) -> None:
        if name and not self._communicator.has_ended:  # else NCCL has done so
            call = getattr(self._raw, name)
            self._communicator.perform(lambda comm: call(comm, handle))

    def _free(self, pointer: int) -> None:
        try:
            with self._cuda.on(self._device):
                self._raw.mem_free(pointer)
        except self._communicator.library.error as error:
            raise self._communicator.library.failure(error) from error

    def abandon(self, pointer: int) -> None:
        """Note that nobody can reach memory any more."""
        self._abandoned.append(pointer)
        if self._is_closed:
            # Not here: garbage is collected in the midst of anything, also where a stream is captured or a lock is held.
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and all memory with it
                Thread(target=self._sweep, name="manyhands-gpus-free", daemon=True).start()

    def close(self) -> None:
        """Free what nobody can reach any more, since the communicator has ended, and has forgotten all that was registered; the rest follows as it goes."""
        self._is_closed = True
        self._sweep()

    def _sweep(self) -> None:
        # A device that has failed frees nothing.
        with contextlib.suppress(IndexError, DeviceFailure, TimeoutError):
            while True:
                pointer = self._abandoned.popleft()
                if self._alive.pop(pointer, None) is not None:
                    self.settle(Deadline(_SETTLE_S))
                    self._free(pointer)

    def settle(self, deadline: Deadline) -> None:
        """Wait until the device is done with all that was queued."""
        failures: list[DeviceFailure] = []
        done = threading.Event()

        def wait() -> None:
            try:
                with self._cuda.on(self._device):
                    self._cuda.runtime.deviceSynchronize()
            except DeviceFailure as failure:
                failures.append(failure)
            except self._cuda.error as error:
                failures.append(DeviceFailure(f"CUDA: {error}"))
            done.set()

        # CUDA waits without an end.
        Thread(target=wait, name="manyhands-gpus-settle", daemon=True).start()
        if not done.wait(deadline.remaining()):
            raise TimeoutError(
                f"the GPU was not done within {deadline.timeout_s:g} s with what this process has queued on its streams"
            )
        if failures:
            raise failures[0]


_SETTLE_S = 10.0
