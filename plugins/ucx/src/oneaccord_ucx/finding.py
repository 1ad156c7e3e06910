"""Where libucp is, found out without loading it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from oneaccord.api import find_library, loaded_libraries, loader_folders, python_folders

__all__ = ["FILE", "SONAME", "adapters", "beside_python", "loaded_library", "missing", "system_library", "wheel_library"]

FILE = "libucp.so"
SONAME = f"{FILE}.0"


def missing() -> str | None:
    """Return None when a libucp is here, else what to do, in words."""
    if wheel_library() or loaded_library() or beside_python() or system_library():
        return None
    return (
        f"UCX's library {SONAME} was not found: install the package of your system (Debian: libucx0, Fedora: ucx), load the "
        "cluster's module, or pip install libucx-cu12, which needs no CUDA"
    )


def wheel_library() -> str | None:
    """Return the path of the library of the wheel libucx, None if that is not installed."""
    spec = find_spec("libucx")
    return find_library([SONAME], [Path(folder) / "lib" for folder in (spec.submodule_search_locations or () if spec else ())])


def beside_python() -> str | None:
    """Return the path of the library in the environment of this Python, as of conda, None if it has none."""
    return find_library([SONAME], python_folders())


def system_library() -> str | None:
    """Return what the loader finds as the system's library, None if there is none."""
    return find_library([SONAME], loader_folders(), "ucp")


def loaded_library() -> str | None:
    """Return the path of the library that this process has loaded already, None if it has none."""
    return next(iter(loaded_libraries(FILE)), None)


def adapters() -> list[str]:
    """Return the ports of this host's InfiniBand and RoCE adapters, in UCX's words, such as ``"mlx5_0:1"``."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)
