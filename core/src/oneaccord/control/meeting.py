"""How the ranks of a job meet."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence

from oneaccord.contract.deadline import Deadline
from oneaccord.control.connection import Control
from oneaccord.control.joiners import JoinAddress
from oneaccord.errors import RendezvousError
from oneaccord.net.credentials import Credentials
from oneaccord.net.forking import close_after_fork
from oneaccord.net.keepalive import Liveness
from oneaccord.net.network import Address, guarded, guarded_bind

__all__ = ["Meeting"]


class Meeting:
    """Where and how the ranks of a job meet.

    Parameters
    ----------
    rank, world_size
        This rank, and the number of ranks.
    backend, choices
        The settings that must be alike on all ranks: the backend's name, and words for the rest.
    address
        The address at which rank 0 listens. Rank 0 sets it to the one that it has got.
    credentials
        The proof that a process belongs to the job.
    inherited
        A socket that listens there already, handed over to rank 0, or the file descriptor of one.
    liveness
        How a silent rank is noticed.
    local_rank
        The number of this rank among those of its host, if it is known from before.
    before
        The control connection of the former job, and the ranks that its survivors had there.
    keep
        Takes the function that closes a store at which the ranks did not meet; until it is called, the store tells latecomers why. Without ``keep`` that
        takes a moment.
    join_address
        The address for ranks that come later; None if none can.
    gone
        Returns the ranks of this host that have ended before they came, each with how; None if that is not known.
    others
        Where rank 0 listens instead, in this order, if another job has the address; alike on all ranks. A rank knows its own job's store by the job's name.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str,
        choices: str,
        address: Address,
        credentials: Credentials,
        inherited: int | socket.socket | None,
        liveness: Liveness,
        before: tuple[Control, Sequence[int]] | None = None,
        local_rank: int | None = None,
        keep: Callable[[Callable[[], None]], object] | None = None,
        join_address: JoinAddress | None = None,
        gone: Callable[[], dict[int, str]] | None = None,
        others: Sequence[Address] = (),
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.choices = choices
        self.address: Address = address
        self.credentials = credentials
        self.inherited = inherited
        self.liveness = liveness
        self.before = before
        self.local_rank = local_rank
        self.keep = keep
        self.join_address = join_address
        self.gone = gone
        self.others: Sequence[Address] = others

    def is_vain(self) -> bool:
        """Return whether the ranks cannot meet any more, since one of them has ended before.

        It may have been the one with the store, before the first of them learned that it is to wait for the others.
        """
        if self.gone is not None and 0 in self.gone():
            return True
        if self.before is None:
            return False
        old, ranks = self.before
        return old.cut or any(rank in old.gone for rank in ranks)

    def listen(self, deadline: Deadline) -> socket.socket:
        """Return the socket at which rank 0 waits for the others."""
        if isinstance(self.inherited, socket.socket):
            return guarded(close_after_fork(self.inherited), self.credentials)
        if self.inherited is not None:
            sock = _listening(self.inherited)
            if sock is None:
                raise RendezvousError(
                    f"ONEACCORD_RENDEZVOUS_FD={self.inherited} is to be the socket at which the ranks meet, and is none in this process "
                    f"({os.getpid()}). A child of a rank cannot be the rank: call init() in the process that oneaccord run has "
                    "started; or start the child with subprocess.Popen(..., close_fds=False); or, for a world of its own, call init(rank=0, world_size=1)",
                    rank=self.rank,
                )
            os.set_inheritable(self.inherited, False)  # what the program starts from now on must not keep the port
            return guarded(close_after_fork(sock), self.credentials)
        last = self.others[-1] if self.others else self.address
        for place in (self.address, *self.others):
            try:
                sock = guarded_bind(place, self.credentials, deadline)
            except RendezvousError as error:
                is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if place == last or not is_taken:
                    raise
            else:
                self.address, self.others = place, ()
                return sock
        raise AssertionError("the last place is bound or refused")


def _listening(inherited: int) -> socket.socket | None:
    """Return the listening socket at an inherited descriptor; None if there is none."""
    try:
        copy = os.dup(inherited)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
    if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return sock
    sock.close()
    return None
