"""What tests of arrays on GPUs that are made of threads have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oneaccord.arrays.libraries import DeviceArray, library_of
from oneaccord.errors import GpuFallbackWarning
from support.fake_gpu import fake_cupy

__all__ = ["Library", "cupy", "held_by", "library", "read"]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield fake_cupy.install(monkeypatch)
    fake_cupy.shut_down()


class Library:
    """Gives the arrays of a test to what is tested: as they are, or as arrays of CuPy on a GPU of their own rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cupy = name == "cupy"

    def __repr__(self) -> str:
        return self.name

    def give(self, tree: Any) -> Any:
        """Return dicts, lists and tuples with arrays of this library instead of those of NumPy, which for NumPy stay the same."""
        return _over(np.ndarray, fake_cupy.asarray, tree) if self.is_cupy else tree

    def take(self, tree: Any) -> Any:
        """Return them with arrays of NumPy again."""
        return _over(fake_cupy.ndarray, fake_cupy.asnumpy, tree) if self.is_cupy else tree


def _over(kind: type[Any], function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _over(kind, function, value) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_over(kind, function, value) for value in tree)
    return tree


@pytest.fixture(params=["numpy", "cupy"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """NumPy, and then CuPy on one GPU, which all ranks share, over backends that move host memory."""
    if request.param == "numpy":
        yield Library(request.param)
        return
    fake_cupy.install(monkeypatch, 1)
    monkeypatch.setenv("ONEACCORD_GPU_FALLBACK", "host")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GpuFallbackWarning)
        yield Library(request.param)
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
