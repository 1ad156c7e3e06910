"""Arrays of JAX, and of every library that speaks DLPack or the CUDA array interface.

The rules for streams, and the functions that follow them:

- Reading by DLPack, `_from_device`: the consumer gives its stream to ``__dlpack__(stream=)``, and the producer makes that one wait. CuPy
  gives its current stream on the array's device, as 1 for the legacy default stream, because 0 is not allowed.
- Reading by the CUDA array interface, version 3, `_from_interface`: the reader waits for the stream in the entry ``stream``. 1
is the legacy default stream, 2 that of the thread, None says that there is nothing to wait for, and 0 is not allowed. CuPy would
block the host; here the current stream waits.
- Giving by DLPack, `give_device`: the other library is the consumer, and CuPy is the producer. CuPy makes the given stream wait
for its own current stream. CuPy takes the current stream of the current device, which must then be the array's device.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.arrays.libraries.cupy import CuPyLibrary, on_device
from oneaccord.arrays.libraries.library import Array, DeviceArray
from oneaccord.errors import DTypeError, LayoutError, UnsupportedError

__all__ = ["JaxLibrary", "StandardLibrary"]

# Types of devices in DLPack.
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13

_REFUSALS = (TypeError, ValueError, BufferError, RuntimeError, AttributeError, NotImplementedError)
"""The exceptions of libraries that cannot give an array away."""


class StandardLibrary(CuPyLibrary):
    """Any library that speaks DLPack or the CUDA array interface. On a device CuPy does the work, on CuPy's current stream."""

    name = "DLPack"
    is_stream_ordered = False

    def read(self, value: Any) -> Array | DeviceArray:
        """Return a view of the array's memory."""
        if _is_on_device(value):
            return super().read(_from_device(value))
        array = self._host(value)
        check_dtype(array.dtype)
        return array

    def write(self, value: Any) -> Array | DeviceArray:
        """Return a view of the array's memory if the array says that it is writable."""
        if _is_on_device(value):
            if getattr(value, "__cuda_array_interface__", {"data": (0, False)})["data"][1]:
                raise LayoutError("out= is read-only")
            return super().write(_from_device(value))
        if not hasattr(value, "__dlpack__"):
            raise LayoutError(f"out= is a {type(value).__name__}, whose memory oneaccord cannot reach: give a NumPy array")
        try:
            array: Array = np.from_dlpack(value)
        except _REFUSALS as error:
            raise _unreadable(value, error) from error
        check_dtype(array.dtype)
        if not array.flags.writeable:
            raise LayoutError(
                f"out= is a {type(value).__name__} that is read-only, or does not say that it is writable: give a NumPy array"
            )
        return array

    def _host(self, value: Any) -> Array:
        try:
            if hasattr(value, "__dlpack__"):
                array: Array = np.from_dlpack(value)
                return array
        except _REFUSALS as error:  # such as a dtype that NumPy does not take this way
            if not hasattr(value, "__array__"):
                raise _unreadable(value, error) from error
        try:
            return np.asarray(value)
        except _REFUSALS as error:
            raise _unreadable(value, error) from error

    def give(self, result: Array, like: Any) -> Any:
        """Return the result as an array of the namespace of ``like``; the result itself if there is no such namespace."""
        if not hasattr(like, "__array_namespace__"):
            return result
        namespace = like.__array_namespace__()
        try:
            return namespace.from_dlpack(result)
        except _REFUSALS:  # read-only memory, and dtypes that NumPy does not give away like this
            return namespace.asarray(result)

    def give_device(self, result: DeviceArray, like: Any) -> Any:
        """Return the result as an array of the namespace of ``like``; as a CuPy array if there is no such namespace."""
        array = super().give_device(result, like)
        if not hasattr(like, "__array_namespace__"):
            return array
        with on_device(result.device):
            return like.__array_namespace__().from_dlpack(array)


class JaxLibrary(StandardLibrary):
    """JAX, whose arrays never change: they are read, and results are new ones."""

    name = "JAX"

    def write(self, value: Any) -> Array | DeviceArray:
        """Refuse."""
        raise LayoutError("out= is an array of JAX, which cannot be changed: leave out= out, and use the returned array")

    def _host(self, value: Any) -> Array:
        # NumPy reads JAX's bfloat16 and float8 this way, and not through DLPack.
        try:
            return np.asarray(value)
        except _REFUSALS as error:
            raise _unreadable(value, error) from error

    def give(self, result: Array, like: Any) -> Any:
        """Return the result as an array on the device of ``like``, without a copy if JAX finds the memory well aligned."""
        given = sys.modules["jax"].device_put(result, like.device)
        if given.dtype != result.dtype:
            raise DTypeError(
                f'JAX turns a result of dtype {result.dtype} into {given.dtype}: set jax.config.update("jax_enable_x64", True)'
            )
        return given


def _is_on_device(value: Any) -> bool:
    """Return whether an array is in the memory of a CUDA device; raise an error if neither the host nor CUDA can read it."""
    if not hasattr(value, "__dlpack_device__"):
        return hasattr(value, "__cuda_array_interface__")
    try:
        kind, _ = value.__dlpack_device__()
    except _REFUSALS as error:  # in parts on several devices, traced by a compiler, or on a device that DLPack does not name
        raise _unreadable(value, error) from error
    if kind in (_CPU, _CUDA_HOST):
        return False
    if kind in (_CUDA, _CUDA_MANAGED):
        return True
    raise LayoutError(
        f"a {type(value).__name__} is on a device of DLPack's type {int(kind)}, and only the memory of the host and of CUDA can be "
        "sent: copy it to the host first"
    )


def _from_device(value: Any) -> Any:
    """Return a CuPy array of the same memory, which the current stream of its device may read."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        raise UnsupportedError(
            f"a {type(value).__name__} on a GPU is read through CuPy, which the program has not imported: `import cupy` at its beginning; the backend "
            "nccl does so by itself"
        )
    try:
        if not hasattr(value, "__dlpack__"):
            return _from_interface(cupy, value)
        # CuPy makes the device current and then the one before it (cupy/_core/dlpack.pyx of 14.2.0). That one gets a context by that, which
        # fills its memory. So the two are the same here.
        with on_device(int(value.__dlpack_device__()[1])):
            return cupy.from_dlpack(value)
    except _REFUSALS as error:
        raise _unreadable(value, error) from error


class _Shown:
    """An array as the CUDA array interface shows it; keeps the array alive."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = interface


def _from_interface(cupy: Any, value: Any) -> Any:
    interface = dict(value.__cuda_array_interface__)
    stream = interface.pop("stream", None)
    if stream == 0:
        raise ValueError(
            "its CUDA array interface names stream 0, which the interface does not allow: 1 is the legacy and 2 the thread's default stream"
        )
    array = cupy.asarray(_Shown(value, interface))
    if stream is not None:
        device = array.data.device_id
        current = cupy.cuda.get_current_stream(device)
        if stream != (current.ptr or 1):
            with on_device(device):
                event = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(event.ptr, stream)
                current.wait_event(event)
    return array


def _unreadable(value: Any, error: BaseException) -> LayoutError:
    return LayoutError(f"a {type(value).__name__} cannot be read as an array: {error}")
