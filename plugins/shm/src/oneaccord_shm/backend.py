"""The shm backend: each rank's memory, and the common part of all channels of a rank; the messages of one channel, and how a rank waits for them."""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

from oneaccord.api import Backend, Bootstrap, ConfigError, Deadline, LinkLost, Mailbox, Transfer, Transport, processors
from oneaccord_shm import kernel
from oneaccord_shm.bell import Bell, Ringer
from oneaccord_shm.heap import Heap
from oneaccord_shm.lender import can_lend, withdraw
from oneaccord_shm.link import Link, Moving, PythonLink, compiled_link
from oneaccord_shm.meeting import meet
from oneaccord_shm.order import ORDERED
from oneaccord_shm.plugin import ShmConfig
from oneaccord_shm.segment import Geometry, least_segment_bytes
from oneaccord_shm.transfers import Consuming, Receiving, Sending, SendingInPlace

__all__ = ["ShmBackend", "ShmTransport"]

_TRIES, _TRIES_CROWDED = 60, 2
"""The number of looks before giving way; if ranks outnumber processors, the awaited rank may need this one."""
_IN_PLACE_BYTES = 64 << 10
"""Shorter messages are copied: to wait until the peer has read them would take longer."""
_LENT_REDUCED_BYTES = 16 << 20
"""Shorter messages that the peer may reduce pass through slots: it reduces out of these, and they are in its cache."""


def _room(ranks: int) -> int:
    """Return how many bytes a rank shares for arrays by default.

    Half of the memory of this host, which takes addresses alone until it is used. If addresses are limited (``ulimit -v``), half of them are for the
    memory of all ranks, each of which this rank may map.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return memory if limit == resource.RLIM_INFINITY else min(memory, limit // 2 // ranks)


class ShmBackend(Backend):
    """Memory that the ranks of one host share.

    Parameters
    ----------
    bootstrap
        This rank, and its way to reach the others.

    Attributes
    ----------
    ended
        Why no more messages come; empty as long as they do.
    fenced, spin_s, tries
        As `link.Shared` has it.
    bell
        The place where the threads of this rank sleep.

    Raises
    ------
    ConfigError
        ``segment_bytes`` is too little for so many ranks.
    BackendUnavailableError
        The ranks cannot share memory: they are on several hosts, in different containers, or of different users; alike on all ranks.
    CommError
        The job ended meanwhile, or another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, ShmConfig)
        self.rank: int = bootstrap.rank
        least = least_segment_bytes(bootstrap.world_size)
        if config.segment_bytes < least:
            raise ConfigError(
                f"backends.shm.segment_bytes is {config.segment_bytes}, and the rings of a rank to {bootstrap.world_size - 1} others "
                f"take at least {least}: raise it, or leave it out",
                key="backends.shm.segment_bytes",
                value=config.segment_bytes,
            )
        heap_bytes = config.heap_bytes or _room(bootstrap.world_size)
        has_barrier = kernel.register_barrier()
        company = meet(bootstrap, config, heap_bytes, has_barrier=has_barrier)
        all_have_barrier = all(card.has_barrier for card in company.cards)
        self._segments = segments = company.segments
        self._lenders = company.lenders
        self._borrowers = company.borrowers
        self._lent_bytes = max(card.lent_bytes for card in company.cards)
        self._links: list[weakref.ref[Link]] = []
        self._geometry = Geometry.of(bootstrap.world_size, min(card.segment_bytes for card in company.cards))
        self.ended: str = ""
        self.fenced: bool = not (ORDERED and all_have_barrier)
        self.spin_s: float = config.spin_us / 1e6
        crowded = bootstrap.world_size > processors()
        self.tries: int = _TRIES_CROWDED if crowded else _TRIES
        # Not another rank's, and not the 0 that is there at the beginning.
        calls = itertools.count(bootstrap.world_size + bootstrap.rank, bootstrap.world_size)
        self.bell: Bell = Bell(segments[self.rank].page(), calls, has_barrier=all_have_barrier)
        self._ringers = [
            self.bell if rank == self.rank else Ringer(segment.page(), calls) for rank, segment in enumerate(segments)
        ]
        self._make_link: type[Link] = PythonLink if bootstrap.native is None else compiled_link(bootstrap.native)
        self._changing = threading.Lock()
        self._heap: Heap | None = None

    def open_transport(self, channel: int) -> ShmTransport:
        """Return the transport of a channel."""
        return ShmTransport(self, channel)

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory that peers read in place."""
        with self._changing:
            if self._heap is None:
                if self.ended:
                    raise MemoryError(f"there is no memory that peers can read in place: {self.ended}")
                self._heap = Heap(self._segments[self.rank])
            heap = self._heap
        return heap.allocate(nbytes)

    def abort(self) -> None:
        """Wake every thread of this rank that waits."""
        self._end("the job was aborted")

    def close(self) -> None:
        """Release all memory; memory that is still in use elsewhere stays until it no longer is."""
        self._end("the backend was closed")
        with self._changing:
            self._heap = None
            self._lenders = []
            for segment in self._segments:
                segment.close()

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        withdraw(self._segments[self.rank].page())
        self.revoke()
        self.bell.ring()

    # The interface for transports.

    def link(self, channel: int, peer: int) -> Link:
        """Map both rings between this rank and ``peer`` on a channel.

        Raises
        ------
        LinkLost
            The backend ended.
        OSError
            This process cannot map more memory.
        """
        with self._changing:
            if self.ended:
                raise LinkLost(peer, self.ended)
            lends = peer in self._borrowers and self._lenders[peer].may_borrow
            link = self._make_link(
                peer,
                self._segments[self.rank].ring(self._geometry, channel, peer),
                self._segments[peer].ring(self._geometry, channel, self.rank),
                self._geometry,
                self._ringers[peer],
                self,
                self._lenders[peer],
                self._lent_bytes if lends else 0,
            )
            self._links = [each for each in self._links if each() is not None] + [weakref.ref(link)]
            return link

    def revoke(self) -> None:
        """Let no peer write any more into memory of this rank: its program may use that again."""
        for each in self._links:
            link = each()
            if link is not None:
                link.revoke()

    def drop_channel(self, channel: int) -> None:
        """Give the memory of a channel back, of which no rank needs anything any more."""
        with self._changing:
            if not self.ended:
                self._segments[self.rank].drop_channel(self._geometry, channel)

    def offset_of(self, payload: memoryview) -> int | None:
        """Return the place of a payload in this rank's heap, None if it is other memory."""
        heap = self._heap
        return None if heap is None else heap.offset_of(payload)


