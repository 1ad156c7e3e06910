"""Who started this process, and which rank of how many it is: read from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from manyhands.errors import RendezvousError
from manyhands.rendezvous.environment.launchers import LAUNCHERS, LaunchEnvironment
from manyhands.rendezvous.environment.variables import Variables, parse_address

__all__ = ["DEFAULT_PORT", "LaunchEnvironment", "discover", "parse_address"]

DEFAULT_PORT: int = 29500
"""The port of the rendezvous where somebody named a host and no port, by the convention of torchrun."""


def discover(environ: Mapping[str, str], *, parent: int | None = None) -> LaunchEnvironment | None:
    """Find out from the environment which rank this process is and where the ranks of its job meet.

    The first launcher in `manyhands.rendezvous.environment.launchers.LAUNCHERS` that recognises its variables speaks.
    ``MANYHANDS_RANK``, ``MANYHANDS_WORLD_SIZE`` and ``MANYHANDS_RENDEZVOUS=host:port`` win over what any launcher says, and
    ``MASTER_ADDR`` with ``MASTER_PORT`` give the address where the launcher tells none.

    Parameters
    ----------
    environ
        The variables, usually ``os.environ``.
    parent
        The parent process's id, by default that of this process: launchers that give a job no name are told apart by it.

    Returns
    -------
    LaunchEnvironment or None
        None when the process was started by plain ``python``. In a world of one, ``host`` and ``port`` may be None;
        otherwise both are set.

    Raises
    ------
    ConfigError
        A variable holds what it cannot hold, or half of a set is missing; the message names it and what to do.
    RendezvousError
        Nothing tells where the ranks meet; the message names the variable to set.
    """
    variables = Variables(environ, os.getppid() if parent is None else parent)
    for read in LAUNCHERS:
        found = read(variables)
        if found is not None:
            return _with_address(variables, found)
    return None


def _with_address(variables: Variables, found: LaunchEnvironment) -> LaunchEnvironment:
    given = variables.address("MANYHANDS_RENDEZVOUS")
    if given is not None:
        return replace(found, host=given[0], port=given[1])
    host, port = found.host, found.port
    if host is None and found.local_world_size == found.world_size > 1:
        host = "127.0.0.1"
    elif host is None:
        host = variables.text("MASTER_ADDR")
        port = variables.port("MASTER_PORT") or port or DEFAULT_PORT
        if host is None and found.world_size == 1:
            return replace(found, port=None)
    else:
        port = port or DEFAULT_PORT
    if host is None or port is None:
        unknown = "on which host" if host is None else f"at which port of {host}"
        raise RendezvousError(
            f"{found.launcher} started rank {found.rank} of {found.world_size} and does not tell {unknown} the ranks meet: "
            "set MANYHANDS_RENDEZVOUS=host:port on all ranks (or MASTER_ADDR and MASTER_PORT), naming the host of rank 0 and a "
            "free port there",
            rank=found.rank,
        )
    return replace(found, host=host, port=port)
