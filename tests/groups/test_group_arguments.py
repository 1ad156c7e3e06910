"""Calls that cannot be carried out: refused before any byte moves, in words, and the group stays usable on every rank."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group

SIZE = 3


def refused(
    group: Group, error: type[Exception], words: str, method: object, *arguments: object, **options: object
) -> oa.UsageError:
    """Check that a call raises ``error``, that the message has ``words``, and that nothing was sent."""
    with pytest.raises(error, match=f"(?s){words}") as caught:
        method(*arguments, **options)
    assert isinstance(caught.value, oa.UsageError)
    assert isinstance(caught.value, ValueError)
    # Were anything on its way, the ranks would now be in different calls.
    assert group.all_reduce(group.rank).item() == sum(range(group.world_size))
    return caught.value


def test_a_root_that_is_no_rank(world):
    def program(group: Group) -> None:
        words = r"root=.*is not in the group: its ranks are 0 to 2"
        for method in (group.reduce, group.broadcast, group.gather, group.scatter):
            for root in (SIZE, -1, 1.0, "0", None, True, np.float64(1), 2**80, [0]):
                error = refused(group, oa.InvalidRankError, words, method, [1, 2, 3], root=root)
                assert f"root={root!r}" in str(error)
                assert error.rank == group.rank
                assert error.peer == (root if type(root) is int else None)

    world(program, SIZE)


def test_an_array_in_the_place_of_a_rank_leads_to_out(world):
    """As in MPI, where the second argument takes the result."""

    def program(group: Group) -> None:
        words = r"root=<ndarray> is not in the group: its ranks are 0 to 2 \(did you mean out="
        for method in (group.broadcast, group.gather, group.scatter):
            refused(group, oa.InvalidRankError, words, method, [1, 2, 3], np.zeros(3))

    world(program, SIZE)


@pytest.mark.parametrize("dtype", [3, "no such", {"names": ["a"], "formats": []}])
def test_a_dtype_that_is_none_is_refused_by_all_that_make_arrays(world, dtype):
    def program(group: Group) -> None:
        for method, first in ((group.empty, 3), (group.shared, 3), (group.window, 3), (group.window, np.zeros(3))):
            refused(group, oa.DTypeError, "dtype must be a dtype of NumPy, not ", method, first, dtype)

    world(program, SIZE)


def test_a_root_may_be_any_integer(world):
    """Also where it is one on one rank and a Python integer on the others."""

    def program(group: Group) -> None:
        for root in (np.int8(1), np.uint64(1), np.array(1)):
            assert group.broadcast(group.rank, root=root if group.rank == 2 else 1).item() == 1

    world(program, SIZE)


COUNTS = {
    "too few": [1, 2],
    "too many": [1, 1, 1, 0],
    "negative": [-1, 2, 2],
    "not whole": [1.0, 1, 1],
    "fractions": [Fraction(1), 1, 1],
    "bools": [True, True, True],
    "None": [1, None, 1],
    "text": "111",
    "a number": 3,
    "nested": [[1], [1], [1]],
    "empty": [],
    "a float array": np.ones(3),
}


def test_counts_that_are_no_counts(world):
    def program(group: Group) -> None:
        words = "must be 3 integers of at least 0, one for each rank"
        array = np.arange(3.0)
        calls = [
            (method, options, counts)
            for counts in COUNTS.values()
            for method, options in [
                (group.all_gather, {"counts": counts}),
                (group.gather, {"counts": counts}),
                (group.scatter, {"counts": counts}),
                (group.reduce_scatter, {"counts": counts}),
                (group.all_to_all, {"send_counts": counts}),
                (group.all_to_all, {"send_counts": [1, 1, 1], "receive_counts": counts}),
            ]
        ]
        for method, options, counts in calls:
            error = refused(group, oa.SizeMismatchError, f"^{[*options][-1]} {words}", method, array, **options)
            assert repr(counts) in str(error)

    world(program, SIZE)


def test_counts_that_do_not_fit_the_array(world):
    def program(group: Group) -> None:
        array, rank = np.zeros((4, 2)), group.rank
        for method in (group.all_gather, group.gather):
            words = "counts= and uneven=True: give one of them"
            refused(group, oa.UsageError, words, method, array, counts=[4, 4, 4], uneven=True)
            error = refused(group, oa.SizeMismatchError, r"counts says that rank", method, array, counts=[5, 5, 5])
            assert f"rank {rank} gives 5 rows" in str(error)
            assert "(4, 2)" in str(error)
        for method, name in ((group.reduce_scatter, "counts"), (group.all_to_all, "send_counts")):
            words = rf"^{name}=\[1, 1, 1\] add up to 3.*4"
            refused(group, oa.SizeMismatchError, words, method, array, **{name: [1, 1, 1]})
            words = rf"axis 0 has 4 rows, which 3 ranks cannot share evenly: give {name}, such as {name}=\[2, 1, 1\]"
            refused(group, oa.SizeMismatchError, words, method, array)
        words = "receive_counts without send_counts"
        refused(group, oa.SizeMismatchError, words, group.all_to_all, array[:3], receive_counts=[1, 1, 1])
        for method in (group.reduce_scatter, group.all_to_all):
            refused(group, oa.SizeMismatchError, "axis 0.*0-d array", method, 1.0)

    world(program, SIZE)


def test_what_only_the_root_of_a_scatter_can_see(world):
    """Every rank is a root in turn here, so that no rank waits for one that has refused."""

    def program(group: Group) -> None:
        scatter, rank = group.scatter, group.rank
        words = "axis 0 has 4 rows, which 3 ranks cannot share evenly"
        refused(group, oa.SizeMismatchError, words, scatter, np.zeros((4, 2)), rank)
        refused(group, oa.SizeMismatchError, "add up to 3", scatter, np.zeros((4, 2)), rank, counts=[1, 1, 1])
        refused(group, oa.SizeMismatchError, "0-d array", scatter, 1.0, rank)
        refused(group, oa.LayoutError, "needs an array on the root, not None", scatter, None, rank)
        refused(group, oa.UsageError, "dimensions", scatter, np.zeros((3, *[1] * 32)), rank)

    world(program, SIZE)


def test_a_broadcast_of_none_says_what_to_give(world):
    def program(group: Group) -> None:
        for method in (group.broadcast, group.broadcast_async):
            sent = None if group.rank != 1 else np.ones(3)
            if group.rank == 1:
                refused(group, oa.LayoutError, "got None instead of an array: give the array to send", method, None, 1)
            else:
                words = r"an array of the shape and dtype that rank 1 sends, such as np.empty\(shape, dtype\), or use broadcast_object"
                refused(group, oa.LayoutError, words, method, sent, 1)

    world(program, SIZE)


def test_the_root_of_a_broadcast_of_none_does_not_wait_for_ever(world):
    outcomes = world.outcomes(lambda group: group.broadcast(np.ones(3) if group.rank == 0 else None), SIZE)
    assert isinstance(outcomes[0], oa.AbortedError)
    assert [type(outcome) for outcome in outcomes[1:]] == [oa.LayoutError, oa.LayoutError]
    assert "np.empty(shape, dtype)" in str(outcomes[0])


def test_any_other_collective_takes_as_many_dimensions_as_numpy(world):
    def program(group: Group) -> None:
        array = np.full((3, *[1] * 63), group.rank)
        assert group.all_reduce(array).shape == array.shape
        assert group.all_gather(array).shape == (9, *[1] * 63)
        assert group.reduce_scatter(array).shape == (1, *[1] * 63)

    world(program, SIZE)


OUTS = {
    "a list": (oa.LayoutError, [0.0] * 6, "must be a NumPy array, not a list"),
    "a number": (oa.LayoutError, 1.0, "must be a NumPy array, not a float"),
    "another dtype": (oa.DTypeError, np.zeros(6, np.float32), "out= has dtype float32, but the result has float64"),
    "another byte order": (oa.DTypeError, np.zeros(6, ">f8"), "out= has dtype >f8"),
    "another length": (oa.SizeMismatchError, np.zeros(7), r"out= has shape \(7,\), but the result has \("),
    "another shape": (oa.SizeMismatchError, np.zeros((2, 3, 1)), r"out= has shape \(2, 3, 1\)"),
    "read-only": (oa.LayoutError, np.frombuffer(bytes(48)), "read-only"),
    "a broadcast view": (oa.LayoutError, np.lib.stride_tricks.as_strided(np.zeros(1), (6,), (0,)), "share memory"),
}


def test_an_out_that_cannot_take_the_result(world):
    def program(group: Group) -> None:
        for what, (error, out, words) in OUTS.items():
            check(group, what, error, out, words)

    def check(group: Group, what: str, error: type[Exception], out: object, words: str) -> None:
        array, me = np.arange(6.0), group.rank
        fitting = 1 if what in ("read-only", "a broadcast view") else 0
        calls = [
            (group.all_reduce, array, {}),
            (group.reduce, array, {"root": me}),
            (group.broadcast, array, {"root": me}),
            (group.all_gather, array[:2] if fitting else array, {}),
            (group.gather, array[:2] if fitting else array, {"root": me}),
            (group.reduce_scatter, np.arange(18.0) if fitting else array, {}),
            (group.all_to_all, array, {}),
        ]
        for method, argument, options in calls:
            refused(group, error, words, method, argument, out=out, **options)
        if what in ("a list", "a number", "read-only", "a broadcast view", "another byte order"):
            words_of_recv = words if error is not oa.DTypeError else ">f8"
            left, right = (me - 1) % SIZE, (me + 1) % SIZE
            refused(group, error, words_of_recv, group.recv, left, out=out)
            refused(group, error, words_of_recv, group.sendrecv, array, right, left, out=out)

    world(program, SIZE)


def test_a_peer_that_is_no_rank(world):
    def program(group: Group) -> None:
        me, other = group.rank, (group.rank + 1) % SIZE
        for peer in (SIZE, -1, 1.0, "1", True):
            error = refused(group, oa.InvalidRankError, "ranks are 0 to 2, or None for no rank", group.send, 1, peer)
            assert f"dest={peer!r}" in str(error)
            assert error.rank == me
            error = refused(group, oa.InvalidRankError, "ranks are 0 to 2", group.recv, peer)
            assert f"source={peer!r}" in str(error)
            refused(group, oa.InvalidRankError, "dest=", group.sendrecv, 1, peer, other)
            refused(group, oa.InvalidRankError, "source=", group.sendrecv, 1, other, peer)

    world(program, SIZE)


def test_nobody_sends_to_itself_alone(world):
    def program(group: Group) -> None:
        me, other = group.rank, (group.rank + 1) % SIZE
        for method, arguments in [
            (group.send, (1, me)),
            (group.recv, (me,)),
            (group.sendrecv, (1, me, other)),
            (group.sendrecv, (1, other, me)),
            (group.sendrecv, (1, me, None)),
            (group.sendrecv, (1, None, me)),
        ]:
            error = refused(group, oa.SelfSendError, f"={me} is this rank itself", method, *arguments)
            assert (error.rank, error.peer) == (me, me)

    world(program, SIZE)


def test_what_a_rank_sends_to_itself_or_nobody_is_checked_as_any_other(world):
    def program(group: Group) -> None:
        me, array = group.rank, np.arange(6.0)
        refused(group, oa.DTypeError, "float32", group.sendrecv, array, me, me, out=np.zeros(6, np.float32))
        refused(group, oa.SizeMismatchError, r"\(5,\)", group.sendrecv, array, me, me, out=np.zeros(5))
        for peer in (me, None):
            refused(group, oa.LayoutError, "not a list", group.sendrecv, array, peer, peer, out=[0.0] * 6)
            refused(group, oa.DTypeError, "cannot travel", group.sendrecv, np.array(["x"]), peer, peer)
        refused(group, oa.LayoutError, "not a list", group.recv, None, out=[0.0] * 6)
        refused(group, oa.DTypeError, "cannot travel", group.send, np.array(["x"]), None)

    world(program, SIZE)


def test_more_than_32_dimensions_cannot_be_sent(world):
    def program(group: Group) -> None:
        other = (group.rank + 1) % SIZE
        refused(group, oa.SizeMismatchError, "33 dimensions.*at most 32", group.send, np.zeros([1] * 33), other)
        refused(group, oa.SizeMismatchError, "33 dimensions", group.sendrecv, np.zeros([1] * 33), other, other)

    world(program, SIZE)


def test_a_timeout_that_is_no_time(world):
    def program(group: Group) -> None:
        other, whole = (group.rank + 1) % SIZE, np.zeros(3)
        calls = [
            *(partial(call, 1) for call in (group.all_reduce, group.reduce, group.broadcast, group.all_gather, group.gather)),
            *(partial(call, whole) for call in (group.scatter, group.reduce_scatter, group.all_to_all)),
            *(group.barrier, group.close, partial(group.send, 1, other), partial(group.recv, other)),
        ]
        for call in calls:
            for timeout_s in (0, -1, float("inf"), float("nan"), "5"):
                refused(group, oa.UsageError, "timeout_s must be a positive, finite number", call, timeout_s=timeout_s)

    world(program, SIZE)


def test_a_refusal_on_one_rank_alone_leaves_the_others_waiting_for_it_and_no_harm_done(world):
    def program(group: Group) -> int:
        if group.rank == 1:
            with pytest.raises(oa.UsageError):
                group.all_reduce(np.ones(3), out=np.zeros(4))
        return int(group.all_reduce(np.ones(3))[0])

    assert world(program, SIZE) == [SIZE] * SIZE


def test_a_world_of_threads_needs_whole_numbers():
    from oneaccord.api import ThreadWorld

    for size in (0, -1, 1.5, "2", True, None):
        with pytest.raises(oa.InvalidWorldSizeError, match="positive integer"):
            ThreadWorld(size, "simulated")
    threads = ThreadWorld(2, "simulated")
    for rank in (2, -1):
        with pytest.raises(oa.InvalidRankError, match="not in a world of 2"), threads.rank(rank):
            pass


def test_a_thread_that_is_a_rank_need_not_say_so_and_must_not_say_otherwise():
    from oneaccord.api import ThreadWorld

    with ThreadWorld(1, "simulated").rank(0):
        oa.init(config={}, rank=0, world_size=1).close()
        for wrong in ({"rank": 1}, {"world_size": 2}):
            with pytest.raises(oa.InvalidRankError, match="a thread that is rank 0 of 1"):
                oa.init(config={}, **wrong)
