"""A small part of the campaign of faults: one case of each kind. `make test-faults` runs a thousand of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns.campaign_faults import KINDS, Case, case_of, judge, run_case
from support.fault_tools import Nursery


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_of_each_kind(nursery: Nursery, kind: str) -> None:
    """In a small world, and with time enough for whatever must happen: what is told in time is measured by the campaign."""
    case = next(case for case in map(case_of, count()) if case.kind == kind and case.world_size <= 4)
    run_case(nursery, replace(case, timeout_s=4.0 if case.kind in ("stop", "zombie") else 30.0), bound_s=40.0)


CASE = replace(case_of(0), world_size=3, kind="kill", victim=1, shrinks=False)
FAULT = {"what": "fault", "rank": 1, "at": 100.0}
TOLD = [{"what": "raised", "rank": rank, "at": 100.5, "about": 1, "closing": False} for rank in (0, 2)]


def judged(case: Case, *facts: dict[str, Any]) -> None:
    """Judge what ranks have told."""
    judge(SimpleNamespace(facts=list(facts), codes={0: 1, 1: -9, 2: 1}), case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "facts", "says"),
    [
        (CASE, [FAULT, TOLD[0]], "neither raised nor ended well: ranks \\[2\\]"),
        (CASE, [FAULT, TOLD[0], TOLD[1] | {"about": 0}], "rank 2 names rank 0, and it was rank 1"),
        (CASE, [FAULT, TOLD[0], TOLD[1] | {"at": 120.0}], "told only after so many seconds: {2: 20.0}"),
        (CASE, [FAULT, *TOLD, {"what": "wrong", "rank": 0, "at": 100.1}], "wrong results"),
        (CASE, TOLD, "the fault did not come"),
        (replace(CASE, kind="continue"), [FAULT, {"what": "well", "rank": 0, "at": 101.0}], "not all ended well: \\[0\\]"),
        (replace(CASE, shrinks=True), [FAULT, *TOLD], "went on: {}, and should: {0: 2, 2: 2}"),
    ],
)
def test_the_campaign_finds_what_does_not_hold(case: Case, facts: list[dict[str, Any]], says: str) -> None:
    judged(CASE, FAULT, *TOLD)
    with pytest.raises(AssertionError, match=says):
        judged(case, *facts)
