"""The descriptions of the launchers: light, so that listing them costs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess

from oneaccord.api import LauncherSpec

__all__ = ["register_launchers"]

_PING_S = 5.0


def _probe_slurm() -> str | None:
    if shutil.which("srun") is None:
        return "there is no srun on the PATH: run this on a host of a cluster of Slurm, or load its module"
    try:
        answer = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=_PING_S, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unanswered(str(error))
    return None if answer.returncode == 0 else _unanswered((answer.stdout + answer.stderr).strip())


def _unanswered(words: str) -> str:
    return f"Slurm's controller does not answer ({words}): is slurmctld up, and does SLURM_CONF, if it is set, name the cluster's file?"


def _probe_pbs() -> str | None:
    if not os.environ.get("PBS_NODEFILE"):
        return "PBS_NODEFILE is not set, so this process runs in no job of PBS: start it within one, by qsub"
    return None


def register_launchers() -> list[LauncherSpec]:
    """Describe the launchers."""
    return [
        LauncherSpec(
            name="slurm",
            summary="the hosts of an allocation of Slurm, or of one that it makes",
            kind="hosts",
            factory="oneaccord_slurm.slurm:SlurmLauncher",
            config="oneaccord_slurm.config:SlurmConfig",
            probe=_probe_slurm,
            install="",
        ),
        LauncherSpec(
            name="pbs",
            summary="the hosts of a job of PBS; not confirmed on a cluster",
            kind="hosts",
            factory="oneaccord_slurm.pbs:PbsLauncher",
            config="oneaccord_slurm.config:PbsConfig",
            probe=_probe_pbs,
            install="",
        ),
    ]
