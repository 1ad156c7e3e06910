"""Send, recv and sendrecv beside what the conformance kit asks of every backend: to oneself, to nobody, into what does not fit."""

from __future__ import annotations

import threading
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

ARRAYS = {
    "0-d": np.array(3.5),
    "empty": np.zeros(0, np.int16),
    "empty with rows": np.zeros((3, 0, 2), np.complex64),
    "one": np.array([7], np.uint8),
    "matrix": np.arange(6.0).reshape(2, 3),
    "32 dimensions": np.arange(8, dtype=np.int32).reshape([2, *[1] * 29, 2, 2]),
    "bools": np.array([True, False]),
    "bfloat16": np.array([1.5, -2], ml_dtypes.bfloat16),
    "float8": np.array([1.5, -2], ml_dtypes.float8_e4m3fnuz),
    "longdouble": np.array([1, 3], np.longdouble) / 3,
    "a piece": np.arange(1 << 17, dtype=np.float64),
    "a piece and a byte": np.arange((1 << 20) + 1, dtype=np.uint64).astype(np.uint8),
    "several pieces": np.arange(500_001, dtype=np.float64),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "negative strides": np.arange(10)[::-3],
}


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    return actual.dtype == expected.dtype and actual.shape == expected.shape and bool((actual == expected).all())


@pytest.mark.parametrize("size", [1, 3])
def test_what_a_rank_sends_to_itself_is_copied(world, size):
    def program(group: Group) -> None:
        me = group.rank
        for what, array in ARRAYS.items():
            copy = group.sendrecv(array, me, me)
            assert same(copy, array), what
            assert copy.flags.c_contiguous, what
            assert not np.shares_memory(copy, array), what
            strided = np.zeros((*array.shape, 2), array.dtype)[..., 0]
            assert group.sendrecv(array, me, np.int64(me), out=strided) is strided
            assert same(strided, array), what

    world(program, size)


def test_what_a_rank_sends_to_itself_may_overlap_what_it_gets(world):
    def program(group: Group) -> None:
        me, x = group.rank, np.arange(9).reshape(3, 3)
        assert group.sendrecv(x, me, me, out=x) is x
        assert group.sendrecv(x, me, me, out=x.T).tolist() == np.arange(9).reshape(3, 3).tolist()
        line = np.arange(5)
        group.sendrecv(line[:-1], me, me, out=line[1:])
        assert line.tolist() == [0, 0, 1, 2, 3]

    world(program, 2)


def test_a_sendrecv_that_receives_from_nobody_gives_out_back_whatever_was_asked_before(world):
    def program(group: Group) -> None:
        x, out = np.arange(3), np.full(3, -7)
        for given in (None, out, None, out):
            if group.rank == 0:
                assert group.sendrecv(x, 1, None, out=given) is given
            else:
                assert group.recv(0).tolist() == [0, 1, 2]
        assert out.tolist() == [-7] * 3

    world(program, 2)


def test_more_kinds_than_a_direction_remembers_arrive_as_they_were_sent(world):
    def program(group: Group) -> None:
        for _ in range(2):
            for size in [*range(1, 300), *range(1, 30)]:
                if group.rank == 0:
                    group.send(np.arange(size), 1)
                else:
                    assert group.recv(0).tolist() == list(range(size))

    world(program, 2)


@pytest.mark.parametrize("size", [1, 3])
def test_none_is_nobody_so_that_a_line_needs_no_branch_at_its_ends(world, size):
    def program(group: Group) -> None:
        me, x = group.rank, np.array([group.rank])
        left, right = (me - 1 if me else None), (me + 1 if me + 1 < size else None)
        for _ in range(3):
            from_left = group.sendrecv(x, right, left)
            assert from_left is None if left is None else from_left.tolist() == [left]
            ghost = np.array([-7])
            assert group.sendrecv(x, left, right, out=ghost) is ghost
            assert ghost.tolist() == [-7 if right is None else right]
            group.send(x, right)
            ghost[0] = -7
            assert group.recv(left, out=ghost) is ghost
            assert ghost.tolist() == [-7 if left is None else left]

    world(program, size)


def test_to_nobody_and_from_nobody_in_the_background(world):
    def program(group: Group) -> None:
        ghost = np.array([-7])
        # Behind nothing: neither a collective that has not ended, nor a message that has not come.
        waiting = group.barrier_async() if group.rank == 0 else group.recv_async(0)
        assert group.recv_async(None).wait() is None
        assert group.recv_async(None, out=ghost).wait() is ghost
        assert group.send_async(ghost, None).wait() is None
        assert ghost.tolist() == [-7]
        if group.rank == 0:
            for peer in (1, 2):
                group.send(1, peer)
        else:
            waiting.wait()
            group.barrier()

    world(program, 3)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(4), r"float64\[3\].*float64\[4\]"),
        (np.zeros((3, 1)), r"float64\[3\].*float64\[3, 1\]"),
        (np.zeros(3, np.float32), r"float64\[3\].*float32\[3\]"),
        (np.array(0.0), r"float64\[3\].*float64\[\]"),
    ],
    ids=["count", "shape", "dtype", "0-d"],
)
def test_an_array_that_does_not_fit_out(out, words):
    """The receiver is told what came, ``out`` is untouched, and the sender's next call tells it."""
    has_sent = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3), 1)
            has_sent.set()
            with pytest.raises(oa.CollectiveMismatchError, match=f"(?s)rank 0 sent {words}"):
                group.barrier()
        else:
            assert has_sent.wait(PATIENCE_S)
            with pytest.raises(oa.CollectiveMismatchError, match=f"(?s)rank 0 sent {words}") as caught:
                group.recv(0, out=out)
            assert caught.value.peer == 0
            assert not out.any()

    must(thread_world(program, 2, "tcp"))


def test_a_large_array_that_does_not_fit_out_does_not_block_its_sender(world):
    def program(group: Group) -> None:
        call = partial(group.recv, 0, out=np.zeros(4)) if group.rank else partial(group.send, np.ones(3_000_000), 1)
        with pytest.raises(oa.CollectiveMismatchError, match=r"rank 0 sent float64\[3000000\]"):
            call()

    world(program, 2)


def test_a_sendrecv_begins_to_send_before_anything_has_come(world):
    """Around a ring in which the others receive first, and only then send: what comes depends on what goes."""

    def program(group: Group) -> None:
        following, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        for count in (3, 100_000, 1_000_000):
            token = np.full(count, group.rank)
            if group.rank == 0:
                token = group.sendrecv(token, following, before)
            else:
                token = group.recv(before)
                group.send(token + 1, following)
            assert (token == (group.rank - 1) % group.world_size).all()

    world(program, 3)
