"""Errors and checks that the libraries share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from oneaccord.common.checks import safe_str
from oneaccord.common.installing import install_command
from oneaccord.errors import DTypeError, LayoutError, OutOfMemoryError

__all__ = ["WAYS_OUT", "low_precision_dtype", "no_memory", "refuse_overlap"]

WAYS_OUT = (
    'choose a backend that serves GPUs (backend = "nccl", or "hybrid"; `oneaccord doctor` lists them), or set '
    'gpu_fallback = "host" in the config, which copies through the host, as cupy.asnumpy(x) or x.cpu() do'
)
"""Advice for an array on a GPU that the backend cannot move."""


def low_precision_dtype(name: str) -> np.dtype[np.void]:
    """Return the dtype of ml_dtypes that has this name.

    Raises
    ------
    DTypeError
        There is no such dtype, or ml_dtypes is not installed.
    """
    try:
        import ml_dtypes

        found: np.dtype[np.void] = np.dtype(getattr(ml_dtypes, name))
    except ImportError:
        command = install_command("pip install 'oneaccord-core[low-precision]'")
        raise DTypeError(f"arrays of dtype {name} need ml_dtypes: {command}") from None
    except AttributeError:
        raise DTypeError(
            f"an array of dtype {name} cannot travel between ranks: NumPy and ml_dtypes do not have this dtype"
        ) from None
    return found


def no_memory(shape: Sequence[int], dtype: np.dtype[Any], device: int, error: Exception) -> OutOfMemoryError:
    """Return the exception to raise if a device has no memory left; ``error`` is the library's own."""
    return OutOfMemoryError(
        f"device {device} has no memory for an array of {math.prod(shape) * dtype.itemsize:,} bytes, {dtype}{list(shape)}: {safe_str(error)}"
    )


def refuse_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise an error if two elements of a result may share memory; ``strides`` are bytes.

    Raises
    ------
    LayoutError
        They may.
    """
    extent = itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True)):
        if count > 1 and stride < extent:
            raise LayoutError(
                "elements of out= share memory with each other (a broadcast or sliding view): give an array with memory for each element"
            )
        extent += stride * (count - 1)
