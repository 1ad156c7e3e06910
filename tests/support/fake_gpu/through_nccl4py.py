"""The real nccl4py above the fake NCCL: a library in C, which nccl4py finds for NCCL, calls back into `fake_nccl`.

So the binding's own conversions, checks, and errors are tested as well: addresses, the layout of configurations, and numbers that
it does not know. nccl4py finds the functions of the library once for a process; which fake answers changes with each test.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from support.fake_gpu import fake_nccl
from support.fake_gpu.compiled import answer_by, compiler, load
from support.fake_gpu.fake_nccl import FakeNccl
from support.fake_gpu.fake_nccl_extra import Window

__all__ = ["BINDINGS", "config_offsets", "install", "real_binding"]

BINDINGS = ("fake", "nccl4py")
"""What can be between the plugin and the fake: nothing, or nccl4py."""

_INTERNAL_ERROR, _INVALID_ARGUMENT, _INVALID_USAGE, _IN_PROGRESS = 3, 4, 5, 7
_AT_ONCE = frozenset({"comm_get_async_error", "comm_destroy", "comm_abort", "comm_revoke"})
"""What is never in progress when it returns, or tells that in its result."""
_MODULES = ("nccl", "nccl.bindings", "nccl.bindings.nccl")


def install(fake: FakeNccl, binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import nccl.bindings.nccl`` find a fake, or nccl4py above it, until the test ends; skip the test where that cannot be."""
    if binding == "fake":
        fake.install(monkeypatch)
        return
    real_binding()
    for name in _MODULES:
        monkeypatch.setitem(sys.modules, name, _modules()[name])
    monkeypatch.setattr(fake_nccl, "NCCLError", _Refusal)
    monkeypatch.setattr(_Now, "fake", fake)


def real_binding(hidden: Sequence[str] = ()) -> Any:
    """Return ``nccl.bindings.nccl`` above the library in C; skip the test where that cannot be.

    In a process that calls this first, the library lacks the functions that are hidden.
    """
    if compiler() is None:
        pytest.skip("there is no C compiler (cc), which makes the library under nccl4py")
    if sys.platform != "linux" or find_nccl4py() is None:
        pytest.skip("nccl4py is not installed, which runs on Linux alone")
    library = load("nccl", hidden=hidden)
    answer_by(library, _answer)
    binding = _modules()["nccl.bindings.nccl"]
    path = binding.get_library_path()
    if path != library._name:
        pytest.skip(f"another NCCL than that of the tests is in this process: {path}")
    return binding


@functools.cache
def find_nccl4py() -> Any:
    """Return where nccl4py is, or None; fakes of its name do not count."""
    fakes = {name: sys.modules.pop(name) for name in _MODULES if name in sys.modules}
    try:
        return find_spec("nccl.bindings")
    except ModuleNotFoundError:
        return None
    finally:
        sys.modules.update(fakes)


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """Return the modules of nccl4py, whatever fakes are in their places."""
    others = {name: sys.modules.pop(name) for name in _MODULES if name in sys.modules}
    import_module(_MODULES[-1])
    found = {name: sys.modules[name] for name in _MODULES}
    sys.modules.update(others)
    return found


class _Refusal(Exception):
    """What the fake raises while the real binding has the words, which knows fewer numbers than there are."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(status)


class _Now:
    """The fake that answers what belongs to no communicator."""

    fake: FakeNccl | None = None


class _Handle:
    """A communicator, as NCCL's callers know it."""

    def __init__(self, fake: FakeNccl, comm: Any, is_blocking: bool) -> None:
        self.fake = weakref.ref(fake)
        self.comm = comm
        self.is_blocking = is_blocking


_handles: dict[int, _Handle] = {}
_numbers = itertools.count(0x10_0000, 0x100)  # not the fake's own, so that nobody mistakes one for the other
_words: dict[bytes, Any] = {}


class _Field(ctypes.Structure):
    """A number of a configuration, as the library in C describes it."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("since", ctypes.c_int))


@functools.cache
def _config_fields() -> tuple[tuple[str, int, int], ...]:
    describe = load("nccl").describe_config
    describe.restype = ctypes.POINTER(_Field)
    count, size = ctypes.c_int(), ctypes.c_size_t()
    fields = describe(ctypes.byref(count), ctypes.byref(size))
    return tuple((field.name.decode(), field.offset, field.since) for field in fields[: count.value])


def config_offsets() -> dict[str, int]:
    """Return where the library in C takes each number of a configuration from."""
    return {name: offset for name, offset, _ in _config_fields()}


@functools.cache
def _parameters(name: str) -> tuple[str, ...] | None:
    """Return the names of the parameters of a call; None if the fake has none of that name."""
    method = getattr(FakeNccl, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)[1:]


def _answer(name: bytes, words: Any, count: int, made: Any) -> int:
    """Answer a call of the library in C, by the method of its name: it returns, and raises, what the library has to."""
    method = name.decode()
    parameters = _parameters(method)
    if parameters is None:
        return _INVALID_USAGE
    given = dict(zip(parameters, words[:count], strict=False))
    handle = _handles.get(given["comm"]) if "comm" in given else None
    fake = _Now.fake if handle is None else handle.fake()
    if fake is None:  # what was left of a test that has ended
        return _INVALID_ARGUMENT
    config: Any = None
    try:
        if "comm" in given:
            given["comm"] = fake_nccl.Comm() if handle is None else handle.comm
        if "win" in given:
            given["win"] = Window(given["win"])
        if "comm_id" in given:
            given["comm_id"] = fake_nccl.UniqueId.from_buffer(ctypes.string_at(given["comm_id"], 128))
        if "config" in given:
            config = _config(given["config"], fake.version)
            given["config"] = config.ptr
        result = getattr(fake, method)(*given.values())
    except Exception as error:
        status = getattr(error, "status", None)
        if status is None:
            fake.crimes.append(f"{method} raised {error!r}")
            return _INTERNAL_ERROR
        return int(status)
    if made and result is not None:
        made[0] = _made(result, fake, config)
    is_blocking = config.blocking != 0 if config else handle is None or handle.is_blocking
    return 0 if is_blocking or method in _AT_ONCE else _IN_PROGRESS


def _config(numbers: int, version: int) -> Any:
    """Return the fake's configuration, with the numbers that an NCCL of that version looks at."""
    made = fake_nccl.Config()
    fields = _config_fields()
    values = (ctypes.c_int * len(fields)).from_address(numbers)
    for (name, _, since), value in zip(fields, values, strict=True):
        if since <= version:
            setattr(made, name, value)
    return made


def _made(result: Any, fake: FakeNccl, config: Any) -> int:
    """Return the word that stands for a result: itself, the number of a communicator, or the address of bytes that stay there."""
    if isinstance(result, fake_nccl.Comm):
        number = next(_numbers)
        _handles[number] = _Handle(fake, result, config.blocking != 0)
        return number
    if isinstance(result, int):
        return result
    if isinstance(result, Window):
        return result.handle
    text = result.encode() if isinstance(result, str) else bytes(result)
    buffer = _words.setdefault(text, ctypes.create_string_buffer(text))
    return ctypes.addressof(buffer)
