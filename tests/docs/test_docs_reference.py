"""The pages of reference say what the docstrings say, and leave nothing out."""

from __future__ import annotations

import ast
import importlib.util
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import module_of

import oneaccord
from oneaccord.contract import hookspecs

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_reference.py"


@pytest.fixture
def tool() -> ModuleType:
    return module_of(TOOL)


@pytest.mark.parametrize("which", ["CORE", "PARALLEL", "API"])
def test_the_reference_is_current(tool: ModuleType, which: str) -> None:
    reference = getattr(tool, which)
    assert reference.file.read_text(encoding="utf-8") == tool.page_of(reference), "run `python tools/make_reference.py`"


@pytest.mark.parametrize("which", ["CORE", "PARALLEL", "API"])
def test_reference_entries_all_have_descriptions(tool: ModuleType, which: str) -> None:
    assert re.findall(r"^- .*: *$", tool.page_of(getattr(tool, which)), re.MULTILINE) == []


def anchors_of(tool: ModuleType, page: str) -> set[str]:
    return {tool.anchor(name) for name in re.findall(r"^#+ (.+)$", page, re.MULTILINE)} | set(
        re.findall(r'<a id="(\w+)"', page)
    )


@pytest.mark.parametrize("which", ["CORE", "PARALLEL", "API"])
def test_every_public_name_stands_there_and_every_link_leads_somewhere(tool: ModuleType, which: str) -> None:
    reference = getattr(tool, which)
    package = import_module(reference.package)
    modules = set(getattr(package, "_MODULES", ()))
    names = {name for name in package.__all__ if not name.startswith("__")} - modules
    for module in sorted(modules):
        names |= {f"{module}.{name}" for name in exported(f"{package.__name__}.{module}")}
    if which == "PARALLEL":  # a module within one of these
        names = names - {"torch.functional"} | {
            f"torch.functional.{name}" for name in exported("oneaccord_parallel.torch_functional")
        }
    if which == "API":  # what programs use as well stands on their page
        names = names.difference(oneaccord.__all__) | {name for name in hookspecs.__all__ if name.startswith("oneaccord_")}
    page = reference.file.read_text(encoding="utf-8")
    assert {tool.anchor(name) for name in names} <= anchors_of(tool, page)
    for file, anchor in re.findall(r"\]\(([\w-]*\.md|)#(\w+)\)", page):
        target = (reference.file.parent / file).read_text(encoding="utf-8") if file else page
        assert anchor in anchors_of(tool, target)


def exported(module: str) -> list[str]:
    """Return the names in ``__all__`` of a module, which may need a library that is not there."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    (names,) = (node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    return [str(name) for name in ast.literal_eval(names)]


def test_an_argument_without_a_word_is_told(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (tmp_path / "oneaccord.py").write_text('"""Nothing."""\n__all__ = []\n')
    words = "Do it.\n\n    Parameters\n    ----------\n    told\n        A word.\n    "
    (package / "__init__.py").write_text(
        f'"""A sample."""\n__all__ = ["f"]\n\n\ndef f(told: int, *, silent: int = 0) -> None:\n    """{words}"""\n'
    )
    monkeypatch.setattr(tool, "SOURCES", (tmp_path,))
    with pytest.raises(tool.IncompleteError, match=r"^f says nothing of its argument silent$"):
        tool.page_of(tool.Reference("sample", tmp_path / "sample.md", "", ""))
