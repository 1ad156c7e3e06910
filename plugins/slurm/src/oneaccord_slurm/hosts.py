"""What the two launchers share: the hosts of an allocation, checked against what is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from oneaccord.api import Ask, Host, UsageError

__all__ = ["checked", "make_hosts"]


def make_hosts(
    slots: Mapping[str, int],
    addresses: Mapping[str, str],
    gpus: int,
    python: str | None,
    folder: str | None,
) -> list[Host]:
    """Return the hosts of an allocation, which share a file system with this one unless the config says otherwise.

    Parameters
    ----------
    slots
        For each host, the ranks that it takes.
    addresses
        The address of a host, if it is not its name.
    gpus
        The GPUs of each host.
    python, folder
        The Python and the working directory there; None for those of this process.
    """
    python = python or sys.executable
    folder = folder or str(Path.cwd())
    return [Host(name, addresses.get(name, name), count, gpus, python, folder) for name, count in slots.items()]


def checked(hosts: Sequence[Host], ask: Ask, allocation: str, remedy: str) -> Sequence[Host]:
    """Return the hosts, if the ranks fit in.

    Raises
    ------
    UsageError
        They do not: too few slots or hosts for the ranks, or too few GPUs.
    """
    room = len(hosts) * ask.per_host if ask.per_host else sum(host.slots for host in hosts)
    if room < ask.ranks:
        each = f"{ask.per_host} on each" if ask.per_host else f"{room} slots in all"
        raise UsageError(
            f"{allocation} has {len(hosts)} hosts ({', '.join(f'{host.name}: {host.slots}' for host in hosts[:4])}"
            f"{', ...' if len(hosts) > 4 else ''}), {each}: too few for {ask.ranks} ranks. {remedy}"
        )
    if ask.gpus:
        most = max(min(ask.per_host or host.slots, ask.ranks) for host in hosts)
        poor = next((host for host in hosts if host.gpus < ask.gpus * most), None)
        if poor is not None:
            raise UsageError(
                f"{allocation} has {poor.gpus} GPUs on {poor.name}, and {most} ranks with {ask.gpus} each need {ask.gpus * most}: "
                f"ask for fewer ranks on each host (per_host), or for more GPUs. {remedy}"
            )
    return hosts
