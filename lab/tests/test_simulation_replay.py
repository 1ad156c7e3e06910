"""The virtual clock next to single messages that are replayed on the same network."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import pytest

from oneaccord.api import NETWORKS, ConfigError, Jitter, Network, Paths
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord_lab.simulation import simulate

UNIFORM = Jitter(distribution="uniform", mean_s=1e-6)
FREE = {name: network.model_copy(update={"reduction_bytes_per_s": math.inf}) for name, network in NETWORKS.items()}
FREE["small hosts"] = FREE["fat-tree"].model_copy(update={"ranks_per_host": 2, "hosts_per_leaf": 2, "oversubscription": 2})


@dataclass(frozen=True)
class Message:
    """A message of the ``step``-th round, and the messages that must have ended before it begins."""

    step: int
    source: int
    dest: int
    nbytes: float
    after: tuple[int, ...]


def ring(size: int, block: float, rounds: int) -> list[Message]:
    """Return messages from each rank to the next one, of which each passes on what came before."""
    return [
        Message(step, rank, (rank + 1) % size, block, ((step - 1) * size + (rank - 1) % size,) if step else ())
        for step in range(rounds)
        for rank in range(size)
    ]


def doubling(size: int, block: float) -> list[Message]:
    """Return the messages of an all-gather by recursive doubling: all blocks that came before."""
    return [
        Message(step, rank, rank ^ 1 << step, block * 2**step, tuple(k * size + (rank ^ 1 << k) for k in range(step)))
        for step in range(size.bit_length() - 1)
        for rank in range(size)
    ]


def exchanges(size: int, nbytes: float) -> list[Message]:
    """Return the messages of an all-reduce by recursive doubling: the sum so far, which must be sent before something is added to it."""
    return [
        Message(
            step,
            rank,
            rank ^ 1 << step,
            nbytes,
            tuple((step - 1) * size + r for r in (rank, rank ^ 1 << step - 1)) if step else (),
        )
        for step in range(size.bit_length() - 1)
        for rank in range(size)
    ]


def replay(messages: list[Message], paths: Paths) -> float:
    """Return when the last message ends: each queue serves who comes first, and of those who come at once, who passed fewest queues."""
    free = [0.0] * paths.queue_count
    ways = [paths.between(message.source, message.dest) for message in messages]
    busy = [way.busy_s(message.nbytes) for way, message in zip(ways, messages, strict=True)]
    waits = [len(message.after) for message in messages]
    now, end = 0.0, -1
    # When, how many queues passed or `end`, step, source, which.
    events = [(0.0, 0, each.step, each.source, i) for i, each in enumerate(messages) if not each.after]
    while events:
        now, passed, step, source, this = heapq.heappop(events)
        if passed == end:
            for i, later in enumerate(messages):
                waits[i] -= this in later.after
                if this in later.after and not waits[i]:
                    heapq.heappush(events, (now, 0, later.step, later.source, i))
            continue
        queue = ways[this].queues[passed]
        start = max(now, free[queue])
        free[queue] = start + busy[this][passed]
        if passed + 1 == len(ways[this].queues):
            heapq.heappush(events, (start + ways[this].flight_s(messages[this].nbytes), end, step, source, this))
        else:
            heapq.heappush(events, (start, passed + 1, step, source, this))
    return now


def simulated(collective: str, name: str, size: int, nbytes: int, network: Network) -> float:
    algorithm = next(each for each in BUILTIN if (each.collective.value, each.name) == (collective, name))
    outcome = simulate(algorithm, size, nbytes, network, segments=1)
    assert outcome.method == "events"
    return outcome.time_s


@pytest.mark.parametrize("network", FREE)
@pytest.mark.parametrize("nbytes", [0, 1000, 1 << 20])
def test_a_replay_of_single_messages_takes_as_long_as_the_simulated_collective(network: str, nbytes: int) -> None:
    size, where = 16, FREE[network]
    paths = Paths(where, size)

    def check(messages: list[Message], collective: str, name: str) -> None:
        assert replay(messages, paths) == simulated(collective, name, size, nbytes, where)

    check(ring(size, nbytes / size, size - 1), "all_gather", "ring")
    check(ring(size, nbytes / size, 2 * (size - 1)), "all_reduce", "ring")
    check(doubling(size, nbytes / size), "all_gather", "recursive_doubling")
    check(exchanges(size, nbytes), "all_reduce", "recursive_doubling")


def test_the_simulation_of_an_algorithm_refuses_jitter() -> None:
    network = NETWORKS["textbook"].model_copy(update={"jitter": UNIFORM})
    with pytest.raises(ConfigError, match=r"leave \[jitter\] out, or run a program with the simulated backend") as caught:
        simulate(BUILTIN[0], 4, 100, network)
    assert caught.value.key == "jitter"
