"""The options of the launchers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["PbsConfig", "SlurmConfig"]


class _Config(BackendConfig):
    python: str | None = Field(
        default=None,
        description="The Python of the hosts; by default the path of this one, which a shared file system has there too.",
    )
    folder: str | None = Field(default=None, description="The working directory on the hosts; by default the one here.")


class SlurmConfig(_Config):
    """The options of the launcher ``slurm``. All but ``srun_args``, ``python`` and ``folder`` are for an allocation that it makes."""

    partition: str | None = Field(default=None, description="The partition of an allocation that the launcher makes.")
    account: str | None = Field(default=None, description="The account that pays for it.")
    time: str | None = Field(
        default=None, description='Its time limit, in the words of Slurm, such as "30" for minutes or "2:00:00".'
    )
    args: tuple[str, ...] = Field(default=(), description='Further words for salloc or sbatch, such as "--constraint=avx512".')
    submit: Literal["salloc", "sbatch"] = Field(
        default="salloc", description="The command that makes it. Some clusters refuse salloc."
    )
    srun_args: tuple[str, ...] = Field(default=(), description='Further words for the srun of each host, such as "--mem=0".')


class PbsConfig(_Config):
    """The options of the launcher ``pbs``."""

    remote: tuple[str, ...] = Field(
        default=("pbs_tmrsh",),
        min_length=1,
        description="The command that runs a program on a host of the job, to be followed by the host and the program; it must pass standard input on.",
    )
    gpus_per_host: int = Field(default=0, ge=0, description="The GPUs of each host: PBS does not say how many.")
