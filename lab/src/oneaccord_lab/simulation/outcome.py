"""How long a collective takes on a network: the whole of the simulation as one function."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import ConfigError, InvalidRankError, InvalidWorldSizeError, UsageError
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.errors import ScheduleDeadlockError
from oneaccord.schedule.simulation.network import Network
from oneaccord.schedule.simulation.routes import Wiring
from oneaccord.schedule.steps import Schedule
from oneaccord_lab.simulation.clock import Clock, Flows, Timing
from oneaccord_lab.simulation.formula import Sends, best_segments, formula_time, look_at_ways
from oneaccord_lab.simulation.program import Program, Symmetry, compile_program, find_symmetry, sample_ranks, translate

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_MESSAGES", "Outcome", "Prepared", "run_program", "simulate"]

MAX_MESSAGES = 6_000_000
"""The most messages that are simulated one by one; a call of more is priced by its formula."""

MAX_RANKS = 1 << 20
MAX_BYTES = 1 << 60
MAX_SEGMENTS = 1 << 16
"""The largest allowed value."""

_COMPARED_STEPS = 500_000
"""How many steps are compared, more or less, to find out whether all ranks do the same."""

_MADE_STEPS = 20_000_000
"""The most steps that are made to be simulated, more or less."""

_LOOKED_AT = 8
"""The approximate number of ranks that show how many messages there are and which ways they take."""

_WAYS = 1 << 20
"""The most ways that are examined if all ranks are known."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The cost of a simulated call.

    Attributes
    ----------
    time_s
        Seconds from the start, which is the same for all ranks, until the last rank is done.
    steps
        The number of messages on the longest chain in which each waits for the one before, either for its bytes or for a rank that
        sends (receives) one message after the other: that of the formula, if the algorithm has one, on any network.
    bytes_per_rank
        The bytes that the rank which sends most sends.
    segments
        Into how many segments the vector, or each block, was cut.
    method
        ``"events"``: every message was simulated; ``"formula"``: the closed form.
    """

    time_s: float
    steps: int
    bytes_per_rank: float
    segments: int
    method: str


def simulate(
    algorithm: Algorithm, size: int, nbytes: int, network: Network, *, root: int = 0, segments: int | None = None
) -> Outcome:
    """Run one collective on a virtual clock; the same call gives the same bits each time.

    Parameters
    ----------
    algorithm
        The algorithm to run.
    size
        The number of ranks. For an algorithm ``by_host``, ``network.ranks_per_host`` must divide it.
    nbytes
        The bytes of the vector, or of all blocks together (the blocks that one rank sends in all_to_all), evenly divided into chunks; these
        need not be whole bytes.
    network
        The network to run on.
    root
        The root of a rooted collective.
    segments
        Into how many segments the vector, or each block, is cut. By default 1, and for an algorithm that is ``pipelined``, the
        number for which its formula gives the least time.

    Returns
    -------
    Outcome
        Time, steps and bytes.

    Raises
    ------
    UsageError
        An argument is out of range, or the algorithm does not fit the world; or there are too many messages to simulate, and the
        algorithm has no formula.
    ConfigError
        The network does not fit the world, or has jitter.
    ScheduleError
        The schedules do not fit each other.
    """
    _check(algorithm, size, nbytes, network, root, segments)
    if segments is None:
        segments = 1
        if algorithm.pipelined:
            wiring = Wiring(network, size)
            uncut = _traffic(lambda rank: _schedule(algorithm, rank, size, root, 1, network), wiring, Symmetry(size, size))
            segments = best_segments(algorithm, size, nbytes, network, look_at_ways(wiring, uncut, nbytes))
    return Prepared.of(algorithm, size, network, root=root, segments=segments).at(nbytes)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All of a simulation that does not depend on the size of the call: several sizes share it.

    Attributes
    ----------
    algorithm, segments, wiring
        The algorithm, the number of segments of the vector or each block, and the network.
    chunks
        Into how many chunks the bytes of a call are divided.
    traffic
        Some ranks, and their messages.
    program
        All messages; None if there are too many to simulate them one by one.
    """

    algorithm: Algorithm
    segments: int
    wiring: Wiring
    chunks: int
    traffic: list[tuple[int, Sends]]
    program: Program | None

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        size: int,
        network: Network,
        *,
        root: int = 0,
        segments: int = 1,
        most_messages: int | None = None,
    ) -> Prepared:
        """Make ready to simulate calls; the arguments are those of `simulate`, and are not checked again.

        A call of more than ``most_messages``, by default `MAX_MESSAGES`, is priced by its formula.
        """
        wiring = Wiring(network, size)
        # That of rank 0 is asked for several times, and may have a step for each pair of ranks.
        first = _schedule(algorithm, 0, size, root, segments, network)

        def build(rank: int) -> Schedule:
            return _schedule(algorithm, rank, size, root, segments, network) if rank else first

        symmetry = find_symmetry(build, wiring, network.neighbours(size), _COMPARED_STEPS)
        traffic = _traffic(build, wiring, symmetry)
        messages = sum(int(sends.times.sum()) for _, sends in traffic) / len(traffic) * symmetry.period
        few = (
            messages <= (MAX_MESSAGES if most_messages is None else most_messages)
            and symmetry.repeats * len(first.steps) <= _MADE_STEPS
        )
        program = compile_program(build, size, symmetry) if few else None
        return cls(algorithm, segments, wiring, max(first.input_chunks, first.output_chunks, 1), traffic, program)

    def at(self, nbytes: int) -> Outcome:
        """Simulate a call of so many bytes; errors are those of `simulate`."""
        algorithm, chunk_bytes = self.algorithm, nbytes / self.chunks
        if self.program is None:
            return _by_formula(algorithm, nbytes, self.wiring, self.traffic, self.segments, chunk_bytes)
        timing = run_program(self.program, self.wiring, chunk_bytes)
        steps = timing.steps
        if algorithm.cost is not None:
            # On a network with contention, the chain that ends last also waits for messages of others on a link.
            size = self.wiring.size
            steps = algorithm.cost(size, nbytes, self.segments, self.wiring.network.neighbours(size)).steps
        return Outcome(timing.time_s, steps, self.program.sent_chunks * chunk_bytes, self.segments, "events")


