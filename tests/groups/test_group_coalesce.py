"""Coalesced all_reduces: one message, the results of separate calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import over_sockets, thread_world

import oneaccord as oa
from oneaccord.api import Group

SHAPES = [(3,), (), (2, 5), (0,), (1000,), (4, 0, 2), (7, 1, 3)]


def values(rank: int, number: int, shape: tuple[int, ...], dtype: Any) -> Any:
    drawn = np.random.default_rng([rank, number]).integers(-50, 50, shape)
    return np.asarray(drawn).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_are_those_of_separate_all_reduces(world, size):
    kinds = [("int32", "sum"), ("uint8", "max"), ("int64", "xor"), ("float64", "max"), ("bool", "or"), ("int32", "min")]

    def program(group: Group) -> None:
        arrays = [
            (values(group.rank, number, shape, kinds[number % len(kinds)][0]), kinds[number % len(kinds)][1])
            for number, shape in enumerate(SHAPES * 5)
        ]
        with group.coalesce() as batch:
            works = [batch.all_reduce(array, op) for array, op in arrays]
        for (array, op), work in zip(arrays, works, strict=True):
            assert work.done()
            expected = group.all_reduce(array, op)
            got = work.wait()
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.tobytes() == expected.tobytes()
            assert got.flags.owndata
            assert got.flags.c_contiguous

    world(program, size)


def test_reproducible_floats_have_the_bits_of_separate_calls(world):
    """Values that cancel, so that another grouping would show."""

    def program(group: Group) -> None:
        draw = np.random.default_rng(group.rank)
        arrays = [draw.standard_normal(n) * 10.0 ** draw.integers(-12, 12, n) for n in (1, 3, 10, 257, 5000)]
        arrays += [array.astype(np.float32) for array in arrays]
        with group.coalesce() as batch:
            works = [batch.all_reduce(array, reproducible=True) for array in arrays]
        for array, work in zip(arrays, works, strict=True):
            assert work.wait().tobytes() == group.all_reduce(array, reproducible=True).tobytes()

    world(program, 5)


def test_the_configured_reproducible_holds_for_batches():
    def program(group: Group) -> None:
        with group.coalesce() as batch:
            batch.all_reduce(np.ones(3 + (group.rank == 1)))

    outcomes = thread_world(program, 2, "simulated", config={"reproducible": True})
    assert all("reproducible=True" in str(outcome) for outcome in outcomes)


def test_results_go_to_out_of_any_layout_and_in_place(world):
    def program(group: Group) -> None:
        size, rank = group.world_size, group.rank
        wide = np.zeros((4, 6))
        strided = wide[:, ::2]
        source = np.asfortranarray(np.arange(12.0).reshape(4, 3)) + rank
        mine, other = np.full(5, rank), np.zeros(5, int)
        with group.coalesce() as batch:
            works = [
                batch.all_reduce(source, out=strided),
                batch.all_reduce(mine, out=mine),
                batch.all_reduce(mine[::-1], "max", out=other),
                batch.all_reduce([1.5, 2.5]),
            ]
        assert works[0].wait() is strided
        assert (strided == size * np.arange(12).reshape(4, 3) + sum(range(size))).all()
        assert not wide[:, 1::2].any()
        assert works[1].wait() is mine
        assert (mine == sum(range(size))).all()
        assert (other == size - 1).all()
        assert works[3].wait().tolist() == [1.5 * size, 2.5 * size]

    world(program, 3)


def test_inputs_are_read_before_any_result_is_written(world):
    """Also where the result of one message lies where the input of another does."""

    def program(group: Group) -> None:
        array = np.full(4, 3, np.int64)
        bits = array.view(np.uint64)
        with group.coalesce() as batch:
            batch.all_reduce(np.full(4, 100), out=array)
            work = batch.all_reduce(bits, "max")
        assert array.tolist() == [200] * 4
        assert work.wait().tolist() == [3] * 4

    world(program, 2)


def test_one_message_travels_for_each_dtype_and_op(world):
    def program(group: Group) -> None:
        before = group._call_sequence.next
        with group.coalesce() as batch:
            for number in range(60):
                batch.all_reduce(np.full(3, number, [np.int32, np.float64][number % 2]), "sum" if number < 50 else "max")
        assert group._call_sequence.next - before == 4
        with group.coalesce():
            pass
        assert group._call_sequence.next - before == 4

    world(program, 2)


def test_without_wait_the_works_tell(world):
    def program(group: Group) -> None:
        order: list[int] = []
        arrays = [np.full(n + 1, group.rank, np.int64) for n in range(10)]
        earlier = group.all_reduce_async(np.ones(1000))
        with group.coalesce(wait=False) as batch:
            works = [batch.all_reduce(array) for array in arrays]
            for number, work in enumerate(works):
                work.add_done_callback(lambda _, number=number: order.append(number))
        for array in arrays:
            array[...] = -1  # the block has read them
        later = group.all_reduce_async(np.ones(10), "max")
        assert [work.wait(timeout_s=PATIENCE_S).tolist() for work in works] == [[3] * (n + 1) for n in range(10)]
        assert later.wait().tolist() == [1] * 10
        assert earlier.wait()[0] == 3
        group.barrier()
        done = threading.Event()
        works[-1].add_done_callback(lambda _: done.set())
        assert done.wait(PATIENCE_S)
        assert order == list(range(10))

        async def main() -> Any:
            with group.coalesce(wait=False) as batch:
                work = batch.all_reduce(2)
            return await work

        assert asyncio.run(main()) == 6

    world(program, 3)


def test_waiting_inside_the_block_is_an_error_in_words(world):
    def program(group: Group) -> None:
        with group.coalesce() as batch:
            work = batch.all_reduce(np.ones(3))
            assert not work.done()
            assert work.exception() is None
            for timeout_s in (None, 0.1):
                with pytest.raises(oa.UsageError, match="waiting inside the block would never end"):
                    work.wait(timeout_s)

            async def main() -> None:
                await work

            async def wait() -> None:
                await asyncio.wait([work])  # type: ignore[type-var]

            for waits in (main, wait):
                with pytest.raises(oa.UsageError, match="sent when the block of coalesce"):
                    asyncio.run(waits())
            for several in (oa.wait_all, oa.wait_any, lambda works: next(oa.as_completed(works))):
                with pytest.raises(oa.UsageError, match="sent when the block of coalesce"):
                    several([work])
        assert work.wait().tolist() == [2.0] * 3

    world(program, 2)


def test_a_block_left_by_an_exception_sends_nothing_and_the_group_goes_on(world):
    def program(group: Group) -> None:
        array = np.ones(3)
        called = threading.Event()
        with pytest.raises(ZeroDivisionError), group.coalesce() as batch:  # noqa: PT012 - the whole block is meant
            work = batch.all_reduce(array, out=array)
            work.add_done_callback(lambda _: called.set())
            _ = 1 / (group.rank - group.rank)
        assert work.done()
        assert isinstance(work.exception(), oa.UsageError)
        assert isinstance(work.exception().__cause__, ZeroDivisionError)
        with pytest.raises(oa.UsageError, match=r"was not sent: the block of coalesce.. ended with ZeroDivisionError"):
            work.wait()
        assert called.wait(PATIENCE_S)
        assert array.tolist() == [1] * 3
        assert group.all_reduce(1) == 2

    world(program, 2)


def test_arguments_are_refused_at_once_and_the_block_may_go_on(world):
    def program(group: Group) -> None:
        with group.coalesce() as batch:
            with pytest.raises(oa.DTypeError):
                batch.all_reduce(np.ones(3, int), "mean")
            with pytest.raises(oa.DTypeError):
                batch.all_reduce(np.ones(3), out=np.ones(3, int))
            with pytest.raises(oa.SizeMismatchError):
                batch.all_reduce(np.ones(3), out=np.ones(4))
            with pytest.raises(oa.LayoutError):
                batch.all_reduce(np.ones(3), out=[0.0] * 3)  # type: ignore[arg-type]
            work = batch.all_reduce(np.ones(3))
        assert work.wait().tolist() == [2] * 3
        with pytest.raises(oa.UsageError, match="only inside its block"):
            batch.all_reduce(1)
        with pytest.raises(oa.UsageError, match="only inside its block"):
            group.coalesce().all_reduce(1)
        with pytest.raises(oa.UsageError, match="for only one block"), batch:
            pass
        with pytest.raises(oa.UsageError, match="timeout_s"):
            group.coalesce(timeout_s=-1)

    world(program, 2)


def ones(*shapes: int | tuple[int, ...], op: str = "sum", dtype: Any = float, **more: Any) -> Callable[[Group], object]:
    def call(group: Group) -> object:
        with group.coalesce() as batch:
            for shape in shapes:
                batch.all_reduce(np.ones(shape, dtype), op, **more)
        return None

    return call


def two_dtypes(group: Group) -> None:
    with group.coalesce() as batch:
        batch.all_reduce(np.ones(3))
        batch.all_reduce(np.ones(3, np.int16))


# What all ranks but one do, what that one does, and what is said of both.
MISMATCHES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str, str]] = {
    "order": (ones(2, 3), ones(3, 2), "batch [2] + [3] of all_reduce(float64[5]", "batch [3] + [2] of all_reduce(float64[5]"),
    "shapes": (ones((2, 3)), ones((3, 2)), "batch [2, 3] of", "batch [3, 2] of"),
    "division": (ones(2, 2), ones(4), "batch [2] + [2] of", "batch [4] of"),
    "an empty array more": (ones(4), ones(4, 0), "batch [4] of", "batch [4] + [0] of"),
    "op": (ones(2, 3), ones(2, 3, op="max"), 'op="sum"', 'op="max"'),
    "dtype": (ones(2), ones(2, dtype=np.int64), "float64[2]", "int64[2]"),
    "reproducible": (ones(2), ones(2, reproducible=True), 'op="sum")', 'op="sum", reproducible=True)'),
    "late in many": (ones(*[2] * 30, 3, 2), ones(*[2] * 30, 2, 3), "24 more", "24 more"),
    "another dtype more": (ones(3), two_dtypes, "batch [3] of", "batch 1/2, [3] of"),
    "a single all_reduce": (
        ones(3),
        lambda group: group.all_reduce(np.ones(3)),
        "batch [3] of all",
        ': all_reduce(float64[3], op="sum")',
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_do_not_add_the_same_arrays_all_learn_it(world, case):
    usual, other, said_usual, said_other = MISMATCHES[case]
    outcomes = world.outcomes(lambda group: (other if group.rank == 1 else usual)(group), 3)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 3
    for outcome in outcomes:
        assert said_usual in str(outcome)
        assert said_other in str(outcome)


def test_a_failure_ends_all_works_with_the_first_cause(world):
    """The first message goes well, the second does not."""

    def program(group: Group) -> Any:
        with pytest.raises(oa.CollectiveMismatchError) as caught, group.coalesce() as batch:  # noqa: PT012
            good = batch.all_reduce(np.ones(3))
            bad = [batch.all_reduce(np.ones(3, int), "max" if group.rank else "min"), batch.all_reduce(np.ones(4, int), "max")]
        assert good.wait().tolist() == [2] * 3
        assert [type(work.exception()) for work in bad] == [oa.CollectiveMismatchError] * 2
        with pytest.raises(oa.CollectiveMismatchError):
            bad[1].wait()
        raise caught.value

    outcomes = world.outcomes(program, 2)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 2, outcomes


@pytest.mark.parametrize("wait", [True, False])
def test_a_group_that_was_closed_meanwhile_ends_the_works(world, wait):
    def program(group: Group) -> None:
        part = group.subgroup([group.rank])
        assert part is not None
        with pytest.raises(oa.ClosedError), part.coalesce(wait=wait) as batch:  # noqa: PT012
            work = batch.all_reduce(1)
            part.close()
        assert isinstance(work.exception(), oa.ClosedError)
        with pytest.raises(oa.ClosedError):
            part.coalesce()

    world(program, 2)


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_does_not_come_is_a_deadline_for_all_works(wait):
    def program(group: Group) -> None:
        if group.rank == 0:
            with group.coalesce(wait=wait, timeout_s=0.5) as batch:
                work = batch.all_reduce(1)
            work.wait()
        else:
            assert finished.wait(PATIENCE_S)

    finished = threading.Event()

    def first(group: Group) -> None:
        try:
            program(group)
        finally:
            finished.set()

    outcomes = over_sockets(first, 2)
    assert isinstance(outcomes[0], oa.DeadlineError), outcomes


def test_a_dropped_handle_changes_nothing(world):
    def program(group: Group) -> None:
        array = np.ones(100)
        with group.coalesce(wait=False) as batch:
            batch.all_reduce(array, out=array)
        group.barrier()
        assert array[0] == 3

    world(program, 3)
