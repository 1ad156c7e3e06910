"""Where new ranks come to a job that runs already: a socket that the launcher has handed to all ranks, and what it writes of the job.

Nobody listens there while a generation runs: who comes waits in the kernel's queue. The store of a job that has failed, or its successor, takes them
in once a rank asks to go on, until it has told all who goes on. As all ranks hold the socket, no death closes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from manyhands.common.folders import write_new
from manyhands.common.variables import Variable
from manyhands.control.protocol import RUNS_ALREADY, FromRank, FromStore, Join, Verdict
from manyhands.control.server import Seat, Server
from manyhands.net.credentials import Credentials
from manyhands.net.forking import close_after_fork
from manyhands.net.keepalive import Liveness
from manyhands.net.loop import Loop
from manyhands.net.network import Address
from manyhands.net.proven import ProvenSocket

__all__ = ["NEWCOMER_HELLO", "JoinAddress", "Joiners", "Roster"]

NEWCOMER_HELLO = b"newcomer"
"""How those begin who come into a job that runs."""


class Roster(msgspec.Struct, frozen=True):
    """How many ranks a job has.

    Attributes
    ----------
    running
        The processes that the launcher runs now, or is starting.
    fewest, most
        With how many ranks the job goes on.
    hosts
        How many hosts there are, of which a launcher knows the processes of its own.
    """

    running: int
    fewest: int
    most: int
    hosts: int = 1

    def write(self, folder: Path) -> None:
        """Put this where the ranks look for it."""
        write_new(folder / "roll.json", msgspec.json.encode(self))


class JoinAddress:
    """What a launcher has given to a rank so that others can come later.

    Parameters
    ----------
    fd
        A listening socket; None on hosts that have none, whose ranks cannot let others in.
    folder
        Where the launcher and the ranks write.
    credentials
        What newcomers must show.
    """

    def __init__(self, fd: int | None, folder: Path, credentials: Credentials) -> None:
        self._fd = fd
        self._folder = folder
        self.credentials = credentials

    @classmethod
    def of(cls, environ: Mapping[str, str], credentials: Credentials) -> JoinAddress | None:
        """Return that of this process; None where no launcher lets ranks come later."""
        folder, fd = environ.get(Variable.ELASTIC), environ.get(Variable.RENDEZVOUS_FD)
        if not folder:
            return None
        if fd:
            with contextlib.suppress(OSError):  # it is missed where the port is needed
                os.set_inheritable(int(fd), False)  # what the program starts from now on must not keep the port
        return cls(int(fd) if fd else None, Path(folder), credentials)

    @property
    def is_here(self) -> bool:
        """Whether this process can let others in."""
        return self._fd is not None

    @property
    def address(self) -> Address:
        """Where it is."""
        with self.listen() as sock:
            host, port = sock.getsockname()[:2]
        return host, port

    def listen(self) -> socket.socket:
        """Return the socket, as one of the caller's own."""
        assert self._fd is not None
        return close_after_fork(socket.socket(fileno=os.dup(self._fd)))

    def roll(self) -> Roster:
        """Return what the launcher says now; where that has ended, that nobody comes any more."""
        try:
            return msgspec.json.decode((self._folder / "roll.json").read_bytes(), type=Roster)
        except OSError:
            return Roster(0, 1, 0)

    def enter(self, rank: str) -> None:
        """Tell the launcher that the rank that it calls so has come into the job; it takes that back when the rank has ended."""
        (self._folder / f"member-{rank}").touch()


class Joiners(Server):
    """Takes newcomers in, in the background loop.

    Parameters
    ----------
    loop
        Where it runs.
    door
        Where they come.
    liveness
        How it is noticed that one is silent.
    """

    def __init__(self, loop: Loop, door: JoinAddress, liveness: Liveness) -> None:
        super().__init__(loop, liveness)
        self._door = door
        self._knocked: Callable[[], None] | None = None
        self._admit: Callable[[Join], int | FromStore]
        self._heard: Callable[[int, FromRank], None]
        self._lost: Callable[[int, str], None]

    @property
    def is_here(self) -> bool:
        """Whether newcomers can come here; on hosts that have no socket for them, they cannot."""
        return self._door.is_here

    def roll(self) -> Roster:
        """Return what the launcher says now."""
        return self._door.roll()

    def watch(self, knocked: Callable[[], None]) -> None:
        """Call ``knocked`` when a newcomer has come, until the door is opened or closed; whoever comes is sent away, and comes again."""
        self._knocked = knocked
        self._listen_here()

    def open(
        self, admit: Callable[[Join], int | FromStore], hear: Callable[[int, FromRank], None], lose: Callable[[int, str], None]
    ) -> None:
        """Let newcomers in; once more is fine.

        Parameters
        ----------
        admit
            Gives a newcomer its number, or the reason against it.
        hear
            Takes in what it says.
        lose
            Called when it has ended.
        """
        self._knocked = None
        self._admit, self._heard, self._lost = admit, hear, lose
        self._listen_here()

    def send(self, number: int, message: FromStore) -> None:
        """Give a message to a newcomer, unless it has ended."""
        self._send(number, message)

    def close(self, keep: Callable[[int], bool] = lambda _: False) -> None:
        """Let nobody in any more, and send away all but those with certain numbers: they come again."""
        self._knocked = None
        self._stop_listening()
        for seat in [*self._open]:
            if seat.number is None or not keep(seat.number):
                seat.close()
                self._forget(seat)

    def _listen_here(self) -> None:
        if self._listener is None and self._door.is_here:
            self._listen(self._door.listen(), self._door.credentials)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if self._knocked is not None and hello.startswith(NEWCOMER_HELLO):
            sock.close()
            self._knocked()
        else:
            super()._accept(sock, hello)

    # What the seats hear

    def _join(self, seat: Seat, message: Join) -> None:
        if not seat.hello.startswith(NEWCOMER_HELLO):  # its host has been started again, and it came as if the job began
            seat.send(Verdict(RUNS_ALREADY, "the job runs already: this rank can come in as a new one"))
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
