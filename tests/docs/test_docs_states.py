"""The page on elastic jobs has the states of the control plane's table."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import module_of

from manyhands.control import store_states
from manyhands.control.store_states import Event, State

ROOT = Path(__file__).resolve().parents[2]


def test_the_states_in_the_docs_are_current() -> None:
    tool = module_of(ROOT / "tools" / "make_states.py")
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text) == text, "run `python tools/make_states.py`"


def test_a_changed_row_makes_the_docs_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = module_of(ROOT / "tools" / "make_states.py")
    rows = [row._replace(then=State.FAILED) if row.on is Event.CAUSE else row for row in store_states.ROWS]
    monkeypatch.setattr(tool, "ROWS", rows)
    text = tool.PAGE.read_text(encoding="utf-8")
    assert "running --> failed: a first cause is found" in tool.page(text)
    assert tool.page(text) != text
