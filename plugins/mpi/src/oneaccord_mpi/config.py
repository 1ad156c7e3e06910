"""What can be set of the mpi backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["MpiConfig"]


class MpiConfig(BackendConfig):
    """The table ``[backends.mpi]``."""

    native: Literal["polled", "blocking", "off"] = Field(
        default="polled",
        description='How MPI performs collectives: "polled" starts and tests them, so that every error is typed; "blocking" waits '
        'inside MPI, and a call that gets stuck there ends the world; "off" leaves them to oneaccord.',
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
        description="The command by which `oneaccord run` starts the ranks, and more options for it; by default the mpiexec beside this "
        "Python, else the one on the PATH.",
    )
