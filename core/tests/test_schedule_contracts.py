"""What each collective promises, chunk by chunk."""

from __future__ import annotations

import pytest

from oneaccord.schedule.contracts import PROMISES, Contract, Piece
from oneaccord.schedule.errors import MalformedScheduleError
from oneaccord.schedule.steps import Collective, Schedule


def contract(collective: Collective) -> Contract:
    return Contract(collective, size=3, root=1, segments=0 if collective is Collective.BARRIER else 2)


def test_every_collective_has_a_promise() -> None:
    assert set(PROMISES) == set(Collective)


@pytest.mark.parametrize(
    ("collective", "chunks"),
    [
        (Collective.ALL_REDUCE, (2, 2)),
        (Collective.REDUCE, (2, 2)),
        (Collective.BROADCAST, (2, 2)),
        (Collective.SCAN, (2, 2)),
        (Collective.EXSCAN, (2, 2)),
        (Collective.ALL_GATHER, (2, 6)),
        (Collective.GATHER, (2, 6)),
        (Collective.SCATTER, (6, 2)),
        (Collective.REDUCE_SCATTER, (6, 2)),
        (Collective.ALL_TO_ALL, (6, 6)),
        (Collective.BARRIER, (0, 0)),
    ],
)
def test_buffers_have_as_many_chunks_as_segments_or_as_many_for_each_rank(
    collective: Collective, chunks: tuple[int, int]
) -> None:
    one = contract(collective)
    assert (one.input_chunks, one.output_chunks) == chunks
    assert (len(one.input_pieces(2)), len(one.output_pieces(2))) == chunks


@pytest.mark.parametrize(
    ("collective", "on_root", "elsewhere"),
    [
        (Collective.ALL_REDUCE, (True, True), (True, True)),
        (Collective.REDUCE, (True, True), (True, False)),
        (Collective.BROADCAST, (True, True), (False, True)),
        (Collective.GATHER, (True, True), (True, False)),
        (Collective.SCATTER, (True, True), (False, True)),
        (Collective.BARRIER, (False, False), (False, False)),
    ],
)
def test_some_buffers_exist_on_the_root_alone(
    collective: Collective, on_root: tuple[bool, bool], elsewhere: tuple[bool, bool]
) -> None:
    one = contract(collective)
    assert (one.holds_input(1), one.holds_output(1)) == on_root
    assert (one.holds_input(2), one.holds_output(2)) == elsewhere


@pytest.mark.parametrize(
    ("collective", "root", "other"),
    [
        (Collective.ALL_REDUCE, {0: 0, 1: 1}, {0: 0, 1: 1}),
        (Collective.REDUCE, {0: 0, 1: 1}, {}),
        (Collective.BROADCAST, {0: 0, 1: 1}, {}),
        (Collective.ALL_GATHER, {0: 2, 1: 3}, {0: 4, 1: 5}),
        (Collective.GATHER, {0: 2, 1: 3}, {}),
        (Collective.SCATTER, {2: 0, 3: 1}, {}),
        (Collective.REDUCE_SCATTER, {2: 0, 3: 1}, {4: 0, 5: 1}),
        (Collective.ALL_TO_ALL, {}, {}),
        (Collective.BARRIER, {}, {}),
    ],
)
def test_in_place_the_same_chunks_are_the_same_memory(
    collective: Collective, root: dict[int, int], other: dict[int, int]
) -> None:
    one = contract(collective)
    assert one.aliases(1) == root
    assert one.aliases(2) == other
    for rank in range(3):
        for source, target in one.aliases(rank).items():
            assert one.input_pieces(rank)[source] == one.output_pieces(rank)[target]


