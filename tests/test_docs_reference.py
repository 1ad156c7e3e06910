"""docs/reference.md says what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "make_reference.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_reference", module)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page_of(), "run `python tools/make_reference.py`"


def test_every_public_name_stands_there_and_every_link_leads_somewhere(tool: ModuleType) -> None:
    import manyhands

    page = tool.PAGE.read_text(encoding="utf-8")
    anchors = {tool.anchor(name) for name in re.findall(r"^#+ (.+)$", page, re.MULTILINE)} | set(
        re.findall(r'<a id="(\w+)"', page)
    )
    assert {tool.anchor(name) for name in manyhands.__all__ if not name.startswith("__")} <= anchors
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= anchors


def test_an_argument_without_a_word_is_told(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    words = "Do it.\n\n    Parameters\n    ----------\n    told\n        A word.\n    "
    (package / "__init__.py").write_text(
        f'"""A sample."""\n__all__ = ["f"]\n\n\ndef f(told: int, *, silent: int = 0) -> None:\n    """{words}"""\n'
    )
    monkeypatch.setattr(tool, "SOURCES", (tmp_path,))
    monkeypatch.setattr(tool, "MODULES", (("sample", "sample", ""),))
    with pytest.raises(tool.IncompleteError, match=r"^f says nothing of its argument silent$"):
        tool.page_of()
