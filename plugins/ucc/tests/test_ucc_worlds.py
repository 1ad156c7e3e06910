"""What holds over any libucc, also over one that goes wrong: worlds over a libucc of Python."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import BackendUnavailableError, CommError, ConfigError, Deadline, Group
from oneaccord_ucc import team

World = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [1, 5])
def test_what_ucc_performs_equals_numpy(world: World, ucc: Any, size: int):
    def program(group: Group) -> None:
        every = [np.arange(2 * size) * 3 + rank for rank in range(size)]
        mine, total, whole = every[group.rank], sum(every), np.concatenate(every)
        for dtype in ("int8", "uint64", "float32", "float64"):
            assert (group.all_reduce(mine.astype(dtype)) == total.astype(dtype)).all()
        inout = mine.astype(float)
        assert group.all_reduce(inout, "mean", out=inout) is inout
        assert (inout == total / size).all()
        assert (group.all_reduce(mine, "max") == every[-1]).all()
        assert (group.all_reduce(mine, "xor") == np.bitwise_xor.reduce(every)).all()
        reduced = group.reduce(mine, root=size - 1)
        assert (reduced == total).all() if group.rank == size - 1 else reduced is None
        assert (mine == every[group.rank]).all()
        assert (group.reduce_scatter(mine) == np.split(total, size)[group.rank]).all()
        assert (group.broadcast(mine, root=size - 1) == every[-1]).all()
        assert (group.all_gather(mine) == whole).all()
        assert (group.all_to_all(mine) == np.concatenate([np.split(each, size)[group.rank] for each in every])).all()
        assert (group.broadcast(mine.astype("f2"), root=0) == every[0]).all()
        before = ucc.counts.get("collective_init", 0)
        group.barrier()
        assert (group.all_reduce(np.ones(3, np.float16)) == size).all()
        assert np.isnan(group.all_reduce(np.array([np.nan, 1.0]), "min")[0])
        assert group.all_reduce(np.ones(0)).size == 0
        group.barrier()
        assert ucc.counts.get("collective_init", 0) == before, "oneaccord performs these"

    must(world(program, size))
    assert ucc.counts.get("collective_finalize", 0) == (13 * size if size > 1 else 0)
    assert [ucc.counts.get(name, 0) for name in ("team_destroy", "context_destroy", "finalize")] == [
        size if size > 1 else 0
    ] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(np.ones(4 + (group.rank == 1))),
        lambda group: group.all_reduce(np.ones(4), "sum" if group.rank else "product"),
        lambda group: group.broadcast(np.ones(4), root=group.rank),
        lambda group: group.all_gather(np.ones(4)) if group.rank == 2 else group.all_reduce(np.ones(4)),
        lambda group: group.all_reduce(np.ones(4, np.float16 if group.rank == 1 else np.float32)),
    ],
    ids=["shape", "op", "root", "order", "of what oneaccord performs"],
)
def test_a_mismatch_is_named_on_every_rank_and_ucc_does_not_begin(world: World, ucc: Any, call: Callable[[Group], object]):
    for error in world(call):
        assert isinstance(error, oa.CollectiveMismatchError)
        assert "#0" in str(error)
    assert "collective_init" not in ucc.counts


def test_no_rank_takes_a_result_where_another_one_failed(world: World, ucc: Any, monkeypatch: pytest.MonkeyPatch):
    """UCC may say on one rank that all is well, fail on another, and go on for ever on a third."""
    monkeypatch.setattr(team.Team, "verdict_s", 0.05)
    ucc.status = lambda rank: (ucc.OK, ucc.REFUSED, ucc.IN_PROGRESS)[rank]
    for error in world(lambda group: group.all_reduce(np.ones(4))):
        assert isinstance(error, CommError)
        assert "UCC failed: status -2" in str(error)


def test_a_collective_that_never_ends_meets_the_deadline_and_keeps_its_memory(
    world: World, ucc: Any, monkeypatch: pytest.MonkeyPatch
):
    ucc.status = lambda rank: ucc.IN_PROGRESS
    wait = team.Team._wait
    # The deadline passes once all have begun, and not before.
    monkeypatch.setattr(
        team.Team, "_wait", lambda self, status, nbytes, _, stall: wait(self, status, nbytes, Deadline(0.1), stall)
    )
    memory: list[weakref.ref[Any]] = []

    def program(group: Group) -> None:
        mine = np.ones(4)
        memory.append(weakref.ref(mine))
        group.all_reduce(mine, out=mine)

    for error in world(program):
        assert isinstance(error, oa.DeadlineError)
        error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()
    assert [each() is None for each in memory] == [False] * 3, "UCC may still write there"
    assert "team_destroy" not in ucc.counts


def test_a_rank_that_has_ended_lets_ucc_work_for_the_others(world: World, ucc: Any):
    ucc.status = lambda rank: ucc.OK if rank == 0 else ucc.IN_PROGRESS
    worked: list[int] = []

    def on_progress(rank: int) -> None:
        worked.extend([rank] * bool(ucc.last))
        if worked.count(0) == 4:  # once in its own call, which had ended, and then for the others
            ucc.end()

    ucc.on_progress = on_progress
    assert [got.tolist() for got in must(world(lambda group: group.all_gather(np.array([group.rank])), 2))] == [[0, 1]] * 2


def test_closing_does_not_wait_for_an_end_that_never_comes(world: World, ucc: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(team, "_LAST_S", 0.05)
    ucc.ending.clear()
    try:
        must(world(lambda group: group.all_reduce(np.ones(4)), 2))
        assert "finalize" not in ucc.counts
    finally:
        ucc.ending.set()
    for thread in threading.enumerate():
        if thread.name == "oneaccord-ucc":
            thread.join(PATIENCE_S)
    assert ucc.counts["finalize"] == 2
    assert team._abandoned == []


def test_what_ucc_refuses_at_the_start_is_told(world: World, ucc: Any):
    ucc._team_create_test = lambda handle: ucc.REFUSED
    for outcome in world(lambda group: group.barrier(), 2):
        assert isinstance(outcome, BackendUnavailableError)
        assert "UCC 1.99.0 cannot make a team: status -2" in str(outcome)


def settings() -> dict[str, str]:
    """Return what tells UCX and UCC anything; ranks that end meanwhile may take their notes out of the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("UC")}


