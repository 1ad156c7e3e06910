"""Ranks that wait, for ever, for what is not of the simulated world."""

from __future__ import annotations

import queue
import threading

import pytest

import manyhands as mh
import manyhands_simulated
from manyhands.api import Group
from manyhands_simulated import outside


def test_a_rank_that_waits_for_what_nobody_does_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "FORSAKEN_S", 0.3)
    never = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 1:
            never.wait()

    with pytest.raises(
        mh.DeadlockError, match=r"rank 1 waits at .*test_simulated_forsaken\.py:\d+, for something that is not of"
    ):
        manyhands_simulated.run(program, 3)
    never.set()


def test_a_rank_that_waits_for_what_nobody_does_is_the_cause_of_the_deadlines_that_others_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Theirs is an hour on the virtual clock, which passes at once: one of them might go on, and help."""
    monkeypatch.setattr(outside, "_HELP_S", 0.1)
    monkeypatch.setattr(outside, "FORSAKEN_S", 0.5)
    empty: queue.Queue[None] = queue.Queue()

    def program(group: Group) -> None:
        if group.rank == 0:
            empty.get()
        group.barrier()

    with pytest.raises(
        mh.DeadlockError, match=r"^rank 0 waits at .*forsaken\.py:\d+, for .* nothing has happened for "
    ) as caught:
        manyhands_simulated.run(program, 3, timeout_s=3600)
    assert "3600" not in str(caught.value)
    assert [line.partition(" at ")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  rank 0: waiting",
        "  ranks 1-2: ended after barrier() #0",
    ]
    empty.put(None)


def test_who_polls_lets_a_rank_that_was_paused_go_on() -> None:
    def program(group: Group) -> float:
        if group.rank == 1:
            group.compute(0.001)
            group.send(1.0, 0)
            return 0.0
        work = group.recv_async(1)
        while not work.done():
            pass
        return float(work.wait())

    faults = manyhands_simulated.Pause(rank=1, at_s=0.0005, for_s=0.5)
    run = manyhands_simulated.run(program, 2, faults=faults)
    assert run.results == [1.0, 0.0]
    assert run.duration_s == 0.5005
