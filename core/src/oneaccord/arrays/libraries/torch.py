"""Tensors of torch, on the CPU and on CUDA devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np

from oneaccord.arrays.libraries.library import Array, DeviceArray, Lane, Library
from oneaccord.arrays.libraries.shared import low_precision_dtype, no_memory, refuse_overlap
from oneaccord.errors import DTypeError, LayoutError, UsageError

__all__ = ["TorchLibrary"]

_NUMPY_HAS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
# These have names in ml_dtypes, and NumPy sees their bits as integers.
_LOW_PRECISION = frozenset("bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split())


class TorchLibrary(Library):
    """torch. Autograd sees nothing of a call: a tensor through which gradients would have to flow is refused."""

    name = "torch"
    is_stream_ordered = True
    streams = "torch"

    def read(self, value: Any) -> Array | DeviceArray:
        """Return a view of a tensor's memory; a view of a copy if a conjugation or a sign is still to be applied.

        torch's own calls are queued on its current stream, so that there is nothing to wait for.
        """
        _check(value)
        _check_gradient(value)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        return self._memory(value)

    def write(self, value: Any) -> Array | DeviceArray:
        """Return a view of a tensor's memory, and let autograd know that it changes, as one of torch's in-place calls would."""
        _check(value)
        _check_gradient(value)
        if value.is_conj() or value.is_neg():
            raise LayoutError(
                "out= is a lazy conjugate or negative of another tensor, and cannot be written to: "
                "use x.resolve_conj().resolve_neg()"
            )
        if not value.is_contiguous():
            itemsize = value.element_size()
            refuse_overlap(value.shape, [stride * itemsize for stride in value.stride()], itemsize)
        memory = self._memory(value)
        if not value.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(value)
        return memory

    def _memory(self, value: Any) -> Array | DeviceArray:
        if value.requires_grad:
            value = value.detach()
        dtype, integer = _numpy_dtype(value.dtype)
        if value.is_cuda:
            return DeviceArray(
                value,
                self,
                value.data_ptr(),
                tuple(value.shape),
                dtype,
                value.get_device(),
                is_contiguous=value.is_contiguous(),
            )
        try:
            view: Array = value.numpy() if integer is None else value.view(integer).numpy().view(dtype)
        except (TypeError, RuntimeError) as error:  # a subclass without memory of its own, or one inside torch.func
            raise LayoutError(f"a {type(value).__name__} of torch cannot be read as an array: {error}") from error
        return view

    def give(self, result: Array, like: Any) -> Any:
        """Return a tensor on the CPU that shares the result's memory."""
        return _tensor(result)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
        """Return memory of torch's caching allocator, allocated for its current stream on the device."""
        torch = sys.modules["torch"]
        try:
            tensor = torch.empty(shape, dtype=_torch_dtype(dtype), device=torch.device("cuda", device))
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # which has had several homes
                raise
            raise no_memory(shape, dtype, device, error) from error
        return DeviceArray(tensor, self, tensor.data_ptr(), shape, dtype, device, is_contiguous=True)

    def uses_devices(self) -> bool:
        """Return whether torch has begun to use CUDA, which a CPU build never does."""
        return bool(sys.modules["torch"].cuda.is_initialized())

    def address(self, value: Any, device: int) -> int:
        """Return the address of a tensor that is a plain one; autograd's wait for the longer look."""
        if value.requires_grad or not value.is_cuda or value.device.index != device or not value.is_contiguous():
            return 0
        return 0 if value.is_conj() or value.is_neg() else value.data_ptr()

    def wrote(self, value: Any) -> None:
        """Count a change, which autograd asks for."""
        sys.modules["torch"].autograd.graph.increment_version(value)

    def give_device(self, result: DeviceArray, like: Any) -> Any:
        """Return the tensor that holds the memory."""
        return result.owner.view(result.shape)

    def stream(self, device: int) -> tuple[int, Any]:
        """Return torch's current stream on a device in this thread; the legacy default stream has the handle 0."""
        stream = sys.modules["torch"].cuda.current_stream(device)
        return stream.cuda_stream, stream

    def using(self, keep: Any, device: int) -> AbstractContextManager[Any]:
        """Return torch's block for a stream."""
        block: AbstractContextManager[Any] = sys.modules["torch"].cuda.stream(keep)
        return block

    def external(self, stream: int, device: int) -> Any:
        """Return a stream of torch's for a handle."""
        torch = sys.modules["torch"]
        return torch.cuda.ExternalStream(stream, device=torch.device("cuda", device))

    # torch queues work on the current stream of the device of the tensors, whichever device is the current one.

    def contiguous(self, array: DeviceArray) -> DeviceArray:
        """Return a copy in C order."""
        if array.is_contiguous:
            return array
        tensor = array.owner.contiguous()
        return DeviceArray(tensor, self, tensor.data_ptr(), array.shape, array.dtype, array.device, is_contiguous=True)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copy on the device; another dtype takes a kernel of torch's."""
        # torch refuses to write to a tensor of its inference mode outside of that, which is a mode of a thread.
        with sys.modules["torch"].inference_mode(target.owner.is_inference()):
            target.owner.copy_(source.owner.view(target.owner.shape))

    def to_host(self, array: DeviceArray) -> Array:
        """Return a copy in pinned memory; the host waits for the current stream."""
        torch = sys.modules["torch"]
        # torch pins in any context that is there, and the array's device has one (ATen/cuda/CachingHostAllocator.cpp): no other GPU is woken.
        host = torch.empty(array.shape, dtype=array.owner.dtype, pin_memory=True)
        host.copy_(array.owner.view(array.shape) if array.is_contiguous else array.owner)
        view = self._memory(host)
        assert isinstance(view, np.ndarray)
        return view

    def to_device(self, result: Array, device: int) -> DeviceArray:
        """Return a copy; torch has read the host memory when this returns."""
        torch = sys.modules["torch"]
        tensor = _tensor(result).to(torch.device("cuda", device)).contiguous()
        return DeviceArray(tensor, self, tensor.data_ptr(), result.shape, result.dtype, device, is_contiguous=True)

    def point(self, device: int) -> Any:
        """Return an event on torch's current stream."""
        return sys.modules["torch"].cuda.current_stream(device).record_event()

    def lane(self, device: int) -> Lane:
        """Return a lane on one of torch's streams, which are non-blocking."""
        return _Lane(self, device)

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return pinned memory of torch's caching allocator, which takes it back when the array is no longer referenced."""
        torch = sys.modules["torch"]
        memory: Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory


