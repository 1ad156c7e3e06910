"""Arrays of CuPy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.arrays.libraries.library import Array, DeviceArray, Lane, Library
from oneaccord.arrays.libraries.shared import no_memory, refuse_overlap
from oneaccord.errors import DTypeError

__all__ = ["CuPyLibrary", "on_device"]

_HERE: AbstractContextManager[None] = nullcontext()


class CuPyLibrary(Library):
    """CuPy. The current stream is CuPy's own: each thread has one for each device."""

    name = "CuPy"
    is_stream_ordered = True
    streams = "CuPy"

    def read(self, value: Any) -> Array | DeviceArray:
        """Return the memory of the array. CuPy queues its own calls on the current stream, so there is nothing to wait for."""
        check_dtype(value.dtype)
        if value.dtype.names is not None:
            raise DTypeError(
                f"a structured array on a GPU, such as this one of {value.dtype}, cannot travel: copy it to the host with x.get()"
            )
        data = value.data
        return DeviceArray(
            value, self, data.ptr, value.shape, value.dtype, data.device_id, is_contiguous=value.flags.c_contiguous
        )

    def write(self, value: Any) -> Array | DeviceArray:
        """Return the memory of the array; its elements must not share memory."""
        if not value.flags.c_contiguous:
            refuse_overlap(value.shape, value.strides, value.itemsize)
        return self.read(value)

    def give(self, result: Array, like: Any) -> Any:
        """Return a copy on the device of ``like``: CuPy has no arrays in host memory."""
        return self.give_device(self.to_device(result, like.data.device_id), like)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
        """Return memory of CuPy's pool, allocated for the current stream."""
        cupy = sys.modules["cupy"]
        with on_device(device):
            try:
                return self._device_array(cupy.empty(shape, dtype))
            except MemoryError as error:
                raise no_memory(shape, dtype, device, error) from error

    def adopt(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object) -> Any:
        """Return an array of memory that belongs to ``owner``, which it keeps alive."""
        cupy = sys.modules["cupy"]
        nbytes = math.prod(shape) * dtype.itemsize
        with on_device(device):
            memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner, device)
            return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def address(self, value: Any, device: int) -> int:
        """Return the address of an array."""
        data = value.data
        if data.device_id != device:
            return 0
        try:
            is_contiguous = value._c_contiguous
        except AttributeError:  # this attribute is quicker than `flags`, but CuPy does not promise it
            is_contiguous = value.flags.c_contiguous
        return data.ptr if is_contiguous else 0

    def give_device(self, result: DeviceArray, like: Any) -> Any:
        """Return the array that owns the memory."""
        owner = result.owner
        return owner if owner.shape == result.shape else owner.reshape(result.shape)

    def stream(self, device: int) -> tuple[int, Any]:
        """Return CuPy's current stream on a device in this thread; the legacy default stream has the handle 0."""
        stream = sys.modules["cupy"].cuda.get_current_stream(device)
        return stream.ptr, stream

    def synchronize(self, device: int) -> None:
        """Wait for the current stream. The handle 0 means the default stream of the current device, whatever device the stream object has."""
        with on_device(device):
            super().synchronize(device)

    @contextmanager
    def using(self, keep: Any, device: int) -> Iterator[None]:
        """Return CuPy's context manager for the stream, which needs the device to be the current one."""
        with on_device(device), keep:
            yield

    def external(self, stream: int, device: int) -> Any:
        """Return a stream of CuPy's for a handle."""
        return sys.modules["cupy"].cuda.Stream.from_external(_Handle(stream))

    def contiguous(self, array: DeviceArray) -> DeviceArray:
        """Return a copy in C order, made by a kernel of CuPy's."""
        if array.is_contiguous:
            return array
        with on_device(array.device):
            return self._device_array(sys.modules["cupy"].ascontiguousarray(array.owner))

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copy on the device; another dtype takes a kernel of CuPy's."""
        with on_device(target.device):
            sys.modules["cupy"].copyto(target.owner, source.owner.reshape(target.owner.shape))

    def to_host(self, array: DeviceArray) -> Array:
        """Return a copy in memory of CuPy's pinned pool; the host waits for the current stream."""
        if not array.size:
            return np.empty(array.shape, array.dtype)
        # `get` copies on the current stream of the current device, wherever the array is.
        with on_device(array.device):
            host = self.pinned(array.nbytes, array.device).view(array.dtype).reshape(array.shape)
            array.owner.reshape(array.shape).get(out=host)
        return host

    def to_device(self, result: Array, device: int) -> DeviceArray:
        """Return a copy; CuPy has read the host memory, into pinned memory of its own, when this returns."""
        with on_device(device):
            return self._device_array(sys.modules["cupy"].asarray(result, order="C"))

    def point(self, device: int) -> Any:
        """Return an event on CuPy's current stream."""
        with on_device(device):
            return _event(sys.modules["cupy"].cuda.get_current_stream(device))

    def lane(self, device: int) -> Lane:
        """Return a lane on a non-blocking stream: it waits for the legacy default stream only on request."""
        return _Lane(self, device)

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return memory of CuPy's pinned pool, which takes it back when the array is no longer referenced.

        It belongs to the context of the current device, which is made if there is none.
        """
        with on_device(device):
            return np.frombuffer(sys.modules["cupy"].cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def _device_array(self, array: Any) -> DeviceArray:
        data = array.data
        return DeviceArray(array, self, data.ptr, array.shape, array.dtype, data.device_id, is_contiguous=True)


class _Handle:
    """The handle of a stream, by CUDA's protocol for streams of other libraries."""

    __slots__ = ("_stream",)

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class _Lane(Lane):
    """A stream of CuPy's."""

    def __init__(self, library: CuPyLibrary, device: int) -> None:
        self._library = library
        self._device = device
        self._runtime = sys.modules["cupy"].cuda.runtime
        with on_device(device):
            self._stream = sys.modules["cupy"].cuda.Stream(non_blocking=True)

    def after(self, point: Any) -> None:
        with on_device(self._device):
            self._stream.wait_event(point)

    def fetch(self, host: Array, source: DeviceArray, start: int) -> None:
        pointer = source.pointer + start * source.dtype.itemsize
        self._copy(host.ctypes.data, pointer, host.nbytes, self._runtime.memcpyDeviceToHost)

    def store(self, target: DeviceArray, start: int, host: Array) -> None:
        pointer = target.pointer + start * target.dtype.itemsize
        self._copy(pointer, host.ctypes.data, host.nbytes, self._runtime.memcpyHostToDevice)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        with on_device(self._device):  # a thread that has used no device yet would give the first one a context
            self._runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._library.using(self._stream, self._device):
            self._library.copy(target, source)

    def mark(self) -> Callable[[], bool]:
        with on_device(self._device):
            event = _event(self._stream)
        return lambda: bool(event.done)


def _event(stream: Any) -> Any:
    """Return an event behind all that is queued on a stream of the current device."""
    event = sys.modules["cupy"].cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def on_device(device: int) -> AbstractContextManager[Any]:
    """Return a block in which a device is the current one."""
    return _HERE if sys.modules["cupy"].cuda.runtime.getDevice() == device else _elsewhere(device)


@contextmanager
def _elsewhere(device: int) -> Iterator[None]:
    # Not as CuPy's own block does: a thread that has used no device yet has the first one, and to set that one again fills its memory with
    # a context.
    cuda = sys.modules["cupy"].cuda
    try:
        context = cuda.driver.ctxGetCurrent()
    except cuda.driver.CUDADriverError:  # the driver has not been used yet
        context = 0
    cuda.runtime.setDevice(device)
    try:
        yield
    finally:
        with suppress(cuda.driver.CUDADriverError):  # a device has failed; another place reports it
            cuda.driver.ctxSetCurrent(context)
