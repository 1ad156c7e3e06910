"""A stand-in for ``libcuda.so.1``, with the functions that the plugin calls by ctypes, above `fake_cuda`.

Each takes what the C function takes and returns its number: what is to be written goes through the object that `ctypes.byref` was given.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_errors import DRIVER_ERRORS, CUDARuntimeError

__all__ = ["FakeDriver"]


class _Function:
    """A function of the library; `ctypes` would convert the arguments by ``argtypes``."""

    def __init__(self, body: Callable[..., int | None]) -> None:
        self._body = body
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes)
        try:
            return self._body(*arguments) or 0
        except CUDARuntimeError as error:
            return error.status
        except fake_cuda.CUDADriverError:
            return 3  # CUDA_ERROR_NOT_INITIALIZED


def _text(place: Any, text: str) -> None:
    place._obj.value = text.encode()


def _write(place: Any, value: int) -> None:
    place._obj.value = value


def _fill(place: Any, content: bytes) -> None:
    place._obj[:] = content


class FakeDriver:
    """The library.

    Attributes
    ----------
    relaxed
        The threads whose captures are relaxed.
    """

    def __init__(self) -> None:
        self.relaxed: set[threading.Thread] = set()
        self.cuInit = _Function(lambda flags: None)
        self.cuGetErrorName = _Function(lambda status, place: _text(place, DRIVER_ERRORS[status][0]))
        self.cuGetErrorString = _Function(lambda status, place: _text(place, DRIVER_ERRORS[status][1]))
        self.cuDeviceGet = _Function(self._device)
        self.cuDeviceGetUuid = _Function(lambda place, device: _fill(place, fake_cuda.uuid(device, is_whole=True)))
        self.cuDeviceGetUuid_v2 = _Function(lambda place, device: _fill(place, fake_cuda.uuid(device)))
        self.cuDevicePrimaryCtxRetain = _Function(self._retain)
        self.cuCtxGetCurrent = _Function(lambda place: _write(place, fake_cuda.get_context()))
        self.cuCtxSetCurrent = _Function(fake_cuda.set_context)
        self.cuEventCreate = _Function(lambda place, flags: _write(place, fake_cuda.event_create()))
        self.cuEventDestroy_v2 = _Function(fake_cuda.event_destroy)
        # Looked up anew each time, so that a test may change them.
        self.cuEventQuery = _Function(lambda event: fake_cuda.event_query(event))  # noqa: PLW0108
        self.cuEventRecord = _Function(lambda event, stream: fake_cuda.event_record(event, stream))  # noqa: PLW0108
        self.cuStreamIsCapturing = _Function(lambda stream, place: _write(place, fake_cuda.is_capturing(stream)))
        self.cuStreamWaitEvent = _Function(lambda stream, event, flags: fake_cuda.stream_wait_event(stream, event))
        self.cuThreadExchangeStreamCaptureMode = _Function(lambda place: self.relaxed.add(threading.current_thread()))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the plugin find this library, until the test ends."""
        cdll = ctypes.CDLL

        def load(name: Any, *arguments: Any, **keywords: Any) -> Any:
            return self if name == "libcuda.so.1" else cdll(name, *arguments, **keywords)

        monkeypatch.setattr(ctypes, "CDLL", load)

    @staticmethod
    def _device(place: Any, number: int) -> None:
        if not 0 <= number < fake_cuda.get_device_count():
            raise CUDARuntimeError(101)
        _write(place, number)

    @staticmethod
    def _retain(place: Any, device: int) -> None:
        fake_cuda.make_context(device)
        _write(place, device + 1)
