"""The plan of a measurement, and its results: plain data that travels between the command line and the ranks as JSON."""

from __future__ import annotations

from typing import Final

import msgspec

from oneaccord.errors import UsageError
from oneaccord.schedule.steps import Collective

__all__ = [
    "BENCHMARKS",
    "BETWEEN_TWO",
    "DEFAULT_SIZES",
    "PINGPONG",
    "RAW",
    "SENDRECV",
    "SYMMETRIC",
    "VARIANTS",
    "WORKS",
    "Done",
    "Limits",
    "Opened",
    "Overlap",
    "Plan",
    "Point",
    "Problem",
    "Record",
    "Row",
    "Skipped",
    "Target",
    "decode_record",
    "round_size",
]

SENDRECV: Final[str] = "sendrecv"
PINGPONG: Final[str] = "pingpong"
_BARRIER: Final[str] = Collective.BARRIER.value

BENCHMARKS: Final[tuple[str, ...]] = (
    *(each.value for each in Collective if each is not Collective.BARRIER),
    SENDRECV,
    PINGPONG,
    _BARRIER,
)
"""All that can be measured: the collectives, and two ways of sending between ranks."""

WORKS: Final[tuple[str, ...]] = ("numpy", "python")
"""The work of a caller during a call: matrix products of NumPy, which release the interpreter's lock, or pure Python."""

BETWEEN_TWO: Final[frozenset[str]] = frozenset({SENDRECV, PINGPONG})
"""The operations that a single rank cannot do."""

DEFAULT_SIZES: Final[tuple[int, ...]] = (8, 1 << 10, 32 << 10, 1 << 20, 16 << 20, 128 << 20)
"""The sizes that are measured unless others are given: 8 bytes to 128 MiB."""

SYMMETRIC: Final[str] = "symmetric"
RAW: Final[str] = "raw"
VARIANTS: Final[tuple[str, ...]] = (SYMMETRIC, RAW)
"""Ways of using a backend: with arrays of `Group.empty`, which peers may read in place, and its library without oneaccord."""

_VECTORS: Final[frozenset[str]] = frozenset({"all_reduce", "reduce", "broadcast", "scan", "exscan", SENDRECV, PINGPONG})
"""The operations that move one vector; the others move a block for each rank."""


