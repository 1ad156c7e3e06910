"""What CUDA's runtime does, on threads and NumPy memory: streams, events, captured graphs, and device memory.

It is late on purpose: a stream runs what is queued on it at once only while something waits for it, on the host or on another stream;
else it dawdles, so that a wait that is missing shows as wrong values. Fresh and freed memory holds a poison pattern.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from support.fake_gpu.fake_errors import CUDARuntimeError
from support.fake_gpu.fake_streams import Capture, Point, Stream, here

__all__ = [
    "CUDARuntimeError",
    "Graph",
    "Memory",
    "begin_capture",
    "device_at",
    "device_of",
    "device_synchronize",
    "end_capture",
    "enqueue",
    "event_create",
    "event_destroy",
    "event_query",
    "event_record",
    "event_synchronize",
    "forgive",
    "get_device",
    "get_device_count",
    "held",
    "is_capturing",
    "make_context",
    "set_device",
    "shut_down",
    "start_up",
    "stream_create",
    "stream_destroy",
    "stream_flags",
    "stream_query",
    "stream_synchronize",
    "stream_wait_event",
    "view",
]

POISON = 0xFF
"""Every byte of memory that nobody has written: not a number for floats, -1 for integers."""

_PATIENCE_S = 20.0
_ALIGNMENT = 512


class _Event:
    def __init__(self, device: int) -> None:
        self.device = device
        self.point: Point | None = None
        self.capture: Capture | None = None
        self.captured_on: Stream | None = None


class _Machine:
    """All devices, and what was made on them."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.destroyed: list[Stream] = []
        self.default_streams: dict[tuple[int, int], Stream] = {}
        self.events: dict[int, _Event] = {}
        self.failures: dict[int, BaseException] = {}
        self.first_failure: BaseException | None = None
        self.starts: list[int] = []
        self.memories: dict[int, tuple[np.ndarray[Any, Any], int]] = {}
        self.contexts: set[int] = set()
        self.synchronizations: dict[int, int] = {}

    def fail(self, device: int, error: BaseException) -> None:
        with self.lock:
            self.failures.setdefault(device, error)
            self.first_failure = self.first_failure or error

    def status(self, device: int) -> int:
        error = self.failures.get(device)
        if error is None:
            return 0
        return error.status if isinstance(error, CUDARuntimeError) else 719

    def check(self, device: int) -> None:
        status = self.status(device)
        if status:
            raise CUDARuntimeError(status) from self.failures[device]

    def stream(self, handle: int) -> Stream:
        """Return the stream of a handle; 0 and 1 are the legacy default stream of the current device, 2 the thread's own."""
        if not 0 <= handle <= 2:
            with self.lock:
                if handle not in self.streams:
                    raise CUDARuntimeError(400)
                return self.streams[handle]
        device = get_device()
        if device >= self.devices:
            raise CUDARuntimeError(100)
        key = (device, threading.get_ident() if handle == 2 else 0)
        with self.lock:
            if key not in self.default_streams:
                self.default_streams[key] = Stream(self, device, 2 if handle == 2 else 0, is_blocking=handle == 2)
            return self.default_streams[key]

    def event(self, handle: int) -> _Event:
        with self.lock:
            if handle not in self.events:
                raise CUDARuntimeError(400)
            return self.events[handle]

    def all_streams(self) -> list[Stream]:
        return [*self.streams.values(), *self.default_streams.values()]

    def put(self, stream: Stream, function: Callable[[], object]) -> None:
        """Queue a function in the order that the legacy default stream has with all blocking ones of its device."""
        if stream.capture is not None:
            stream.capture.work.append(function)
            if stream is not stream.capture.origin:
                stream.capture.unjoined.add(stream)
            return
        if stream.handle == 0:
            _check_implicit(stream)
            others = [other for other in self.all_streams() if other.is_blocking and other.device == stream.device]
        elif stream.is_blocking and (stream.device, 0) in self.default_streams:
            others = [self.default_streams[stream.device, 0]]
        else:
            others = []
        for other in others:
            if not other.last.reached.is_set():
                stream.put(other.last.wait)
        stream.put(function)


