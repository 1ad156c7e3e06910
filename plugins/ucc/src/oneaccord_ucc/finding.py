"""Where libucc is, found out without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from oneaccord.api import find_library, loader_folders, python_folders

__all__ = ["SONAME", "find", "missing"]

SONAME = "libucc.so.1"


def find() -> str | None:
    """Return the path of the library, or what the loader knows it by; None if there is none."""
    home = os.environ.get("UCC_HOME")
    folders = [Path(home) / "lib", Path(home) / "lib64"] if home else []
    return find_library([SONAME], folders + loader_folders() + python_folders(), "ucc")


def missing() -> str | None:
    """Return None when a libucc is here, else what to do, in words."""
    if find():
        return None
    return (
        f"UCC's library {SONAME} was not found, and PyPI has none: load the cluster's module or install the package of your system, or build "
        "UCC and set UCC_HOME to its folder"
    )
