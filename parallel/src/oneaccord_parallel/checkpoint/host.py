"""The bytes of arrays, on the host: written to files, and read from them."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.errors import DTypeError, LayoutError, UsageError
from oneaccord_parallel.arrays import Array, assignable, dtype_of, itemsize, oddity, readable
from oneaccord_parallel.boxes import Box

__all__ = [
    "Bytes",
    "as_bits",
    "bytes_of",
    "copy_bytes",
    "cut",
    "empty",
    "fingerprint",
    "host_buffer",
    "is_torch",
    "new_array",
    "source",
    "torch_template",
]

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
"""An array whose elements are integers, of the size of the true ones; complex128 is itself."""


def source(leaf: Any) -> Array:
    """Return the memory of an array that is to be saved.

    Raises
    ------
    DTypeError
        It is no array.
    LayoutError
        It is sparse, quantized, without memory or the like.
    UsageError
        It has more than its elements, such as a mask.
    """
    # Not np.ma, which would be loaded: if another thread is just loading it, only a part of it is there.
    if isinstance(leaf, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise UsageError("a checkpoint cannot hold a masked array; save x.data and x.mask")
    words = oddity(leaf)
    if words:
        raise LayoutError(f"a checkpoint cannot hold what is {words}")
    array = readable(leaf)
    return array.resolve_conj().resolve_neg() if is_torch(array) else array


def cut(array: Array, box: Box) -> Array:
    """Return the elements in a box, as a view."""
    return array[(*box.slices, ...)]


def bytes_of(array: Array) -> Bytes:
    """Return the bytes of an array's elements in C order: its own memory, if that is on the host and in this order."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if is_torch(array):
        import torch

        flat: Bytes = array.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat
    import cupy

    on_host: Bytes = cupy.ascontiguousarray(array).reshape(-1).view(np.uint8).get()
    return on_host


_BLOCK = 1 << 20
"""The bytes that `fingerprint` brings to the host at a time."""


def fingerprint(array: Array) -> str:
    """Return the CRC of the bytes of an array in C order: eight digits that differ if the bytes do, except for one pair in 2**32."""
    flat = array.reshape(-1)
    step = _BLOCK // itemsize(dtype_of(array))
    found = 0
    for start in range(0, int(flat.shape[0]), step):
        found = zlib.crc32(bytes_of(flat[start : start + step]).data, found)
    return f"{found:08x}"


def copy_bytes(array: Array, target: Bytes) -> None:
    """Copy the elements of an array in C order to host memory, if possible without additional memory on the host."""
    if is_torch(array):
        import torch

        if target.size:
            torch.from_numpy(target).view(array.dtype).reshape(array.shape).copy_(array)
    elif isinstance(array, np.ndarray):
        target.view(array.dtype).reshape(array.shape)[...] = array
    else:
        target[...] = bytes_of(array)


def host_buffer(nbytes: int, arrays: list[Array]) -> Bytes:
    """Return host memory for copies of some arrays: pinned if GPUs copy to it."""
    for array in arrays if nbytes else ():
        if is_torch(array):
            if array.device.type == "cuda":
                import torch

                pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
                return pinned
        elif not isinstance(array, np.ndarray):
            import cupy

            return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    return np.empty(nbytes, np.uint8)


def as_bits(array: Array) -> Bits | None:
    """Return an array's own memory, with integers for elements; None if it is not on the host or cannot be written."""
    if not assignable(array):
        return None
    if isinstance(array, np.ndarray):
        return np.asarray(array).view(_bits(array.dtype.itemsize))
    if is_torch(array) and array.device.type == "cpu":
        import torch

        if array.is_conj() or array.is_neg():
            return None
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        signed: Bits = array.view(sizes[array.dtype.itemsize]).numpy()
        return signed.view(_bits(signed.dtype.itemsize))
    return None


def empty(shape: tuple[int, ...], dtype: str) -> Bits:
    """Return new memory for an array of a dtype, with integers for elements."""
    return np.empty(shape, _bits(itemsize(dtype)))


def new_array(bits: Bits, dtype: str, template: Array | None = None) -> Array:
    """Return memory of `empty` as an array: of NumPy, or of the library of ``template`` and on its device."""
    if template is not None and is_torch(template):
        import torch

        # By way of one axis, for an array without axes has no other views.
        return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(template.dtype).reshape(bits.shape).to(template.device)
    array = bits.reshape(-1).view(_true(dtype)).reshape(bits.shape)
    if template is None or isinstance(template, np.ndarray):
        return array
    with template.device:
        import cupy

        return cupy.asarray(array)


def torch_template(dtype: str) -> Array:
    """Return an empty tensor of torch on the CPU, of a dtype by name."""
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise DTypeError(f"torch has no dtype {dtype!r}")
    return torch.empty(0, dtype=kind)


def _bits(size: int) -> np.dtype[Any]:
    return np.dtype(np.complex128) if size == 16 else np.dtype(f"u{size}")


def _true(dtype: str) -> np.dtype[Any]:
    """Return the dtype of a name; ml_dtypes has those that NumPy lacks."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
        return kind


def is_torch(array: Array) -> bool:
    """Return whether an array is a tensor of torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(kind, type) and isinstance(array, kind)
