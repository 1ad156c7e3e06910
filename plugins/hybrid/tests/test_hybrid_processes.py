"""Ranks that are processes, over shared memory inside hosts and TCP between them: who is told when one dies, and several real hosts."""

from __future__ import annotations

import contextlib
import signal

import pytest
from fault_tools import Nursery, Ranks

PROMISE_S = 1.0
"""Within what time a dead rank is named on every survivor."""


def by_place(nursery: Nursery, program: str, backend: str = "hybrid") -> contextlib.AbstractContextManager[Ranks]:
    variables = {
        "MANYHANDS_BACKEND": backend,
        "MANYHANDS_RANKS_PER_HOST": "2",
        "MANYHANDS_BACKENDS__HYBRID__ROUTES__INTRA": "shm",
        "MANYHANDS_BACKENDS__HYBRID__ROUTES__INTER": "tcp",
    }
    return nursery.ranks(program, 4, **variables)


WAITING = {
    "all_reduce": "x = np.zeros(4 << 20, np.float32); attempt(lambda: [group.all_reduce(x, out=x) for _ in range(10000)])",
    "barrier": "attempt(lambda: [group.barrier() for _ in range(1000000)])",
    "recv": "attempt(group.recv, VICTIM) if rank != VICTIM else time.sleep(30)",
    "exchange": "attempt(group.sendrecv, np.zeros(8 << 20), VICTIM, rank ^ 1) if rank != VICTIM else time.sleep(30)",
}


@pytest.mark.parametrize(
    ("call", "victim"), [("all_reduce", 1), ("all_reduce", 3), ("barrier", 0), ("recv", 2), ("exchange", 3)]
)
def test_a_killed_rank_is_named_by_all_who_wait(nursery: Nursery, call: str, victim: int) -> None:
    program = f"""
        with mh.init(timeout_s=20) as group:
            group.barrier()
            tell("running", backend=group.backend_name)
            {WAITING[call].replace("VICTIM", str(victim))}
    """
    with by_place(nursery, program) as ranks:
        running = ranks.start().await_facts("running")
        assert {fact["backend"] for fact in running} == {"hybrid"}
        killed_at = ranks.signal(victim, signal.SIGKILL)
        failures = ranks.raised()
    assert sorted(failures) == [rank for rank in range(4) if rank != victim]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure
        assert failure["ended"] - killed_at < PROMISE_S


ELSEWHERE = """
    import manyhands_shm.meeting
    manyhands_shm.meeting.boot_id = lambda: f"the system of host {rank // 2}"
"""


def test_ranks_of_several_systems_share_memory_on_each(nursery: Nursery) -> None:
    program = f"""{ELSEWHERE}
    with mh.init(timeout_s=20) as group:
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


def test_shared_memory_alone_does_not_reach_that_far(nursery: Nursery) -> None:
    with by_place(nursery, f"{ELSEWHERE}\n    attempt(mh.init, timeout_s=20)", backend="shm") as ranks:
        failures = ranks.start().raised()
    assert {failure["type"] for failure in failures.values()} == {"BackendUnavailableError"}
