"""Calls in the background."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group, Work
from oneaccord_conformance import patience
from oneaccord_conformance.arrays import bits, calls, combined, same
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker


def _same_results(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (size, 5000 * size):
        arrays = [bits(each, count, "int32") for each in range(size)]
        expected = {name: found for name, (_, _, found) in calls(group, arrays, root=1).items() if name != "sendrecv"}
        mine = arrays[rank]
        works: dict[str, Work[Any]] = {
            "all_reduce": group.all_reduce_async(mine),
            "reduce": group.reduce_async(mine, "sum", 1),
            "broadcast": group.broadcast_async(mine, 1),
            "all_gather": group.all_gather_async(mine),
            "gather": group.gather_async(mine, 1),
            "scatter": group.scatter_async(mine if rank == 1 else None, 1),
            "reduce_scatter": group.reduce_scatter_async(mine),
            "all_to_all": group.all_to_all_async(mine),
            "scan": group.scan_async(mine),
            "exscan": group.exscan_async(mine),
        }
        group.barrier_async().wait()
        for name, work in works.items():
            same(work.wait(), expected[name], f"{name}_async of int32[{count}]")


@check(chapter="async")
def check_every_call(worlds: WorldMaker) -> None:
    """Every collective has the same result in the background, with all of them in flight at once."""
    worlds.run(_same_results)
    worlds.run(_same_results, 2)


def _many(group: Group) -> None:
    size = group.world_size
    for count, times in ((2, 200), (30_000, 24)):
        works = [group.all_reduce_async(np.full(count, number)) for number in range(times)]
        for number in reversed(range(times)):  # in another order than that of the calls
            same(works[number].wait(), np.full(count, size * number), f"call {number} of {times} in flight, int64[{count}]")


@check(chapter="async")
def check_many_in_flight(worlds: WorldMaker) -> None:
    """Any number of calls may be in flight, and be waited for in any order."""
    worlds.run(_many)


def _mixed(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (3, 20_000):
        arrays = [bits(each, count, "int64") for each in range(size)]
        background = group.all_reduce_async(arrays[rank])
        same(group.all_gather(arrays[rank]), np.concatenate(arrays), "all_gather with another call in flight")
        received = group.recv_async((rank - 1) % size)
        other = group.broadcast_async(arrays[rank], size - 1)
        group.send(arrays[rank], (rank + 1) % size)
        group.barrier()
        same(background.wait(), combined("sum", arrays), "all_reduce_async with other calls meanwhile")
        same(other.wait(), arrays[-1], "broadcast_async with other calls meanwhile")
        same(received.wait(), arrays[rank - 1], "recv_async with other calls meanwhile")


@check(chapter="async")
def check_mixed_with_other_calls(worlds: WorldMaker) -> None:
    """Calls in the background, others and messages keep their order and their values."""
    worlds.run(_mixed)


def _in_place(group: Group) -> None:
    size = group.world_size
    for count in (4, 60_000):
        arrays = [np.full(count, number) for number in range(8)]
        works = [group.all_reduce_async(array, out=array) for array in arrays]
        for number, work in enumerate(works):
            assert work.wait() is arrays[number]
            same(arrays[number], np.full(count, size * number), f"all_reduce_async number {number} in place")
        out = np.full((count, 2), -1)
        group.all_reduce_async(np.ones(count, int), out=out[:, 1]).wait()
        assert (out[:, 1] == size).all(), "all_reduce_async into a column"
        assert (out[:, 0] == -1).all(), "all_reduce_async wrote outside of its out="


@check(chapter="async")
def check_out(worlds: WorldMaker) -> None:
    """out= is filled when the work is done, and not its neighbours."""
    worlds.run(_in_place)


def _waiting(group: Group) -> None:
    size = group.world_size
    works = [group.all_reduce_async(np.full(500, number)) for number in range(6)]
    assert [int(each[0]) for each in oa.wait_all(works)] == [size * number for number in range(6)]
    assert all(work.done() and work.exception() is None for work in works), "a work that was waited for is not done"
    works = [group.all_gather_async(np.full(500, number)) for number in range(6)]
    seen = {works.index(work): int(work.wait()[0]) for work in oa.as_completed(works)}
    assert seen == {number: number for number in range(6)}
    ended: list[int] = []
    works = [group.barrier_async() for _ in range(6)]  # type: ignore[misc]
    for number, work in enumerate(works):
        work.add_done_callback(lambda _, number=number: ended.append(number))  # type: ignore[misc]
    works[-1].wait()
    limit = time.monotonic() + patience.TIMEOUT_S
    while len(ended) < 6 and time.monotonic() < limit:  # they run in the background, maybe after the wait
        oa.sleep(0.001)
    assert sorted(ended) == list(range(6)), f"callbacks ran for {ended}"


@check(chapter="async")
def check_waiting(worlds: WorldMaker) -> None:
    """Works are waited for one by one, all at once, or as they end."""
    worlds.run(_waiting)


def _late(group: Group) -> None:
    """Each rank begins its calls at another time, and works elsewhere meanwhile."""
    rank, size = group.rank, group.world_size
    for turn in range(3):
        if turn % size == rank:
            oa.sleep(0.03)
        works = [group.all_reduce_async(np.full(10_000, number + rank)) for number in range(3)]
        if turn % size != rank:
            oa.sleep(0.01)
        for number, work in enumerate(works):
            same(
                work.wait(),
                np.full(10_000, sum(number + each for each in range(size))),
                "all_reduce_async of ranks that come late",
            )


@check(chapter="async")
def check_ranks_that_come_late(worlds: WorldMaker) -> None:
    """Calls in the background wait for ranks that come late."""
    worlds.run(_late)
