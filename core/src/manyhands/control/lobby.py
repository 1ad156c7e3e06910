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
from manyhands.control.protocol import (
    MAX_FROM_RANK_BYTES,
    RUNS_ALREADY,
    FromRank,
    FromStore,
    Join,
    Verdict,
    decode_from_rank,
    encode,
)
from manyhands.net.credentials import Credentials
from manyhands.net.forking import close_after_fork
from manyhands.net.frames import FrameConnection
from manyhands.net.keepalive import Liveness
from manyhands.net.loop import Loop
from manyhands.net.network import Address, Listener
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


class Joiners:
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
        self._loop = loop
        self._door = door
        self._liveness = liveness
        self._listener: Listener | None = None
        self._bell: Listener | None = None
        self._seats: dict[int, FrameConnection] = {}
        self._open: set[FrameConnection] = set()

    @property
    def is_here(self) -> bool:
        """Whether newcomers can come here; on hosts that have no socket for them, they cannot."""
        return self._door.is_here

    def roll(self) -> Roster:
        """Return what the launcher says now."""
        return self._door.roll()

    def watch(self, knocked: Callable[[], None]) -> None:
        """Call ``knocked`` when a newcomer has come, until the door is opened or closed; whoever comes is sent away, and comes again."""

        def accept(sock: ProvenSocket, hello: bytes) -> None:
            if hello.startswith(NEWCOMER_HELLO):
                sock.close()
                knocked()
            else:
                self._turn_away(sock, hello)

        if self._door.is_here:
            self._bell = Listener(self._loop, self._door.listen(), self._door.credentials, accept)

    def _turn_away(self, sock: ProvenSocket, hello: bytes) -> None:
        """Tell a rank that came as if the job began, since its host has been started again, that it comes later."""
        answer = Verdict(RUNS_ALREADY, "the job runs already: this rank can come in as a new one")
        self._open.add(_Seat(self, sock, lambda _: answer, lambda *_: None, lambda *_: None).connection)

    def _watch_no_more(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

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
        self._watch_no_more()
        if self._listener is None and self._door.is_here:

            def accept(sock: ProvenSocket, hello: bytes) -> None:
                if hello.startswith(NEWCOMER_HELLO):
                    self._open.add(_Seat(self, sock, admit, hear, lose).connection)
                else:
                    self._turn_away(sock, hello)

            self._listener = Listener(self._loop, self._door.listen(), self._door.credentials, accept)

    def send(self, number: int, message: FromStore) -> None:
        """Give a message to a newcomer, unless it has ended."""
        if number in self._seats:
            self._seats[number].send(encode(message))

    def close(self, keep: Callable[[int], bool] = lambda _: False) -> None:
        """Let nobody in any more, and send away all but those with certain numbers: they come again."""
        self._watch_no_more()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        kept = {seat for number, seat in self._seats.items() if keep(number)}
        for seat in self._open - kept:
            seat.close()
        self._open &= kept
        self._seats = {number: seat for number, seat in self._seats.items() if seat in kept}


class _Seat:
    """One newcomer's connection."""

    def __init__(
        self,
        lobby: Joiners,
        sock: ProvenSocket,
        admit: Callable[[Join], int | FromStore],
        hear: Callable[[int, FromRank], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._lobby = lobby
        self._admit = admit
        self._hear = hear
        self._lose = lose
        self._number: int | None = None
        self.connection = FrameConnection(lobby._loop, sock, self._frame, self._lost, MAX_FROM_RANK_BYTES, lobby._liveness)

    def _frame(self, frame: bytes | None) -> None:
        message = decode_from_rank(frame)
        if message is not None and self._number is not None:
            self._hear(self._number, message)
        elif isinstance(message, Join):
            answer = self._admit(message)
            if isinstance(answer, int):
                self._number = answer
                self._lobby._seats[answer] = self.connection
            else:
                self.connection.send(encode(answer))
        else:
            self.connection.close()

    def _lost(self, reason: str) -> None:
        self._lobby._open.discard(self.connection)
        if self._number is not None:
            self._lobby._seats.pop(self._number, None)
            self._lose(self._number, reason)
