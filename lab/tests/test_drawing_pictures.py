"""The documentation shows every algorithm as it is now. Needs no matplotlib."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from oneaccord.config.select import default_rules
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_pictures.py"
PAGE = ROOT / "docs" / "reference" / "algorithms.md"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="the documentation is not part of this installation")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "make_pictures", module)
    spec.loader.exec_module(module)
    return module


def sections() -> dict[tuple[str, str], str]:
    """The text of each algorithm, by its collective and its name."""
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        collective, _, body = part.partition("\n")
        for text in re.split(r"^### ", body, flags=re.MULTILINE)[1:]:
            name, _, words = text.partition("\n")
            found[collective.strip(), name.strip()] = words
    return found


def test_the_pictures_on_disk_are_current(tool: ModuleType) -> None:
    assert tool.check() == []


def test_a_picture_that_is_missing_changed_or_of_nothing_is_named(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PICTURES", tmp_path)
    assert tool.main([]) == 0
    assert tool.check(tmp_path) == []

    (tmp_path / "ring_all_reduce.svg").unlink()
    (tmp_path / "ring_all_gather.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "star_all_reduce.svg").write_text("<svg/>", encoding="utf-8")

    assert tool.check(tmp_path) == [
        "ring_all_reduce.svg is missing",
        "ring_all_gather.svg is not as ring_all_gather is drawn now",
        "star_all_reduce.svg is of no algorithm",
    ]


@pytest.mark.parametrize("algorithm", BUILTIN, ids=lambda each: f"{each.name}_{each.collective.value}")
def test_every_algorithm_is_described_with_its_picture_cost_and_order(algorithm: Algorithm) -> None:
    text = sections()[algorithm.collective.value, algorithm.name]

    assert f"(../pictures/{algorithm.name}_{algorithm.collective.value}.svg)" in text
    for part in ("- Cost: ", "- Chosen: ", "- Paper: "):
        assert part in text
    order = "canonical" if algorithm.canonical else "of ranks" if algorithm.ordered else "its own"
    expected = [order] if PROMISES[algorithm.collective].reduces else []
    assert re.findall(r"^- Order: (.*)$", text, flags=re.MULTILINE) == expected


def test_what_the_default_table_never_takes_is_said_to_be_for_the_config_alone() -> None:
    taken = {(rule.collective.value, rule.algorithm) for rule in default_rules()}
    assert {key for key, text in sections().items() if "- Chosen: only if the config names it" in text} == set(
        sections()
    ) - taken


def test_no_algorithm_is_described_that_is_not_there() -> None:
    assert set(sections()) == {(each.collective.value, each.name) for each in BUILTIN}


def test_every_picture_that_the_page_shows_is_there() -> None:
    shown = re.findall(r"\((../pictures/[^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert [path for path in shown if not (PAGE.parent / path).exists()] == []
