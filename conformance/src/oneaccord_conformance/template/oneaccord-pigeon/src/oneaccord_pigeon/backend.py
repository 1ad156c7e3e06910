"""The backend: one socket for each pair of ranks, with a thread that reads it and a thread that writes it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import cast

from oneaccord.api import Backend, Bootstrap, Deadline, HeaderMismatch, LinkLost, Transfer, Transport, read_cards, write_card

from oneaccord_pigeon.plugin import Config

__all__ = ["SocketBackend", "SocketTransport", "create"]

_FRAME = struct.Struct("<IQ64s")  # channel, bytes of the payload, header


def create(bootstrap: Bootstrap) -> Backend:
    """Make the backend: the factory that the spec names."""
    return SocketBackend(bootstrap)


class _Message(Transfer):
    def __init__(self, peer: int, header: bytes, payload: memoryview, *, incoming: bool = False) -> None:
        self.peer, self.header, self.payload, self.incoming = peer, header, payload, incoming
        self.done, self.moved = False, 0


class SocketBackend(Backend):
    """The sockets of this rank, and the messages that came through them."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        assert isinstance(bootstrap.config, Config)
        self._piece = bootstrap.config.piece_bytes
        self._is_from = bootstrap.is_from
        self._ended = ""
        self._lost: dict[int, str] = {}
        self._sockets: list[socket.socket] = []
        self.changed: threading.Condition = threading.Condition()  # guards all of these
        self.arrivals: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)  # by channel and peer
        self.outgoing: dict[int, SimpleQueue[_Message | None]] = {}
        # Core authenticates the client. The lower rank dials; the higher one has its socket once `_accept` was called.
        card = write_card(bootstrap.listen(bootstrap.host, self._accept))
        addresses = read_cards(bootstrap.exchange("pigeon", card), tuple[str, int])
        for peer in range(bootstrap.rank + 1, bootstrap.world_size):
            hello = bootstrap.rank.to_bytes(4, "little")
            self._add(peer, bootstrap.dial(peer, addresses[peer], hello, bootstrap.deadline))

    def _accept(self, sock: socket.socket, hello: bytes) -> None:  # in a thread of core's, which must not block
        peer = int.from_bytes(hello[:4], "little")
        if self._is_from(sock, peer):
            self._add(peer, sock)
        else:
            sock.close()

    def _add(self, peer: int, sock: socket.socket) -> None:
        sock.setblocking(True)
        with self.changed:
            if self._ended:
                sock.close()
                return
            self._sockets.append(sock)
            self.outgoing[peer] = SimpleQueue()
            self.changed.notify_all()
        for work in (self._read, self._write):
            threading.Thread(target=self._serve, args=(work, peer, sock), name="oneaccord-pigeon", daemon=True).start()

    def _serve(self, work: Callable[[int, socket.socket], None], peer: int, sock: socket.socket) -> None:
        try:
            work(peer, sock)
        except OSError as error:
            with self.changed:
                self._lost[peer] = error.strerror or str(error)
                self.changed.notify_all()

    def _read(self, peer: int, sock: socket.socket) -> None:
        while True:
            frame = _Message(peer, b"", memoryview(bytearray(_FRAME.size)))
            _fill(frame, sock)
            channel, nbytes, header = _FRAME.unpack(frame.payload)
            message = _Message(peer, header, memoryview(bytearray(nbytes)))
            with self.changed:  # without the payload: a receiver that expects another header learns it now
                self.arrivals[channel, peer].append(message)
                self.changed.notify_all()
            _fill(message, sock)
            with self.changed:
                self.changed.notify_all()

    def _write(self, peer: int, sock: socket.socket) -> None:
        while (message := self.outgoing[peer].get()) is not None:
            sock.sendall(message.header)
            while message.moved < len(message.payload):
                message.moved += sock.send(message.payload[message.moved : message.moved + self._piece])
            with self.changed:
                message.done = True
                self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], peers: Sequence[int], deadline: Deadline) -> None:
        """Sleep until something is ready; raise if the job ends, a peer is lost or the deadline passes before."""
        with self.changed:
            self.changed.wait_for(lambda: self._ended or ready() or self._lost.keys() & peers, deadline.remaining())
            if self._ended:
                raise LinkLost(0, self._ended)  # any rank: core knows the reason
            if not ready():
                for peer in self._lost.keys() & peers:
                    raise LinkLost(peer, self._lost[peer])
                raise TimeoutError("the deadline passed")

    def open_transport(self, channel: int) -> Transport:
        """Return the transport of a channel."""
        return SocketTransport(self, channel)

    def abort(self) -> None:
        """Wake the threads that wait, here and in the kernel."""
        with self.changed:
            self._ended = "the job ended"
            self.changed.notify_all()
            for queue in self.outgoing.values():
                queue.put(None)
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets; the threads have ended, or will now."""
        self.abort()
        for sock in self._sockets:
            sock.close()


class SocketTransport(Transport):
    """The messages of one channel."""

    def __init__(self, backend: SocketBackend, channel: int) -> None:
        self._backend, self._channel = backend, channel

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Wait for the sockets, which the factories make."""
        self._backend.wait_for(lambda: self._backend.outgoing.keys() >= set(peers), peers, deadline)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Give the message to the thread that writes."""
        message = _Message(peer, _FRAME.pack(self._channel, len(payload), header), payload)
        self._backend.outgoing[peer].put(message)
        return message

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Note the expected message; `wait` takes it."""
        return _Message(peer, header, payload, incoming=True)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait for the threads, and take the messages that have come."""
        messages = cast("Sequence[_Message]", transfers)
        self._backend.wait_for(lambda: any(map(self._take, messages)), [each.peer for each in messages], deadline)

    def _take(self, message: _Message) -> bool:
        """Return whether a message is done; copy one that has come to its place."""
        came = self._backend.arrivals[self._channel, message.peer]
        if message.incoming and not message.done and came:
            if came[0].header != message.header:
                raise HeaderMismatch(message.peer, came[0].header)
            message.moved = came[0].moved
            if message.moved == len(message.payload):
                message.payload[:] = came.popleft().payload
                message.done = True
        return message.done

    def close(self) -> None:
        """Forget the channel; the sockets serve all channels."""
        with self._backend.changed:
            for key in [key for key in self._backend.arrivals if key[0] == self._channel]:
                del self._backend.arrivals[key]


def _fill(message: _Message, sock: socket.socket) -> None:
    while message.moved < len(message.payload):
        nbytes = sock.recv_into(message.payload[message.moved :])
        if not nbytes:
            raise ConnectionError("it closed the connection")
        message.moved += nbytes
