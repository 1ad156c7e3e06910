"""The launcher of PBS: the hosts of the job in which this process runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from oneaccord.api import Ask, ConfigError, Deadline, Host
from oneaccord_slurm.config import PbsConfig
from oneaccord_slurm.hosts import checked, make_hosts

__all__ = ["PbsLauncher"]


class PbsLauncher:
    """Runs programs on the hosts of a job of PBS, which ``qsub`` has started.

    Parameters
    ----------
    config
        Its options.
    """

    def __init__(self, config: PbsConfig) -> None:
        self._config = config

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        """Return the hosts of the job: each has as many slots as lines in the file of hosts.

        Raises
        ------
        ConfigError
            This process runs in no job, or the file of hosts cannot be read.
        UsageError
            The job has too little room.
        """
        name = os.environ.get("PBS_NODEFILE", "")
        try:
            lines = Path(name).read_text(encoding="utf-8").split() if name else []
        except OSError as error:
            raise ConfigError(
                f"PBS_NODEFILE={name} cannot be read ({error}): run this within a job of PBS", file="PBS_NODEFILE", value=name
            ) from error
        if not lines:
            raise ConfigError(
                "PBS_NODEFILE names no hosts, so this process runs in no job of PBS: start it within one, as in "
                "qsub -I -l select=2:ncpus=4:mpiprocs=4, or from a script for qsub",
                file="PBS_NODEFILE",
                value=name or None,
            )
        config = self._config
        hosts = make_hosts(Counter(lines), {}, config.gpus_per_host, config.python, config.folder)
        job = os.environ.get("PBS_JOBID", "of PBS")
        return checked(hosts, ask, f"the job {job}", "Ask qsub for more, such as -l select=2:ncpus=4:mpiprocs=4")

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        """Return the local command whose process runs ``argv`` on a host."""
        return [*self._config.remote, host.name, *argv]

    def release(self) -> None:
        """Do nothing: the job is the user's."""
