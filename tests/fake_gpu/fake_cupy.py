"""A stand-in for the module ``cupy``: its arrays live in NumPy memory, and all that they do is queued on the current stream.

`install` puts it into ``sys.modules``. For fakes of other libraries: `enqueue` queues a function on a stream, `view` gives the memory at
an address, `held` stops a stream, and `shut_down` ends all threads and raises what failed on a device.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest

from fake_gpu import fake_cuda
from fake_gpu.fake_cuda import CUDARuntimeError, Memory, begin_capture, end_capture, enqueue, forgive, held, shut_down, view
from fake_gpu.fake_cupy_cuda import Device, ExternalStream, cuda, forget_streams, get_current_stream, pinned

__all__ = [
    "CUDARuntimeError",
    "Capsule",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "begin_capture",
    "copyto",
    "cuda",
    "empty",
    "empty_like",
    "end_capture",
    "enqueue",
    "forgive",
    "from_dlpack",
    "full",
    "held",
    "install",
    "ndarray",
    "pinned",
    "shut_down",
    "view",
    "zeros",
]

__version__ = "14.2.0"

_NAMES = frozenset("?bhilqBHILQefdFD")
_MODULE = sys.modules[__name__]


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> types.ModuleType:
    """Let ``import cupy`` find this module, on a machine with so many devices, until the test ends; return it.

    Call `shut_down` when the test ends.
    """
    fake_cuda.start_up(devices)
    forget_streams()
    for name, module in (("cupy", _MODULE), ("cupy.cuda", cuda), ("cupy.cuda.runtime", cuda.runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    return _MODULE


class _Pointer:
    """An address in device memory, as CuPy's MemoryPointer."""

    def __init__(self, mem: Memory | _Foreign, ptr: int) -> None:
        self.mem = mem
        self.ptr = ptr
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class _Foreign:
    """Device memory that another array owns."""

    def __init__(self, owner: Any, pointer: int) -> None:
        self.owner = owner
        self.device_id = fake_cuda.device_at(pointer) if pointer else fake_cuda.get_device()


