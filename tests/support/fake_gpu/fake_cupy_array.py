"""The arrays of the fake CuPy: they live in NumPy memory, and all that they do is queued on the current stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_cuda import Memory, enqueue, view
from support.fake_gpu.fake_cupy_cuda import Device, get_current_stream
from support.fake_gpu.fake_cupy_parts import Capsule, Flags, Foreign, MemoryPointer, Pointer, adopted

__all__ = [
    "Capsule",
    "array",
    "asarray",
    "asnumpy",
    "computed",
    "copyto",
    "empty",
    "empty_like",
    "from_dlpack",
    "ndarray",
    "peel",
    "set_namespace",
]

_NAMES = frozenset("?bhilqBHILQefdFD")
_namespace: Any = None
"""The module ``cupy``, in which NumPy's functions look for those of CuPy."""


def set_namespace(module: Any) -> None:
    """Say which module is ``cupy``."""
    global _namespace  # noqa: PLW0603  # as a module has one place among the modules
    _namespace = module


class ndarray:  # noqa: N801
    """As CuPy's. ``_view`` is its memory: only what runs on a stream may look into it."""

    __module__ = "cupy"
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, mem: Any, array: Any, base: ndarray | None = None, *, memptr: MemoryPointer | None = None) -> None:
        if memptr is not None:  # as CuPy's own: the first two are shape and dtype
            mem, array = adopted(mem, array, memptr)
        self._view = array
        self.data = Pointer(mem, array.ctypes.data if array.size else 0)
        self.base = base

    dtype = property(lambda self: self._view.dtype)
    shape = property(lambda self: self._view.shape)
    strides = property(lambda self: self._view.strides)
    ndim = property(lambda self: self._view.ndim)
    size = property(lambda self: self._view.size)
    nbytes = property(lambda self: self._view.nbytes)
    itemsize = property(lambda self: self._view.itemsize)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self.transpose())
    mT = property(lambda self: self._viewed(self._view.mT))  # noqa: N815
    real = property(lambda self: self._viewed(self._view.real))

    @property
    def flags(self) -> Flags:
        flags = self._view.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    # Views: no work for the device.

    def __getitem__(self, key: Any) -> ndarray:
        key = _parsed(key)
        if any(isinstance(part, ndarray) for part in key):
            return self._gathered(key)
        # With an ellipsis, NumPy gives an array of no dimensions rather than a number, as CuPy does.
        return self._viewed(self._view[key])

    def transpose(self, *axes: Any) -> ndarray:
        return self._viewed(self._view.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._viewed(self._view.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._viewed(self._view.squeeze(axis))

    def view(self, dtype: Any = None) -> ndarray:
        return self._viewed(self._view.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            return self._viewed(self._view.reshape(extents, order=order, copy=False))
        except ValueError:
            source = self.copy(order)
            return source._viewed(source._view.reshape(extents, order=order))

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1, order=order)

    def _viewed(self, array: np.ndarray[Any, Any]) -> ndarray:
        return ndarray(self.data.mem, array, self if self.base is None else self.base)

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[number] for number in range(self.shape[0]))

    # Work for the device, on its current stream.

    def _gathered(self, key: tuple[Any, ...]) -> ndarray:
        """Return a copy of elements. The host waits for masks, whose true elements it must count; it does not for numbers."""
        masks = _masks_known(key)
        example = np.empty_like(self._view)[_like(masks, lambda index: np.zeros(index.shape, index.dtype))]
        numbers = [part._view for part in masks if isinstance(part, ndarray)]
        found = empty(example.shape, self.dtype)
        source, target = self._view, found._view
        _check_device(self, *masks)
        _launch(lambda: np.copyto(target, source[_with(masks, numbers)]))
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _parsed(key)
        if any(isinstance(part, ndarray) for part in key):
            self._scattered(key, value, np.copyto)
            return
        target = self[key]
        if not isinstance(value, ndarray):
            target.fill(value)
            return
        source = value
        while source.ndim > target.ndim and source.shape[0] == 1:
            source = source[0]
        np.broadcast_shapes(source.shape, target.shape)
        if np.broadcast_shapes(source.shape, target.shape) != target.shape:
            raise ValueError(f"operands could not be broadcast together with shapes {target.shape} {source.shape}")
        copyto(target, source, "unsafe")

    def _scattered(self, key: tuple[Any, ...], value: Any, how: Callable[..., Any]) -> None:
        masks = _masks_known(key)
        numbers = [part._view for part in masks if isinstance(part, ndarray)]
        source = value.astype(self.dtype, copy=False) if isinstance(value, ndarray) else asarray(value, self.dtype)
        example = np.empty_like(self._view)[_like(masks, lambda index: np.zeros(index.shape, index.dtype))]
        np.broadcast_to(np.empty(source.shape, np.uint8), example.shape)
        given, target = source._view, self._view
        _check_device(self, source, *masks)

        def kernel() -> None:
            if how is np.copyto:
                target[_with(masks, numbers)] = given
            else:
                how(target, _with(masks, numbers), given)

        _launch(kernel)

    def scatter_add(self, slices: Any, value: Any) -> None:
        key = _parsed(slices)
        if not any(isinstance(part, ndarray) for part in key):
            view = self[key]
            view += value
            return
        # Those that CUDA adds atomically.
        if self.dtype.char not in "iIQLefd" and any(isinstance(part, ndarray) and part.dtype != bool for part in key):
            raise TypeError("scatter_add only supports int32, float16, float32, float64, uint32, uint64, as data type")
        self._scattered(key, value, np.add.at)

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            if value.shape:
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            value = value.astype(self.dtype, copy=False)
        else:
            value = np.asarray(value, self.dtype)
            if value.shape:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value[()]
        copyto(self, value, "unsafe")

    def copy(self, order: str = "C") -> ndarray:
        return self._cast(self.dtype, order)

    def astype(self, dtype: Any, order: str = "K", casting: str = "unsafe", subok: Any = None, copy: bool = True) -> ndarray:
        if not np.can_cast(self.dtype, dtype, casting):  # type: ignore[arg-type]
            raise TypeError(
                f"Cannot cast array data from {self.dtype!r} to {np.dtype(dtype)!r} according to the rule '{casting}'"
            )
        return self if not copy and self.dtype == np.dtype(dtype) else self._cast(dtype, order)

    def _cast(self, dtype: Any, order: str) -> ndarray:
        result = empty_like(self, dtype, order)
        copyto(result, self, "unsafe")
        return result

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy(order).reshape(-1, order=order)

    def dot(self, b: Any, out: Any = None) -> ndarray:
        return computed(np.dot, self, b, out=out)

    # fmt: off
    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.sum, self, out=out, axis=axis, dtype=dtype, keepdims=keepdims)
    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.prod, self, out=out, axis=axis, dtype=dtype, keepdims=keepdims)
    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.mean, self, out=out, axis=axis, dtype=dtype, keepdims=keepdims)
    def var(self, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: bool = False) -> ndarray:
        return computed(np.var, self, out=out, axis=axis, dtype=dtype, ddof=ddof, keepdims=keepdims)
    def std(self, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: bool = False) -> ndarray:
        return computed(np.std, self, out=out, axis=axis, dtype=dtype, ddof=ddof, keepdims=keepdims)
    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.max, self, out=out, axis=axis, keepdims=keepdims)
    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.min, self, out=out, axis=axis, keepdims=keepdims)
    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.all, self, out=out, axis=axis, keepdims=keepdims)
    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return computed(np.any, self, out=out, axis=axis, keepdims=keepdims)
    def round(self, decimals: int = 0, out: Any = None) -> ndarray:
        return computed(np.round, self, out=out, decimals=decimals)
    def conj(self) -> ndarray: return computed(np.conj, self)
    def __add__(self, other: Any) -> ndarray: return computed(np.add, self, other)
    def __radd__(self, other: Any) -> ndarray: return computed(np.add, other, self)
    def __iadd__(self, other: Any) -> Self: return computed(np.add, self, other, out=self)
    def __sub__(self, other: Any) -> ndarray: return computed(np.subtract, self, other)
    def __rsub__(self, other: Any) -> ndarray: return computed(np.subtract, other, self)
    def __isub__(self, other: Any) -> Self: return computed(np.subtract, self, other, out=self)
    def __mul__(self, other: Any) -> ndarray: return computed(np.multiply, self, other)
    def __rmul__(self, other: Any) -> ndarray: return computed(np.multiply, other, self)
    def __imul__(self, other: Any) -> Self: return computed(np.multiply, self, other, out=self)
    def __truediv__(self, other: Any) -> ndarray: return computed(np.true_divide, self, other)
    def __rtruediv__(self, other: Any) -> ndarray: return computed(np.true_divide, other, self)
    def __itruediv__(self, other: Any) -> Self: return computed(np.true_divide, self, other, out=self)
    def __floordiv__(self, other: Any) -> ndarray: return computed(np.floor_divide, self, other)
    def __mod__(self, other: Any) -> ndarray: return computed(np.remainder, self, other)
    def __pow__(self, other: Any) -> ndarray: return computed(np.power, self, other)
    def __rpow__(self, other: Any) -> ndarray: return computed(np.power, other, self)
    def __matmul__(self, other: Any) -> ndarray: return computed(np.matmul, self, other)
    def __rmatmul__(self, other: Any) -> ndarray: return computed(np.matmul, other, self)
    def __and__(self, other: Any) -> ndarray: return computed(np.bitwise_and, self, other)
    def __rand__(self, other: Any) -> ndarray: return computed(np.bitwise_and, other, self)
    def __iand__(self, other: Any) -> Self: return computed(np.bitwise_and, self, other, out=self)
    def __or__(self, other: Any) -> ndarray: return computed(np.bitwise_or, self, other)
    def __ror__(self, other: Any) -> ndarray: return computed(np.bitwise_or, other, self)
    def __ior__(self, other: Any) -> Self: return computed(np.bitwise_or, self, other, out=self)
    def __xor__(self, other: Any) -> ndarray: return computed(np.bitwise_xor, self, other)
    def __invert__(self) -> ndarray: return computed(np.invert, self)
    def __lt__(self, other: Any) -> ndarray: return computed(np.less, self, _number(other))
    def __le__(self, other: Any) -> ndarray: return computed(np.less_equal, self, _number(other))
    def __gt__(self, other: Any) -> ndarray: return computed(np.greater, self, _number(other))
    def __ge__(self, other: Any) -> ndarray: return computed(np.greater_equal, self, _number(other))
    def __neg__(self) -> ndarray: return computed(np.negative, self)
    def __abs__(self) -> ndarray: return computed(np.abs, self)
    def __eq__(self, other: object) -> Any: return self._compared(np.equal, other)
    def __ne__(self, other: object) -> Any: return self._compared(np.not_equal, other)
    # fmt: on

    def _compared(self, ufunc: np.ufunc, other: Any) -> ndarray:
        if other is None or (not isinstance(other, ndarray) and type(other).__eq__ is object.__eq__):
            result = empty(self.shape, bool)
            result.fill(ufunc is np.not_equal)
            return result
        return computed(ufunc, self, _number(other))

    # As CuPy, NumPy's functions of its arrays are CuPy's own.

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(_namespace, ufunc.__name__, None)
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        if method != "__call__":
            function = getattr(function, method, None)
        if function is None:
            return NotImplemented
        if ufunc.__name__ in ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal"):
            inputs = tuple(_number(each) for each in inputs)
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = _namespace
        for name in func.__module__.split(".")[1:]:
            module = getattr(module, name, None)
        function = getattr(module, func.__name__, None)
        if function in (None, func) or not all(issubclass(kind, ndarray | np.ndarray) for kind in types):
            return NotImplemented
        return function(*args, **kwargs)

    # To the host.

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray[Any, Any]:
        # As CuPy: the current stream of the current device, wherever the array is; the handle 0 is that of the array's device.
        stream = get_current_stream() if stream is None else stream
        if out is None:
            out = np.empty(self.shape, self.dtype, "F" if order == "F" or (order == "A" and self.flags.fnc) else "C")
        elif not isinstance(out, np.ndarray) or out.dtype != self.dtype:
            raise TypeError(f"{type(out).__name__} cannot be obtained from {self.dtype} array")
        elif out.shape != self.shape:
            raise ValueError("Shape mismatch")
        source, target = self._view, out
        with self.device:
            enqueue(stream.ptr, lambda: np.copyto(target, source))
            if blocking:
                stream.synchronize()
        return out

    def set(self, arr: np.ndarray[Any, Any], stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        stream = get_current_stream() if stream is None else stream
        # CUDA reads pageable memory before it returns.
        source, target = arr.copy(), self._view
        with self.device:
            enqueue(stream.ptr, lambda: np.copyto(target, source))

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        return self.get().tobytes(order)

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError("The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()")
        if not self.size:
            warnings.warn("The truth value of an empty array is ambiguous.", DeprecationWarning, stacklevel=2)
            return False
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        with self.device:
            return self.copy()

    def __reduce__(self) -> Any:
        return array, (self.get(order="A"),)

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
            ready = current.record()
            fake_cuda.stream_wait_event(consumer, ready.ptr)
        return Capsule(self)


def _number(value: Any) -> Any:
    """Return an array of NumPy without axes as its number, for comparisons alone, as CuPy does."""
    return value.item() if isinstance(value, np.ndarray) and not value.ndim else value


def _parsed(key: Any) -> tuple[Any, ...]:
    """Return an index as a tuple with an ellipsis, in which whatever is an array is CuPy's."""
    parts = key if isinstance(key, tuple) else (key,)
    found = []
    for part in parts:
        if isinstance(part, list | np.ndarray | bool | np.bool_):
            part = asarray(part)  # noqa: PLW2901
        if isinstance(part, ndarray) and part.dtype.kind not in "biu":
            raise IndexError(f"arrays used as indices must be of integer or boolean type. (actual: {part.dtype.type})")
        found.append(part)
    return tuple(found) if any(part is ... for part in found) else (*found, ...)


def _masks_known(key: tuple[Any, ...]) -> list[Any]:
    """Return an index with the masks on the host."""
    return [part.get() if isinstance(part, ndarray) and part.dtype == bool else part for part in key]


def _like(key: list[Any], function: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(function(part) if isinstance(part, ndarray) else part for part in key)


def _with(key: list[Any], numbers: list[np.ndarray[Any, Any]]) -> tuple[Any, ...]:
    """Return an index with the content of its arrays. CuPy would wrap numbers outside of the array; here the device breaks."""
    left = iter(numbers)
    return _like(key, lambda _: next(left))


def _launch(kernel: Callable[[], object]) -> None:
    """Queue a kernel, which warns of nothing, on the current stream."""

    def quiet() -> None:
        with np.errstate(all="ignore"):
            kernel()

    enqueue(get_current_stream().ptr, quiet)


def peel(value: Any) -> Any:
    """Return an operand as one of CuPy's kernels takes it; raise for NumPy's arrays, and for whatever is no number."""
    if isinstance(value, ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        return asarray(value)
    if isinstance(value, np.generic) or type(value) in (bool, int, float, complex):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def computed(function: Callable[..., Any], *operands: Any, out: Any = None, casting: Any = "same_kind", **options: Any) -> Any:
    """Queue a function of NumPy; return the array, or the arrays, that will hold its result, in C order as CuPy's."""
    operands = tuple(peel(each) for each in operands)
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    if "dtype" in options and isinstance(function, np.ufunc):
        options["casting"] = "unsafe"  # CuPy asks the rule of the result alone
    # The dtype and the shape are found on arrays of ones, since the operands may not be there yet.
    ones = [np.ones_like(x._view) if isinstance(x, ndarray) else x for x in operands]
    with np.errstate(all="ignore"):
        examples = function(*ones, **options)
    is_one = not isinstance(examples, tuple)
    examples = [np.asarray(each) for each in ((examples,) if is_one else examples)]
    _check_device(*operands, out)
    if out is None:
        results = [empty(each.shape, each.dtype) for each in examples]
    else:
        if not isinstance(out, ndarray):
            raise TypeError(f"Unsupported type {type(out)}")
        if examples[0].shape != out.shape and np.broadcast_shapes(examples[0].shape, out.shape) != out.shape:
            raise ValueError("Out shape is mismatched")
        if not np.can_cast(examples[0].dtype, out.dtype, casting):
            raise TypeError(
                f"output (typecode '{examples[0].dtype.char}') could not be coerced to '{out.dtype.char}' by '{casting}'"
            )
        results = [out]
    views = [x._view if isinstance(x, ndarray) else x for x in operands]
    targets = [each._view for each in results]

    def kernel() -> None:
        found = function(*views, **options)
        for target, each in zip(targets, (found,) if is_one else found, strict=True):
            np.copyto(target, each, casting="unsafe")

    _launch(kernel)
    return results[0] if is_one else tuple(results)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    dtype = np.dtype(dtype)
    if dtype.char not in _NAMES and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    memory = Memory(nbytes, get_current_stream().ptr)
    return ndarray(memory, np.ndarray(shape, dtype, memory.bytes.data, order=order))  # type: ignore[call-overload]


def empty_like(prototype: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    like = np.empty_like(prototype._view, dtype, order, shape=shape)  # type: ignore[call-overload]
    result = empty(like.shape, like.dtype)
    if like.strides != result.strides and like.size:
        result._view = np.ndarray(like.shape, like.dtype, result._view.data, strides=like.strides)
    return result


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """Return a view of another library's memory, or a copy, also of host memory, which is read before this returns."""
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):
        obj = _from_interface(obj)
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, order or "K", copy=copy)
    if isinstance(obj, list | tuple) and any(isinstance(each, ndarray) for each in obj):
        return computed(lambda *parts: np.stack(parts).astype(dtype or parts[0].dtype), *obj)
    host = np.array(obj, dtype, order=order or "K")
    if host.dtype.char not in _NAMES and host.dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {host.dtype}")
    result = empty(host.shape, host.dtype, "F" if host.flags.fnc else "C")
    result.set(host)
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: bool | None = None, blocking: bool = False) -> ndarray:
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


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
    return ndarray(Foreign(value, pointer), np.ndarray(interface["shape"], dtype, memory.data, strides=strides))


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    """Return an array of the same memory, which the current stream of its device waits for."""
    kind, number = array.__dlpack_device__()
    if kind not in (2, 13):
        raise TypeError(f"Unsupported array type: {kind}")
    with Device(number):
        capsule = array.__dlpack__(stream=get_current_stream().ptr or 1, max_version=(1, 0), copy=copy)
    found: ndarray = capsule.consume()
    return ndarray(Foreign(found, found.data.ptr), found._view)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray[Any, Any]:
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    if isinstance(src, np.ndarray) and src.ndim:
        raise TypeError(f"Unsupported type {type(src)}")
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast array data from {src.dtype!r} to {dst.dtype!r} according to the rule '{casting}'")
    target, source = dst._view, src._view if isinstance(src, ndarray) else np.asarray(src)
    _check_device(dst, src)
    _launch(lambda: np.copyto(target, source, casting="unsafe"))


def _check_device(*operands: Any) -> None:
    """Refuse to compute elsewhere than where the arrays are: CuPy does that, or warns, and uses the current device's stream."""
    current = fake_cuda.get_device()
    for operand in operands:
        if isinstance(operand, ndarray) and operand.data.device_id != current:
            place = operand.data.device_id
            raise ValueError(
                f"Array device must be same as the current device: array device = {place} while current = {current}"
            )
