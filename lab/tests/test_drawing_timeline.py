"""When messages go and what they carry, where each takes one unit of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.schedule.algorithms import doubling, pairwise, ring, tree
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES, Contract
from oneaccord.schedule.errors import WrongResultError
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, Ref, Schedule, Send, Step
from oneaccord_lab.drawing.labels import many, name_of
from oneaccord_lab.drawing.timeline import Local, Message, Timeline, Value, timeline_of


def drawn(build: object, size: int, root: int = 0, segments: int = 1) -> Timeline:
    assert callable(build)
    return timeline_of([build(rank, size, root, segments) for rank in range(size)])


def test_two_ranks_of_a_ring_exchange_and_then_exchange_results() -> None:
    timeline = drawn(ring.all_reduce, 2)

    a, b, both_a, both_b = Value((0,), 0b01), Value((1,), 0b10), Value((0,), 0b11), Value((1,), 0b11)
    assert timeline.messages == (
        Message(0, 0, 1, (a,), reduces=True),
        Message(0, 1, 0, (b,), reduces=True),
        Message(1, 0, 1, (both_b,), reduces=False),
        Message(1, 1, 0, (both_a,), reduces=False),
    )
    assert (timeline.slots, timeline.locals) == (2, ())
    assert timeline.before == ((Value((0,), 1), Value((1,), 1)), (Value((0,), 2), Value((1,), 2)))
    assert timeline.after == ((both_a, both_b), (both_a, both_b))


def test_a_message_that_is_reduced_from_scratch_at_once_counts_as_reduced() -> None:
    timeline = drawn(doubling.all_reduce, 4)

    assert timeline.slots == 2
    assert all(message.reduces for message in timeline.messages)
    assert timeline.locals == ()
    assert [message.values[0].ranks for message in timeline.messages] == [1, 2, 4, 8, 3, 3, 12, 12]


def test_a_rank_sends_one_message_at_a_time_in_the_order_of_its_steps() -> None:
    timeline = drawn(tree.broadcast, 8)

    assert [(message.start, message.receiver) for message in timeline.messages if message.sender == 0] == [
        (0, 4),
        (1, 2),
        (2, 1),
    ]
    assert timeline.locals == (Local(0, 0, (Value((0,), 1),), reduces=False),)
    assert timeline.slots == 3


def test_rounds_that_an_algorithm_has_under_way_at_once_follow_each_other() -> None:
    timeline = drawn(pairwise.all_to_all, 5)

    assert timeline.report.steps == 1
    assert timeline.slots == 4
    assert [(m.receiver - m.sender) % 5 for m in timeline.messages] == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5


def test_segments_of_a_chain_overlap() -> None:
    timeline = drawn(tree.chain, 3, segments=2)

    assert [(m.start, m.sender, m.values[0].piece) for m in timeline.messages] == [
        (0, 0, (0,)),
        (1, 0, (1,)),
        (1, 1, (0,)),
        (2, 1, (1,)),
    ]


def test_messages_between_two_ranks_keep_the_order_of_the_lists_even_if_a_later_one_is_ready_first() -> None:
    def chunk(number: int) -> Ref:
        return Ref(Buffer.OUTPUT, number)

    def input_chunk(number: int) -> Ref:
        return Ref(Buffer.INPUT, number)

    steps: list[tuple[Step, ...]] = [
        (Recv(2, chunk(0)), Recv(2, chunk(1)), Send(1, chunk(1), (1,)), Send(1, chunk(0), (0,))),
        (Recv(0, chunk(1)), Recv(0, chunk(0))),
        (Copy(Ref(Buffer.OUTPUT, 0, 2), Ref(Buffer.INPUT, 0, 2)), Send(0, input_chunk(0)), Send(0, input_chunk(1))),
    ]
    timeline = timeline_of(
        [Schedule(Collective.BROADCAST, "odd", rank, 3, 2, 2, 2, (), steps[rank]) for rank in range(3)],
    )

    assert [(m.start, m.sender, m.values[0].piece) for m in timeline.messages] == [
        (0, 2, (0,)),
        (1, 2, (1,)),
        (2, 0, (1,)),
        (3, 0, (0,)),
    ]


def test_a_schedule_that_is_wrong_is_not_drawn() -> None:
    wrong = [Schedule(Collective.ALL_REDUCE, "nothing", rank, 2, 0, 1, 1, (), ()) for rank in range(2)]
    with pytest.raises(WrongResultError):
        timeline_of(wrong)


def schedules_of(algorithm: Algorithm, size: int, root: int, segments: int) -> list[Schedule]:
    return [algorithm.schedule(rank, size, root, segments, size) for rank in range(size)]


@given(st.sampled_from(BUILTIN), st.integers(1, 9), st.data())
def test_every_algorithm_keeps_to_one_message_at_a_time_and_ends_with_what_it_promises(
    algorithm: Algorithm, size: int, data: st.DataObject
) -> None:
    promise = PROMISES[algorithm.collective]
    rooted = promise.input_on_root or promise.output_on_root
    root = data.draw(st.integers(0, size - 1)) if rooted else 0
    schedules = schedules_of(algorithm, size, root, data.draw(st.integers(1, 3)))
    timeline = timeline_of(schedules)

    sending = [(message.start, message.sender) for message in timeline.messages]
    receiving = [(message.start, message.receiver) for message in timeline.messages]
    assert len(set(sending)) == len(sending) == len(set(receiving)) == sum(timeline.report.messages)
    assert timeline.slots >= timeline.report.steps
    for rank, values in enumerate(timeline.after):
        assert len(values) == (timeline.contract.output_chunks if timeline.contract.holds_output(rank) else 0)
        expected = timeline.contract.output_pieces(rank)
        assert [value.piece for value in values] == list(expected[: len(values)])
        assert [value.contributions for value in values] == [
            timeline.complete if promise.behind is None else rank + 1 - promise.behind for _ in values
        ]
    assert timeline_of(schedules) == timeline
    # What is written, in the order of time, leaves the same.
    assert [write.time for write in timeline.writes] == sorted(write.time for write in timeline.writes)
    left = {(each.rank, each.chunk): each.value for each in timeline.writes if each.buffer is Buffer.OUTPUT}
    assert left == {(rank, chunk): value for rank, values in enumerate(timeline.after) for chunk, value in enumerate(values)}


@given(st.sampled_from(BUILTIN), st.integers(2, 16), st.sampled_from([1, 2, 3, 4]))
def test_the_columns_of_a_picture_are_as_many_as_the_formula_has_steps(algorithm: Algorithm, size: int, per_host: int) -> None:
    """Up to 16 ranks. From 17 on, that each message goes as early as it can makes one picture longer: the broadcast in one host."""
    hosts = per_host if size % per_host == 0 else size
    timeline = timeline_of([algorithm.schedule(rank, size, 0, 1, hosts) for rank in range(size)])
    assert algorithm.cost is not None
    assert timeline.slots == algorithm.cost(size, 1.0, 1, hosts).steps


def values(*pieces: tuple[int, ...]) -> list[Value]:
    return [Value(piece, 1) for piece in pieces]


@pytest.mark.parametrize(
    ("collective", "segments", "pieces", "text"),
    [
        (Collective.BROADCAST, 30, [(0,)], "a"),
        (Collective.BROADCAST, 30, [(25,), (26,), (27,)], "z–ab"),
        (Collective.BROADCAST, 30, [(0,), (2,), (3,)], "a,c–d"),
        (Collective.BROADCAST, 30, [(0,), (2,), (4,)], "a,…"),
        (Collective.ALL_GATHER, 1, [(3, 0), (0, 0), (1, 0)], "3,0–1"),
        (Collective.ALL_GATHER, 2, [(1, 0), (1, 1), (2, 0), (2, 1)], "1–2"),
        (Collective.ALL_GATHER, 2, [(1, 1)], "1b"),
        (Collective.ALL_GATHER, 2, [(1, 1), (2, 0)], "1b–2a"),
        (Collective.ALL_TO_ALL, 1, [(0, 1, 0), (0, 2, 0)], "0→1–2"),
        (Collective.ALL_TO_ALL, 1, [(0, 3, 0), (1, 3, 0)], "0–1→3"),
        (Collective.ALL_TO_ALL, 1, [(0, 3, 0), (1, 2, 0)], "0→3,1→2"),
        (Collective.ALL_TO_ALL, 2, [(0, 3, 1)], "0→3b"),
    ],
)
def test_chunks_have_short_names(collective: Collective, segments: int, pieces: list[tuple[int, ...]], text: str) -> None:
    contract = Contract(collective, 4, 0, segments)
    assert many(values(*pieces), contract) == text
    if len(pieces) == 1:
        assert name_of(pieces[0], contract) == text
