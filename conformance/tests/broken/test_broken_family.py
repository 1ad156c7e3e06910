"""A family of broken backends: the suite finds each defect, in words that lead to it; the backend without defects passes the same checks."""

from __future__ import annotations

import re

import broken_transport  # noqa: F401 - it enters its faults
import pytest
from broken_family import FAULTS, clear
from broken_natives import Native, Natives

from manyhands_conformance import WorldMaker, all_checks, patience, run_checks

pytestmark = pytest.mark.usefixtures("loft")

CHECKS = {each.check for each in FAULTS.values()}
HEAVY = {each for each in CHECKS if each.startswith(("bytes.every", "leaks.", "speed."))}


def failures(name: str, titles: set[str]) -> dict[str, str]:
    worlds = WorldMaker("loft", {"backends": {"loft": {"fault": name}}}, quick=True)
    report = run_checks([each for each in all_checks() if each.title in titles], worlds)
    assert {each.check.title for each in report.results} == titles
    worlds.rest(1.0)
    return {each.check.title: each.text for each in report.results if each.status != "passed"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if each.is_long else ()) for name, each in FAULTS.items()]
)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FAULTS[name]
    monkeypatch.setattr(Natives, "enabled", issubclass(found.backend, Native))
    for constant, value in found.patience.items():
        monkeypatch.setattr(patience, constant, value)
    try:
        texts = failures(name, {found.check})
    finally:
        clear()
    assert found.check in texts, "the check passed"
    assert re.search(found.words, texts[found.check], re.DOTALL), texts[found.check]


@pytest.mark.parametrize("titles", [CHECKS - HEAVY, pytest.param(HEAVY, marks=pytest.mark.long)], ids=["most", "heavy"])
def test_the_backend_without_defects_passes(titles: set[str]) -> None:
    assert failures("", titles) == {}
