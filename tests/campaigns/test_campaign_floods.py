"""A job comes to its end under a flood of strangers, and none of its steps waits for them."""

from __future__ import annotations

import pytest
from campaigns.campaign_floods import KINDS, measure
from support.fault_tools import Nursery

_SLACK_S = 1.0
"""What a busy machine may add to a step, which takes milliseconds; whoever waits for strangers takes seconds, if not minutes."""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "lost"), [*((kind, [3]) for kind in KINDS), ("wrong", [0, 1])])
def test_no_step_of_a_job_waits_for_strangers(nursery: Nursery, kind: str, lost: list[int]) -> None:
    alone, flooded = measure(nursery, "none", lost=lost), measure(nursery, kind, lost=lost)
    for step, seconds in flooded.items():
        assert seconds < 2 * alone[step] + _SLACK_S, (step, flooded, alone)
