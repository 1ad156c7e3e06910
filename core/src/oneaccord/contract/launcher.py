"""What a plugin implements that gives hosts to the ranks of a job, or runs the job on hosts of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from oneaccord.contract.deadline import Deadline

__all__ = ["Ask", "Host", "HostLauncher", "JobLauncher", "LauncherSpec", "WholeJob"]


@dataclass(frozen=True)
class LauncherSpec:
    """The description of a launcher; cheap to make, so that a plugin's module stays light.

    Attributes
    ----------
    name
        Its name, equal to that of the entry point.
    summary
        One line, for ``oneaccord doctor``.
    kind
        ``"hosts"`` if it gives hosts, on which core starts the ranks; ``"workers"`` if it gives processes, in which they run; ``"jobs"`` if it
        runs a whole job itself, as an engine does that starts a command on each host and passes it no input.
    factory
        ``"module:function"``; takes a config, and returns the launcher.
    config
        ``"module:class"`` of the model of its options, a subclass of `BackendConfig`.
    probe
        Returns None when it can be used here, otherwise the reason in words. A launcher of the kind ``"jobs"`` is made all the same: it may have
        use for less than an engine, such as to write what another program submits.
    install
        The command that helps if it cannot; empty if nothing is to be installed, because the reason says what to do.
    """

    name: str
    summary: str
    kind: Literal["hosts", "workers", "jobs"]
    factory: str
    config: str
    probe: Callable[[], str | None]
    install: str


@dataclass(frozen=True)
class Ask:
    """What a job asks of a launcher.

    Attributes
    ----------
    ranks
        How many ranks, at least 1.
    per_host
        How many of them each host gets; None for as many as fit.
    gpus
        How many GPUs each rank gets.
    """

    ranks: int
    per_host: int | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Host:
    """A host for ranks.

    Attributes
    ----------
    name, address
        Its name for the launcher, and where other hosts reach it.
    slots, gpus
        The ranks that it takes, and its GPUs.
    python, folder
        The Python there, and the working directory; None for the one in which commands start.
    """

    name: str
    address: str
    slots: int
    gpus: int = 0
    python: str = "python3"
    folder: str | None = None


class HostLauncher(Protocol):
    """A launcher that gives hosts."""

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        """Return hosts with room for the ranks.

        Parameters
        ----------
        ask
            How many ranks, and what each needs.
        deadline
            Until when the hosts must be there.
        """
        ...

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        """Return the local command whose process runs ``argv`` on a host, and passes standard input, output and error through.

        Parameters
        ----------
        host
            One that `allocate` has returned.
        argv
            The words of the command there.
        """
        ...

    def release(self) -> None:
        """Give the hosts back; more than once is fine."""
        ...


@dataclass(frozen=True)
class WholeJob:
    """A job for a launcher that starts ``oneaccord run`` on each host itself.

    Attributes
    ----------
    words
        The words of ``oneaccord run``, behind those that count ranks and hosts and say where they meet: options, the program, and its arguments.
    environ
        Variables for it. The secret of the job is not among them: the launcher makes one.
    grace_s
        How long ranks may take to end after a signal.
    may_go_on
        Whether the ranks of other hosts may continue when a host is lost.
    max_restarts
        How many ranks a host may replace.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]
    grace_s: float = 30.0
    may_go_on: bool = False
    max_restarts: int = 0


class JobLauncher(Protocol):
    """A launcher that runs whole jobs."""

    def run(self, ask: Ask, job: WholeJob) -> int:
        """Run a job to its end, with its output, and return its exit code.

        A signal to this process ends the job. Nothing of it is left when this returns or raises.

        Parameters
        ----------
        ask
            How many ranks, and how many of them each host gets.
        job
            The job.
        """
        ...
