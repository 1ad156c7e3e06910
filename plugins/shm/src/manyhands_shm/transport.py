"""The messages of one channel, and how a rank waits for them: look, give way, sleep."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from manyhands.api import Deadline, LinkLost, Mailbox, Transfer, Transport
from manyhands_shm.link import Link, Moving
from manyhands_shm.transfers import Consuming, Receiving, Sending, SendingInPlace

if TYPE_CHECKING:
    from manyhands_shm.backend import ShmBackend

__all__ = ["ShmTransport"]

_IN_PLACE_BYTES = 64 << 10
"""What is shorter is copied: to wait until the peer has read it would take longer."""


class ShmTransport(Transport):
    """Messages of one channel.

    Parameters
    ----------
    backend
        Where the memory is.
    channel
        Which channel.
    """

    streams = True

    def __init__(self, backend: ShmBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self._connecting = threading.Lock()
        self._links: dict[int, Link] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Map what is needed to talk to ``peers``; nobody is waited for."""
        with self._connecting:
            for peer in peers:
                if peer not in self._links:
                    self._links[peer] = self._backend.link(self._channel, peer)

    def close(self) -> None:
        """Give the memory of this channel back; what core still holds of it stays readable."""
        with self._connecting:
            self._links = {}
            self._backend.drop_channel(self._channel)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send: what fits into the ring's next slot goes at once."""
        link = self._links[peer]
        link.check()
        if len(payload) > max(_IN_PLACE_BYTES, len(link.outgoing[0])):
            # Not what fits into a slot: the peer may fetch that as a short message, and such a one lies in its slot.
            offset = self._backend.offset_of(payload)
            if offset is not None:
                return SendingInPlace(link, header, payload, offset)
        transfer = Sending(link, header, payload)
        transfer.advance()
        return transfer

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive, with one look at once."""
        link = self._links[peer]
        link.check()
        transfer = Receiving(link, header, payload)
        transfer.advance()
        return transfer

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Callable[[memoryview, int], None]) -> Transfer:
        """Start to receive, with one look at once."""
        link = self._links[peer]
        link.check()
        transfer = Consuming(link, header, nbytes, sink)
        transfer.advance()
        return transfer

    def mailbox(self, peer: int) -> Mailbox:
        """Return the slots themselves."""
        return self._links[peer]

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Look again and again for a moment, giving way to others, then sleep in the kernel until a peer has done something."""
        moving = cast("Sequence[Moving]", transfers)  # made by send, recv, consume, post and fetch
        backend = self._backend
        tries = backend.tries
        until = 0.0
        while True:
            moved = False
            for transfer in moving:
                if transfer.advance():
                    moved = True
            for transfer in moving:
                if transfer.done:
                    return
            if backend.ended:
                raise LinkLost(moving[0].peer, backend.ended)
            if tries and not moved:
                tries -= 1
                continue
            now = time.monotonic()
            if moved:
                tries, until = backend.tries, 0.0
            elif not until:
                until = now + backend.spin_s
            if now >= deadline.at:
                raise TimeoutError("the deadline passed")
            if not moved:
                if now < until:
                    os.sched_yield()
                else:
                    backend.bell.sleep(lambda: self._look(moving), deadline.at - now)
                    if any(transfer.done for transfer in moving):
                        return

    def _look(self, moving: Sequence[Moving]) -> bool:
        """Tell whether there is a reason not to sleep."""
        moved = [transfer.advance() for transfer in moving]
        return any(moved) or bool(self._backend.ended)