def _traffic(build: Callable[[int], Schedule], wiring: Wiring, symmetry: Symmetry) -> list[tuple[int, Sends]]:
    """Return some ranks and their messages; if ranks repeat, one schedule serves many of them."""
    size, repeats, mirrored = wiring.size, symmetry.repeats, symmetry.mirrored
    if repeats == size:
        # The ranks of whole hosts, so that as many of them talk to other hosts as do everywhere.
        hosts = sample_ranks(wiring.hosts, 1) if size > _LOOKED_AT else range(wiring.hosts)
        per_host = wiring.network.neighbours(size)
        ranks = sorted({rank for host in hosts for rank in range(host * per_host, min(size, (host + 1) * per_host))})
        return [(rank, Sends.of(translate(build(rank)))) for rank in ranks[: 8 * _LOOKED_AT]]
    base = [Sends.of(translate(build(rank), mirrored=mirrored), mirrored=mirrored) for rank in range(repeats)]
    different = max(1, *(len(sends.times) for sends in base))
    alike = symmetry.period if symmetry.period * different <= _WAYS else 0
    ranks = list(range(alike)) or sample_ranks(size, 4 * _LOOKED_AT)
    return [(rank, base[rank % repeats]) for rank in ranks]


def _check(algorithm: Algorithm, size: int, nbytes: int, network: Network, root: int, segments: int | None) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise InvalidWorldSizeError(f"a world of {size} ranks was given; give 1 to {MAX_RANKS:,}")
    if not 0 <= root < size:
        raise InvalidRankError(f"the root is {root}, but the ranks are 0 to {size - 1}")
    if not 0 <= nbytes <= MAX_BYTES:
        raise UsageError(f"{nbytes} bytes were given; expected 0 to 2**60")
    if segments is not None and not 1 <= segments <= MAX_SEGMENTS:
        raise UsageError(f"{segments} segments were given; expected 1 to {MAX_SEGMENTS:,}")
    if network.jitter is not None:
        raise ConfigError(
            "the network has [jitter], but the simulation of an algorithm has no random numbers; leave [jitter] out, or run a program "
            "with the simulated backend",
            key="jitter",
            value=network.jitter,
        )
    if algorithm.by_host and size % network.neighbours(size):
        raise UsageError(
            f"{algorithm.name} {algorithm.collective.value} needs whole hosts, but {size} ranks are not a multiple of "
            f"{network.neighbours(size)} ranks per host; choose another number of either, or another algorithm"
        )


