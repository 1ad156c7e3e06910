"""One small reader per launcher, and the order in which they are asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from oneaccord.common.variables import Variable
from oneaccord.errors import ConfigError
from oneaccord.launchers.hosts import expand_hostlist, hosts_of_lsf, tasks_of_node
from oneaccord.launchers.variables import Variables, derived_ports

__all__ = ["LAUNCHERS", "NOT_UNDERSTOOD", "STARTERS", "LaunchEnvironment", "Reader", "Starter", "is_shell_of_slurm"]


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The facts about this process that a launcher gives."""

    launcher: str
    """The launcher: ``"oneaccord"``, ``"torchrun"``, ``"slurm"``, ..."""
    rank: int
    world_size: int
    local_rank: int
    """The rank among those of this host, counted from 0; 0 when the launcher does not say."""
    local_world_size: int | None
    """The number of ranks on this host; None when the launcher does not say."""
    host: str | None
    """The host of the meeting point: a name or an address, without brackets."""
    port: int | None
    job: str
    """The launcher's name for this run: its job, and the step and the attempt within it. Alike on all ranks; empty when it has none.

    No two runs that exist at once share it, as far as the launcher distinguishes them. The store refuses a rank with another name.
    """
    ports: tuple[int, ...] = ()
    """Further ports at which the ranks may meet, in this order, if other programs have those before; alike on all ranks."""
    hosts: tuple[str, ...] = ()
    """Further hosts where rank 0 may be, if the launcher does not say on which of them it is; empty on rank 0."""

    @property
    def others(self) -> list[tuple[str, int]]:
        """Further places where the ranks may meet, in this order: each host with each port."""
        if self.host is None or self.port is None:
            return []
        hosts = (self.host, *self.hosts)
        return [(host, port) for port in (self.port, *self.ports) for host in hosts][1:]


Reader = Callable[[Variables], LaunchEnvironment | None]
"""Returns None when the launcher did not start this process; a missing ``host`` or ``port`` is filled in afterwards."""


