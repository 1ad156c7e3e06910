"""What the soak looks at, and what of a group that was closed is kept. `make soak` runs for an hour."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from campaigns.campaign_soak import growth, soak
from support.fault_tools import Nursery
from support.worlds import over_sockets

from oneaccord.api import Group


def samples(*values: int) -> list[dict[str, Any]]:
    """Return samples at even distances, in which all things have these values."""
    step = 8.0 / len(values)
    return [
        {"after": step * number, "memory": value, "shared": value, "descriptors": value, "threads": value}
        for number, value in enumerate(values)
    ]


def test_what_grows_after_the_first_quarter_is_found() -> None:
    flat = growth(samples(1, 5, 9, 9, 9, 30, 9, 9, 9), 8.0)
    assert (flat["memory"], flat["descriptors"], flat["threads"]) == (0, 0, 0)
    assert growth(samples(*range(8)), 8.0)["descriptors"] == 3
    with pytest.raises(AssertionError, match="told only 1 times"):
        growth(samples(1), 8.0)


@pytest.mark.long
def test_a_short_soak(nursery: Nursery) -> None:
    soak(nursery, "tcp", 16.0, death_every_s=4.0)


def test_of_a_closed_group_nothing_is_kept() -> None:
    def program(group: Group) -> int:
        for _ in range(20):
            group.split(0).close()
        group.barrier()
        until = time.monotonic() + 20.0  # the background ends the groups, once the other rank has left them too
        while len(group._job.closed_groups) > 2 and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        return len(group._job.closed_groups)

    assert max(over_sockets(program)) <= 2
