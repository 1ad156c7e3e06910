"""The simulated backend as a part: its ranks go on while one waits on a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import UsageError

MIXES: list[dict[str, str]] = [
    {"cpu": "simulated", "p2p": "tcp"},
    {"cpu": "tcp", "p2p": "simulated", "barrier": "simulated"},
    {"cpu": "simulated", "barrier": "shm"},
    {"intra": "simulated", "inter": "tcp"},
    {"intra": "shm", "inter": "simulated", "p2p": "tcp"},
    {"intra": "shm", "inter": "tcp", "barrier": "simulated"},
]


def config(routes: dict[str, str], backend: str = "hybrid") -> dict[str, Any]:
    return {"backend": backend, "ranks_per_host": 2, "backends": {"hybrid": {"routes": routes}}}


def work(group: oa.Group) -> list[float]:
    size, rank = group.world_size, group.rank
    there, back = (rank + 1) % size, (rank - 1) % size
    values = [group.all_reduce(np.full(n, rank + 1.0)).sum() / n for n in (1, 100_000)]
    values += [float(group.sendrecv(np.full(n, float(rank)), there, back)[-1]) for n in (1, 100_000)]
    group.barrier()
    with group.split(rank % 2) as part:
        values.append(part.all_gather(np.array([rank])).sum())
    work = group.all_reduce_async(np.ones(3))
    group.barrier()
    return [*values, work.wait()[0]]


@pytest.mark.parametrize("routes", MIXES)
def test_parts_of_both_worlds_work_together(routes: dict[str, str]) -> None:
    assert simulated.run(lambda group: int(group.all_reduce(7)), 1, config=config(routes)).results == [7]
    size = 5  # the last host has one rank
    total = size * (size + 1) / 2
    expected = [
        [total, total, (rank - 1) % size, (rank - 1) % size, sum(range(rank % 2, size, 2)), size] for rank in range(size)
    ]
    assert simulated.run(work, size, config=config(routes)).results == expected


def test_time_on_the_simulated_part_is_virtual() -> None:
    def program(group: oa.Group) -> None:
        group.all_reduce(np.ones(100_000))

    run = simulated.run(program, 4, network="fat-tree", config=config(MIXES[0]))
    plain = simulated.run(program, 4, network="fat-tree", config={"ranks_per_host": 2})
    assert run.duration_s == plain.duration_s > 0


def test_who_waits_on_a_socket_lets_virtual_time_pass_until_its_deadline() -> None:
    def program(group: oa.Group) -> None:
        if group.rank == 0:
            group.recv(1, timeout_s=0.05)
        oa.sleep(0.5)

    run = simulated.run(program, 2, config=config({"cpu": "simulated", "p2p": "tcp"}), check=False)
    assert isinstance(run.errors[0], oa.DeadlineError)
    assert "recv from rank 1" in str(run.errors[0])


def test_a_killed_rank_is_named_by_who_waits_for_it_on_a_socket() -> None:
    def program(group: oa.Group) -> None:
        group.barrier()
        if group.rank == 1:
            oa.sleep(0.01)
        group.sendrecv(1.0, 1 - group.rank, 1 - group.rank)

    fault = simulated.Kill(rank=1, operation="sleep")
    run = simulated.run(program, 2, config=config({"cpu": "simulated", "p2p": "tcp"}), faults=fault, check=False)
    assert isinstance(run.errors[0], oa.PeerLostError)
    assert run.errors[0].peer == 1


def test_a_mismatch_across_both_ways_is_found() -> None:
    def program(group: oa.Group) -> None:
        group.barrier()
        group.all_reduce(np.ones(3 if group.rank else 5))

    run = simulated.run(program, 4, config=config({"intra": "simulated", "inter": "tcp"}), check=False)
    assert {type(error) for error in run.errors.values()} == {oa.CollectiveMismatchError}


@pytest.mark.parametrize(
    ("routes", "backend"), [({"cpu": "tcp"}, "hybrid"), ({"cpu": "simulated"}, "tcp"), ({"cpu": "simulated"}, "nccl")]
)
def test_a_run_without_a_simulated_part_is_refused(routes: dict[str, str], backend: str) -> None:
    with pytest.raises(UsageError, match="the ranks of this run are simulated: leave it out, or compose it with 'simulated'"):
        simulated.run(work, 2, config=config(routes, backend))


@pytest.mark.parametrize("backends", [{}, {"hybrid": 3}, {"hybrid": {"routes": "simulated"}}, 5])
def test_a_table_that_is_none_is_refused_in_words(backends: Any) -> None:
    with pytest.raises(UsageError, match="leave it out, or compose it with 'simulated'"):
        simulated.run(work, 2, config={"backend": "hybrid", "backends": backends})