class ndarray:  # noqa: N801
    """As CuPy's. ``_view`` is its memory: only what runs on a stream may look into it."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, mem: Memory | _Foreign, array: np.ndarray[Any, Any]) -> None:
        self._view = array
        self.data = _Pointer(mem, array.ctypes.data if array.size else 0)

    dtype = property(lambda self: self._view.dtype)
    shape = property(lambda self: self._view.shape)
    strides = property(lambda self: self._view.strides)
    flags = property(lambda self: self._view.flags)
    ndim = property(lambda self: self._view.ndim)
    size = property(lambda self: self._view.size)
    nbytes = property(lambda self: self._view.nbytes)
    itemsize = property(lambda self: self._view.itemsize)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self.transpose())

    # Views: no work for the device.

    def __getitem__(self, key: Any) -> ndarray:
        key = key if isinstance(key, tuple) else (key,)
        # With an ellipsis, NumPy gives an array of no dimensions rather than a number, as CuPy does.
        return self._viewed(self._view[key if ... in key else (*key, ...)])

    def transpose(self, *axes: Any) -> ndarray:
        return self._viewed(self._view.transpose(*axes))

    def view(self, dtype: Any = None) -> ndarray:
        return self._viewed(self._view.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        source = self if self.flags.c_contiguous else ascontiguousarray(self)
        return source._viewed(source._view.reshape(*shape))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def _viewed(self, array: np.ndarray[Any, Any]) -> ndarray:
        return ndarray(self.data.mem, array)

    def __len__(self) -> int:
        return len(self._view)

    # Work for the device, on its current stream.

    def __setitem__(self, key: Any, value: Any) -> None:
        copyto(self[key], value)

    def fill(self, value: Any) -> None:
        copyto(self, value)

    def copy(self) -> ndarray:
        return self._computed(np.copy, self)

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        return self._computed(lambda array: array.astype(dtype), self)

    def sum(self) -> ndarray:
        return self._computed(np.sum, self)

    def all(self) -> ndarray:
        return self._computed(np.all, self)

    def _computed(self, function: Callable[..., Any], *operands: Any) -> ndarray:
        """Queue a function of arrays; return the array that will hold its result."""
        # The dtype and the shape are found on arrays of ones, since the operands may not be there yet.
        ones = [np.ones_like(x._view) if isinstance(x, ndarray) else x for x in operands]
        example = np.asarray(function(*ones))
        _check_device(*operands)
        result = empty(example.shape, example.dtype)
        views = [x._view if isinstance(x, ndarray) else x for x in operands]
        target = result._view
        enqueue(get_current_stream().ptr, lambda: np.copyto(target, function(*views), casting="unsafe"))
        return result

    def _updated(self, ufunc: np.ufunc, other: Any) -> Self:
        target, operand = self._view, other._view if isinstance(other, ndarray) else other
        _check_device(self, other)
        enqueue(get_current_stream().ptr, lambda: ufunc(target, operand, out=target, casting="same_kind"))
        return self

    # fmt: off
    def __add__(self, other: Any) -> ndarray: return self._computed(np.add, self, other)
    def __radd__(self, other: Any) -> ndarray: return self._computed(np.add, other, self)
    def __iadd__(self, other: Any) -> Self: return self._updated(np.add, other)
    def __sub__(self, other: Any) -> ndarray: return self._computed(np.subtract, self, other)
    def __rsub__(self, other: Any) -> ndarray: return self._computed(np.subtract, other, self)
    def __isub__(self, other: Any) -> Self: return self._updated(np.subtract, other)
    def __mul__(self, other: Any) -> ndarray: return self._computed(np.multiply, self, other)
    def __rmul__(self, other: Any) -> ndarray: return self._computed(np.multiply, other, self)
    def __imul__(self, other: Any) -> Self: return self._updated(np.multiply, other)
    def __truediv__(self, other: Any) -> ndarray: return self._computed(np.true_divide, self, other)
    def __itruediv__(self, other: Any) -> Self: return self._updated(np.true_divide, other)
    def __matmul__(self, other: Any) -> ndarray: return self._computed(np.matmul, self, other)
    def __gt__(self, other: Any) -> ndarray: return self._computed(np.greater, self, other)
    def __neg__(self) -> ndarray: return self._computed(np.negative, self)
    def __eq__(self, other: object) -> Any: return self._computed(np.equal, self, other)
    def __ne__(self, other: object) -> Any: return self._computed(np.not_equal, self, other)
    # fmt: on

    # To the host.

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray[Any, Any]:
        # As CuPy: the current stream of the current device, wherever the array is.
        stream = get_current_stream() if stream is None else stream
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif not isinstance(out, np.ndarray) or out.dtype != self.dtype:
            raise TypeError(f"{type(out).__name__} cannot be obtained from {self.dtype} array")
        elif out.shape != self.shape:
            raise ValueError("Shape mismatch")
        source, target = self._view, out
        enqueue(stream.ptr, lambda: np.copyto(target, source))
        if blocking:
            stream.synchronize()
        return out

    def set(self, arr: np.ndarray[Any, Any], stream: Any = None) -> None:
        if self.dtype != arr.dtype or self.shape != arr.shape or not self.flags.forc:
            raise ValueError("cannot be set")
        # CUDA reads pageable memory before it returns.
        source, target = arr.copy(), self._view
        enqueue((get_current_stream() if stream is None else stream).ptr, lambda: np.copyto(target, source))

    def item(self) -> Any:
        with self.device:
            return self.get().item()

    def tolist(self) -> Any:
        with self.device:
            return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        return f"<fake cupy.ndarray {self.dtype}{list(self.shape)} on device {self.data.device_id}>"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
        )

    # To other libraries.

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        # The array API's rule: the consumer's stream waits for what this one has queued; None is the legacy default, -1 forbids it.
        consumer = 1 if stream is None else stream
        if consumer == 0 or consumer < -1:
            raise ValueError(
                f"On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or any larger value, not {stream}"
            )
        current = get_current_stream()
        if consumer not in (-1, current.ptr or 1):
            ExternalStream(consumer).wait_event(current.record())
        return Capsule(self)


class Capsule:
    """What ``__dlpack__`` gives; it can be consumed once."""

    def __init__(self, array: ndarray) -> None:
        self._array: ndarray | None = array

    def consume(self) -> ndarray:
        array, self._array = self._array, None
        if array is None:
            raise ValueError("A DLPack tensor object cannot be consumed multiple times")
        return array


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    dtype = np.dtype(dtype)
    if dtype.char not in _NAMES and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    memory = Memory(nbytes, get_current_stream().ptr)
    return ndarray(memory, np.ndarray(shape, dtype, memory.bytes.data, order=order))  # type: ignore[call-overload]


def empty_like(a: ndarray) -> ndarray:
    return empty(a.shape, a.dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    result = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    result.fill(fill_value)
    return result


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args, dtype=dtype))


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: bool | None = None, blocking: bool = False) -> ndarray:
    """Return the array itself, a view of another library's memory, or a copy of host memory, which is read before this returns."""
    if not isinstance(a, ndarray) and hasattr(a, "__cuda_array_interface__"):
        a = _from_interface(a)
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    host = np.array(a, dtype)
    result = empty(host.shape, host.dtype)
    result.set(host)
    return result