class ShmTransport(Transport):
    """Messages of one channel.

    Parameters
    ----------
    backend
        The backend that owns the memory.
    channel
        Which channel.
    """

    streams = True

    def __init__(self, backend: ShmBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self._connecting = threading.Lock()
        self._links: dict[int, Link] = {}
        self._is_interrupted = False

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Map the memory that is needed for ``peers``; wait for no rank."""
        with self._connecting:
            for peer in peers:
                if peer not in self._links:
                    self._links[peer] = self._backend.link(self._channel, peer)

    def close(self) -> None:
        """Release the memory of this channel; views that core still holds stay readable."""
        with self._connecting:
            self._links = {}
            self._backend.drop_channel(self._channel)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send: the part that fits into the ring's next slot goes at once."""
        link = self._links[peer]
        link.check()
        if len(payload) > max(_IN_PLACE_BYTES, len(link.outgoing[0])):
            # Not a message that fits into a slot: the peer may fetch it as a short message, and such a one is in its slot.
            offset = self._backend.offset_of(payload)
            if offset is not None:
                return SendingInPlace(link, header, payload, offset)
            if (
                link.posted_bytes is not None
                and len(payload) >= max(link.posted_bytes, _LENT_REDUCED_BYTES)
                and can_lend(payload)
            ):
                return SendingInPlace(link, header, payload, None)
        transfer = Sending(link, header, payload)
        transfer.advance()
        return transfer

    def lend(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send: a message that is long enough is copied once, by both ranks."""
        link = self._links[peer]
        link.check()
        if link.posted_bytes is not None and len(payload) > link.posted_bytes:
            offset = self._backend.offset_of(payload)
            if offset is None and can_lend(payload):
                return SendingInPlace(link, header, payload, None)
        return self.send(peer, header, payload)

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
        return cast("Mailbox", self._links[peer])  # which both forms are

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
                backend.revoke()
                raise LinkLost(moving[0].peer, backend.ended)
            if self._is_interrupted:
                self._is_interrupted = False
                raise TimeoutError("the wait was interrupted")
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

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Move what can be moved now."""
        moving = cast("Sequence[Moving]", transfers)
        for transfer in moving:
            transfer.advance()
        if self._backend.ended:
            self._backend.revoke()
            raise LinkLost(moving[0].peer, self._backend.ended)

    def interrupt(self) -> bool:
        """Wake the thread that waits."""
        self._is_interrupted = True
        self._backend.bell.ring()
        return True

    def _look(self, moving: Sequence[Moving]) -> bool:
        """Return whether there is a reason not to sleep."""
        moved = [transfer.advance() for transfer in moving]
        return any(moved) or bool(self._backend.ended) or self._is_interrupted
