"""The ucx backend: one worker of UCX for each rank, and tags that tell channels and senders apart.

The ranks trade the addresses of their workers, and a random key, through the exchange of oneaccord, which is authenticated. A tag is
derived from that key: a stranger that connects to UCX knows no tag that any rank waits for.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from oneaccord.api import (
    HEADER_BYTES,
    Backend,
    Bootstrap,
    Deadline,
    LibraryMessage,
    LibraryTransport,
    Transfer,
    compare_settings,
    read_cards,
    write_card,
)
from oneaccord_ucx import library
from oneaccord_ucx.config import UcxConfig
from oneaccord_ucx.devices import devices_for
from oneaccord_ucx.library import IN_PROGRESS
from oneaccord_ucx.worker import Worker

__all__ = ["UcxBackend", "UcxTransport"]

_WHOLE_TAG = (1 << 64) - 1


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others of itself."""

    settings: dict[str, str]
    """What must be alike on all ranks."""
    address: bytes
    key: bytes


class UcxBackend(Backend):
    """UCX between the ranks of a job.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.

    Raises
    ------
    BackendUnavailableError
        UCX cannot be loaded, or has none of the transports or devices.
    ConfigError
        The ranks have different settings or versions of UCX, a variable has a wrong value, or no interface has the host's address.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, UcxConfig)
        self.rank: int = bootstrap.rank
        ucp = library.load(config.library)
        self.worker: Worker = Worker(
            ucp, config, config.devices or devices_for(bootstrap.host), self.rank, bootstrap.world_size
        )
        try:
            settings = {
                "transports": ",".join(config.transports),
                "errors": "peer" if config.notices_lost_peers else "none",
                "library": ".".join(map(str, ucp.version[:2])),
            }
            mine = _Card(settings, self.worker.address, secrets.token_bytes(32))
            cards = read_cards(bootstrap.exchange("ucx", write_card(mine)), _Card)
            compare_settings("ucx", [card.settings for card in cards], {"library": "the version of UCX"})
        except BaseException:
            self.worker.close()
            raise
        self._addresses = [card.address for card in cards]
        self._key = cards[0].key

    def open_transport(self, channel: int) -> UcxTransport:
        """Return the transport of a channel."""
        return UcxTransport(self, channel)

    def abort(self) -> None:
        """Wake every thread that waits."""
        self.worker.end("the job was aborted")

    def close(self) -> None:
        """Close the connections."""
        self.worker.close()

    def connect(self, peer: int) -> None:
        """Make an endpoint to ``peer`` if there is none yet."""
        self.worker.connect(peer, self._addresses[peer])

    def tag(self, channel: int, source: int, dest: int) -> int:
        """Return the tag of a channel's messages from one rank to another: 64 bits that only the ranks of this job know."""
        what = b"%d %d %d" % (channel, source, dest)
        return int.from_bytes(hashlib.blake2b(what, key=self._key, digest_size=8).digest(), "little")


class UcxTransport(LibraryTransport):
    """Messages of one channel. UCX keeps the order of messages with one tag."""

    short_bytes: ClassVar[int] = 16384 - HEADER_BYTES

    def __init__(self, backend: UcxBackend, channel: int) -> None:
        super().__init__(backend.worker)
        self._backend = backend
        self._worker = backend.worker
        self._channel = channel
        self._to: dict[int, int] = {}
        self._from: dict[int, tuple[int, ctypes.Array[ctypes.c_char]]] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Make the endpoints; UCX connects them in the background."""
        rank, channel = self._backend.rank, self._channel
        for peer in peers:
            self._backend.connect(peer)
            if peer in self._to:
                continue
            self._to[peer] = self._backend.tag(channel, rank, peer)
            # A peer has one unfinished message at most, so that the memory for its beginning may be used again.
            self._from[peer] = (
                self._backend.tag(channel, peer, rank),
                ctypes.create_string_buffer(HEADER_BYTES + self.short_bytes),
            )

    def start_send(self, peer: int, memory: bytes | memoryview) -> int | None:
        """Start to send. Under the worker's lock."""
        worker = self._worker
        where = memory if isinstance(memory, bytes) else _address(memory)
        endpoint, tag = worker.endpoint(peer), self._to[peer]
        return worker.began(worker.ucp.tag_send_nbx(endpoint, where, len(memory), tag, worker.request), peer)

    def start_receive(self, peer: int, memory: Any) -> int | None:
        """Start to receive. Under the worker's lock."""
        worker, (tag, first) = self._worker, self._from[peer]
        where = ctypes.addressof(first) if memory is first else _address(memory)
        return worker.began(worker.ucp.tag_recv_nbx(worker.handle, where, len(memory), tag, _WHOLE_TAG, worker.request), peer)

    def test(self, request: int, peer: int) -> bool:
        """Return whether a request is done. Under the worker's lock."""
        status = self._worker.test(request)
        if status == IN_PROGRESS:
            return False
        self._worker.must_be_well(status, peer)
        return True

    def room(self, peer: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory for the beginnings of a peer's messages."""
        return self._from[peer][1]

    def send(self, peer: int, header: bytes, payload: memoryview) -> LibraryMessage:
        """Start to send."""
        with self._worker.lock:
            return super().send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> LibraryMessage:
        """Start to receive."""
        with self._worker.lock:
            return super().recv(peer, header, payload)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Let UCX work until one is done."""
        self._worker.wait(cast("Sequence[LibraryMessage]", transfers), deadline)  # made by send and recv


def _address(memory: memoryview) -> int:
    """Return where bytes lie, which may be read-only."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address
