"""Steps carried out one after the other: what comes to a halt is found, and told in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oneaccord.schedule.algorithms.doubling import barrier
from oneaccord.schedule.compose import in_parallel
from oneaccord.schedule.proof.in_order import check_in_order
from oneaccord.schedule.proof.verify import ScheduleDeadlockError, verify
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step, run_order

IN, OUT = Ref(Buffer.INPUT, 0), Ref(Buffer.OUTPUT, 0)
KEPT, CAME = Ref(Buffer.SCRATCH, 0), Ref(Buffer.SCRATCH, 1)


def world(*steps: Sequence[Step], collective: Collective = Collective.ALL_REDUCE, chunks: int = 1) -> list[Schedule]:
    """Return one schedule for each rank's steps; scratch memory is two vectors."""
    size = len(steps)
    scratch = (Ref(Buffer.INPUT, 0),) * 2 if chunks else ()
    return [
        Schedule(collective, "handmade", rank, size, 0, chunks, chunks, scratch, tuple(mine)) for rank, mine in enumerate(steps)
    ]


def exchange(peer: int, *, receive_first: bool) -> list[Step]:
    """Exchange copies with rank 0 or 1, and write again to what was sent, after or before receiving."""
    steps: list[Step] = [Copy(KEPT, IN), Send(peer, KEPT, (0,))]
    steps += [Recv(peer, CAME), Copy(KEPT, IN, (1,))] if receive_first else [Copy(KEPT, IN, (1,)), Recv(peer, CAME)]
    return [*steps, Reduce(OUT, KEPT if peer else CAME, CAME if peer else KEPT, (2, 3))]


def test_a_step_that_waits_for_a_send_before_the_receive_for_which_the_peer_waits_is_told() -> None:
    schedules = world(*(exchange(peer, receive_first=False) for peer in (1, 0)))
    verify(schedules, ordered=True)
    with pytest.raises(ScheduleDeadlockError) as found:
        check_in_order(schedules)
    assert str(found.value) == (
        "one after the other, 4 of 10 steps can run, and then each of these ranks waits for the next: "
        "rank 0, step 2 (Copy) waits until rank 1 receives by step 3 the message that step 1 sends -> "
        "rank 1, step 2 (Copy) waits until rank 0 receives by step 3 the message that step 1 sends -> rank 0"
    )
    assert (found.value.rank, found.value.step) == (0, 2)


def test_the_same_steps_in_a_better_order_are_right_also_where_only_one_rank_has_it() -> None:
    for first in ((True, True), (True, False), (False, True)):
        schedules = world(*(exchange(1 - rank, receive_first=first[rank]) for rank in range(2)))
        verify(schedules, ordered=True)
        check_in_order(schedules)


def test_a_receive_that_stands_before_what_its_message_depends_on_is_told() -> None:
    schedules = world(
        [Recv(1, CAME), Copy(KEPT, IN), Send(1, KEPT, (1,)), Copy(OUT, CAME, (0, 1))],
        [RecvReduce(0, OUT, IN, incoming_first=True), Send(0, OUT, (0,))],
    )
    verify(schedules, ordered=True)
    words = (
        r"0 of 6 steps can run.*: rank 0, step 0 \(Recv\) waits for the message that rank 1 sends by step 1 -> "
        r"rank 1, step 0 \(RecvReduce\) waits for the message that rank 0 sends by step 2 -> rank 0$"
    )
    with pytest.raises(ScheduleDeadlockError, match=words):
        check_in_order(schedules)


def test_only_those_that_wait_for_each_other_are_told() -> None:
    # Rank 0 waits for rank 1, and that is not why nobody goes on.
    one, two = (exchange(peer, receive_first=False) for peer in (2, 1))
    schedules = world([Recv(1, OUT)], [*one, Send(0, OUT, (4,))], two)
    with pytest.raises(ScheduleDeadlockError, match=r"4 of 12 steps.*: rank 1, step 2.* -> rank 2, step 2.* -> rank 1$"):
        check_in_order(schedules)


@pytest.mark.parametrize("between", [None, IN])
def test_what_comes_after_a_send_comes_after_the_sends_before_that_too(between: Ref | None) -> None:
    # Rank 0 writes what it has sent to rank 1 after it has sent something else to rank 2 after that. No send waits.
    zero: list[Step] = [Copy(KEPT, IN), Send(1, KEPT, (0,)), Send(2, between, (1,)), Copy(KEPT, IN, (2,)), Recv(1, CAME)]
    one: list[Step] = [Copy(KEPT, IN), Send(0, KEPT, (0,)), Copy(KEPT, IN, (1,)), Recv(0, CAME)]
    two: list[Step] = [Recv(0, between and CAME)]
    with pytest.raises(
        ScheduleDeadlockError,
        match=r"6 of 10.*: rank 0, step 3 \(Copy\) waits until rank 1 receives by step 3 the message that step 1",
    ):
        check_in_order(world(zero, one, two))
    check_in_order(world([*zero[:3], zero[4], zero[3]], one, two))


def test_the_last_of_several_sends_to_one_rank_is_waited_for() -> None:
    one: list[Step] = [Recv(0, CAME), Send(0, IN), Copy(OUT, IN, (1,)), Recv(0, KEPT)]
    for after in ((1, 2), (2, 1)):
        zero: list[Step] = [Copy(KEPT, IN), Send(1, KEPT, (0,)), Send(1, KEPT, (0,)), Copy(KEPT, IN, after), Recv(1, CAME)]
        with pytest.raises(
            ScheduleDeadlockError,
            match=r"rank 0, step 3 \(Copy\) waits until rank 1 receives by step 3 the message that step 2",
        ):
            check_in_order(world(zero, one))
        check_in_order(world(zero, [*one[:2], Recv(0, KEPT), Copy(OUT, IN, (1,))]))


def test_empty_messages_are_not_waited_for() -> None:
    steps: list[list[Step]] = [[Send(1 - rank, None), Copy(OUT, IN, (0,)), Recv(1 - rank, None)] for rank in range(2)]
    schedules = world(*steps)
    check_in_order(schedules)
    full = [replace(each, steps=(Send(1 - each.rank, IN), each.steps[1], Recv(1 - each.rank, CAME))) for each in schedules]
    with pytest.raises(ScheduleDeadlockError):
        check_in_order(full)


def test_sends_run_as_early_as_their_operands_are_there_and_in_turn_to_one_peer() -> None:
    steps: list[Step] = [
        Recv(1, CAME),
        Copy(OUT, CAME, (0,)),
        Send(1, OUT, (1,)),
        Send(1, IN),  # behind the one before it
        Send(2, IN),
        Copy(KEPT, IN),
        Send(2, CAME, (0,)),
    ]
    assert run_order(world(steps, [], [])[0]) == [4, 0, 6, 1, 2, 3, 5]


def test_a_barrier_in_the_shadow_changes_nothing() -> None:
    for first in ((True, True), (True, False), (False, False)):
        alone = world(*(exchange(1 - rank, receive_first=first[rank]) for rank in range(2)))
        both = [in_parallel(one, barrier(one.rank, 2)) for one in alone]
        for schedules in (alone, both):
            if any(first):
                check_in_order(schedules)
            else:
                with pytest.raises(ScheduleDeadlockError):
                    check_in_order(schedules)


def test_a_world_of_one_and_schedules_without_steps_are_in_order() -> None:
    check_in_order(world([Copy(OUT, IN)]))
    check_in_order(world([], [], collective=Collective.BARRIER, chunks=0))
