"""The description of the shm backend: light, so that listing backends costs nothing."""

from __future__ import annotations

import os
import sys

from pydantic import Field

from manyhands.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["ShmConfig", "manyhands_register_backends"]


class ShmConfig(BackendConfig):
    """The table ``[backends.shm]``."""

    segment_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        le=1 << 40,
        description=(
            "The most memory, in bytes, through which one rank's messages pass on one channel; each group has two. "
            "Many ranks share it in smaller parts, and what no message has touched takes none."
        ),
    )
    heap_bytes: int | None = Field(
        default=None,
        ge=1 << 16,
        le=1 << 46,
        description=(
            "The most memory, in bytes, that one rank may have in arrays that its peers read in place; "
            "by default half of the memory of the host, or less if addresses are limited (ulimit -v). What is not in use takes none."
        ),
    )
    single_copy: bool = Field(
        default=True,
        description=(
            "Whether long messages are read where they lie in the sender's process, where the system allows that "
            "(process_vm_readv), rather than through slots. All ranks of a pair must allow it."
        ),
    )
    spin_us: int = Field(
        default=150,
        ge=0,
        le=10_000,
        description=(
            "For how many microseconds a rank that waits looks again and again, giving way to whoever needs the processor, "
            "before it sleeps; 0 sleeps at once."
        ),
    )


def _probe() -> str | None:
    """Return why ranks of this host cannot share memory, None where they can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if sys.maxsize < 1 << 32:
        return "it needs a 64-bit Python: a sequence number must be written at once"
    if not os.path.exists("/proc/self/fd"):  # noqa: PTH110 - pathlib is one more import
        return "/proc is not mounted, by which ranks open each other's memory"
    if not hasattr(os, "memfd_create") and not os.access("/dev/shm", os.W_OK):  # noqa: S108 - no name is made there
        return "this system has no memfd_create, and /dev/shm cannot be written"
    return None


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="shm",
        summary="shared memory, between processes on one host",
        factory="manyhands_shm.backend:ShmBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config=ShmConfig,
        probe=_probe,
        install="pip install 'manyhands[shm]'",
        selection="manyhands_shm:selection.toml",
        auto_priority=80,
        one_host=True,
    )
