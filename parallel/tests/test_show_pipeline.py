"""``oneaccord show pipeline``."""

from __future__ import annotations

import pytest

import oneaccord_parallel as mp
from oneaccord.cli.main import main


@pytest.fixture
def call(capsys, monkeypatch):
    """Run ``oneaccord show pipeline`` with some words; return the exit code and all that it said."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        try:
            code = main(["show", "pipeline", *words])
        except SystemExit as left:
            code = left.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_schedule_is_drawn_in_the_terminal_or_into_a_file(call, tmp_path):
    plan = mp.schedule("1f1b", 4, 8)
    assert call("1f1b", "--stages", "4", "--microbatches", "8") == (0, plan.text(width=80))
    picture = tmp_path / "zb.svg"
    times = ("--forward", "1.5", "--backward", "5/2", "--weight", "1", "--message", ".5")
    assert call("zb_h1", "--stages", "2", "--microbatches", "3", *times, "--svg", str(picture)) == (0, f"wrote {picture}\n")
    assert picture.read_text(encoding="utf-8") == mp.schedule("zb_h1", 2, 3).svg(1.5, 2.5, 1, 0.5)
    assert call("interleaved_1f1b", "--virtual", "3")[1] == mp.schedule("interleaved_1f1b", 4, 8, 3).text(width=80)


def test_without_a_name_the_schedules_are_listed(call):
    code, said = call()
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1f2b"], "did you mean '1f1b'? Known are: "),
        (["nothing"], "there is no schedule 'nothing'. Known are: 1f1b, gpipe, "),
        (["gpipe", "--backward", "-1"], "backward=-1: a duration is expected"),
        (["gpipe", "--virtual", "2"], "gpipe has one stage on each rank"),
        (["gpipe", "--forward", "long"], "--forward long: a number is expected"),
        (["gpipe", "--stages", "0"], "stages=0"),
        (["gpipe", "--svg", "no/such/folder.svg"], "--svg no/such/folder.svg cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(call, words, said):
    code, out = call(*words)
    assert code == 2
    assert out.startswith("error: ")
    assert said in out
