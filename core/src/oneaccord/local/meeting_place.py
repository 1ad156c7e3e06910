"""The socket at which the ranks of a job meet, and the variables that each of them gets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneaccord.common.variables import Variable
from oneaccord.launchers import parse_address
from oneaccord.local.variables import shared_variables
from oneaccord.net.credentials import Credentials
from oneaccord.net.network import bind, guarded_bind, show_address

if TYPE_CHECKING:
    from oneaccord.local.launching import Launch

__all__ = ["MeetingPlace", "arrange_meeting"]

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where the ranks of a job meet, and how they know each other."""

    host: str
    port: int
    secret: str
    name: str
    free_port: int
    """Where the ranks do not meet, for whatever else meets at ``MASTER_PORT``, such as torch's own store."""
    listener: socket.socket | None
    """The listening socket, to be handed to rank 0, or to all ranks of a job to which others may come later; None on the hosts that do not have it."""

    def variables(
        self, job: Launch, local_rank: int, environ: Mapping[str, str], elastic: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the whole environment of one rank: torchrun's variables and ours, upon ``environ``; with those of an elastic job."""
        rank = job.local_ranks.start + local_rank
        variables = {
            **shared_variables(job.ranks, environ),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(max(job.world_size, rank + 1)),
            "LOCAL_WORLD_SIZE": str(max(job.ranks, local_rank + 1)),
            "GROUP_RANK": str(job.node_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.free_port),
            "TORCHELASTIC_RUN_ID": self.name,
            Variable.LAUNCHED: show_address((self.host, self.port)),
            Variable.SECRET: self.secret,
            **job.environ,
            **(elastic or {}),
        }
        if (rank == 0 or elastic) and self.listener is not None:
            variables[Variable.RENDEZVOUS_FD] = str(self.listener.fileno())
        return variables


def arrange_meeting(job: Launch, environ: Mapping[str, str], listener: socket.socket | None = None) -> MeetingPlace:
    """Bind the socket at which the ranks will meet, before any of them runs, so that no other program can take its port; or use ``listener``.

    Raises
    ------
    RendezvousError
        The address of ``job.rendezvous`` is in use, or is none of this host's.
    AuthenticationError
        It is reached from other hosts, and the secret can be guessed.
    """
    secret = environ.get(Variable.SECRET) or os.urandom(32).hex()
    if job.rendezvous is None:
        listener = _to_hand_over(bind("127.0.0.1", 0))
        with bind("127.0.0.1", 0) as other:
            free_port = other.getsockname()[1]
        return MeetingPlace("127.0.0.1", listener.getsockname()[1], secret, os.urandom(8).hex(), free_port, listener)
    host, port = parse_address(job.rendezvous)
    own = None
    if job.node_rank == 0:
        own = _to_hand_over(listener or guarded_bind((host, port), Credentials.of_text(os.fsencode(secret))))
    # All hosts must know it without a message; `--rendezvous` usually names a port of a free range.
    free_port = port + 1 if port < _MAX_PORT else port - 1
    return MeetingPlace(host, port, secret, f"oneaccord-{job.rendezvous}", free_port, own)


def _to_hand_over(listener: socket.socket) -> socket.socket:
    """Return a socket that children have, which sockets of oneaccord do not stay in; what this process forks becomes a rank."""
    return socket.socket(fileno=listener.detach())