class _Lane(Lane):
    """A stream of torch's. Copies go by bytes, since NumPy lacks some of torch's dtypes.

    A copy with ``non_blocking`` returns at once if the host memory is pinned, which CUDA sees by the address (aten/src/ATen/native/cuda/Copy.cu).
    """

    def __init__(self, library: TorchLibrary, device: int) -> None:
        self._library = library
        self._torch = sys.modules["torch"]
        self._stream = self._torch.cuda.Stream(device=device)

    def after(self, point: Any) -> None:
        self._stream.wait_event(point)

    def fetch(self, host: Array, source: DeviceArray, start: int) -> None:
        part = self._bytes(source, start, host.nbytes)
        with self._torch.cuda.stream(self._stream):
            self._torch.from_numpy(host.view(np.uint8)).copy_(part, non_blocking=True)

    def store(self, target: DeviceArray, start: int, host: Array) -> None:
        part = self._bytes(target, start, host.nbytes)
        with self._torch.cuda.stream(self._stream):
            part.copy_(self._torch.from_numpy(host.view(np.uint8)), non_blocking=True)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._torch.cuda.stream(self._stream):
            self._library.copy(target, source)

    def mark(self) -> Callable[[], bool]:
        done: Callable[[], bool] = self._stream.record_event().query
        return done

    def _bytes(self, array: DeviceArray, start: int, nbytes: int) -> Any:
        first = start * array.dtype.itemsize
        return array.owner.reshape(-1).view(self._torch.uint8)[first : first + nbytes]


def _check(value: Any) -> None:
    """Raise an error for memory that is neither plain host memory nor that of a CUDA device."""
    if not (value.is_cpu or value.is_cuda):
        what_to_do = "it holds no data" if str(value.device) == "meta" else "copy it first, with x.cpu()"
        raise LayoutError(
            f"a tensor on the device {value.device} cannot be sent, only those of the CPU and of CUDA: {what_to_do}"
        )
    torch = sys.modules["torch"]
    if value.layout is not torch.strided:
        raise LayoutError(f"a tensor with the layout {value.layout} cannot be sent: use x.to_dense()")
    if value.is_quantized:
        raise LayoutError("a quantized tensor cannot be sent, since its scale would be lost: use x.dequantize()")
    if value.is_nested or (type(value) is not torch.Tensor and hasattr(value, "__tensor_flatten__")):
        raise LayoutError(f"a {type(value).__name__} holds other tensors: give one of them, such as x.to_local()")


def _check_gradient(value: Any) -> None:
    """Refuse a tensor whose gradient would end here without a word, as torch refuses to write to one."""
    if value.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise UsageError(
            "the tensor requires a gradient, and gradients do not flow through a group's calls: give x.detach(), or make the call in `with "
            "torch.no_grad():`; mp.torch.functional of oneaccord-parallel has collectives through which gradients flow"
        )


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: Any) -> tuple[np.dtype[Any], Any]:
    """Return the NumPy dtype of one of torch's, and for those that NumPy lacks the torch integer that has as many bits."""
    name = str(dtype).removeprefix("torch.")
    if name in _NUMPY_HAS:
        return np.dtype(name), None
    if name not in _LOW_PRECISION:
        raise DTypeError(f"a tensor of dtype {dtype} cannot travel between ranks: NumPy and ml_dtypes do not have this dtype")
    torch = sys.modules["torch"]
    return low_precision_dtype(name), torch.uint8 if dtype.itemsize == 1 else torch.int16


@lru_cache(maxsize=64)
def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the torch dtype that has the name of a NumPy one."""
    found = getattr(sys.modules["torch"], dtype.name, None) if dtype.name in _NUMPY_HAS | _LOW_PRECISION else None
    if found is None:
        raise DTypeError(f"torch has no dtype for an array of {dtype}: give the call a NumPy array instead of a tensor")
    return found


def _tensor(result: Array) -> Any:
    """Return a tensor that shares an array's memory if torch can: not if the memory is read-only, or a stride is negative."""
    dtype = _torch_dtype(result.dtype)
    if not result.flags.writeable or any(stride < 0 for stride in result.strides):
        result = result.copy()
    torch = sys.modules["torch"]
    if result.dtype.name in _LOW_PRECISION:
        return torch.from_numpy(result.view(np.uint8 if dtype.itemsize == 1 else np.int16)).view(dtype)
    return torch.from_numpy(result)
