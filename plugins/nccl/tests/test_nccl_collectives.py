"""Every collective on device memory: values, dtypes, blocks of all sizes, in place."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from oneaccord.api import Collective, DeviceCall

REDUCED = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
MOVED = ["bool", "int16", "uint16", "longdouble", "complex64", "complex128", "float8_e4m3fn", "float8_e3m4", *REDUCED]
BLOCKS = [(4, 4, 4, 4), (3, 0, 2, 5), (0, 4, 0, 0), (1, 2, 3, 4)]
MAKING = {"get_unique_id", "comm_init_rank_config", "comm_finalize", "comm_destroy"}
sizes = pytest.mark.parametrize("size", [1, 4])


def typed(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def given(rank, count, dtype):
    """What a rank brings: small numbers, so that every dtype holds results exactly, and other ones on each rank."""
    return ((np.arange(count) + rank) % 3 + 1).astype(typed(dtype))


def launch(rank, call, source, target):
    """Make a call; return what is in the target then, if it has one."""
    rank.run(rank.channel.prepare(call), source, target)
    return target and target.get()


@sizes
def test_all_reduce_sums_every_dtype_of_nccl(world, size):
    def body(rank):
        for name in REDUCED:
            source, target = rank.put(given(rank.number, 7, name)), rank.empty(7, typed(name))
            result = launch(rank, DeviceCall(Collective.ALL_REDUCE, source.dtype, 7, op="sum"), source, target)
            expected = sum(given(each, 7, name).astype("float64") for each in range(size))
            assert result.dtype == typed(name)
            np.testing.assert_array_equal(result.astype("float64"), expected, name)

    world(body, size)


BITS = [[True, True, False, False], [True, False, True, False]]
REDUCTIONS = [
    ("product", "int32", [[2, 3], [5, -1]], [10, -3]),
    ("min", "float32", [[2, 3], [5, -1]], [2, -1]),
    ("max", "int64", [[2, 3], [5, -1]], [5, 3]),
    ("mean", "float64", [[2, 3], [5, -1]], [3.5, 1]),
    ("mean", "bfloat16", [[2, 3], [5, -1]], [3.5, 1]),
    ("sum", "float8_e4m3fn", [[2, 3], [5, -1]], [7, 2]),
    ("max", "float8_e5m2", [[2, 3], [5, -1]], [5, 3]),
    ("sum", "complex64", [[2 + 1j, 3], [5, -1j]], [7 + 1j, 3 - 1j]),
    ("mean", "complex128", [[2 + 1j, 3], [5, -1j]], [3.5 + 0.5j, 1.5 - 0.5j]),
    ("and", "bool", BITS, [True, False, False, False]),
    ("or", "bool", BITS, [True, True, True, False]),
    ("min", "bool", BITS, [True, False, False, False]),
    ("max", "bool", BITS, [True, True, True, False]),
]


def test_each_reduction_has_numpys_values(world):
    def body(rank):
        for op, name, parts, expected in REDUCTIONS:
            source, wanted, count = (
                rank.put(np.array(parts[rank.number]).astype(typed(name))),
                np.array(expected),
                len(expected),
            )

            def check(call, wanted, what=(op, name), source=source):
                target = rank.empty(len(wanted), source.dtype) if len(wanted) else None
                result = launch(rank, call, source, target)
                if len(wanted):
                    np.testing.assert_array_equal(result, wanted.astype(source.dtype), str((call.collective, *what)))

            check(DeviceCall(Collective.ALL_REDUCE, source.dtype, count, op=op), wanted)
            check(DeviceCall(Collective.REDUCE, source.dtype, count, op=op, root=1), wanted if rank.number else wanted[:0])
            for first in (count // 2, count - 1):
                mine = wanted[first:] if rank.number else wanted[:first]
                check(DeviceCall(Collective.REDUCE_SCATTER, source.dtype, count, counts=(first, count - first), op=op), mine)

    world(body, 2)


def test_a_reduction_in_place_has_the_same_values(world):
    def body(rank):
        expected = sum(given(each, 5, "float32") for each in range(3))
        for collective, root in ((Collective.ALL_REDUCE, -1), (Collective.REDUCE, 2)):
            array = rank.put(given(rank.number, 5, "float32"))
            result = launch(rank, DeviceCall(collective, array.dtype, 5, op="sum", root=root), array, array)
            is_reduced = root in (-1, rank.number)
            np.testing.assert_array_equal(result, expected if is_reduced else given(rank.number, 5, "float32"))

    world(body, 3)


def test_broadcast_and_messages_move_every_dtype(world):
    def body(rank):
        for name, keeps in itertools.product(MOVED, (True, False)):
            is_root = rank.number == 1
            source = rank.put(given(7, 6, name)) if is_root else None
            target = None if is_root and keeps else rank.empty(6, typed(name))
            launch(rank, DeviceCall(Collective.BROADCAST, typed(name), 6, root=1), source, target)
            np.testing.assert_array_equal((source if target is None else target).get(), given(7, 6, name), name)
        for name in MOVED:
            if rank.number == 0:
                rank.run(rank.channel.prepare_send(typed(name), 9, 1), rank.put(given(5, 9, name)))
            elif rank.number == 1:
                array = rank.empty(9, typed(name))
                rank.run(rank.channel.prepare_recv(array.dtype, 9, 0), None, array)
                np.testing.assert_array_equal(array.get(), given(5, 9, name), name)

    world(body, 3)


VERSIONS = pytest.mark.parametrize("version", [22707, 23203], ids=["2.27", "2.32"])


@VERSIONS
@sizes
def test_blocks_may_have_any_sizes(world, nccl, size, version):
    nccl.version = version

    def body(rank):
        for counts, name in itertools.product([each[:size] for each in BLOCKS], ("complex64", "float32")):
            dtype, mine, total, root = typed(name), counts[rank.number], sum(counts), size - 1
            parts = [given(each, count, name) for each, count in enumerate(counts)]
            source, is_root = rank.put(parts[rank.number]), rank.number == root
            call = DeviceCall(Collective.ALL_GATHER, dtype, mine, counts=counts)
            np.testing.assert_array_equal(launch(rank, call, source, rank.empty(total, dtype)), np.concatenate(parts))

            whole = rank.empty(total, dtype) if is_root else None
            got = launch(rank, DeviceCall(Collective.GATHER, dtype, mine, counts=counts, root=root), source, whole)
            if is_root:
                np.testing.assert_array_equal(got, np.concatenate(parts))
            call = DeviceCall(Collective.SCATTER, dtype, total if is_root else 0, counts=counts, root=root)
            np.testing.assert_array_equal(launch(rank, call, whole, rank.empty(mine, dtype)), parts[rank.number])

            call = DeviceCall(Collective.REDUCE_SCATTER, dtype, total, counts=counts, op="sum")
            got = launch(rank, call, rank.put(given(rank.number, total, name)), rank.empty(mine, dtype))
            reduced, start = sum(given(each, total, name) for each in range(size)), sum(counts[: rank.number])
            np.testing.assert_array_equal(got, reduced[start : start + mine])

    world(body, size)


@VERSIONS
@sizes
def test_all_to_all_exchanges_blocks_of_any_sizes(world, nccl, size, version):
    nccl.version = version
    tables = [lambda a, b: 3, lambda a, b: (a + 2 * b) % 4, lambda a, b: 2 * (a < b), lambda a, b: 0]

    def body(rank):
        for count in tables:

            def block(source, target, count=count):
                return np.full(count(source, target), 10 * source + target, "int16")

            sends = tuple(count(rank.number, target) for target in range(size))
            receives = tuple(count(source, rank.number) for source in range(size))
            source = rank.put(np.concatenate([block(rank.number, target) for target in range(size)]))
            is_even = count is tables[0]
            call = DeviceCall(
                Collective.ALL_TO_ALL, source.dtype, sum(sends), counts=sends, receive_counts=receives, is_even=is_even
            )
            got = launch(rank, call, source, rank.empty(sum(receives), "int16"))
            np.testing.assert_array_equal(got, np.concatenate([block(source, rank.number) for source in range(size)]))

    world(body, size)


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
    assert set(nccl.names()) == MAKING


def test_an_even_call_is_one_call_of_nccl(world, nccl):
    def body(rank):
        source, target = rank.put(np.ones(8, "f4")), rank.empty(16, "float32")
        launch(rank, DeviceCall(Collective.ALL_GATHER, source.dtype, 8, counts=(8, 8)), source, target)
        launch(rank, DeviceCall(Collective.REDUCE_SCATTER, source.dtype, 16, counts=(8, 8), op="sum"), target, source)

    world(body, 2)
    assert sorted(name for name in nccl.names() if name not in MAKING) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


MOVES = [
    (Collective.ALL_TO_ALL, "allto_all"),
    (Collective.GATHER, "gather"),
    (Collective.SCATTER, "scatter"),
]


@pytest.mark.parametrize(("collective", "name"), MOVES, ids=[name for _, name in MOVES])
@pytest.mark.parametrize("version", [22707, 22803])
def test_even_blocks_move_by_nccls_own_call_where_it_has_one(world, nccl, collective, name, version):
    nccl.version = version

    def body(rank):
        array, counts = rank.put(np.arange(4, dtype="i2")), (2, 2)
        receive_counts, root = (counts, -1) if collective is Collective.ALL_TO_ALL else ((), 1)
        call = DeviceCall(collective, array.dtype, 4, counts, receive_counts, root=root, is_even=root < 0)
        launch(rank, call, array, rank.empty(4, "int16"))

    world(body, 2)
    made = {call for call in nccl.names() if call not in MAKING}
    assert made == ({name} if version == 22803 else {"send", "recv", "group_end"})


def test_counts_that_are_even_on_one_rank_alone_move_by_messages_on_all(world, nccl):
    # Ranks 0 and 1 each see a row and a column of ones; ranks 2 and 3 trade two elements, and none with themselves.
    table = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 2], [1, 1, 2, 0]]

    def body(rank):
        sends, receives = tuple(table[rank.number]), tuple(row[rank.number] for row in table)
        source = rank.put(np.full(4, rank.number, "i4"))
        call = DeviceCall(Collective.ALL_TO_ALL, source.dtype, 4, counts=sends, receive_counts=receives)
        got = launch(rank, call, source, rank.empty(4, "int32"))
        assert got.tolist() == [each for each in range(4) for _ in range(receives[each])]

    world(body, 4)
    assert "allto_all" not in nccl.names()


def test_a_launch_is_used_again_with_other_arrays(world):
    def body(rank):
        again = rank.channel.prepare(DeviceCall(Collective.ALL_REDUCE, np.dtype("i4"), 3, op="sum"))
        for turn in range(3):
            array = rank.put(np.arange(3, dtype="i4") * turn + rank.number)
            rank.run(again, array, array)
            assert array.get().tolist() == [2 * turn * i + 1 for i in range(3)]

    world(body, 2)


def test_sends_and_receives_between_all_pairs_do_not_mix(world):
    def body(rank):
        others = [peer for peer in range(rank.size) if peer != rank.number]
        arrays = {peer: rank.put(np.array([10 * rank.number + peer, 0], "i4")) for peer in others}
        targets = {peer: rank.empty(2, "int32") for peer in others}
        with rank.channel.together():
            for peer in others:
                rank.run(rank.channel.prepare_send(np.dtype("i4"), 2, peer), arrays[peer])
                rank.run(rank.channel.prepare_recv(np.dtype("i4"), 2, peer), None, targets[peer])
        assert {peer: int(target.get()[0]) for peer, target in targets.items()} == {
            peer: 10 * peer + rank.number for peer in others
        }

    world(body, 4)
