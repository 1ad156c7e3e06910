"""The driver of launchers whose engine has the workers, over one whose workers are threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
from support.launch_tools import Deadlines, deadlines
from support.thread_workers import ThreadWorkers

import oneaccord as oa
from oneaccord.api import WorkerLost
from oneaccord.engines import worker_main, workers

__all__ = ["deadlines"]

LONG_S = 120.0
begun = threading.Barrier(3)


def adds(group: oa.Group, value: float) -> tuple[int, float]:
    for _ in range(20):
        total = float(group.all_reduce(np.array([value]))[0])
    return group.rank, total


def waits(group: oa.Group) -> None:
    begun.wait(LONG_S)
    while True:
        group.barrier(timeout_s=3600)


def test_worker_launcher_returns_results_by_rank() -> None:
    launcher = ThreadWorkers()
    assert oa.launch(adds, 3, on=launcher, args=(2.0,), per_host=2, gpus=1, backend="tcp", timeout_s=LONG_S) == [
        (rank, 6.0) for rank in range(3)
    ]
    (ask,) = launcher.asked
    assert (ask.ranks, ask.per_host, ask.gpus) == (3, 2, 1)
    assert launcher.stops == 1


def test_worker_launcher_two_jobs_in_one_process_at_once() -> None:
    jobs = [
        oa.launch_async(adds, 2, on=ThreadWorkers(), args=(value,), backend="tcp", timeout_s=LONG_S) for value in (1.0, 50.0)
    ]
    assert [job.results() for job in jobs] == [[(0, 2.0), (1, 2.0)], [(0, 100.0), (1, 100.0)]]


def test_worker_launcher_local_ranks_follow_the_hosts() -> None:
    def local(group: oa.Group) -> int:
        return group._job.local_rank

    pytest.importorskip("cloudpickle")
    assert oa.launch(local, 5, on=ThreadWorkers(per_host=2), backend="tcp", timeout_s=LONG_S) == [0, 1, 0, 1, 0]


def test_worker_launcher_exception_names_rank_and_host() -> None:
    def fails(group: oa.Group) -> None:
        if group.rank == 2:
            raise KeyError("gone")
        group.barrier()

    pytest.importorskip("cloudpickle")
    with pytest.raises(KeyError, match="gone") as caught:
        oa.launch(fails, 3, on=ThreadWorkers(), backend="tcp", timeout_s=LONG_S)
    assert "on rank 2 of 3 on host1; then also: rank 0 (oneaccord.errors.AbortedError)" in caught.value.__notes__[0]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver end at once what would go on for ever after a failure."""
    monkeypatch.setattr(workers, "_GRACE_S", 0.2)


def test_worker_launcher_lost_worker_is_named_and_the_rest_ends(short_grace: None) -> None:
    launcher = ThreadWorkers()
    job = oa.launch_async(waits, 2, on=launcher, backend="tcp", timeout_s=LONG_S)
    begun.wait(LONG_S)
    launcher.lose(1, "its node is gone")
    with pytest.raises(oa.RankError, match="rank 1 of 2 was lost: its node is gone") as caught:
        job.results()
    # Its thread lives on, and rank 0 waits for it: the driver has ended that wait.
    assert caught.value.rank == 1
    assert launcher.stops == 1


def test_worker_launcher_cancel_revokes_the_group() -> None:
    launcher = ThreadWorkers()
    job = oa.launch_async(waits, 2, on=launcher, backend="tcp", timeout_s=LONG_S)
    begun.wait(LONG_S)
    job.cancel()
    with pytest.raises(oa.AbortedError):
        job.results()
    assert [each.state for each in job.ranks] == ["failed", "failed"]
    assert launcher.stops == 1


def test_worker_launcher_ranks_run_and_submit() -> None:
    launcher = ThreadWorkers()
    with oa.Ranks(2, on=launcher, backend="tcp") as ranks:
        assert ranks.run(adds, 1.0, timeout_s=LONG_S) == [(0, 2.0), (1, 2.0)]
        assert list(ranks.map(abs, [-1, 2, -3], timeout=LONG_S)) == [1, 2, 3]
        launcher.lose(0, "its node is gone")
        assert "was lost during abs(): its node is gone" in str(ranks.submit(abs, 1).exception(LONG_S))
        assert ranks.submit(abs, -7).result(LONG_S) == 7
    assert launcher.stops == 1


class _Refuses(ThreadWorkers):
    def place(self, *_: Any) -> Any:
        raise oa.UsageError("the cluster has 2 processors, and 64 were asked for")


class _Breaks(ThreadWorkers):
    def call(self, worker: Any, function: Any, args: Any) -> Any:
        if worker.index == 1:
            raise OSError("the scheduler does not answer")
        return super().call(worker, function, args)


def test_worker_launcher_refusal_comes_in_its_words() -> None:
    with pytest.raises(oa.UsageError, match="2 processors, and 64"):
        oa.launch(adds, 2, on=_Refuses(), args=(1.0,))


def test_worker_launcher_that_refuses_is_stopped() -> None:
    launcher = _Refuses()
    with pytest.raises(oa.UsageError):
        oa.launch(adds, 2, on=launcher, args=(1.0,))
    assert launcher.stops == 1
    with pytest.raises(oa.UsageError):
        oa.Ranks(2, on=launcher)
    assert launcher.stops == 2


class _AsksLate(ThreadWorkers):
    """Only rank 0 is asked to end at once; the others have been ended through their group when they are asked."""

    def call(self, worker: Any, function: Any, args: Any) -> Any:
        if function is worker_main.revoke and worker.index:
            for each in self._calls[worker.index]:
                wait([each], timeout=LONG_S)
        return super().call(worker, function, args)


def test_worker_launcher_deadline_names_ranks_that_end_through_others(deadlines: Deadlines) -> None:
    job = oa.launch_async(waits, 2, on=_AsksLate(), backend="tcp", timeout_s=600)
    begun.wait(LONG_S)
    deadlines.pass_now()
    with pytest.raises(oa.DeadlineError, match=r"ranks 0-1 of 2 had not finished waits\(\)"):
        job.results()


class _Silent(ThreadWorkers):
    def call(self, worker: Any, function: Any, args: Any) -> Any:
        return Future()


def test_worker_launcher_deadline_before_the_start_names_all_ranks() -> None:
    with pytest.raises(oa.DeadlineError, match=r"ranks 0-2 of 3 had not finished adds\(\) within 0.1 s"):
        oa.launch(adds, 3, on=_Silent(), args=(1.0,), timeout_s=0.1)


def test_worker_launcher_error_of_the_engine_names_the_rank(short_grace: None) -> None:
    with pytest.raises(oa.RankError, match="rank 1 of 2 could not be started: OSError: the scheduler does not answer"):
        oa.launch(adds, 2, on=_Breaks(), args=(1.0,), backend="tcp", timeout_s=LONG_S)


def test_worker_lost_says_its_reason() -> None:
    assert str(WorkerLost("killed by SIGKILL")) == "killed by SIGKILL"
