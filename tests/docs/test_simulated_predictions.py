"""A program in a simulated world next to `oneaccord simulate`, which runs the same schedules without a program."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oneaccord_simulated as simulated
from oneaccord.api import NETWORKS
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective
from oneaccord_lab.simulation import simulate


def durations(name: str, size: int, nbytes: int, network: str, eager_bytes: int = 0) -> tuple[float, float]:
    """Return how long an all_reduce takes here, and there."""
    free = NETWORKS[network].model_copy(update={"reduction_bytes_per_s": math.inf})
    algorithm = next(each for each in BUILTIN if (each.collective, each.name) == (Collective.ALL_REDUCE, name))
    run = simulated.run(
        lambda group: group.all_reduce(np.zeros(nbytes // 4, np.float32)),
        size,
        network=free,
        config={"algorithms": {"all_reduce": name}, "backends": {"simulated": {"eager_bytes": eager_bytes}}},
    )
    assert {call.algorithm.partition("/")[0] for call in run.trace.calls} == {name}
    return run.duration_s, simulate(algorithm, size, nbytes, free).time_s


NAMES = ["ring", "recursive_doubling", "rabenseifner", "circulant", "tree"]
LATER = [pytest.param(name, marks=pytest.mark.long) if name in ("rabenseifner", "circulant") else name for name in NAMES]


@pytest.mark.parametrize(("size", "nbytes"), [(4, 1 << 20), (8, 1 << 8), pytest.param(16, 1 << 14, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_on_the_textbooks_wires_a_collective_takes_what_its_simulation_says(name, size, nbytes):
    here, there = durations(name, size, nbytes, "textbook")
    assert here == pytest.approx(there, rel=1e-9)


@pytest.mark.parametrize("nbytes", [1 << 8, pytest.param(1 << 14, marks=pytest.mark.long), 1 << 20])
@pytest.mark.parametrize("network", ["fat-tree", "torus", "laptop"])
@pytest.mark.parametrize("name", LATER)
def test_where_messages_meet_a_collective_takes_nearly_that(name, network, nbytes):
    """Of messages that come to a link at one moment, others may be first."""
    here, there = durations(name, 16, nbytes, network, eager_bytes=1 << 30)
    assert 0.93 * there < here < 1.07 * there


@pytest.mark.parametrize("nbytes", [pytest.param(1 << 8, marks=pytest.mark.long), 1 << 20])
@pytest.mark.parametrize("network", ["fat-tree", "torus", "laptop"])
@pytest.mark.parametrize("name", LATER)
def test_messages_that_wait_for_their_receiver_make_that_longer_by_half_at_most(name, network, nbytes):
    """A rank sends a message to another one when the message before it has arrived, where a schedule alone needs the port to be free."""
    here, there = durations(name, 16, nbytes, network)
    assert 0.95 * there < here < 1.5 * there
