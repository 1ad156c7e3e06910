"""The shm backend: each rank's memory, and what all channels of a rank have in common."""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial

from manyhands.api import Backend, Bootstrap, ConfigError, LinkLost
from manyhands_shm import kernel
from manyhands_shm.bell import Bell, Ringer
from manyhands_shm.heap import Heap
from manyhands_shm.link import Link
from manyhands_shm.meeting import meet
from manyhands_shm.order import ORDERED
from manyhands_shm.plugin import ShmConfig
from manyhands_shm.segment import Geometry, least_segment_bytes
from manyhands_shm.transport import ShmTransport

__all__ = ["ShmBackend"]

_TRIES, _TRIES_CROWDED = 60, 2
"""How often to look before giving way; where ranks outnumber processors, whoever is waited for may need this one."""


class ShmBackend(Backend):
    """Memory that the ranks of one host share.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.

    Attributes
    ----------
    ended
        Why no more messages come; empty as long as they do.
    fenced, spin_s, tries
        As `link.Shared` has it.
    bell
        Where the threads of this rank sleep.

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
        heap_bytes = config.heap_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        has_barrier = kernel.register_barrier()
        segments, cards = meet(bootstrap, config.segment_bytes, heap_bytes, has_barrier=has_barrier)
        all_have_barrier = all(card.has_barrier for card in cards)
        self._segments = segments
        self._geometry = Geometry.of(bootstrap.world_size, min(card.segment_bytes for card in cards))
        self.ended: str = ""
        self.fenced: bool = not (ORDERED and all_have_barrier)
        self.spin_s: float = config.spin_us / 1e6
        crowded = bootstrap.world_size > len(os.sched_getaffinity(0))
        self.tries: int = _TRIES_CROWDED if crowded else _TRIES
        # No other rank's, and not the 0 that stands there in the beginning.
        calls = itertools.count(bootstrap.world_size + bootstrap.rank, bootstrap.world_size)
        self.bell: Bell = Bell(segments[self.rank].page(), calls, has_barrier=all_have_barrier)
        self._ringers = [
            self.bell if rank == self.rank else Ringer(segment.page(), calls) for rank, segment in enumerate(segments)
        ]
        self._changing = threading.Lock()
        self._heap: Heap | None = None
        self._heaps: dict[int, memoryview] = {}

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
        """Let go of all memory; what is still in use elsewhere stays until it no longer is."""
        self._end("the backend was closed")
        with self._changing:
            self._heap = None
            self._heaps.clear()
            for segment in self._segments:
                segment.close()

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.bell.ring()

    # What transports need.

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
            return Link(
                peer,
                self._segments[self.rank].ring(self._geometry, channel, peer),
                self._segments[peer].ring(self._geometry, channel, self.rank),
                self._geometry,
                self._ringers[peer],
                self,
                partial(self._heap_of, peer),
            )

    def drop_channel(self, channel: int) -> None:
        """Give the memory of a channel back, of which no rank needs anything any more."""
        with self._changing:
            if not self.ended:
                self._segments[self.rank].drop_channel(self._geometry, channel)

    def offset_of(self, payload: memoryview) -> int | None:
        """Return where a payload stands in this rank's heap, None where it is other memory."""
        heap = self._heap
        return None if heap is None else heap.offset_of(payload)

    def _heap_of(self, peer: int) -> memoryview:
        with self._changing:
            heap = self._heaps.get(peer)
            if heap is None:
                heap = self._heaps[peer] = self._segments[peer].heap()
            return heap
