"""How new ranks join a job that runs: by a socket that the launcher has handed to all ranks, and a file in which it says how many there are.

While a generation runs, no rank listens there, and newcomers wait in the kernel's queue. After a failure the store or its standby takes them in as
soon as a survivor asks to continue, until all have learned which ranks do. All ranks hold the socket, so no death closes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from oneaccord.common.folders import write_new
from oneaccord.common.variables import Variable
from oneaccord.control.protocol import RUNS_ALREADY, FromRank, FromStore, Join, Verdict
from oneaccord.control.server import Seat, Server
from oneaccord.net.credentials import Credentials
from oneaccord.net.forking import close_after_fork
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Address
from oneaccord.net.proven import ProvenSocket

__all__ = ["NEWCOMER_HELLO", "JoinAddress", "Joiners", "Roster"]

NEWCOMER_HELLO = b"newcomer"
"""The first words of a newcomer to a job that runs."""


class Roster(msgspec.Struct, frozen=True):
    """How many ranks a job has, as the launcher says.

    Attributes
    ----------
    running
        The number of processes that the launcher runs now, or is starting.
    fewest, most
        The numbers of ranks with which the job continues.
    hosts
        The number of hosts. A launcher knows the processes of its own alone.
    """

    running: int
    fewest: int
    most: int
    hosts: int = 1

    def write(self, folder: Path) -> None:
        """Write this to the file that the ranks read."""
        write_new(folder / "roster.json", msgspec.json.encode(self))


class JoinAddress:
    """The address at which newcomers join a job, as the launcher gives it to each rank.

    Parameters
    ----------
    fd
        The listening socket; None on a host without one, whose ranks cannot let others in.
    folder
        The folder of the launcher and its ranks.
    credentials
        The credentials that newcomers must prove.
    """

    def __init__(self, fd: int | None, folder: Path, credentials: Credentials) -> None:
        self._fd = fd
        self._folder = folder
        self.credentials = credentials

    @classmethod
    def of(cls, environ: Mapping[str, str], credentials: Credentials) -> JoinAddress | None:
        """Return the join address of this process; None if its job cannot grow."""
        folder, fd = environ.get(Variable.ELASTIC), environ.get(Variable.RENDEZVOUS_FD)
        if not folder:
            return None
        if fd:
            with contextlib.suppress(OSError):  # a bad socket raises when the port is needed
                os.set_inheritable(int(fd), False)  # what the program starts from now on must not keep the port
        return cls(int(fd) if fd else None, Path(folder), credentials)

    @property
    def is_here(self) -> bool:
        """Whether this process can let others in."""
        return self._fd is not None

    @property
    def address(self) -> Address:
        """Host and port."""
        with self.listen() as sock:
            host, port = sock.getsockname()[:2]
        return host, port

    def listen(self) -> socket.socket:
        """Return a copy of the socket, owned by the caller."""
        assert self._fd is not None
        return close_after_fork(socket.socket(fileno=os.dup(self._fd)))

    def roster(self) -> Roster:
        """Return what the launcher says now. If it has ended, no more ranks come."""
        try:
            return msgspec.json.decode((self._folder / "roster.json").read_bytes(), type=Roster)
        except OSError:
            return Roster(0, 1, 0)

    def enter(self, rank: str) -> None:
        """Tell the launcher that a rank has joined; the launcher takes that back when the rank has ended."""
        (self._folder / f"member-{rank}").touch()


class Joiners(Server):
    """The server for newcomers.

    Parameters
    ----------
    loop
        The background loop.
    address
        The address at which they join.
    liveness
        How a silent newcomer is noticed.
    """

    def __init__(self, loop: Loop, address: JoinAddress, liveness: Liveness) -> None:
        super().__init__(loop, liveness)
        self._address = address
        self._knocked: Callable[[], None] | None = None
        self._admit: Callable[[Join], int | FromStore]
        self._heard: Callable[[int, FromRank], None]
        self._lost: Callable[[int, str], None]

    @property
    def is_here(self) -> bool:
        """Whether newcomers can join here. A host without the socket cannot take them."""
        return self._address.is_here

    def roster(self) -> Roster:
        """Return what the launcher says now."""
        return self._address.roster()

    def watch(self, knocked: Callable[[], None]) -> None:
        """Call ``knocked`` when a newcomer has come, until `open` or `close`. The newcomer is sent away, and comes again."""
        self._knocked = knocked
        self._listen_here()

    def open(
        self, admit: Callable[[Join], int | FromStore], hear: Callable[[int, FromRank], None], lose: Callable[[int, str], None]
    ) -> None:
        """Let newcomers in; more than once is fine.

        Parameters
        ----------
        admit
            Returns the number of a newcomer, or the reason against it.
        hear
            Takes in its messages.
        lose
            Called when its connection has ended.
        """
        self._knocked = None
        self._admit, self._heard, self._lost = admit, hear, lose
        self._listen_here()

    def send(self, number: int, message: FromStore) -> None:
        """Send a message to a newcomer, unless its connection has ended."""
        self._send(number, message)

    def close(self, keep: Callable[[int], bool] = lambda _: False) -> None:
        """Let no more newcomers in, and send away all but those with certain numbers: they come again."""
        self._knocked = None
        self._stop_listening()
        for seat in [*self._open]:
            if seat.number is None or not keep(seat.number):
                seat.close()
                self._forget(seat)

    def _listen_here(self) -> None:
        if self._listener is None and self._address.is_here:
            self._listen(self._address.listen(), self._address.credentials)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if self._knocked is not None and hello.startswith(NEWCOMER_HELLO):
            sock.close()
            self._knocked()
        else:
            super()._accept(sock, hello)

    # Messages of newcomers

    def _join(self, seat: Seat, message: Join) -> None:
        if not seat.hello.startswith(NEWCOMER_HELLO):  # its host was started again, and it came as if the job began
            seat.send(Verdict(RUNS_ALREADY, "the job runs already: this rank can join it as a new one"))
            return
        answer = self._admit(message)
        if isinstance(answer, int):
            self._sit(seat, answer)
        else:
            seat.send(answer)

    def _hear(self, number: int, message: FromRank) -> None:
        self._heard(number, message)

    def _lose(self, number: int, reason: str, vanished: bool) -> None:
        self._lost(number, reason)
