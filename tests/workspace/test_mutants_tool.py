"""tools/mutants.py: which changes it makes, that a seed repeats them, and what its report shows."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutants() -> Any:
    spec = importlib.util.spec_from_file_location("tool_mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def changed(mutants: Any, text: str) -> set[tuple[str, str]]:
    """Return the kind of each mutant, and its text."""
    return {(site.kind, mutants.mutated(text, site)) for site in mutants.sites(text)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = a < b", {("comparison", "x = a <= b")}),
        ("x = a is not b", {("comparison", "x = a is b")}),
        ("x = a in (b)", {("comparison", "x = a not in b")}),
        (
            "x = a == b and c or d",
            {
                ("comparison", "x = a != b and c or d"),
                ("and or", "x = a == b or c or d"),
                ("and or", "x = (a == b and c) and d"),
            },
        ),
        ("x = True", {("constant", "x = False")}),
        ("x = 'ä', 7", {("constant", "x = 'ä', 8")}),
        ("x = 0.5", {("constant", "x = 1.0")}),
        ("if a:\n    pass", {("condition", "if (not (a)):\n    pass")}),
        ("x = a if not b else c", {("condition", "x = a if (b) else c")}),
        ("while a > b:\n    break", {("comparison", "while a >= b:\n    break"), ("statement", "while a > b:\n    pass")}),
        ("f(a)", {("statement", "pass")}),
        ("a.b = c", {("statement", "pass")}),
        ("a += b", {("statement", "pass")}),
        ("def f():\n    raise E", {("statement", "def f():\n    pass")}),
        ("f(\n    a,\n)\ng = a < b", {("statement", "pass\ng = a < b"), ("comparison", "f(\n    a,\n)\ng = a <= b")}),
    ],
)
def test_each_place_is_changed_in_one_way(mutants, text, wanted):
    assert changed(mutants, text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        '"""Says 1 < 2."""',
        'def f():\n    """Says."""',
        "__all__ = ['a' if 1 < 2 else 'b']",
        "def f(x: Literal[1]) -> Literal[2]: ...",
        "x: Literal[1]",
        "if TYPE_CHECKING:\n    x = 1",
        "if typing.TYPE_CHECKING:\n    x = 1",
        "if __name__ == '__main__':\n    main(1)",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = f'{a < 1}'",
        "x = y",
        "def f():\n    yield x",
        "x = 'a text', None, b'bytes', ...",
    ],
)
def test_what_says_nothing_about_behaviour_is_left_alone(mutants, text):
    assert changed(mutants, text) == set()


@pytest.mark.parametrize("file", ["core/src/oneaccord/control/membership.py", "tools/mutants.py"])
def test_every_mutant_of_a_real_file_is_another_program(mutants, file):
    text = (ROOT / file).read_text(encoding="utf-8")
    original = ast.dump(ast.parse(text))
    found = mutants.sites(text)
    assert len(found) > 10
    for site in found[::10]:
        assert ast.dump(ast.parse(mutants.mutated(text, site))) != original, site


def test_a_seed_chooses_the_same_mutants_and_all_kinds(mutants):
    texts = {"a.py": "x = a < b\nf()\n" * 20, "b.py": "x = a or b\ny = 1\nif z: x = a\n" * 20}
    chosen = mutants.choose(texts, 30, seed=3)
    assert mutants.choose(texts, 30, seed=3) == chosen != mutants.choose(texts, 30, seed=4)
    assert len(set(chosen)) == 30
    assert {
        kind: sum(site.kind == kind for _, site in chosen)
        for kind in ("comparison", "and or", "condition", "constant", "statement")
    } == {"comparison": 6, "and or": 6, "condition": 6, "constant": 6, "statement": 6}
    assert len(mutants.choose(texts, 1000, seed=3)) == 100


def test_the_table_names_tests_that_exist_for_every_distribution(mutants):
    for file in mutants.sources(ROOT, ()):
        assert mutants.tests_of(file, ROOT), file
    assert mutants.tests_of("plugins/ucx/src/oneaccord_ucx/x.py", ROOT) == ("plugins/ucx/tests",)
    missing = [each for wanted in mutants.TESTS.values() for each in wanted if not list(ROOT.glob(each))]
    assert not missing


def test_only_takes_files_and_folders(mutants):
    found = mutants.sources(ROOT, ["core/src/oneaccord/control/", "core/src/oneaccord/errors.py", "core/src/oneaccord/con"])
    assert {"/".join(name.split("/")[:4]) for name in found} == {"core/src/oneaccord/control", "core/src/oneaccord/errors.py"}


def test_failed_tests_are_read_from_the_summary(mutants):
    lines = [
        "F...",
        "FAILED a.py::test_x[1 - [2]] - assert [0] - 1",
        "ERROR b.py - SyntaxError",
        "FAILED a.py::test_y",
        "2 failed",
    ]
    assert mutants.failed(lines) == ["a.py::test_x[1 - [2]]", "b.py", "a.py::test_y"]


def test_the_report_shows_what_is_no_longer_found_first(mutants):
    def outcome(line: int, what: str) -> Any:
        return mutants.Outcome(
            "a.py", line, "constant", f"-{line}\n+{line + 1}", what, "t.py::t" if what == "found" else "", 1.0
        )

    now = [outcome(1, "survived"), outcome(2, "survived"), outcome(3, "found"), outcome(4, "timed out")]
    text = mutants.report(now, "seed 1", [outcome(1, "survived"), outcome(2, "found"), outcome(4, "found")])
    assert text.startswith("4 mutants, seed 1: 1 found, 2 survived, 1 timed out.")
    assert "| constant | 1 | 2 | 1 |" in text
    assert "Found before, and not now: 1." in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## survived: a.py:2 (constant), found before",
        "## survived: a.py:1 (constant)",
        "## timed out: a.py:4 (constant)",
    ]


@pytest.mark.timeout(300)  # it starts pytest, which a busy machine may take long for
def test_a_mutant_is_found_or_survives_and_the_source_is_restored(mutants, tmp_path):
    """Two mutants of one length, within a second: what Python has compiled of the first must not be taken for the second."""
    source = tmp_path / "lib" / "src" / "some_lib.py"
    source.parent.mkdir(parents=True)
    text = "def f(x):\n    if x < 5:\n        return 1\n    return x > 7\n"
    source.write_text(text)
    (tmp_path / "test_lib.py").write_text("from some_lib import f\ndef test_it(): assert f(6) is False and f(7) is False\n")
    bench = mutants.Bench(tmp_path, ["-rf", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", str(tmp_path)])
    chosen = [site for site in mutants.sites(text) if site.kind == "comparison"]
    outcomes = [bench.judge("lib/src/some_lib.py", site, ("test_lib.py",)) for site in chosen]
    assert [(each.line, each.what, each.test) for each in outcomes] == [
        (2, "survived", ""),
        (4, "found", "test_lib.py::test_it"),
    ]
    assert source.read_text() == text
