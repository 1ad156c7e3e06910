"""Messages: sends and receives between two ranks."""

from __future__ import annotations

import numpy as np

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_conformance.arrays import DTYPES, bits, same
from oneaccord_conformance.ranks import ending
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker


def _ring(group: Group, counts: list[int]) -> None:
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in counts:
        expected = bits(before, count, "uint8", count)
        same(group.sendrecv(bits(rank, count, "uint8", count), after, before), expected, f"sendrecv of uint8[{count}]")
        out = np.full(count, 7, np.uint8)
        assert group.sendrecv(bits(rank, count, "uint8", count), after, before, out=out) is out
        same(out, expected, f"sendrecv of uint8[{count}] into out=")
        for receiver in range(2):  # one side sends while the other receives, then the other way round
            if rank == receiver:
                same(group.recv(1 - rank), bits(1 - rank, count, "uint8", count), f"recv of uint8[{count}]")
            elif rank == 1 - receiver:
                group.send(bits(rank, count, "uint8", count), receiver)


@check(chapter="messages")
def check_every_size(worlds: WorldMaker) -> None:
    """Messages from none to several million bytes come whole, in both directions at once."""
    edges = [1 << power for power in ((6, 9, 12, 13, 14, 15, 16, 17, 18, 20) if not worlds.quick else (6, 12, 16, 18))]
    counts = [0, 1, 2, 3, 63, *(edge + more for edge in edges for more in (-65, -64, -1, 0, 1) if edge + more >= 0)]
    worlds.run(_ring, 2, counts=counts)
    worlds.run(_ring, 3, counts=[0, 100, 70_000, 500_000 if worlds.quick else 5_000_003])


