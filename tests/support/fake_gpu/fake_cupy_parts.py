"""What an array of the fake CuPy is made of, beside its elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_cuda import Memory
from support.fake_gpu.fake_cupy_cuda import Device

__all__ = ["Capsule", "Flags", "Foreign", "MemoryPointer", "Pointer", "UnownedMemory", "adopted"]


class Pointer:
    """An address in device memory, as CuPy's MemoryPointer."""

    def __init__(self, mem: Memory | Foreign, ptr: int) -> None:
        self.mem = mem
        self.ptr = ptr
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Foreign:
    """Device memory that another array owns."""

    def __init__(self, owner: Any, pointer: int) -> None:
        self.owner = owner
        self.device_id = fake_cuda.device_at(pointer) if pointer else fake_cuda.get_device()


class UnownedMemory(Foreign):
    """As CuPy's: memory that somebody else frees once ``owner`` is gone."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        super().__init__(owner, ptr)
        assert device_id in (-1, self.device_id), "CuPy would believe it"
        self.ptr = ptr
        self.size = size


class MemoryPointer(Pointer):
    """As CuPy's."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        super().__init__(mem, mem.ptr + offset)


def adopted(shape: Any, dtype: Any, memptr: MemoryPointer) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return memory, and an array of it."""
    nbytes = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return memptr.mem, np.ndarray(shape, dtype, fake_cuda.view(memptr.ptr, nbytes).data)  # type: ignore[call-overload]


class Capsule:
    """What ``__dlpack__`` gives; it can be consumed once."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def consume(self) -> Any:
        array, self._array = self._array, None
        if array is None:
            raise ValueError("A DLPack tensor object cannot be consumed multiple times")
        return array


class Flags:
    """As CuPy's: nothing is read-only."""

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata
        self.fnc = f_contiguous and not c_contiguous
        self.forc = f_contiguous or c_contiguous
