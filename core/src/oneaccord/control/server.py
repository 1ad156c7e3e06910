"""A server of the control plane: clients connect to it, and each has a number once it has joined.

The store, the standby store and the server for newcomers share this. Each decides which clients may join, and what their messages mean.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from oneaccord.control import wording
from oneaccord.control.protocol import (
    ANOTHER_JOB,
    MAX_FROM_RANK_BYTES,
    FromRank,
    FromStore,
    Join,
    Verdict,
    decode_from_rank,
    encode,
)
from oneaccord.net.credentials import Credentials
from oneaccord.net.frames import FrameConnection
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Address, Listener, show_address
from oneaccord.net.proven import ProvenSocket

__all__ = ["Seat", "Server"]


class Seat:
    """One client's connection, as a server sees it.

    Attributes
    ----------
    sock, hello
        The proven socket, and the first words of the client.
    connection
        What carries its frames.
    number
        The client's rank, or a newcomer's number; None until it has joined.
    """

    def __init__(self, server: Server, sock: ProvenSocket, hello: bytes) -> None:
        self._server = server
        self.sock = sock
        self.hello = hello
        self.number: int | None = None
        self.connection: FrameConnection = FrameConnection(
            server._loop, sock, self._frame, self._lost, MAX_FROM_RANK_BYTES, server._liveness
        )

    def send(self, message: FromStore) -> None:
        """Send a message; from any thread."""
        self.connection.send(encode(message))

    def close(self) -> None:
        """Close the connection once what is queued has been sent; from any thread."""
        self.connection.close()

    def _frame(self, frame: bytes | None) -> None:
        message = decode_from_rank(frame)
        if self.number is None and isinstance(message, Join):
            if message.job == self._server._job:
                self._server._join(self, message)
            else:
                self._server._turn_away(self, message)
        elif self.number is None or message is None:
            self._server._refuse(self)
        else:
            self._server._hear(self.number, message)

    def _lost(self, reason: str) -> None:
        self._server._forget(self)
        if self.number is not None:
            self._server._lose(self.number, reason, self.connection.vanished)


class Server(ABC):
    """The seats of a server's clients; all methods with an underscore run in the background loop.

    Parameters
    ----------
    loop
        Where it runs.
    liveness
        How a silent client is noticed.
    own
        The client that is this very process, if one is.
    attached
        A server that closes with this one.
    """

    def __init__(self, loop: Loop, liveness: Liveness, own: int | None = None, attached: Server | None = None) -> None:
        self._loop = loop
        self._liveness = liveness
        self._own = own
        self._attached = attached
        self._listener: Listener | None = None
        self._job = ""
        self._seats: dict[int, Seat] = {}
        self._last: tuple[FromStore | None, bytes] = None, b""
        self._open: set[Seat] = set()
        self._changed = threading.Condition()  # guards `_open`

    @abstractmethod
    def _join(self, seat: Seat, message: Join) -> None:
        """Take a client in by `_sit`, or answer why not."""

    @abstractmethod
    def _hear(self, number: int, message: FromRank) -> None:
        """Take in a message of a client that has joined."""

    @abstractmethod
    def _lose(self, number: int, reason: str, vanished: bool) -> None:
        """Take note that the connection of a client that had joined has ended."""

    def _turn_away(self, seat: Seat, message: Join) -> str:
        """Tell a rank of another job which job meets here, and return the reason in words; the ranks of this job keep meeting."""
        reason = wording.another_job(message, self._job, show_address(seat.sock.getsockname()[:2]))
        remedy = "give each job an address of its own; or, if they are one job, give all its ranks one ONEACCORD_RUN_ID, and start them alike"
        seat.send(Verdict(ANOTHER_JOB, f"{reason}: {remedy}"))
        return reason

    def _refuse(self, seat: Seat) -> None:
        """Answer a frame that is unreadable, or that comes before the client has joined."""
        seat.close()
        seat._lost("it sent a frame that cannot be read")

    def _listen(
        self, sock: socket.socket, credentials: Credentials, refused: Callable[[Address, str], None] = lambda *_: None
    ) -> None:
        self._job = credentials.run
        self._listener = Listener(self._loop, sock, credentials, self._accept, refused)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        seat = Seat(self, sock, hello)
        with self._changed:
            self._open.add(seat)

    def _sit(self, seat: Seat, number: int) -> None:
        seat.number = number
        self._seats[number] = seat

    def _stand_up(self, seat: Seat) -> None:
        if seat.number is not None:
            self._seats.pop(seat.number, None)
            seat.number = None

    def _forget(self, seat: Seat) -> None:
        with self._changed:
            self._open.discard(seat)
            if seat.number is not None:
                self._seats.pop(seat.number, None)
            self._changed.notify_all()

    def _send(self, number: int, message: FromStore) -> None:
        if number in self._seats:
            if message is not self._last[0]:  # what all clients get is as long as they are many: written once
                self._last = message, encode(message)
            self._seats[number].connection.send(self._last[1])

    def _is_alone(self) -> bool:
        return all(seat.number == self._own for seat in self._open)

    def drain(self, timeout_s: float) -> None:
        """Wait until no other client is connected."""
        with self._changed:
            self._changed.wait_for(self._is_alone, timeout_s)

    def close(self) -> None:
        """Stop listening, and close each connection once what is queued has been sent; from any thread."""
        self._stop_listening()
        self._loop.call(self._close)

    def _close(self) -> None:
        for seat in [*self._open]:
            seat.close()
        if self._attached is not None:
            self._attached.close()
