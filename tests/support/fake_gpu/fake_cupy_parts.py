"""What an array of the fake CuPy is made of, beside its elements."""

from __future__ import annotations

from typing import Any

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_cuda import Memory
from support.fake_gpu.fake_cupy_cuda import Device

__all__ = ["Flags", "Foreign", "Pointer"]


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


class Flags:
    """As CuPy's: nothing is read-only."""

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata
        self.fnc = f_contiguous and not c_contiguous
        self.forc = f_contiguous or c_contiguous
