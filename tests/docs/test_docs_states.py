"""The page on the states of the control plane has those of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import module_of

from oneaccord.control import client_states, store_states

ROOT = Path(__file__).resolve().parents[2]


def test_the_states_in_the_docs_are_current() -> None:
    tool = module_of(ROOT / "tools" / "make_states.py")
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text) == text, "run `python tools/make_states.py`"


def test_a_changed_row_makes_the_docs_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = module_of(ROOT / "tools" / "make_states.py")
    text = tool.PAGE.read_text(encoding="utf-8")
    with monkeypatch.context() as patch:
        cause, failed = store_states.Event.CAUSE, store_states.State.FAILED
        patch.setattr(
            store_states, "ROWS", [row._replace(then=failed) if row.on is cause else row for row in store_states.ROWS]
        )
        assert "running --> failed: a first cause is found" in tool.page(text)
        assert tool.page(text) != text
    assert tool.page(text) == text
    found, parted = client_states.Event.NOBODY_FOUND, client_states.State.PARTED
    rows = [row._replace(then=parted) if row.on is found and row.then else row for row in client_states.ROWS]
    monkeypatch.setattr(client_states, "ROWS", rows)
    assert "searching --> parted: a search has ended without a result" in tool.page(text)
    assert tool.page(text) != text
