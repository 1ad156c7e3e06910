"""Where libucc is, found out without loading it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["SONAME", "find", "loaded", "missing"]

SONAME = "libucc.so.1"


def find() -> str | None:
    """Return the path of the library, or what the loader knows it by; None where there is none."""
    home = os.environ.get("UCC_HOME")
    folders = [Path(home) / "lib", Path(home) / "lib64"] if home else []
    folders += [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each]
    folders += [Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix)]
    paths = (folder / SONAME for folder in folders)
    from ctypes.util import find_library  # it imports subprocess, which most who look need not

    return next((str(path) for path in paths if path.exists()), None) or find_library("ucc")


def missing() -> str | None:
    """Return None when a libucc is here, else what to do, in words."""
    if find():
        return None
    return (
        f"UCC's library {SONAME} was not found, and PyPI has none: load the cluster's module or install the package of your system, or build "
        "UCC and set UCC_HOME to its folder"
    )


def loaded(library: str) -> list[str]:
    """Return the paths of a library, such as ``"libucs.so"``, that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if f"/{library}" in line})
