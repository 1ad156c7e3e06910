"""What the fake CuPy has in ``cupy.cuda`` and ``cupy.cuda.runtime``."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_cuda import CUDARuntimeError, begin_capture, end_capture, view

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "PinnedMemoryPointer",
    "Stream",
    "cuda",
    "forget_streams",
    "get_current_stream",
    "pinned",
    "pinned_now",
]


class Device:
    """As CuPy's: a block makes the device the current one."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = fake_cuda.get_device() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Self:
        self._before.append(fake_cuda.get_device())
        fake_cuda.set_device(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        fake_cuda.set_device(self._before.pop())

    def use(self) -> Self:
        fake_cuda.set_device(self.id)
        return self

    def synchronize(self) -> None:
        with self:
            fake_cuda.device_synchronize()


_streams = threading.local()


def _current() -> dict[int, Any]:
    if not hasattr(_streams, "current"):
        _streams.current = {}
        _streams.before = []
    current: dict[int, Any] = _streams.current
    return current


def forget_streams() -> None:
    """Let the legacy default stream be the current one everywhere in this thread."""
    _streams.__dict__.clear()
    pinned.clear()


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Self:
        device = self._check_device()
        before = _current().get(device, Stream.null)
        _streams.before.append((device, before))
        _current()[device] = self
        return self

    def __exit__(self, *_: object) -> None:
        device, before = _streams.before.pop()
        _current()[device] = before

    def _check_device(self) -> int:
        device = fake_cuda.get_device()
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device ({device})"
            )
        return device

    def use(self) -> Self:
        _current()[self._check_device()] = self
        return self

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    @property
    def done(self) -> bool:
        return fake_cuda.stream_query(self.ptr) == 0

    @property
    def is_non_blocking(self) -> bool:
        return fake_cuda.stream_flags(self.ptr) != 0

    def synchronize(self) -> None:
        fake_cuda.stream_synchronize(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        fake_cuda.event_record(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        fake_cuda.stream_wait_event(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(end_capture(self.ptr))

    def is_capturing(self) -> bool:
        return fake_cuda.is_capturing(self.ptr)


class Graph:
    """As CuPy's: without a stream it is launched on the current one."""

    def __init__(self, captured: fake_cuda.Graph) -> None:
        self._captured = captured

    def launch(self, stream: _BaseStream | None = None) -> None:
        self._captured.launch(get_current_stream() if stream is None else stream)


class Stream(_BaseStream):
    """As CuPy's."""

    _foreign_stream_ref: Any = None
    null: Any = None
    ptds: Any = None

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None) -> None:
        self._is_own = not null and not ptds
        if self._is_own:
            super().__init__(fake_cuda.stream_create(is_blocking=not non_blocking), fake_cuda.get_device())
        else:
            super().__init__(0 if null else 2, -1)

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        try:
            version, ptr = obj.__cuda_stream__()
        except AttributeError as error:
            raise TypeError(f"Object of type {type(obj).__name__} does not implement the CUDA stream protocol") from error
        assert version == 0
        stream = cls.__new__(cls)
        stream._is_own = False
        _BaseStream.__init__(stream, ptr, -1)
        stream._foreign_stream_ref = obj
        return stream

    def __del__(self, is_shutting_down: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_own and not is_shutting_down():
            fake_cuda.stream_destroy(self.ptr, missing_ok=True)


class ExternalStream(_BaseStream):
    """As CuPy's: the stream belongs to somebody else."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn("ExternalStream is deprecated. Use Stream.from_external() instead", DeprecationWarning, stacklevel=2)
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class Event:
    """As CuPy's."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = fake_cuda.event_create()

    def __del__(self) -> None:
        fake_cuda.event_destroy(self.ptr, missing_ok=True)

    @property
    def done(self) -> bool:
        return fake_cuda.event_query(self.ptr) == 0

    def record(self, stream: _BaseStream | None = None) -> None:
        fake_cuda.event_record(self.ptr, (get_current_stream() if stream is None else stream).ptr)

    def synchronize(self) -> None:
        fake_cuda.event_synchronize(self.ptr)


def get_current_stream(device_id: int = -1) -> Any:
    """Return the current stream of a device in this thread; by default, of the current device."""
    return _current().get(fake_cuda.get_device() if device_id == -1 else device_id, Stream.null)


class PinnedMemoryPointer(bytearray):
    """As CuPy's: host memory with a buffer of bytes, which belongs to the context of the current device."""

    def __init__(self, size: int) -> None:
        fake_cuda.set_device(fake_cuda.get_device())
        super().__init__(bytes([fake_cuda.POISON]) * size)
        self.ptr: int = np.frombuffer(self, np.uint8).ctypes.data if size else 0
        pinned.append(size)
        with _listing:
            _alive.add(self)

    __hash__ = object.__hash__


_alive: weakref.WeakSet[PinnedMemoryPointer] = weakref.WeakSet()
_listing = threading.Lock()  # a set that another thread adds to cannot be listed


def _all_alive() -> list[PinnedMemoryPointer]:
    with _listing:
        return list(_alive)


def pinned_now() -> int:
    """Return how many bytes of pinned memory somebody holds."""
    return sum(len(memory) for memory in _all_alive())


pinned: list[int] = []
"""The sizes of all pinned memory that was asked for since a test cleared this list."""


def _properties(device: int) -> dict[str, Any]:
    if not 0 <= device < fake_cuda.get_device_count():
        raise CUDARuntimeError(101)
    return {
        "name": b"Fake GPU",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 16 << 30,
        "multiProcessorCount": 4,
        "pciDomainID": 0,
        "pciBusID": device + 1,
        "pciDeviceID": 0,
        "uuid": fake_cuda.uuid(device),
    }


_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3


def _memcpy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """Copy when the stream comes to it, which is true of the host's memory where that is pinned: no other one may be given."""
    target = _pinned_at(dst, size) if kind == _DEVICE_TO_HOST else None
    source = _pinned_at(src, size) if kind == _HOST_TO_DEVICE else None

    def copy() -> None:
        np.copyto(view(dst, size) if target is None else target, view(src, size) if source is None else source)

    fake_cuda.enqueue(stream, copy)


def _pinned_at(pointer: int, size: int) -> np.ndarray[Any, Any]:
    """Return pinned memory at an address. As on a device, it is not kept: who drops it while a copy is under way has poison or worse."""
    for memory in _all_alive():
        if memory.ptr <= pointer and pointer + size <= memory.ptr + len(memory):
            buffer = (ctypes.c_uint8 * size).from_address(pointer)
            return np.frombuffer(buffer, np.uint8)
    raise AssertionError("asynchronous copies of this fake are to and from pinned memory alone")


def _module(name: str, **names: Any) -> Any:
    module = types.ModuleType(name)
    module.__dict__.update(names)
    return module


cuda: Any = _module(
    "cupy.cuda",
    __path__=[],
    Device=Device,
    Event=Event,
    ExternalStream=ExternalStream,
    Graph=Graph,
    PinnedMemoryPointer=PinnedMemoryPointer,
    Stream=Stream,
    alloc_pinned_memory=PinnedMemoryPointer,
    device=_module("cupy.cuda.device", Device=Device),
    get_current_stream=get_current_stream,
    is_available=lambda: True,
    driver=_module(
        "cupy.cuda.driver",
        CUDADriverError=fake_cuda.CUDADriverError,
        ctxGetCurrent=fake_cuda.get_context,
        ctxSetCurrent=fake_cuda.set_context,
    ),
    runtime=_module(
        "cupy.cuda.runtime",
        CUDARuntimeError=CUDARuntimeError,
        driverGetVersion=lambda: 13000,
        eventBlockingSync=1,
        eventCreate=fake_cuda.event_create,
        eventCreateWithFlags=lambda flags: fake_cuda.event_create(),
        eventDefault=0,
        eventDestroy=lambda event: fake_cuda.event_destroy(event),  # noqa: PLW0108  # without the fake's own options
        eventDisableTiming=2,
        eventQuery=fake_cuda.event_query,
        eventRecord=fake_cuda.event_record,
        eventSynchronize=fake_cuda.event_synchronize,
        deviceCanAccessPeer=lambda device, peer: int(device != peer),
        deviceSynchronize=fake_cuda.device_synchronize,
        getDevice=fake_cuda.get_device,
        getDeviceCount=fake_cuda.get_device_count,
        getDeviceProperties=_properties,
        memcpyAsync=_memcpy,
        memcpyDeviceToDevice=_DEVICE_TO_DEVICE,
        memcpyDeviceToHost=_DEVICE_TO_HOST,
        memcpyHostToDevice=_HOST_TO_DEVICE,
        runtimeGetVersion=lambda: 12090,
        setDevice=fake_cuda.set_device,
        streamBeginCapture=lambda stream, mode=2: begin_capture(stream),
        streamCreate=lambda: fake_cuda.stream_create(),  # noqa: PLW0108  # without the fake's own options
        streamCreateWithFlags=lambda flags: fake_cuda.stream_create(is_blocking=not flags & 1),
        streamCreateWithPriority=lambda flags, priority: fake_cuda.stream_create(is_blocking=not flags & 1),
        streamDefault=0,
        streamDestroy=lambda stream: fake_cuda.stream_destroy(stream),  # noqa: PLW0108  # without the fake's own options
        streamGetFlags=fake_cuda.stream_flags,
        streamIsCapturing=fake_cuda.is_capturing,
        streamLegacy=1,
        streamNonBlocking=1,
        streamPerThread=2,
        streamQuery=fake_cuda.stream_query,
        streamSynchronize=fake_cuda.stream_synchronize,
        streamWaitEvent=lambda stream, event, flags=0: fake_cuda.stream_wait_event(stream, event),
    ),
)
