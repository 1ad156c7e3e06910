"""Checks that look at whole processes fail for backends that break the contract, and say what is wrong; the others are in `broken`."""

from __future__ import annotations

import pytest

from manyhands_conformance import WorldMaker, all_checks, run_checks

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("broken_backend")]


def text_of(check: str, fault: str) -> str:
    """Return what a check says of the backend with a fault; nothing if it passes."""
    worlds = WorldMaker("broken", {"backends": {"broken": {"fault": fault}}}, quick=True)
    report = run_checks([each for each in all_checks() if each.title == check], worlds)
    worlds.rest()
    (result,) = report.results
    assert result.status in ("passed", "failed")
    return result.text


def test_memory_that_is_left_behind_is_found() -> None:
    assert "MiB of memory" in text_of("leaks.worlds", "memory is left behind")


def test_a_rank_that_dies_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_PLUGINS", "broken_backends")  # for processes, which have no tests that register it
    text = text_of("death.killed", "abort is ignored")
    assert "rank 1 of 3 was killed" in text
    assert "was told after" in text


@pytest.mark.parametrize("check", ["leaks.worlds", "death.killed"])
def test_the_same_backend_without_a_fault_passes(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_PLUGINS", "broken_backends")
    assert text_of(check, "") == ""
