"""`launch` and `Ranks`, used in ways that no page shows: after a fork, without files, without `sys.stdout`, without an end."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import launched
from support.launch_tools import Deadlines, Watch, deadlines, environment, passing, watch

import oneaccord as oa
from oneaccord.engines import workers

__all__ = ["deadlines", "watch"]

LONG_S = 120.0


def run(directory: Path, text: str) -> str:
    program = directory / "program.py"
    program.write_text("import os, oneaccord as oa\nfrom support import launched\n" + textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, program], env=environment(), capture_output=True, text=True, timeout=LONG_S, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": None}, "on must be"),
        ({"on": 5}, "on must be"),
        ({"options": 5}, "options must be a mapping"),
        ({"options": {1: 2}}, "options must be a mapping"),
        ({"options": {"prefix": "no"}}, "prefix must be True or False, not 'no'"),
        ({"options": {"fork": 1}}, "fork must be True or False, not 1"),
        ({"options": {"environ": {"A=B": "1"}}}, "environ has 'A=B'"),
        ({"options": {"environ": {"A": "\0"}}}, "environ has 'A'"),
        ({"kwargs": 5}, "kwargs must be a mapping"),
        ({"kwargs": {1: 2}}, "kwargs must be a mapping"),
        ({"config": 5}, "config must be the path of a file, or a mapping, not 5"),
    ],
)
def test_launch_wrong_argument_is_a_usage_error(given: dict[str, object], words: str) -> None:
    with pytest.raises(oa.UsageError, match=words):
        oa.launch(launched.adds, 1, **given)  # type: ignore[arg-type]


def test_launch_result_that_cannot_be_unpickled_names_the_rank() -> None:
    with pytest.raises(oa.UsageError, match=r"the result of rank 1 of 2 cannot be unpickled here \(ZeroDivisionError"):
        oa.launch(launched.unreadable, 2, timeout_s=LONG_S)


def test_launch_program_without_streams_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert oa.launch(launched.speaks, 2, timeout_s=LONG_S) == [None, None]


def test_launch_without_files_leaves_nothing(tmp_path: Path) -> None:
    text = """
    import gc, resource, threading
    def held():
        gc.collect()  # the errors, which hold frames
        return len(os.listdir("/proc/self/fd")), threading.active_count()
    oa.launch(launched.pid, 1)
    before, (_, most) = held(), resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in range(1, 12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + more, most))
        try:
            oa.launch(launched.pid, 4, timeout_s=100)
        except (OSError, oa.RankError) as error:
            assert "Too many open files" in str(error), error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        assert held() == before, (more, held(), before)
    print(len(oa.launch(launched.pid, 2)))
    """
    assert run(tmp_path, text) == "2\n"


def test_launch_handles_in_a_forked_child_neither_hang_nor_end_ranks(tmp_path: Path) -> None:
    text = """
    import signal, sys, time
    ranks = oa.Ranks(2)
    first = ranks.run(launched.pid)
    job = oa.launch_async(launched.turns, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang is an end by a signal
        for use in (lambda: ranks.run(launched.pid), lambda: ranks.submit(launched.pid), job.results):
            try:
                use()
            except (oa.ClosedError, oa.UsageError) as error:
                print("forked" in str(error), flush=True)
        ranks.shutdown()
        job.cancel()
        os._exit(0)
    print(os.waitpid(child, 0)[1], ranks.run(launched.pid) == first)
    ranks.shutdown()
    job.cancel()
    """
    assert run(tmp_path, text) == "True\nTrue\nTrue\n0 True\n"


def test_ranks_without_a_name_end(watch: Watch) -> None:
    ranks = oa.Ranks(2)
    ranks.run(launched.holds, str(watch.path), timeout_s=LONG_S)
    watch.wait_for(2)
    del ranks
    gc.collect()
    watch.assert_all_gone()


def test_ranks_task_without_a_rank_says_what_the_ranks_do(
    watch: Watch, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_REVOKE_S", 0.5)
    with oa.Ranks(1, options={"grace_s": 0.0}) as ranks:
        with passing(deadlines, watch, 1), pytest.raises(oa.DeadlineError):
            ranks.run(launched.hang, str(watch.path), (0,), timeout_s=600)
        error = ranks.submit(launched.double, 1).exception(LONG_S)
    assert "none of 1 is left (rank 0: did not end hang() when it was to)" in str(error)
