"""The interface to a library of arrays: it finds an array's memory, and makes results of the same kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "DeviceArray", "Lane", "Library"]

Array = npt.NDArray[Any]


class DeviceArray:
    """The memory of an array on a CUDA device, as the array's library reports it.

    Attributes
    ----------
    owner
        The array, which keeps the memory alive.
    library
        Whose it is.
    pointer
        The address of its first element.
    shape, dtype
        As for a NumPy array.
    device
        The number of the device.
    is_contiguous
        Whether it is C-contiguous.
    """

    __slots__ = ("device", "dtype", "is_contiguous", "library", "owner", "pointer", "shape")

    def __init__(
        self,
        owner: Any,
        library: Library,
        pointer: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        *,
        is_contiguous: bool,
    ) -> None:
        self.owner: Any = owner
        self.library: Library = library
        self.pointer: int = pointer
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.device: int = device
        self.is_contiguous: bool = is_contiguous

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
        return self.size * self.dtype.itemsize

    def reshape(self, *shape: int) -> DeviceArray:
        """Return the same memory with another shape of as many elements; it must be contiguous."""
        return DeviceArray(
            self.owner, self.library, self.pointer, shape, self.dtype, self.device, is_contiguous=self.is_contiguous
        )


class Lane(ABC):
    """A library's separate stream on one device: copies between the device and pinned memory run on it, one after the other.

    Nothing here waits on the host. The memory must be kept until a mark behind the last copy is done.
    """

    @abstractmethod
    def after(self, point: Any) -> None:
        """Make work that is queued from now on wait for the event that `Library.point` returned."""

    @abstractmethod
    def fetch(self, host: Array, source: DeviceArray, start: int) -> None:
        """Queue a copy to ``host`` of as many elements of a C-contiguous array as there is room for, from element ``start`` on."""

    @abstractmethod
    def store(self, target: DeviceArray, start: int, host: Array) -> None:
        """Queue a copy of all elements of ``host`` into a C-contiguous array, from element ``start`` on."""

    @abstractmethod
    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queue a copy on the device, as `Library.copy`."""

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """Return a function that says whether all work queued so far is done. It never blocks, and raises if the device has failed."""


class Library(ABC):
    """A library of arrays. None is imported here: a program that has an array has imported its library.

    Attributes
    ----------
    name
        Its name in messages.
    is_stream_ordered
        Whether freed memory of an array is reused only after the work queued on its current stream. If not, an array must be kept
        until the device is done with it.
    streams
        The library whose current streams are used.
    """

    name: str
    is_stream_ordered: bool = False
    streams: str = ""

    @abstractmethod
    def read(self, value: Any) -> Array | DeviceArray:
        """Return the memory of an array, without a copy: a NumPy view, perhaps read-only, if it is host memory.

        If another stream than the current one still writes to it, the current stream is made to wait.

        Raises
        ------
        DTypeError
            Its dtype cannot travel.
        LayoutError
            It is not a plain array of numbers in one piece of memory: it is sparse, quantized, lazy, or on a device other than CUDA's.
        UsageError
            It is a tensor that requires a gradient while gradients are recorded.
        """

    @abstractmethod
    def write(self, value: Any) -> Array | DeviceArray:
        """Return the memory of an array for a result, as `read`.

        Raises
        ------
        LayoutError
            It cannot be written to, such as any array of JAX.
        """

    @abstractmethod
    def give(self, result: Array, like: Any) -> Any:
        """Return a result in host memory as an array of this library, without a copy if the library allows that.

        ``like`` is the array that was given to the call.
        """

    # Device memory. A library that has none need not define these.

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
        """Return new, C-contiguous memory of a device, allocated for the library's current stream there."""
        raise NotImplementedError

    def uses_devices(self) -> bool:
        """Return whether the library, once imported, may have arrays on devices."""
        return True

    def address(self, value: Any, device: int) -> int:
        """Return the address of a C-contiguous array on a device, quickly; 0 if it is neither, or if only a slower look can tell."""
        return 0

    def wrote(self, value: Any) -> None:  # noqa: B027 - most libraries do not keep count
        """Note that a result was written to an array whose address `address` returned."""

    def fresh(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> tuple[int, Any]:
        """Return the address of new memory as by `empty`, and the array to return; for libraries with `address`."""
        array = self.empty(shape, dtype, device)
        return array.pointer, array.owner

    def give_device(self, result: DeviceArray, like: Any) -> Any:
        """Return a result in memory that `empty` returned, to which the current stream will have written, as an array of this library."""
        raise NotImplementedError

    def stream(self, device: int) -> tuple[int, Any]:
        """Return the handle of the library's current stream on a device, and an object that keeps the stream alive."""
        raise NotImplementedError

    def using(self, keep: Any, device: int) -> AbstractContextManager[Any]:
        """Return a block in which a stream of a device, as the object that `stream` returned with its handle, is the current one of this thread."""
        raise NotImplementedError

    def external(self, stream: int, device: int) -> Any:
        """Return an object for a stream that the library did not make, by its handle, as `using` takes it."""
        raise NotImplementedError

    def synchronize(self, device: int) -> None:
        """Block the host until the current stream of a device has done all its queued work."""
        self.stream(device)[1].synchronize()

    def contiguous(self, array: DeviceArray) -> DeviceArray:
        """Return a C-contiguous copy, made on the current stream; the array itself if it is contiguous."""
        raise NotImplementedError

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copy an array into one of the same shape, on the current stream, and convert it where the dtype is another.

        One of the two must be C-contiguous.
        """
        raise NotImplementedError

    def to_host(self, array: DeviceArray) -> Array:
        """Return a copy in host memory, pinned if the library can, once all work queued on the current stream is done."""
        raise NotImplementedError

    def to_device(self, result: Array, device: int) -> DeviceArray:
        """Return a copy of a host array on a device, made on the current stream."""
        raise NotImplementedError

    def point(self, device: int) -> Any:
        """Return the point that the current stream of a device, in this thread, has come to when it has done all that is queued by now."""
        raise NotImplementedError

    def lane(self, device: int) -> Lane:
        """Return a new lane of a device."""
        raise NotImplementedError

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return so many bytes of pinned memory of the host, which all devices may copy from and to; a ``device`` that is in use is enough."""
        raise NotImplementedError
