"""The fakes of CuPy, NCCL and the driver have no name, parameter, number or word that the real ones do not have.

CuPy and nccl4py import without a driver and without NCCL; of the driver, NVIDIA's binding has the declarations. `make test-peers` runs these tests with the wheels for each CUDA, in an environment for each.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable
from ctypes import c_int, c_size_t, c_uint, c_void_p
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.fake_gpu import compiled, fake_cupy, fake_cupy_cuda, fake_cupy_functions, fake_errors, fake_nccl
from support.fake_gpu.compared import differences
from support.fake_gpu.fake_cupy_parts import Flags, Pointer
from support.fake_gpu.fake_driver import FakeDriver
from support.fake_gpu.fake_nccl import FakeNccl

from oneaccord_nccl import _driver, _nccl, dtypes

pytestmark = pytest.mark.peers

_OURS = frozenset("begin_capture end_capture enqueue forget_streams forgive held install pinned shut_down view".split())
"""What the fake has for tests."""
_OF_OBJECTS = frozenset({"device_id", "ptr", "status"})
"""What objects of some classes have that their class does not tell of (cupy/cuda/stream.pyx, nccl/bindings/nccl.pyx)."""
_ATTRIBUTE = re.compile(r"self\.([a-z]\w*)\b[^=(\n]*=")


def public(of: Any) -> list[str]:
    """Return the names that others may use, of a module those that are its own."""
    return [name for name in vars(of) if not name.startswith("_")]


def members(of: type) -> list[str]:
    """Return the names that the objects of a class have for others, those of attributes among them."""
    maker = vars(of).get("__init__")
    return [*public(of), *(_ATTRIBUTE.findall(inspect.getsource(maker)) if maker else ())]


@pytest.fixture(scope="module")
def cupy() -> Any:
    """The real one."""
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed; make test-peers does that")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA
        return import_module("cupy")


@pytest.fixture(scope="module")
def nccl() -> Any:
    """The real binding, whose library is not there."""
    if find_spec("nccl") is None:
        pytest.skip("nccl4py is not installed; make test-peers does that")
    return import_module("nccl.bindings.nccl")


def test_the_module_of_cupy(cupy: Any) -> None:
    own = [name for name in [*fake_cupy._OF_NUMPY, *fake_cupy_functions.FUNCTIONS] if name not in _OURS]
    makers = ["array", "asarray", "asnumpy", "copyto", "empty", "empty_like", "from_dlpack", "ndarray"]
    assert list(differences("cupy", fake_cupy, cupy, [*own, *makers])) == []
    assert list(differences("cupy.linalg", fake_cupy.linalg, cupy.linalg, public(fake_cupy.linalg))) == []
    assert list(differences("cupy.fft", fake_cupy.fft, cupy.fft, public(fake_cupy.fft))) == []
    assert fake_cupy.__version__ == cupy.__version__


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (fake_cupy.ndarray, lambda cupy: cupy.ndarray),
        (Flags, lambda cupy: import_module("cupy._core.flags").Flags),
        (Pointer, lambda cupy: cupy.cuda.MemoryPointer),
        (fake_cupy_cuda.Device, lambda cupy: cupy.cuda.Device),
        (fake_cupy_cuda.Event, lambda cupy: cupy.cuda.Event),
        (fake_cupy_cuda.Stream, lambda cupy: cupy.cuda.Stream),
        (fake_cupy_cuda.ExternalStream, lambda cupy: cupy.cuda.ExternalStream),
        (fake_cupy_cuda.Graph, lambda cupy: cupy.cuda.Graph),
        (fake_cupy_cuda.PinnedMemoryPointer, lambda cupy: cupy.cuda.PinnedMemoryPointer),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_a_class_of_cupy(cupy: Any, fake: type, real: Callable[[Any], Any]) -> None:
    found = real(cupy)
    names = {name for each in fake.__mro__ if each.__module__ != "builtins" for name in members(each)}
    names = {name for name in names if hasattr(found, name) or name not in _OF_OBJECTS}
    assert names
    assert list(differences(fake.__name__, fake, found, sorted(names))) == []


def test_the_modules_of_cuda(cupy: Any) -> None:
    fake, real = fake_cupy.cuda, cupy.cuda
    own = [name for name in public(fake) if not isinstance(getattr(fake, name), type)]
    assert list(differences("cupy.cuda", fake, real, own)) == []
    # Everybody gives these their arguments by position.
    for part in ("runtime", "driver"):
        ours, theirs = getattr(fake, part), getattr(real, part)
        assert list(differences(part, ours, theirs, public(ours), by_name=False)) == []


def test_the_words_of_cudas_errors(cupy: Any) -> None:
    error = cupy.cuda.runtime.CUDARuntimeError
    assert {status: ": ".join(words) for status, words in fake_errors._ERRORS.items()} == {
        status: str(error(status)) for status in fake_errors._ERRORS
    }
    assert {error(status).status for status in fake_errors._ERRORS} == set(fake_errors._ERRORS)


def test_the_binding_of_nccl(nccl: Any) -> None:
    fake = FakeNccl()
    switches = {"fail", "install", "names", "open_communicators", "refuse", "release"}
    methods = [name for name in public(FakeNccl) if callable(getattr(fake, name)) and name not in switches]
    assert list(differences("nccl", fake, nccl, sorted(set(methods) - {"get_error_string"}))) == []
    assert list(differences("nccl", fake, nccl, ["get_error_string"], by_name=False)) == []
    assert list(differences("nccl", nccl, nccl, _nccl._NAMES)) == []
    assert list(differences("Comm", fake_nccl.Comm, nccl.Comm, members(fake_nccl.Comm))) == []
    for name in ("Comm", "NCCLError", "UniqueId"):
        assert list(differences(name, getattr(fake_nccl, name), getattr(nccl, name), public(getattr(fake_nccl, name)))) == []
        assert list(differences("nccl", fake_nccl, nccl, [name])) == []


def test_the_numbers_of_a_configuration(nccl: Any) -> None:
    own = [name for name in vars(fake_nccl.Config()) if name != "ptr"]
    real = nccl.Config()
    assert [name for name in own if not hasattr(real, name)] == []
    assert {name: getattr(real, name) for name in own} == {name: getattr(fake_nccl.Config(), name) for name in own}
    assert isinstance(real.ptr, int)


def test_the_names_of_nccls_errors(nccl: Any) -> None:
    assert {int(each): each.name for each in nccl.Result if each.name != "NumResults"} == fake_nccl._NAMES


def test_the_numbers_of_dtypes_and_reductions(nccl: Any) -> None:
    given = {"bfloat16": "Bfloat16", "float8_e4m3fn": "Float8e4m3", "float8_e5m2": "Float8e5m2"}
    real = {name: int(nccl.DataType[given.get(name, name.capitalize())]) for name in dtypes._TYPES}
    assert real == dtypes._TYPES
    words = {"sum": "Sum", "product": "Prod", "max": "Max", "min": "Min", "mean": "Avg"}
    assert {op: int(nccl.RedOp[words[op]]) for op in dtypes._OPS} == dtypes._OPS
    assert sorted(dtypes._TYPES.values()) == sorted({int(each) for each in nccl.DataType} - {int(nccl.DataType.NumTypes)})


@pytest.fixture(scope="module")
def driver() -> Path:
    """The folder with the declarations of the driver."""
    if find_spec("cuda") is None or (found := find_spec("cuda.bindings")) is None or found.origin is None:
        pytest.skip("cuda-bindings is not installed; make test-peers does that")
    return Path(found.origin).parent


_KINDS = {"int": c_int, "unsigned": c_uint, "unsigned int": c_uint, "size_t": c_size_t, "ncclUniqueId": "id", "UniqueId": "id"}
_NUMBERS = frozenset("CUdevice CUresult ncclDataType_t ncclRedOp_t ncclResult_t ncclScalarResidence_t".split())


_OLD = frozenset({"cuDeviceGetUuid"})
"""What drivers have, NCCL asks them for, and the bindings of CUDA 13 declare no more."""


def kinds(inside: str) -> tuple[Any, ...]:
    """Return how a function gets each parameter of a declaration in C: a number, the id of a communicator, or else an address."""
    given = (
        [word.strip().removeprefix("const ").rpartition(" ") for word in inside.split(",")]
        if inside not in {"", "void"}
        else []
    )
    types = ["int" if kind in _NUMBERS else kind for kind, _, _ in given]
    return tuple(
        c_void_p if "*" in name else _KINDS.get(kind, c_void_p) for kind, (_, _, name) in zip(types, given, strict=True)
    )


def declared(text: str, functions: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Return what each function takes, as NVIDIA's bindings declare it."""
    found = {name: re.search(rf"^cdef [\w ]+?\*? ?_?{name}\((.*?)\)", text, re.MULTILINE) for name in functions}
    return {name: kinds(match[1]) for name, match in found.items() if match is not None}