def _schedule(algorithm: Algorithm, rank: int, size: int, root: int, segments: int, network: Network) -> Schedule:
    return algorithm.schedule(rank, size, root, segments, network.neighbours(size))


def _by_formula(
    algorithm: Algorithm, nbytes: int, wiring: Wiring, traffic: list[tuple[int, Sends]], segments: int, chunk_bytes: float
) -> Outcome:
    size, network = wiring.size, wiring.network
    if algorithm.cost is None:
        raise UsageError(
            f"{algorithm.name} {algorithm.collective.value} of {size} ranks has more than {MAX_MESSAGES:,} messages or too many steps to simulate, and "
            "has no formula; choose fewer ranks or segments"
        )
    cost = algorithm.cost(size, nbytes, segments, network.neighbours(size))
    time_s = formula_time(cost, network, look_at_ways(wiring, traffic, chunk_bytes))
    return Outcome(time_s, cost.steps, cost.sent_bytes, segments, "formula")


def run_program(program: Program, wiring: Wiring, chunk_bytes: float) -> Timing:
    """Run a program on a network."""
    size, period = wiring.size, program.period
    # Messages of one way and one size are one flow.
    counts, place = np.unique(program.message_chunks, return_inverse=True)
    keys = (program.sender * size + program.receiver) * len(counts) + place
    different, flow = np.unique(keys, return_inverse=True)
    pair = different // max(len(counts), 1)
    sender, receiver = pair // size, pair % size
    nbytes = counts[different % max(len(counts), 1)] * chunk_bytes
    routes = wiring.routes(sender, receiver, period)
    rest = nbytes / routes.bandwidth
    port = routes.gap_s + rest
    # Queues: the sending ports, the receiving ports, the links.
    queues = np.concatenate((sender[:, None], routes.links + 2 * period, (period + receiver % period)[:, None]), axis=1)
    busy = np.empty(queues.shape)
    busy[:, 0] = busy[:, -1] = port
    gaps = np.array([kind.level.gap for kind in wiring.kinds] or [0.0])
    bandwidths = np.array([kind.level.bandwidth_bytes_per_s for kind in wiring.kinds] or [1.0])
    busy[:, 1:-1] = gaps[routes.kinds] + nbytes[:, None] / bandwidths[routes.kinds]
    used = np.ones(queues.shape, bool)
    used[:, 1:-1] = routes.links >= 0
    clock = Clock(
        Flows(
            np.concatenate(([0], np.cumsum(used.sum(axis=1)))).tolist(),
            _compact(queues[used], "q"),
            _compact(busy[used], "d"),
            (routes.latency_s + rest).tolist(),
        ),
        flow.tolist(),
        program.reducer.tolist(),
        (program.reduction_chunks * chunk_bytes / wiring.network.reduction_bytes_per_s).tolist(),
        program.following.tolist(),
        program.waits.tolist(),
        program.successors.tolist(),
        program.first_successor.tolist(),
        int(queues.max(initial=0)) + 1,
        period,
    )
    timing = clock.run()
    if timing.finished < len(program.waits):
        raise ScheduleDeadlockError(
            f"after {timing.time_s} s no message can start, and {len(program.waits) - timing.finished} messages and reductions wait "
            "for each other forever"
        )
    return timing


def _compact(values: NDArray[Any], code: str) -> array[Any]:
    """Return numbers in an array whose single elements are quick to get at."""
    return array(code, values.tobytes())
