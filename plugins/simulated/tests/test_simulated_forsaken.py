"""Ranks that wait, for ever, for what nobody does."""

from __future__ import annotations

import logging
import os
import queue
import threading

import pytest

import oneaccord as oa
import oneaccord_simulated
from oneaccord.api import Group
from oneaccord_simulated import baton


def test_wait_for_a_lock_nobody_frees_is_a_deadlock_at_once() -> None:
    never = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 1:
            never.wait()

    with pytest.raises(
        oa.DeadlockError,
        match=r"^deadlock: no rank can go on: rank 1 is waiting for an event, a queue or a condition at .*test_simulated_forsaken\.py:\d+, and nothing",
    ):
        oneaccord_simulated.run(program, 3)


def test_wait_for_an_empty_queue_is_the_cause_and_no_deadline_passes() -> None:
    empty: queue.SimpleQueue[None] = queue.SimpleQueue()

    def program(group: Group) -> None:
        if group.rank == 0:
            empty.get()
        group.barrier()

    with pytest.raises(oa.DeadlockError) as caught:
        oneaccord_simulated.run(program, 3, timeout_s=3600)
    headline, first, others, *_ = str(caught.value).splitlines()  # threads of other tests may be named below
    assert headline.startswith(
        "deadlock: no rank can go on: rank 1 waits for rank 0, which is waiting for an item of a queue at "
    )
    assert first.startswith("  rank 0: waiting for an item of a queue at ")
    assert others.startswith("  ranks 1-2: barrier() #0 at ")
    assert caught.value.run.duration_s == 0.0


def test_wait_that_no_thread_sees_is_reported_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read of a pipe, in C: the rank keeps its turn."""
    monkeypatch.setattr(baton, "_REPORT_S", 0.1)
    monkeypatch.setattr(baton, "_FORSAKEN_S", 1.0)
    monkeypatch.setattr(baton, "_COMPUTES", 2.0)  # other tests of this process may compute
    monkeypatch.setattr(baton, "_PATIENCE_S", 0.1)
    reader, writer = os.pipe()

    def program(group: Group) -> None:
        if group.rank == 1:
            os.read(reader, 1)
        group.barrier()

    with (
        caplog.at_level(logging.WARNING, "oneaccord"),
        pytest.raises(oa.DeadlockError, match=r"^rank 1 is busy at .*forsaken\.py:\d+, and nothing has happened for minutes"),
    ):
        oneaccord_simulated.run(program, 2)
    assert "has waited for" in caplog.text
    assert "rank 1 is busy at" in caplog.text
    os.write(writer, b"x")
    os.close(writer)


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

    faults = oneaccord_simulated.Pause(rank=1, at_s=0.0005, for_s=0.5)
    run = oneaccord_simulated.run(program, 2, faults=faults)
    assert run.results == [1.0, 0.0]
    assert run.duration_s == 0.5005
