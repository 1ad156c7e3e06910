"""`manyhands check`, its reports, and the rule of the pytest classes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree as ET

import pytest

from manyhands.cli.main import main
from manyhands_conformance import CHAPTERS, Check, WorldMaker, all_checks, check, choose, registry

HERE = Path(__file__).resolve().parent


def run(*words: str) -> int:
    try:
        return main(["check", *words])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_backend_that_conforms_ends_well_and_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--junit", str(tmp_path / "junit.xml"), "--json", str(tmp_path / "report.json")]
    assert (
        run(
            "tcp", "-n", "2", "--quick", "--chapter", "async", "--only", "messages.order", "--chapter", "messages", "-v", *files
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["messages", "1", "passed"]
    assert out.endswith("\ntcp conforms: 1 checks passed\n")
    assert "passed" in err
    assert "messages.order" in err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["backend"], report["ranks"], report["conforms"]) == ("tcp", 2, True)
    assert [(each["chapter"], each["name"], each["status"]) for each in report["checks"]] == [("messages", "order", "passed")]
    suite = ET.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite[0].get("name")) == ("1", "0", "order")


def test_a_backend_that_does_not_conform_is_told_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken_backend: str
) -> None:
    config = tmp_path / "manyhands.toml"
    config.write_text('[backends.broken]\nfault = "the last byte is lost"\n')
    junit = tmp_path / "junit.xml"
    words = ["--only", "messages.every_size", "--only", "bytes.every_shape", "--quick"]
    assert run(broken_backend, "--config", str(config), "--junit", str(junit), "--json", "-", *words) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["conforms"]
    failed = next(each for each in report["checks"] if each["status"] == "failed")
    assert failed["name"] == "every_size"
    assert "sendrecv of uint8[4031]: 1 of 4031 elements are wrong, the first is element 4030" in failed["text"]
    suite = ET.parse(junit).getroot()[0]
    assert suite.get("failures") == "1"
    assert run(broken_backend, "--config", str(config), *words) == 1
    out = capsys.readouterr().out
    assert "FAILED messages.every_size: Messages from none to several million bytes come whole" in out
    assert "rank 1 of 2 raised AssertionError" in out or "rank 0 of 2 raised AssertionError" in out
    assert out.endswith("broken does not conform: 1 of 2 checks failed\n")


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
        (["hybrid"], "cannot be checked with this configuration: configuration: backends.hybrid.routes is missing"),
        (["nccl"], "cannot run here, and cannot be checked: CuPy is not installed"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert said in capsys.readouterr().err


def test_the_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_checks()) > 60
    assert {line.partition(".")[0] for line in lines} == set(CHAPTERS)


def test_a_check_is_chosen_by_either_name() -> None:
    assert [each.title for each in choose([], ["bytes.barriers", "nested"])] == ["bytes.barriers", "groups.nested"]
    with pytest.raises(ValueError, match="expected check_NAME"):
        check(chapter="bytes")(lambda worlds: None)


CLASSES = """
    import pytest
    from manyhands_conformance.pytest import BackendConformance

    class TestRight(BackendConformance):
        backend = "tcp"
        quick = True

    class TestRemoved(BackendConformance):
        backend = "tcp"
        test_messages_order = None

    class TestReplaced(BackendConformance):
        backend = "tcp"

        def test_messages_order(self, worlds):
            pass

    class TestExcused(BackendConformance):
        backend = "tcp"

        @pytest.mark.xfail(strict=True, reason="the loft takes one letter at a time")
        def test_messages_order(self, worlds):
            super().test_messages_order(worlds)

    class TestWithoutReason(BackendConformance):
        backend = "tcp"

        @pytest.mark.xfail(strict=True)
        def test_messages_order(self, worlds):
            pytest.fail("yes")
"""


def test_a_test_that_is_replaced_or_removed_needs_a_strict_expected_failure_with_a_reason(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "test_classes.py").write_text(dedent(CLASSES))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "overridden or messages_order", "-rA", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    told = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED", "XFAIL"))
    }
    rule = "test_no_check_is_overridden"
    assert {
        name: told[f"{name}::{rule}"]
        for name in ("TestRight", "TestRemoved", "TestReplaced", "TestExcused", "TestWithoutReason")
    } == {
        "TestRight": "PASSED",
        "TestRemoved": "FAILED",
        "TestReplaced": "FAILED",
        "TestExcused": "PASSED",
        "TestWithoutReason": "FAILED",
    }
    assert told["TestRight::test_messages_order"] == "PASSED"
    assert told["TestExcused::test_messages_order"] == "FAILED"  # it keeps the promise after all
    assert "TestReplaced.test_messages_order replaces a check of the suite: take it away, or mark it" in done.stdout
