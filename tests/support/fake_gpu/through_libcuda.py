"""The seam to CUDA's driver in earnest: ctypes calls a library in C, which calls back into `fake_driver`.

So it is ctypes that converts addresses, writes results and gives the interpreter's lock away.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from oneaccord_nccl import _driver
from support.fake_gpu.compiled import answer_by, compiler, load
from support.fake_gpu.fake_driver import FakeDriver

__all__ = ["install", "library"]

_MAKERS = frozenset(
    {
        *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuEventCreate", "cuGetErrorName", "cuGetErrorString"),
        *("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuDeviceGetUuid", "cuDeviceGetUuid_v2"),
    }
)
"""What writes a result, the place of which is the last parameter of some and the first one of the others."""
_PLACE_LAST = frozenset({"cuGetErrorName", "cuGetErrorString", "cuStreamIsCapturing"})
_words: dict[bytes, Any] = {}


def library() -> ctypes.CDLL:
    """Return the library; skip the test where it cannot be made."""
    if compiler() is None:
        pytest.skip("there is no C compiler (cc), which makes the library that stands for CUDA's driver")
    return load("cuda")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugin call the library in C, and it the fake driver that a test has installed already, until the test ends."""
    loaded, fake = library(), ctypes.CDLL("libcuda.so.1")
    assert isinstance(fake, FakeDriver)  # type: ignore[unreachable]
    answer_by(loaded, lambda *given: _answer(fake, *given))
    monkeypatch.setattr(_driver, "LIBRARY", loaded._name)


def _answer(fake: FakeDriver, name: bytes, words: Any, count: int, made: Any) -> int:
    method = name.decode()
    function = getattr(fake, method, None)
    if function is None:
        return 500  # CUDA_ERROR_NOT_FOUND
    given = words[:count]
    result: Any = ctypes.c_char_p() if method.startswith("cuGetError") else ctypes.c_ssize_t()
    if method.startswith("cuDeviceGetUuid"):
        result = (ctypes.c_ubyte * 16).from_address(ctypes.addressof(made.contents))
    if method == "cuThreadExchangeStreamCaptureMode":
        result.value = given.pop()
    if method in _MAKERS:
        given.insert(len(given) if method in _PLACE_LAST else 0, ctypes.byref(result))
    function.argtypes = given  # of which it counts the members alone
    status: int = function(*given)
    if made and not isinstance(result, ctypes.Array):
        made[0] = _address(result.value) if isinstance(result, ctypes.c_char_p) else result.value
    return status


def _address(text: bytes | None) -> int:
    buffer = _words.setdefault(text or b"", ctypes.create_string_buffer(text or b""))
    return ctypes.addressof(buffer)
