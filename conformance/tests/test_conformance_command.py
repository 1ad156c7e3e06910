"""`oneaccord check`, its reports, and the rule of the pytest classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from oneaccord.cli.main import main
from oneaccord_conformance import CHAPTERS, Check, WorldMaker, all_checks, check, choose, registry
from oneaccord_conformance.pytest import BackendConformance


def run(*words: str) -> int:
    try:
        return main(["check", *words])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_backend_that_conforms_ends_well_and_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loft: str
) -> None:
    junit, report = tmp_path / "junit.xml", tmp_path / "report.json"
    words = "-n 2 --quick --chapter async --only messages.order --chapter messages -v --junit".split()
    assert run(loft, *words, str(junit), "--json", str(report)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["messages", "1", "passed"]
    assert out.endswith("\nloft conforms: 1 checks passed\n")
    assert err.split()[0] == "passed"
    assert "messages.order" in err
    told = json.loads(report.read_text())
    assert (told["backend"], told["ranks"], told["conforms"]) == ("loft", 2, True)
    assert [(each["chapter"], each["name"], each["status"]) for each in told["checks"]] == [("messages", "order", "passed")]
    suite = ET.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite[0].get("name")) == ("1", "0", "order")


def test_a_backend_that_does_not_conform_is_told_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loft: str
) -> None:
    config, junit = tmp_path / "oneaccord.toml", tmp_path / "junit.xml"
    config.write_text('[backends.loft]\nfault = "the last byte of odd lengths above 64 KiB is lost"\n')
    words = ["--only", "messages.every_size", "--only", "messages.order", "--quick", "--config", str(config)]
    assert run(loft, *words, "--junit", str(junit), "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["conforms"]
    (failed,) = (each for each in report["checks"] if each["status"] == "failed")
    assert failed["name"] == "every_size"
    assert "sendrecv of uint8[262079]: 1 of 262079 elements are wrong, the first is element 262078" in failed["text"]
    assert ET.parse(junit).getroot()[0].get("failures") == "1"
    assert run(loft, *words) == 1
    out = capsys.readouterr().out
    assert "FAILED messages.every_size: Messages from none to several million bytes come whole" in out
    assert re.search(r"rank \d of 2 raised AssertionError", out)
    assert out.endswith("loft does not conform: 1 of 2 checks failed\n")


def test_an_interrupt_ends_with_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: WorldMaker) -> None:
        raise KeyboardInterrupt

    def fail(_: WorldMaker) -> None:
        raise AssertionError("a byte is wrong")

    chosen = [
        Check(name, "close", f"It {name}s.", (), run) for name, run in (("fail", fail), ("stop", interrupt), ("go", fail))
    ]
    monkeypatch.setattr(registry, "choose", lambda *_: chosen)
    assert run("tcp", "-v") == 130
    out, err = capsys.readouterr()
    assert out.startswith("FAILED close.fail: It fails.\n  a byte is wrong\n")
    assert out.endswith("\ntcp was interrupted after 1 of 3 checks: 1 failed\n")
    assert err.rstrip().endswith("It fails.\n  a byte is wrong")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no backend was given"),
        (["pigeon"], "there is no backend 'pigeon'"),
        (["tcp", "-n", "1"], "need worlds of 2 ranks or more"),
        (["tcp", "--chapter", "byte"], "there is no chapter 'byte'; there are transport, bytes"),
        (["tcp", "--only", "flight"], "there is no check 'flight'"),
        (["tcp", "--config", "nowhere.toml"], "there is no such file"),
        (["nccl"], "cannot run here, and cannot be checked: CuPy is not installed"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert said in capsys.readouterr().err


def test_a_configuration_that_is_wrong_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.toml").write_text("[backends.tcp]\nstreams = 0\n")
    assert run("tcp", "--config", str(tmp_path / "wrong.toml")) == 2
    assert "cannot be checked with this configuration" in (said := capsys.readouterr().err)
    assert "backends.tcp.streams" in said


def test_the_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_checks()) > 60
    assert {line.partition(".")[0] for line in lines} == set(CHAPTERS)


def test_a_check_is_chosen_by_either_name() -> None:
    assert [each.title for each in choose([], ["bytes.barriers", "nested"])] == ["bytes.barriers", "groups.nested"]
    with pytest.raises(ValueError, match="expected check_NAME"):
        check(chapter="bytes")(lambda worlds: None)


def excused(**words: object) -> type[BackendConformance]:
    """Return the tests of a backend of which one is replaced, and expected to fail."""

    class Excused(BackendConformance):
        @pytest.mark.xfail(**words)
        def test_messages_order(self, worlds: WorldMaker) -> None:
            """Do as it likes."""

    return Excused


def test_a_test_that_is_replaced_or_removed_needs_a_strict_expected_failure_with_a_reason() -> None:
    class Removed(BackendConformance):
        test_messages_order = None

    BackendConformance().test_no_check_is_overridden()
    excused(strict=True, reason="the loft takes one letter at a time")().test_no_check_is_overridden()
    for kind in (Removed, excused(strict=True), excused(reason="it is late")):
        with pytest.raises(
            AssertionError, match=rf"{kind.__name__}.test_messages_order replaces a check of the suite: take it"
        ):
            kind().test_no_check_is_overridden()