class Target(msgspec.Struct, frozen=True):
    """One column of the comparison: a backend, and which way of using it.

    Attributes
    ----------
    backend
        The backend's name.
    variant
        Empty, or one of `VARIANTS`.
    """

    backend: str
    variant: str = ""

    @property
    def name(self) -> str:
        """The name in tables, such as ``"shm+symmetric"``."""
        return f"{self.backend}+{self.variant}" if self.variant else self.backend

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target of that name.

        Raises
        ------
        UsageError
            There is no such variant.
        """
        backend, plus, variant = text.partition("+")
        if plus and variant not in VARIANTS:
            raise UsageError(f"{text!r}: a backend has the variants {' and '.join(VARIANTS)}, as in shm+symmetric and mpi+raw")
        return cls(backend, variant)


class Point(msgspec.Struct, frozen=True):
    """One kind of call to measure: a name of `BENCHMARKS`, and its size in bytes as `round_size` returns it."""

    benchmark: str
    nbytes: int


class Plan(msgspec.Struct, frozen=True):
    """The measurements of the ranks.

    Attributes
    ----------
    targets
        The backends; the first is the one with which the others are compared.
    points
        The calls, in order.
    dtype, op
        Of all arrays and reductions.
    iterations
        How many calls of each target are timed at each point; None to let the budget decide.
    warmup
        How many calls before each batch are not timed; None to let the time of a call decide.
    budget_s
        Seconds that measuring may take; points that are not begun by then are skipped.
    timeout_s
        Seconds that one call may take.
    stream, state
        The files to which rank 0 writes records, and its present work.
    limits
        Whether to measure the machine's limits as well.
    """

    targets: list[Target]
    points: list[Point]
    dtype: str
    op: str
    iterations: int | None
    warmup: int | None
    budget_s: float
    timeout_s: float
    stream: str
    state: str
    limits: bool = False

    def dump(self) -> str:
        """Return the plan as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, text: str) -> Plan:
        """Return the plan that `dump` wrote."""
        return msgspec.json.decode(text, type=cls)


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The ranks have met.

    Attributes
    ----------
    versions
        The versions of the libraries, as ``"torch 2.13.0"``.
    settings
        The settings that peers run with, by backend.
    executor
        Whether C or Python carries out the calls of oneaccord' own backends, in words.
    """

    versions: list[str]
    settings: dict[str, dict[str, str | int | float | bool]]
    executor: str = ""


class Row(msgspec.Struct, frozen=True, tag=True):
    """The times of one target at one point; times in microseconds, bandwidths in 10^9 bytes a second."""

    backend: str
    collective: str
    dtype: str
    world_size: int
    bytes: int
    iterations: int
    median_us: float
    min_us: float
    p95_us: float
    algbw_GBps: float  # noqa: N815 - the names of the JSON
    busbw_GBps: float  # noqa: N815


class Limits(msgspec.Struct, frozen=True, tag=True):
    """The limits of the machine, in microseconds, measured between the turns at one point; None for values that were not measured.

    Attributes
    ----------
    collective, bytes
        The point.
    copy_1_us, copy_2_us, copy_all_us
        To copy ``bytes``: on one rank, on two at once, and on all at once.
    add_all_us
        To add ``bytes`` of float32 to others, on all ranks at once.
    both_ways_us, one_way_us
        To move ``bytes`` over TCP of this host from each of two neighbours to the other at once, and from one to the other; all pairs of
        neighbours at once.
    flag_us, ping_us
        From one rank to another: a word in shared memory, and 8 bytes over TCP.
    """

    collective: str
    bytes: int
    copy_1_us: float | None
    copy_2_us: float | None
    copy_all_us: float | None
    add_all_us: float | None
    both_ways_us: float | None
    one_way_us: float | None
    flag_us: float | None
    ping_us: float | None


class Overlap(msgspec.Struct, frozen=True, tag=True):
    """The overlap of one target's all_reduce with one kind of work; times in milliseconds, medians of the slowest rank's.

    Attributes
    ----------
    backend, work
        The target, and a name of `WORKS`.
    dtype, world_size, bytes, iterations
        The call, and the number of measurements of each time.
    comm_ms, work_ms, both_ms
        The call alone, the work alone, and both at once.
    overlap
        The part of the shorter of both that was hidden, 0 to 1; see `oneaccord_lab.bench.statistics.overlapped`.
    """

    backend: str
    work: str
    dtype: str
    world_size: int
    bytes: int
    iterations: int
    comm_ms: float
    work_ms: float
    both_ms: float
    overlap: float


class Problem(msgspec.Struct, frozen=True, tag=True):
    """A target was not measured at a point: it failed, or its result is wrong."""

    backend: str
    collective: str
    bytes: int
    text: str
    wrong: bool = False


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """The budget was used up before a point was begun."""

    collective: str
    bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """All records of one more point have been written."""


Record = Opened | Limits | Row | Overlap | Problem | Skipped | Done
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def decode_record(line: bytes) -> Record:
    """Return the record that a line of JSON holds."""
    return _decoder.decode(line)


def round_size(benchmark: str, nbytes: int, world_size: int, itemsize: int) -> int:
    """Return the measured size for ``nbytes``: the next below that divides into equal blocks of elements.

    ``bytes`` has the meaning of nccl-tests: the whole vector of a reduction, broadcast or message; for operations that move blocks, the blocks of
    all ranks together. A block has at least one element; a barrier has no bytes.
    """
    if benchmark == _BARRIER:
        return 0
    unit = itemsize * (1 if benchmark in _VECTORS else world_size)
    return max(unit, nbytes // unit * unit)