_machine = _Machine(0)
# No handle is ever given twice, so that a stream of an earlier test, when it is collected, does not end one of a later test.
_handles = itertools.count(0x7F00_0000_0000, 0x100)


def start_up(devices: int = 2) -> None:
    """Begin anew, with so many devices."""
    global _machine  # noqa: PLW0603  # a computer has one driver as well
    _machine = _Machine(devices)
    here.device, here.context = 0, 0


def shut_down() -> None:
    """End all threads, once all work is done; raise what failed on a device, where something did."""
    machine = _machine
    for stream in machine.all_streams():
        stream.work.put(None)
    for stream in [*machine.destroyed, *machine.all_streams()]:
        with stream.hurried():
            stream.thread.join(_PATIENCE_S)
        assert not stream.thread.is_alive(), f"the {stream.thread.name} hangs"
    start_up(machine.devices)
    if machine.first_failure is not None:
        raise machine.first_failure


def forgive() -> None:
    """Forget what failed on a device: the test meant it to."""
    _machine.failures.clear()
    _machine.first_failure = None


def _nothing() -> None:
    pass


# Devices.


def get_device() -> int:
    device: int = getattr(here, "device", 0)
    return device


def set_device(device: int) -> None:
    if not 0 <= device < max(_machine.devices, 1):
        raise CUDARuntimeError(101)
    here.device, here.context = device, device + 1
    _machine.contexts.add(device)


def contexts() -> set[int]:
    """The devices that hold a context, which takes memory: those that were set, as since CUDA 12, in whichever thread."""
    return set(_machine.contexts)


def make_context(device: int) -> None:
    """Make the context of a device, which does not make the device current."""
    _machine.contexts.add(device)


class CUDADriverError(RuntimeError):
    """As CuPy's."""


def get_context() -> int:
    if not _machine.contexts:
        raise CUDADriverError("CUDA_ERROR_NOT_INITIALIZED: initialization error")
    context: int = getattr(here, "context", 0)
    return context


def set_context(context: int) -> None:
    """Make a context current, or none; without one a thread still has the device that it set."""
    here.context = context
    if context:
        here.device = context - 1


def get_device_count() -> int:
    if not _machine.devices:
        raise CUDARuntimeError(100)
    return _machine.devices


def synchronizations(device: int) -> int:
    """Return how often somebody has waited for all work of a device; such a call of CUDA does not exist."""
    return _machine.synchronizations.get(device, 0)


def uuid(device: int, *, is_whole: bool = False) -> bytes:
    """Return the 16 bytes that no other device has; ``is_whole`` those of the GPU of which it may be an instance."""
    return bytes([0xFA, 0xCE, *bytes(13), device])


def device_synchronize() -> None:
    """Wait for all work of the current device."""
    device = get_device()
    with _machine.lock:
        streams = [stream for stream in _machine.all_streams() if stream.device == device]
        # The work of a device encompasses what is captured there (CUDA's programming guide, "Prohibited and Unhandled Operations").
        captures = [stream.capture for stream in streams if stream.capture is not None]
        for capture in captures:
            capture.is_invalid = True
        if captures:
            raise CUDARuntimeError(900)
        points = [stream.last for stream in streams]
    for point in points:
        point.wait()
    with _machine.lock:
        _machine.synchronizations[device] = synchronizations(device) + 1
    _machine.check(device)


# Streams.


def stream_create(*, is_blocking: bool = True) -> int:
    with _machine.lock:
        handle = next(_handles)
        _machine.streams[handle] = Stream(_machine, get_device(), handle, is_blocking=is_blocking)
        return handle


def stream_destroy(handle: int, *, missing_ok: bool = False) -> None:
    """Forget a stream; what is queued on it still runs. Takes no lock, so that ``__del__`` may call it in the middle of anything."""
    stream = _machine.streams.pop(handle, None)
    if stream is not None:
        _machine.destroyed.append(stream)
        stream.work.put(None)
    elif not missing_ok:
        raise CUDARuntimeError(400)


