"""The hybrid backend: makes the backends that it is composed of, and hands each call to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneaccord.api import Backend, BackendSpec, Bootstrap, ConfigError, Transport, UnsupportedError
from oneaccord_hybrid.config import HybridConfig, Routes
from oneaccord_hybrid.gpus import GPU_BACKEND, agreed
from oneaccord_hybrid.routing import RoutedTransport, Way
from oneaccord_hybrid.wrapping import PollingTransport, SharedTransport

if TYPE_CHECKING:
    from oneaccord.api import DeviceChannel, DeviceMeeting

__all__ = ["HybridBackend"]

_HOST_ROUTES = ("cpu", "intra", "inter", "barrier", "p2p")
"""In the order in which their backends are made; that of cuda comes last, when all others are there."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A backend that was made.

    Attributes
    ----------
    backend
        The backend.
    ranks
        The ranks that it is for, in its order.
    is_virtual
        Whether it lives on a virtual clock.
    """

    backend: Backend
    ranks: Sequence[int]
    is_virtual: bool


class HybridBackend(Backend):
    """Several backends as one.

    Parameters
    ----------
    bootstrap
        This rank, and its way to reach the others.

    Raises
    ------
    BackendUnavailableError, UnknownBackendError
        A backend is not installed, or cannot run here; none is left behind.
    ConfigError
        A backend does not move the memory that it is to move.
    Exception
        The exception of a backend's factory; backends that were made before are closed.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, HybridConfig)
        self._routes: Routes = config.routes
        if config.is_default and not bootstrap.runtime.is_simulated and agreed(bootstrap):
            self._routes = config.routes.model_copy(update={"cuda": GPU_BACKEND})
        self._rank = bootstrap.rank
        self._hosts = bootstrap.hosts
        self._runtime = bootstrap.runtime
        self._parts: dict[str, _Part] = {}
        self._shared: dict[int, SharedTransport] = {}
        memory = {"cpu"} if self._routes.cpu or self._routes.intra else set()
        self.memory: frozenset[str] = frozenset(memory | ({"cuda"} if self._routes.cuda else set()))
        try:
            self._make(bootstrap)
        except BaseException:
            for end in (self.abort, self.close):
                with suppress(Exception):  # what was in the way is raised
                    end()
            raise

    def _make(self, bootstrap: Bootstrap) -> None:
        """Make each backend once, all others before that of cuda; but none before all are known to be there."""
        # A world of one moves no bytes between ranks; on a GPU its calls are launched all the same.
        routes = ("cuda",) if bootstrap.world_size == 1 else (*_HOST_ROUTES, "cuda")
        named = {route: name for route in routes if (name := getattr(self._routes, route))}
        specs = {name: bootstrap.describe(name) for name in dict.fromkeys(named.values())}
        for route, name in named.items():
            _check(route, specs[name])
        for name, spec in specs.items():
            is_virtual = "virtual time" in spec.capabilities  # there is one simulated network, for all ranks
            ranks = self._neighbours() if self._is_for_hosts(name) and not is_virtual else range(bootstrap.world_size)
            self._parts[name] = _Part(bootstrap.part(name, ranks), ranks, is_virtual)

    def _is_for_hosts(self, name: str) -> bool:
        """Return whether a backend serves nothing but the ranks of each host, so that it need not know of others."""
        return [route for route in (*_HOST_ROUTES, "cuda") if getattr(self._routes, route) == name] == ["intra"]

    def _neighbours(self) -> list[int]:
        """Return the ranks of this host, this one among them."""
        return [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self._rank]]

    @property
    def message_memory(self) -> frozenset[str]:
        """The memory that sends and receives move: only the host's, if they have a route of their own."""
        return frozenset({"cpu"}) if self._routes.p2p else self.memory

    def open_transport(self, channel: int) -> Transport:
        """Return the transport of a channel: of the way that its calls go."""
        routes = self._routes
        if channel % 2 and routes.p2p:
            return self._open(routes.p2p, channel)
        if routes.cpu:
            return self._open(routes.cpu, channel)
        if not routes.intra or not routes.inter:
            raise UnsupportedError(
                "backends.hybrid.routes has no route for arrays in host memory: add cpu, or intra and inter, such as "
                f'{{ cpu = "tcp", cuda = "{routes.cuda}" }}'
            )
        if len(set(self._hosts)) == 1:
            return self._open(routes.intra, channel)
        if len(set(self._hosts)) == len(self._hosts) or routes.intra == routes.inter:
            return self._open(routes.inter, channel)
        return self._open_by_place(routes.intra, routes.inter, channel)

    def open_barrier(self, channel: int) -> Transport | None:
        """Return the transport of barriers, if they go another way than the other collectives."""
        name = self._routes.barrier
        if name is None or {name} == {self._routes.cpu or self._routes.intra, self._routes.cpu or self._routes.inter}:
            return None
        return self._open(name, channel)

    def open_device(self, channel: int, meeting: DeviceMeeting) -> DeviceChannel:
        """Return the device channel of the backend of cuda for a group."""
        if self._routes.cuda is None:
            raise UnsupportedError('backends.hybrid.routes has no route for arrays on GPUs: add cuda, such as cuda = "nccl"')
        return self._parts[self._routes.cuda].backend.open_device(channel, meeting)

    def part(self, name: str) -> Backend | None:
        """Return the backend of a name."""
        part = self._parts.get(name)
        return None if part is None else part.backend

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory of the backend for host memory; by place, of that for ranks of one host."""
        part = self._parts.get(self._routes.cpu or self._routes.intra or "")
        return None if part is None else part.backend.allocate(nbytes)

    def abort(self) -> None:
        """Abort every backend."""
        _do_all(part.backend.abort for part in self._parts.values())

    def close(self) -> None:
        """Close every backend, in the reverse order of making them."""
        _do_all(part.backend.close for part in reversed(self._parts.values()))

    def _open(self, name: str, channel: int) -> Transport:
        """Open the transport of a backend for a channel."""
        part = self._parts[name]
        is_shared = channel % 2 == 0 and name == self._routes.barrier and name in (self._routes.intra, self._routes.inter)
        if is_shared and channel in self._shared:
            return self._shared[channel]
        transport = part.backend.open_transport(channel)
        if self._runtime.is_simulated and not part.is_virtual:
            transport = PollingTransport(transport, self._runtime)
        if is_shared:
            transport = self._shared[channel] = SharedTransport(transport, lambda: self._shared.pop(channel, None))
        return transport

    def _open_by_place(self, intra: str, inter: str, channel: int) -> Transport:
        near, far = (
            Way(self._open(name, channel), self._parts[name].ranks, is_virtual=self._parts[name].is_virtual)
            for name in (intra, inter)
        )
        here = self._hosts[self._rank]
        peers = {rank: near if host == here else far for rank, host in enumerate(self._hosts) if rank != self._rank}
        return RoutedTransport((near, far), peers, self._runtime)


def _check(route: str, spec: BackendSpec) -> None:
    """Refuse a backend that does not move the memory of a route."""
    device = "cuda" if route == "cuda" else "cpu"
    if device not in spec.devices:
        where, others = ("on GPUs", "nccl") if device == "cuda" else ("in host memory", "tcp")
        raise ConfigError(
            f'backends.hybrid.routes.{route} is {spec.name!r}, which moves no arrays {where}: name one that does, such as "{others}"',
            key=f"backends.hybrid.routes.{route}",
            value=spec.name,
        )


def _do_all(actions: Iterable[Callable[[], None]]) -> None:
    """Do everything, even if a part fails; raise the first failure at the end."""
    failure: Exception | None = None
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below
            failure = failure or error
    if failure is not None:
        raise failure
