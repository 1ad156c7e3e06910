"""Which rank is blamed, what is said about it, and how a rank leaves word of its error."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from oneaccord.contract import deadline
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import AbortedError, DeadlineError, InternalError, PeerLostError
from oneaccord.job import error_file
from oneaccord.job.error_file import ErrorRecord
from oneaccord.local.failure import Failure, exit_code, last_straw, primary, report, report_ended, report_lost

if TYPE_CHECKING:
    from pathlib import Path


def failure(
    rank: int, at: float, *, secondary: bool | None = None, time: float = 0.0, code: int = 1, stderr: str = ""
) -> Failure:
    record = None if secondary is None else ErrorRecord(rank, "E", "m", f"trace of {rank}\n", time, secondary, clock=time)
    return Failure(rank, code, at, record, stderr)


def test_the_earliest_is_blamed() -> None:
    assert primary([failure(0, 2.0), failure(1, 1.0)]).rank == 1


def test_a_consequence_is_not_blamed_however_early() -> None:
    assert primary([failure(0, 1.0, secondary=True, time=1.0), failure(1, 2.0)]).rank == 1
    assert primary([failure(0, 1.0, secondary=True, time=1.0), failure(1, 2.0, secondary=False, time=1.9)]).rank == 1


def test_the_time_of_the_error_counts_more_than_that_of_the_exit() -> None:
    slow_exit, quick_exit = failure(0, 9.0, secondary=False, time=1.0), failure(1, 3.0, secondary=False, time=2.0)
    assert primary([slow_exit, quick_exit]).rank == 0


def test_consequences_alone_blame_the_earliest_and_say_so() -> None:
    first = primary([failure(0, 5.0, secondary=True, time=4.0), failure(1, 5.0, secondary=True, time=3.0)])
    assert first.rank == 1
    assert report(first, [0], []).startswith("oneaccord run: rank 1 failed first on this host: exit code 1\n")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_the_exit_code_of_a_signal_is_that_of_shells(code: int, expected: int) -> None:
    assert exit_code(code) == expected


def test_the_traceback_of_the_error_file_is_last() -> None:
    text = report(failure(2, 1.0, secondary=False), [0, 1], [3])
    assert text == (
        "oneaccord run: rank 2 failed first: exit code 1\n"
        "oneaccord run: ranks 0-1 failed after it\n"
        "oneaccord run: rank 3 was ended because of it\n"
        "oneaccord run: the error of rank 2:\n"
        "trace of 2\n"
    )


CHAIN = """Traceback (most recent call last):
  File "a"
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b"
ValueError: 2
"""


def test_without_an_error_file_the_last_traceback_of_stderr_is_shown() -> None:
    old = "Traceback (most recent call last):\n  File 'x'\nOldError: handled and printed\nnoise\n"
    assert report(failure(0, 1.0, stderr=old + CHAIN), [], []).endswith(f"the error of rank 0:\n{CHAIN}")


def test_silence_is_told() -> None:
    text = report(failure(0, 1.0, code=-9), [], [])
    assert "rank 0 failed first: killed by SIGKILL\n" in text
    assert "rank 0 left no traceback, and wrote nothing to its standard error; the kernel kills a process if memory" in text


def test_many_ranks_are_counted() -> None:
    assert "ranks 1, 3, 5, 7, 9, 11 and 2 more failed after it" in report(failure(0, 1.0), range(1, 16, 2), [])


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rank-1.json"
    monkeypatch.setenv("ONEACCORD_ERROR_FILE", str(path))
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    return path


def end_with(error: BaseException) -> None:
    """Do what Python does when an error reaches the top."""
    try:
        raise error
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]


def test_an_error_is_written_for_the_launcher(told: Path) -> None:
    error_file.install(1)
    end_with(ValueError("bad"))
    record = error_file.read(told)
    assert record is not None
    assert (record.rank, record.type, record.message, record.secondary) == (1, "ValueError", "bad", False)
    assert record.traceback.startswith("Traceback (most recent call last):\n")
    assert record.traceback.endswith("ValueError: bad\n")
    assert [path.name for path in told.parent.iterdir()] == ["rank-1.json"]


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (PeerLostError("m", rank=1, peer=0), True),
        (PeerLostError("m", rank=1, peer=1), False),
        (DeadlineError("m"), False),
        (AbortedError("m"), True),
    ],
)
def test_what_others_caused_is_marked(told: Path, error: Exception, secondary: bool) -> None:
    error_file.install(1)
    end_with(error)
    record = error_file.read(told)
    assert record is not None
    assert record.secondary is secondary
    assert record.type == f"oneaccord.errors.{type(error).__name__}"


def test_the_hook_that_was_there_is_called_once(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: calls.append(kind))
    error_file.install(0)
    error_file.install(5)
    end_with(ValueError("bad"))
    assert calls == [ValueError]
    assert json.loads(told.read_text())["rank"] == 5


def test_an_error_of_a_forked_child_is_no_record_of_the_rank(told: Path) -> None:
    error_file.install(0)
    if not (child := os.fork()):
        end_with(ValueError("the child's"))
        os._exit(0)
    os.waitpid(child, 0)
    assert not told.exists()


def test_an_error_of_a_process_that_a_rank_started_is_no_record(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEACCORD_JOINED", f"{os.getppid()} 0/2@('127.0.0.1', 1)")
    error_file.install(0)
    end_with(ValueError("the child's"))
    assert not told.exists()


def test_an_interrupt_while_an_error_is_written_leaves_the_error(told: Path) -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            return "the cause"

    error_file.install(3)
    end_with(Interrupted())
    record = error_file.read(told)
    assert record is not None
    assert record.message == "the cause"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_file_that_cannot_be_written_hides_nothing(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: calls.append(kind))
    monkeypatch.setenv("ONEACCORD_ERROR_FILE", str(told / "no" / "such"))
    error_file.install(0)
    end_with(ValueError("bad"))
    assert calls == [ValueError]


def test_without_a_launcher_nothing_is_installed(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEACCORD_ERROR_FILE")
    before = sys.excepthook
    error_file.install(0)
    assert sys.excepthook is before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}'])
def test_half_a_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert error_file.read(tmp_path / "x") is None
    assert error_file.read(tmp_path / "missing") is None


def test_what_ended_a_job_that_had_survived_others_is_the_last_before_ranks_gave_up() -> None:
    dead, raised, gave_up = (
        failure(1, 1.0, code=-9),
        failure(2, 6.0, secondary=False, time=5.0),
        failure(0, 5.2, secondary=True, time=5.1),
    )
    later = failure(3, 7.0)
    first, survived = last_straw([gave_up, later, raised, dead])
    assert (first, survived) == (raised, [dead])
    assert report(first, [0], [], survived).splitlines()[:2] == [
        "oneaccord run: rank 1 failed, and the others continued: killed by SIGKILL",
        "oneaccord run: rank 2 failed then: exit code 1",
    ]


def test_where_nobody_gave_up_or_nothing_else_is_known_the_first_failure_ended_the_job() -> None:
    assert last_straw([failure(0, 2.0), failure(1, 1.0)]) == (failure(1, 1.0), [])
    assert last_straw([failure(0, 2.0, secondary=True, time=2.0)])[0].rank == 0


def test_a_death_in_whose_place_another_rank_came_did_not_end_the_job_where_all_failed_by_themselves_later() -> None:
    dead, one, other = failure(0, 1.0, code=-9), failure(1, 3.0), failure(2, 3.1)
    assert last_straw([other, dead, one], [dead]) == (one, [dead])
    soon = failure(1, 1.1, secondary=False, time=1.05)
    assert last_straw([soon, dead], [dead]) == (soon, [dead])
    quit_ = failure(1, 1.06, code=3)
    assert last_straw([quit_, dead], [dead]) == (dead, [])
    assert last_straw([dead], [dead]) == (dead, [])


def test_deaths_at_one_time_are_told_as_the_first_of_them_and_not_as_survived() -> None:
    one, other = failure(1, 10.0, code=-9), failure(2, 10.01, code=-9)
    assert last_straw([failure(0, 10.1, secondary=True, time=10.02), other, one]) == (one, [])


def test_who_exits_because_of_a_death_is_not_what_ended_the_job() -> None:
    dead, gave_up, quit_ = failure(1, 10.0, code=-9), failure(0, 10.1, secondary=True, time=10.002), failure(2, 10.06, code=3)
    assert last_straw([dead, gave_up, quit_]) == (dead, [])


@pytest.mark.parametrize(
    ("error", "launched", "said"),
    [
        (
            AbortedError("long words"),
            True,
            "oneaccord.errors.AbortedError at {here}: see the end of the output of oneaccord run for the reason\n",
        ),
        (AbortedError("long words"), False, "oneaccord.errors.AbortedError: long words\n"),
        (KeyboardInterrupt(), True, ""),
    ],
)
def test_what_a_rank_itself_says_where_its_launcher_says_the_rest(
    told: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, launched: bool, said: str
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("ONEACCORD_LAUNCHED", raising=False)
    if launched:
        monkeypatch.setenv("ONEACCORD_LAUNCHED", "1")
    error_file.install(1)
    end_with(error)
    record = error_file.read(told)
    assert record is not None
    assert capsys.readouterr().err == said.format(here=record.where.removeprefix("at "))


def told_failure(rank: int, message: str, where: str = "at x.py:1", kind: str = "oneaccord.errors.UsageError") -> Failure:
    record = ErrorRecord(
        rank, kind, message, f"trace\n{kind}: {message}\n", float(rank), secondary=False, where=where, clock=float(rank)
    )
    return Failure(rank, 1, float(rank), record, "")


def test_words_that_others_left_to_say_are_said_once_each() -> None:
    others = [
        told_failure(1, "bad"),
        told_failure(2, "worse"),
        told_failure(3, "worse"),
        told_failure(4, "mine", kind="KeyError"),
    ]
    text = report(told_failure(0, "bad"), [1, 2, 3, 4], [], (), others)
    assert text.splitlines()[2:4] == [
        "oneaccord run: ranks 2-3: oneaccord.errors.UsageError: worse",
        "oneaccord run: the error of rank 0:",
    ]
    assert text.count("bad") == 1
    assert "mine" not in text, "an error that is not ours was shown by the rank itself"


def test_those_that_failed_alike_are_told_of_once_where_all_others_ended_well() -> None:
    text = report_lost([told_failure(2, "bad"), told_failure(1, "bad", where="in barrier at y.py:7")])
    assert text.count("bad") == 1
    assert text.endswith("oneaccord run: rank 2: exit code 1, at x.py:1, as rank 1\n")


def test_where_the_ranks_were_when_a_signal_ended_them() -> None:
    printed = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n  File "/a/c.py", line 9, in g\nKeyboardInterrupt\n'
    failures = [told_failure(2, "bad"), failure(0, 1.0, stderr=printed), failure(1, 1.0, code=-9), failure(3, 1.0, code=0)]
    assert report_ended(signal.SIGINT, failures).splitlines() == [
        "oneaccord run: rank 2: oneaccord.errors.UsageError: bad",
        "oneaccord run: ended by SIGINT, when the ranks were here:",
        "  rank 0: at /a/c.py:9",
        "  rank 1: killed by SIGKILL",
        "  rank 2: at x.py:1",
        "  rank 3: ended well",
    ]


@pytest.mark.parametrize(
    ("error", "is_short"), [(InternalError("m"), False), (PeerLostError("m"), True), (KeyError("m"), False)]
)
def test_frames_inside_oneaccord_are_left_out_unless_they_may_be_to_blame(
    told: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_short: bool
) -> None:
    def raising(_: float) -> bool:
        raise error

    monkeypatch.setattr(deadline, "is_number", raising)
    error_file.install(1)
    try:
        Deadline(1)
    except type(error):
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    record = error_file.read(told)
    assert record is not None
    assert record.is_short is is_short
    assert ("deadline.py" in record.traceback) is not is_short


def test_of_very_many_that_were_lost_only_the_last_are_shown() -> None:
    lost = [Failure(rank, -9, float(rank), None, "") for rank in range(30)]
    lines = report_lost(lost).splitlines()
    assert lines[:2] == ["oneaccord run: 30 ranks failed, and all others ended well", "oneaccord run: the last 10 of them:"]
    assert lines[2:] == [f"oneaccord run: rank {rank}: killed by SIGKILL" for rank in range(20, 30)]
    lines = report(lost[-1], [], [], lost[:-1]).splitlines()
    assert lines[0] == "oneaccord run: 29 ranks failed, and the others continued; the last 10 of them:"
    assert lines[1] == "oneaccord run: rank 19 failed, and the others continued: killed by SIGKILL"
