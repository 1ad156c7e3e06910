"""Closed forms: the formula of an algorithm with the slowest way of a network, and the number of segments that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from oneaccord.schedule.algorithms.cost import Cost
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.simulation.network import Network
from oneaccord.schedule.simulation.routes import Wiring
from oneaccord_lab.simulation.program import SEND, Nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Sends", "Ways", "best_segments", "formula_time", "look_at_ways"]


@dataclass(frozen=True, slots=True)
class Ways:
    """The facts about the ways of messages through a network for a closed form.

    Attributes
    ----------
    latency_s, seconds_per_byte
        Those of a way, on average over messages and over bytes.
    slowest_latency_s, slowest_seconds_per_byte
        Of the slowest way.
    load_s
        For how long the busiest port, or the busiest kind of link if its links share the work evenly, is busy.
    """

    latency_s: float
    seconds_per_byte: float
    slowest_latency_s: float
    slowest_seconds_per_byte: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Sends:
    """The messages of a rank: ``times`` messages of ``chunks`` chunks over ``distance``, in arrays."""

    distance: Ints
    chunks: Ints
    times: Ints
    mirrored: bool

    @classmethod
    def of(cls, nodes: Nodes, *, mirrored: bool = False) -> Sends:
        """Count the messages of a rank that are alike."""
        sends = np.stack((nodes.distance, nodes.chunks), axis=1)[nodes.kind == SEND]
        if not len(sends):
            return cls(sends[:, 0], sends[:, 1], sends[:, 0], mirrored)
        different, times = np.unique(sends, axis=0, return_counts=True)
        return cls(different[:, 0], different[:, 1], times, mirrored)


def look_at_ways(wiring: Wiring, traffic: Iterable[tuple[int, Sends]], chunk_bytes: float) -> Ways:
    """Return the facts about the messages of all ranks that follow from those of some.

    Parameters
    ----------
    wiring
        The network.
    traffic
        Some ranks, and the messages of each.
    chunk_bytes
        The bytes of a chunk.
    """
    size = wiring.size
    messages, latency, nbytes, seconds = 0, 0.0, 0.0, 0.0
    slowest_latency = slowest_byte = port = 0.0
    busy = np.zeros(len(wiring.kinds))
    ranks = 0
    for rank, sends in traffic:
        ranks += 1
        if not len(sends.times):
            continue
        times, sizes = sends.times, sends.chunks * chunk_bytes
        target = rank ^ sends.distance if sends.mirrored else (rank + sends.distance) % size
        routes = wiring.routes(np.full(len(times), rank), target, size)
        messages += int(times.sum())
        latency += float(times @ routes.latency_s)
        nbytes += float(times @ sizes)
        seconds += float(times @ (sizes / routes.bandwidth))
        slowest_latency = max(slowest_latency, float(routes.latency_s.max()))
        slowest_byte = max(slowest_byte, float((1 / routes.bandwidth).max()))
        port = max(port, float(times @ (routes.gap_s + sizes / routes.bandwidth)))
        for kind, each in enumerate(wiring.kinds):
            crossing = ((routes.links >= 0) & (routes.kinds == kind)).sum(axis=1) * times
            seconds_busy = crossing.sum() * each.level.gap + crossing @ sizes / each.level.bandwidth_bytes_per_s
            busy[kind] += seconds_busy * size / each.count
    return Ways(
        latency / max(messages, 1),
        seconds / nbytes if nbytes else 0.0,
        slowest_latency,
        slowest_byte,
        max(port, float(busy.max(initial=0.0)) / max(ranks, 1)),
    )


def formula_time(cost: Cost, network: Network, ways: Ways) -> float:
    """Return the time of a call: that of its longest chain on average ways, and no less than the busiest port or link needs."""
    chain = cost.steps * ways.latency_s + cost.path_bytes * ways.seconds_per_byte
    return max(chain + cost.reduced_bytes / network.reduction_bytes_per_s, ways.load_s)


MOST_SEGMENTS = 4096
"""The most segments that the best number is looked for among: without latency, it would be one for each byte."""


def best_segments(algorithm: Algorithm, size: int, nbytes: int, network: Network, ways: Ways) -> int:
    """Return the number of segments for which the formula of a pipelined algorithm gives the least time on the slowest way, at most `MOST_SEGMENTS`."""
    formula = algorithm.cost
    if formula is None or nbytes < 2:
        return 1

    def time(segments: int) -> float:
        cost = formula(size, nbytes, segments, network.neighbours(size))
        chain = cost.steps * ways.slowest_latency_s + cost.path_bytes * ways.slowest_seconds_per_byte
        return chain + cost.reduced_bytes / network.reduction_bytes_per_s

    return _lowest(time, 1, min(nbytes, MOST_SEGMENTS))


def _lowest(function: Callable[[int], float], low: int, high: int) -> int:
    """Return the lowest point of a function that first falls and then rises."""
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=function)
