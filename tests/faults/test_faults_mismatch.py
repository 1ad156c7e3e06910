"""Ranks that do not make the same call: all of them learn who did what, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.worlds import over_sockets, stories, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.control.connection import Control
from oneaccord.control.protocol import Report, encode

Call = Callable[[Group, int], Any]


def failures(call: Call) -> list[oa.CollectiveMismatchError]:
    """Have three ranks make a barrier, and then a call; return the mismatch that each of them was told of, in the same words."""

    def program(group: Group) -> None:
        group.barrier()
        call(group, group.rank)

    errors = thread_world(program, 3, "tcp")
    assert [type(error) for error in errors] == [oa.CollectiveMismatchError] * 3, errors
    assert len({str(error) for error in errors}) == 1, errors
    return errors


def in_another_order(group: Group, odd: bool) -> None:
    if odd:
        group.barrier()
    group.all_reduce(np.zeros(3))
    group.barrier()


LENGTHS = "the lengths, for uneven=True, of "
# A call that one rank makes otherwise, and what the error must say of the others and of that one: kinds that depend on how messages move, or
# that test_simulated_mismatches has not.
KINDS: dict[str, tuple[Callable[[Group, bool], Any], str, str]] = {
    "shape": (
        lambda group, odd: group.all_reduce(np.zeros(8 if odd else 4)),
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float64[8], op="sum") #1',
    ),
    "shape with the same count": (
        lambda group, odd: group.all_reduce(np.zeros((3, 2) if odd else (2, 3))),
        'all_reduce(float64[2, 3], op="sum") #1',
        'all_reduce(float64[3, 2], op="sum") #1',
    ),
    "number of dimensions": (
        lambda group, odd: group.all_reduce(np.zeros((6, 1) if odd else 6)),
        'all_reduce(float64[6], op="sum") #1',
        'all_reduce(float64[6, 1], op="sum") #1',
    ),
    "nothing against something": (
        lambda group, odd: group.all_reduce(np.zeros(0 if odd else 1)),
        'all_reduce(float64[1], op="sum") #1',
        'all_reduce(float64[0], op="sum") #1',
    ),
    "large shape": (
        lambda group, odd: group.all_reduce(np.zeros(2_000_001 if odd else 2_000_000)),
        'all_reduce(float64[2000000], op="sum") #1',
        'all_reduce(float64[2000001], op="sum") #1',
    ),
    "mean against sum": (
        lambda group, odd: group.all_reduce(np.zeros(4), op="mean" if odd else "sum"),
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float64[4], op="mean") #1',
    ),
    "shape on a rank that only listens": (
        lambda group, odd: group.broadcast(np.zeros(5 if odd else 4)),
        "broadcast(float64[4], root=0) #1",
        "broadcast(float64[5], root=0) #1",
    ),
    "order": (in_another_order, 'all_reduce(float64[3], op="sum") #1', "barrier() #1"),
    "counts against none": (
        lambda group, odd: group.all_gather(np.zeros(2), counts=None if odd else [2, 2, 2]),
        "all_gather(float64[], counts=[2, 2, 2]) #1",
        "all_gather(float64[2]) #1",
    ),
    "uneven on one rank alone": (
        lambda group, odd: group.all_gather(np.zeros((2, 3)), uneven=odd),
        "all_gather(float64[2, 3]) #1",
        f"{LENGTHS}all_gather(int64[]) #1",
    ),
    "uneven against counts": (
        lambda group, odd: group.gather(np.zeros(2), **({"uneven": True} if odd else {"counts": [2, 2, 2]})),
        "gather(float64[], root=0, counts=[2, 2, 2]) #1",
        f"{LENGTHS}gather(int64[], root=0) #1",
    ),
    "root of an uneven gather": (
        lambda group, odd: group.gather(np.zeros(group.rank), 1 if odd else 0, uneven=True),
        f"{LENGTHS}gather(int64[], root=0) #1",
        f"{LENGTHS}gather(int64[], root=1) #1",
    ),
    "dtype of uneven rows": (
        lambda group, odd: group.all_gather(np.zeros(group.rank, np.int32 if odd else np.float32), uneven=True),
        "all_gather(float32[], counts=[0, 1, 2]) #2",
        "all_gather(int32[], counts=[0, 1, 2]) #2",
    ),
    "rest of the shape of uneven rows": (
        lambda group, odd: group.gather(np.zeros((group.rank, 3 if odd else 2)), uneven=True),
        "gather(float64[2], root=0, counts=[0, 1, 2]) #2",
        "gather(float64[3], root=0, counts=[0, 1, 2]) #2",
    ),
    "counts of reduce_scatter": (
        lambda group, odd: group.reduce_scatter(np.zeros(6), counts=[2, 2, 2] if odd else [1, 2, 3]),
        'reduce_scatter(float64[6], op="sum", counts=[1, 2, 3]) #1',
        'reduce_scatter(float64[6], op="sum", counts=[2, 2, 2]) #1',
    ),
    "rows of all_to_all": (
        lambda group, odd: group.all_to_all(np.zeros(6 if odd else 3)),
        "all_to_all(float64[3]) #1",
        "all_to_all(float64[6]) #1",
    ),
}


@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_learns_who_called_what(kind: str, other: int) -> None:
    call, usual, unusual = KINDS[kind]
    told = stories(str(failures(lambda group, rank: call(group, rank == other))[0]))
    assert sorted(told) == [0, 1, 2]
    # A rank that is slow to come may still be on its way from the barrier, or between the parts of its call, when it is asked; at least two are not.
    on_its_way = ("barrier() #0", "in the lengths,", "the last was the lengths,")
    there = {rank: story for rank, story in told.items() if not any(words in story for words in on_its_way)}
    assert there == {rank: unusual if rank == other else usual for rank in there}
    assert len(set(there.values())) == 2


GATHERINGS: dict[str, tuple[Call, bool]] = {
    "all_gather": (lambda group, rank: group.all_gather(np.zeros((4 + rank, 2))), True),
    "gather": (lambda group, rank: group.gather(np.zeros(2 + (rank == 0)), root=1), True),
    "nothing against something": (lambda group, rank: group.all_gather(np.zeros(rank)), True),
    "dtype as well": (lambda group, rank: group.all_gather(np.zeros(3 + rank, ["f4", "f8", "i4"][rank])), False),
    "rest of the shape": (lambda group, rank: group.all_gather(np.zeros((3, 1 + rank))), False),
    "root as well": (lambda group, rank: group.gather(np.zeros(3 + rank), root=rank), False),
    "another collective": (lambda group, rank: group.all_reduce(np.zeros(3 + rank)), False),
}


@pytest.mark.parametrize("kind", GATHERINGS)
def test_arrays_that_differ_in_length_alone_are_told_what_to_give(kind: str) -> None:
    call, is_told = GATHERINGS[kind]
    words = "arrays of unequal lengths: give counts= or uneven=True on all ranks"
    assert (words in str(failures(call)[0])) == is_told


def ill_received(group: Group, rank: int) -> None:
    if rank == 0:
        group.send(np.zeros((3, 2)), 1)
    elif rank == 1:
        group.recv(0, out=np.zeros(4))
    group.barrier()


def ill_received_in_parts(group: Group, rank: int) -> None:
    if rank == 2:
        group.send(np.zeros(3_000_000, np.float32), 1)
    elif rank == 1:
        group.recv(2, out=np.zeros(3_000_000, np.int32))
    group.barrier()


# What only one rank can see, and a group of words that the error must have.
SEEN_BY_ONE: dict[str, tuple[Call, list[str]]] = {
    "received array": (
        ill_received,
        ["recv from rank 0 on rank 1", "rank 0 sent float64[3, 2]", "out= is float64[4]", "rank 1: in recv from rank 0"],
    ),
    "received dtype": (
        ill_received_in_parts,
        ["rank 2 sent float32[3000000]", "out= is int32[3000000]", "rank 2: in send to rank 1"],
    ),
    "out of scatter": (
        lambda group, rank: group.scatter(
            np.zeros((6, 2)) if rank == 0 else None, out=np.empty((2, 2), np.float32 if rank == 1 else np.float64)
        ),
        ["rank 1 cannot take its part of scatter", "float32", "float64"],
    ),
    "receive_counts of all_to_all": (
        lambda group, rank: group.all_to_all(
            np.zeros(3), send_counts=[1, 1, 1], receive_counts=[1, 1, 1] if rank else [1, 2, 1]
        ),
        ["rank 0 expects receive_counts=[1, 2, 1]", "[1, 1, 1]"],
    ),
    "out of an uneven gather": (
        lambda group, rank: group.gather(np.zeros(rank), root=1, uneven=True, out=np.zeros(4 if rank == 1 else 5)),
        ["rank 1 cannot take the result of gather", "(4,)", "(3,)"],
    ),
    "out of all_to_all": (
        lambda group, rank: group.all_to_all(np.zeros(3), send_counts=[1, 1, 1], out=np.zeros(4 if rank == 1 else 3)),
        ["rank 1 cannot take the result of all_to_all", "(4,)", "(3,)"],
    ),
}


@pytest.mark.parametrize("kind", SEEN_BY_ONE)
def test_what_one_rank_sees_all_learn(kind: str) -> None:
    call, words = SEEN_BY_ONE[kind]
    text = str(failures(call)[0])
    assert [word for word in words if word not in text] == [], text


IN_ITS_OWN_NAME: dict[str, Call] = {
    "scatter": lambda group, rank: group.scatter(np.zeros(6), root=1 if rank == 2 else 0),
    "all_to_all": lambda group, rank: group.all_to_all(np.zeros((3, 2 + (rank == 1))), send_counts=[1, 1, 1]),
}


@pytest.mark.parametrize("operation", IN_ITS_OWN_NAME)
def test_a_call_is_told_by_the_name_that_the_user_called(operation: str) -> None:
    for error in failures(IN_ITS_OWN_NAME[operation]):
        assert error.operation == operation
        there = [story for story in stories(str(error)).values() if "barrier() #0" not in story]
        assert [story for story in there if f"{operation}(" not in story] == []


def test_a_rank_that_skips_a_collective_and_makes_the_next_is_told_apart() -> None:
    def skipping(group: Group, rank: int) -> None:
        if rank != 1:
            group.all_reduce(np.zeros(3))
        group.all_reduce(np.zeros(5))

    text = str(failures(skipping)[1])
    assert 'rank 1: all_reduce(float64[5], op="sum") #1' in text
    assert 'all_reduce(float64[3], op="sum") #1' in text


def test_a_mistake_of_all_ranks_alike_is_found_before_any_byte_moves() -> None:
    def mistakes(group: Group) -> float:
        with pytest.raises(oa.UsageError):
            group.all_reduce(np.zeros(3, int), op="mean")
        with pytest.raises(oa.UsageError):
            group.broadcast(np.zeros(3), root=3)
        return float(group.all_reduce(np.ones(1))[0])

    assert thread_world(mistakes, 3, "tcp") == [3.0] * 3


BROKEN_FRAMES = {
    "text that is no UTF-8": b"\x82\xa4type\xa6Report\xa4kind\xa2\xff\xfe",
    "no message": b"\xff",
    "nothing": b"",
    "lists in lists": b"\x92" * 60000,
    "a rank that is none": encode(Report("deadline", "text", 9, "barrier", 0, 1, [0, 9])),
}


def broken(world_size: int, act: Callable[[Group], object] = lambda _: None, **config: Any) -> tuple[type, int | None]:
    """Have one rank send something that nobody can read; return the error of all ranks, and the rank that it is about."""

    def program(group: Group) -> None:
        group.barrier()
        act(group)
        group.recv(source=(group.rank + 1) % world_size)

    errors = over_sockets(program, world_size, config=config)
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return type(errors[0]), errors[0].peer


@pytest.mark.parametrize(("frame", "sender"), [*((frame, 2) for frame in BROKEN_FRAMES), ("no message", 0)])
def test_a_control_frame_that_cannot_be_read_is_one_first_cause_on_all_ranks(frame: str, sender: int) -> None:
    def act(group: Group) -> None:
        if group.rank == sender:
            group._job.control._store.send(BROKEN_FRAMES[frame])

    assert broken(3, act) == (oa.ProtocolError, sender)


def test_a_control_frame_of_the_store_that_cannot_be_read_is_one_first_cause_on_all_ranks() -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            group._job._store._seats[1].connection.send(b"\x82\xa4type\xa7Verdict\xa4kind\xa2\xff\xfe")

    assert broken(3, act) == (oa.ProtocolError, 0)


def test_a_control_frame_that_is_announced_too_long_is_one_first_cause_on_all_ranks() -> None:
    def act(group: Group) -> None:
        if group.rank == 2:
            group._job.control._store._connection._sock.send(b"\xff" * 4)

    assert broken(3, act) == (oa.ProtocolError, 2)


CARDS = [b"\xff", b"[" * 50000, b"{}", b"", b'{"host": 3, "port": -1}']
ROUTES: dict[str, Any] = {"backends": {"hybrid": {"routes": {"intra": "shm", "inter": "tcp"}}}}


@pytest.mark.parametrize(
    ("backend", "name", "card"),
    [
        *(("tcp", "tcp", card) for card in CARDS),
        ("shm", "shm", b"\xff"),
        ("shm", "shm, opened", b"\xff"),
        ("auto", "the choice of a backend", b"\xff"),
        ("hybrid", "tcp, tcp", b"\xff"),
        ("hybrid", "shm, from rank 2 on, shm", b"\xff"),  # of the part that serves one host: still named as the world counts it
    ],
)
def test_a_card_that_cannot_be_read_is_one_first_cause_on_all_ranks(
    backend: str, name: str, card: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = Control.give_card

    def giving(control: Control, exchange: str, own: bytes, members: Any) -> None:
        give(control, exchange, card if (control.rank, exchange) == (3, name) else own, members)

    monkeypatch.setattr(Control, "give_card", giving)
    hosts: dict[str, Any] = {"ranks_per_host": 2, **ROUTES} if backend == "hybrid" else {}
    assert broken(4, backend=backend, **hosts) == (oa.ProtocolError, 3)