def stream_flags(handle: int) -> int:
    return 0 if _machine.stream(handle).is_blocking or handle in (0, 1) else 1


def device_of(handle: int) -> int:
    return _machine.stream(handle).device


def enqueue(stream: int, function: Callable[[], object]) -> None:
    """Queue a function on a stream, or record it where that is capturing. What the function raises breaks the device."""
    with _machine.lock:
        found = _machine.stream(stream)
        _machine.check(found.device)
        _machine.put(found, function)


@contextlib.contextmanager
def held(stream: int) -> Iterator[None]:
    """Let a stream stop at this point of its work, until the block ends."""
    gate = threading.Event()
    enqueue(stream, gate.wait)
    try:
        yield
    finally:
        gate.set()


def stream_synchronize(handle: int) -> None:
    with _machine.lock:
        stream = _machine.stream(handle)
        _check_not_capturing(stream)
        _machine.put(stream, _nothing)  # behind all that was freed as well
        point = stream.last
    point.wait()
    _machine.check(stream.device)


def stream_query(handle: int) -> int:
    with _machine.lock:
        stream = _machine.stream(handle)
        if stream.capture is not None:
            stream.capture.is_invalid = True
            return 900
        status = _machine.status(stream.device)
        return status or (0 if stream.last.reached.is_set() else 600)


def stream_wait_event(handle: int, event: int) -> None:
    """Let a stream wait; one that waits for an event of a capturing stream joins the capture."""
    with _machine.lock:
        stream, found = _machine.stream(handle), _machine.event(event)
        if found.capture is not None:
            if stream.capture is None:
                stream.capture = found.capture
                stream.capture.streams.append(stream)
            elif stream.capture is not found.capture:
                raise CUDARuntimeError(905)
            if found.captured_on is not stream:
                stream.capture.unjoined.discard(found.captured_on)  # type: ignore[arg-type]
                if stream is not stream.capture.origin:
                    stream.capture.unjoined.add(stream)
        elif found.point is not None:
            if stream.capture is not None:
                stream.capture.is_invalid = True
                raise CUDARuntimeError(905)
            _machine.put(stream, found.point.wait)


# Events.


def event_create() -> int:
    with _machine.lock:
        handle = next(_handles)
        _machine.events[handle] = _Event(get_device())
        return handle


def event_destroy(handle: int, *, missing_ok: bool = False) -> None:
    """Forget an event. Takes no lock, as `stream_destroy`."""
    if _machine.events.pop(handle, None) is None and not missing_ok:
        raise CUDARuntimeError(400)


def event_record(handle: int, stream: int) -> None:
    with _machine.lock:
        event, found = _machine.event(handle), _machine.stream(stream)
        if event.device != found.device:
            raise CUDARuntimeError(400)
        _machine.check(found.device)
        event.capture, event.captured_on, event.point = found.capture, None, None
        if found.capture is not None:
            event.captured_on = found
            return
        _machine.put(found, _nothing)
        event.point = found.last


def event_query(handle: int) -> int:
    with _machine.lock:
        event = _machine.event(handle)
        if event.capture is not None:
            return 907
        status = _machine.status(event.device)
        return status or (0 if event.point is None or event.point.reached.is_set() else 600)


def event_synchronize(handle: int) -> None:
    with _machine.lock:
        event = _machine.event(handle)
        if event.capture is not None:
            event.capture.is_invalid = True
            raise CUDARuntimeError(907)
    if event.point is not None:
        event.point.wait()
    _machine.check(event.device)


# Capture.


class Graph:
    """Work that was captured."""

    def __init__(self, work: list[Callable[[], object]]) -> None:
        self._work = work

    def launch(self, stream: Any) -> None:
        """Queue all of it on a stream: a handle, or an object that has one in ``ptr``."""
        handle = _handle(stream)
        for function in self._work:
            enqueue(handle, function)


def _handle(stream: Any) -> int:
    return stream if isinstance(stream, int) else int(stream.ptr)


