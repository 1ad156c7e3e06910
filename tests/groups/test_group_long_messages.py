"""Messages of the lengths at which shm takes another way: through slots, lent and copied by both ranks, in parts; with and without C."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.worlds import must, thread_world

from oneaccord.api import Group

Bytes = npt.NDArray[np.uint8]

KIB, MIB = 1 << 10, 1 << 20
OPENING = 1288
"""The bytes of an array that travel in its opening."""
SIZES = [
    64 * KIB + OPENING,
    64 * KIB + OPENING + 1,
    128 * KIB - 1,
    128 * KIB + 1,
    128 * KIB + OPENING,
    128 * KIB + OPENING + 1,
    512 * KIB + OPENING,
    512 * KIB + OPENING + 1,
    MIB + 13,
    5 * MIB + 3,
]
WAYS: dict[str, dict[str, Any]] = {
    "lent": {"single_copy": True, "single_copy_bytes": 64 * KIB},
    "slots": {"single_copy": False},
    "few slots": {"single_copy": False, "segment_bytes": 1 << 20},
}


def content(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, np.uint8)


def same(found: object, expected: Bytes) -> None:
    assert isinstance(found, np.ndarray)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert bool((found == expected).all())


def messages(group: Group, nbytes: int, turn: int) -> None:
    me, size = group.rank, group.world_size
    after, before = (me + 1) % size, (me - 1) % size
    own, incoming = content(nbytes, 10 * turn + me), content(nbytes, 10 * turn + before)
    into = np.zeros_like(own)
    same(group.sendrecv(own, after, before), incoming)
    assert group.sendrecv(own, after, before, out=into) is into
    same(into, incoming)
    again = own.copy()
    group.sendrecv(again, after, before, out=again)
    same(again, incoming)
    if me == 0:
        group.send(own, 1)
        same(group.recv(1), content(nbytes, 10 * turn + 1))
    elif me == 1:
        into[:] = 0
        group.recv(0, out=into)
        same(into, content(nbytes, 10 * turn))
        group.send(own, 0)


def collectives(group: Group, nbytes: int, turn: int) -> None:
    me, size, root = group.rank, group.world_size, turn % group.world_size
    blocks = [content(nbytes, 10 * turn + rank) for rank in range(size)]
    whole = np.concatenate(blocks)
    into = np.zeros_like(blocks[me])
    group.broadcast(blocks[me], root, out=into)
    same(into, blocks[root])
    group.broadcast(blocks[me], root, out=blocks[me] if me == root else into)
    same(into, blocks[root])
    same(group.all_gather(blocks[me]), whole)
    same(group.scatter(whole if me == root else None, root), blocks[me])
    gathered = group.gather(blocks[me], root)
    if me == root:
        same(gathered, whole)
    sent = [content(nbytes, 100 * turn + 10 * me + rank) for rank in range(size)]
    expected = [content(nbytes, 100 * turn + 10 * rank + me) for rank in range(size)]
    same(group.all_to_all(np.concatenate(sent)), np.concatenate(expected))
    ones = np.full(nbytes // 4, me + 1.0, np.float32)
    same(group.all_reduce(ones).view(np.uint8), np.full(nbytes // 4, size * (size + 1) / 2, np.float32).view(np.uint8))


@pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_all_lengths_arrive(size: int, way: str, native: bool) -> None:
    def program(group: Group) -> None:
        for nbytes in SIZES:
            for turn in range(2):  # the second is fast
                messages(group, nbytes, turn)
                collectives(group, nbytes, turn)

    must(thread_world(program, size, "shm", config={"native": native, "backends": {"shm": WAYS[way]}}))


def test_arrays_arrive_by_shm_inside_of_hybrid() -> None:
    def program(group: Group) -> None:
        for nbytes in SIZES:
            for turn in range(2):
                messages(group, nbytes, turn)
                collectives(group, nbytes, turn)

    shm = {"single_copy_bytes": 128 * KIB}
    must(thread_world(program, 3, "hybrid", config={"backends": {"shm": shm}}))
