"""``oneaccord simulate``, run as users run it, and numbers of bytes as they write them."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.cli.main import main
from oneaccord.common.units import bytes_text, parse_bytes
from oneaccord.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def simulate(run_python: Run) -> Run:
    def run(*args: str) -> CompletedProcess[str]:
        return run_python("-m", "oneaccord", "simulate", *args, ONEACCORD_NO_AUTOLOAD="1")

    return run


def test_json_is_what_programs_expect(simulate: Run) -> None:
    result = simulate("all_reduce", "--ranks", "16", "--bytes", "1MB", "--network", "textbook", "--algorithm", "all", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report) == {"collective", "ranks", "bytes", "algorithms", "chosen", "reason", "fastest"}
    assert (report["collective"], report["ranks"], report["bytes"]) == ("all_reduce", 16, 10**6)
    found = {each["name"]: each for each in report["algorithms"]}
    assert {"ring", "recursive_doubling", "rabenseifner"} <= set(found)
    assert "hierarchical" not in found  # one rank per host
    assert report["chosen"] in found
    assert report["fastest"] == min(found.values(), key=lambda each: each["time_s"])["name"]
    ring = found["ring"]
    assert set(ring) == {"name", "time_s", "steps", "bytes_per_rank", "segments", "method"}
    assert ring["time_s"] == pytest.approx(30 * 1e-6 + 2 * 15 / 16 * 1e6 / 10e9, rel=1e-9)
    assert (ring["steps"], ring["bytes_per_rank"], ring["segments"], ring["method"]) == (30, 1_875_000, 1, "events")


def test_without_an_algorithm_the_one_that_a_group_would_use_is_run(simulate: Run) -> None:
    report = json.loads(simulate("broadcast", "--ranks", "24", "--bytes", "4KiB", "--json").stdout)
    assert [each["name"] for each in report["algorithms"]] == [report["chosen"]]


def test_people_get_a_table(simulate: Run) -> None:
    result = simulate("all_gather", "--ranks", "16", "--bytes", "64KiB", "--algorithm", "ring", "--segments", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "all_gather of 64 KiB, 16 ranks, 8 per host, network fat-tree"
    assert lines[4].split() == ["algorithm", "time", "steps", "sent", "per", "rank", "segments", "method"]
    assert lines[5].split()[:3] == ["ring", "23", "us"]
    assert lines[5].split()[-4:] == ["60", "KiB", "2", "events"]
    assert "\na group takes " in result.stdout


def test_a_table_of_people_fits_80_columns_and_says_why_a_group_takes_what_and_what_is_faster(
    simulate: Run, tmp_path: Path
) -> None:
    (tmp_path / "oneaccord.toml").write_text('[algorithms]\nreduce = "binomial"\n')
    words = ("reduce", "--world", "100", "--bytes", "999999937", "--algorithm", "all")
    result = simulate(*words)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.startswith("reduce of 999,999,937 B, 100 ranks, network fat-tree\n")
    said = " ".join(result.stdout.split())
    assert (
        "a group takes binomial: the config asks for it for this call: reduce_scatter_gather is predicted to be faster, "
        in said
    )
    report = json.loads(simulate(*words, "--json").stdout)
    assert (report["chosen"], report["reason"]) == ("binomial", "the config asks for it")
    assert report["fastest"] == "reduce_scatter_gather"


def test_what_is_simulated_is_cut_as_a_group_would_cut_it(simulate: Run) -> None:
    def segments(*words: str) -> int:
        [only] = json.loads(simulate("broadcast", "-n", "4", "--algorithm", "chain", *words, "--json").stdout)["algorithms"]
        return int(only["segments"])

    assert [segments("--bytes", "4MiB"), segments("--bytes", "1GiB"), segments("--bytes", "4MiB", "--segments", "3")] == [
        8,
        64,
        3,
    ]


def test_a_network_file_and_another_number_of_ranks_per_host(simulate: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'topology = "wires"\n[wire]\nlatency_s = 2e-6\nbandwidth_bytes_per_s = 1e9\n[host]\nlatency_s = 1e-6\n'
        "bandwidth_bytes_per_s = 1e9\n"
    )
    near, far = (
        json.loads(
            simulate(
                "barrier", "--ranks", "4", "--network", str(path), "--ranks-per-host", per_host, "--algorithm", "dissemination",
                "--json",
            ).stdout
        )["algorithms"][0]["time_s"]
        for per_host in ("4", "1")
    )  # fmt: skip
    assert near == pytest.approx(2e-6)
    assert far == pytest.approx(4e-6)


def test_the_config_says_how_many_ranks_share_a_host_where_the_command_does_not(simulate: Run, tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text("ranks_per_host = 2\n")
    words = ("all_gather", "--ranks", "6", "--bytes", "1MiB", "--network", "textbook", "--algorithm", "hierarchical", "--json")
    by_config, same, other = (
        simulate(*words, *more).stdout for more in ((), ("--ranks-per-host", "2"), ("--ranks-per-host", "1"))
    )
    assert json.loads(by_config) == json.loads(same) != json.loads(other)


@pytest.mark.parametrize("words", [("--algorithm", "all"), ("--root", "9")])
def test_the_command_leaves_the_collector_of_garbage_as_it_was(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        main(["simulate", "broadcast", "--ranks", "4", *words])
    assert gc.isenabled()
    gc.disable()
    try:
        with contextlib.suppress(SystemExit):
            main(["simulate", "broadcast", "--ranks", "4", *words])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("zzz", "--ranks", "4"), "'zzz' is not a collective; expected one of: all_reduce"),
        (
            ("all_redcue", "--ranks", "4"),
            "'all_redcue' is not a collective; did you mean 'all_reduce'? Expected one of: all_reduce",
        ),
        (
            ("all_reduce", "--ranks", "4", "--algorithm", "rign"),
            "there is no algorithm 'rign' for all_reduce; expected one of:",
        ),
        (("all_reduce", "--ranks", "4", "--bytes", "1XB"), "'1XB' is not a number of bytes"),
        (("all_reduce", "--ranks", "4", "--network", "nowhere"), "neither a preset nor a file"),
        (("all_reduce", "--ranks", "4", "--ranks-per-host", "0"), "ranks_per_host is 0; expected 1 or more"),
        (("all_reduce", "--ranks", "0", "--algorithm", "ring"), "-n 0: give a number of ranks"),
        (("all_reduce", "--ranks", "99999999999999999999"), "from 1 to 1,048,576"),
        (("all_reduce", "--ranks", "4", "--bytes", "1e400"), "expected 0 to 2**60"),
        (("broadcast", "--ranks", "4", "--algorithm", "chain", "--segments", "1000000000000"), "expected 1 to 65,536"),
        (("all_reduce", "--ranks", "4", "--network", "/dev/zero"), "not a regular file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(simulate: Run, args: tuple[str, ...], words: str) -> None:
    result = simulate(*args)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1e6", 10**6),
        ("64KiB", 65536),
        ("1GiB", 1 << 30),
        ("1 gib", 1 << 30),
        ("1.5MB", 1_500_000),
        ("2kB", 2000),
        (".5KiB", 512),
        ("0", 0),
        ("3B", 3),
    ],
)
def test_numbers_of_bytes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1_000_000, "1,000,000 B"),
        ((1 << 20) - 1, "1,048,575 B"),
        (1 << 30, "1 GiB"),
        (3 << 40, "3,072 GiB"),
    ],
)
def test_numbers_of_bytes_are_written_short_where_that_says_all(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


@given(st.integers(0, 1 << 60) | st.integers(0, 1 << 30).map(lambda count: count << 10))
def test_what_is_written_of_bytes_is_read_as_the_same_number(nbytes: int) -> None:
    assert parse_bytes(bytes_text(nbytes).replace(",", "")) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1.5", "KiB", "1Gi B", "ten", "1e-3", "1e9999"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected one such as 4096, 64KiB"):
        parse_bytes(text)
