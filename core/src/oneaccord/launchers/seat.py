"""`Seat`: a rank's place in a job, given by the code that has made the process or the thread."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from oneaccord.common.checks import whole
from oneaccord.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from oneaccord.launchers.variables import parse_address

__all__ = ["Seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one rank in a job, for `oneaccord.init`, if your own code makes the processes or threads of the ranks.

    With a seat, neither rank, address, secret, run nor listener come from the variables of the process, which all its threads share. So one
    process can hold ranks of several jobs at once, each in a thread of its own.

    Parameters
    ----------
    rank, world_size
        The rank, counted from 0, and the number of ranks.
    address
        The address at which rank 0 listens, ``host:port``, the same on all ranks.
    secret
        A long random text that only the ranks of this job hold, the same on all of them: ``secrets.token_hex(32)``.
    local_rank
        The number of this rank among those of its host; None if only the meeting will show it.
    listener
        On rank 0, the listening TCP socket at ``address``, which belongs to the group from then on. None makes rank 0 listen at
        ``address`` itself.
    job
        The name of the job, the same on all ranks; a rank that names another job is refused.

    Raises
    ------
    InvalidWorldSizeError, InvalidRankError
        ``world_size`` is no positive integer, or a rank is outside its world.
    ConfigError
        ``address`` is not of the form ``host:port``.
    UsageError
        The secret is empty, the address or the job is no text, or the listener is no listening TCP socket of rank 0.

    Examples
    --------
    >>> import socket
    >>> listener = socket.create_server(("127.0.0.1", 0))
    >>> address = f"127.0.0.1:{listener.getsockname()[1]}"
    >>> Seat(0, 2, address, "0f" * 32, listener=listener).rank
    0
    >>> listener.close()
    """

    rank: int
    world_size: int
    address: str
    secret: str = field(repr=False)
    local_rank: int | None = None
    listener: socket.socket | None = None
    job: str = ""

    def __post_init__(self) -> None:
        if (whole(self.world_size) or 0) < 1:
            raise InvalidWorldSizeError(f"a seat's world_size must be a positive integer, not {self.world_size!r}")
        _check_rank("rank", self.rank, self.world_size)
        if self.local_rank is not None:
            _check_rank("local_rank", self.local_rank, self.world_size)
        secret: Any = self.secret
        if not isinstance(secret, str) or not secret:
            raise UsageError(
                "a seat needs a secret that only the ranks of its job hold: secrets.token_hex(32), the same on all ranks"
            )
        for name in ("address", "job"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"a seat's {name} must be a text, not {getattr(self, name)!r}")
        parse_address(self.address)
        if self.listener is not None:
            self._check_listener(self.listener)

    def _check_listener(self, listener: Any) -> None:
        if self.rank != 0:
            raise UsageError(f"rank {self.rank} has a seat with a listener, which rank 0 alone has: leave it out")
        is_tcp = isinstance(listener, socket.socket) and listener.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or listener.fileno() < 0 or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise UsageError(
                f"a seat's listener must be a TCP socket that listens, as socket.create_server((host, 0)) returns, not {listener!r}"
            )

    @property
    def place(self) -> tuple[str, int]:
        """The address as a host and a port."""
        return parse_address(self.address)


def _check_rank(name: str, rank: int, size: int) -> None:
    number = whole(rank)
    if number is None or not 0 <= number < size:
        raise InvalidRankError(f"a seat's {name} must be an integer from 0 to {size - 1}, not {rank!r}")
