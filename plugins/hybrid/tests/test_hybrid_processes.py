"""Ranks that are processes, over shared memory inside hosts and TCP between them: who is told when one dies, and several real hosts."""

from __future__ import annotations

import contextlib
import signal

import pytest
from support.fault_tools import Nursery, Ranks


def by_place(nursery: Nursery, program: str) -> contextlib.AbstractContextManager[Ranks]:
    variables = {"ONEACCORD_BACKEND": "hybrid", "ONEACCORD_RANKS_PER_HOST": "2"}  # shm and tcp, as without a table of routes
    return nursery.ranks(program, 4, **variables)


@pytest.mark.parametrize(
    ("call", "victim"),
    [
        ("attempt(lambda: [group.barrier() for _ in range(1000000)])", 0),
        ("attempt(group.sendrecv, np.zeros(8 << 20), 3, rank ^ 1) if rank != 3 else time.sleep(30)", 3),
    ],
    ids=["barrier", "exchange"],
)
def test_a_killed_rank_is_named_by_all_who_wait(nursery: Nursery, call: str, victim: int) -> None:
    program = f"""
        with oa.init(timeout_s=20) as group:
            group.barrier()
            tell("running")
            {call}
    """
    with by_place(nursery, program) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(victim, signal.SIGKILL)
        failures = ranks.raised()
    assert {rank: (failure["type"], failure["about"]) for rank, failure in failures.items()} == {
        rank: ("PeerLostError", victim) for rank in range(4) if rank != victim
    }


def test_ranks_of_several_systems_share_memory_on_each(nursery: Nursery) -> None:
    program = """
    import oneaccord_shm.meeting
    oneaccord_shm.meeting.boot_id = lambda: f"the system of host {rank // 2}"
    with oa.init(timeout_s=20) as group:
        x = group.empty(300_000)
        x[:] = rank
        total = group.all_reduce(x)
        with group.split(rank // 2) as near:
            pair = near.all_gather(np.array([rank])).tolist()
        got = group.sendrecv(np.full(100_000, rank), (rank + 1) % 4, (rank - 1) % 4)
        tell("done", total=[total.min(), total.max()], pair=pair, got=[int(got.min()), int(got.max())])
    """
    with by_place(nursery, program) as ranks:
        facts = ranks.start().await_facts("done")
        assert set(ranks.wait().values()) == {0}
    for rank, fact in enumerate(facts):
        before = (rank - 1) % 4
        assert (fact["total"], fact["pair"], fact["got"]) == ([6.0, 6.0], [rank // 2 * 2, rank // 2 * 2 + 1], [before, before])


@pytest.mark.parametrize(("per_host", "taken"), [(2, "hybrid"), (1, "tcp"), (4, "shm")])
def test_auto_takes_hybrid_if_hosts_have_several_ranks(nursery: Nursery, per_host: int, taken: str) -> None:
    program = f"""
    import oneaccord.job.autobackend, oneaccord_shm.meeting
    system = lambda: f"the system of host {{rank // {per_host}}}"
    oneaccord.job.autobackend._system = oneaccord_shm.meeting.boot_id = system
    with oa.init(timeout_s=20) as group:
        tell("done", backend=group.backend_name, total=group.all_reduce(np.array([rank])).tolist())
    """
    variables = {"ONEACCORD_BACKEND": "auto", "ONEACCORD_RANKS_PER_HOST": str(per_host)}
    with nursery.ranks(program, 4, **variables) as ranks:
        facts = ranks.start().await_facts("done")
        assert set(ranks.wait().values()) == {0}
    assert [(fact["backend"], fact["total"]) for fact in facts] == [(taken, [6])] * 4
