"""Files of what each rank prints: ``--log-dir``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch_tools import launch

from oneaccord.local.logs import Logs

pytestmark = pytest.mark.usefixtures("ranks_in_both_forms", "no_launcher_stays")


def test_each_rank_has_files_that_are_whole_when_it_is_killed(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        rank = os.environ["RANK"]
        print("out", rank)
        print("err", rank, file=sys.stderr)
        if rank == "1":
            sys.stdout.write("x" * 300_000 + "the last words")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    folder = tmp_path / "a" / "logs"
    done = launch(tmp_path, script, ranks=2, log_dir=str(folder), keep_going=True)
    assert done.returncode == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "rank-0.out": "out 0\n",
        "rank-0.err": "err 0\n",
        "rank-1.out": "out 1\n" + "x" * 300_000 + "the last words",
        "rank-1.err": "err 1\n",
    }
    assert "[0] out 0\n" in done.stdout
    assert "[1] err 1\n" in done.stderr


def test_files_of_an_earlier_run_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "rank-1.err").write_text("earlier")
    done = launch(tmp_path, "print(1)", ranks=2, log_dir=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--log-dir {tmp_path}: {tmp_path}/rank-1.err exists already, from an earlier run" in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.glob("rank-*")] == [("rank-1.err", "earlier")]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for each in (tmp_path / "file", tmp_path / "file" / "below"):
        done = launch(tmp_path, "print(1)", log_dir=str(each))
        assert f"UsageError: --log-dir {each}: it cannot be written" in done.stderr


def test_a_rank_in_the_place_of_another_has_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rank-3.restart-1.out").write_text("earlier")
    logs = Logs(str(tmp_path), [3], pytest.fail)
    for text in (b"first", b"second", b"third"):
        out, err = logs.begin(3)
        out.write(text)
        err.write(text.upper())
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.stat().st_size} == {
        "rank-3.out": "first",
        "rank-3.err": "FIRST",
        "rank-3.restart-1.out": "earlier",
        "rank-3.restart-2.out": "second",
        "rank-3.restart-2.err": "SECOND",
        "rank-3.restart-3.out": "third",
        "rank-3.restart-3.err": "THIRD",
    }


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    out, _ = Logs(str(tmp_path / "logs"), [0], said.append).begin(0)
    (tmp_path / "logs" / "rank-0.out").unlink()
    (tmp_path / "logs" / "rank-0.out").mkdir()
    out.write(b"a")
    out.write(b"b")
    assert said == [
        f"oneaccord run: {tmp_path}/logs/rank-0.out cannot be written (Is a directory): the job continues, but output there is lost\n"
    ]
