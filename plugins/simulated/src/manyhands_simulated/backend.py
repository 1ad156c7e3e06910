"""Messages between threads: one copy, from the sender's array to the receiver's."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

from manyhands.api import (
    HEADER_BYTES,
    Backend,
    BackendUnavailableError,
    Bootstrap,
    Deadline,
    HeaderMismatch,
    LinkLost,
    Transfer,
    Transport,
)
from manyhands_simulated.plugin import SimulatedConfig

__all__ = ["SimulatedBackend", "SimulatedTransport"]


class _Message(Transfer):
    """One end of a message: the sender's or the receiver's."""

    __slots__ = ("bell", "failure", "header", "payload", "peer")

    def __init__(self, peer: int, header: bytes, payload: memoryview, bell: threading.Condition) -> None:
        self.peer: int = peer
        self.header: bytes = header
        self.payload: memoryview = payload
        self.bell: threading.Condition = bell
        self.done: bool = False
        self.moved: int = 0
        self.failure: HeaderMismatch | None = None

    def finish(self) -> None:
        with self.bell:
            self.moved = HEADER_BYTES + len(self.payload)
            self.done = True
            self.bell.notify_all()

    def fail(self, header: bytes) -> None:
        with self.bell:
            self.failure = HeaderMismatch(self.peer, header)
            self.bell.notify_all()


class _Pipe:
    """The messages from one rank to another on one channel: a queue of those whose other end has not come."""

    def __init__(self, eager_bytes: int) -> None:
        self._lock = threading.Lock()
        self._sent: deque[_Message] = deque()
        self._awaited: deque[_Message] = deque()
        self._eager_bytes = eager_bytes

    def send(self, message: _Message) -> None:
        with self._lock:
            if self._awaited:
                _deliver(message, self._awaited.popleft())
                return
            if len(message.payload) <= self._eager_bytes:
                self._sent.append(_Message(message.peer, message.header, memoryview(bytes(message.payload)), message.bell))
                message.finish()
            else:
                self._sent.append(message)

    def receive(self, message: _Message) -> None:
        with self._lock:
            if self._sent:
                _deliver(self._sent.popleft(), message)
            else:
                self._awaited.append(message)


def _deliver(outgoing: _Message, incoming: _Message) -> None:
    if outgoing.header != incoming.header or len(outgoing.payload) != len(incoming.payload):
        incoming.fail(outgoing.header)
        return
    incoming.payload[:] = outgoing.payload
    outgoing.finish()
    incoming.finish()


class _Pipes:
    """All pipes of a world, made when first used."""

    def __init__(self) -> None:
        self._pipes: dict[tuple[int, int, int], _Pipe] = {}

    def get(self, channel: int, source: int, dest: int, eager_bytes: int) -> _Pipe:
        key = (channel, source, dest)
        return self._pipes.get(key) or self._pipes.setdefault(key, _Pipe(eager_bytes))

    def drop(self, channel: int) -> None:
        for key in [key for key in list(self._pipes) if key[0] == channel]:
            self._pipes.pop(key, None)


class SimulatedBackend(Backend):
    """Pipes to the other threads.

    Parameters
    ----------
    bootstrap
        Who this rank is.

    Raises
    ------
    BackendUnavailableError
        The ranks are processes, not threads.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        if bootstrap.shared is None:
            raise BackendUnavailableError(
                "the ranks of the simulated backend are threads of one process: start them with `manyhands run --backend simulated` or "
                "manyhands_simulated.run(), or choose another backend for ranks that are processes"
            )
        self._config = cast("SimulatedConfig", bootstrap.config)
        self.rank: int = bootstrap.rank
        # A world may make several groups, one after the other; each has pipes of its own, by a name that rank 0 draws.
        token = bootstrap.exchange("simulated", secrets.token_bytes(8))[0]
        self._pipes: _Pipes = bootstrap.shared.setdefault(f"simulated {token.hex()}", _Pipes())
        self._bells: set[threading.Condition] = set()
        self.ended: str = ""

    def open_transport(self, channel: int) -> SimulatedTransport:
        """Return the transport of a channel."""
        return SimulatedTransport(self, channel)

    def pipe(self, channel: int, source: int, dest: int) -> _Pipe:
        """Return the pipe of one direction between two ranks."""
        return self._pipes.get(channel, source, dest, self._config.eager_bytes)

    def close_channel(self, channel: int, bell: threading.Condition) -> None:
        """Forget the pipes of a channel that no rank uses any more."""
        self._pipes.drop(channel)
        self._bells.discard(bell)

    def add_bell(self, bell: threading.Condition) -> None:
        """Ring ``bell`` when the backend ends."""
        self._bells.add(bell)

    def abort(self) -> None:
        """Wake every thread that waits."""
        self._end("the job was aborted")

    def close(self) -> None:
        """End every transport."""
        self._end("the backend was closed")

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        for bell in list(self._bells):
            with bell:
                bell.notify_all()


class SimulatedTransport(Transport):
    """Messages of one channel."""

    def __init__(self, backend: SimulatedBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self._bell = threading.Condition()
        backend.add_bell(self._bell)

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Nothing to do: pipes are made when used."""

    def close(self) -> None:
        """Forget this channel."""
        self._backend.close_channel(self._channel, self._bell)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        message = _Message(peer, header, payload, self._bell)
        self._backend.pipe(self._channel, self._backend.rank, peer).send(message)
        return message

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        message = _Message(peer, header, payload, self._bell)
        self._backend.pipe(self._channel, peer, self._backend.rank).receive(message)
        return message

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait until another thread brings or takes a message."""
        messages = cast("Sequence[_Message]", transfers)
        with self._bell:
            while True:
                for message in messages:
                    if message.failure is not None:
                        raise message.failure
                if any(message.done for message in messages):
                    return
                if self._backend.ended:
                    raise LinkLost(messages[0].peer, self._backend.ended)
                remaining = deadline.at - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError("the deadline passed")
                self._bell.wait(remaining)
