"""The simplest backend that keeps the contract: ranks are threads, and messages are copies in lists. `broken_family` breaks it, one promise at a time."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from oneaccord.api import (
    Backend,
    BackendConfig,
    BackendSpec,
    BackendUnavailableError,
    Bootstrap,
    Deadline,
    HeaderMismatch,
    LinkLost,
    Transfer,
    Transport,
    hookimpl,
)

Message = tuple[bytes, memoryview]


class Inbox:
    """What was sent to one rank, and not yet received; by channel and sender."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.gone: set[int] = set()
        self.aborted = False


class Letter(Transfer):
    """A message that is sent or received."""

    def __init__(self, peer: int, header: bytes, payload: memoryview) -> None:
        self.peer, self.header, self.payload = peer, bytes(header), payload
        self.done, self.moved = False, 0

    def end(self) -> Letter:
        self.moved = len(self.payload)
        self.done = True
        return self


class LoftTransport(Transport):
    def __init__(self, backend: Loft, channel: int) -> None:
        self.backend, self.channel = backend, channel
        self.own = backend.inboxes[backend.rank]

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """All ranks are there since the factory."""

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        self.put(peer, bytes(header), memoryview(bytes(payload)))
        return Letter(peer, header, payload).end()

    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        inbox = self.backend.inboxes[peer]
        with inbox.changed:
            if self.own.aborted:
                raise LinkLost(peer, "this rank has left")
            inbox.messages[self.channel, self.backend.rank].append((header, payload))
            inbox.changed.notify_all()

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        letter = Letter(peer, header, payload)
        with self.own.changed:
            self.take(letter)
        return letter

    def take(self, letter: Letter) -> None:
        """Fill the memory of a receive, if its message is there."""
        waiting = self.own.messages.get((self.channel, letter.peer))
        if waiting and not letter.done:
            header, payload = waiting.popleft()
            if header != letter.header:
                raise HeaderMismatch(letter.peer, header)
            self.fill(letter, payload)
            letter.end()

    def fill(self, letter: Letter, payload: memoryview) -> None:
        letter.payload[:] = payload

    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        with self.own.changed:
            while True:
                if self.own.aborted:
                    raise LinkLost(transfers[0].peer, "this rank has left")
                for letter in transfers:
                    self.take(letter)
                if any(letter.done for letter in transfers):
                    return
                for letter in transfers:
                    if letter.peer in self.own.gone:
                        raise LinkLost(letter.peer, "it has left")
                if deadline.passed():
                    raise TimeoutError
                self.own.changed.wait(deadline.remaining())

    def close(self) -> None:
        for key in [key for key in self.own.messages if key[0] == self.channel]:
            del self.own.messages[key]


class Loft(Backend):
    transport: type[LoftTransport] = LoftTransport

    def __init__(self, bootstrap: Bootstrap) -> None:
        if bootstrap.shared is None:
            raise BackendUnavailableError("its ranks are threads of one process")
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        name = uuid.uuid4().hex
        if self.rank == 0:
            bootstrap.shared[name] = [Inbox() for _ in range(self.world_size)]
        cards = bootstrap.exchange("loft", name.encode())
        self.inboxes: list[Inbox] = bootstrap.shared[cards[0].decode()]

    def open_transport(self, channel: int) -> Transport:
        return self.transport(self, channel)

    def abort(self) -> None:
        own = self.inboxes[self.rank]
        with own.changed:
            own.aborted = True
            own.changed.notify_all()

    def close(self) -> None:
        for inbox in self.inboxes:
            with inbox.changed:
                inbox.gone.add(self.rank)
                inbox.changed.notify_all()


class LoftConfig(BackendConfig):
    """The table ``[backends.loft]``."""

    fault: str = ""


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    return BackendSpec(name="loft", summary="", factory="broken_family:create", config=LoftConfig)
