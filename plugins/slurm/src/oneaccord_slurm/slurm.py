"""The launcher of Slurm: the hosts of the allocation around this process, or of one that it makes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from oneaccord.api import Ask, ConfigError, Deadline, DeadlineError, Host
from oneaccord_slurm.allocation import Allocation
from oneaccord_slurm.config import SlurmConfig
from oneaccord_slurm.hosts import checked, make_hosts

__all__ = ["SlurmLauncher"]

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")
_COUNT = re.compile(r"(?:^|:)(\d+)\Z")
# srun takes these for options of its own, and those of the allocation do not fit one task on one host.
_OPTIONS = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_HOSTFILE", "SLURM_NTASKS"),
    *("SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_GPUS_PER_TASK"),
    *(
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
        "SLURM_TASKS_PER_NODE",
        "SLURM_THREADS_PER_CORE",
        "SLURM_CPU_BIND",
        "SLURM_STEP_ID",
    ),
)


class SlurmLauncher:
    """Runs programs on the hosts of an allocation of Slurm, one step a host.

    Parameters
    ----------
    config
        Its options.
    """

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config
        self._made: Allocation | None = None
        self._job = ""
        self._binding: list[str] = []

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        """Return the hosts of the allocation in which this process runs, or of a new one, which lasts until `release` or the end of this process.

        A host has as many slots as tasks were asked of it, otherwise as it has processors.

        Raises
        ------
        ConfigError
            Slurm refuses the allocation, in its words; or its variables cannot be understood.
        DeadlineError
            It was not granted in time.
        UsageError
            The allocation around this process has too little room.
        """
        environ: Mapping[str, str] = os.environ
        if not environ.get("SLURM_JOB_ID"):
            self._made = Allocation(self._config, ask, deadline)
            environ = self._made.environ
        try:
            hosts = self._hosts(environ, deadline)
            self._job = environ["SLURM_JOB_ID"]
            # Without such a plugin srun complains of the option.
            binds = re.search(r"^TaskPlugin\s*=.*(affinity|cgroup)", _scontrol(["show", "config"], deadline), re.MULTILINE)
            self._binding = ["--cpu-bind=none"] if binds else []
            remedy = "Ask for more, such as salloc -N 2 --ntasks-per-node=4, or leave the allocation, and one of the right size is made"
            return checked(hosts, ask, f"the allocation {self._job}", remedy)
        except BaseException:
            self.release()
            raise

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        """Return the local command whose process runs ``argv`` on a host, in a step that shares the allocation's processors with others.

        Without a number of processors the step has all of the allocation's on that host, and the ranks are not bound to one of them.
        """
        unset = [word for name in _OPTIONS for word in ("-u", name)]
        step = [f"--jobid={self._job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
        how = [*self._binding, "--unbuffered", "--quiet", "--kill-on-bad-exit=1", *self._config.srun_args]
        return ["env", *unset, "srun", *step, *how, *argv]

    def release(self) -> None:
        """Give an allocation back that this launcher has made; more than once is fine."""
        made, self._made = self._made, None
        if made is not None:
            made.release()

    def _hosts(self, environ: Mapping[str, str], deadline: Deadline) -> list[Host]:
        nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        names = _scontrol(["show", "hostnames", nodelist], deadline).split() if nodelist else []
        tasks = environ.get("SLURM_TASKS_PER_NODE", "") if environ.get("SLURM_NTASKS") else ""
        counts = [*_numbers(tasks)]
        if len(counts) != len(names):  # no tasks were asked for, or these are those of a step
            counts = [*_numbers(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
        if not names or len(counts) != len(names):
            raise ConfigError(
                f"the variables of Slurm say that the allocation has the hosts {nodelist!r} with "
                f"{tasks or environ.get('SLURM_JOB_CPUS_PER_NODE', '')!r} tasks or processors, which do not fit: is this process within salloc or sbatch?",
                file="SLURM_JOB_NODELIST",
                value=nodelist or None,
            )
        shown = _scontrol(["show", "node", "--oneliner", nodelist], deadline).splitlines()
        found = (re.match(r"NodeName=(\S+) .*?NodeAddr=(\S+)", line) for line in shown)
        addresses = {each[1]: each[2] for each in found if each}
        config = self._config
        return make_hosts(dict(zip(names, counts, strict=True)), addresses, _gpus(environ), config.python, config.folder)


def _numbers(text: str) -> Iterator[int]:
    """Yield the number of each host in a list such as ``4(x2),3``; nothing if it is none."""
    found = [_REPEATED.match(part) for part in text.split(",")]
    if all(found):
        for each in found:
            if each is not None:
                yield from [int(each[1])] * int(each[2] or 1)


def _gpus(environ: Mapping[str, str]) -> int:
    """Return the GPUs of each host; a variable may hold their kind, as in ``a100:4``."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if found := _COUNT.search(environ.get(name, "")):
            return int(found[1])
    return 0


def _scontrol(words: Sequence[str], deadline: Deadline) -> str:
    """Return what ``scontrol`` says.

    Raises
    ------
    ConfigError
        It fails, in its words.
    DeadlineError
        It does not answer in time.
    """
    command = ["scontrol", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.1, deadline.remaining()), check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{' '.join(command)} did not answer within {deadline.timeout_s:g} s: is Slurm's controller reachable?"
        ) from None
    except OSError as error:
        raise ConfigError(f"{' '.join(command)} cannot be run ({error}): is Slurm installed on this host?") from error
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
