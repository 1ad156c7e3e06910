"""The ucx backend: one worker of UCX for each rank, and tags that tell channels and senders apart.

The ranks trade the addresses of their workers, and a random key, through the exchange of manyhands, which is authenticated. A tag is
derived from that key: a stranger who connects to UCX knows no tag that anybody waits for.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from manyhands.api import Backend, Bootstrap, ConfigError, Deadline, Transfer, Transport, read_cards, write_card
from manyhands_ucx import library
from manyhands_ucx.config import UcxConfig
from manyhands_ucx.devices import devices_for
from manyhands_ucx.transfers import FIRST_BYTES, Moving, Receiving, Sending
from manyhands_ucx.worker import Worker

__all__ = ["UcxBackend", "UcxTransport"]


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
        Who this rank is, and how it finds the others.

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
        self.worker: Worker = Worker(ucp, config, config.devices or devices_for(bootstrap.host))
        try:
            settings = {
                "transports": ",".join(config.transports),
                "errors": "peer" if config.notices_lost_peers else "none",
                "library": ".".join(map(str, ucp.version[:2])),
            }
            mine = _Card(settings, self.worker.address, secrets.token_bytes(32))
            cards = read_cards(bootstrap.exchange("ucx", write_card(mine)), _Card)
            _compare(cards)
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
        """Make an endpoint to ``peer``, where there is none yet."""
        self.worker.connect(peer, self._addresses[peer])

    def tag(self, channel: int, source: int, dest: int) -> int:
        """Return the tag of a channel's messages from one rank to another: 64 bits that only the ranks of this job know."""
        what = b"%d %d %d" % (channel, source, dest)
        return int.from_bytes(hashlib.blake2b(what, key=self._key, digest_size=8).digest(), "little")


class UcxTransport(Transport):
    """Messages of one channel."""

    def __init__(self, backend: UcxBackend, channel: int) -> None:
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
            self._from[peer] = (self._backend.tag(channel, peer, rank), ctypes.create_string_buffer(FIRST_BYTES))

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        with self._worker.lock:
            return _begun(Sending(self._worker, peer, self._to[peer], header, payload))

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        tag, first = self._from[peer]
        with self._worker.lock:
            return _begun(Receiving(self._worker, peer, tag, header, payload, first))

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Let UCX work until one is done."""
        self._worker.wait(cast("Sequence[Moving]", transfers), deadline)  # made by send and recv


def _begun(transfer: Moving) -> Moving:
    transfer.advance()
    return transfer


def _compare(cards: Sequence[_Card]) -> None:
    for rank, card in enumerate(cards):
        for key, value in card.settings.items():
            if value != cards[0].settings.get(key):
                name = "the version of UCX" if key == "library" else f"backends.ucx.{key}"
                raise ConfigError(
                    f"{name} is {cards[0].settings.get(key)} on rank 0 and {value} on rank {rank}: all ranks need the same",
                    key=f"backends.ucx.{key}",
                    value=value,
                )
