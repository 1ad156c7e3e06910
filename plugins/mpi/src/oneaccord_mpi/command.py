"""From what ``oneaccord run`` was asked for to the mpiexec command that does it, for each family of mpiexec."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oneaccord.api import OF_ONE_RANK, BackendUnavailableError, LaunchRequest

__all__ = ["FAMILIES", "Family", "family_of", "is_root", "rank_command", "spans_hosts", "variables"]

_OUTER = frozenset(
    {
        # Another launcher's word on ranks; it would win over, or contradict, what mpiexec sets.
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        "TORCHELASTIC_RUN_ID",
        *OF_ONE_RANK,
    }
)
_NAMING_HOSTS = frozenset(
    {"f", "H", "host", "hosts", "hostfile", "machine", "machinefile", "default-hostfile", "ppn", "npernode"}
)
_ASKED_S = 20.0

_RANK = "${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}"
# A shell around each rank gives it files of its own: where its output goes, where its error, and how it ended, since mpiexec tells
# of one rank only. On another host the folder is not there, and mpiexec alone carries the output. MPICH's mpiexec tells the others
# by SIGUSR1 that a rank has gone; MPI takes that, and a shell dies of it unless it has a trap.
_SHELL = f"""\
notes=$1
rank={_RANK}
shift
[ -d "$notes" ] || exec "$@"
trap : USR1
export ONEACCORD_ERROR_FILE="$notes/$rank.json"
[ -p "$notes/$rank.out" ] && exec >"$notes/$rank.out" 2>"$notes/$rank.err"
"$@"
code=$?
echo "$code" >"$notes/$rank.exit"
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class Family:
    """What the mpiexec of one family is told.

    Attributes
    ----------
    name
        Its name.
    said
        What its ``--version`` says.
    options
        Always: among others, that the death of a rank does not end the others at once, since each has an error to show.
    as_root
        Variables for mpiexec where the user is root, whom it refuses otherwise.
    passed_by
        The option that passes a variable on to other hosts, where it needs one.
    """

    name: str
    said: re.Pattern[str]
    options: tuple[str, ...] = ()
    as_root: tuple[tuple[str, str], ...] = ()
    passed_by: str = ""


FAMILIES: tuple[Family, ...] = (
    Family(
        "Open MPI",
        re.compile(r"Open MPI|OpenRTE|PRRTE|prte", re.IGNORECASE),
        # Ranks may outnumber cores, as with every backend; they then yield when they wait.
        options=("--oversubscribe", "--continuous", "--mca", "mpi_yield_when_idle", "1"),
        as_root=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
        passed_by="-x",
    ),
    Family(
        "MPICH",
        re.compile(r"HYDRA", re.IGNORECASE),
        options=("-disable-auto-cleanup",),
    ),
    Family("unknown", re.compile("")),
)


def family_of(command: Sequence[str]) -> Family:
    """Return the family of an mpiexec, which is asked for its version.

    Raises
    ------
    BackendUnavailableError
        It cannot be run.
    """
    try:
        answer = subprocess.run([command[0], "--version"], check=False, capture_output=True, text=True, timeout=_ASKED_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailableError(
            f"{command[0]!r} cannot be run: {error}; give the right command as mpiexec = [...] in [backends.mpi]"
        ) from error
    return next(family for family in FAMILIES if family.said.search(answer.stdout + answer.stderr))


def spans_hosts(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether mpiexec may start ranks on other hosts: its options or the scheduler's allocation name some."""
    if any(word.startswith("-") and word.lstrip("-") in _NAMING_HOSTS for word in command):
        return True
    return environ.get("SLURM_JOB_NUM_NODES", "1") != "1" or any(name in environ for name in ("PBS_NODEFILE", "LSB_HOSTS"))


def variables(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of mpiexec and its ranks: that of this process without an outer launcher's words, and what is given."""
    return {name: value for name, value in environ.items() if name not in _OUTER} | dict(given)


def rank_command(request: LaunchRequest, notes: str) -> list[str]:
    """Return the command of one rank, which leaves word in the folder ``notes``."""
    program = [sys.executable, "-u", *(["-m"] if request.is_module else []), request.target, *request.args]
    return ["/bin/sh", "-c", _SHELL, "oneaccord-rank", notes, *program]


def is_root() -> bool:
    """Return whether this process is root's."""
    return hasattr(os, "geteuid") and os.geteuid() == 0
