"""`Ranks`: workers that stay, for one function after the other, and as an executor."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest
from support import launched
from support.launch_tools import Deadlines, Watch, deadlines, passing, watch
from support.on_hosts import is_alive

import oneaccord as oa

__all__ = ["deadlines", "watch"]

LONG_S = 120.0


@pytest.fixture(scope="module")
def three() -> Iterator[oa.Ranks]:
    """Three ranks for the tests after which they can go on."""
    with oa.Ranks(3) as ranks:
        yield ranks


def test_ranks_run_again_in_the_same_processes(three: oa.Ranks) -> None:
    first = three.run(launched.pid, timeout_s=LONG_S)
    assert len(set(first)) == 3
    for value in (1.0, 10.0):
        assert three.run(launched.adds, value, times=3, timeout_s=LONG_S) == [(rank, 3, 3 * value + 3) for rank in range(3)]
    assert three.run(launched.pid, timeout_s=LONG_S) == first


def test_ranks_run_after_an_exception_works(three: oa.Ranks) -> None:
    with pytest.raises(launched.OfItsOwn, match="no such thing") as caught:
        three.run(launched.fails, 1, timeout_s=LONG_S)
    assert "on rank 1 of 3" in caught.value.__notes__[0]
    assert three.run(launched.adds, 1.0, timeout_s=LONG_S) == [(rank, 3, 6.0) for rank in range(3)]


def test_ranks_run_after_a_missed_deadline_works(three: oa.Ranks, watch: Watch, deadlines: Deadlines) -> None:
    with (
        passing(deadlines, watch, 3),
        pytest.raises(oa.DeadlineError, match=r"ranks 0-2 of 3 had not finished aborts\(\) within 600 s"),
    ):
        three.run(launched.aborts, str(watch.path), timeout_s=600)
    assert three.run(launched.adds, 1.0, timeout_s=LONG_S) == [(rank, 3, 6.0) for rank in range(3)]


def test_ranks_output_is_shown_before_run_returns(three: oa.Ranks) -> None:
    for _ in range(20):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            three.run(launched.speaks, timeout_s=LONG_S)
        assert sorted(out.getvalue().splitlines()) == [f"[{rank}] this is {rank}" for rank in range(3)]


def test_ranks_map_gives_tasks_to_all(three: oa.Ranks) -> None:
    assert list(three.map(launched.double, range(30), timeout=LONG_S)) == [2 * value for value in range(30)]


def test_ranks_submit_exception_comes_back_with_a_note(three: oa.Ranks) -> None:
    futures = [three.submit(launched.double, value) for value in (1, -2, 3)]
    assert (futures[0].result(LONG_S), futures[2].result(LONG_S)) == (2, 6)
    error = futures[1].exception(LONG_S)
    assert isinstance(error, launched.OfItsOwn)
    assert error.code == -2
    assert "raised by double() on rank" in error.__notes__[0]
    assert 'raise OfItsOwn(value, "below 0")' in error.__notes__[0]


def test_ranks_tasks_and_runs_in_turn(three: oa.Ranks) -> None:
    futures = [three.submit(launched.double, value) for value in range(6)]
    assert three.run(launched.adds, 0.0, timeout_s=LONG_S) == [(rank, 3, 3.0) for rank in range(3)]
    assert [future.result(LONG_S) for future in futures] == [0, 2, 4, 6, 8, 10]


def test_ranks_that_lost_one_say_so_and_others_go_on() -> None:
    with oa.Ranks(2) as ranks:
        lost = ranks.submit(launched.die)
        error = lost.exception(LONG_S)
        assert isinstance(error, oa.RankError)
        assert str(error) == f"rank {error.rank} of 2 was lost during die(): killed by SIGKILL"
        assert list(ranks.map(launched.double, range(5), timeout=LONG_S)) == [0, 2, 4, 6, 8]
        with pytest.raises(
            oa.RankError, match=rf"rank {error.rank} of 2 was lost \(killed by SIGKILL\), and a group needs all"
        ):
            ranks.run(launched.adds, 1.0, timeout_s=LONG_S)


def test_ranks_run_lost_rank_is_named_then_and_later() -> None:
    with oa.Ranks(2) as ranks:
        for words in ("rank 1 of 2 was lost: killed by SIGKILL", "rank 1 of 2 was lost .* needs all"):
            with pytest.raises(oa.RankError, match=words):
                ranks.run(launched.killed, 1, timeout_s=LONG_S)


def test_ranks_all_lost_fails_all_tasks() -> None:
    with oa.Ranks(1) as ranks:
        futures = [ranks.submit(launched.die), ranks.submit(launched.double, 1)]
        wait(futures, timeout=LONG_S)
        assert isinstance(futures[0].exception(), oa.RankError)
        assert "none of 1 is left (rank 0: killed by SIGKILL)" in str(futures[1].exception())
        assert "found no rank" in str(ranks.submit(launched.double, 1).exception(LONG_S))


def test_ranks_retry_on_another_rank(tmp_path: Path) -> None:
    with oa.Ranks(2, retries=1) as ranks:
        assert ranks.submit(launched.die, str(tmp_path / "once")).result(LONG_S) == "alive"
        assert isinstance(ranks.submit(launched.double, -1).exception(LONG_S), launched.OfItsOwn)


def test_ranks_leaving_ends_tasks_first_and_leaves_none(watch: Watch) -> None:
    with oa.Ranks(2) as ranks:
        ranks.run(launched.hang, str(watch.path), (), timeout_s=LONG_S)
        watch.wait_for(2)
        futures = [ranks.submit(launched.double, value) for value in range(10)]
    assert [future.result(0) for future in futures] == [2 * value for value in range(10)]
    watch.assert_all_gone()
    with pytest.raises(oa.ClosedError, match="shut down"):
        ranks.submit(launched.double, 1)
    with pytest.raises(oa.ClosedError):
        ranks.run(launched.adds, 1.0)


def test_ranks_leaving_by_an_exception_ends_them_at_once(watch: Watch) -> None:
    futures = []

    def leaves() -> None:
        with oa.Ranks(1) as ranks:
            futures.append(ranks.submit(launched.sleeps, str(watch.path)))
            futures.append(ranks.submit(launched.double, 1))
            watch.wait_for(1)
            raise KeyError

    with pytest.raises(KeyError):
        leaves()
    under_way, waiting = futures
    assert isinstance(under_way.exception(LONG_S), oa.RankError)
    with pytest.raises(CancelledError):
        waiting.result(LONG_S)
    watch.assert_all_gone()


def test_ranks_stuck_rank_is_named_by_later_runs(watch: Watch, deadlines: Deadlines) -> None:
    ranks = oa.Ranks(2, options={"grace_s": 0.0})
    ranks.run(launched.adds, 1.0, timeout_s=LONG_S)
    with (
        passing(deadlines, watch, 2),
        pytest.raises(oa.DeadlineError, match=r"rank 1 of 2 had not finished hang\(\)"),
    ):
        ranks.run(launched.hang, str(watch.path), (1,), timeout_s=600)
    with pytest.raises(oa.RankError, match=r"rank 1 of 2 did not end hang\(\) when it was to"):
        ranks.run(launched.adds, 1.0, timeout_s=LONG_S)
    ranks.shutdown()
    watch.assert_all_gone()


@pytest.mark.parametrize("retries", [-1, 0.5])
def test_ranks_retries_that_cannot_be_are_refused(retries: int) -> None:
    with pytest.raises(oa.UsageError, match="retries"):
        oa.Ranks(1, retries=retries)


def test_ranks_shutdown_waits_after_one_that_did_not() -> None:
    ranks = oa.Ranks(2)
    processes = ranks.run(launched.pid, timeout_s=LONG_S)
    future = ranks.submit(launched.rests, 0.5)
    ranks.shutdown(wait=False)
    ranks.shutdown()
    assert future.done()
    assert not any(is_alive(process) for process in processes)
    ranks.shutdown()


@pytest.mark.parametrize("late_s", [0.0, 0.05, 0.1, 0.2])
def test_launch_ranks_ended_while_starting_are_silent(late_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    job = oa.launch_async(launched.turns, 2)
    time.sleep(late_s)
    job.cancel()
    assert capfd.readouterr() == ("", "")
