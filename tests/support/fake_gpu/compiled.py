"""Stand-ins for the libraries of CUDA and NCCL, compiled from ``shim/*.c``: what calls them in earnest reaches Python behind."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["answer_by", "build", "compiler", "load"]

_SOURCES = Path(__file__).with_name("shim")
_NAMES = {"nccl": "libnccl.so.2", "cuda": "libcuda.so.1"}
_BY_NAME = frozenset({"nccl"})
"""What a process finds by its name alone once it is loaded. Whoever asks for CUDA's driver learns by that whether there is a GPU."""

UPCALL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_ssize_t), ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
)
"""What a library calls: ``(name, words, how many, where to put what is made)``, which returns a status."""


def compiler() -> str | None:
    """Return the C compiler, where there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(name: str, folder: Path, *, hidden: Sequence[str] = ()) -> Path:
    """Compile a library, ``"nccl"`` or ``"cuda"``, into a folder; one that is older has not the functions that are hidden."""
    found = compiler()
    assert found is not None, "there is no C compiler"
    target = folder / _NAMES[name]
    words = [found, "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    words += [f"-D{function}=hidden_{function}" for function in hidden]
    words += [f"-Wl,-soname,{_NAMES[name]}"] if name in _BY_NAME else []
    words += ["-o", str(target), str(_SOURCES / f"{name}.c")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def load(name: str, *, hidden: Sequence[str] = ()) -> ctypes.CDLL:
    """Return a library of this process.

    Without the functions that are hidden, if this is its first call: a process has one library of a name.
    """
    if name not in _loaded:
        with tempfile.TemporaryDirectory() as folder:
            _loaded[name] = ctypes.CDLL(str(build(name, Path(folder), hidden=hidden)), mode=ctypes.RTLD_GLOBAL)
    return _loaded[name]


def answer_by(library: ctypes.CDLL, function: Callable[..., int]) -> None:
    """Let a function of Python answer all calls of a library."""
    name = library._name
    _functions[name] = function
    if name not in _answers:
        # One for all tests: threads of a test that is over may still call it, and must not find another object in its place.
        _answers[name] = UPCALL(lambda *words: _functions[name](*words))  # noqa: PLW0108 - it is looked up at each call
        library.set_upcall(_answers[name])


_loaded: dict[str, ctypes.CDLL] = {}
_answers: dict[str, object] = {}
_functions: dict[str, Callable[..., int]] = {}
