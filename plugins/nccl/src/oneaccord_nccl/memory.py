"""Memory that NCCL knows beforehand: it is allocated, registered and freed here.

Memory is never freed while NCCL knows it: NCCL would map and unmap addresses that by then are those of other memory. There are two ways.
While the communicator lives, all ranks deregister and free the same memory together. The rest is freed once the communicator is gone, which is
after `close`, after an abort, or, if the communicator was revoked, once the survivors have met again.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from oneaccord.api import Deadline, DeviceFailure, Thread
from oneaccord_nccl._cuda import Cuda
from oneaccord_nccl.communicator import Communicator
from oneaccord_nccl.own_calls import OwnCalls

__all__ = ["Memory"]

_log = logging.getLogger("oneaccord.nccl")

_SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC."""
_NO_MEMORY = frozenset({1, 2})
"""How ``ncclMemAlloc`` answers where CUDA has no more: ncclUnhandledCudaError, ncclSystemError (src/allocator.cc of NCCL 2.30.7)."""
_CAPTURING = range(900, 909)  # cudaErrorStreamCapture...
_SETTLE_S = 10.0
"""How long a rank waits for its device before it frees memory that no program can reach any more; it keeps the memory if that is not enough."""


class _Piece:
    """Memory of one call of `Memory.allocate`."""

    __slots__ = ("deregister", "handle", "is_abandoned", "is_captured", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.deregister = ""
        self.handle: Any = None
        self.is_abandoned = False
        self.is_captured = False


class Memory:
    """The memory of one channel.

    NCCL gives windows their offsets by counting on each rank by itself (``symMemoryObtain``, src/dev_runtime.cc of NCCL 2.30.7), and finds a
    mismatch in its debugging modes alone. So the caller calls `register` and `free` in one order on all ranks.

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
        self._pieces: dict[int, _Piece] = {}
        self._sweeping = threading.Lock()
        communicator.when_freed(self._sweep)

    def allocate(self, nbytes: int) -> int | None:
        """Return the address of new memory; None if NCCL cannot register any."""
        if not self._own.registers:
            return None
        try:
            with self._cuda.on(self._device):
                pointer = int(self._raw.mem_alloc(nbytes))
        except self._communicator.library.error as error:
            if getattr(error, "status", None) in _NO_MEMORY:
                raise MemoryError(f"ncclMemAlloc of {nbytes} bytes failed: {error}") from error
            raise self._communicator.library.failure(error) from error
        self._pieces[pointer] = _Piece(nbytes)
        return pointer

    def register(self, pointer: int, nbytes: int) -> None:
        """Register memory, as a window where NCCL has these and the GPUs reach each other, else as a buffer of the network."""
        raw, piece = self._raw, self._pieces[pointer]
        if self._own.has_windows:
            window = self._communicator.perform(lambda comm: raw.comm_window_register(comm, pointer, nbytes, _SYMMETRIC))
            # NCCL leaves the handle empty, alike on all ranks, where it has no symmetric memory among them.
            if getattr(window, "handle", window):
                piece.deregister, piece.handle = "comm_window_deregister", window
                return
        handle = self._communicator.perform(lambda comm: raw.comm_register(comm, pointer, nbytes))
        if handle:
            piece.deregister, piece.handle = "comm_deregister", handle

    def free(self, pointers: Sequence[int]) -> None:
        """Deregister and free memory that the device is done with.

        Memory that cannot be deregistered, because the communicator has ended meanwhile, goes with the communicator.
        """
        for pointer in pointers:
            piece = self._pieces.get(pointer)
            if piece is not None and piece.deregister:
                self._deregister(piece)
            self._free(pointer)

    def _deregister(self, piece: _Piece) -> None:
        call = getattr(self._raw, piece.deregister)
        self._communicator.perform(lambda comm: call(comm, piece.handle))

    def _free(self, pointer: int) -> None:
        if self._pieces.pop(pointer, None) is None:
            return  # another thread frees it
        try:
            with self._cuda.on(self._device):
                self._raw.mem_free(pointer)
        except self._communicator.library.error as error:
            raise self._communicator.library.failure(error) from error

    def captured(self, source: int, target: int) -> None:
        """Note that a graph holds a launch on these addresses."""
        for start, piece in list(self._pieces.items()):
            if any(start <= pointer < start + piece.nbytes for pointer in (source, target)):
                piece.is_captured = True

    def is_captured(self, pointer: int) -> bool:
        """Return whether a graph may hold launches on memory: NCCL does not report when a graph is gone, but for ending the communicator then."""
        piece = self._pieces.get(pointer)
        return piece is not None and piece.is_captured

    def abandon(self, pointer: int) -> None:
        """Note that no program can reach memory any more.

        Called while garbage is collected, in the midst of anything. So it takes no lock, also not those in which `threading` starts threads, and it
        frees nothing itself: the calling thread may be capturing a stream.
        """
        piece = self._pieces.get(pointer)
        if piece is None:
            return
        piece.is_abandoned = True
        if self._communicator.is_freed:
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and all memory with it
                _thread.start_new_thread(self._sweep, ())

    def _sweep(self) -> None:
        """Free what no program can reach any more, on a thread that does nothing else; the communicator is gone."""
        with self._sweeping:
            pointers = [pointer for pointer, piece in list(self._pieces.items()) if piece.is_abandoned]
            if not pointers:
                return
            try:
                # What frees memory would spoil captures of other threads.
                self._cuda.driver.relax_capture()
                self.settle(Deadline(_SETTLE_S))
                for pointer in pointers:
                    self._free(pointer)
            except (DeviceFailure, TimeoutError) as error:
                _log.warning("%s: memory of a group that has ended is kept: %s", self._communicator.library.name, error)

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
                is_passing = getattr(error, "status", None) in _CAPTURING
                failures.append(DeviceFailure(f"CUDA: {error}", is_passing=is_passing))
            done.set()

        # CUDA waits without an end.
        Thread(target=wait, name="oneaccord-gpus-settle", daemon=True).start()
        if not done.wait(deadline.remaining()):
            raise TimeoutError(
                f"the GPU was not done within {deadline.timeout_s:g} s with what this process has queued on its streams"
            )
        if failures:
            raise failures[0]
