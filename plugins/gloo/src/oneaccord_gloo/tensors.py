"""Tensors over memory of NumPy: nothing is copied."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, cast

import numpy as np
import numpy.typing as npt

__all__ = ["Tensors"]

_Everything = ctypes.c_char * sys.maxsize


class Tensors:
    """Makes tensors.

    Parameters
    ----------
    torch
        The module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def of_bytes(self, array: npt.NDArray[Any]) -> Any:
        """Return a tensor of uint8 over a C-contiguous array of any dtype."""
        return self._torch.from_numpy(_writable(array).reshape(-1).view(np.uint8))

    def of_numbers(self, array: npt.NDArray[Any], numpy_name: str, torch_name: str) -> Any:
        """Return a tensor over a C-contiguous array, seen as NumPy's dtype ``numpy_name`` first, then as torch's ``torch_name``."""
        tensor = self._torch.from_numpy(_writable(array).reshape(-1).view(numpy_name))
        return tensor if numpy_name == torch_name else tensor.view(getattr(self._torch, torch_name))

    def of_payload(self, payload: memoryview | bytearray | bytes) -> Any:
        """Return a tensor of uint8 over bytes."""
        return self._torch.from_numpy(_writable(np.frombuffer(payload, np.uint8)))


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``array``, or where it is read-only another one over its memory that is not: torch knows no read-only tensors.

    Nothing is written there; the caller keeps ``array`` alive.
    """
    if array.flags.writeable:
        return array
    memory = memoryview(_Everything.from_address(array.ctypes.data)).cast("B")[: array.nbytes]
    return np.ndarray(array.shape, cast("Any", array.dtype), memory)
