"""The least work of a call on this machine: the messages one after the other, and the bytes over each way.

The least time of a call is their sum, as in Hockney's model (R. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
Parallel Computing 20, 1994), with each speed measured in the same run. docs/explanation/performance.md has the table of `floor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oneaccord_lab.bench.plan import PINGPONG, SENDRECV, SYMMETRIC, Limits, Target

__all__ = ["DIRECT", "SLOTS", "WIRE", "Floor", "floor", "limit_us", "link_of"]

WIRE: Final[str] = "wire"
"""Ranks that speak over TCP."""
SLOTS: Final[str] = "slots"
"""Ranks that copy into memory that they share, and out of it."""
DIRECT: Final[str] = "direct"
"""Ranks that read each other's arrays in place."""

_LINKS: Final[dict[str, str]] = {"tcp": WIRE, "gloo": WIRE, "shm": SLOTS, "mpi": DIRECT, "ucx": DIRECT}
"""How a backend's ranks on one host reach each other. MPI and UCX may let the kernel copy from one process to the other."""
_TRANSPORTS: Final[dict[str, str]] = {"mpi": "OMPI_MCA_btl", "ucx": "UCX_TLS"}
"""The variable that restricts a library to some transports."""
_ALONE: Final[frozenset[str]] = frozenset({"tcp", "self"})
"""Transports among which is no shared memory."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least work of the busiest rank, in a call of S bytes.

    Attributes
    ----------
    messages
        How many messages must follow each other.
    copied, added
        How many times S bytes are copied, and added to others, in memory, while all ranks do so.
    copied_alone
        How many times S bytes are copied while the other ranks wait.
    both_ways, one_way
        How many times S bytes cross the wire: as many the other way at once, or not.
    """

    messages: int
    copied: float = 0.0
    added: float = 0.0
    copied_alone: float = 0.0
    both_ways: float = 0.0
    one_way: float = 0.0


def link_of(target: Target, environ: Mapping[str, str]) -> str | None:
    """Return the way by which a target's ranks reach each other on one host; None if that is not known."""
    if target.backend == "shm" and target.variant == SYMMETRIC:
        return DIRECT
    words = environ.get(_TRANSPORTS.get(target.backend, ""), "").split(",")
    return WIRE if "tcp" in words and _ALONE.issuperset(words) else _LINKS.get(target.backend)


def floor(benchmark: str, world_size: int, link: str) -> Floor:
    """Return the least work of a call.

    Parameters
    ----------
    benchmark
        A name of `BENCHMARKS`; `round_size` gives the meaning of S for it.
    world_size
        How many ranks there are; of a single one, nothing moves.
    link
        `WIRE`, `SLOTS` or `DIRECT`.

    Notes
    -----
    Work that ranks can share is counted as shared equally. A rank's own block is not counted.
    """
    n = world_size
    if n == 1:
        return Floor(0)
    moves = {WIRE: _wire, SLOTS: _slots, DIRECT: _direct}[link](n)
    messages = 1 if benchmark in {SENDRECV, PINGPONG} else (n - 1).bit_length()
    return Floor(messages, **moves.get(benchmark, {}))


def _wire(n: int) -> dict[str, dict[str, float]]:
    """Return the bytes that cross the wire, for each benchmark."""
    b = (n - 1) / n
    return {
        "all_reduce": {"both_ways": 2 * b},
        "reduce": {"one_way": 1.0},
        "broadcast": {"one_way": 1.0},
        "all_gather": {"both_ways": b},
        "gather": {"one_way": b},
        "scatter": {"one_way": b},
        "reduce_scatter": {"both_ways": b},
        "all_to_all": {"both_ways": b},
        "scan": {"one_way": 1.0},
        "exscan": {"one_way": 1.0},
        SENDRECV: {"both_ways": 1.0},
        PINGPONG: {"one_way": 1.0},
    }


def _slots(n: int) -> dict[str, dict[str, float]]:
    """Return the copied and added bytes if all is copied into slots, and copied or added from there."""
    b = (n - 1) / n
    return {
        "all_reduce": {"copied": 3 * b, "added": b},
        "reduce": {"copied": b, "added": b},
        "broadcast": {"copied": 2 * b},
        "all_gather": {"copied": 2 * b},
        "gather": {"copied": b},
        "scatter": {"copied": b},
        "reduce_scatter": {"copied": b, "added": b},
        "all_to_all": {"copied": 2 * b},
        "scan": {"copied": b, "added": b},
        "exscan": {"copied": 2 * b, "added": (n - 2) / n},
        SENDRECV: {"copied": 2.0},
        PINGPONG: {"copied": 1.0},
    }


def _direct(n: int) -> dict[str, dict[str, float]]:
    """Return the copied and added bytes if each rank reads its input in place."""
    b = (n - 1) / n
    lone = "copied_alone" if n == 2 else "copied"  # there is one reader among two ranks
    return {
        "all_reduce": {"copied": b, "added": b},
        "reduce": {"added": b},
        "broadcast": {lone: 1.0},
        "all_gather": {"copied": b},
        "gather": {"copied_alone": b},
        "scatter": {lone: 1 / n},
        "reduce_scatter": {"added": b},
        "all_to_all": {"copied": b},
        "scan": {"added": 1.0},
        "exscan": {lone: 1.0},
        SENDRECV: {"copied": 1.0},
        PINGPONG: {"copied_alone": 1.0},
    }


def limit_us(limits: Limits, world_size: int, link: str) -> float:
    """Return the microseconds below which no call can be, of the benchmark and of the size whose limits these are."""
    needed = floor(limits.collective, world_size, link)
    ping_us = limits.ping_us if link == WIRE else limits.flag_us
    parts = [
        (needed.messages, ping_us),
        (needed.copied, limits.copy_all_us),
        (needed.added, limits.add_all_us),
        (needed.copied_alone, limits.copy_1_us),
        (needed.both_ways, limits.both_ways_us),
        (needed.one_way, limits.one_way_us),
    ]
    return sum(times * (each_us or 0.0) for times, each_us in parts if times)
