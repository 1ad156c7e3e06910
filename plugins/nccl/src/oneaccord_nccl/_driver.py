"""The seam to CUDA's driver, by ctypes: contexts, events, and what is being captured.

CuPy's binding of the runtime keeps the interpreter's lock while it asks for an event or a device (cupy_backends/cuda/api/runtime.pyx, 14.2.0). If
the driver makes such a call wait behind a kernel that hangs, no thread of this process can abort that kernel. ctypes gives the lock away. The
handles of streams and events, and the numbers of errors, are the same for the driver and the runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p
from typing import Any

from oneaccord.api import BackendUnavailableError, DeviceFailure

__all__ = ["Driver", "load"]

LIBRARY = "libcuda.so.1"

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_CAPTURE = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_...
_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_HANDLE_AND_NUMBER = (c_void_p, c_uint)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuEventCreate": _HANDLE_AND_NUMBER,
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
}
"""All functions that are used, and what they take. Each returns a number, 0 if all is well."""


class Driver:
    """CUDA's driver. What it refuses is raised as `DeviceFailure`. All calls but `context` take about a microsecond.

    Parameters
    ----------
    library
        The loaded library.
    """

    def __init__(self, library: Any) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        self._library = library
        self._contexts: dict[int, int] = {}
        self._query = library.cuEventQuery
        self._is_capturing = library.cuStreamIsCapturing

    def _failure(self, status: int) -> DeviceFailure:
        words = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = c_char_p()
            function(status, byref(text))
            words.append((text.value or b"unknown").decode(errors="replace"))
        return DeviceFailure(f"CUDA: {': '.join(words)}", is_passing=status in _CAPTURE)

    def _check(self, status: int) -> None:
        if status:
            raise self._failure(status)

    def context(self, device: int) -> int:
        """Return the context that the whole process shares on a device; makes it, which takes a good part of a second, if there is none."""
        if device not in self._contexts:
            number, context = c_int(), c_void_p()
            self._check(self._library.cuInit(0))
            self._check(self._library.cuDeviceGet(byref(number), device))
            self._check(self._library.cuDevicePrimaryCtxRetain(byref(context), number.value))
            self._contexts[device] = context.value or 0  # kept until the process ends, as the runtime keeps its own
        return self._contexts[device]

    def identity(self, device: int) -> tuple[str, str]:
        """Return what no other device has, and what the GPU has of which the device may be an instance (MIG); as hexadecimal digits.

        The second function is the one that tells instances apart, by its documentation. NCCL asks the first one (src/init.cc and src/misc/cudawrap.cc of
        2.30.7, `LOAD_SYM(cuDeviceGetUuid, 9020, 0)`), which gives the GPU's also for an instance (NVIDIA/nccl issue 1716).
        """
        number, own, whole = c_int(), (c_ubyte * 16)(), (c_ubyte * 16)()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(byref(number), device))
        self._check(self._library.cuDeviceGetUuid_v2(byref(own), number.value))
        self._check(self._library.cuDeviceGetUuid(byref(whole), number.value))
        return bytes(own).hex(), bytes(whole).hex()

    def current(self) -> int:
        """Return the context of this thread; 0 if it has none, or if no library has used the driver yet."""
        context = c_void_p()
        return 0 if self._library.cuCtxGetCurrent(byref(context)) else context.value or 0

    def make_current(self, context: int) -> None:
        """Let this thread use a context, or none if it is 0."""
        self._check(self._library.cuCtxSetCurrent(context))

    def new_event(self) -> int:
        """Return an event of the current context that takes no times, which would cost."""
        event = c_void_p()
        self._check(self._library.cuEventCreate(byref(event), _DISABLE_TIMING))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._check(self._library.cuEventDestroy_v2(event))

    def is_past(self, event: int) -> bool:
        """Return whether all that an event stands for is done."""
        status = self._query(event)
        if status in {0, _NOT_READY}:
            return bool(status == 0)
        raise self._failure(status)

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that a stream was given so far."""
        self._check(self._library.cuEventRecord(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event, on the device."""
        self._check(self._library.cuStreamWaitEvent(stream, event, 0))

    def is_capturing(self, stream: int) -> bool:
        """Return whether what a stream is given becomes part of a graph, or of one that an error has spoiled."""
        state = c_int()
        status = self._is_capturing(stream, byref(state))
        if status == _IMPLICIT:
            return True  # another stream is being captured, with which the default stream is in one order
        if status:
            raise self._failure(status)
        return state.value != 0

    def capture_watch(self) -> Callable[[int], bool]:
        """Return what answers as `is_capturing` does, in half the time, for one thread at a time."""
        state, ask = c_int(), self._is_capturing
        place = byref(state)

        def look(stream: int) -> bool:
            status = ask(stream, place)
            if status and status != _IMPLICIT:
                raise self._failure(status)
            return status != 0 or state.value != 0

        return look

    def relax_capture(self) -> None:
        """Let what this thread does neither be forbidden by captures of other threads nor spoil them, as it would in torch's global mode."""
        self._library.cuThreadExchangeStreamCaptureMode(byref(c_int(_RELAXED)))


def load() -> Driver:
    """Return the driver of this host.

    Raises
    ------
    BackendUnavailableError
        There is none, or it is older than CUDA 11.
    """
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise BackendUnavailableError(f"NVIDIA's driver cannot be loaded from {LIBRARY}: {error}") from error
