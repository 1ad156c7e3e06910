"""To be written."""

from __future__ import annotations

from manyhands.api import Group
from manyhands_conformance.registry import check
from manyhands_conformance.worlds import WorldMaker


def _ranks(group: Group) -> list[int]:
    return [group.rank, group.all_reduce(group.rank).item()]


@check(chapter="bytes")
def check_ranks(worlds: WorldMaker) -> None:
    """Each rank has its number, and a sum of them all."""
    for size in worlds.sizes:
        assert worlds.run(_ranks, size) == [[rank, sum(range(size))] for rank in range(size)]
