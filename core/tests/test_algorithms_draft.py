"""A schedule in the making: steps wait for exactly what they must, and parts overlap."""

from __future__ import annotations

import pytest

from oneaccord.schedule.algorithms import ring, tree
from oneaccord.schedule.algorithms.draft import Draft
from oneaccord.schedule.proof.verify import OverlapError, verify
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, Reduce, Ref, Schedule, Send

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def after(draft: Draft) -> list[tuple[int, ...]]:
    return [step.after for step in draft.steps]


def before(schedule: Schedule, index: int) -> set[int]:
    """Return all steps that come before a step."""
    found: set[int] = set()
    for earlier in schedule.steps[index].after:
        found |= {earlier} | before(schedule, earlier)
    return found


def test_a_step_follows_the_writer_of_what_it_reads_and_the_readers_of_what_it_writes() -> None:
    draft = Draft(Collective.ALL_REDUCE, "mine", 0, 3, segments=4)
    room = draft.reserve(draft.whole(INPUT))
    for step in (
        Recv(1, room),
        Send(2, Ref(SCRATCH, 0, 2)),
        Send(2, Ref(SCRATCH, 1, 3)),
        Copy(Ref(SCRATCH, 0), Ref(INPUT, 0)),
        Reduce(Ref(OUTPUT, 1, 2), Ref(INPUT, 1, 2), Ref(SCRATCH, 1, 2)),
        Recv(1, Ref(SCRATCH, 1)),
        Send(2, Ref(SCRATCH, 3)),
        Recv(1, room),
    ):
        draft.follow(step)
    assert after(draft) == [(), (0,), (0,), (1,), (0,), (1, 2, 4), (0,), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize(
    ("collective", "read", "written"),
    [
        (Collective.ALL_REDUCE, Ref(INPUT, 3), Ref(OUTPUT, 3)),
        (Collective.ALL_GATHER, Ref(INPUT, 1), Ref(OUTPUT, 5)),
        (Collective.REDUCE_SCATTER, Ref(INPUT, 5), Ref(OUTPUT, 1)),
    ],
)
def test_memory_that_two_buffers_share_in_place_is_one(collective: Collective, read: Ref, written: Ref) -> None:
    draft = Draft(collective, "mine", 2, 4, segments=2)
    if collective is Collective.ALL_REDUCE:
        draft.segments = 4
    draft.follow(Send(1, read))
    draft.follow(Recv(1, written))
    draft.follow(Recv(1, Ref(OUTPUT, 0)))
    assert after(draft) == [(), (0,), ()]


def test_the_blocks_of_an_all_to_all_share_nothing() -> None:
    draft = Draft(Collective.ALL_TO_ALL, "mine", 0, 3)
    draft.follow(Send(1, Ref(INPUT, 1)))
    draft.follow(Recv(1, Ref(OUTPUT, 1)))
    assert after(draft) == [(), ()]


def test_scratch_can_be_as_large_as_scratch() -> None:
    draft = Draft(Collective.ALL_GATHER, "mine", 1, 4)
    draft.reserve(Ref(OUTPUT, 2, 2), Ref(OUTPUT, 0, 2))
    assert draft.reserve(Ref(SCRATCH, 1, 2)) == Ref(SCRATCH, 4, 2)
    assert draft.finish().scratch_chunks[4:] == (Ref(OUTPUT, 3), Ref(OUTPUT, 0))


def piped(rank: int, size: int, segments: int) -> Schedule:
    """Return an all_reduce of two chains: a vector goes up a tree to rank 0 and down a chain."""
    draft = Draft(Collective.ALL_REDUCE, "piped", rank, size, segments=segments)
    vector = draft.whole(OUTPUT)
    upwards, downwards = tree.reduce(rank, size, 0, segments), tree.chain(rank, size, 0, segments)
    draft.include(upwards, lambda peer: peer, input=draft.whole(INPUT), output=vector, scratch=vector)
    draft.include(downwards, lambda peer: peer, input=vector, output=vector)
    return draft.finish()


def test_parts_overlap_segment_by_segment() -> None:
    schedules = [piped(rank, 5, 3) for rank in range(5)]
    report = verify(schedules, canonical=True)
    # A part that waited for the one before as a whole would take the steps of both.
    assert report.steps == (3 + 3 - 1) + (5 - 1)
    root = schedules[0]
    sends = [index for index, step in enumerate(root.steps) if isinstance(step, Send)]
    for segment, index in enumerate(sends):
        touched = {root.steps[earlier].target for earlier in before(root, index)}  # type: ignore[union-attr]
        assert touched == {Ref(OUTPUT, segment)}


def test_a_copy_onto_itself_is_left_out_and_what_came_after_it_comes_after_what_was_before() -> None:
    draft = Draft(Collective.ALL_REDUCE, "mine", 0, 2, segments=2)
    received = draft.add(Recv(1, Ref(OUTPUT, 0)))
    own = Ref(OUTPUT, 0)
    draft.include(ring.all_gather(0, 2), lambda peer: peer, input=own, output=draft.whole(OUTPUT))
    assert draft.steps[received + 1 :] == [Send(1, own, (received,)), Recv(1, Ref(OUTPUT, 1))]
    part = Schedule(
        Collective.BROADCAST,
        "part",
        0,
        2,
        0,
        1,
        1,
        (),
        (Recv(1, Ref(OUTPUT, 0)), Copy(Ref(OUTPUT, 0), Ref(INPUT, 0), (0,)), Send(1, None, (1,))),
    )
    draft = Draft(Collective.BROADCAST, "mine", 0, 2)
    draft.include(part, lambda peer: peer, input=draft.whole(OUTPUT), output=draft.whole(OUTPUT))
    assert draft.steps == [Recv(1, Ref(OUTPUT, 0)), Send(1, None, (0,))]


def test_a_part_is_moved_to_other_ranks_and_larger_chunks() -> None:
    draft = Draft(Collective.ALL_REDUCE, "mine", 5, 8, segments=8)
    place = Ref(OUTPUT, 2, 6)
    draft.include(tree.broadcast(1, 3, 0, 2), lambda peer: 4 + peer, input=place, output=place)
    assert draft.steps == [Recv(4, Ref(OUTPUT, 2, 3)), Recv(4, Ref(OUTPUT, 5, 3))] + [
        Send(6, Ref(OUTPUT, 2, 3), (0,)),
        Send(6, Ref(OUTPUT, 5, 3), (1,)),
    ] * bool([child.leader for child in tree.binomial_place(1, 3, 0).children])


def test_scratch_memory_of_a_part_is_as_large_as_its_chunks_are_here() -> None:
    draft = Draft(Collective.ALL_REDUCE, "mine", 2, 4, segments=6)
    draft.reserve(Ref(INPUT, 0))
    draft.include(tree.reduce(2, 4, 0, 3), lambda peer: peer, input=draft.whole(INPUT))
    assert draft.scratch == [Ref(INPUT, 0), Ref(INPUT, 0, 6)]
    assert [step.target for step in draft.steps if not isinstance(step, Send)] == [Ref(SCRATCH, 1 + 2 * k, 2) for k in range(3)]


def test_in_turn_a_rank_receives_nothing_of_a_part_before_all_of_the_part_before() -> None:
    made = []
    for in_turn in (False, True):
        draft = Draft(Collective.BROADCAST, "mine", 1, 4, 0, 4)
        own = Ref(OUTPUT, 1)
        draft.include(tree.scatter(1, 4), lambda peer: peer, input=draft.whole(INPUT), output=own)
        draft.include(ring.all_gather(1, 4), lambda peer: peer, input=own, output=draft.whole(OUTPUT), in_turn=in_turn)
        made.append([step.after for step in draft.steps if isinstance(step, Recv)])
    assert made == [[(), (), (), ()], [(), (0,), (0,), (0,)]]


def test_a_part_that_did_not_wait_would_be_found() -> None:
    schedules = [piped(rank, 3, 1) for rank in range(3)]
    root = schedules[0]
    assert root.steps[-1].after
    freed = tuple(Send(step.peer, step.source) if isinstance(step, Send) else step for step in root.steps)
    schedules[0] = Schedule(
        root.collective, root.algorithm, 0, 3, 0, root.input_chunks, root.output_chunks, root.scratch, freed
    )
    with pytest.raises(OverlapError):
        verify(schedules)