def _check_not_capturing(stream: Stream) -> None:
    if stream.capture is not None:
        stream.capture.is_invalid = True
        raise CUDARuntimeError(900)
    if stream.handle == 0:
        _check_implicit(stream)


def _check_implicit(stream: Stream, *, spoils: bool = True) -> None:
    """Refuse the legacy default stream while a blocking stream of the device is capturing."""
    for other in _machine.all_streams():
        if other.capture is not None and other.is_blocking and other.device == stream.device:
            other.capture.is_invalid |= spoils
            raise CUDARuntimeError(906)


def begin_capture(stream: Any) -> None:
    """Record what is enqueued on a stream from now on, and on those that join it, and run nothing of it."""
    with _machine.lock:
        found = _machine.stream(_handle(stream))
        if found.handle == 0:
            raise CUDARuntimeError(900)
        _check_not_capturing(found)
        found.capture = Capture(found)


def end_capture(stream: Any) -> Graph:
    """Return what was recorded. The host enqueues in an order that every dependency keeps, so that one list holds all of it."""
    with _machine.lock:
        found = _machine.stream(_handle(stream))
        capture = found.capture
        if capture is None or capture.origin is not found:
            raise CUDARuntimeError(400)
        for joined in capture.streams:
            joined.capture = None
        if capture.is_invalid:
            raise CUDARuntimeError(900)
        if capture.unjoined:
            raise CUDARuntimeError(904)
        return Graph(capture.work)


def is_capturing(handle: int) -> bool:
    with _machine.lock:
        stream = _machine.stream(handle)
        if stream.handle == 0:
            _check_implicit(stream, spoils=False)
        return stream.capture is not None


# Memory.


class Memory:
    """A piece of device memory, filled with poison.

    As CuPy's pool has it, memory that is freed is used again when the stream for which it was allocated comes to that point, which is
    when it is poisoned: who uses it on another stream must keep it until that is done.
    """

    def __init__(self, nbytes: int, stream: int) -> None:
        raw = np.full(nbytes + _ALIGNMENT, POISON, np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        self.bytes = raw[offset : offset + nbytes]
        self.ptr: int = self.bytes.ctypes.data if nbytes else 0
        self._machine = _machine
        with _machine.lock:
            self._stream = _machine.stream(stream)
            self.device_id = self._stream.device
        self.is_mapped = False
        if nbytes:
            self.map()

    def map(self) -> None:
        """Let the device find it, if it does not."""
        with self._machine.lock:
            if not self.is_mapped:
                bisect.insort(self._machine.starts, self.ptr)
                self._machine.memories[self.ptr] = (self.bytes, self.device_id)
                self.is_mapped = True

    def unmap(self) -> None:
        """Take it away at once, whatever the device does with it."""
        self.is_mapped = False
        _release(self._machine, self.bytes, self.ptr)

    def __del__(self) -> None:
        if getattr(self, "is_mapped", False):
            machine, memory, pointer = self._machine, self.bytes, self.ptr
            # No lock is taken: this may run in the middle of anything.
            self._stream.work.put(lambda: _release(machine, memory, pointer))


def _release(machine: _Machine, memory: np.ndarray[Any, Any], pointer: int) -> None:
    memory[:] = POISON
    with machine.lock:
        del machine.memories[pointer]
        machine.starts.remove(pointer)


def view(pointer: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the bytes of device memory at an address; raise as a device does where nobody has allocated them."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    with _machine.lock:
        place = bisect.bisect_right(_machine.starts, pointer) - 1
        if place >= 0:
            start = _machine.starts[place]
            memory, _ = _machine.memories[start]
            if pointer + nbytes <= start + memory.nbytes:
                return memory[pointer - start : pointer - start + nbytes]
    raise CUDARuntimeError(700)


def device_at(pointer: int) -> int:
    """Return the device that holds an address."""
    view(pointer, 1)
    with _machine.lock:
        return _machine.memories[_machine.starts[bisect.bisect_right(_machine.starts, pointer) - 1]][1]
