"""The description of the nccl backend: light, so that listing backends imports neither CuPy nor NCCL."""

from __future__ import annotations

import atexit
import ctypes
import sys
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from oneaccord.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["INSTALL", "NcclConfig", "is_missing", "oneaccord_register_backends", "probe"]

INSTALL = "pip install 'oneaccord[nccl]', or 'oneaccord[nccl-cuda13]' for CUDA 13"
"""What brings CuPy, nccl4py and NCCL."""

_DRIVER = "libcuda.so.1"


class NcclConfig(BackendConfig):
    """The table ``[backends.nccl]``."""

    device: int | None = Field(
        default=None,
        ge=0,
        description=(
            "The number of this rank's GPU, among those that the process sees; by default the rank's number among the ranks of its host."
        ),
    )
    max_ctas: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=(
            "The most blocks of threads that a kernel of NCCL may take of a GPU, alike on all ranks; by default NCCL's own choice, and 4 "
            "where several ranks share a GPU."
        ),
    )
    accumulate: Literal["dtype", "float32"] = Field(
        default="dtype",
        description=(
            "In which dtype sums and means of float16, bfloat16 and float8 are computed, alike on all ranks: that of the arrays, or float32, which "
            "takes more time and memory."
        ),
    )


def is_missing(package: str) -> bool:
    """Return whether a package is not installed, without importing it."""
    try:
        return find_spec(package) is None
    except (ImportError, ValueError):  # a package that was put into sys.modules by hand has no spec
        return package not in sys.modules


def probe() -> str | None:
    """Return why GPUs cannot be reached from here, None if nothing speaks against it."""
    if not sys.platform.startswith("linux"):
        return f"NCCL needs Linux, and this is {sys.platform}"
    for package, role in (("cupy", "CuPy"), ("nccl", "nccl4py, NVIDIA's binding of NCCL,")):
        if is_missing(package):
            return f"{role} is not installed"
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return f"there is no driver of NVIDIA's on this host: {_DRIVER} cannot be loaded"
    return None


def _finish() -> None:
    """Let NCCL end as the interpreter ends, if this process has used it."""
    seam = sys.modules.get("oneaccord_nccl.communicator")
    if seam is not None:
        seam.wait_for_ends()


# Here, and not where NCCL is loaded: handlers run in reverse order, and this one must come after that of the job, which is registered
# between the two.
atexit.register(_finish)


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="nccl",
        summary="NVIDIA's NCCL, between GPUs",
        factory="oneaccord_nccl.backend:create",
        api_version=1,
        config=NcclConfig,
        devices=("cuda",),
        capabilities=frozenset(),
        probe=probe,
        install=INSTALL,
        diagnose="oneaccord_nccl.diagnosis:diagnose",
    )
