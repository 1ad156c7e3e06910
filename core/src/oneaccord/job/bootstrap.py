"""The bootstrap of a backend's factory, and the backends of which it is composed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from oneaccord.common.native import native
from oneaccord.config import Resolved
from oneaccord.config.plugins import PluginManager
from oneaccord.contract.backend import Backend, BackendSpec, Bootstrap, Damaged, LinkLost
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Runtime
from oneaccord.contract.seal import Seals
from oneaccord.control.connection import Control
from oneaccord.errors import ConfigError
from oneaccord.net.network import Address
from oneaccord.net.proven import ProvenSocket

__all__ = ["Maker"]

_FACTORY_GRACE_S = 6.0
"""The extra time for an overdue factory to give its reason: its own waits have the same deadline.

If a rank with the store is stopped, the others need some two seconds more until they have learned that from its successor.
"""


class Place(Protocol):
    """The base for a backend: a job, as far as backends need to know it."""

    rank: int
    world_size: int
    control: Control
    hosts: tuple[int, ...]
    runtime: Runtime

    @property
    def local_rank(self) -> int:
        """Which of the ranks of its host this one is."""

    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None], whom: str) -> Address:
        """Listen on a free port for ranks of this job that dial ``whom``."""

    def is_from(self, sock: socket.socket, rank: int) -> bool:
        """Return whether a connection that came may be a rank's."""

    def dial(
        self, peer: int, address: Address, hello: bytes, deadline: Deadline, whom: str, rank: int | None = None
    ) -> socket.socket:
        """Connect to a ``rank`` of this job that listens as ``whom``; to the backend that dials it is ``peer``."""


class Maker(msgspec.Struct, frozen=True):
    """Makes the backend of a job, and those that it is composed of."""

    job: Place
    resolved: Resolved
    plugins: PluginManager
    shared: dict[str, Any] | None
    deadline: Deadline

    def make(self, spec: BackendSpec, names: tuple[str, ...], ranks: tuple[int, ...]) -> Backend:
        """Make a backend for some ranks; ``names`` are those of the backends that it is a part of, and its own."""
        security = self.resolved.settings.security
        for key, wanted, is_able in (("checksum", security.checksum, spec.checksum), ("tls", security.tls, spec.tls)):
            if wanted and not is_able:
                raise ConfigError(
                    f"security.{key} is set, and the backend {spec.name!r} cannot {'seal' if key == 'checksum' else 'encrypt'} its messages: choose "
                    f"tcp, shm, or a hybrid of them, or leave security.{key} out",
                    key=f"security.{key}",
                    value=str(wanted),
                )
        bootstrap = _JobBootstrap(self, self.resolved.backend_config(spec.name), names, ranks)
        try:
            # A part is closed before the backend that it is a part of, which is not to blame.
            return self.plugins.create(spec, bootstrap, _FACTORY_GRACE_S / len(names))
        except (LinkLost, Damaged) as failure:  # a part for some of the ranks numbers them in its own way
            if len(ranks) == self.job.world_size:
                raise
            raise type(failure)(ranks[failure.peer], failure.reason) from None

    def find(self, name: str, within: tuple[str, ...]) -> BackendSpec:
        """Describe the backend that will be a part of others."""
        return self.resolved.runnable(name, within)


class _JobBootstrap(Bootstrap):
    """The bootstrap that a backend's factory gets from a job."""

    def __init__(self, maker: Maker, config: object, names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        self._maker = maker
        self._job = job = maker.job
        self._names = names
        self._ranks = ranks
        self.rank = ranks.index(job.rank)
        self.world_size = len(ranks)
        self.config = config
        self.host = job.control.host
        self.deadline = maker.deadline
        self.shared = maker.shared
        self.hosts = tuple(job.hosts[rank] for rank in ranks)
        self.local_rank = job.local_rank
        self.runtime = job.runtime
        self.native = native() if maker.resolved.settings.native else None

    def describe(self, name: str) -> BackendSpec:
        return self._maker.find(name, self._names)

    def part(self, name: str, ranks: Sequence[int] | None = None) -> Backend:
        spec = self.describe(name)
        chosen = self._ranks if ranks is None else tuple(self._ranks[rank] for rank in ranks)
        try:
            return self._maker.make(spec, (*self._names, name), chosen)
        except Exception as error:
            if len(chosen) < self._job.world_size:
                error.add_note(f"{name!r} numbers from 0 the ranks that it is for: {', '.join(map(str, chosen))}")
            raise

    def exchange(self, name: str, card: bytes) -> list[bytes]:
        # Each part has its own exchanges, under any names, and so have the ranks of each host.
        whose = [*self._names[1:], name]
        members = None
        if len(self._ranks) < self._job.world_size:
            whose.insert(-1, f"from rank {self._ranks[0]} on")
            members = self._ranks
        return self._job.control.exchange(", ".join(whose), card, self.deadline, members)[0]

    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None]) -> Address:
        return self._job.listen(host, accept, self._whom(self.rank))

    def dial(self, peer: int, address: Address, hello: bytes, deadline: Deadline) -> socket.socket:
        return self._job.dial(peer, address, hello, deadline, self._whom(peer), self._ranks[peer])

    def is_from(self, sock: socket.socket, peer: int) -> bool:
        return 0 <= peer < self.world_size and self._job.is_from(sock, self._ranks[peer])

    def _whom(self, rank: int) -> str:
        """Return the other end of a connection: a rank of the world, and there the part, which numbers ranks in its own way."""
        part = "" if len(self._ranks) == self._job.world_size else f" for ranks {', '.join(map(str, self._ranks))}"
        return f"rank {self._ranks[rank]} ({' in '.join(self._names[::-1])}{part})"

    def seals(self, sock: socket.socket) -> Seals | None:
        if not self._maker.resolved.settings.security.checksum:
            return None
        assert isinstance(sock, ProvenSocket)
        return sock.seals
