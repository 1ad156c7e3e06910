"""Threads of which Python does not hear that they cannot begin."""

from __future__ import annotations

import _thread
import threading

import pytest

from oneaccord.common import threads
from oneaccord.common.threads import Thread


def test_a_thread_runs_as_any_other() -> None:
    done: list[int] = []
    thread = Thread(target=done.append, args=(1,), name="oneaccord-test", daemon=True)
    thread.start()
    thread.join()
    assert done == [1]
    assert not thread.is_alive()


def test_a_start_ends_where_the_thread_dies_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that finds no memory: Python's own `start` waits for ever then (python/cpython#140746)."""
    monkeypatch.setattr(threads, "_START_S", 0.05)
    thread = Thread(target=print, daemon=True)
    monkeypatch.setattr(thread, "_bootstrap", _thread.exit)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    threading._limbo.pop(thread, None)  # type: ignore[attr-defined]
