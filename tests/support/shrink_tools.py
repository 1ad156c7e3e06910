"""What tests of `Group.shrink` have in common."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np

from support.fault_tools import Ranks

__all__ = ["GOING_ON", "LOSING", "SHRINKING", "going_on", "places", "use"]


def use(group):
    """Use a group in every way."""
    size = group.world_size
    assert (group.all_reduce(np.full(3, 2.0**group.rank)) == 2.0**size - 1).all()
    assert group.all_gather(np.full(1 << 16, group.rank)).tolist() == np.repeat(np.arange(size), 1 << 16).tolist()
    assert group.all_gather_object(f"{group.rank}") == [str(other) for other in range(size)]
    if size > 1:
        to, source = (group.rank + 1) % size, (group.rank - 1) % size
        assert group.sendrecv(np.array([group.rank]), to, source).tolist() == [source]
    with group.split(0, -group.rank) as backwards:
        assert backwards.all_gather(np.array([group.rank])).tolist() == list(range(size))[::-1]
    group.barrier()


GOING_ON = f"""
{inspect.getsource(use)}
def until_lost(group):
    try:
        while True:
            group.all_reduce(np.ones(1 << 14))
    except oa.PeerLostError as error:
        return error

def check(group):
    use(group)
    tell("works", now=group.rank, of=group.world_size)
"""

LOSING = """
group = oa.init(timeout_s=30)
group.barrier()
tell("running")
until_lost(group)
"""
"""Make a group, tell of it, and go on until a rank is lost."""

SHRINKING = """
with group.shrink(timeout_s=30) as group:
    check(group)
"""


def places(facts: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return for each rank which one it is now, and of how many."""
    return {fact["rank"]: (fact["now"], fact["of"]) for fact in facts}


def going_on(ranks: Ranks, left: Iterable[int]) -> None:
    """Check that these ranks, and no others, go on in a group of their own, and end well."""
    left = sorted(left)
    works = ranks.await_facts("works", len(left))
    codes = ranks.wait()
    assert places(works) == {rank: (now, len(left)) for now, rank in enumerate(left)}
    assert {rank: codes[rank] for rank in left} == dict.fromkeys(left, 0)
