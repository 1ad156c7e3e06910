"""What tests of arrays on GPUs that are made of threads have in common."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_gpu import fake_cupy

from manyhands.arrays.libraries import DeviceArray, library_of

__all__ = ["cupy", "held_by", "read"]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield fake_cupy.install(monkeypatch)
    fake_cupy.shut_down()


def read(value: Any) -> DeviceArray:
    """Read an array as a call does."""
    library = library_of(value)
    assert library is not None
    found = library.read(value)
    assert isinstance(found, DeviceArray)
    return found


def held_by(array: DeviceArray, stream: int = 0) -> np.ndarray[Any, Any]:
    """Return what a kernel that is queued on a stream now finds in an array's memory."""
    found: list[np.ndarray[Any, Any]] = []

    def kernel() -> None:
        found.append(fake_cupy.view(array.pointer, array.nbytes).view(array.dtype).reshape(array.shape).copy())

    fake_cupy.enqueue(stream, kernel)
    fake_cupy.cuda.runtime.streamSynchronize(stream)
    return found[0]
