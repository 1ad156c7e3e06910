"""Paths of single messages: for a simulation in which programs send one message after the other.

The ways and the times are those of the virtual clock (`clock`), for one pair of ranks at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneaccord.errors import InvalidRankError, InvalidWorldSizeError
from oneaccord.schedule.simulation.network import Network
from oneaccord.schedule.simulation.routes import Wiring

__all__ = ["Path", "Paths"]

_BLOCK = 32
"""So many neighbouring hosts are routed together: NumPy takes little longer for them than for one."""

_KEPT = 1 << 17
"""The most ways between hosts that are kept, about 40 MB."""


@dataclass(frozen=True, slots=True)
class Path:
    """The way from one rank to another: the queues that a message passes in order, each first come, first served.

    A message comes to a queue when the one before begins to serve it. It ends, for sender and receiver, `flight_s` after the last
    queue began to serve it.

    Attributes
    ----------
    queues
        Their numbers: the sending port of the source, the links on the way, the receiving port of the destination.
    gaps_s, bandwidths_bytes_per_s
        For each queue: it is busy with a message for the gap and for bytes / bandwidth.
    latency_s
        The sum of the latencies on the way.
    between_hosts
        Whether the ranks live on different hosts.
    """

    queues: tuple[int, ...]
    gaps_s: tuple[float, ...]
    bandwidths_bytes_per_s: tuple[float, ...]
    latency_s: float
    between_hosts: bool

    def busy_s(self, nbytes: float) -> tuple[float, ...]:
        """Return for how long a message keeps each queue busy, in seconds.

        Parameters
        ----------
        nbytes
            Its size.
        """
        return tuple([gap + nbytes / rate for gap, rate in zip(self.gaps_s, self.bandwidths_bytes_per_s, strict=True)])

    def flight_s(self, nbytes: float) -> float:
        """Return the seconds from the moment the last queue begins to serve a message to its end.

        Parameters
        ----------
        nbytes
            Its size.
        """
        # A port is as fast as the slowest link of the way.
        return self.latency_s + nbytes / self.bandwidths_bytes_per_s[0]


@dataclass(frozen=True, slots=True)
class _Levels:
    """The sum of the levels of a path; many paths have the same sum."""

    gaps_s: tuple[float, ...]
    bandwidths: tuple[float, ...]
    latency_s: float


class Paths:
    """The ways between the ranks of a world, found when first asked for; several threads may ask at once.

    Parameters
    ----------
    network, size
        The network and the number of ranks.

    Attributes
    ----------
    queue_count
        All queues have numbers below this. Those below ``2 * size`` are ports: the sending port of rank r is r, and its receiving
        port ``size + r``.

    Raises
    ------
    InvalidWorldSizeError
        There is no rank.
    ConfigError
        The network does not fit the world.
    """

    def __init__(self, network: Network, size: int) -> None:
        if size < 1:
            raise InvalidWorldSizeError(f"a world of {size} ranks was given; give 1 or more")
        self._wiring = Wiring(network, size)
        self._size = size
        self._per_host = network.neighbours(size)
        self._hosts = self._wiring.hosts
        self.queue_count: int = 2 * size + sum(kind.count for kind in self._wiring.kinds)
        # Ways belong to hosts: all ranks of one share its links. By start * hosts + stop; the queues of links, and the levels.
        self._ways: dict[int, tuple[tuple[int, ...], _Levels]] = {}
        self._levels: dict[_Levels, _Levels] = {}

    def between(self, source: int, dest: int) -> Path:
        """Return the way from one rank to another.

        Parameters
        ----------
        source, dest
            The ranks.

        Raises
        ------
        InvalidRankError
            One of them is not in the world.
        """
        size = self._size
        if not (0 <= source < size and 0 <= dest < size):
            raise InvalidRankError(f"there is no path from rank {source} to rank {dest}: the ranks are 0 to {size - 1}")
        start, stop = source // self._per_host, dest // self._per_host
        links, levels = self._ways.get(start * self._hosts + stop) or self._find(start, stop)
        return Path((source, *links, size + dest), levels.gaps_s, levels.bandwidths, levels.latency_s, start != stop)

    def _find(self, start: int, stop: int) -> tuple[tuple[int, ...], _Levels]:
        """Route from host ``start`` to ``stop``, and at once to those hosts that algorithms are likely to ask for next."""
        if len(self._ways) >= _KEPT:
            self._ways = {}  # a new one: other threads may be looking into the old one
        ways, hosts = self._ways, self._hosts
        stops = [each for each in self._likely(start, stop) if start * hosts + each not in ways]
        targets = np.array(stops, np.int64) * self._per_host
        routes = self._wiring.routes(np.full(len(stops), start * self._per_host), targets, self._size)
        kinds = self._wiring.kinds
        for each, links, of_kinds, latency_s, gap_s, bandwidth in zip(
            stops,
            routes.links.tolist(),
            routes.kinds.tolist(),
            routes.latency_s.tolist(),
            routes.gap_s.tolist(),
            routes.bandwidth.tolist(),
            strict=True,
        ):
            passed = [(link, kinds[kind].level) for link, kind in zip(links, of_kinds, strict=True) if link >= 0]
            levels = _Levels(
                (gap_s, *(level.gap for _, level in passed), gap_s),
                (bandwidth, *(level.bandwidth_bytes_per_s for _, level in passed), bandwidth),
                latency_s,
            )
            way = tuple(2 * self._size + link for link, _ in passed)
            ways[start * hosts + each] = way, self._levels.setdefault(levels, levels)
        return ways[start * hosts + stop]

    def _likely(self, start: int, stop: int) -> set[int]:
        """Return ``stop`` and its neighbours, and the hosts that rings, trees and recursive doubling ask for: powers of two away."""
        hosts, first = self._hosts, stop - stop % _BLOCK
        likely = set(range(first, min(first + _BLOCK, hosts)))
        for power in range((hosts - 1).bit_length()):
            distance = 1 << power
            likely.update(((start + distance) % hosts, (start - distance) % hosts))
        return likely