def _variables_of_torchrun(found: Variables) -> LaunchEnvironment | None:
    """``oneaccord run``, torchrun, and other launchers that set ``RANK`` and ``WORLD_SIZE`` as they do."""
    if found.text("RANK") is None:
        return None
    rank, size = found.identity("RANK", "WORLD_SIZE")
    local_size = found.integer("LOCAL_WORLD_SIZE")
    host, port = found.text("MASTER_ADDR"), found.port("MASTER_PORT")
    ours = found.text(Variable.LAUNCHED) is not None
    if ours:
        # MASTER_PORT is free there, for other libraries; a simulated world has no address of its own.
        host, port = found.address(Variable.LAUNCHED) or (host, port)
    elif port is not None and found.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's own store listens there as long as the job runs, so that no other job of torchrun has that address meanwhile.
        run = f"{found.text('TORCHELASTIC_RUN_ID') or ''} at {host}:{port}"
        return LaunchEnvironment(
            launcher="torchrun",
            rank=rank,
            world_size=size,
            local_rank=found.integer("LOCAL_RANK") or 0,
            local_world_size=local_size,
            host=host,
            port=None,
            job=run,  # its count of restarts may differ from host to host
            ports=derived_ports(f"torchrun {run}", taken=port),
        )
    # `oneaccord run` on several hosts makes its name of the address, as each host was given it: the words may differ.
    name = found.text("TORCHELASTIC_RUN_ID") or ""
    return LaunchEnvironment(
        launcher="oneaccord" if ours else "torchrun",
        rank=rank,
        world_size=size,
        local_rank=found.integer("LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=host,
        port=port,
        job="" if ours and local_size != size else name,
    )


def _name(found: Variables, job: str, *, is_one_host: bool) -> str:
    """Return the launcher's name of the job, or a name of the process that started all its ranks; nothing if there is neither."""
    return job or (found.starter_name() if is_one_host else "")


def _ports(launcher: str, job: str) -> tuple[int, ...]:
    return derived_ports(f"{launcher} {job}") if job else ()


def _lsf(found: Variables) -> LaunchEnvironment | None:
    """LSF's ``jsrun``; it sets Open MPI's variables as well, so that it is asked before."""
    if found.text("JSM_NAMESPACE_RANK") is None:
        return None
    rank, size = found.identity("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
    # The jobs of an array have one number, and so have the steps of a job, which jsrun gives namespaces.
    job = found.joined("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE")
    hosts = hosts_of_lsf(found.text("LSB_MCPU_HOSTS") or "")
    local_size = found.integer("JSM_NAMESPACE_LOCAL_SIZE")
    job = _name(found, job, is_one_host=local_size == size)
    return LaunchEnvironment(
        launcher="lsf",
        rank=rank,
        world_size=size,
        local_rank=found.integer("JSM_NAMESPACE_LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=hosts[0] if hosts and local_size != size else None,
        port=None,
        job=job,
        ports=_ports("lsf", job),
    )


_TCP4 = re.compile(r"tcp4?://(?P<host>[^,:;]+)")
_TCP6 = re.compile(r"tcp6://\[(?P<host>[^,\]]+)")
_PRTE = re.compile(r"prte(?:run)?-(?P<host>.+)-\d+(?:@\d+)?(?:\.\d+)?\Z")


def _open_mpi(found: Variables) -> LaunchEnvironment | None:
    """Open MPI 4 and 5; ranks of several hosts meet on the host of ``mpirun``, where rank 0 runs unless it is mapped to another."""
    if found.text("OMPI_COMM_WORLD_RANK") is None:
        return None
    rank, size = found.identity("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    head = found.text("OMPI_MCA_orte_hnp_uri") or ""
    server = _server_of_pmix(found)
    job = found.text("PMIX_NAMESPACE") or re.split("[;.]", head)[0] or re.split("[;@]", server)[0]
    local_size = found.integer("OMPI_COMM_WORLD_LOCAL_SIZE")
    host = _host_of_mpirun(head, server, job)
    # Version 4 makes the numbers of its jobs of 16 bits, which two may share; the address of mpirun is its alone.
    job = f"{job} of {head.partition(';')[2]}" if job and ";" in head else job
    job = _name(found, job, is_one_host=local_size == size)
    return LaunchEnvironment(
        launcher="openmpi",
        rank=rank,
        world_size=size,
        local_rank=found.integer("OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=host if local_size != size else None,
        port=None,
        job=job,
        ports=_ports("openmpi", job),
    )


def _server_of_pmix(found: Variables) -> str:
    server = found.text("PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3", "PMIX_SERVER_URI2")
    return server or found.starting_with("PMIX_SERVER_URI") or ""


def _host_of_mpirun(head: str, server: str, job: str) -> str | None:
    """Find the host of ``mpirun``, alike on all ranks.

    In version 5 the server is each host's own daemon, reached by loopback on all hosts but the first; its name, and the job's,
    hold the first host's: ``prterun-node001-12345@0.1;tcp4://127.0.0.1:40000``.
    """
    address = _TCP4.search(head) or _TCP6.search(head)
    if address is not None:
        return address["host"]
    named = _PRTE.match(job) or _PRTE.match(server.partition(";")[0])
    return named["host"] if named is not None else None


def _mvapich(found: Variables) -> LaunchEnvironment | None:
    """MVAPICH's ``mpirun_rsh``."""
    if found.text("MV2_COMM_WORLD_RANK") is None:
        return None
    rank, size = found.identity("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    local_size = found.integer("MV2_COMM_WORLD_LOCAL_SIZE")
    job = _name(found, "", is_one_host=local_size == size)
    return LaunchEnvironment(
        launcher="mvapich",
        rank=rank,
        world_size=size,
        local_rank=found.integer("MV2_COMM_WORLD_LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=None,
        port=None,
        job=job,
        ports=_ports("mvapich", job),
    )


def _cray_pals(found: Variables) -> LaunchEnvironment | None:
    """Cray's PALS (``mpiexec``, ``aprun``); the size comes from its PMI."""
    if found.text("PALS_RANKID") is None:
        return None
    rank, size = found.identity("PALS_RANKID", "PMI_SIZE", "PALS_NRANKS")
    local_size = found.integer("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    job = _name(found, found.text("PALS_APID") or "", is_one_host=local_size == size)
    return LaunchEnvironment(
        launcher="pals",
        rank=rank,
        world_size=size,
        local_rank=found.integer("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=None,
        port=None,
        job=job,
        ports=_ports("pals", job),
    )


def _hydra(found: Variables) -> LaunchEnvironment | None:
    """Hydra, the ``mpiexec`` of MPICH and Intel MPI: the one that sets ``MPI_LOCALRANKID``."""
    if found.text("MPI_LOCALRANKID") is None or found.text("PMI_RANK") is None:
        return None
    return _pmi(found)


def _flux(found: Variables) -> LaunchEnvironment | None:
    """Flux."""
    if found.text("FLUX_TASK_RANK") is None:
        return None
    rank, size = found.identity("FLUX_TASK_RANK", "FLUX_JOB_SIZE")
    is_one_host = found.integer("FLUX_JOB_NNODES") == 1
    job = _name(found, found.text("FLUX_JOB_ID") or "", is_one_host=is_one_host)
    return LaunchEnvironment(
        launcher="flux",
        rank=rank,
        world_size=size,
        local_rank=found.integer("FLUX_TASK_LOCAL_ID") or 0,
        local_world_size=size if is_one_host else None,
        host=None,
        port=None,
        job=job,
        ports=_ports("flux", job),
    )


def is_shell_of_slurm(found: Variables) -> bool:
    """Return whether this process was started from the shell of an interactive job.

    Such a shell is a step of Slurm too, recognised by its name. A process that ``srun`` starts from it has the same name, and is the real task.
    """
    return found.text("SLURM_JOB_NAME") in {"bash", "interactive"} and found.text("SLURM_TASK_PID") != str(found.process)


def _slurm(found: Variables) -> LaunchEnvironment | None:
    """Slurm: a task of ``srun``.

    The batch script itself also has a ``SLURM_PROCID``; a task alone has the variables of a step.
    """
    if found.text("SLURM_PROCID") is None or is_shell_of_slurm(found):
        return None
    if found.text("SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS") is None:
        return None
    rank, size = found.identity("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # Steps of one job run side by side, and a job that was requeued has its old number.
    job = found.joined("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    tasks = found.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if found.integer("SLURM_STEP_NUM_NODES") == 1:
        local_size: int | None = size
    else:
        local_size = tasks_of_node(tasks or "", found.integer("SLURM_NODEID") or 0)
    cluster = found.text("SLURM_CLUSTER_NAME")
    job = f"{cluster}:{job}" if cluster and job else _name(found, job, is_one_host=local_size == size)
    hosts = [] if local_size == size else _hosts_of_slurm(found, rank)
    return LaunchEnvironment(
        launcher="slurm",
        rank=rank,
        world_size=size,
        local_rank=found.integer("SLURM_LOCALID") or 0,
        local_world_size=local_size,
        host=hosts[0] if hosts else None,
        port=None,
        job=job,
        ports=_ports("slurm", job),
        hosts=tuple(hosts[1:]),
    )


def _hosts_of_slurm(found: Variables, rank: int) -> list[str]:
    """Return the hosts where task 0 may be; none if Slurm does not say.

    That is the first of the step, unless a file orders the tasks (``-m arbitrary``). Then it may be any of them, and a task knows those of its own host.
    """
    hosts = found.text("SLURM_STEP_NODELIST", "SLURM_NODELIST")
    if hosts is None:
        return []
    if not (found.text("SLURM_DISTRIBUTION") or "").startswith("arbitrary"):
        return [next(expand_hostlist(hosts))]
    own = found.text("SLURMD_NODENAME")
    if own and (rank == 0 or "0" in (found.text("SLURM_GTIDS") or "").split(",")):
        return [own]
    return [*expand_hostlist(hosts)]


def _pmi(found: Variables) -> LaunchEnvironment | None:
    """Any other process manager that speaks PMI-1. Asked after Slurm and Flux, which speak it too."""
    if found.text("PMI_RANK") is None:
        return None
    rank, size = found.identity("PMI_RANK", "PMI_SIZE")
    local_size = found.integer("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    # Most such managers tell the name only to their own library. All ranks of one host are children of one proxy, which serves there.
    job = _name(found, found.text("PMI_JOBID") or "", is_one_host=local_size == size)
    return LaunchEnvironment(
        launcher="mpich",
        rank=rank,
        world_size=size,
        local_rank=found.integer("MPI_LOCALRANKID", "PMI_LOCAL_RANK") or 0,
        local_world_size=local_size,
        host=None,
        port=None,
        job=job,
        ports=_ports("mpich", job),
    )


def _pmix(found: Variables) -> LaunchEnvironment | None:
    """A launcher that only uses PMIx, such as PRRTE's ``prterun``: it sets the rank, and only its server knows the world size."""
    rank = found.text("PMIX_RANK")
    if rank is None or is_shell_of_slurm(found):
        return None
    job = found.text("PMIX_NAMESPACE") or ""
    if found.text(Variable.WORLD_SIZE) is None:
        raise ConfigError(
            f"PMIX_RANK={rank} is set, by a launcher that uses only PMIx{f' (job {job})' if job else ''}, and no variable gives the number "
            "of ranks: set ONEACCORD_WORLD_SIZE to it, as in prterun -n 4 -x ONEACCORD_WORLD_SIZE=4; or start the ranks by mpirun, srun or "
            "oneaccord run; or give init(rank=..., world_size=...); or unset PMIX_RANK to run a world of one",
            file=Variable.WORLD_SIZE,
        )
    number, size = found.identity("PMIX_RANK", Variable.WORLD_SIZE)
    return LaunchEnvironment(
        launcher="pmix",
        rank=number,
        world_size=size,
        local_rank=0,
        local_world_size=None,
        host=_host_of_mpirun("", _server_of_pmix(found), job),
        port=None,
        job=job,
        ports=_ports("pmix", job),
    )


def _leader_worker_set(found: Variables) -> LaunchEnvironment | None:
    """LeaderWorkerSet of Kubernetes: one rank per pod, and the leader is rank 0."""
    if found.text("LWS_WORKER_INDEX") is None:
        return None
    rank, size = found.identity("LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
    return LaunchEnvironment(
        launcher="leaderworkerset",
        rank=rank,
        world_size=size,
        local_rank=0,
        local_world_size=1,
        host=found.text("LWS_LEADER_ADDRESS"),
        port=found.port("MASTER_PORT"),
        job=found.text("LWS_NAME") or "",
    )


def _kubernetes(found: Variables) -> LaunchEnvironment | None:
    """Kubernetes, an indexed Job: one rank per pod. The size and the address come from the manifest."""
    if found.text("JOB_COMPLETION_INDEX") is None or found.text("KUBERNETES_SERVICE_HOST") is None:
        return None
    rank, size = found.identity("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    # The pod's name is that of the job and the index, unless the manifest names it otherwise; a user who numbers the ranks may unite several jobs.
    pod, end = found.text("HOSTNAME") or "", f"-{found.text('JOB_COMPLETION_INDEX')}"
    job = pod.removesuffix(end) if pod.endswith(end) and found.text(Variable.RANK) is None else ""
    return LaunchEnvironment(
        launcher="kubernetes", rank=rank, world_size=size, local_rank=0, local_world_size=1, host=None, port=None, job=job
    )


def _by_hand(found: Variables) -> LaunchEnvironment | None:
    """No launcher: the user sets ``ONEACCORD_RANK`` and ``ONEACCORD_WORLD_SIZE``; half of a set is refused here."""
    if found.text(Variable.RANK, Variable.WORLD_SIZE) is not None:
        rank, size = found.identity(Variable.RANK, Variable.WORLD_SIZE)
    elif found.text("WORLD_SIZE") is not None:
        rank, size = found.identity("RANK", "WORLD_SIZE")
    else:
        return None
    return LaunchEnvironment(
        launcher="by hand", rank=rank, world_size=size, local_rank=0, local_world_size=None, host=None, port=None, job=""
    )


LAUNCHERS: tuple[Reader, ...] = (
    # The nearest launcher decides: one that a user starts inside an allocation (torchrun, mpirun) hides the scheduler around it.
    _variables_of_torchrun,
    _lsf,
    _open_mpi,
    _mvapich,
    _cray_pals,
    _hydra,
    _flux,
    _slurm,
    _pmi,
    _pmix,
    _leader_worker_set,
    _kubernetes,
    _by_hand,
)
"""The readers, in this order; the first that recognises its variables wins."""


class Starter(NamedTuple):
    """A launcher that starts each rank itself, by which the variables of another one can be found to be left over."""

    name: str
    """Its name in messages."""
    read: Reader
    rank: str
    """The variable with the rank."""
    size: str
    """The variable with the number of ranks."""


STARTERS: tuple[Starter, ...] = (
    Starter("jsrun", _lsf, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    Starter("Open MPI's mpirun", _open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Starter("MVAPICH's mpirun", _mvapich, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    Starter("PALS", _cray_pals, "PALS_RANKID", "PMI_SIZE"),
    Starter("MPICH's mpiexec", _hydra, "PMI_RANK", "PMI_SIZE"),
    Starter("Flux", _flux, "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Starter("srun", _slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Starter("PMI", _pmi, "PMI_RANK", "PMI_SIZE"),
)
"""The launchers whose variables no agent within them sets for its own ranks."""

NOT_UNDERSTOOD: tuple[str, ...] = (
    # If no reader above recognises them, these are left over from one of its launchers, or come from one that has no reader.
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK"),
    *(
        "PMIX_NAMESPACE",
        "PMI_SIZE",
        "PMI_ID",
        "PMI_LOCAL_RANK",
        "PMI_LOCAL_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "MPI_RANKID",
    ),
    *(
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MPIRUN_RANK",
        "MP_CHILD",
        "ALPS_APP_PE",
    ),
    *("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NRANKS", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    *("JSM_NAMESPACE_LOCAL_SIZE", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "HOROVOD_RANK", "HOROVOD_SIZE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "JOB_COMPLETION_INDEX", "LWS_GROUP_SIZE", Variable.LAUNCHED),
)
"""Variables that say that a process is one of several, and not completely which; they come from launchers alone."""
