"""``oneaccord show``, as people type it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from oneaccord.cli.main import main
from oneaccord.common.installing import install_command
from oneaccord.config.select import Rule, default_rules, write_table
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config but the test's own, and a terminal of a known width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["show", *words])
    assert not left.value.code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_an_algorithm_is_drawn_with_characters_and_without_colours_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "binomial_reduce", "--world", "3", "--root", "1")

    assert out == (
        "binomial reduce: 3 ranks, root 1\n"
        "up a binomial tree: few steps, for small arrays\n"
        "2 steps · 2 messages, at most 1 from one rank · a rank sends at most n bytes\n"
        "\n"
        "               input   1  2   output\n"
        "rank 0         a     ──a─────\n"
        "                       │\n"
        "rank 1 (root)  a     ──⊕──⊕── a\n"
        "                          │\n"
        "rank 2         a     ─────a──\n"
        "\n"
        "⊕ received and reduced\n"
        "a, b, ...: the chunks of the vector; n: the vector\n"
    )
    assert show(capsys, "binomial", "reduce", "--world", "3", "--root", "1") == out
    assert show(capsys, "binomial-reduce", "--world", "3", "--root", "1") == out


def test_a_terminal_gets_the_same_drawing_in_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = show(capsys, "ring_all_reduce")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = show(capsys, "ring_all_reduce")

    assert "\x1b[38;2;0;114;178m" in coloured
    assert ANSI.sub("", coloured) == plain


def test_a_pipe_that_takes_ascii_alone_gets_ascii(run_python: object) -> None:
    assert callable(run_python)
    result = run_python("-m", "oneaccord", "show", "ring_all_reduce", ONEACCORD_NO_AUTOLOAD="1", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "rank 0  a-d" in result.stdout


def test_svg_goes_to_a_file_and_is_the_same_each_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert show(capsys, "ring_all_reduce", "--world", "4", "--svg", "out.svg") == "wrote out.svg\n"
    show(capsys, "ring_all_reduce", "--svg", "again.svg")

    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert text.count('class="message"') == 24
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text


def test_segments_and_hosts_are_drawn_as_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show(capsys, "chain_broadcast", "--world", "3", "--segments", "2", "--svg", "chain.svg")
    assert (tmp_path / "chain.svg").read_text(encoding="utf-8").count('class="message"') == 4
    show(capsys, "hierarchical_all_reduce", "--world", "6", "--ranks-per-host", "2", "--svg", "hosts.svg")
    assert (tmp_path / "hosts.svg").read_text(encoding="utf-8").count('class="host"') == 3
    show(capsys, "hierarchical_all_reduce", "--world", "6", "--svg", "halves.svg")
    assert (tmp_path / "halves.svg").read_text(encoding="utf-8").count('class="host"') == 2


def test_without_an_algorithm_those_that_are_there_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    everything = show(capsys)
    for algorithm in BUILTIN:
        assert re.search(rf"^{algorithm.name}_{algorithm.collective.value}  +\S", everything, flags=re.MULTILINE)
    some = show(capsys, "broadcast").splitlines()
    assert {line.split()[0] for line in some[1:-3] if not line.startswith(" ")} == {
        f"{each.name}_broadcast" for each in BUILTIN if each.collective is Collective.BROADCAST
    }


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["reduce_scatter_gather_reduce", "-n", "16"],
        ["all_reduce", "--why", "--reproducible", "-n", "64", "--network", "fat-tree"],
        ["broadcast", "--why", "-n", "24", "--bytes", "1000003", "--network", "torus"],
        ["all_to_all", "--why", "--uneven"],
    ],
)
def test_no_line_is_longer_than_80_characters_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, show(capsys, *words).splitlines())) <= 80


def test_the_number_of_ranks_has_three_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = {show(capsys, "ring_all_reduce", spelling, "3") for spelling in ("-n", "--ranks", "--world")}
    assert len(drawn) == 1
    assert "3 ranks" in drawn.pop()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["ring_all_reduc"], ["'ring_all_reduc'", "did you mean 'ring_all_reduce'?", "Known are: ", "dissemination_barrier"]),
        (["ring", "barier"], ["'ring_barier'", "Known are: "]),
        (["ring_all_reduce", "--world", "0"], ["-n 0", "1 to 1,048,576"]),
        (["ring_all_reduce", "--world", "65"], ["-n 65", "more than 64 ranks", "oneaccord simulate"]),
        (["binomial_reduce", "--root", "4"], ["--root 4", "ranks 0 to 3"]),
        (["ring_all_reduce", "--root", "1"], ["all_reduce has no root", "leave --root out"]),
        (["ring_all_reduce", "--segments", "0"], ["--segments 0", "1 to 64"]),
        (["ring_all_reduce", "--ranks-per-host", "0"], ["--ranks-per-host 0", "1 or more"]),
        (
            ["hierarchical_all_reduce", "--world", "6", "--ranks-per-host", "4"],
            ["--ranks-per-host 4", "equally many ranks", "6 ranks"],
        ),
        (["ring_all_reduce", "--svg", "no/such/folder.svg"], ["no/such/folder.svg", "cannot be written"]),
        (["all_reduce", "--svg", "x.svg"], ["--svg needs the name of an algorithm", "ring_all_reduce"]),
        (["ring_all_reduce", "--json"], ["--json", "needs --why"]),
        (["ring_all_reduce", "--bytes", "1MiB"], ["--bytes", "needs --why or --plot"]),
        (["all_reduce", "--why", "--plot", "x.svg"], ["--why and --plot", "one of them"]),
        (["--why"], ["--why needs the name of a collective"]),
        (["all_reduce", "--why", "--bytes", "many"], ["'many'", "64KiB"]),
        (["all_reduce", "--why", "--network", "cloud"], ["--network cloud", "presets are:", "fat-tree"]),
        (["all_reduce", "--why", "--ranks-per-host", "0"], ["--ranks-per-host 0", "1 or more"]),
        (["barrier", "--plot", "x.svg"], ["a barrier moves no bytes"]),
        (["all_reduce", "--plot", "x.pdf"], ["'.pdf'", ".svg or .png"]),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    message = refusal(capsys, *words)
    assert message.startswith("error: ")
    for part in parts:
        assert part in message


def why(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    answer = json.loads(show(capsys, *words, "--why", "--json"))
    assert isinstance(answer, dict)
    return answer


def test_why_lists_every_candidate_by_predicted_time_and_the_choice_of_the_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "oneaccord.toml").write_text('[algorithms]\nall_reduce = "ring"\n', encoding="utf-8")
    answer = why(capsys, "all_reduce", "--bytes", "1MiB", "--world", "24", "--network", "textbook")

    candidates = answer["algorithms"]
    assert isinstance(candidates, list)
    assert {each["name"] for each in candidates} == {each.name for each in BUILTIN if each.collective is Collective.ALL_REDUCE}
    times = [each["time_s"] for each in candidates if each["time_s"] is not None]
    assert times == sorted(times)
    assert (answer["collective"], answer["ranks"], answer["bytes"], answer["network"]) == (
        "all_reduce",
        24,
        1 << 20,
        "textbook",
    )
    assert (answer["chosen"], answer["reason"]) == ("ring", "the config asks for it")
    ring = next(each for each in candidates if each["name"] == "ring")
    # 2 (P - 1) messages of n / P bytes at 1 us and 10 GB/s.
    assert ring["time_s"] == pytest.approx(46 * (1e-6 + (1 << 20) / 24 / 10e9), rel=1e-9)
    assert (ring["steps"], ring["out"]) == (46, None)
    assert ring["bytes_per_rank"] == pytest.approx(2 * (1 << 20) * 23 / 24)
    hierarchical = next(each for each in candidates if each["name"] == "hierarchical")
    assert (hierarchical["time_s"], hierarchical["out"]) == (None, "needs several hosts with equally many ranks, two or more")

    table = show(capsys, "all_reduce", "--bytes", "1MiB", "--world", "24", "--network", "textbook", "--why")
    assert re.search(r"^\*  ring  +247 us  +46  +2,009,771 B  +1$", table, flags=re.MULTILINE)
    assert table.count("*") == 1
    assert "\na group takes ring: the config asks for it\n" in table
    fastest = candidates[0]["name"]
    assert f"\nfor this call: {fastest} is predicted to be faster" in table


def test_why_speaks_of_the_very_call_and_of_the_row_as_a_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = Rule(Collective.ALL_REDUCE, "ring", max_bytes=1 << 20, min_world=3, max_hosts=1, reason="it was a good year")
    (tmp_path / "mine.toml").write_text(write_table([row]), encoding="utf-8")
    (tmp_path / "oneaccord.toml").write_text('selection = "mine.toml"\n', encoding="utf-8")
    asked = ("all_reduce", "--bytes", "1KiB", "-n", "16", "--network", "laptop")

    words = " ".join(show(capsys, *asked, "--why").split())
    assert (
        "a group takes ring: by the row for up to 1 MiB, 3 ranks or more, one host: it was a good year for this call: " in words
    )
    times = {each["name"]: each["time_s"] for each in why(capsys, *asked)["algorithms"]}  # type: ignore[attr-defined]
    best = min((name for name in times if times[name]), key=lambda name: times[name])
    longer = f"{times['ring'] / times[best] - 1:.0%}"
    assert f"for this call: {best} is predicted to be faster, " in words
    assert f"; ring takes {longer} longer." in words
    assert f"algorithms.all_reduce = '{best}' in the config" in words
    assert why(capsys, *asked)["row"] == "up to 1 MiB, 3 ranks or more, one host"


def test_why_asks_the_table_that_the_config_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rules = [Rule(Collective.BROADCAST, "chain", reason="measured here", segments=3), *default_rules()]
    (tmp_path / "mine.toml").write_text(write_table(rules), encoding="utf-8")
    (tmp_path / "oneaccord.toml").write_text('selection = "mine.toml"\n', encoding="utf-8")

    answer = why(capsys, "broadcast", "--world", "4", "--network", "textbook")

    assert (answer["chosen"], answer["segments"], answer["reason"]) == ("chain", 3, "measured here")
    candidates = answer["algorithms"]
    assert isinstance(candidates, list)
    assert next(each["segments"] for each in candidates if each["name"] == "chain") == 3


def test_why_says_what_rules_a_candidate_out(capsys: pytest.CaptureFixture[str]) -> None:
    def out(*words: str) -> dict[str, str | None]:
        candidates = why(capsys, *words)["algorithms"]
        assert isinstance(candidates, list)
        return {each["name"]: each["out"] for each in candidates}

    reproducible = out("all_reduce", "--reproducible", "--world", "16", "--network", "fat-tree")
    for algorithm in BUILTIN:
        if algorithm.collective is Collective.ALL_REDUCE:
            reason = reproducible[algorithm.name]
            assert reason is None if algorithm.canonical else reason is not None and reason.startswith("not canonical")
    assert out("all_to_all", "--uneven")["bruck"] == "needs blocks of one size"
    assert out("all_to_all")["bruck"] is None
    assert out("all_gather", "--ranks-per-host", "4", "--world", "16")["hierarchical"] is None
    assert out("all_gather", "--ranks-per-host", "4", "--world", "15")["hierarchical"] is not None
    assert why(capsys, "all_gather", "--ranks-per-host", "4", "--world", "15")["ranks_per_host"] == 1


def test_an_algorithm_stands_for_its_collective_and_a_barrier_has_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    answer = why(capsys, "dissemination_barrier", "--bytes", "1MiB", "--world", "5")
    assert (answer["collective"], answer["bytes"], answer["chosen"]) == ("barrier", 0, "dissemination")


def test_a_network_can_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'topology = "wires"\n[wire]\nlatency_s = 1.0\nbandwidth_bytes_per_s = 1.0\n', encoding="utf-8"
    )
    answer = why(capsys, "reduce", "--bytes", "2", "--world", "2", "--network", "slow.toml")
    candidates = answer["algorithms"]
    assert isinstance(candidates, list)
    assert next(each["time_s"] for each in candidates if each["name"] == "binomial") == 3.0


def test_a_plot_without_matplotlib_is_an_error_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(capsys, "all_reduce", "--plot", "out.svg")
    assert install_command("pip install 'oneaccord[plot]'") in message
    assert not (tmp_path / "out.svg").exists()


def test_a_plot_names_every_algorithm_and_marks_the_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert show(capsys, "reduce", "--plot", "out.svg", "--world", "4") == "wrote out.svg\n"
    show(capsys, "reduce", "--plot", "again.svg", "--world", "4")
    show(capsys, "reduce", "--plot", "out.png", "--world", "4")

    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    for words in ("reduce: 4 ranks", "binomial", "reduce_scatter_gather", "chosen", "1 KiB", "1 GiB"):
        assert words in text
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