def _dtypes(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for name in DTYPES:
        for shape in ((), (3,), (2, 0, 3), (5, 7, 2)):
            count = int(np.prod(shape))
            mine = bits(rank, count, name).reshape(shape)
            got = group.sendrecv(mine, (rank + 1) % size, (rank - 1) % size)
            same(got, bits((rank - 1) % size, count, name).reshape(shape), f"sendrecv of {name}{list(shape)}")


@check(chapter="messages")
def check_dtype_and_shape_travel(worlds: WorldMaker) -> None:
    """The receiver need not know dtype and shape."""
    worlds.run(_dtypes, 2)


_LENGTHS = (0, 5, 3000, 1, 40_000, 9, 200_000, 64, 2, 70_000)


def _in_order(group: Group) -> None:
    size = group.world_size
    for source in range(min(size, 2)):
        dest = size - 1 - source
        if source == dest:
            continue
        for number in range(60):
            count = _LENGTHS[number % len(_LENGTHS)]
            if group.rank == source:
                group.send(np.full(count, number, np.int32), dest)
            elif group.rank == dest:
                same(
                    group.recv(source), np.full(count, number, np.int32), f"message {number} from rank {source} to rank {dest}"
                )


@check(chapter="messages")
def check_order(worlds: WorldMaker) -> None:
    """Messages between two ranks come in the order in which they were sent, short and long ones alike."""
    worlds.run(_in_order, 2)
    worlds.run(_in_order, 3)


def _everybody(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (3, 30_000):
        receives = {source: group.recv_async(source) for source in reversed(range(size)) if source != rank}
        sends = [group.send_async(bits(rank * size + dest, count, "int64"), dest) for dest in range(size) if dest != rank]
        for source, work in receives.items():
            same(work.wait(), bits(source * size + rank, count, "int64"), f"int64[{count}] from rank {source} to rank {rank}")
        for sent in sends:
            sent.wait()


@check(chapter="messages")
def check_every_pair(worlds: WorldMaker) -> None:
    """All ranks send to all others at once."""
    for size in worlds.sizes:
        worlds.run(_everybody, size)


def _among_collectives(group: Group) -> None:
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (4, 2000, 100_000):
        for turn in range(5):
            sent = group.send_async(np.full(count, turn + rank), after)
            same(group.all_reduce(np.full(count, turn)), np.full(count, size * turn), "all_reduce between send and recv")
            same(group.recv(before), np.full(count, turn + before), f"recv of int64[{count}] after an all_reduce")
            sent.wait()


@check(chapter="messages")
def check_apart_from_collectives(worlds: WorldMaker) -> None:
    """Messages and collectives of one group never mix."""
    worlds.run(_among_collectives)


def _one_to_all(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for count in (10, 50_000):
        if rank == 0:
            for dest in range(1, size):
                group.send(np.full(count, dest), dest)
            for source in reversed(range(1, size)):
                same(group.recv(source), np.full(count, -source), f"the answer of rank {source}")
        else:
            same(group.recv(0), np.full(count, rank), "the question")
            group.send(np.full(count, -rank), 0)


@check(chapter="messages")
def check_one_with_all(worlds: WorldMaker) -> None:
    """One rank talks to all others, in any order."""
    worlds.run(_one_to_all)


def _strided(group: Group) -> None:
    rank = group.rank
    for rows in (3, 5000):
        plain = bits(rank, rows * 8, "int64").reshape(rows, 8)
        other = bits(1 - rank, rows * 8, "int64").reshape(rows, 8)
        for laid, expected in ((np.asfortranarray(plain), other), (plain.T, other.T), (plain[::-1, ::2], other[::-1, ::2])):
            same(group.sendrecv(laid, 1 - rank, 1 - rank), np.ascontiguousarray(expected), "sendrecv of an array with strides")
            whole = np.full((expected.shape[0] + 2, 2 * expected.shape[1]), -1)
            out = whole[1:-1, ::2]
            group.sendrecv(laid, 1 - rank, 1 - rank, out=out)
            same(out.copy(), np.ascontiguousarray(expected), "sendrecv into an array with strides")
            out[...] = -1
            assert (whole == -1).all(), "sendrecv wrote outside of its out="


@check(chapter="messages")
def check_every_layout(worlds: WorldMaker) -> None:
    """Arrays of any strides are sent and filled element by element."""
    worlds.run(_strided, 2)


def _self_and_nobody(group: Group) -> list[object]:
    rank = group.rank
    same(group.sendrecv(bits(rank, 9), rank, rank), bits(rank, 9), "sendrecv with oneself")
    assert group.recv(None) is None, "recv from no rank"
    group.send(np.ones(3), None)
    ended = [ending(lambda: group.send(np.ones(3), rank)), ending(lambda: group.recv(rank)), ending(lambda: group.recv(99))]
    group.barrier()
    return [each["errors"][:1] for each in ended]


@check(chapter="messages")
def check_self_and_nobody(worlds: WorldMaker) -> None:
    """A rank cannot send to itself, and nothing is sent to no rank; the group stays usable."""
    for errors in worlds.run(_self_and_nobody, 2):
        kinds = [each[0] if each else None for each in errors]
        assert kinds == ["SelfSendError", "SelfSendError", "InvalidRankError"], kinds


def _objects(group: Group) -> None:
    rank, size = group.rank, group.world_size
    for length in (0, 10, 200_000):
        sent = group.send_object_async({"from": rank, "text": "é" * length}, (rank + 1) % size)
        before = (rank - 1) % size
        assert group.recv_object(before) == {"from": before, "text": "é" * length}, f"an object of {length} letters"
        sent.wait()


@check(chapter="messages")
def check_objects(worlds: WorldMaker) -> None:
    """Plain objects travel, too."""
    worlds.run(_objects)


def _free(group: Group) -> None:
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (4, 3000, 100_000, 1 << 20):
        for turn in range(3):
            mine = np.full(count, turn + rank)
            if rank == 0:
                group.send(mine, after)
                mine[...] = -1
                same(
                    group.recv(before),
                    np.full(count, turn + before),
                    f"int64[{count}] of a rank that wrote to it after send returned",
                )
            else:
                same(
                    group.recv(before),
                    np.full(count, turn + before),
                    f"int64[{count}] of a rank that wrote to it after send returned",
                )
                group.send_async(mine, after).wait()
                mine[...] = -1
            mine[...] = turn
            total = group.all_reduce(mine)
            mine[...] = -1
            joined = group.all_gather(np.full(count // 4, rank))
            same(total, np.full(count, turn * size), f"all_reduce of int64[{count}] whose input was written to afterwards")
            same(joined, np.repeat(np.arange(size), count // 4), f"all_gather of int64[{count // 4}] whose input is gone")


@check(chapter="messages")
def check_memory_is_free(worlds: WorldMaker) -> None:
    """When a call returns, its input may be written to, and a later receiver gets the old content."""
    worlds.run(_free, 3)


def _flood(group: Group) -> None:
    for count, times in ((1, 300), (20_000, 60)):
        if group.rank == 0:
            works = [group.send_async(np.full(count, number), 1) for number in range(times)]
            oa.wait_all(works)
        elif group.rank == 1:
            for number in range(times):
                same(group.recv(0), np.full(count, number), f"message {number} of many")
    group.barrier()


@check(chapter="messages")
def check_many_in_flight(worlds: WorldMaker) -> None:
    """Hundreds of sends may wait for one slow receiver."""
    worlds.run(_flood, 2)
