"""What a plugin implements that gives hosts to the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from oneaccord.contract.deadline import Deadline

__all__ = ["Ask", "Host", "HostLauncher", "LauncherSpec"]


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
        ``"hosts"`` if it gives hosts, on which core starts the ranks; ``"workers"`` if it gives processes, in which they run.
    factory
        ``"module:function"``; takes a config, and returns the launcher.
    config
        ``"module:class"`` of the model of its options, a subclass of `BackendConfig`.
    probe
        Returns None when it can be used here, otherwise the reason in words.
    install
        The command that helps if it cannot.
    """

    name: str
    summary: str
    kind: Literal["hosts", "workers"]
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
