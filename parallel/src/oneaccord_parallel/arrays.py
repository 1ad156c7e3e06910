"""The functions that the layers need for arrays of every library: NumPy, CuPy, torch or JAX.

The layers keep their data in *buffers*: arrays that can be written. The buffers of NumPy and of JAX on a CPU are NumPy's, those of
CuPy and of JAX on a GPU are CuPy's, those of torch are torch's. `readable` reads the caller's arrays, and `like` makes the
caller's results.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import array_api_compat
import numpy as np

from oneaccord.errors import DTypeError, LayoutError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = [
    "Memory",
    "assignable",
    "dtype_of",
    "itemsize",
    "like",
    "namespace",
    "need_no_graph",
    "need_plain",
    "oddity",
    "place_of",
    "readable",
    "same_place",
    "shape_of",
    "summed_in",
    "writable",
    "write",
]

Array = Any
"""An array of NumPy, CuPy, torch or JAX."""


def dtype_of(array: Array) -> str:
    """Return the name of an array's dtype, the same for all libraries: ``"float32"``, ``"bfloat16"``."""
    return str(array.dtype).removeprefix("torch.")


def shape_of(array: Array) -> tuple[int, ...]:
    """Return the shape of an array, as plain numbers."""
    return tuple(int(extent) for extent in array.shape)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype."""
    return _numpy_dtype(dtype).itemsize


def summed_in(dtype: str, asked: str | None = None) -> str:
    """Return the dtype in which floats of a dtype are weighted and summed: float32 for 16 bits and fewer, whose sums soon overflow."""
    return asked or ("float32" if itemsize(dtype) <= 2 else dtype)


def namespace(array: Array) -> Any:
    """Return the functions of an array's library by the names of the array API standard."""
    return array_api_compat.array_namespace(array)


def readable(array: Array) -> Array:
    """Return the same memory as an array whose library can also write: NumPy, CuPy or torch.

    Parameters
    ----------
    array
        An array of NumPy, CuPy, torch (the value alone, without its history) or JAX, or a Python number.

    Raises
    ------
    DTypeError
        It is no array.
    """
    if isinstance(array, np.ndarray):
        return array
    if _is_of("torch", "Tensor", array):
        return array.detach()
    if _is_of("cupy", "ndarray", array):
        return array
    if _is_of("jax", "Array", array):
        if all(device.platform == "cpu" for device in array.devices()):
            return np.asarray(array)
        import cupy

        return cupy.from_dlpack(array)
    if isinstance(array, bool | int | float | complex | np.generic):
        return np.asarray(array)
    raise DTypeError(f"expected an array of NumPy, CuPy, torch or JAX, not {type(array).__qualname__}: {array!r:.80}")


def like(buffer: Array, template: Array) -> Array:
    """Return a buffer as an array of the library of ``template``: itself, or for JAX a copy, since JAX arrays never change."""
    if _is_of("jax", "Array", template):
        import jax.numpy as jnp

        return jnp.array(buffer, copy=True) if isinstance(buffer, np.ndarray | np.generic) else jnp.from_dlpack(buffer.copy())
    return buffer


def write(target: Array, value: Array) -> None:
    """Copy ``value``, of any library and dtype, into the buffer ``target`` of the same shape."""
    target[...] = readable(value)


def assignable(array: Array) -> bool:
    """Return whether ``array`` has the values that its library writes into ``readable(array)``.

    Not for JAX, for numbers, for read-only arrays, and for arrays that repeat an element, as expanded tensors do: there one value wins.
    """
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable) and not _repeats(array.shape, array.strides)
    if _is_of("torch", "Tensor", array):
        return not _repeats(array.shape, array.stride())
    return _is_of("cupy", "ndarray", array) and not _repeats(array.shape, array.strides)


def writable(array: Array) -> bool:
    """Return whether a call of a group can write into ``readable(array)`` as well: `assignable`, and the memory holds the values themselves.

    Not so for tensors of torch that are conjugated or negated views, or were made in inference mode.
    """
    if not _is_of("torch", "Tensor", array):
        return assignable(array)
    return assignable(array) and not (array.is_conj() or array.is_neg() or array.is_inference())


def oddity(array: Array) -> str:
    """Return words for the reason why an array is not a plain one whose elements can travel, and the remedy; "" for a plain one, and for other values."""
    if not _is_of("torch", "Tensor", array):
        return ""
    import torch

    if torch.nn.parameter.is_lazy(array):
        return "not initialised yet: run a batch through the module first"
    if array.is_meta:
        return "on the device meta, where it holds no data: give its module memory first, with module.to_empty(device=...)"
    if array.layout is not torch.strided:
        return f"a tensor of the layout {array.layout}: use x.to_dense()"
    if array.is_quantized:
        return "a quantized tensor, whose scale would be lost: use x.dequantize()"
    if array.is_nested or hasattr(array, "__tensor_flatten__"):
        return f"a {type(array).__name__}, which holds other tensors: give one of them, such as x.to_local()"
    return ""


def need_plain(what: str, leaves: Mapping[str, Array]) -> None:
    """Refuse arrays whose elements cannot travel.

    Parameters
    ----------
    what
        The name of the caller that refuses them.
    leaves
        The arrays, by name.

    Raises
    ------
    LayoutError
        One of them is sparse, quantized, without memory or the like.
    """
    for name, leaf in leaves.items():
        words = oddity(leaf)
        if words:
            raise LayoutError(f"{what} cannot take {name or 'the only leaf'}, which is {words}")


