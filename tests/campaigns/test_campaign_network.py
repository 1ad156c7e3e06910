"""A small part of the campaign of faults of the network: a case of each kind. `make test-faults` runs more."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns.campaign_network import Case, case_of, judge, run_case
from support.fault_tools import Nursery
from support.user_space_network import can_make_networks

hosts = pytest.mark.skipif(not can_make_networks(), reason="making hosts needs root, iproute2 and /dev/net/tun")


@hosts
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["weather", "short", pytest.param("long", marks=pytest.mark.long)])
def test_a_case_of_each_kind(nursery: Nursery, kind: str) -> None:
    run_case(nursery, case_of(next(seed for seed in count() if case_of(seed).kind == kind)))


LONG = next(case for case in map(case_of, count()) if (case.kind, case.hosts, case.ranks_per_host) == ("long", 3, 1))
SMALL, LARGE = sorted(LONG.groups, key=len)
RAISED = [{"what": "raised", "rank": rank, "at": 105.0, "about": (LARGE if rank in SMALL else SMALL)[0]} for rank in range(3)]
WENT_ON = [{"what": "went on", "rank": rank, "at": 106.0} for rank in LARGE]


def judged(case: Case, *facts: dict[str, Any]) -> None:
    """Judge what ranks have told."""
    judge(SimpleNamespace(facts=list(facts), world_size=3), case, 100.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (RAISED[1:], "not all learned of it"),
        ([*RAISED[1:], RAISED[0] | {"about": None}], "rank 0 names nobody"),
        ([*RAISED[1:], RAISED[0] | {"about": 0}], "names rank 0, which it can reach"),
        ([*RAISED[1:], RAISED[0] | {"at": 130.0}], "told only after so many seconds: {0: 30.0}"),
        ([*RAISED, *WENT_ON, WENT_ON[0] | {"rank": SMALL[0]}], "two parts go on"),
        ([*RAISED, *WENT_ON[1:]], "and should"),
        ([*RAISED, *WENT_ON, {"what": "wrong", "rank": 0, "at": 104.0}], "wrong results"),
    ],
)
def test_the_campaign_finds_what_does_not_hold(facts: list[dict[str, Any]], says: str) -> None:
    judged(LONG, *RAISED, *WENT_ON)
    with pytest.raises(AssertionError, match=says):
        judged(LONG, *facts)