@pytest.mark.parametrize("mine", [None, "all"])
def test_ucx_reads_no_memory_of_other_processes_unless_the_user_lets_it(
    world: World, ucc: Any, monkeypatch: pytest.MonkeyPatch, mine: str | None
):
    """It would end this process where the other one dies. On one host it listens at loopback alone."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
        if mine is not None:
            monkeypatch.setenv(name, mine)
    seen: dict[str, str] = {}
    before, create = settings(), ucc._context_create

    def look(*args: Any) -> int:
        seen.update({name: value for name, value in settings().items() if name.startswith("UCC_UCX_")})
        return int(create(*args))

    ucc._context_create = look
    must(world(lambda group: None, 2))
    assert seen == ({} if mine else {"UCC_UCX_TLS": "^cma,knem,xpmem", "UCC_UCX_NET_DEVICES": "lo"})
    assert settings() == before


def test_a_rank_that_does_not_come_to_a_meeting_is_named(world: World, ucc: Any, monkeypatch: pytest.MonkeyPatch):
    gone = threading.Event()
    meet = team.Team._meet

    def hesitate(self: team.Team, bootstrap: Any) -> None:
        if bootstrap.rank == 1:
            assert gone.wait(PATIENCE_S)
        bootstrap.deadline = Deadline(0.1)
        try:
            meet(self, bootstrap)
        finally:
            gone.set()

    monkeypatch.setattr(team.Team, "_meet", hesitate)
    outcomes = world(lambda group: group.barrier(), 2)
    assert isinstance(outcomes[0], oa.DeadlineError), outcomes
    assert "rank 1" in str(outcomes[0])


def test_ranks_with_different_settings_are_told(world: World):
    for outcome in world(lambda group: None, 2, messages=lambda rank: ("tcp", "shm")[rank]):
        assert isinstance(outcome, ConfigError)
        assert "backends.ucc.messages is tcp on rank 0 and shm on rank 1" in str(outcome)


def test_threads_of_one_process_are_refused(ucc: Any):
    for outcome in thread_world(lambda group: None, 2, backend="ucc"):
        assert isinstance(outcome, BackendUnavailableError)
        assert "are processes" in str(outcome)


def test_messages_go_over_the_other_backend(world: World):
    def program(group: Group) -> None:
        peer = 1 - group.rank
        assert (group.sendrecv(np.full(3, group.rank), peer, peer) == peer).all()
        assert group.backend("shm") is not None
        assert group.backend("tcp") is None
        group.empty(1000)[...] = 1

    must(world(program, 2, messages=lambda rank: "shm"))
