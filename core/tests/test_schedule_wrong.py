"""Deliberately wrong schedules: each is caught, and by the name of what is wrong with it; and nothing at all confuses the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.schedule_tools import IN, INPUT, OUT, OUTPUT, SCRATCH, TMP, caught, world

from oneaccord.schedule.algorithms import doubling, ring, tree
from oneaccord.schedule.proof.terms import Terms
from oneaccord.schedule.proof.verify import (
    MalformedScheduleError,
    OrderError,
    OverlapError,
    ScheduleDeadlockError,
    UndefinedReadError,
    UnmatchedMessageError,
    WrongResultError,
    verify,
)
from oneaccord.schedule.steps import Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

ALL_REDUCE, REDUCE, BROADCAST, BARRIER = Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST, Collective.BARRIER
ALL_GATHER, GATHER, SCATTER = Collective.ALL_GATHER, Collective.GATHER, Collective.SCATTER
REDUCE_SCATTER, ALL_TO_ALL = Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL


def ins(chunk: int, count: int = 1) -> Ref:
    return Ref(INPUT, chunk, count)


def outs(chunk: int, count: int = 1) -> Ref:
    return Ref(OUTPUT, chunk, count)


def tmps(chunk: int, count: int = 1) -> Ref:
    return Ref(SCRATCH, chunk, count)


# A lost chunk


def test_a_ring_that_stops_one_step_early_loses_a_chunk() -> None:
    schedules = [ring.all_gather(rank, 3) for rank in range(3)]
    short = [replace(one, steps=one.steps[:-2]) for one in schedules]
    caught(WrongResultError, short, r"rank 0, output chunk 1 \(which no step writes\) holds nothing")


def test_the_words_name_whose_contribution_is_missing_and_what_is_expected() -> None:
    missing = "contributions of rank 2 0 times; expected the contribution of every rank 0 to 2 once$"
    schedules = world(REDUCE, (RecvReduce(1, OUT, IN),), (Send(0, IN),), ())
    caught(WrongResultError, schedules, missing)
    other = world(GATHER, (Copy(OUT, IN), Copy(outs(1), IN)), (), chunks=(1, 2), even=True)
    alone = "contributions of rank 0 1 times, of rank 1 0 times; expected the contribution of rank 1 alone$"
    caught(WrongResultError, other, alone)


def test_a_broadcast_that_forgets_one_segment_on_one_rank_is_found() -> None:
    root = (Copy(outs(0, 2), ins(0, 2)), Send(1, ins(0, 2)), Send(2, ins(0)))
    steps = (root, (Recv(0, outs(0, 2)),), (Recv(0, outs(0)),))
    caught(WrongResultError, world(BROADCAST, *steps, chunks=(2, 2)), r"rank 2, output chunk 1")


# One that counts twice


def test_a_vector_that_comes_by_two_ways_counts_twice() -> None:
    zero = (RecvReduce(1, OUT, IN), RecvReduce(2, OUT, OUT, after=(0,)))
    one = (Send(0, IN), Send(2, IN))
    two = (RecvReduce(1, TMP, IN), Send(0, TMP, (0,)))
    schedules = world(REDUCE, zero, one, two, scratch=(IN,))
    caught(WrongResultError, schedules, r"rank 0, output chunk 0 .*step 1.*of rank 1 2 times")


# Messages that cross


def test_two_partial_results_that_cross_are_found_although_their_sizes_fit() -> None:
    # Rank 1 sends its own vector first and that of rank 2 second; rank 0 takes them the other way round.
    zero = (Recv(1, tmps(0)), Recv(1, tmps(1)), Copy(outs(0), tmps(1), (1,)), Copy(outs(1), tmps(0), (0,)))
    one = (Send(0, ins(0)), Send(0, ins(1)))
    schedules = world(GATHER, zero, one, chunks=(2, 4), scratch=(outs(2), outs(3)))
    caught(MalformedScheduleError, schedules, "differ in size")
    even = world(GATHER, zero, one, chunks=(2, 4), scratch=(outs(2), outs(3)), even=True)
    caught(MalformedScheduleError, even, "scratch chunk 1 and output chunk 0 differ in size")


def test_a_send_to_the_wrong_of_two_alike_ranks_is_found() -> None:
    zero = (Copy(OUT, IN), Recv(1, outs(1)), Recv(2, outs(2)))
    crossed = (Copy(OUT, IN), Recv(2, outs(1)), Recv(1, outs(2)))
    sends = ((Send(0, IN),), (Send(0, IN),))
    assert verify(world(GATHER, zero, *sends, chunks=(1, 3), even=True)).steps >= 0
    caught(
        WrongResultError,
        world(GATHER, crossed, *sends, chunks=(1, 3), even=True),
        r"rank 0, output chunk 1 .*of rank 1 0 times, of rank 2 1 times",
    )
    caught(UnmatchedMessageError, world(GATHER, crossed, *sends, chunks=(1, 3)), r"rank 1, step 0 sends input chunk 0")


def test_two_messages_between_two_ranks_in_another_order_are_found() -> None:
    # The first message is the partial result, and the receiver takes the second one for it.
    zero = (Copy(OUT, IN), Send(1, IN), Recv(1, TMP), Recv(1, OUT, (0, 1)))
    one = (Copy(TMP, IN), RecvReduce(0, OUT, IN, incoming_first=True, after=(0,)), Send(0, OUT, (1,)), Send(0, TMP, (0,)))
    caught(
        WrongResultError,
        world(ALL_REDUCE, zero, one, scratch=(IN,)),
        r"rank 0, output chunk 0 .*step 3.*of rank 0 0 times",
    )


# Deadlocks where a send waits for its receive


def test_a_ring_in_which_everybody_sends_first_is_a_deadlock() -> None:
    def one(rank: int, size: int) -> tuple[Step, ...]:
        right, left = (rank + 1) % size, (rank - 1) % size
        return (Copy(outs(rank), IN), Send(right, IN), Recv(left, outs(left), (1,)))

    for size in (3, 4, 7):
        schedules = world(ALL_GATHER, *(one(rank, size) for rank in range(size)), chunks=(1, size))
        words = (
            rf"^{size} of {3 * size} steps can run.*: rank 0, step 1 \(Send\) -> rank 1, step 2 .* -> rank 0, step 1 \(Send\)$"
        )
        with pytest.raises(ScheduleDeadlockError, match=words) as found:
            verify(schedules)
        assert (found.value.rank, found.value.step) == (0, 1)


def test_a_receive_before_the_send_that_causes_it_is_a_deadlock() -> None:
    steps = ((Recv(1, None), Send(1, None, (0,))), (Recv(0, None), Send(0, None, (0,))))
    caught(ScheduleDeadlockError, world(BARRIER, *steps, chunks=(0, 0)), r"rank 0, step 0 \(Recv\) -> rank 1, step 1 \(Send\)")


def test_messages_that_overtake_each_other_between_other_ranks_are_a_deadlock() -> None:
    # Each pair agrees on its own order, and the three orders make a circle.
    zero = (Send(1, None), Recv(2, None, (0,)))
    one = (Send(2, None), Recv(0, None, (0,)))
    two = (Send(0, None), Recv(1, None, (0,)))
    caught(ScheduleDeadlockError, world(BARRIER, zero, one, two, chunks=(0, 0)), "0 of 6 steps")


def test_a_long_circle_is_not_told_in_full() -> None:
    steps = 500
    sends = tuple(Send(1, None, (number - 1,) if number else ()) for number in range(steps))
    mine: tuple[Send | Recv, ...] = (
        *sends,
        Recv(1, None, (steps - 1,)),
        *(Recv(1, None, (steps + number,)) for number in range(steps - 1)),
    )
    theirs = tuple(replace(step, peer=0) for step in mine)
    with pytest.raises(ScheduleDeadlockError, match=r"\(\d+ more\) -> rank") as found:
        verify(world(BARRIER, mine, theirs, chunks=(0, 0)))
    assert len(str(found.value)) < 1000


# Overlaps


def overlapping() -> dict[str, tuple[list[Schedule], str]]:
    def alone(*steps: Step) -> list[Schedule]:
        return world(ALL_REDUCE, steps, chunks=(3, 3), scratch=(ins(0, 3), ins(0, 3)))

    whole, first = Copy(outs(0, 3), ins(0, 3)), Copy(tmps(0, 3), ins(0, 3))
    return {
        "write and write": (
            alone(whole, first, Copy(outs(0, 3), tmps(0, 3), (1,))),
            "step 2 writes output chunk 0, which step 0 writes",
        ),
        "write, then read": (
            alone(whole, first, Copy(tmps(3, 3), tmps(0, 3))),
            "step 2 reads scratch chunk 0, which step 1 writes",
        ),
        "read, then write": (
            alone(whole, first, Copy(tmps(3, 3), tmps(0, 3), (1,)), Copy(tmps(0, 3), ins(0, 3), (1,))),
            "step 3 writes scratch chunk 0, which step 2 reads",
        ),
        "the last of three chunks": (
            alone(whole, first, Copy(outs(2), tmps(2), (1,))),
            "step 2 writes output chunk 2, which step 0 writes",
        ),
        "only in place": (
            alone(Copy(outs(0, 3), ins(0, 3)), first, Copy(outs(0, 3), tmps(0, 3), (0, 1)), Copy(tmps(3, 3), ins(0, 3))),
            "step 3 in place reads input chunk 0, which step 2 writes",
        ),
    }


@pytest.mark.parametrize("kind", list(overlapping()))
def test_steps_that_may_run_at_once_do_not_share_memory_that_one_writes(kind: str) -> None:
    schedules, words = overlapping()[kind]
    caught(OverlapError, schedules, words)


def test_a_step_that_writes_a_part_of_what_it_reads_is_found_in_each_kind_of_step() -> None:
    alike = (IN, IN, IN)
    fill = (Copy(tmps(0), IN), Copy(tmps(1), IN), Copy(tmps(2), IN), Copy(OUT, IN))
    for step in (
        Copy(tmps(0, 2), tmps(1, 2), (0, 1, 2)),
        Reduce(tmps(0, 2), tmps(1, 2), tmps(0, 2), (0, 1, 2)),
        Reduce(tmps(1, 2), tmps(1, 2), tmps(0, 2), (0, 1, 2)),
    ):
        caught(OverlapError, world(ALL_REDUCE, (*fill, step), scratch=alike), "step 4 writes memory that it also reads")
    shifted = RecvReduce(1, tmps(0, 2), tmps(1, 2), after=(0, 1, 2))
    other = (Copy(tmps(0), IN), Copy(tmps(1), IN), Send(0, tmps(0, 2), (0, 1)))
    caught(OverlapError, world(REDUCE, (*fill, shifted), other, scratch=alike), "step 4 writes memory that it also reads")


def test_scratch_that_is_used_again_while_its_message_is_still_on_its_way_is_found() -> None:
    zero = (Copy(OUT, IN), Copy(TMP, IN), Send(1, TMP, (1,)), Copy(TMP, OUT, (0, 1)), Send(1, TMP, (3,)))
    one = (Recv(0, OUT), Recv(0, TMP, (0,)))
    caught(
        OverlapError, world(BROADCAST, zero, one, scratch=(IN,)), "rank 0, step 3 writes scratch chunk 0, which step 2 reads"
    )


def test_scratch_that_is_received_into_while_it_is_still_combined_is_found() -> None:
    schedules = [doubling.all_reduce(rank, 8) for rank in range(8)]
    # Two rooms are used in turn; with one alone, or without waiting for the turn, the next message comes too early.
    last = [index for index, step in enumerate(schedules[0].steps) if isinstance(step, Recv)][-1]
    assert schedules[0].steps[last].after
    steps = list(schedules[0].steps)
    steps[last] = replace(steps[last], after=())
    caught(
        OverlapError, [replace(schedules[0], steps=tuple(steps)), *schedules[1:]], f"rank 0, step {last} writes scratch chunk 0"
    )


# The order of operands


def test_one_rank_that_groups_the_same_operands_in_another_way_is_found() -> None:
    def gathered(rank: int, *, other: bool = False) -> list[Step]:
        steps: list[Step] = [Copy(tmps(rank), IN)]
        for peer in range(3):
            if peer != rank:
                steps += [Send(peer, IN), Recv(peer, tmps(peer))]
        first, second = ((1, 2), (0, None)) if other else ((0, 1), (None, 2))
        every = tuple(range(5))
        steps.append(Reduce(tmps(3), tmps(first[0]), tmps(first[1]), every))
        left, right = (tmps(3 if index is None else index) for index in (second if other else (None, 2)))
        return [*steps, Reduce(OUT, left, right, (*every, 5))]

    alike = (IN, IN, IN, IN)
    report = verify(world(ALL_REDUCE, *(gathered(rank) for rank in range(3)), scratch=alike))
    assert (report.ordered, report.canonical) == (True, True)
    mixed = [gathered(0), gathered(1), gathered(2, other=True)]
    caught(
        OrderError,
        world(ALL_REDUCE, *mixed, scratch=alike),
        r"rank 2, output chunk 0 .* is \(r0 op \(r1 op r2\)\), and on rank 0 it is \(\(r0 op r1\) op r2\)",
    )
    grouped = world(ALL_REDUCE, *(gathered(rank, other=True) for rank in range(3)), scratch=alike)
    assert verify(grouped, ordered=True).canonical is False
    caught(OrderError, grouped, r"expected \(\(r0 op r1\) op r2\), as in every reproducible reduction", canonical=True)


@pytest.mark.parametrize("collective", [REDUCE, REDUCE_SCATTER])
def test_operands_in_another_order_than_that_of_ranks_are_found_where_it_is_claimed(collective: Collective) -> None:
    if collective is REDUCE:
        schedules = world(REDUCE, (RecvReduce(1, OUT, IN, incoming_first=True),), (Send(0, IN),))
    else:
        zero = (Send(1, ins(1)), RecvReduce(1, OUT, ins(0), incoming_first=True))
        one = (Send(0, ins(0)), RecvReduce(0, OUT, ins(1), incoming_first=True))
        schedules = world(REDUCE_SCATTER, zero, one, chunks=(2, 1))
    assert not verify(schedules).ordered
    caught(
        OrderError, schedules, r"rank 0, output chunk 0 .* is \(r1 op r0\), and the order of ranks is expected", ordered=True
    )
    caught(OrderError, schedules, "reproducible", canonical=True)


def test_the_reproducible_expression_is_that_of_each_block_where_blocks_are_even() -> None:
    zero = (Send(1, ins(1)), RecvReduce(1, OUT, ins(0)))
    one = (Send(0, ins(0)), RecvReduce(0, OUT, ins(1), incoming_first=True))
    report = verify(world(REDUCE_SCATTER, zero, one, chunks=(2, 1), even=True), ordered=True, canonical=True)
    assert (report.ordered, report.canonical) == (True, True)


def test_the_reproducible_expression_is_one_for_each_world() -> None:
    terms = Terms()
    assert [str(terms.canonical(size)) for size in (1, 2, 3, 4)] == [
        "r0",
        "(r0 op r1)",
        "((r0 op r1) op r2)",
        "((r0 op r1) op (r2 op r3))",
    ]
    assert str(terms.canonical(6)) == "(((r0 op r1) op (r2 op r3)) op (r4 op r5))"
    for size in range(1, 40):
        whole = terms.canonical(size)
        assert whole is terms.canonical(size)
        assert (whole.first, whole.last, whole.in_order, whole.once) == (0, size - 1, True, True)
        assert whole.ranks == (1 << size) - 1
    assert terms.canonical(3, (0, 1)) is not terms.canonical(3)
    assert terms.canonical(3, (0, 1)).piece == (0, 1)


def test_a_deep_expression_is_shown_as_far_as_it_tells_something() -> None:
    terms = Terms()
    chain = terms.leaf(0)
    for rank in range(1, 8):
        chain = terms.combine(chain, terms.leaf(rank))
    assert str(chain) == "((((((...) op r3) op r4) op r5) op r6) op r7)"


def test_an_order_is_reported_once_for_what_it_is() -> None:
    schedules = [doubling.all_reduce(rank, 6) for rank in range(6)]
    report = verify(schedules, ordered=True, canonical=True)
    assert (report.ordered, report.canonical) == (True, True)
    ordered_only = [tree.reduce(rank, 7) for rank in range(7)]
    assert verify(ordered_only, ordered=True).ordered
    moved = verify([ring.all_gather(rank, 3) for rank in range(3)], ordered=True, canonical=True)
    assert (moved.ordered, moved.canonical) == (True, True)


# What depends on being in place


def test_a_value_that_is_right_only_when_nobody_calls_in_place_is_found() -> None:
    # The output is written first, and then the input read.
    zero = (Recv(1, OUT), RecvReduce(2, OUT, OUT, after=(0,)), Reduce(OUT, IN, OUT, (1,)))
    caught(
        WrongResultError,
        world(REDUCE, zero, (Send(0, IN),), (Send(0, IN),)),
        r"output chunk 0 in place .*of rank 0 0 times, of rank 1 2 times, of rank 2 2 times",
    )


def test_what_the_verifier_says_about_place_holds_where_only_some_ranks_call_in_place() -> None:
    # Rank 0 sends what it finds in its input after its output was written with what rank 1 sent; the root then has rank 1 twice.
    zero = (Recv(1, OUT), Send(1, OUT, (0,)), Recv(1, OUT, (1,)))
    one = (Send(0, IN), Recv(0, TMP), RecvReduce(2, OUT, IN), Reduce(OUT, OUT, TMP, (1, 2)), Send(0, OUT, (3,)))
    two = (Send(1, IN),)
    caught(WrongResultError, world(ALL_REDUCE, zero, one, two, scratch=(IN,)), "of rank 0 0 times")


# Undefined memory and sizes


def test_scratch_of_the_call_before_is_not_read() -> None:
    caught(UndefinedReadError, world(ALL_REDUCE, (Copy(OUT, TMP),), scratch=(IN,)), "rank 0, step 0 reads scratch chunk 0")


def test_a_chunk_that_is_read_one_too_far_is_undefined() -> None:
    steps = (Copy(tmps(0), ins(0)), Copy(outs(0, 2), tmps(0, 2), (0,)))
    caught(UndefinedReadError, world(ALL_REDUCE, steps, chunks=(2, 2), scratch=(ins(0, 2),)), "step 1 reads scratch chunk 1")


@pytest.mark.parametrize(
    ("sent", "taken"),
    [(ins(0), outs(1)), (ins(0, 2), outs(0)), (ins(0), outs(0, 2)), (None, outs(0)), (ins(0), None), (ins(0, 2), outs(1, 2))],
    ids=str,
)
def test_a_message_of_another_size_than_its_receive_is_found(sent: Ref | None, taken: Ref | None) -> None:
    root = (Copy(outs(0, 3), ins(0, 3)), Send(1, sent))
    caught(UnmatchedMessageError, world(BROADCAST, root, (Recv(0, taken),), chunks=(3, 3)), "rank 0, step 1 sends")


def test_operands_of_other_sizes_are_found() -> None:
    for step in (Reduce(outs(0), ins(1), ins(0)), Reduce(outs(0), ins(0), ins(1)), Copy(outs(0), ins(1))):
        caught(MalformedScheduleError, world(ALL_REDUCE, (step,), chunks=(2, 2)), "differ in size")
    zero, one = (RecvReduce(1, outs(0), ins(1)),), (Send(0, ins(0)),)
    caught(
        MalformedScheduleError,
        world(ALL_REDUCE, zero, one, chunks=(2, 2)),
        "input chunk 1 and output chunk 0 differ in size",
    )


def test_of_many_sizes_that_differ_a_few_are_told() -> None:
    root = (Copy(outs(0, 9), ins(0, 9)), Send(1, ins(0, 4)), Send(1, ins(4, 5)))
    leaf = (Recv(0, outs(0, 5)), Recv(0, outs(5, 4)))
    words = r"pieces \[\(0,\), \(1,\), \(2,\), \(3,\)\] and \[\(0,\), \(1,\), \(2,\), \(3,\), \.\.\.\]$"
    caught(UnmatchedMessageError, world(BROADCAST, root, leaf, chunks=(9, 9)), words)


# Even blocks


def relayed(*, swapped: bool = False, stale: bool = False, even: bool = True) -> list[Schedule]:
    """Return an all_to_all of three ranks in which every block for the left neighbour goes round by the right one."""

    def one(rank: int) -> tuple[Step, ...]:
        right, left = (rank + 1) % 3, (rank - 1) % 3
        first, second = (left, right) if not swapped else (right, left)
        return (
            Copy(outs(rank), ins(rank)),
            Send(right, ins(first)),
            Send(right, ins(second)),
            Recv(left, tmps(0)),
            Recv(left, outs(left)),
            Send(right, tmps(0) if not stale else ins(left), (3,)),
            Recv(left, outs(right)),
        )

    return world(ALL_TO_ALL, one(0), one(1), one(2), chunks=(3, 3), scratch=(ins(0),), even=even)


def test_a_relay_is_right_where_blocks_are_even_and_nowhere_else() -> None:
    report = verify(relayed())
    assert (report.messages, report.chunks) == ((3, 3, 3), (3, 3, 3))
    with pytest.raises(UnmatchedMessageError, match="the sizes are those of pieces"):
        verify(relayed(even=False))


def test_a_relay_that_mixes_up_its_blocks_is_found() -> None:
    caught(
        WrongResultError,
        relayed(swapped=True),
        r"rank 0, output chunk 1 .*holds piece \(1, 2, 0\); expected piece \(1, 0, 0\)|of rank",
    )
    caught(WrongResultError, relayed(stale=True), r"rank 0, output chunk 1 .*of rank 1 0 times, of rank 2 1 times")


def test_a_block_for_another_rank_is_the_wrong_block_although_it_comes_from_the_right_one() -> None:
    zero = (Copy(outs(0), ins(0)), Send(1, ins(0)), Recv(1, outs(1)))
    one = (Copy(outs(1), ins(1)), Send(0, ins(0)), Recv(0, outs(0)))
    schedules = world(ALL_TO_ALL, zero, one, chunks=(2, 2), even=True)
    caught(
        WrongResultError,
        schedules,
        r"rank 1, output chunk 0 .*step 2.* holds piece \(0, 0, 0\); expected piece \(0, 1, 0\)",
    )


def test_blocks_of_different_ranks_that_are_combined_are_found() -> None:
    zero = (Send(1, ins(0)), RecvReduce(1, OUT, ins(0)))
    one = (Send(0, ins(0)), RecvReduce(0, OUT, ins(1), incoming_first=True))
    schedules = world(REDUCE_SCATTER, zero, one, chunks=(2, 1), even=True)
    caught(
        WrongResultError,
        schedules,
        r"rank 1, output chunk 0 .*holds values of different pieces, combined; expected piece \(1, 0\)",
    )
    caught(UnmatchedMessageError, [replace(one, even=False) for one in schedules], "rank 0, step 0 sends input chunk 0")


def test_segments_stay_of_different_sizes_although_blocks_are_even() -> None:
    steps = (Copy(outs(0), ins(1)), Copy(outs(1), ins(0)))
    caught(MalformedScheduleError, world(ALL_GATHER, steps, chunks=(2, 2), even=True), "differ in size")


# Barriers


def test_a_token_that_goes_round_once_lets_somebody_pass_early() -> None:
    zero = (Send(1, None), Recv(2, None))
    one = (Recv(0, None), Send(2, None, (0,)))
    two = (Recv(1, None), Send(0, None, (0,)))
    caught(WrongResultError, world(BARRIER, zero, one, two, chunks=(0, 0)), "before every rank has entered")
    # It goes round a second time to say that all have come.
    more = [
        (*zero, Send(1, None, (1,))),
        (*one, Recv(0, None), Send(2, None, (2,))),
        (*two, Recv(1, None)),
    ]
    assert verify(world(BARRIER, *more, chunks=(0, 0))).synchronising


def test_a_barrier_must_not_rely_on_its_sends_waiting() -> None:
    caught(WrongResultError, world(BARRIER, (Send(1, None),), (Recv(0, None),), chunks=(0, 0)), "before every rank has entered")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_dissemination_without_one_of_its_rounds_lets_somebody_pass_early(size: int) -> None:
    schedules = [doubling.barrier(rank, size) for rank in range(size)]
    assert verify(schedules).steps >= 0
    short = [replace(one, steps=one.steps[:-2]) for one in schedules]
    caught(WrongResultError, short, "before every rank has entered")


def test_a_barrier_of_one_rank_needs_nothing() -> None:
    report = verify(world(BARRIER, (), chunks=(0, 0)))
    assert (report.steps, report.messages, report.chunks, report.synchronising) == (0, (0,), (0,), True)


# Memory and reductions that are not there


@pytest.mark.parametrize(
    ("collective", "chunks", "root", "other"),
    [
        (REDUCE, (1, 1), (RecvReduce(1, OUT, IN),), (Send(0, IN), Copy(OUT, IN))),
        (GATHER, (1, 2), (Copy(OUT, IN), Recv(1, outs(1))), (Send(0, IN), Copy(outs(1), IN))),
    ],
)
def test_a_rank_that_holds_no_output_must_not_write_it(
    collective: Collective, chunks: tuple[int, int], root: Sequence[Step], other: Sequence[Step]
) -> None:
    assert verify(world(collective, root, other[:1], chunks=chunks)).steps >= 0
    caught(MalformedScheduleError, world(collective, root, other, chunks=chunks), "rank 1, step 1: .*holds no output")
    into = (*other[:1], Recv(0, other[1].target))  # type: ignore[union-attr]
    more = (*root, Send(1, IN))
    caught(MalformedScheduleError, world(collective, more, into, chunks=chunks), "rank 1, step 1: .*holds no output")


def test_a_rank_that_is_not_the_root_has_nothing_to_give() -> None:
    steps = ((Recv(1, OUT),), (Send(0, IN), Copy(OUT, IN)))
    caught(
        MalformedScheduleError, world(BROADCAST, *steps), "rank 1, step 0: it names input chunk 0, but this rank holds no input"
    )
    assert verify(world(BROADCAST, *steps, root=1)).steps >= 0


def test_a_broadcast_from_another_root_than_it_says_is_found() -> None:
    schedules = [tree.broadcast(rank, 4, 1) for rank in range(4)]
    caught(MalformedScheduleError, [replace(one, root=2) for one in schedules], "holds no input")
    reduces = [tree.reduce(rank, 4, 1) for rank in range(4)]
    caught(MalformedScheduleError, [replace(one, root=2) for one in reduces], "holds no output")


@pytest.mark.parametrize("root", [-1, 2, 5])
def test_a_root_that_is_no_rank_is_found(root: int) -> None:
    steps = ((Copy(OUT, IN), Send(1, IN)), (Recv(0, OUT),))
    caught(MalformedScheduleError, world(BROADCAST, *steps, root=root), f"the root is {root}, but the ranks are 0 to 1")


@pytest.mark.parametrize("collective", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER])
def test_a_root_where_there_is_none_is_found(collective: Collective) -> None:
    chunks = {ALL_REDUCE: (1, 1), ALL_GATHER: (1, 2), REDUCE_SCATTER: (2, 1), ALL_TO_ALL: (2, 2), BARRIER: (0, 0)}[collective]
    caught(
        MalformedScheduleError,
        world(collective, (), (), chunks=chunks, root=1),
        f"expected 0, because {collective.value} has no root",
    )


@pytest.mark.parametrize("step", [Reduce(TMP, IN, IN, (0,)), RecvReduce(1, TMP, IN)], ids=["Reduce", "RecvReduce"])
def test_a_collective_without_a_reduction_has_nothing_to_reduce_with(step: Step) -> None:
    root = (Copy(OUT, IN), Send(1, IN), step)
    leaf = (Recv(0, OUT), *((Send(0, OUT, (0,)),) if isinstance(step, RecvReduce) else ()))
    caught(
        MalformedScheduleError,
        world(BROADCAST, root, leaf, scratch=(IN,)),
        "rank 0, step 2: it reduces, but broadcast has no reduction",
    )


def test_an_input_is_not_written_by_any_kind_of_step() -> None:
    peer = (Send(0, IN), Copy(OUT, IN))
    for step in (Recv(1, IN), RecvReduce(1, IN, IN), Copy(IN, OUT), Reduce(IN, IN, IN)):
        caught(MalformedScheduleError, world(ALL_REDUCE, (step,), peer), "rank 0, step 0: it writes input chunk 0")


def test_a_message_that_nobody_needs_is_no_fault_and_is_counted() -> None:
    root = (Copy(OUT, IN), Send(1, IN), Send(1, IN))
    report = verify(world(BROADCAST, root, (Recv(0, OUT), Recv(0, TMP)), scratch=(IN,)))
    assert (report.messages, report.chunks, report.steps) == ((2, 0), (2, 0), 2)
    caught(UnmatchedMessageError, world(BROADCAST, root, (Recv(0, OUT),)), "2 sends to rank 1, and rank 1 has 1 receives")


def test_a_step_that_is_named_twice_in_after_is_found() -> None:
    caught(MalformedScheduleError, world(ALL_REDUCE, (Copy(OUT, IN), Copy(OUT, IN, (0, 0)))), r"twice in after: \[0, 0\]")
