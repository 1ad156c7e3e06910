"""Every collective on device memory: values, dtypes, blocks of all sizes, in place."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from manyhands.api import Collective, DeviceCall

SIZES = [1, 2, 3, 4]
REDUCED = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
MOVED = ["bool", "int16", "uint16", "longdouble", "complex64", "complex128", "float8_e4m3fn", "float8_e3m4", *REDUCED]
UNEVEN = [(3, 0, 2, 5), (0, 4, 0, 0), (1, 2, 3, 4)]


def typed(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def given(rank, count, dtype):
    """What a rank brings: small numbers, so that every dtype holds results exactly, and other ones on each rank."""
    return ((np.arange(count) + rank) % 3 + 1).astype(typed(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", REDUCED)
def test_all_reduce_sums_every_dtype_of_nccl(world, size, dtype):
    def body(rank):
        source, target = rank.put(given(rank.number, 7, dtype)), rank.empty(7, typed(dtype))
        rank.run(rank.channel.prepare(DeviceCall(Collective.ALL_REDUCE, source.dtype, 7, op="sum")), source, target)
        return target.get()

    expected = sum(given(rank, 7, dtype).astype("float64") for rank in range(size))
    for result in world(body, size):
        assert result.dtype == typed(dtype)
        np.testing.assert_array_equal(result.astype("float64"), expected)


@pytest.mark.parametrize(
    ("op", "dtype", "parts", "expected"),
    [
        ("product", "int32", [[2, 3], [5, -1]], [10, -3]),
        ("min", "float32", [[2, 3], [5, -1]], [2, -1]),
        ("max", "int64", [[2, 3], [5, -1]], [5, 3]),
        ("mean", "float64", [[2, 3], [5, -1]], [3.5, 1]),
        ("mean", "bfloat16", [[2, 3], [5, -1]], [3.5, 1]),
        ("sum", "float8_e4m3fn", [[2, 3], [5, -1]], [7, 2]),
        ("max", "float8_e5m2", [[2, 3], [5, -1]], [5, 3]),
        ("sum", "complex64", [[2 + 1j, 3], [5, -1j]], [7 + 1j, 3 - 1j]),
        ("mean", "complex128", [[2 + 1j, 3], [5, -1j]], [3.5 + 0.5j, 1.5 - 0.5j]),
        ("and", "bool", [[True, True, False, False], [True, False, True, False]], [True, False, False, False]),
        ("or", "bool", [[True, True, False, False], [True, False, True, False]], [True, True, True, False]),
        ("min", "bool", [[True, True, False, False], [True, False, True, False]], [True, False, False, False]),
        ("max", "bool", [[True, True, False, False], [True, False, True, False]], [True, True, True, False]),
    ],
)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter uneven"])
def test_each_reduction_has_numpys_values(world, op, dtype, parts, expected, collective):
    name, _, uneven = collective.partition(" ")
    kind, count = Collective(name), len(expected)
    counts = () if name != "reduce_scatter" else (count - 1, 1) if uneven else (count // 2, count // 2)

    def body(rank):
        source = rank.put(np.array(parts[rank.number]).astype(typed(dtype)))
        mine = counts[rank.number] if counts else count if name == "all_reduce" or rank.number == 1 else 0
        target = rank.empty(mine, typed(dtype))
        call = DeviceCall(kind, source.dtype, count, counts=counts, op=op, root=1 if name == "reduce" else -1)
        rank.run(rank.channel.prepare(call), source, target if mine else None)
        return target.get()

    results = world(body, 2)
    wanted = np.array(expected).astype(typed(dtype))
    if counts:
        np.testing.assert_array_equal(np.concatenate(results), wanted)
    else:
        for result in results if name == "all_reduce" else results[1:]:
            np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE])
def test_a_reduction_in_place_has_the_same_values(world, collective):
    def body(rank):
        array = rank.put(given(rank.number, 5, "float32"))
        root = 2 if collective is Collective.REDUCE else -1
        rank.run(rank.channel.prepare(DeviceCall(collective, array.dtype, 5, op="sum", root=root)), array, array)
        return array.get()

    expected = sum(given(rank, 5, "float32") for rank in range(3))
    results = world(body, 3)
    for rank, result in enumerate(results):
        reduced = collective is Collective.ALL_REDUCE or rank == 2
        np.testing.assert_array_equal(result, expected if reduced else given(rank, 5, "float32"))


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("keeps", [True, False])
def test_broadcast_moves_every_dtype_to_all(world, dtype, keeps):
    def body(rank):
        is_root = rank.number == 1
        source = rank.put(given(7, 6, dtype)) if is_root else None
        target = None if is_root and keeps else rank.empty(6, typed(dtype))
        rank.run(rank.channel.prepare(DeviceCall(Collective.BROADCAST, typed(dtype), 6, root=1)), source, target)
        return (source if target is None else target).get()

    for result in world(body, 3):
        np.testing.assert_array_equal(result, given(7, 6, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("counts", [(4, 4, 4, 4), *UNEVEN])
@pytest.mark.parametrize("dtype", ["int16", "complex128"])
def test_all_gather_joins_blocks_of_any_sizes(world, size, counts, dtype):
    counts = counts[:size]

    def body(rank):
        source, target = rank.put(given(rank.number, counts[rank.number], dtype)), rank.empty(sum(counts), typed(dtype))
        call = DeviceCall(Collective.ALL_GATHER, source.dtype, counts[rank.number], counts=counts)
        rank.run(rank.channel.prepare(call), source, target)
        return target.get()

    expected = np.concatenate([given(rank, count, dtype) for rank, count in enumerate(counts)])
    for result in world(body, size):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("counts", [(4, 4, 4, 4), *UNEVEN])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_reduce_scatter_divides_sums_into_blocks_of_any_sizes(world, size, counts, dtype):
    counts = counts[:size]

    def body(rank):
        source, target = rank.put(given(rank.number, sum(counts), dtype)), rank.empty(counts[rank.number], typed(dtype))
        call = DeviceCall(Collective.REDUCE_SCATTER, source.dtype, sum(counts), counts=counts, op="sum")
        rank.run(rank.channel.prepare(call), source, target)
        return target.get()

    total = sum(given(rank, sum(counts), dtype) for rank in range(size))
    np.testing.assert_array_equal(np.concatenate(world(body, size)), total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("counts", [(4, 4, 4, 4), *UNEVEN])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "longdouble"])
def test_gather_and_scatter_move_blocks_of_any_sizes(world, size, counts, dtype):
    counts, root = counts[:size], size - 1

    def body(rank):
        mine, is_root = counts[rank.number], rank.number == root
        source = rank.put(given(rank.number, mine, dtype))
        whole = rank.empty(sum(counts), typed(dtype)) if is_root else None
        call = DeviceCall(Collective.GATHER, source.dtype, mine, counts=counts, root=root)
        rank.run(rank.channel.prepare(call), source, whole)
        back = rank.empty(mine, typed(dtype))
        call = DeviceCall(Collective.SCATTER, source.dtype, sum(counts) if is_root else 0, counts=counts, root=root)
        rank.run(rank.channel.prepare(call), whole, back)
        return back.get(), whole and whole.get()

    parts = [given(rank, count, dtype) for rank, count in enumerate(counts)]
    results = world(body, size)
    for (back, _), part in zip(results, parts, strict=True):
        np.testing.assert_array_equal(back, part)
    np.testing.assert_array_equal(results[root][1], np.concatenate(parts))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("table", ["even", "uneven", "one way", "nothing"])
def test_all_to_all_exchanges_blocks_of_any_sizes(world, size, table):
    def count(source, target):
        return {"even": 3, "uneven": (source + 2 * target) % 4, "one way": 2 * (source < target), "nothing": 0}[table]

    def block(source, target):
        return np.full(count(source, target), 10 * source + target, "int16")

    def body(rank):
        outgoing = np.concatenate([block(rank.number, target) for target in range(size)])
        sends = tuple(count(rank.number, target) for target in range(size))
        receives = tuple(count(source, rank.number) for source in range(size))
        source, target = rank.put(outgoing), rank.empty(sum(receives), "int16")
        call = DeviceCall(Collective.ALL_TO_ALL, source.dtype, sum(sends), counts=sends, receive_counts=receives)
        rank.run(rank.channel.prepare(call), source, target)
        return target.get()

    for rank, result in enumerate(world(body, size)):
        np.testing.assert_array_equal(result, np.concatenate([block(source, rank) for source in range(size)]))


@pytest.mark.parametrize("dtype", MOVED)
def test_a_sent_array_arrives_whatever_its_dtype(world, dtype):
    def body(rank):
        if rank.number == 0:
            array = rank.put(given(5, 9, dtype))
            rank.run(rank.channel.prepare_send(array.dtype, 9, 1), array)
        else:
            array = rank.empty(9, typed(dtype))
            rank.run(rank.channel.prepare_recv(array.dtype, 9, 0), None, array)
        return array.get()

    for array in world(body, 2):
        np.testing.assert_array_equal(array, given(5, 9, dtype))


def test_calls_without_elements_launch_nothing(world, nccl):
    def body(rank):
        channel, f4 = rank.channel, np.dtype("f4")
        zeros = (0,) * rank.size
        calls = [
            DeviceCall(Collective.ALL_REDUCE, f4, 0, op="sum"),
            DeviceCall(Collective.REDUCE, f4, 0, op="sum", root=0),
            DeviceCall(Collective.BROADCAST, f4, 0, root=0),
            DeviceCall(Collective.ALL_GATHER, f4, 0, counts=zeros),
            DeviceCall(Collective.REDUCE_SCATTER, f4, 0, counts=zeros, op="sum"),
            DeviceCall(Collective.GATHER, f4, 0, counts=zeros, root=0),
            DeviceCall(Collective.SCATTER, f4, 0, counts=zeros, root=0),
            DeviceCall(Collective.ALL_TO_ALL, f4, 0, counts=zeros, receive_counts=zeros),
        ]
        for call in calls:
            rank.run(channel.prepare(call))
        rank.run(channel.prepare_send(f4, 0, 1))
        rank.run(channel.prepare_recv(f4, 0, 1))

    world(body, 2)
    assert set(nccl.names()) == {"get_unique_id", "comm_init_rank_config", "comm_finalize", "comm_destroy"}


def test_an_even_call_is_one_call_of_nccl(world, nccl):
    def body(rank):
        source, target = rank.put(np.ones(8, "f4")), rank.empty(16, "float32")
        rank.run(rank.channel.prepare(DeviceCall(Collective.ALL_GATHER, source.dtype, 8, counts=(8, 8))), source, target)
        call = DeviceCall(Collective.REDUCE_SCATTER, source.dtype, 16, counts=(8, 8), op="sum")
        rank.run(rank.channel.prepare(call), target, source)

    world(body, 2)
    called = [
        name for name in nccl.names() if name not in {"get_unique_id", "comm_init_rank_config", "comm_finalize", "comm_destroy"}
    ]
    assert sorted(called) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_a_launch_is_used_again_with_other_arrays(world):
    def body(rank):
        launch = rank.channel.prepare(DeviceCall(Collective.ALL_REDUCE, np.dtype("i4"), 3, op="sum"))
        results = []
        for turn in range(20):
            array = rank.put(np.arange(3, dtype="i4") * turn + rank.number)
            rank.run(launch, array, array)
            results.append(array.get().tolist())
        return results

    for results in world(body, 2):
        assert results == [[2 * turn * i + 1 for i in range(3)] for turn in range(20)]


def test_sends_and_receives_between_all_pairs_do_not_mix(world):
    def body(rank):
        others = [peer for peer in range(rank.size) if peer != rank.number]
        arrays = {
            peer: rank.put(np.array([10 * rank.number + peer, turn], "i4")) for peer, turn in zip(others, itertools.count())
        }
        targets = {peer: rank.empty(2, "int32") for peer in others}
        with rank.channel.together():
            for peer in others:
                rank.run(rank.channel.prepare_send(np.dtype("i4"), 2, peer), arrays[peer])
                rank.run(rank.channel.prepare_recv(np.dtype("i4"), 2, peer), None, targets[peer])
        return {peer: int(target.get()[0]) for peer, target in targets.items()}

    for rank, received in enumerate(world(body, 4)):
        assert received == {peer: 10 * peer + rank for peer in range(4) if peer != rank}