def test_the_functions_of_the_driver(driver: Path) -> None:
    """`ctypes` would not notice that an argument is too short."""
    text = (driver / "_internal" / "driver.pxd").read_text(encoding="utf-8")
    found = declared(text, _driver._SIGNATURES)
    assert found == {name: given for name, given in _driver._SIGNATURES.items() if name in found or name not in _OLD}
    assert [name for name in vars(FakeDriver()) if name.startswith("cu")] == list(_driver._SIGNATURES)


@pytest.mark.parametrize("library", ["cuda", "nccl"])
def test_the_functions_of_the_libraries_in_c(driver: Path, nccl: Any, library: str) -> None:
    real = {"cuda": driver / "_internal" / "driver.pxd", "nccl": Path(nccl.__file__).parent / "cynccl.pxd"}[library]
    compiler = compiled.compiler()
    if compiler is None:
        pytest.skip("there is no C compiler (cc), which reads the libraries' declarations")
    source = compiled._SOURCES / f"{library}.c"
    text = subprocess.run([compiler, "-std=c99", "-E", "-P", source], capture_output=True, text=True, check=True).stdout
    own = {
        name: kinds(inside)
        for name, inside in re.findall(r"^[\w ]+?\*?((?:nccl|cu)[A-Z]\w+) ?\(([^)]*)\);", text, re.MULTILINE)
    }
    assert len(own) > 10
    found = declared(real.read_text(encoding="utf-8"), own)
    assert found == {name: given for name, given in own.items() if name in found or name not in _OLD}


def test_the_numbers_of_the_driver(driver: Path) -> None:
    cuda = import_module("cuda.bindings.driver")
    errors = {int(each): each.name for each in cuda.CUresult}
    own = {status: name for status, (name, _) in fake_errors.DRIVER_ERRORS.items()}
    assert own == {status: errors[status] for status in own}
    assert errors[_driver._NOT_READY] == "CUDA_ERROR_NOT_READY"
    assert errors[_driver._IMPLICIT] == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert {status for status, name in errors.items() if "_CAPTURE_" in name or "_CAPTURED_" in name} == set(_driver._CAPTURE)
    assert int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING) == _driver._DISABLE_TIMING
    assert int(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) == _driver._RELAXED
