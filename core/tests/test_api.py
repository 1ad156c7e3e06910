"""The surface that plugins may use: what it is, and that it changes in the open alone."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from oneaccord import api

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("make_surface", TOOLS / "make_surface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_surface", module)
    spec.loader.exec_module(module)
    return module


def test_the_surface_is_the_one_that_plugins_were_promised(tool: ModuleType) -> None:
    surface = tool.surface()
    told = tool.changes(tool.FILE.read_text(encoding="utf-8"), surface)
    assert not told, told
    names = set(re.findall(r"^(?:class )?(\w+)", surface, re.MULTILINE)) - {"hook"}
    assert names == set(api.__all__)


@pytest.mark.parametrize(
    ("old", "new", "grows"),
    [
        ("    abstract wait() -> None", "    abstract wait(how: str) -> None", True),  # changed
        ("    mailbox(peer: int) -> Mailbox | None\n", "", True),  # gone
        ("class Transfer(ABC)\n", "class Transfer(ABC)\n    abstract cancel() -> None\n", True),  # more to implement
        ("class Transfer(ABC)\n", "class Transfer(ABC)\n    cancel() -> None\n", False),  # more to use
    ],
)
def test_a_change_is_shown_with_what_to_do(tool: ModuleType, old: str, new: str, grows: bool) -> None:
    before = "class Transfer(ABC)\n    abstract wait() -> None\n    mailbox(peer: int) -> Mailbox | None\n"
    told = tool.changes(before, before.replace(old, new))
    assert ("API_VERSION (in oneaccord/contract/backend.py) must grow" in told) == grows
    assert ("so API_VERSION may stay" in told) != grows
    assert "python tools/make_surface.py" in told
    assert all(f"+{line}" in told for line in new.splitlines() if line not in before)


def test_a_deprecated_name_works_for_one_version_and_says_what_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._DEPRECATED, "Pigeonhole", ("Mailbox", api.API_VERSION))
    words = rf"^oneaccord.api.Pigeonhole is deprecated in version {api.API_VERSION} .* gone in version {api.API_VERSION + 1}: use oneaccord.api.Mailbox$"
    for _ in range(2):  # every use is told, not the first alone
        with pytest.warns(DeprecationWarning, match=words) as caught:
            from oneaccord.api import Pigeonhole  # type: ignore[attr-defined]
        assert Pigeonhole is api.Mailbox
        assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Dovecote'"):
        _ = api.Dovecote


def test_what_is_deprecated_is_deprecated_now_and_replaced_by_what_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, (replacement, version) in api._DEPRECATED.items():
            assert version == api.API_VERSION, f"{name} has had its version: remove it"
            assert replacement in api.__all__
            assert getattr(api, name) is getattr(api, replacement)