def need_no_graph(array: Array, *, takes_leaves: bool = False) -> None:
    """Refuse a tensor of torch whose gradient would be lost, because autograd does not see this work on it.

    Parameters
    ----------
    array
        Any array.
    takes_leaves
        Whether parameters and the like are taken, which have a gradient and no history.

    Raises
    ------
    UsageError
        It requires grad, and torch records operations.
    """
    if _is_of("torch", "Tensor", array) and array.requires_grad and not (takes_leaves and array.is_leaf):
        import torch

        if torch.is_grad_enabled():
            raise UsageError(
                "the tensor requires a gradient, but autograd does not see this call: take the function of the same name from mp.torch, "
                "or its SyncBatchNorm, or a collective of mp.torch.functional; without gradients give x.detach()"
            )


def place_of(array: Array) -> str:
    """Return words for the memory of an array and the library that writes there: ``"numpy"``, ``"torch on cpu"``, ``"cupy on gpu 0"``."""
    buffer = readable(array)
    if isinstance(buffer, np.ndarray):
        return "numpy"
    if _is_of("torch", "Tensor", buffer):
        return f"torch on {buffer.device}"
    return f"cupy on gpu {buffer.device.id}"


def same_place(one: Array, other: Array) -> bool:
    """Return whether two arrays are in memory of one kind: both on the host, or both on the same GPU."""
    return _device(one) == _device(other)


class Memory:
    """Makes buffers, and counts the bytes of those that are still there, by their purpose.

    A buffer counts as long as it, or a view of it, is reachable, so that the counter shows the memory that is really held.

    Parameters
    ----------
    group
        On the host, buffers come from its `Group.empty`, so that the other ranks of a host can read them in place. By default from the
        library itself.

    Attributes
    ----------
    held
        The bytes held now, by purpose, such as ``{"parameters": 4096}``.
    peak
        The most bytes that were held at once.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self.held: dict[str, int] = {}
        self.peak: int = 0

    @property
    def current(self) -> int:
        """The bytes held now."""
        return sum(self.held.values())

    def reset_peak(self) -> None:
        """Let `peak` begin again, with the bytes held now."""
        self.peak = self.current

    def empty(self, purpose: str, shape: int | Sequence[int], dtype: str, template: Array) -> Array:
        """Return a buffer of undefined content, in the memory of the array ``template``, for one purpose.

        Parameters
        ----------
        purpose
            The purpose under which it is counted.
        shape
            The extents, or the number of elements.
        dtype
            The dtype, by name: ``"bfloat16"``.
        template
            An array, whose library and device the buffer has; NumPy's, if it is of JAX on the host.

        Raises
        ------
        DTypeError
            The library of ``template`` does not have ``dtype``.
        OutOfMemoryError
            There is no memory.
        """
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        template = readable(template)
        nbytes = math.prod(extents) * itemsize(dtype)
        if isinstance(template, np.ndarray):
            buffer = self._on_host(extents, _numpy_dtype(dtype))
            owner = _root(buffer)
        elif _is_of("torch", "Tensor", template):
            buffer, owner = self._of_torch(extents, dtype, template)
        else:
            with template.device:
                import cupy

                buffer = owner = cupy.empty(extents, _numpy_dtype(dtype))
        self._count(purpose, nbytes)
        # Interpreters end in any order: the buffers of that moment are of no interest.
        weakref.finalize(owner, self._count, purpose, -nbytes).atexit = False
        return buffer

    def adopt(self, purpose: str, array: Array) -> None:
        """Count an array that other code has made, as long as it is reachable.

        Parameters
        ----------
        purpose
            The purpose under which it is counted.
        array
            An array of NumPy, CuPy or torch.
        """
        owner = _root(array) if isinstance(array, np.ndarray) else array
        self._count(purpose, array.nbytes)
        weakref.finalize(owner, self._count, purpose, -array.nbytes).atexit = False

    def _of_torch(self, extents: tuple[int, ...], dtype: str, template: Array) -> tuple[Array, Any]:
        import torch

        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise DTypeError(f"torch has no dtype {dtype!r}")
        if template.device.type != "cpu":
            buffer = torch.empty(extents, dtype=kind, device=template.device)
            return buffer, buffer.untyped_storage()
        # The memory is NumPy's: the tensor and its views keep that array, whose end shows that the last of them is gone.
        owner = self._on_host((math.prod(extents) * itemsize(dtype),), np.dtype(np.uint8))
        return torch.from_numpy(owner).view(kind).reshape(extents), _root(owner)

    def _on_host(self, extents: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if self._group is not None:
            try:
                return self._group.empty(extents, dtype)
            except OutOfMemoryError:
                pass  # the share that others can read is used up, and plain memory does as well
        return np.empty(extents, dtype)

    def _count(self, purpose: str, nbytes: int) -> None:
        self.held[purpose] = self.held.get(purpose, 0) + nbytes
        self.peak = max(self.peak, self.current)


def _is_of(module: str, name: str, value: Any) -> bool:
    """Return whether a value is an array of a library; a library that is not imported has none."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether some elements of an array are one and the same memory, as far as strides of 0 show it."""
    return 0 not in shape and any(extent > 1 and not stride for extent, stride in zip(shape, strides, strict=True))


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        pass
    try:
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
        return kind
    except (ImportError, AttributeError) as error:
        raise DTypeError(
            f"there is no dtype {dtype!r} here; bfloat16 and float8 need ml_dtypes: pip install 'oneaccord[low-precision]'"
        ) from error


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that all views of an array keep alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _device(array: Array) -> str:
    buffer = readable(array)
    return "cpu" if isinstance(buffer, np.ndarray) else str(buffer.device).lower()