array = asarray


def _from_interface(value: Any) -> ndarray:
    interface = value.__cuda_array_interface__
    pointer, dtype = interface["data"][0], np.dtype(interface["typestr"])
    strides = interface.get("strides")
    steps = strides or [0] * len(interface["shape"])
    extent = sum(step * (count - 1) for step, count in zip(steps, interface["shape"], strict=True)) + dtype.itemsize
    nbytes = extent if strides else int(np.prod(interface["shape"], dtype=int)) * dtype.itemsize
    memory = view(pointer, nbytes if pointer else 0)
    # As CuPy: the host waits for the stream that is named there.
    if interface.get("stream") is not None:
        fake_cuda.stream_synchronize(interface["stream"])
    return ndarray(_Foreign(value, pointer), np.ndarray(interface["shape"], dtype, memory.data, strides=strides))


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    """Return an array of the same memory, which the current stream of its device waits for."""
    kind, number = array.__dlpack_device__()
    if kind not in (2, 13):
        raise TypeError(f"Unsupported array type: {kind}")
    with Device(number):
        capsule = array.__dlpack__(stream=get_current_stream().ptr or 1, max_version=(1, 0), copy=copy)
    found: ndarray = capsule.consume()
    return ndarray(_Foreign(found, found.data.ptr), found._view)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray[Any, Any]:
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    return a if a.flags.c_contiguous else a._computed(np.ascontiguousarray, a)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    if isinstance(src, np.ndarray) and src.ndim:
        raise TypeError(f"Unsupported type {type(src)}")
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast array data from {src.dtype!r} to {dst.dtype!r} according to the rule '{casting}'")
    target, source = dst._view, src._view if isinstance(src, ndarray) else np.asarray(src)
    _check_device(dst, src)
    enqueue(get_current_stream().ptr, lambda: np.copyto(target, source, casting="unsafe"))


def _check_device(*operands: Any) -> None:
    """Refuse to compute elsewhere than where the arrays are: CuPy does that, or warns, and uses the current device's stream."""
    current = fake_cuda.get_device()
    for operand in operands:
        if isinstance(operand, ndarray) and operand.data.device_id != current:
            raise ValueError(
                "Array device must be same as the current device: "
                f"array device = {operand.data.device_id} while current = {current}"
            )
