"""Waits of messages with tags that never end, and waits that look so and do end: the former are found, the latter left alone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.worlds import must, over_sockets, thread_world

import oneaccord as oa
from oneaccord.api import Group

LONG = 300_000
REAL = ("shm", "tcp")
"""Backends on which threads of a rank run beside each other."""
STALLS_S = 0.9
"""More than a wait lasts before the store learns of it."""


def later(call, seconds=STALLS_S):
    """Begin a thread that makes a call after some seconds; return it."""

    def body() -> None:
        time.sleep(seconds)
        call()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


# Waits that do end


def test_messages_sent_just_before_their_group_is_closed_are_received(world):
    def program(group: Group) -> None:
        child = group.split(0)
        if child.rank == 0:
            for _ in range(2):
                child.recv(oa.ANY, tag=1)
        else:
            oa.sleep(STALLS_S * child.rank)
            child.send(1, 0, tag=1)
        child.close()

    world(program, 3)


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("others_s", [0.5, 1.7])
def test_a_wildcard_that_a_message_to_oneself_ends_is_let_alone(backend, others_s):
    """Whether the other ranks leave while the rank waits, or after it has ended its wait itself."""

    def program(group: Group) -> None:
        if group.rank == 0:
            stops = later(lambda: group.send(-1, 0, tag=1))
            assert group.recv(oa.ANY, tag=1) == -1
            stops.join()
        time.sleep(others_s)

    must(thread_world(program, 3, backend))


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_a_wait_that_cancel_has_ended_is_forgotten(backend):
    def program(group: Group) -> None:
        if group.rank == 0:
            work = group.recv_async(1, tag=1)
            cancels = later(work.cancel)
            with pytest.raises(oa.UsageError, match="taken back"):
                work.wait()
            cancels.join()
            time.sleep(0.8)
        else:
            time.sleep(1.3)

    must(thread_world(program, 2, backend))


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_a_callback_of_a_request_may_still_rescue_a_rank(backend):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv_async(2, tag=1).add_done_callback(lambda _: group.send(1, 1, tag=3))
            group.recv(1, tag=5)
        elif group.rank == 1:
            group.recv(0, tag=3)
            group.send(1, 0, tag=5)
        else:
            time.sleep(2 * STALLS_S)
            group.send(1, 0, tag=1)

    must(thread_world(program, 3, backend))


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_the_first_of_requests_and_other_works_may_still_rescue_a_rank(backend):
    def program(group: Group) -> None:
        if group.rank == 0:
            tagged, plain = group.recv_async(2, tag=1), group.recv_async(1)
            assert oa.wait_any([plain, tagged]) == 1
            group.send(5, 1)
            plain.wait()
        elif group.rank == 1:
            group.recv(0)
            group.send(1, 0)
        else:
            time.sleep(2 * STALLS_S)
            group.send(1, 0, tag=1)

    must(thread_world(program, 3, backend))


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_the_first_of_requests_beside_a_work_of_no_tag_is_no_mismatch(backend):
    def program(group: Group) -> None:
        if group.rank == 0:
            never, plain = group.recv_async(oa.ANY, tag=9), group.recv_async(1)
            assert oa.wait_any([never, plain]) == 1
            assert never.cancel()
            plain.wait()
        elif group.rank == 1:
            time.sleep(2 * STALLS_S)
            group.send(1, 0)

    must(thread_world(program, 3, backend))


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_the_first_of_requests_ends_when_a_thread_sends(backend):
    def program(group: Group) -> None:
        other = 1 - group.rank
        sends = later(lambda: group.send(1, other, tag=1))
        works = [group.recv_async(other, tag=1), group.recv_async(oa.ANY, tag=7)]
        assert oa.wait_any(works) == 0
        assert works[1].cancel()
        sends.join()

    must(thread_world(program, 2, backend))


# Waits that do not


@pytest.mark.alone
@pytest.mark.parametrize("how", ["sync", "long", "any"])
def test_a_ring_of_sends_is_found_although_each_rank_knows_one_other(how):
    """On real backends, ranks whose programs have not talked take nothing from each other."""

    def program(group: Group) -> None:
        after, before = (group.rank + 1) % 3, (group.rank - 1) % 3
        group.send(np.arange(3 if how == "sync" else LONG), after, tag=1, mode="sync" if how == "sync" else "standard")
        group.recv(oa.ANY if how == "any" else before, tag=1)

    for backend in (*REAL, "simulated"):
        errors = thread_world(program, 3, backend)
        assert all(isinstance(error, oa.DeadlockError) for error in errors), errors
        assert "send to rank 2, tag 1" in str(errors[0])


@pytest.mark.alone
@pytest.mark.parametrize("wait", [oa.wait_any, oa.wait_some, lambda works: next(oa.as_completed(works))])
def test_the_first_of_requests_that_nobody_sends_is_found(world, wait):
    def program(group: Group) -> None:
        wait([group.recv_async((group.rank + 1) % 3, tag=4), group.recv_async(oa.ANY, tag=5)])

    errors = world.outcomes(program, 3)
    assert all(isinstance(error, oa.DeadlockError) for error in errors), errors
    assert "wait for any of recv from rank 1, tag 4, recv from any rank, tag 5" in str(errors[0])


@pytest.mark.alone
def test_the_first_of_requests_ends_when_all_senders_have_left(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.wait_some([group.recv_async(rank, tag=1) for rank in (1, 2)])

    errors = world.outcomes(program, 3)
    assert isinstance(errors[0], oa.CollectiveMismatchError | oa.DeadlockError), errors
    assert "wait for any of recv from rank 1, tag 1, recv from rank 2, tag 1" in str(errors[0])


@pytest.mark.alone
@pytest.mark.parametrize("call", ["recv", "sync", "request"])
def test_a_message_that_only_its_own_rank_could_send_or_take_is_found(world, call):
    def program(group: Group) -> None:
        me = group.rank
        if call == "sync":
            group.send(1, me, tag=1, mode="sync")
        elif call == "recv":
            group.recv(me, tag=1)
        else:
            oa.wait_any([group.recv_async(me, tag=1)])

    errors = world.outcomes(program, 2)
    assert all(isinstance(error, oa.DeadlockError) for error in errors), errors
    for error in errors:  # each rank is stuck alone, and the one that is found first ends both
        assert "rank 0, tag 1" in str(error) or "rank 1, tag 1" in str(error), errors


@pytest.mark.alone
@pytest.mark.parametrize("backend", REAL)
def test_wildcards_count_a_rank_that_has_left_their_group_alone(backend):
    def program(group: Group) -> None:
        child = group.split(0)
        if group.rank == 2:
            child.close()
            time.sleep(6.0)  # it lives, and its program makes no call
        else:
            child.recv(oa.ANY, tag=1)

    first, second, _ = thread_world(program, 3, backend, timeout_s=15)
    assert isinstance(first, oa.DeadlockError), first
    assert isinstance(second, oa.DeadlockError), second


@pytest.mark.alone
def test_a_deadlock_says_how_long_ranks_have_waited():
    def program(group: Group) -> None:
        group.recv(1 - group.rank, tag=1)

    for error in thread_world(program, 2, "tcp"):
        assert isinstance(error, oa.DeadlockError), error
        assert "for 0.0 s" not in str(error)


# The thread that moves messages


@pytest.mark.alone
def test_close_ends_the_thread_that_moves_messages():
    def program(group: Group) -> None:
        group.recv_async(1 - group.rank, tag=1)  # what no thread waits for starts that thread
        group.send(1, 1 - group.rank, tag=1)

    for _ in range(3):
        must(over_sockets(program))
        assert not [thread for thread in threading.enumerate() if thread.name == "oneaccord-post"]


@pytest.mark.parametrize("backend", [*REAL, "simulated"])
def test_requests_that_a_failure_has_left_end_by_it(backend):
    left: list[oa.Work[object]] = []

    def program(group: Group) -> None:
        other = 1 - group.rank
        left.append(group.recv_async(other, tag=1))
        left.append(group.send_async(np.arange(LONG), other, tag=2))
        group.barrier()
        if group.rank == 1:
            raise ValueError("of the program")
        group.recv(oa.ANY, tag=3)

    thread_world(program, 2, backend)
    assert [work._ended for work in left] == [True] * 4
    assert all(isinstance(work.exception(), oa.CommError) for work in left)
