"""tools/test_flaky.py: how it reads results, what its table shows, and that its load ends."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.waiting import until

from oneaccord.runtime.computer import has_ended

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


flaky: Any = load_tool("test_flaky")

XML = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>
<testcase classname="core.tests.test_a" name="test_fine[1-x]" file="core/tests/test_a.py" line="3"/>
<testcase classname="core.tests.test_a" name="test_skipped" file="core/tests/test_a.py"><skipped message="no GPU"/></testcase>
<testcase classname="core.tests.test_a.TestB" name="test_bad[a.b]" file="core/tests/test_a.py">
  <failure message="&#10;assert 1 == 2&#10;  more">long text</failure><error message="teardown"/></testcase>
<testcase classname="core.tests.test_a" name="test_crash" file="core/tests/test_a.py"><error message="worker 'gw0' crashed"/></testcase>
<testcase classname="" name="core.tests.test_c" file="core/tests/test_c.py"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def run(load: int, seed: int, *failures: tuple[str, str]) -> Any:
    return flaky.Run(load, seed, 10, tuple(flaky.Failure(*each) for each in failures), 61.0, 122.0)


def test_results_are_read_with_the_names_that_pytest_takes():
    passed, failures = flaky.read_results(XML)
    assert passed == 1
    assert [(each.test, each.line) for each in failures] == [
        ("core/tests/test_a.py::TestB::test_bad[a.b]", "assert 1 == 2"),
        ("core/tests/test_a.py::test_crash", "worker 'gw0' crashed"),
        ("core/tests/test_c.py", "collection failure"),
    ]


@pytest.mark.parametrize(
    ("xml", "code", "limit_s", "said"),
    [
        pytest.param(None, 3, None, "exit code 3; the end", id="no results"),
        pytest.param("<testsuites><tests", -9, None, "exit code -9; the end", id="half a file"),
        pytest.param("<testsuites/>", 1, None, "exit code 1; the end", id="no test is to blame"),
        pytest.param("<testsuites/>", 2, 60.0, "did not end within 60 s; the end", id="timeout"),
    ],
)
def test_a_run_that_ends_wrongly_counts_as_failure(xml, code, limit_s, said):
    assert flaky.judge(xml, code, limit_s, "the end") == (0, (flaky.Failure(flaky.THE_RUN, said),))


def test_a_run_that_failed_by_its_tests_has_no_failure_of_its_own():
    assert len(flaky.judge(XML, 1, None, "")[1]) == 3
    assert flaky.judge("<testsuites/>", 0, None, "") == (0, ())


def test_the_plan_gives_each_run_a_seed_of_its_own():
    assert flaky.Plan(runs=2, loads=(0, 4), seed=7).all_runs() == [(0, 7), (4, 8), (0, 9), (4, 10)]


def test_the_table_counts_by_test_load_and_line():
    runs = [
        run(0, 1),
        run(4, 2, ("t.py::often", "assert a|b")),
        run(0, 3, ("t.py::often", "assert c"), ("t.py::once", "boom")),
        run(4, 4, ("t.py::often", "assert c")),
    ]
    rows = [line for line in flaky.table(runs, ["t.py"]).splitlines() if "t.py::" in line]
    again = ".venv/bin/python tools/test_flaky.py --runs 1 --loads 4 --seed 2 --tests t.py"
    assert rows[0] == (
        f"| t.py::often | 3 of 4 | 0 (1 of 2), 4 (2 of 2) | 2, 3, 4 | assert c (2)<br>assert a\\|b (1) | `{again}` |"
    )
    assert rows[1].startswith("| t.py::once | 1 of 4 | 0 (1 of 2) | 3 | boom (1) |")
    assert "| 4 | 2 | 10 | 1 | 61 | 122 |" in flaky.table(runs, [])


def test_the_table_says_that_all_passed():
    assert flaky.table([run(0, 1), run(4, 2)], []).endswith("Every test passed in each of 2 runs.")
    assert flaky.table([], []) == "No run has ended."


def test_the_options_are_those_of_make_test():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    recipe = next(line for line in lines if "-m pytest" in line and "not long" in line)
    assert shlex.split(recipe.partition("-m pytest ")[2].partition(" $(PYTEST_ARGS)")[0]) == list(flaky.SUITE)


def test_the_load_ends_with_its_block():
    busy: list[int] = []

    def interrupted() -> None:
        with flaky.load(2) as started:
            busy.extend(started)
            assert not any(has_ended(pid) for pid in busy)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(has_ended(pid) for pid in busy)


def test_a_busy_process_ends_if_its_parent_is_gone():
    """It is the child of another process than the one that it is told of."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", flaky.BUSY, "1"], os.environ)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0], "a busy process that ends")


@pytest.mark.timeout(300)  # it starts pytest, which a busy machine may take long for
def test_a_run_leaves_its_results(tmp_path, monkeypatch, capsys):
    code = "import os\ndef test_seed(): assert not os.environ['PYTHONHASHSEED']\ndef test_fine(): pass\n"
    (tmp_path / "test_one.py").write_text(code)
    monkeypatch.setattr(flaky, "ROOT", tmp_path)
    monkeypatch.setattr(flaky, "SUITE", ("-p", "no:xdist"))
    words = ["--runs", "1", "--loads", "1", "--seed", "6", "--folder", str(tmp_path / "left"), "--tests", "test_one.py"]
    assert flaky.main(words) == 1
    said = capsys.readouterr().out
    assert "load 1, seed 6: 1 passed, 1 failed" in said
    assert "| test_one.py::test_seed | 1 of 1 | 1 (1 of 1) | 6 | AssertionError: assert not '6' (1)" in said
    (ended,) = flaky.finished(tmp_path / "left").values()
    assert (ended.load, ended.seed, ended.passed, len(ended.failures)) == (1, 6, 1, 1)


def test_resume_makes_only_the_runs_that_are_left(tmp_path, monkeypatch):
    made = []

    def perform(plan: Any, load: int, seed: int, folder: Path) -> Any:
        made.append((load, seed))
        if len(made) == 2:
            raise KeyboardInterrupt
        ended = run(load, seed, *([("t.py::bad", "boom")] if seed == 1 else []))
        (folder / f"load-{load}-seed-{seed}.json").write_text(json.dumps(dataclasses.asdict(ended)))
        return ended

    monkeypatch.setattr(flaky, "perform", perform)
    assert flaky.main(["--runs", "1", "--loads", "0,4,8", "--folder", str(tmp_path)]) == 130
    assert flaky.main(["--resume", str(tmp_path), "--write", str(tmp_path / "table.md")]) == 1
    assert made == [(0, 1), (4, 2), (4, 2), (8, 3)]
    assert "| t.py::bad | 1 of 3 | 0 (1 of 1) | 1 | boom (1) |" in (tmp_path / "table.md").read_text()
