"""From clock readings to the numbers of a row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord_lab.bench.plan import PINGPONG, SENDRECV

__all__ = ["bus_factor", "order", "overlapped", "samples", "summary"]

_ALL_BUT_ONE = frozenset({"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"})


def bus_factor(benchmark: str, world_size: int) -> float:
    """Return the factor from algbw to busbw, as nccl-tests defines it.

    busbw is algbw times the share of the bytes that must cross the busiest link, so that worlds of any size compare with the speed
    of the wire.
    """
    if benchmark == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if benchmark in _ALL_BUT_ONE:
        return (world_size - 1) / world_size
    assert benchmark in {"reduce", "broadcast", "scan", "exscan", "barrier", SENDRECV, PINGPONG}
    return 1.0


def samples(stamps: npt.NDArray[np.int64], benchmark: str) -> npt.NDArray[np.int64]:
    """Return the nanoseconds of each call of a batch.

    A call lasts from the moment when the last rank had finished the call before to the moment when the last rank has finished this
    one. So the samples of a batch sum up to its duration, and no rank's head start counts as speed.

    Parameters
    ----------
    stamps
        Shape (ranks, calls + 1): when each rank was ready, and when it finished each call, by one clock.
    benchmark
        For a ping-pong, only rank 0 sees the whole round trip, of which one way is half.
    """
    ends: npt.NDArray[np.int64] = stamps[0] if benchmark == PINGPONG else stamps.max(axis=0)
    return (ends[1:] - ends[:-1]) // (2 if benchmark == PINGPONG else 1)


def summary(nanoseconds: Sequence[int], nbytes: int, factor: float) -> dict[str, Any]:
    """Return the numbers of a row, by name: median, minimum and 95th percentile (nearest rank), and the bandwidths of the median."""
    ranked = sorted(nanoseconds)
    median = statistics.median(ranked)
    algbw = nbytes / median if median else 0.0
    return {
        "iterations": len(ranked),
        "median_us": median / 1000,
        "min_us": ranked[0] / 1000,
        "p95_us": ranked[-(-95 * len(ranked) // 100) - 1] / 1000,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * factor,
    }


def overlapped(comm_s: float, work_s: float, both_s: float) -> float:
    """Return which part of the shorter of a call and of other work was hidden behind the longer one: 0 to 1.

    Parameters
    ----------
    comm_s, work_s
        Seconds of the call alone, and of the work alone.
    both_s
        Seconds of the work while the call is under way, until both are done.
    """
    shorter = min(comm_s, work_s)
    return min(1.0, max(0.0, (comm_s + work_s - both_s) / shorter)) if shorter > 0 else 0.0


def order(turn: int, count: int) -> list[int]:
    """Return in which order ``count`` targets have their turn: each begins as often as any other, and follows either neighbour."""
    places = [(turn // 2 + place) % count for place in range(count)]
    return places[::-1] if turn % 2 else places
