"""What tests of `Group.shrink` have in common."""

from __future__ import annotations

from typing import Any

__all__ = ["GOING_ON", "LOSING", "SHRINKING", "places"]

GOING_ON = """
def until_lost(group):
    try:
        while True:
            group.all_reduce(np.ones(1 << 14))
    except mh.PeerLostError as error:
        return error

def check(group):
    \"\"\"Use a group in every way; tell who is in it.\"\"\"
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
    tell("works", now=group.rank, of=size, ranks=group.ranks, backend=group.backend_name)
"""


LOSING = """
group = mh.init(timeout_s=20)
group.barrier()
tell("running")
until_lost(group)
"""
"""Make a group, tell of it, and go on until a rank is lost."""

SHRINKING = """
with group.shrink(timeout_s=15) as group:
    check(group)
"""


def places(facts: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return for each rank which one it is now, and of how many."""
    return {fact["rank"]: (fact["now"], fact["of"]) for fact in facts}