def test_an_output_chunk_holds_every_rank_or_the_one_it_comes_from() -> None:
    def of(collective: Collective, rank: int, chunk: int) -> list[int]:
        one = contract(collective)
        return list(one.contributors(one.output_pieces(rank)[chunk], rank))

    assert of(Collective.REDUCE_SCATTER, 2, 0) == [0, 1, 2]
    assert of(Collective.BROADCAST, 2, 0) == [1]
    assert of(Collective.SCATTER, 2, 0) == [1]
    assert of(Collective.ALL_GATHER, 0, 5) == [2]
    assert of(Collective.ALL_TO_ALL, 0, 5) == [2]
    assert [of(Collective.SCAN, rank, 0) for rank in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert [of(Collective.EXSCAN, rank, 0) for rank in range(3)] == [[], [0], [0, 1]]


def test_what_a_rank_sends_in_all_to_all_is_what_another_one_gets() -> None:
    one = contract(Collective.ALL_TO_ALL)
    assert one.input_pieces(0)[4] == one.output_pieces(2)[0] == (0, 2, 0)


def test_rank_0_gets_nothing_of_an_exscan() -> None:
    one = contract(Collective.EXSCAN)
    assert [one.holds_output(rank) for rank in range(3)] == [False, True, True]
    assert one.aliases(0) == {}
    assert all(contract(Collective.SCAN).holds_output(rank) for rank in range(3))


@pytest.mark.parametrize("collective", [one for one in Collective if one is not Collective.BARRIER])
def test_blocks_of_all_ranks_are_of_one_size_where_a_schedule_asks_for_that_and_segments_are_not(
    collective: Collective,
) -> None:
    uneven = contract(collective)
    even = Contract(collective, size=3, root=1, segments=2, even=True)
    pieces = (*even.input_pieces(0), *even.output_pieces(2))
    assert {even.extent(piece) for piece in pieces} == {(0,), (1,)}
    assert {uneven.extent(piece) for piece in pieces} == set(pieces)
    for rank in range(3):
        assert [even.extent(piece)[0] for piece in even.input_pieces(rank)] == [chunk % 2 for chunk in range(even.input_chunks)]


@pytest.mark.parametrize("even", [False, True])
def test_a_contract_is_read_from_any_ranks_schedule(even: bool) -> None:
    for collective in Collective:
        one = Contract(collective, 3, 1, 0 if collective is Collective.BARRIER else 2, even)
        made = Schedule(collective, "handmade", 2, 3, 1, one.input_chunks, one.output_chunks, (), (), even)
        assert Contract.of(made) == one


@pytest.mark.parametrize(
    ("collective", "chunks", "expected"),
    [
        (Collective.ALL_REDUCE, (0, 0), "k and k"),
        (Collective.ALL_REDUCE, (2, 1), "k and k"),
        (Collective.ALL_GATHER, (2, 2), r"k and size \* k"),
        (Collective.SCATTER, (6, 3), r"size \* k and k"),
        (Collective.ALL_TO_ALL, (4, 4), r"size \* k and size \* k"),
        (Collective.ALL_TO_ALL, (6, 3), r"size \* k and size \* k"),
        (Collective.BARRIER, (1, 1), "0 and 0"),
        (Collective.BARRIER, (0, 1), "0 and 0"),
        (Collective.BROADCAST, (-1, -1), "k and k"),
    ],
)
def test_chunks_that_are_those_of_no_contract_are_refused_with_what_is_expected(
    collective: Collective, chunks: tuple[int, int], expected: str
) -> None:
    made = Schedule(collective, "handmade", 2, 3, 1, *chunks, (), ())
    words = rf"rank 2 declares {chunks[0]} input chunks and {chunks[1]} output chunks; expected {expected}$"
    with pytest.raises(MalformedScheduleError, match=words) as caught:
        Contract.of(made)
    assert caught.value.rank == 2


def test_pieces_are_named_alike_on_every_rank() -> None:
    def of(collective: Collective) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        one = Contract(collective, 2, 0, 2)
        return one.input_pieces(1), one.output_pieces(1)

    vector, own, every = ((0,), (1,)), ((1, 0), (1, 1)), ((0, 0), (0, 1), (1, 0), (1, 1))
    assert of(Collective.ALL_REDUCE) == of(Collective.REDUCE) == of(Collective.BROADCAST) == (vector, vector)
    assert of(Collective.ALL_GATHER) == of(Collective.GATHER) == (own, every)
    assert of(Collective.REDUCE_SCATTER) == of(Collective.SCATTER) == (every, own)
    assert of(Collective.ALL_TO_ALL) == (
        ((1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)),
        ((0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)),
    )
