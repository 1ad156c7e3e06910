"""A transport that serves two ends of core: barriers, and the other collectives that go the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.api import Deadline, Mailbox, Sink, Transfer, Transport

__all__ = ["SharedTransport"]


class SharedTransport(Transport):
    """A transport that is asked for each mailbox once, and closed once.

    Parameters
    ----------
    transport
        What moves the bytes.
    on_close
        Called when it is closed.
    """

    def __init__(self, transport: Transport, on_close: Callable[[], object]) -> None:
        self._transport = transport
        self._on_close = on_close
        self._boxes: dict[int, Mailbox | None] = {}
        self._closed = False
        self.streams: bool = transport.streams

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect."""
        self._transport.connect(peers, deadline)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        return self._transport.send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        return self._transport.recv(peer, header, payload)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive in parts."""
        return self._transport.consume(peer, header, nbytes, sink)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait."""
        self._transport.wait(transfers, deadline)

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return the mailbox of a peer, the same each time."""
        if peer not in self._boxes:
            self._boxes[peer] = self._transport.mailbox(peer)
        return self._boxes[peer]

    def close(self) -> None:
        """Close the transport; both ends close together."""
        if not self._closed:
            self._closed = True
            self._on_close()
            self._transport.close()
