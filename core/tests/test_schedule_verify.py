"""The verifier finds every kind of fault, and names the rank and the step."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from support.schedule_tools import IN, INPUT, OUT, OUTPUT, SCRATCH, TMP, world

from oneaccord.errors import OneAccordError
from oneaccord.schedule.algorithms import doubling, ring, tree
from oneaccord.schedule.proof.verify import (
    MalformedScheduleError,
    OrderError,
    OverlapError,
    Report,
    ScheduleDeadlockError,
    ScheduleError,
    UndefinedReadError,
    UnmatchedMessageError,
    WrongResultError,
    verify,
)
from oneaccord.schedule.steps import Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step


def exchange(*, after: tuple[int, ...] = (0, 1), swapped: bool = False) -> list[Schedule]:
    """Return a right all_reduce of two ranks, or a spoiled one."""
    low = (Send(1, IN), Recv(1, TMP), Reduce(OUT, IN, TMP, (0, 1)))
    left, right = (IN, TMP) if swapped else (TMP, IN)
    high = (Send(0, IN), Recv(0, TMP), Reduce(OUT, left, right, after))
    return world(Collective.ALL_REDUCE, low, high, scratch=(IN,))


def edited(schedules: list[Schedule], rank: int, index: int, step: Step) -> list[Schedule]:
    """Return schedules with one step replaced."""
    steps = list(schedules[rank].steps)
    steps[index] = step
    return [replace(schedule, steps=tuple(steps)) if schedule.rank == rank else schedule for schedule in schedules]


def test_a_right_schedule_is_reported_with_its_costs() -> None:
    assert verify(exchange()) == Report(
        ordered=True, canonical=True, synchronising=True, steps=1, messages=(1, 1), chunks=(1, 1)
    )


def test_a_receive_that_has_no_send_is_found() -> None:
    schedules = world(Collective.BROADCAST, (Copy(OUT, IN),), (Recv(0, OUT),))
    with pytest.raises(UnmatchedMessageError, match="rank 1, step 0 receives from rank 0, which has no counterpart"):
        verify(schedules)


def test_the_order_of_messages_between_two_ranks_can_be_a_deadlock() -> None:
    # Rank 0 sends its second message first to nobody: its first one waits for what only the second can bring.
    zero = (Recv(1, None), Send(1, None, (0,)), Send(1, None))
    one = (Recv(0, None), Recv(0, None), Send(0, None, (1,)))
    with pytest.raises(ScheduleDeadlockError, match="each of these waits for the next"):
        verify(world(Collective.BARRIER, zero, one, chunks=(0, 0)))


def test_a_reduction_that_does_not_wait_for_its_send_is_a_race_only_in_place() -> None:
    with pytest.raises(OverlapError, match="rank 1, step 2 in place writes output chunk 0, which step 0 reads"):
        verify(exchange(after=(1,)))


def test_the_order_of_messages_does_not_order_what_they_write() -> None:
    root = (Copy(OUT, IN), Send(1, IN), Send(1, IN))
    with pytest.raises(OverlapError, match="rank 1, step 1 writes output chunk 0, which step 0 writes"):
        verify(world(Collective.BROADCAST, root, (Recv(0, OUT), Recv(0, OUT))))


def test_steps_are_ordered_through_other_steps() -> None:
    root = (Copy(OUT, IN), Send(1, IN), Send(1, None), Send(1, IN))
    leaf = (Recv(0, OUT), Recv(0, None, (0,)), Recv(0, OUT, (1,)))
    assert verify(world(Collective.BROADCAST, root, leaf)).steps == 3


def test_a_gather_that_reduces_is_found() -> None:
    root = (Copy(OUT, IN), Recv(1, Ref(OUTPUT, 1)), Reduce(Ref(OUTPUT, 1), Ref(OUTPUT, 1), Ref(OUTPUT, 1), (1,)))
    with pytest.raises(WrongResultError, match=r"rank 0, output chunk 1 .*step 2.*of rank 1 2 times"):
        verify(world(Collective.GATHER, root, (Send(0, IN),), chunks=(1, 2)))


def test_a_result_that_depends_on_being_in_place_is_found() -> None:
    # The root of this reduce adds to what it finds in the output, which in place is its input.
    root = (Copy(TMP, IN), RecvReduce(1, OUT, OUT, after=(0,)))
    with pytest.raises(UndefinedReadError, match="rank 0, step 1 reads output chunk 0"):
        verify(world(Collective.REDUCE, root, (Send(0, IN),), scratch=(IN,)))


def test_ranks_that_exchange_their_roles_in_place_are_found() -> None:
    # In place each rank goes on with the other one's input: right if both do it, and wrong if only one of them calls in place.
    def one(peer: int) -> tuple[Step, ...]:
        left, right = (IN, Ref(SCRATCH, 1)) if peer else (Ref(SCRATCH, 1), IN)
        return (
            Send(peer, IN),
            Recv(peer, TMP),
            Copy(OUT, TMP, (0, 1)),
            Send(peer, IN, (2,)),
            Recv(peer, Ref(SCRATCH, 1)),
            Reduce(OUT, left, right, (2, 3, 4)),
        )

    with pytest.raises(OrderError, match=r"step 3 sends r[01] in place, and r[10] when the buffers are separate") as caught:
        verify(world(Collective.ALL_REDUCE, one(1), one(0), scratch=(IN, IN)))
    assert caught.value.step == 3


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Copy(IN, OUT), "rank 0, step 1: it writes input chunk 0"),
        (Copy(Ref(OUTPUT, 1), IN), "rank 0, step 1: it names output chunk 1, but there are 1 output chunks"),
        (Copy(Ref(OUTPUT, 0, 2), IN), "rank 0, step 1: it names output chunks 0 to 1"),
        (Copy(Ref(OUTPUT, -1), IN), "rank 0, step 1: it names output chunk -1"),
        (Copy(Ref(OUTPUT, 0, 0), Ref(INPUT, 0, 0)), "rank 0, step 1: it names"),
        (Copy(TMP, IN), "there are 0 scratch chunks"),
        (Send(0, IN), "rank 0, step 1: its peer is rank 0"),
        (Send(2, IN), "rank 0, step 1: its peer is rank 2; expected another rank of 0 to 1"),
        (Send(1, IN, (1,)), "rank 0, step 1: it comes after step 1"),
        (Send(1, IN, (-1,)), "rank 0, step 1: it comes after step -1"),
    ],
)
def test_a_step_that_names_what_is_not_there_is_refused(step: Step, message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message) as caught:
        verify(world(Collective.BROADCAST, (Copy(OUT, IN), step), (Recv(0, OUT),)))
    assert (caught.value.rank, caught.value.step) == (0, 1)


@pytest.mark.parametrize(
    "size_of", [TMP, Ref(INPUT, 1), Ref(INPUT, 0, 2), Ref(INPUT, -1), Ref(OUTPUT, 0, 0), Ref(INPUT, 0, -1)]
)
def test_scratch_has_the_size_of_chunks_that_are_there(size_of: Ref) -> None:
    with pytest.raises(MalformedScheduleError, match="rank 0, scratch run 1 is as large as"):
        verify(world(Collective.ALL_REDUCE, (Copy(OUT, IN),), scratch=(IN, size_of)))


def test_a_run_of_scratch_is_as_many_chunks_each_of_its_own_size() -> None:
    run = Ref(SCRATCH, 1, 3)
    steps = (Copy(run, Ref(INPUT, 0, 3)), Copy(Ref(OUTPUT, 0, 3), run, (0,)))
    verify(world(Collective.ALL_REDUCE, steps, chunks=(3, 3), scratch=(Ref(INPUT, 2), Ref(OUTPUT, 0, 3))))
    with pytest.raises(MalformedScheduleError, match="input chunks 0 to 2 and scratch chunks 1 to 3 differ in size"):
        verify(world(Collective.ALL_REDUCE, steps, chunks=(3, 3), scratch=(Ref(INPUT, 0, 3), Ref(OUTPUT, 0))))
    with pytest.raises(MalformedScheduleError, match="there are 3 scratch chunks"):
        verify(world(Collective.ALL_REDUCE, steps, chunks=(3, 3), scratch=(Ref(INPUT, 0, 3),)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "position 1 has rank 0; expected 1"),
        ({"size": 3}, "position 1 has size 3"),
        ({"collective": Collective.REDUCE}, "position 1 has collective"),
        ({"root": 1}, "position 1 has root 1"),
        ({"output_chunks": 2}, "position 1 has output_chunks 2"),
    ],
)
def test_schedules_must_be_those_of_all_ranks_of_one_call(change: dict[str, object], message: str) -> None:
    first, second = exchange()
    with pytest.raises(MalformedScheduleError, match=message):
        verify([first, replace(second, **change)])  # type: ignore[arg-type]


def test_a_world_must_not_be_empty() -> None:
    with pytest.raises(MalformedScheduleError, match="no schedule"):
        verify([])


@pytest.mark.parametrize("build", [ring.all_reduce, doubling.all_reduce, tree.reduce, tree.broadcast, ring.all_gather])
def test_every_dependency_of_the_algorithms_is_needed_or_repeats_another(build) -> None:  # type: ignore[no-untyped-def]
    """Without any ``after`` at all, an algorithm is wrong: the verifier does not lean on the order of the list."""
    schedules = [build(rank, 5, 0, 2) for rank in range(5)]
    loose = [replace(one, steps=tuple(replace(step, after=()) for step in one.steps)) for one in schedules]
    verify(schedules)
    with pytest.raises((OverlapError, UndefinedReadError)):
        verify(loose)


@pytest.mark.parametrize("build", [ring.all_reduce, ring.reduce_scatter, doubling.all_reduce, tree.reduce])
def test_dropping_any_reduction_of_any_rank_is_found(build) -> None:  # type: ignore[no-untyped-def]
    schedules = [build(rank, 4, 0, 1) for rank in range(4)]
    spoiled = 0
    for rank, schedule in enumerate(schedules):
        for index, step in enumerate(schedule.steps):
            if isinstance(step, RecvReduce):
                other: Step = Recv(step.peer, step.target, step.after)
            elif isinstance(step, Reduce):
                other = Copy(step.target, step.right, step.after)
            else:
                continue
            spoiled += 1
            with pytest.raises(WrongResultError):
                verify(edited(schedules, rank, index, other))
    assert spoiled > 0


def test_an_error_survives_pickling_with_its_rank_and_step() -> None:
    error = pickle.loads(pickle.dumps(OverlapError("words", rank=3, step=7)))
    assert isinstance(error, ScheduleError)
    assert isinstance(error, OneAccordError)
    assert (str(error), error.rank, error.step) == ("words", 3, 7)
