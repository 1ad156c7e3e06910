"""The rank of this process and the size of its world: read from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace

from oneaccord.common.variables import Variable
from oneaccord.errors import ConfigError, RendezvousError
from oneaccord.launchers.readers import (
    LAUNCHERS,
    NOT_UNDERSTOOD,
    STARTERS,
    LaunchEnvironment,
    Reader,
    is_shell_of_slurm,
)
from oneaccord.launchers.variables import Variables, parse_address

__all__ = [
    "DEFAULT_PORT",
    "LaunchEnvironment",
    "claim",
    "discover",
    "is_of_another",
    "meeting_place",
    "parse_address",
    "why_not_alone",
]

DEFAULT_PORT: int = 29500
"""The port of the rendezvous if only a host is named, by the convention of torchrun."""


def claim(environ: MutableMapping[str, str], rank: int, world_size: int, address: tuple[str, int] | None) -> Callable[[], None]:
    """Note that this process is a rank; return a function that removes the note when the rank leaves its job, so that a child may take its place.

    Parameters
    ----------
    environ
        The variables, which processes inherit that this one starts.
    rank, world_size, address
        The rank, the world size and the meeting point; None if a world of one has none.

    Raises
    ------
    RendezvousError
        The process is a child of that very rank, whose variables it has inherited.
    """
    who = f"{rank}/{world_size}@{address}"
    owner, _, joined = environ.get(Variable.JOINED, "").partition(" ")
    if world_size > 1 and is_of_another(environ) and joined == who:
        raise RendezvousError(
            f"this process ({os.getpid()}) was started by rank {rank} of {world_size}, process {owner}, and inherited its variables, but only one "
            "process can be a rank. Use the group in that process, and pass its children their data by arguments, pipes or files. For a separate world, "
            "call init(rank=0, world_size=1) here, or start it by oneaccord run. If multiprocessing has imported the program again, put the call of "
            'init() below: if __name__ == "__main__":',
            rank=rank,
        )
    before = environ.get(Variable.JOINED)
    environ[Variable.JOINED] = note = f"{os.getpid()} {who}"

    def release() -> None:
        if environ.get(Variable.JOINED) != note:
            return
        if before is None:
            del environ[Variable.JOINED]
        else:  # the note of the rank that has started this process
            environ[Variable.JOINED] = before

    return release


def is_of_another(environ: Mapping[str, str]) -> bool:
    """Return whether the variables belong to a rank that is another process, which has started this one."""
    owner = environ.get(Variable.JOINED, "").partition(" ")[0]
    return bool(owner) and owner != str(os.getpid())


def discover(
    environ: Mapping[str, str], *, configured: str | None = None, parent: int | None = None, process: int | None = None
) -> LaunchEnvironment | None:
    """Find the rank of this process and the meeting point of its job from the environment.

    The first launcher in `oneaccord.launchers.readers.LAUNCHERS` that recognises its variables decides.
    ``ONEACCORD_RANK``, ``ONEACCORD_WORLD_SIZE`` and ``ONEACCORD_RENDEZVOUS=host:port`` override every launcher, and
    ``MASTER_ADDR`` with ``MASTER_PORT`` give the address if the launcher gives none.

    Parameters
    ----------
    environ
        The variables, usually ``os.environ``.
    configured
        The address of the configuration, ``host:port``. It wins over the launcher's, except over that of ``oneaccord run``, which has bound it.
    parent, process
        The id of the process that started the ranks of this host, and this one's, by default the real ones: the first distinguishes launchers that give
        a job no name, and the second distinguishes a task of Slurm from a shell's child.

    Returns
    -------
    LaunchEnvironment or None
        None when the process was started by plain ``python``. In a world of one, ``host`` and ``port`` may be None;
        otherwise both are set.

    Raises
    ------
    ConfigError
        A variable has an invalid value, half of a set is missing, or the variables of two launchers contradict each other; the message
        names them and the remedy.
    RendezvousError
        No variable says where the ranks meet; the message names the variable to set.
    """
    variables = Variables(environ, parent, os.getpid() if process is None else process)
    for read in LAUNCHERS:
        found = read(variables)
        if found is not None:
            _refuse_contradiction(variables, read, found)
            return _with_address(variables, found, configured)
    return None


def _refuse_contradiction(variables: Variables, speaker: Reader, found: LaunchEnvironment) -> None:
    """Raise if another launcher has started this process as a rank of another world.

    Launchers may stand in each other: an agent in each task, such as DeepSpeed's launcher or Ray, starts at least as many ranks as there are
    agents, in an order of its own. Fewer ranks, or a rank that a task which Slurm itself started does not have, come from variables that are left over.
    """
    if variables.text(Variable.RANK, Variable.WORLD_SIZE, Variable.LAUNCHED, "TORCHELASTIC_RUN_ID") is not None:
        return  # the user's variables override all launchers; and only oneaccord run or torchrun can have started this process
    is_leaf = variables.text("SLURM_TASK_PID") == str(variables.process)
    own_rank, own_size = next(((each.rank, each.size) for each in STARTERS if each.read is speaker), ("RANK", "WORLD_SIZE"))
    for each in STARTERS:
        try:
            other = None if each.read is speaker else each.read(variables)
        except ConfigError:  # half of that launcher's variables proves nothing
            continue
        if other is None or other.world_size == 1 or (other.rank, other.world_size) == (found.rank, found.world_size):
            continue
        # mpirun starts its daemons by srun, one for each host, however many ranks there are.
        is_nested = own_rank != "RANK" or found.world_size >= other.world_size
        if is_nested and not (is_leaf and other.launcher == "slurm"):
            continue
        raise ConfigError(
            f"the variables of two launchers contradict each other: {own_rank} and {own_size} say rank {found.rank} of {found.world_size}, and {each.name} "
            f"({each.rank}, {each.size}) says rank {other.rank} of {other.world_size}. If {each.name} starts the ranks, unset {own_rank} and "
            f"{own_size}, which are left over; if it does not, unset {each.rank}; or say who each process is by ONEACCORD_RANK and "
            "ONEACCORD_WORLD_SIZE, or by init(rank=..., world_size=...)",
            file=own_rank,
            value=str(found.rank),
        )


def why_not_alone(environ: Mapping[str, str]) -> str | None:
    """Return the evidence against a world of one, if `discover` found no launcher; None if there is none.

    A process that runs alone although it was meant to be one of several gives results that look right.
    """
    variables = Variables(environ, None, os.getpid())
    meant = "If you want a world of one, use init(rank=0, world_size=1) or ONEACCORD_RANK=0 and ONEACCORD_WORLD_SIZE=1."
    tasks = variables.text("SLURM_STEP_NUM_TASKS" if is_shell_of_slurm(variables) else "SLURM_NTASKS") or ""
    if tasks.isdigit() and int(tasks) > 1:
        return (
            f"Slurm has {tasks} tasks here, but this process is not one of them: a batch script or a shell started it, so it is a "
            f"world of one. Start it by srun, mpirun or oneaccord run (in a shell that srun started: with srun --job-name=NAME). {meant}"
        )
    if is_shell_of_slurm(variables):
        return None
    told = [f"{name}={value}" for name in NOT_UNDERSTOOD if (value := variables.text(name)) is not None]
    if told:
        return (
            f"{', '.join(told)}: this process seems to be one of several, but nothing says which one and of how many, so it is "
            "a world of one. Set ONEACCORD_RANK, ONEACCORD_WORLD_SIZE and ONEACCORD_RENDEZVOUS=host:port on each process, or start them by oneaccord "
            f"run. {meant}"
        )
    return None


def meeting_place(environ: Mapping[str, str], configured: str | None, rank: int) -> tuple[str, int]:
    """Return the meeting point of ranks that no launcher has started, as the host and the port.

    Parameters
    ----------
    environ
        The variables: ``ONEACCORD_RENDEZVOUS`` wins, and ``MASTER_ADDR`` comes last.
    configured
        The address of the configuration.
    rank
        This rank, for the error.

    Raises
    ------
    ConfigError
        A variable holds no address.
    RendezvousError
        Nothing names a place.
    """
    variables = Variables(environ, None, os.getpid())
    if named := _named(variables, configured):
        return named
    if host := variables.text("MASTER_ADDR"):
        return host.strip("[]"), variables.port("MASTER_PORT") or DEFAULT_PORT
    raise RendezvousError(
        "nothing says where the ranks meet: start them with `oneaccord run`, or set ONEACCORD_RENDEZVOUS=host:port or rendezvous.address "
        "in the config, alike on all ranks, naming the host of rank 0",
        rank=rank,
    )


def _named(variables: Variables, configured: str | None) -> tuple[str, int] | None:
    """Return the address that the user names."""
    if given := variables.address(Variable.RENDEZVOUS):
        return given
    return parse_address(configured) if configured and variables.text(Variable.LAUNCHED) is None else None


def _with_address(variables: Variables, found: LaunchEnvironment, configured: str | None) -> LaunchEnvironment:
    given = _named(variables, configured)
    if given is not None:
        return replace(found, host=given[0], port=given[1], ports=(), hosts=())
    host, port, ports = found.host, found.port, found.ports
    if host is None and found.local_world_size == found.world_size > 1:
        host = "127.0.0.1"
    elif host is None:
        host = variables.text("MASTER_ADDR")
        port = variables.port("MASTER_PORT") or port or (None if ports else DEFAULT_PORT)
        if host is None and found.world_size == 1:
            return replace(found, port=None, ports=())
    else:
        port = port or (None if ports else DEFAULT_PORT)
    if port is not None:
        ports = ()
    elif ports:
        port, ports = ports[0], ports[1:]
        if variables.text(
            Variable.RANK
        ):  # the user may number parts of a launch, which have one name, and so must not have several places
            ports = ()
    if host is None or port is None:
        unknown = "on which host" if host is None else f"at which port of {host}"
        raise RendezvousError(
            f"{found.launcher} started rank {found.rank} of {found.world_size}, but does not say {unknown} the ranks meet: "
            "set ONEACCORD_RENDEZVOUS=host:port on all ranks (or MASTER_ADDR and MASTER_PORT, or rendezvous.address in the config), with the "
            "host of rank 0 and a free port there",
            rank=found.rank,
        )
    return replace(found, host=host, port=port, ports=ports)
