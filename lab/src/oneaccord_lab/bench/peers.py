"""The libraries that oneaccord is compared with: their own fastest settings, and which versions run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["AT_THEIR_BEST", "best_settings", "peer_versions"]

Setting = str | int | float | bool

AT_THEIR_BEST: Final[dict[str, dict[str, Setting]]] = {
    "gloo": {"check": False},
    "mpi": {"check": False, "native": "blocking"},
}
"""For backends of foreign libraries, the settings of `[backends.NAME]` that make them as fast as without oneaccord."""

_VERSIONS: Final[dict[str, Callable[[Any], str]]] = {
    "torch": lambda torch: f"torch {torch.__version__}",
    "mpi4py.MPI": lambda mpi: str(mpi.Get_library_version()).split("\n", 1)[0].split(",", 1)[0].strip(),
    "mpi4py": lambda mpi4py: f"mpi4py {mpi4py.__version__}",
    "cupy": lambda cupy: f"cupy {cupy.__version__}",
}
"""For a module, the name of its version."""


def best_settings(backend: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a backend: its fastest settings, overridden by the user's configuration."""
    return {**AT_THEIR_BEST.get(backend, {}), **configured}


def peer_versions() -> list[str]:
    """Return the versions of the libraries that backends have loaded; nothing is imported."""
    return [tell(sys.modules[name]) for name, tell in _VERSIONS.items() if name in sys.modules]
