"""Bytes: results of collectives are exact, for every dtype, reduction, size, layout and world."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_conformance.arrays import DTYPES, Array, bits, calls, combined, numbers, ops_of, same
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "sendrecv")
"""The calls that only move bytes."""
_FEW = ("bool", "int8", "uint64", "float16", "float32", "longdouble", "complex64", "bfloat16", "float8_e5m2")
"""One dtype of each kind."""
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")


def _make(group: Group, arrays: list[Array], names: tuple[str, ...], what: str, op: str = "sum", root: int = 0) -> None:
    for name, (method, given, expected) in calls(group, arrays, op, root).items():
        if name in names:
            before = arrays[group.rank].copy()
            same(method(*given), expected, f"{name} of {what}")
            same(arrays[group.rank], before, f"the input of {name} of {what}, after the call")


def _moves(group: Group, names: list[str]) -> None:
    size = group.world_size
    for name in names:
        for count in (size, 3 * size, 1024 * size):
            arrays = [bits(rank, count, name, count) for rank in range(size)]
            _make(group, arrays, _MOVING, f"{name}[{count}]", root=size - 1)


@check(chapter="bytes")
def check_every_dtype_travels(worlds: WorldMaker) -> None:
    """Calls that move arrays keep every bit of every dtype."""
    worlds.run(_moves, names=list(_FEW if worlds.quick else DTYPES))


def _structured(group: Group) -> None:
    dtype = np.dtype([("key", np.int16), ("place", np.float64, (3,)), ("seen", np.bool_)])
    arrays = []
    for rank in range(group.world_size):
        array = np.zeros(2 * group.world_size, dtype)
        array["key"], array["place"], array["seen"] = rank, rank + np.arange(3) / 2, rank % 2
        arrays.append(array)
    rank, size = group.rank, group.world_size
    assert (group.all_gather(arrays[rank]) == np.concatenate(arrays)).all(), "all_gather of a structured dtype"
    assert (group.broadcast(arrays[rank], 1) == arrays[1]).all(), "broadcast of a structured dtype"
    assert (group.sendrecv(arrays[rank], (rank + 1) % size, (rank - 1) % size) == arrays[rank - 1]).all()


@check(chapter="bytes")
def check_structured_dtypes_travel(worlds: WorldMaker) -> None:
    """Records keep every field."""
    worlds.run(_structured)


def _reduces(group: Group, names: list[str]) -> None:
    size = group.world_size
    for name in names:
        for op in ops_of(name):
            for count in (size, 17 * size) if "float8" in name else (size, 17 * size, 3000 * size):
                arrays = [numbers(rank, count, name, op, count) for rank in range(size)]
                _make(group, arrays, _REDUCING, f'{name}[{count}], op="{op}"', op, size - 1)


@check(chapter="bytes")
def check_every_dtype_and_reduction(worlds: WorldMaker) -> None:
    """Every reduction is exact in every dtype that has it."""
    worlds.run(_reduces, min(worlds.ranks, 4), names=list(_FEW if worlds.quick else DTYPES))


def _sizes(group: Group, counts: list[int]) -> None:
    size = group.world_size
    for count in counts:
        for each in (count, count - count % size):  # the second can be divided among the ranks
            arrays = [bits(rank, each, "uint8", count) for rank in range(size)]
            _make(group, arrays, (*_MOVING, *_REDUCING), f"uint8[{each}]", root=count % size)


@check(chapter="bytes")
def check_every_size(worlds: WorldMaker) -> None:
    """No byte is lost around the lengths at which a backend may change its way, from none on."""
    edges = [1 << power for power in ((6, 10, 12, 13, 14, 15, 16, 18, 20) if not worlds.quick else (6, 12, 16, 18))]
    counts = [0, 1, 2, 3, 5, 7, 31, *(edge + more for edge in edges for more in (-1, 0, 1))]
    worlds.run(_sizes, counts=counts)


def _long(group: Group, count: int) -> None:
    size = group.world_size
    arrays = [bits(rank, count - count % size, "uint64", 1) for rank in range(size)]
    _make(group, arrays, (*_MOVING, *_REDUCING), f"uint64[{count}]", "xor", root=size - 1)


@check(chapter="bytes")
def check_long_arrays(worlds: WorldMaker) -> None:
    """Arrays of megabytes come whole."""
    worlds.run(_long, 3, count=50_021 if worlds.quick else 1_050_021)


def _world(group: Group) -> None:
    size = group.world_size
    for count in (size, 50 * size, 4000 * size):
        for root in range(size) if count == size else (0, size - 1):
            arrays = [bits(rank, count, "uint16", root) for rank in range(size)]
            _make(group, arrays, (*_MOVING, *_REDUCING), f"uint16[{count}], root {root} of {size}", root=root)


@check(chapter="bytes")
def check_every_world_and_root(worlds: WorldMaker) -> None:
    """Every collective is right in worlds of 1 to 9 ranks, with every root."""
    for size in worlds.sizes:
        worlds.run(_world, size)


def _uneven(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for seed in range(6):
        draw = np.random.default_rng(seed)
        largest = 4 if seed < 4 else 9000
        counts = draw.integers(0, largest, size).tolist()
        counts[seed % size] = 0
        parts = [bits(each, 3 * counts[each], "int32", seed).reshape(-1, 3) for each in range(size)]
        joined, root, what = np.concatenate(parts), seed % size, f"int32 rows {counts}"
        same(group.all_gather(parts[rank], counts=counts), joined, f"all_gather of {what}")
        same(group.all_gather(parts[rank], uneven=True), joined, f"all_gather of {what}, uneven=True")
        for told in ({"counts": counts}, {"uneven": True}):
            same(group.gather(parts[rank], root, **told), joined if rank == root else None, f"gather of {what}")
        same(group.scatter(joined if rank == root else None, root, counts=counts), parts[rank], f"scatter of {what}")
        whole = [bits(each, 3 * sum(counts), "int32", seed + 9).reshape(-1, 3) for each in range(size)]
        start = sum(counts[:rank])
        same(
            group.reduce_scatter(whole[rank], counts=counts),
            combined("sum", whole)[start : start + counts[rank]],
            f"reduce_scatter of {what}",
        )
        table = draw.integers(0, largest, (size, size)).tolist()
        blocks = [
            [bits(source * size + dest, table[source][dest], "int64", seed) for dest in range(size)] for source in range(size)
        ]
        expected = np.concatenate([blocks[source][rank] for source in range(size)])
        for receive in (None, [table[source][rank] for source in range(size)]):
            got = group.all_to_all(np.concatenate(blocks[rank]), send_counts=table[rank], receive_counts=receive)
            same(got, expected, f"all_to_all with send_counts {table}")


@check(chapter="bytes")
def check_uneven_blocks(worlds: WorldMaker) -> None:
    """Blocks may differ in length, and may be empty."""
    worlds.run(_uneven)
    worlds.run(_uneven, 3)


def _misaligned(values: Array) -> Array:
    view: Array = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "in Fortran order": np.asfortranarray,
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "every other row": lambda values: np.repeat(values, 2, axis=0)[::2],
    "columns of a wider array": lambda values: np.concatenate([values, values], axis=1)[:, : values.shape[1]],
    "backwards": lambda values: np.ascontiguousarray(values[::-1, ::-1])[::-1, ::-1],
    "misaligned": _misaligned,
}


def _layouts(group: Group, rows: int) -> None:
    rank, size = group.rank, group.world_size
    plain = [bits(each, rows * size * 6, "int64", rows).reshape(rows * size, 6) for each in range(size)]
    for layout, laid in _LAYOUTS.items():
        mine = laid(plain[rank])
        for name, (method, given, expected) in calls(group, plain, root=1).items():
            arguments = [mine if each is plain[rank] else each for each in given]
            what = f"{name} of int64{list(mine.shape)} {layout}"
            same(method(*arguments), expected, what)
            same(mine, plain[rank], f"the input of {what}, after the call")
            if expected is None:
                method(*given)
                continue
            out = laid(np.full_like(expected, -1))
            assert method(*given, out=out) is out, f"{name} did not return its out="
            same(out, expected, f"out= {layout} of {name}")


def _around(group: Group) -> None:
    size = group.world_size
    plain = [bits(each, 12 * size, "int64").reshape(2 * size, 6) for each in range(size)]
    for name, (method, given, expected) in calls(group, plain, root=1).items():
        if expected is None:
            method(*given)
            continue
        whole = np.full((expected.shape[0] + 2, 16), -1)
        out = whole[1:-1, 2:14:2]
        method(*given, out=out)
        same(out.copy(), expected, f"out= of {name}, a part of a larger array")
        out[...] = -1
        assert (whole == -1).all(), f"{name} wrote outside of its out="


@check(chapter="bytes")
def check_every_layout(worlds: WorldMaker) -> None:
    """Arrays of any strides are read and filled element by element, in any order in memory."""
    worlds.run(_layouts, 3, rows=2)
    worlds.run(_layouts, 3, rows=4000)
    worlds.run(_around, 3)


def _read_only(group: Group) -> None:
    size = group.world_size
    plain = [bits(each, 4000 * size, "int32") for each in range(size)]
    plain[group.rank].flags.writeable = False
    _make(group, plain, (*_MOVING, *_REDUCING), "a read-only int32 array", root=1)


@check(chapter="bytes")
def check_inputs_that_cannot_be_written(worlds: WorldMaker) -> None:
    """A read-only input is read."""
    worlds.run(_read_only)


def _in_place(group: Group) -> None:
    size = group.world_size
    for count in (1, 500, 70_000):
        arrays = [bits(each, count, "int32", count) for each in range(size)]
        for root in range(min(size, 2)):
            for name, (method, given, expected) in calls(group, arrays, root=root).items():
                if name in ("all_reduce", "reduce", "broadcast", "scan", "exscan"):
                    mine = arrays[group.rank].copy()
                    method(mine, *given[1:], **({} if expected is None else {"out": mine}))
                    same(mine, arrays[group.rank] if expected is None else expected, f"{name} of int32[{count}] in place")


@check(chapter="bytes")
def check_in_place(worlds: WorldMaker) -> None:
    """The result may take the place of the input."""
    worlds.run(_in_place)


def _shapes(group: Group) -> None:
    size = group.world_size
    for shape in ((), (1,), (0,), (0, 3), (size, 0), (2, 3, 4), (size, 1, 2, 1, 5)):
        count = int(np.prod(shape))
        arrays = [bits(each, count, "int16").reshape(shape) for each in range(size)]
        _make(group, arrays, (*_MOVING, *_REDUCING), f"an array of shape {shape}")


@check(chapter="bytes")
def check_every_shape(worlds: WorldMaker) -> None:
    """Scalars, empty arrays and arrays of many axes keep their shape."""
    worlds.run(_shapes)


def _again(group: Group) -> None:
    size = group.world_size
    for count in (1, 300, 20_000):
        for turn in range(30):  # the same call with other values: a backend may keep prepared data
            arrays = [np.full(count, 1000 * turn + each) for each in range(size)]
            same(group.all_reduce(arrays[group.rank]), combined("sum", arrays), f"all_reduce number {turn} of int64[{count}]")
            same(
                group.broadcast(arrays[group.rank], turn % size),
                arrays[turn % size],
                f"broadcast number {turn} of int64[{count}]",
            )
            same(group.all_gather(arrays[group.rank]), np.concatenate(arrays), f"all_gather number {turn} of int64[{count}]")


@check(chapter="bytes")
def check_calls_that_are_repeated(worlds: WorldMaker) -> None:
    """Each of many calls of one kind gives its own values."""
    worlds.run(_again)


def _mixed(group: Group, seed: int, turns: int) -> None:
    draw = np.random.default_rng(seed)  # the same on all ranks
    size, names = group.world_size, DTYPES[:16]
    for turn in range(turns):
        name = str(draw.choice(names))
        op = str(draw.choice(ops_of(name)))
        count = int(draw.choice([0, 1, 7, 100, 1023, 5000, 40_000])) * (size if draw.random() < 0.5 else 1)
        arrays = [numbers(each, count, name, op, turn) for each in range(size)]
        made = calls(group, arrays, op, int(draw.integers(size)))
        chosen = str(draw.choice(sorted(made)))
        method, given, expected = made[chosen]
        same(method(*given), expected, f'call {turn} of a mixture: {chosen} of {name}[{count}], op="{op}"')


@check(chapter="bytes")
def check_mixtures(worlds: WorldMaker) -> None:
    """A long mixture of calls keeps them apart."""
    for seed, size in enumerate((3,) if worlds.quick else (2, 3, worlds.ranks)):
        worlds.run(_mixed, size, seed=seed, turns=60 if worlds.quick else 200)


def _floats(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (3, 1000, 60_000):
        mine = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
        total = group.all_reduce(mine)
        everywhere = group.all_gather(total.view(np.uint32)).reshape(size, count)
        assert (everywhere == everywhere[0]).all(), f"all_reduce of float32[{count}] gives other bits on other ranks"
        fixed = group.all_reduce(mine, reproducible=True)
        same(fixed[:3], group.all_reduce(mine[:3], reproducible=True), f"all_reduce of float32[{count}], reproducible=True")
        for op in ("min", "max"):
            spoilt = mine.copy()
            if rank == size - 1:
                spoilt[count // 2] = np.nan
            assert np.isnan(group.all_reduce(spoilt, op)[count // 2]), f'all_reduce of float32[{count}], op="{op}", lost a NaN'


@check(chapter="bytes")
def check_floats_are_the_same_everywhere(worlds: WorldMaker) -> None:
    """All ranks get the same bits of a rounded result, and a NaN is never lost."""
    worlds.run(_floats)
    worlds.run(_floats, 3)


def _first(left: Array, right: Array) -> Array:
    """Keep the first operand that is not zero: associative, and the order matters."""
    return np.where(left != 0, left, right)


_FIRST = oa.Op(_first, commutative=False, identity=0)


def _functions(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (5, 999, 40_000):
        arrays = [bits(each, count, "uint32", 5) % 1000 + 1 for each in range(size)]
        same(group.all_reduce(arrays[rank], np.gcd), np.gcd.reduce(arrays), f"all_reduce of uint32[{count}] with np.gcd")
        sparse = [bits(each, count, "int64", 7) * (bits(each, count, "uint8", 8) % 3 == 0) for each in range(size)]
        prefix = [sparse[0]]
        for each in sparse[1:]:
            prefix.append(_first(prefix[-1], each))
        what = f"int64[{count}] with a function whose order matters"
        same(group.all_reduce(sparse[rank], _FIRST), prefix[-1], f"all_reduce of {what}")
        same(group.scan(sparse[rank], _FIRST), prefix[rank], f"scan of {what}")
        same(group.exscan(sparse[rank], _FIRST), prefix[rank - 1] if rank else np.zeros_like(sparse[0]), f"exscan of {what}")
        same(group.reduce(sparse[rank], _FIRST, size - 1), prefix[-1] if rank == size - 1 else None, f"reduce of {what}")


def _where(group: Group) -> None:
    rank, size = group.rank, group.world_size
    values = [bits(each, 500, "int32", 3) for each in range(size)]
    found = group.all_reduce(oa.with_index(values[rank], rank), "minloc")
    table = np.stack(values)
    names = found.dtype.names or ("", "")
    same(np.ascontiguousarray(found[names[0]]), table.min(axis=0), "the values of minloc")
    assert (found[names[1]] == table.argmin(axis=0)).all(), "the locations of minloc are wrong"


@check(chapter="bytes")
def check_reductions_by_functions(worlds: WorldMaker) -> None:
    """Reductions that are functions, and locations of minima, are exact."""
    worlds.run(_functions)
    worlds.run(_where)


def _objects(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for length in (0, 3, 100_000):
        every: list[Any] = [{"rank": each, "words": ["x" * length] * 2, "none": None} for each in range(size)]
        assert group.broadcast_object(every[rank], size - 1) == every[-1], "broadcast_object"
        assert group.all_gather_object(every[rank]) == every, "all_gather_object"
        assert group.gather_object(every[rank], 0) == (every if rank == 0 else None), "gather_object"
        assert group.scatter_object(every if rank == 0 else None, 0) == every[rank], "scatter_object"
        assert group.all_gather_object("y" * (length * rank)) == ["y" * (length * each) for each in range(size)]


@check(chapter="bytes")
def check_objects(worlds: WorldMaker) -> None:
    """Plain objects of any length come as they were given."""
    worlds.run(_objects)


def _barriers(group: Group, turns: int) -> list[list[float]]:
    found = []
    for turn in range(turns):
        if group.rank == turn % group.world_size:
            oa.sleep(0.02)
        came = time.monotonic()
        group.barrier()
        found.append([came, time.monotonic()])
    return found


@check(chapter="bytes")
def check_barriers(worlds: WorldMaker) -> None:
    """No rank leaves a barrier before all have come to it."""
    for size in (2, 3, worlds.ranks):
        per_rank = worlds.run(_barriers, size, turns=2 * size)
        for turn, pairs in enumerate(zip(*per_rank, strict=True)):
            last, first = max(came for came, _ in pairs), min(left for _, left in pairs)
            assert first >= last, (
                f"barrier {turn} in a world of {size}: a rank left it {last - first:.4f} s before the last one had come"
            )


def _empties(group: Group) -> None:
    size = group.world_size
    for count in (0, 1, 1000 * size, 1 << 18):
        arrays = [bits(each, count, "uint32", count) for each in range(size)]
        own = group.empty(count, np.uint32)
        own[...] = arrays[group.rank]
        for name, (method, given, expected) in calls(group, arrays, root=1).items():
            arguments = [own if each is arrays[group.rank] else each for each in given]
            same(method(*arguments), expected, f"{name} of uint32[{count}] made by group.empty")
        same(own, arrays[group.rank], "memory of group.empty after calls that read it")
        group.all_reduce(own, out=own)
        same(own, combined("sum", arrays), f"all_reduce in place of uint32[{count}] made by group.empty")
    made = [group.empty(3000, np.uint32) for _ in range(4)]
    for number, each in enumerate(made):
        each[...] = number
    for number, each in enumerate(made):
        same(each, np.full(3000, number, np.uint32), f"array {number} of four made by group.empty that live at the same time")


@check(chapter="bytes")
def check_memory_of_the_group(worlds: WorldMaker) -> None:
    """Arrays made by group.empty serve as any others."""
    worlds.run(_empties)
