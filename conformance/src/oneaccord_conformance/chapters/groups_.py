"""Groups of some of the ranks."""

from __future__ import annotations

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance.arrays import bits, calls, combined, same
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker


def _collectives(group: Group, seed: int, what: str) -> None:
    size = group.world_size
    for count in (size, 3000 * size):
        arrays = [bits(each, count, "int32", seed) for each in range(size)]
        for name, (method, given, expected) in calls(group, arrays, root=size - 1).items():
            same(method(*given), expected, f"{name} in {what}")
    group.barrier()


def _split(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for turn in range(3):
        half = group.split(rank % 2, -rank if turn % 2 else None)
        assert half is not None
        with half:
            mine = [each for each in range(size) if each % 2 == rank % 2]
            mine = mine[::-1] if turn % 2 else mine
            assert (half.world_size, mine[half.rank]) == (len(mine), rank), "split gives the wrong ranks"
            _collectives(half, rank % 2, "a group made by split")
    nobody = group.split(None if rank == 0 else 5)
    assert (nobody is None) == (rank == 0)
    if nobody is not None:
        with nobody:
            _collectives(nobody, 3, "a group of all ranks but one")
    group.barrier()


@check(chapter="groups")
def check_split(worlds: WorldMaker) -> None:
    """Groups made by split compute among their own ranks, in their order."""
    for size in sorted({2, 3, worlds.ranks}):
        worlds.run(_split, size)


def _overlapping(group: Group) -> None:
    rank, size = group.rank, group.world_size
    pairs = [(first, (first + 1) % size) for first in range(size)]
    groups = {pair: group.subgroup(pair) for pair in pairs if rank in pair}
    for count in (2, 20_000):
        works = {
            pair: made.all_reduce_async(np.full(count, 10 * pair[0] + rank))
            for pair, made in groups.items()
            if made is not None
        }
        everybody = group.all_reduce_async(np.full(count, rank))
        for pair, work in works.items():
            same(work.wait(), np.full(count, 20 * pair[0] + sum(pair)), f"all_reduce of the pair {pair}")
        same(everybody.wait(), np.full(count, sum(range(size))), "all_reduce of all ranks next to those of pairs")
    for made in groups.values():
        if made is not None:
            made.close()
    group.barrier()


@check(chapter="groups")
def check_overlapping(worlds: WorldMaker) -> None:
    """A rank may be in several groups, and all of them at work at once."""
    worlds.run(_overlapping, max(worlds.ranks, 3))


def _apart(group: Group) -> None:
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    twins = [group.split(0) for _ in range(3)]
    for count in (3, 50_000):
        for number, each in enumerate(twins):
            assert each is not None
            each.send_async(np.full(count, number), after)
        for number, each in reversed(list(enumerate(twins))):  # in another order than that of the sends
            assert each is not None
            same(each.recv(before), np.full(count, number), f"recv in group {number} of three with the same ranks")
    for each in twins:
        assert each is not None
        each.close()
    group.barrier()


@check(chapter="groups")
def check_messages_stay_in_their_group(worlds: WorldMaker) -> None:
    """Messages of groups with the same ranks never mix."""
    worlds.run(_apart)


def _many(group: Group, times: int) -> None:
    size = group.world_size
    for number in range(times):
        made = group.split(0)
        assert made is not None
        with made:
            same(made.all_reduce(np.full(5, number)), np.full(5, size * number), f"all_reduce in group {number} of many")
    kept = [group.split(0) for _ in range(20)]
    for number, each in enumerate(kept):
        assert each is not None
        same(each.broadcast(np.full(9, number), number % size), np.full(9, number), f"broadcast in group {number} of twenty")
    for each in kept:
        assert each is not None
        each.close()
    group.barrier()


@check(chapter="groups")
def check_many(worlds: WorldMaker) -> None:
    """Many groups are made, one after the other and at the same time."""
    worlds.run(_many, 3, times=20 if worlds.quick else 100)


def _nested(group: Group) -> None:
    outer = group.split(group.rank // 2)
    assert outer is not None
    inner = outer.subgroup(list(reversed(range(outer.world_size))))
    assert inner is not None
    arrays = [bits(each, 100, "int64", 2) for each in range(inner.world_size)]
    same(inner.all_reduce(arrays[inner.rank]), combined("sum", arrays), "all_reduce in a group of a group")
    alone = group.subgroup([group.rank])
    assert alone is not None
    same(alone.all_gather(np.arange(3)), np.arange(3), "all_gather in a group of one")
    alone.close()
    outer.close()
    same(inner.scan(np.ones(3, int)), np.full(3, inner.rank + 1), "scan in a group whose parent is closed")
    inner.close()
    group.barrier()


@check(chapter="groups")
def check_nested(worlds: WorldMaker) -> None:
    """Groups can be divided again, and outlive the group that they were made from."""
    worlds.run(_nested)
