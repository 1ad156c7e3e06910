"""A family of broken backends: the suite finds each defect, in words that lead to it; the backend without defects passes the same checks."""

from __future__ import annotations

import re

import broken_transport  # noqa: F401 - it enters its faults
import pytest
from broken_family import FAULTS, clear
from broken_natives import Native, Natives

from oneaccord_conformance import WorldMaker, all_checks, patience, run_check

pytestmark = pytest.mark.usefixtures("loft")

HEAVY = ("bytes.every", "leaks.", "speed.")


def failure(name: str, title: str) -> str:
    """Return what a check says of the backend with a defect; nothing if it passes."""
    worlds = WorldMaker("loft", {"backends": {"loft": {"fault": name}}}, quick=True)
    result = run_check(next(each for each in all_checks() if each.title == title), worlds)
    worlds.rest(1.0)
    assert result.status in ("passed", "failed")
    return result.text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if each.is_long else ()) for name, each in FAULTS.items()]
)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FAULTS[name]
    monkeypatch.setattr(Natives, "enabled", issubclass(found.backend, Native))
    for constant, value in found.patience.items():
        monkeypatch.setattr(patience, constant, value)
    try:
        text = failure(name, found.check)
    finally:
        clear()
    assert re.search(found.words, text, re.DOTALL), text or "the check passed"


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.long if check.startswith(HEAVY) else ())
        for check in sorted({each.check for each in FAULTS.values()})
    ],
)
def test_the_backend_without_defects_passes(check: str) -> None:
    assert failure("", check) == ""
