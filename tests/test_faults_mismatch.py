"""Ranks that do not make the same call: all of them learn who did what, at once, and nobody hangs."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import pytest
from fault_tools import Nursery

PROMPT_S = 4.0
"""Within what time every rank must know."""


def program(call: str) -> str:
    """Return a program whose ranks all make a barrier, and then ``call``."""
    return "with mh.init(timeout_s=10) as group:\n    group.barrier()\n" + textwrap.indent(
        textwrap.dedent(call).strip(), "    "
    )


def stories(text: str) -> dict[int, str]:
    """Read what an error says about each rank from its last lines, such as ``  ranks 0-1, 4: barrier() #1``."""
    told: dict[int, str] = {}
    for numbers, story in re.findall(r"^  ranks? ([0-9, -]+): (.*)$", text, re.MULTILINE):
        for part in numbers.split(", "):
            first, _, last = part.partition("-")
            told.update(dict.fromkeys(range(int(first), int(last or first) + 1), story))
    return told


# The call, and what the error must say of each rank.
KINDS = {
    "shape": (
        "attempt(group.all_reduce, np.zeros(4 if rank else 8, np.float32))",
        'all_reduce(float32[8], op="sum") #1',
        'all_reduce(float32[4], op="sum") #1',
        'all_reduce(float32[4], op="sum") #1',
    ),
    "shape with the same count": (
        "attempt(group.all_reduce, np.zeros((2, 3) if rank != 1 else (3, 2)))",
        'all_reduce(float64[2, 3], op="sum") #1',
        'all_reduce(float64[3, 2], op="sum") #1',
        'all_reduce(float64[2, 3], op="sum") #1',
    ),
    "number of dimensions": (
        "attempt(group.all_reduce, np.zeros((6, 1) if rank == 2 else 6))",
        'all_reduce(float64[6], op="sum") #1',
        'all_reduce(float64[6], op="sum") #1',
        'all_reduce(float64[6, 1], op="sum") #1',
    ),
    "nothing against something": (
        "attempt(group.all_reduce, np.zeros(0 if rank == 1 else 1))",
        'all_reduce(float64[1], op="sum") #1',
        'all_reduce(float64[0], op="sum") #1',
        'all_reduce(float64[1], op="sum") #1',
    ),
    "large shape": (
        "attempt(group.all_reduce, np.zeros(2_000_001 if rank == 2 else 2_000_000))",
        'all_reduce(float64[2000000], op="sum") #1',
        'all_reduce(float64[2000000], op="sum") #1',
        'all_reduce(float64[2000001], op="sum") #1',
    ),
    "dtype of the same size": (
        "attempt(group.all_reduce, np.zeros(4, np.int32 if rank == 1 else np.float32))",
        'all_reduce(float32[4], op="sum") #1',
        'all_reduce(int32[4], op="sum") #1',
        'all_reduce(float32[4], op="sum") #1',
    ),
    "dtype of another size": (
        "attempt(group.all_reduce, np.zeros(4, np.float64 if rank == 0 else np.float32))",
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float32[4], op="sum") #1',
        'all_reduce(float32[4], op="sum") #1',
    ),
    "op": (
        "attempt(group.all_reduce, np.zeros(4), op='max' if rank == 1 else 'sum')",
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float64[4], op="max") #1',
        'all_reduce(float64[4], op="sum") #1',
    ),
    "mean against sum": (
        "attempt(group.all_reduce, np.zeros(4), op='mean' if rank == 2 else 'sum')",
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float64[4], op="sum") #1',
        'all_reduce(float64[4], op="mean") #1',
    ),
    "root of broadcast": (
        "attempt(group.broadcast, np.zeros(4), root=1 if rank == 1 else 0)",
        "broadcast(float64[4], root=0) #1",
        "broadcast(float64[4], root=1) #1",
        "broadcast(float64[4], root=0) #1",
    ),
    "root of reduce": (
        "attempt(group.reduce, np.zeros(4), root=1 if rank == 2 else 0)",
        'reduce(float64[4], op="sum", root=0) #1',
        'reduce(float64[4], op="sum", root=0) #1',
        'reduce(float64[4], op="sum", root=1) #1',
    ),
    "root of gather": (
        "attempt(group.gather, np.zeros(4), root=2 if rank == 0 else 1)",
        "gather(float64[4], root=2) #1",
        "gather(float64[4], root=1) #1",
        "gather(float64[4], root=1) #1",
    ),
    "shape on a rank that only listens": (
        "attempt(group.broadcast, np.zeros(5 if rank == 2 else 4))",
        "broadcast(float64[4], root=0) #1",
        "broadcast(float64[4], root=0) #1",
        "broadcast(float64[5], root=0) #1",
    ),
    "order": (
        """
        if rank == 2:
            attempt(lambda: (group.barrier(), group.all_reduce(np.zeros(3))))
        else:
            attempt(lambda: (group.all_reduce(np.zeros(3)), group.barrier()))
        """,
        'all_reduce(float64[3], op="sum") #1',
        'all_reduce(float64[3], op="sum") #1',
        "barrier() #1",
    ),
    "collective against collective": (
        "attempt(group.all_gather if rank == 0 else group.all_to_all, np.zeros(3))",
        "all_gather(float64[3]) #1",
        "all_to_all(float64[3]) #1",
        "all_to_all(float64[3]) #1",
    ),
    "rows of all_gather": (
        "attempt(group.all_gather, np.zeros((4, 2) if rank == 2 else (3, 2)))",
        "all_gather(float64[3, 2]) #1",
        "all_gather(float64[3, 2]) #1",
        "all_gather(float64[4, 2]) #1",
    ),
    "counts of all_gather": (
        "attempt(group.all_gather, np.zeros(2), counts=[2, 2, 1] if rank == 0 else [2, 2, 2])",
        "all_gather(float64[], counts=[2, 2, 1]) #1",
        "all_gather(float64[], counts=[2, 2, 2]) #1",
        "all_gather(float64[], counts=[2, 2, 2]) #1",
    ),
    "counts against none": (
        "attempt(group.all_gather, np.zeros(2), counts=None if rank == 1 else [2, 2, 2])",
        "all_gather(float64[], counts=[2, 2, 2]) #1",
        "all_gather(float64[2]) #1",
        "all_gather(float64[], counts=[2, 2, 2]) #1",
    ),
    "uneven on one rank alone": (
        "attempt(group.all_gather, np.zeros((2, 3)), uneven=rank == 2)",
        "all_gather(float64[2, 3]) #1",
        "all_gather(float64[2, 3]) #1",
        "the lengths, for uneven=True, of all_gather(int64[]) #1",
    ),
    "uneven against counts": (
        "attempt(group.gather, np.zeros(2), **({'uneven': True} if rank == 0 else {'counts': [2, 2, 2]}))",
        "the lengths, for uneven=True, of gather(int64[], root=0) #1",
        "gather(float64[], root=0, counts=[2, 2, 2]) #1",
        "gather(float64[], root=0, counts=[2, 2, 2]) #1",
    ),
    "root of an uneven gather": (
        "attempt(group.gather, np.zeros(rank), 1 if rank == 2 else 0, uneven=True)",
        "the lengths, for uneven=True, of gather(int64[], root=0) #1",
        "the lengths, for uneven=True, of gather(int64[], root=0) #1",
        "the lengths, for uneven=True, of gather(int64[], root=1) #1",
    ),
    "dtype of uneven rows": (
        "attempt(group.all_gather, np.zeros(rank, np.int32 if rank == 2 else np.float32), uneven=True)",
        "all_gather(float32[], counts=[0, 1, 2]) #2",
        "all_gather(float32[], counts=[0, 1, 2]) #2",
        "all_gather(int32[], counts=[0, 1, 2]) #2",
    ),
    "rest of the shape of uneven rows": (
        "attempt(group.gather, np.zeros((rank, 3 if rank == 1 else 2)), uneven=True)",
        "gather(float64[2], root=0, counts=[0, 1, 2]) #2",
        "gather(float64[3], root=0, counts=[0, 1, 2]) #2",
        "gather(float64[2], root=0, counts=[0, 1, 2]) #2",
    ),
    "counts of reduce_scatter": (
        "attempt(group.reduce_scatter, np.zeros(6), counts=[1, 2, 3] if rank else [2, 2, 2])",
        'reduce_scatter(float64[6], op="sum", counts=[2, 2, 2]) #1',
        'reduce_scatter(float64[6], op="sum", counts=[1, 2, 3]) #1',
        'reduce_scatter(float64[6], op="sum", counts=[1, 2, 3]) #1',
    ),
    "rows of all_to_all": (
        "attempt(group.all_to_all, np.zeros(6 if rank == 2 else 3))",
        "all_to_all(float64[3]) #1",
        "all_to_all(float64[3]) #1",
        "all_to_all(float64[6]) #1",
    ),
    "a call that one rank leaves out": (
        """
        if rank != 2:
            attempt(group.all_reduce, np.zeros(3))
        else:
            attempt(group.all_gather, np.zeros(3))
        """,
        'all_reduce(float64[3], op="sum") #1',
        'all_reduce(float64[3], op="sum") #1',
        "all_gather(float64[3]) #1",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_learns_who_called_what(nursery: Nursery, kind: str) -> None:
    call, *calls = KINDS[kind]
    with nursery.ranks(program(call)) as ranks:
        failures = ranks.start().raised()
    assert [(rank, failures[rank]["type"]) for rank in sorted(failures)] == [(r, "CollectiveMismatchError") for r in range(3)]
    assert max(failure["took"] for failure in failures.values()) < PROMPT_S
    texts = {failure["text"] for failure in failures.values()}
    assert len(texts) == 1, texts
    told = stories(texts.pop())
    assert sorted(told) == [0, 1, 2]
    # A rank that is slow to come may still be on its way from the barrier, or in the first part of its call, when it is asked; at least two are not.
    there = {
        rank: story for rank, story in told.items() if "barrier() #0" not in story and not story.startswith("in the lengths,")
    }
    assert there == {rank: calls[rank] for rank in there}
    assert len(set(there.values())) == 2


GATHERINGS = {
    "all_gather": ("attempt(group.all_gather, np.zeros((4 + rank, 2)))", True),
    "gather": ("attempt(group.gather, np.zeros(2 + (rank == 0)), root=1)", True),
    "nothing against something": ("attempt(group.all_gather, np.zeros(rank))", True),
    "dtype as well": ("attempt(group.all_gather, np.zeros(3 + rank, ['f4', 'f8', 'i4'][rank]))", False),
    "rest of the shape": ("attempt(group.all_gather, np.zeros((3, 1 + rank)))", False),
    "root as well": ("attempt(group.gather, np.zeros(3 + rank), root=rank)", False),
    "another collective": ("attempt(group.all_reduce, np.zeros(3 + rank))", False),
}


@pytest.mark.parametrize("kind", GATHERINGS)
def test_arrays_that_differ_in_length_alone_are_told_what_to_give(nursery: Nursery, kind: str) -> None:
    call, is_told = GATHERINGS[kind]
    with nursery.ranks(program(call)) as ranks:
        failures = ranks.start().raised()
    assert {failure["type"] for failure in failures.values()} == {"CollectiveMismatchError"}
    for failure in failures.values():
        assert ("arrays of unequal lengths: give counts= or uneven=True on all ranks" in failure["text"]) == is_told


# What only one rank can see, and a group of words that the error must have.
SEEN_BY_ONE = {
    "received array": (
        """
        if rank == 0:
            attempt(lambda: (group.send(np.zeros((3, 2)), 1), group.barrier()))
        elif rank == 1:
            attempt(group.recv, 0, out=np.zeros(4))
        else:
            attempt(group.barrier)
        """,
        ["recv from rank 0 on rank 1", "rank 0 sent float64[3, 2]", "out= is float64[4]", "rank 1: in recv from rank 0"],
    ),
    "received dtype": (
        """
        if rank == 2:
            attempt(group.send, np.zeros(3_000_000, np.float32), 1)
        elif rank == 1:
            attempt(group.recv, 2, out=np.zeros(3_000_000, np.int32))
        else:
            attempt(group.barrier)
        """,
        ["rank 2 sent float32[3000000]", "out= is int32[3000000]", "rank 2: in send to rank 1"],
    ),
    "out of scatter": (
        """
        whole = np.zeros((6, 2)) if rank == 0 else None
        attempt(group.scatter, whole, out=np.empty((2, 2), np.float32 if rank == 1 else np.float64))
        """,
        ["rank 1 cannot take its part of scatter", "float32", "float64"],
    ),
    "receive_counts of all_to_all": (
        "attempt(group.all_to_all, np.zeros(3), send_counts=[1, 1, 1], receive_counts=[1, 1, 1] if rank else [1, 2, 1])",
        ["rank 0 expects receive_counts=[1, 2, 1]", "[1, 1, 1]"],
    ),
    "out of an uneven gather": (
        "attempt(group.gather, np.zeros(rank), root=1, uneven=True, out=np.zeros(4 if rank == 1 else 5))",
        ["rank 1 cannot take what gather brings", "(4,)", "(3,)"],
    ),
    "out of all_to_all": (
        "attempt(group.all_to_all, np.zeros(3), send_counts=[1, 1, 1], out=np.zeros(4 if rank == 1 else 3))",
        ["rank 1 cannot take what all_to_all brings", "(4,)", "(3,)"],
    ),
}


@pytest.mark.parametrize("kind", SEEN_BY_ONE)
def test_what_one_rank_sees_all_learn(nursery: Nursery, kind: str) -> None:
    call, words = SEEN_BY_ONE[kind]
    with nursery.ranks(program(call)) as ranks:
        failures = ranks.start().raised()
    assert [(rank, failures[rank]["type"]) for rank in sorted(failures)] == [(r, "CollectiveMismatchError") for r in range(3)]
    assert max(failure["took"] for failure in failures.values()) < PROMPT_S
    texts = {failure["text"] for failure in failures.values()}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert [word for word in words if word not in text] == [], text


IN_ITS_OWN_NAME = {
    "scatter": "attempt(group.scatter, np.zeros(6), root=1 if rank == 2 else 0)",
    "all_to_all": "attempt(group.all_to_all, np.zeros((3, 2 + (rank == 1))), send_counts=[1, 1, 1])",
}


@pytest.mark.parametrize("operation", IN_ITS_OWN_NAME)
def test_a_call_is_told_by_the_name_that_the_user_called(nursery: Nursery, operation: str) -> None:
    with nursery.ranks(program(IN_ITS_OWN_NAME[operation])) as ranks:
        failures = ranks.start().raised()
    assert {failure["type"] for failure in failures.values()} == {"CollectiveMismatchError"}
    for failure in failures.values():
        assert failure["operation"] == operation
        there = [story for story in stories(failure["text"]).values() if "barrier() #0" not in story]
        assert [story for story in there if f"{operation}(" not in story] == []


def test_a_rank_that_skips_a_collective_and_makes_the_next_is_told_apart(nursery: Nursery) -> None:
    skipping = """
        if rank != 1:
            attempt(group.all_reduce, np.zeros(3))
        if not rank or rank == 1:
            attempt(group.all_reduce, np.zeros(5))
    """
    with nursery.ranks(program(skipping)) as ranks:
        failures = ranks.start().raised()
    assert {failure["type"] for failure in failures.values()} == {"CollectiveMismatchError"}
    text = failures[1]["text"]
    assert 'rank 1: all_reduce(float64[5], op="sum") #1' in text
    assert 'all_reduce(float64[3], op="sum") #1' in text


def test_a_mistake_of_all_ranks_alike_is_found_before_any_byte_moves(nursery: Nursery) -> None:
    mistakes = """
        for call in (lambda: group.all_reduce(np.zeros(3, int), op="mean"), lambda: group.broadcast(np.zeros(3), root=3)):
            try:
                call()
            except mh.UsageError as error:
                tell("refused", text=str(error))
        tell("sum", value=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program(mistakes)) as ranks:
        ranks.start().wait()
    assert len(ranks.await_facts("refused", 6)) == 6
    assert [fact["value"] for fact in ranks.await_facts("sum")] == [3.0] * 3


DEEP = "b'\\x92' * 60000"
BROKEN_FRAMES = {
    "text that is no UTF-8": "b'\\x82\\xa4type\\xa6Report\\xa4kind\\xa2\\xff\\xfe'",
    "no message": "b'\\xff'",
    "nothing": "b''",
    "lists in lists": DEEP,
    "a rank that is none": "encode(Report('deadline', 'text', 9, 'barrier', 0, 1, [0, 9]))",
}


def assert_garbage(failures: dict[int, dict[str, Any]], sender: int) -> None:
    assert sorted(failures) == [0, 1, 2]
    assert {(fact["type"], fact["about"]) for fact in failures.values()} == {("ProtocolError", sender)}, failures
    assert len({fact["text"] for fact in failures.values()}) == 1


@pytest.mark.parametrize("frame", BROKEN_FRAMES)
@pytest.mark.parametrize("sender", [0, 1, 2])
def test_a_control_frame_that_cannot_be_read_is_one_first_cause_on_all_ranks(nursery: Nursery, frame: str, sender: int) -> None:
    program = f"""
        from manyhands.control.protocol import Report, encode
        group = mh.init(timeout_s=20)
        def go():
            group.barrier()
            if rank == {sender}:
                group._job.control._connection.send({BROKEN_FRAMES[frame]})
            group.recv(source=(rank + 1) % 3)
        attempt(go)
    """
    with nursery.ranks(program) as ranks:
        assert_garbage(ranks.start().raised(), sender)
        assert "Traceback" not in ranks.output()


def test_a_control_frame_of_the_store_that_cannot_be_read_is_one_first_cause_on_all_ranks(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        def go():
            group.barrier()
            if rank == 0:
                group._job._store._ranks[1].send(b"\\x82\\xa4type\\xa7Verdict\\xa4kind\\xa2\\xff\\xfe")
            group.recv(source=(rank + 1) % 3)
        attempt(go)
    """
    with nursery.ranks(program) as ranks:
        assert_garbage(ranks.start().raised(), 0)


def test_a_control_frame_that_is_announced_too_long_is_one_first_cause_on_all_ranks(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        def go():
            group.barrier()
            if rank == 2:
                group._job.control._connection._connection._sock.send(b"\\xff" * 4)
            group.recv(source=(rank + 1) % 3)
        attempt(go)
    """
    with nursery.ranks(program) as ranks:
        assert_garbage(ranks.start().raised(), 2)


@pytest.mark.parametrize("backend", ["tcp", "shm", "hybrid", "auto"])
@pytest.mark.parametrize("card", ["b'\\xff'", "b'[' * 50000", "b'{}'", "b''", """b'{"host": 3, "port": -1}'"""])
def test_a_card_that_cannot_be_read_is_one_first_cause_on_all_ranks(nursery: Nursery, backend: str, card: str) -> None:
    program = f"""
        import manyhands.job.autobackend, manyhands_tcp.backend, manyhands_shm.meeting
        if rank == 2:
            for module in manyhands.job.autobackend, manyhands_tcp.backend, manyhands_shm.meeting:
                module.write_card = lambda value: {card}
        attempt(mh.init, timeout_s=20)
    """
    routes = json.dumps({"intra": "shm", "inter": "tcp"})
    variables = {"MANYHANDS_BACKENDS__HYBRID__ROUTES": routes, "MANYHANDS_RANKS_PER_HOST": "1"} if backend == "hybrid" else {}
    with nursery.ranks(program, MANYHANDS_BACKEND=backend, **variables) as ranks:
        assert_garbage(ranks.start().raised(), 2)


def test_a_part_of_hybrid_that_serves_one_host_names_a_rank_as_the_world_counts_it(nursery: Nursery) -> None:
    program = """
        import manyhands_shm.meeting
        if rank == 3:
            manyhands_shm.meeting.write_card = lambda value: b""
        attempt(mh.init, timeout_s=20)
    """
    routes = json.dumps({"intra": "shm", "inter": "tcp"})
    with nursery.ranks(
        program, 4, MANYHANDS_BACKEND="hybrid", MANYHANDS_BACKENDS__HYBRID__ROUTES=routes, MANYHANDS_RANKS_PER_HOST="2"
    ) as ranks:
        failures = ranks.start().raised()
    assert {(fact["type"], fact["about"]) for fact in failures.values()} == {("ProtocolError", 3)}, failures
    assert len({fact["text"] for fact in failures.values()}) == 1
