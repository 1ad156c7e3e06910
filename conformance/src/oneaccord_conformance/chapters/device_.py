"""Arrays on GPUs, for backends that move them: `Backend.memory` contains ``"cuda"``."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneaccord.api import Group
from oneaccord_conformance.arrays import bits, calls, numbers, same
from oneaccord_conformance.ranks import ending
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_NOT_THERE = ("scan", "exscan")
"""Calls that groups do not have for arrays on GPUs, on any backend."""


def _cupy(group: Group) -> Any:
    """Return CuPy, with this rank's GPU as the current one."""
    import cupy

    cupy.cuda.Device(group.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


def _devices(group: Group) -> Any:
    return _cupy(group).cuda.runtime.getDeviceCount()


def _ranks(worlds: WorldMaker) -> int:
    """Return how many ranks a world on GPUs has: 2, which may share one."""
    return max(2, min(worlds.ranks, int(worlds.run(_devices, 2)[0])))


def _collectives(group: Group, names: list[str], counts: list[int]) -> None:
    cupy = _cupy(group)
    size = group.world_size
    for name in names:
        for count in counts:
            arrays = [numbers(rank, count * size, name, "sum", count) for rank in range(size)]
            mine = cupy.asarray(arrays[group.rank])
            for call, (method, given, expected) in calls(group, arrays, root=size - 1).items():
                if call in _NOT_THERE or (call == "sendrecv" and "cuda" not in _message_memory(group)):
                    continue
                out = {"out": cupy.zeros(expected.shape, expected.dtype)} if call == "sendrecv" and expected is not None else {}
                got = method(*[mine if each is arrays[group.rank] else each for each in given], **out)
                what = f"{call} of {name}[{count * size}] on GPUs"
                same(None if got is None else cupy.asnumpy(got), expected, what)
                same(cupy.asnumpy(mine), arrays[group.rank], f"the input of {what}, after the call")


def _message_memory(group: Group) -> frozenset[str]:
    backend = group.backend()
    return frozenset() if backend is None else backend.message_memory


@check(chapter="device", needs="cuda")
def check_collectives(worlds: WorldMaker) -> None:
    """Every collective that groups have on GPUs is exact there, for every dtype of numbers."""
    names = list(_DTYPES[::3] if worlds.quick else _DTYPES)
    worlds.run(_collectives, _ranks(worlds), names=names, counts=[0, 1, 1000] if worlds.quick else [0, 1, 7, 1000, 100_000])


def _in_place(group: Group) -> None:
    cupy = _cupy(group)
    size = group.world_size
    for count in (3, 5000):
        mine = cupy.asarray(np.full(count, group.rank + 1.0, np.float32))
        assert group.all_reduce(mine, out=mine) is mine, "all_reduce did not return its out="
        same(cupy.asnumpy(mine), np.full(count, size * (size + 1) / 2, np.float32), "all_reduce in place on GPUs")
        works = [group.all_reduce_async(cupy.asarray(np.full(count, number, np.int64))) for number in range(10)]
        for number, work in enumerate(works):
            same(cupy.asnumpy(work.wait()), np.full(count, size * number), f"all_reduce_async number {number} on GPUs")


@check(chapter="device", needs="cuda")
def check_in_place_and_background(worlds: WorldMaker) -> None:
    """Calls on GPUs work in place, and in the background."""
    worlds.run(_in_place, _ranks(worlds))


def _in_order(group: Group) -> None:
    cupy = _cupy(group)
    size = group.world_size
    array = cupy.asarray(np.zeros(10_000, np.float32))
    for turn in range(10):  # a call sees work that is queued before it, and work that is queued after it sees its result
        array += turn
        array = group.all_reduce(array)
        array = array / size
    same(cupy.asnumpy(array), np.full(10_000, sum(range(10)), np.float32), "kernels and calls in turn")


@check(chapter="device", needs="cuda")
def check_order_with_kernels(worlds: WorldMaker) -> None:
    """Calls keep their order with the caller's kernels."""
    worlds.run(_in_order, _ranks(worlds))


def _differ(group: Group, odd: str) -> list[dict[str, Any]]:
    cupy = _cupy(group)
    good = cupy.asarray(bits(group.rank, 12, "int32"))
    group.all_reduce(good)
    if group.rank == 1:
        bad = cupy.asarray(bits(0, 13 if odd == "size" else 12, "int64" if odd == "dtype" else "int32"))
        first = ending(lambda: group.all_reduce(bad, "max" if odd == "op" else "sum"))
    else:
        first = ending(lambda: group.all_reduce(good))
    cupy.cuda.get_current_stream().synchronize()
    return [first, ending(lambda: group.all_reduce(good))]


@check(chapter="device", needs="cuda")
def check_mismatches(worlds: WorldMaker) -> None:
    """All ranks that do not make the same call on GPUs get an error."""
    size = _ranks(worlds)
    for odd in ("size", "dtype", "op"):
        for rank, outcome in enumerate(worlds.attempt(_differ, size, odd=odd)):
            assert not outcome.errors, f"{odd} differs: rank {rank} {outcome}"
            first = next((each for each in outcome.value if each["errors"]), None)
            assert first is not None, f"{odd} differs on GPUs: rank {rank} got no error"
            assert "CollectiveMismatchError" in first["errors"], (
                f"{odd} differs: rank {rank} got {first['errors'][0]}: {first['text']}"
            )
