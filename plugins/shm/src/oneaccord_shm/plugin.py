"""The description of the shm backend: light, so that listing backends costs nothing."""

from __future__ import annotations

import os
import sys

from pydantic import Field

from oneaccord.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["ShmConfig", "oneaccord_register_backends"]


class ShmConfig(BackendConfig):
    """The table ``[backends.shm]``."""

    segment_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        le=1 << 40,
        description=(
            "The most memory, in bytes, for one rank's messages on one channel; each group has two channels. "
            "Many ranks share it in smaller parts, and an unused part takes no memory."
        ),
    )
    heap_bytes: int | None = Field(
        default=None,
        ge=1 << 16,
        le=1 << 46,
        description=(
            "The most memory, in bytes, that one rank may have in arrays that its peers read in place; "
            "by default half of the memory of the host, or less if addresses are limited (ulimit -v). An unused part takes no memory."
        ),
    )
    single_copy: bool = Field(
        default=True,
        description=(
            "Whether long messages are read in place, in the sender's process, if the system allows that "
            "(process_vm_readv), rather than through slots. All ranks of a pair must allow it."
        ),
    )
    single_copy_bytes: int | None = Field(
        default=None,
        ge=1 << 12,
        le=1 << 40,
        description=(
            "Messages of more bytes are copied once, unless they are to be reduced and fit into a slot; shorter ones pass through slots. "
            "By default 64 KiB, or 16 MiB where a measurement at the start finds the copy by the system slow. The largest value of all ranks counts."
        ),
    )
    spin_us: int = Field(
        default=150,
        ge=0,
        le=10_000,
        description=(
            "The microseconds that a waiting rank looks again and again, giving way to others that need the processor, "
            "before it sleeps; 0 sleeps at once."
        ),
    )


def _probe() -> str | None:
    """Return why ranks of this host cannot share memory, None if they can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, but this is {sys.platform}"
    if sys.maxsize < 1 << 32:
        return "it needs a 64-bit Python, which writes a sequence number in one step"
    if not os.path.exists("/proc/self/fd"):  # noqa: PTH110 - pathlib is one more import
        return "/proc is not mounted, which ranks need to open each other's memory"
    if not hasattr(os, "memfd_create") and not os.access("/dev/shm", os.W_OK):  # noqa: S108 - no name is made there
        return "this system has no memfd_create, and /dev/shm cannot be written"
    return None


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="shm",
        summary="shared memory, between processes on one host",
        factory="oneaccord_shm.backend:ShmBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config=ShmConfig,
        probe=_probe,
        install="pip install 'oneaccord[shm]'",
        selection="oneaccord_shm:selection.toml",
        auto_priority=80,
        one_host=True,
    )
