"""Where libucp is, found out without loading it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["SONAME", "adapters", "beside_python", "loaded_library", "missing", "system_library", "wheel_library"]

SONAME = "libucp.so.0"


def missing() -> str | None:
    """Return None when a libucp is here, else what to do, in words."""
    if wheel_library() or loaded_library() or beside_python() or system_library():
        return None
    return (
        f"UCX's library {SONAME} was not found: install the package of your system (Debian: libucx0, Fedora: ucx), load the "
        "cluster's module, or pip install libucx-cu12, which needs no CUDA"
    )


def wheel_library() -> str | None:
    """Return the path of the library of the wheel libucx, None where that is not installed."""
    spec = find_spec("libucx")
    paths = [Path(folder) / "lib" / SONAME for folder in (spec.submodule_search_locations or () if spec else ())]
    return next((str(path) for path in paths if path.exists()), None)


def beside_python() -> str | None:
    """Return the path of the library in the environment of this Python, as of conda, None where it has none."""
    paths = (Path(prefix) / "lib" / SONAME for prefix in (sys.prefix, sys.base_prefix))
    return next((str(path) for path in paths if path.exists()), None)


def system_library() -> str | None:
    """Return what the loader finds as the system's library, None where there is none."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        path = Path(folder) / SONAME
        if folder and path.exists():
            return str(path)
    from ctypes.util import find_library  # it imports subprocess, which most who look need not

    return find_library("ucp")


def loaded_library() -> str | None:
    """Return the path of the library that this process has loaded already, None where it has none."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libucp.so" in line)
    return next(paths, None)


def adapters() -> list[str]:
    """Return the ports of this host's InfiniBand and RoCE adapters, in UCX's words, such as ``"mlx5_0:1"``."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)
