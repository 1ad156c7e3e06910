"""The machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from oneaccord._version import __version__
from oneaccord.api import processors

__all__ = ["describe"]

_TELLING = ("ONEACCORD_", "OMPI_", "MPIR_", "MPICH_", "I_MPI_", "UCX_", "GLOO_", "OMP_")
"""The beginnings of variables that change how fast a backend is."""
_SECRET = ("SECRET", "TOKEN", "PASSWORD", "KEY")


def describe() -> list[str]:
    """Return lines about the machine, the versions and the settings of its kernel that matter."""
    lines = [f"{processors()} cores of {_processor()}, {platform.system()} {platform.release()}"]
    congestion = _read("/proc/sys/net/ipv4/tcp_congestion_control").strip()
    versions = f"oneaccord {__version__}, Python {platform.python_version()}, NumPy {np.__version__}"
    lines.append(versions)
    if congestion:
        lines.append(f"TCP congestion control of this host: {congestion}")
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_TELLING) and not any(word in name for word in _SECRET)
    ]
    return [*lines, *variables]


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
