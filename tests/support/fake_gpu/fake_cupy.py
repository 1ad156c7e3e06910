"""A stand-in for the module ``cupy``: its arrays live in NumPy memory, and all that they do is queued on the current stream.

`install` puts it into ``sys.modules``. For fakes of other libraries: `enqueue` queues a function on a stream, `view` gives the memory at
an address, `held` stops a stream, and `shut_down` ends all threads and raises what failed on a device. All other names are CuPy's; it has
those that array_api_compat, `oneaccord` and its layers use.
"""

# ruff: noqa: F401 - what is imported here is what the module has
from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from support.fake_gpu import fake_cuda, fake_cupy_array
from support.fake_gpu.fake_cuda import CUDARuntimeError, begin_capture, end_capture, enqueue, forgive, held, shut_down, view
from support.fake_gpu.fake_cupy_array import Capsule, array, asarray, asnumpy, copyto, empty, empty_like, from_dlpack, ndarray
from support.fake_gpu.fake_cupy_cuda import cuda, forget_streams, get_current_stream, pinned, pinned_now
from support.fake_gpu.fake_cupy_functions import FUNCTIONS, fft, linalg
from support.fake_gpu.fake_cupy_parts import MemoryPointer, UnownedMemory
from support.fake_gpu.fake_driver import FakeDriver

__version__ = "14.2.0"

_MODULE = sys.modules[__name__]
_OF_NUMPY = """
bool_ complex64 complex128 complexfloating dtype e finfo float16 float32 float64 floating iinfo inf int8 int16 int32 int64 integer intp isdtype
issubdtype nan newaxis number pi result_type signedinteger uint8 uint16 uint32 uint64 unsignedinteger
""".split()


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> types.ModuleType:
    """Let ``import cupy`` find this module, and ``libcuda.so.1`` be a fake, on a machine with so many devices, until the test ends; return it.

    Call `shut_down` when the test ends.
    """
    fake_cuda.start_up(devices)
    forget_streams()
    modules = {"cupy": _MODULE, "cupy.cuda": cuda, "cupy.cuda.runtime": cuda.runtime, "cupy.cuda.device": cuda.device}
    for name, module in {**modules, "cupy.linalg": linalg, "cupy.fft": fft}.items():
        monkeypatch.setitem(sys.modules, name, module)
    FakeDriver().install(monkeypatch)
    return _MODULE


# As of CuPy, these names hide those of Python, and there is no list of them for `import *`.
for _name in _OF_NUMPY:
    setattr(_MODULE, _name, getattr(np, _name))
for _name, _function in FUNCTIONS.items():
    setattr(_MODULE, _name, _function)
fake_cupy_array.set_namespace(_MODULE)
cuda.MemoryPointer, cuda.UnownedMemory = MemoryPointer, UnownedMemory
