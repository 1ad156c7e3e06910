"""Which links a message takes, for many pairs of ranks at once.

The links of a network are numbered so that a rotation of all ranks by a *period* of the network moves links as it moves ranks.
So a schedule that is the same on all ranks, rotated, need be run for the ranks of one period alone (`program`): links that such a
rotation takes to each other then get one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import ConfigError
from oneaccord.schedule.simulation.network import Level, Network

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["Kind", "Routes", "Wiring", "cube"]


@dataclass(frozen=True, slots=True)
class Routes:
    """The ways of some messages.

    Attributes
    ----------
    links
        int64, shape (messages, longest path): the links of each message in the order of its path, -1 after the last one.
    kinds
        int64, same shape: the kind of each link, an index into `Wiring.kinds`.
    latency_s, gap_s
        float64: the sum over all levels on the way.
    bandwidth
        float64: the least on the way, bytes per second.
    """

    links: Ints
    kinds: Ints
    latency_s: Floats
    gap_s: Floats
    bandwidth: Floats


@dataclass(frozen=True, slots=True)
class Kind:
    """Links that are alike: their level, and how many there are."""

    level: Level
    count: int


def cube(hosts: int) -> tuple[int, int, int]:
    """Return three factors of ``hosts``, as near to each other as can be, the largest last."""
    best = (1, 1, hosts)
    for x in range(1, round(hosts ** (1 / 3)) + 1):
        if hosts % x:
            continue
        for y in range(x, int((hosts // x) ** 0.5) + 1):
            if hosts // x % y == 0:
                best = min(best, (x, y, hosts // x // y), key=sum)
    return best


class Wiring:
    """The links of a network for one world.

    Parameters
    ----------
    network, size
        The network and the number of ranks.

    Attributes
    ----------
    period
        A rotation of all ranks by this number changes nothing; ``size`` if there is no smaller one.
    mirror_period
        Nor does exchanging each rank with the one whose number is ``^`` a multiple of this; ``size`` if there is none.
    kinds
        The kinds of links that messages share.

    Raises
    ------
    ConfigError
        The dimensions of a torus do not fit the number of hosts.
    """

    def __init__(self, network: Network, size: int) -> None:
        self.network = network
        self.size = size
        self._per_host = network.neighbours(size)
        self.hosts: int = -(-size // self._per_host)
        self._dimensions = self._torus_dimensions()
        self._uplinks = (network.hosts_per_leaf or 1) // (network.oversubscription or 1)
        self._leaves = -(-self.hosts // (network.hosts_per_leaf or 1))
        self.period: int = self._find_period()
        self.mirror_period: int = self._find_mirror_period()
        self.kinds: tuple[Kind, ...] = self._find_kinds()

    def routes(self, source: Ints, target: Ints, period: int) -> Routes:
        """Return the ways from ranks to ranks; ``period`` is a multiple of `period`, and links are numbered within it."""
        hosts = max(1, period // self._per_host) if period < self.size else self.hosts
        start, stop = source // self._per_host, target // self._per_host
        apart = start != stop
        columns: list[tuple[Ints, Any]] = []
        levels: list[tuple[Any, Level | None]]
        match self.network.topology:
            case "wires":
                levels = [(~apart, self.network.host or self.network.wire), (apart, self.network.wire)]
            case "bus":
                columns = [(np.zeros_like(source), 0)]
                levels = [(~apart, self.network.host), (~apart, self.network.bus)]
            case "fat_tree":
                columns, far = self._through_tree(start, stop, hosts)
                nic, spine = self.network.nic, self.network.spine
                levels = [(~apart, self.network.host), (apart, nic), (apart, nic), (far, spine), (far, spine)]
            case "torus":
                columns = self._through_torus(start, stop, hosts)
                levels = [(~apart, self.network.host), *((links >= 0, self.network.link) for links, _ in columns)]
        latency, gap = np.zeros(len(source)), np.zeros(len(source))
        bandwidth = np.full(len(source), np.inf)
        for used, level in levels:
            assert level is not None
            latency[used] += level.latency_s
            gap[used] += level.gap
            bandwidth[used] = np.minimum(bandwidth[used], level.bandwidth_bytes_per_s)
        links = np.stack([links for links, _ in columns], axis=1) if columns else np.empty((len(source), 0), np.int64)
        kinds = np.stack([np.broadcast_to(kind, len(source)) for _, kind in columns], axis=1) if columns else links
        return Routes(links, kinds, latency, gap, bandwidth)

    def _torus_dimensions(self) -> tuple[int, int, int]:
        if self.network.topology != "torus":
            return (1, 1, 1)
        given = self.network.dimensions
        if given is None:
            return cube(self.hosts)
        if given[0] * given[1] * given[2] != self.hosts:
            raise ConfigError(
                f"dimensions = {list(given)} are {given[0] * given[1] * given[2]} hosts, and {self.size} ranks, {self._per_host} on "
                f"each host, need {self.hosts} hosts; leave dimensions out, or give three factors of {self.hosts}",
                key="dimensions",
                value=given,
            )
        return given

    def _find_period(self) -> int:
        if self.network.topology == "bus":
            return self.size  # all messages share one link, which no rotation moves
        if self.network.topology == "wires" and (self._per_host == 1 or self.network.host in {None, self.network.wire}):
            return 1
        if self.hosts == 1:
            return 1
        if self.size % self._per_host:
            return self.size
        match self.network.topology:
            case "wires":
                return self._per_host
            case "torus":
                return self._per_host * self._dimensions[0] * self._dimensions[1]
            case _:
                below = self.network.hosts_per_leaf or 1
                if self.hosts <= below:
                    return self._per_host
                return self.size if self.hosts % below else self._per_host * below

    def _find_mirror_period(self) -> int:
        # Exchanging hosts keeps fat trees as they are, if leaves are powers of two, and turns the ways through a torus around.
        bits = (self.size, self._per_host, self.network.hosts_per_leaf or 1)
        if any(count & (count - 1) for count in bits) or (self.network.topology == "torus" and self.hosts > 1):
            return self.size
        return self._find_period()

    def _find_kinds(self) -> tuple[Kind, ...]:
        match self.network.topology:
            case "wires":
                return ()
            case "bus":
                assert self.network.bus is not None
                return (Kind(self.network.bus, 1),)
            case "fat_tree":
                assert self.network.nic is not None
                assert self.network.spine is not None
                nic, spine = Kind(self.network.nic, self.hosts), Kind(self.network.spine, self._leaves * self._uplinks)
                return (nic, spine, spine, nic)
            case "torus":
                assert self.network.link is not None
                return (Kind(self.network.link, self.hosts),) * 6

    def _through_tree(self, start: Ints, stop: Ints, hosts: int) -> tuple[list[tuple[Ints, Any]], Any]:
        """Return the four links of each way, and which ways go over a spine switch."""
        below = self.network.hosts_per_leaf or 1
        apart, far = start != stop, start // below != stop // below
        leaves = max(1, -(-hosts // below))
        # The destination host selects the spine, as InfiniBand's routing in fat trees does (D-mod-k).
        spine = stop % self._uplinks
        up, down = start // below % leaves, stop // below % leaves
        first = 2 * hosts
        links = (
            np.where(apart, start % hosts * 2, -1),
            np.where(far, first + (up * self._uplinks + spine) * 2, -1),
            np.where(far, first + (down * self._uplinks + spine) * 2 + 1, -1),
            np.where(apart, stop % hosts * 2 + 1, -1),
        )
        return [(column, kind) for kind, column in enumerate(links)], far

    def _through_torus(self, start: Ints, stop: Ints, hosts: int) -> list[tuple[Ints, Any]]:
        """Return the links of each path: along x, then y, then z, in the shorter direction, and forward if both are equally long."""
        columns: list[tuple[Ints, Any]] = []
        position, stride = start.copy(), 1
        for axis, length in enumerate(self._dimensions):
            at, wanted = position // stride % length, stop // stride % length
            forward = (wanted - at) % length
            ahead = forward <= length - forward
            hops = np.where(ahead, forward, length - forward)
            turn, kind = np.where(ahead, 1, -1), axis * 2 + np.where(ahead, 0, 1)
            for hop in range(int(hops.max(initial=0))):
                moving = hop < hops
                columns.append((np.where(moving, position % hosts * 6 + kind, -1), kind))
                following = (at + turn) % length
                position = np.where(moving, position + (following - at) * stride, position)
                at = np.where(moving, following, at)
            stride *= length
        return columns
