"""Messages with tags that nobody sends or receives: deadlines, deadlocks, lost ranks, revoked and closed groups."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.worlds import thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_simulated import Kill, explore, run

LONG = 200_000


def test_recv_that_nothing_meets_ends_by_its_deadline(world):
    def program(group: Group) -> None:
        if group.rank == 1:
            group.send(1, 0, tag=2)
            oa.sleep(1.5)
            group.barrier()
        else:
            group.recv(1, tag=3, timeout_s=0.4)

    first, second = world.outcomes(program, 2)
    assert isinstance(first, oa.DeadlineError), first
    assert "recv from rank 1, tag 3" in str(first)
    assert isinstance(second, oa.CommError), second


def test_request_ends_by_its_deadline_although_nobody_waits(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            work = group.recv_async(oa.ANY, tag=3, timeout_s=0.3)
            oa.sleep(1.0)
            assert work._ended  # no call of the group has ended it
            with pytest.raises(oa.DeadlineError, match="recv from any rank, tag 3"):
                work.wait()
            raise oa.DeadlineError("as expected")
        oa.sleep(1.5)
        group.barrier()

    first, second = world.outcomes(program, 2)
    assert isinstance(first, oa.DeadlineError), first
    assert isinstance(second, oa.CommError), second


@pytest.mark.alone
@pytest.mark.parametrize("count", [3, LONG])
def test_ranks_that_wait_in_a_circle_are_found(world, count):
    def program(group: Group) -> None:
        after, before = (group.rank + 1) % 3, (group.rank - 1) % 3
        if group.rank == 0:
            group.send(np.arange(count), after, tag=1, mode="sync")
        group.recv(before, tag=2)

    started = time.monotonic()
    errors = world.outcomes(program, 3)
    assert all(isinstance(error, oa.CollectiveMismatchError) for error in errors), errors
    assert "tag 2" in str(errors[0])
    if not world.backend.endswith("simulated"):
        assert time.monotonic() - started < 15


@pytest.mark.alone
def test_wildcards_of_all_ranks_wait_for_ever_and_are_found(world):
    def program(group: Group) -> None:
        group.recv(oa.ANY, tag=oa.ANY_TAG)

    errors = world.outcomes(program, 3)
    assert all(isinstance(error, oa.DeadlockError) for error in errors), errors
    assert "recv from any rank, any tag" in str(errors[0])


def test_a_wildcard_waits_for_a_rank_that_may_still_send(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            for _ in range(2):
                assert group.recv(oa.ANY, tag=1) == 5
        elif group.rank == 1:
            group.send(5, 0, tag=1)
        else:
            oa.sleep(1.5)
            group.send(5, 0, tag=1)

    world(program, 3)


@pytest.mark.alone
def test_a_wildcard_ends_when_all_senders_have_left(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(oa.ANY, tag=1)

    errors = world.outcomes(program, 3)
    assert isinstance(errors[0], oa.CollectiveMismatchError), errors
    assert "any rank" in str(errors[0])


@pytest.mark.parametrize("count", [3, 9000])
def test_closing_with_messages_that_nobody_received_is_a_mismatch(world, count):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(count, np.uint8), 1, tag=1)

    errors = [error for error in world.outcomes(program, 2) if error is not None]
    assert errors
    assert all(isinstance(error, oa.CollectiveMismatchError) for error in errors), errors
    if world.backend != "simulated" or count == 3:
        assert "with tags to rank 1" in str(errors[0])


def test_send_to_a_rank_that_has_left_ends(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(LONG), 1, tag=1)

    first, _ = world.outcomes(program, 2)
    assert isinstance(first, oa.CollectiveMismatchError), first


@pytest.mark.alone
def test_tagged_and_untagged_calls_do_not_meet(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(LONG), 1, tag=1)
        else:
            group.recv(0)

    errors = world.outcomes(program, 2)
    assert all(isinstance(error, oa.CollectiveMismatchError) for error in errors), errors
    assert "tag 1" in str(errors[0])


def test_revoke_and_an_exception_end_all_waits(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1, tag=1)
            group.revoke()
        else:
            group.send(1, 0, tag=1)
            work = group.recv_async(0, tag=2)
            with pytest.raises(oa.AbortedError, match="rank 0 revoked"):
                group.recv(oa.ANY, tag=3)
            with pytest.raises(oa.AbortedError):
                work.wait()
            with pytest.raises(oa.AbortedError):
                group.send(1, 0, tag=1)
            with pytest.raises(oa.AbortedError):
                group.iprobe()

    outcomes = world.outcomes(program, 2)
    assert outcomes[1] is None, outcomes

    def failing(group: Group) -> None:
        if group.rank == 0:
            raise ValueError("of the program")
        group.probe(0, 1)

    first, second = world.outcomes(failing, 2)
    assert isinstance(first, ValueError)
    assert isinstance(second, oa.AbortedError), second
    assert second.peer == 0


def test_calls_after_close_are_refused_and_requests_end(world):
    kept: list = []

    def program(group: Group) -> None:
        child = group.split(0)
        if group.rank == 0:
            work = child.recv_async(1, tag=1)
            kept.append(work)
            child.close(timeout_s=0.3)
            with pytest.raises(oa.ClosedError):
                work.wait()
            with pytest.raises(oa.ClosedError):
                child.send(1, 1, tag=1)
            with pytest.raises(oa.ClosedError):
                child.recv(oa.ANY, tag=1)
        else:
            child.close()
        group.barrier()

    world(program, 2)


def test_close_waits_for_sends_on_their_way(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send_async(np.arange(LONG), 1, tag=1)
            group.send(np.arange(LONG), 1, tag=1, mode="buffered")
        else:
            oa.sleep(0.3)
            for _ in range(2):
                assert np.array_equal(group.recv(0, tag=1), np.arange(LONG))

    world(program, 2)


def test_a_killed_rank_is_named_to_those_that_wait_for_it_or_any():
    def program(group: Group) -> None:
        if group.rank == 2:
            group.barrier()
        elif group.rank == 1:
            group.recv(2, tag=1)
        else:
            group.recv(oa.ANY, tag=1)

    done = run(program, 3, faults=[Kill(rank=2, operation="barrier", nth=0)], check=False)
    for rank in (0, 1):
        assert isinstance(done.errors[rank], oa.PeerLostError), done.errors
        assert done.errors[rank].peer == 2


def test_explore_finds_a_race_of_wildcards():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.compute(1)
            first = int(group.recv(oa.ANY, tag=1))
            group.recv(oa.ANY, tag=1)
            assert first == 1, f"rank {first} came first"
        else:
            group.send(group.rank, 0, tag=1)

    found = explore(program, 3, range(60))
    assert found.failed
    assert "rank 2 came first" in str(found.error)
    assert "of the messages of ranks 1, 2, the seed draws that of rank 2" in found.story


@pytest.mark.alone
def test_messages_in_a_thread_that_no_one_waits_for_do_not_hide_a_deadlock():
    def program(group: Group) -> None:
        group.recv_async(1 - group.rank, tag=5)
        group.recv(1 - group.rank, tag=6)

    for backend in ("shm", "tcp", "simulated"):
        errors = thread_world(program, 2, backend)
        assert all(isinstance(error, oa.DeadlockError) for error in errors), errors
    assert threading.active_count() < 50


def test_send_that_waited_for_room_is_forgotten_once_it_is_taken(world):
    if world.backend.endswith("simulated"):
        pytest.skip("a send that waits for room is seen by the time that it takes")

    def program(group: Group) -> None:
        if group.rank == 0:
            for _ in range(40):  # more than there is room for
                group.send(np.zeros(100), 1, tag=1)
            group.send(np.zeros(LONG), 1, tag=1)
        else:
            time.sleep(1.2)  # while the store learns of what rank 0 waits for
            for _ in range(41):
                group.recv(0, tag=1)
        group.barrier()

    world(program, 2)
