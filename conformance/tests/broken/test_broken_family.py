"""A family of broken backends: the suite finds each defect, in words that lead to it; the backend without defects passes the same checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also for the factory, which core imports by its name
import broken_loft
import broken_transport  # noqa: F401 - it enters its faults
from broken_family import FAULTS, Fault, clear
from broken_natives import Native, Natives

from manyhands.config.plugins import get_plugin_manager
from manyhands_conformance import WorldMaker, all_checks, run_checks
from manyhands_conformance import worlds as worlds_module
from manyhands_conformance.chapters import deadlines_, leaks_, transport_


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    get_plugin_manager().register(broken_loft, "loft")
    get_plugin_manager().register(Natives(), "natives of loft")


def be_impatient(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    monkeypatch.setattr(leaks_, "_SETTLE_S", 0.5)
    monkeypatch.setattr(deadlines_, "_LATER_S", 1.0)
    monkeypatch.setattr(deadlines_, "_START_S", 2.0)
    for fact, value in (("_TIMEOUT_S", 1.0), ("_LATER_S", 0.5), ("_AT_ONCE_S", 0.5), ("_SILENT_S", (0.1, 0.3))):
        monkeypatch.setattr(transport_, fact, value)
    if not check.startswith(("leaks", "speed")):  # those are long, and do not hang
        monkeypatch.setattr(worlds_module, "_TIMEOUT_S", 2.0)  # what hangs is waited for so long
        monkeypatch.setattr(worlds_module, "_GRACE_S", 1.5)


def failures(name: str, titles: set[str]) -> dict[str, str]:
    worlds = WorldMaker("loft", {"backends": {"loft": {"fault": name}}}, quick=True)
    report = run_checks([each for each in all_checks() if each.title in titles], worlds)
    assert {each.check.title for each in report.results} == titles
    worlds.rest()
    return {each.check.title: each.text for each in report.results if each.status != "passed"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if each.in_make_test else pytest.mark.long) for name, each in FAULTS.items()]
)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Fault = FAULTS[name]
    monkeypatch.setattr(Natives, "enabled", issubclass(found.backend, Native))
    be_impatient(monkeypatch, found.check)
    try:
        texts = failures(name, {found.check})
    finally:
        clear()
    assert found.check in texts, "the check passed"
    with pytest.raises(AssertionError, match=f"(?s){found.words}"):
        raise AssertionError(texts[found.check])


def test_the_backend_without_defects_passes() -> None:
    assert failures("", {each.check for each in FAULTS.values()}) == {}
