"""Messages with tags in programs of several threads and signal handlers, and what requests tell of failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.worlds import must, on_threads, thread_world

import oneaccord as oa
from oneaccord.api import Group, ThreadWorld


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_calls_in_a_signal_handler_are_refused_and_the_call_goes_on(backend):
    """The handler runs in the middle of a receive, where another call would find a message half written."""
    world = ThreadWorld(2, backend)
    refused: list[BaseException] = []
    answers: list[bool] = []
    offices: list[Any] = []

    def other() -> None:
        with world.rank(1), oa.init(timeout_s=20) as group:
            group.recv(0, tag=1)
            while not offices or not offices[0]._inside:  # until rank 0 is in the middle of its receive
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGALRM)
            while not answers:
                time.sleep(0.001)
            group.send(7, 0, tag=2)
            assert group.recv(0, tag=3) == 8

    def handler(*_: Any) -> None:
        for call in (
            lambda: group.send(1, 1, tag=9),
            lambda: group.recv(oa.ANY, tag=9),
            lambda: group.send_async(1, 1, tag=9),
            group.iprobe,
            lambda: work.cancel(),  # noqa: PLW0108 - work is made later
        ):
            try:
                call()
            except oa.UsageError as error:
                refused.append(error)
        answers.append(work.done())

    thread = threading.Thread(target=other, name="rank 1")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        thread.start()
        with world.rank(0), oa.init(timeout_s=20) as group:
            group.send(1, 1, tag=1)
            work = group.recv_async(1, tag=4)
            offices.append(group._post.office)
            assert group.recv(1, tag=2) == 7
            assert work.cancel()
            group.send(8, 1, tag=3)
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join(20)
    assert answers == [False]
    assert [str(error).partition("called ")[2].partition(" while")[0].split()[0] for error in refused] == [
        "send",
        "recv",
        "send",
        "iprobe",
        "cancel()",
    ]


def test_requests_end_by_their_deadlines_beside_another_call(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            ended: list[BaseException] = []

            def waits() -> None:
                try:
                    group.recv(1, tag=3)
                except oa.CommError as error:
                    ended.append(error)

            thread = threading.Thread(target=waits)
            thread.start()
            oa.sleep(0.05)
            mine = group.recv_async(0, tag=1, timeout_s=0.3)
            later = group.recv_async(1, tag=2, timeout_s=0.2)
            oa.sleep(0.1)
            assert not mine._ended
            assert not later._ended
            for _ in range(1500):  # no call of the group
                if mine._ended and later._ended:
                    break
                oa.sleep(0.01)
            assert mine._ended
            assert later._ended
            thread.join(20)
            assert ended
            raise oa.DeadlineError("as expected")
        oa.sleep(1.0)
        group.barrier()

    first, second = world.outcomes(program, 2)
    assert isinstance(first, oa.DeadlineError), first
    assert isinstance(second, oa.CommError), second


def test_a_request_to_oneself_ends_by_its_deadline(world):
    def program(group: Group) -> None:
        work = group.recv_async(group.rank, tag=1, timeout_s=0.3)
        oa.sleep(0.1)
        assert not work._ended
        for _ in range(1500):  # no call of the group
            if work._ended:
                break
            oa.sleep(0.01)
        assert isinstance(work._error, oa.DeadlineError)
        work.wait()

    (outcome,) = world.outcomes(program, 1)
    assert isinstance(outcome, oa.DeadlineError), outcome
    assert "recv from rank 0, tag 1" in str(outcome)


def test_a_message_to_oneself_wakes_the_thread_that_waits_for_it(world, monkeypatch):
    if world.backend.endswith("simulated"):
        pytest.skip("the clock there moves only if all ranks wait")
    for name in ("FIRST_STALL_S", "NEXT_STALL_S"):  # or it would look again by itself, five times a second
        monkeypatch.setattr(f"oneaccord.calls.post.office.{name}", 60.0)

    def program(group: Group) -> None:
        if group.rank:
            group.recv(0, tag=9)
            return
        received: list[int] = []

        def receives() -> None:
            for tag in range(20):
                group.recv(0, tag=tag)
                received.append(tag)

        thread = threading.Thread(target=receives)
        thread.start()
        for tag in range(20):
            while not group._post.office._parked and len(received) < tag:
                time.sleep(0.001)
            group.send(1, 0, tag=tag)
        thread.join(10)
        assert received == list(range(20))
        group.send(1, 1, tag=9)

    world(program, 2)


def test_closing_a_group_ends_the_receive_of_another_thread(world):
    if world.backend.endswith("simulated"):
        pytest.skip("threads of a rank that are not the world's do not take part there")

    def program(group: Group) -> None:
        child = group.split(0)
        if group.rank == 0:
            outcome: list[BaseException] = []

            def receives() -> None:
                try:
                    child.recv(oa.ANY, tag=1)
                except oa.OneAccordError as error:
                    outcome.append(error)

            thread = threading.Thread(target=receives)
            thread.start()
            time.sleep(0.2)
            child.close(timeout_s=1)
            thread.join(15)
            assert [type(error) for error in outcome] == [oa.ClosedError], outcome
        else:
            child.close(timeout_s=1)
        group.barrier()  # the job is well

    world(program, 2)


@pytest.mark.alone
@pytest.mark.parametrize("source", [1, oa.ANY])
def test_waiting_in_a_group_that_the_sender_has_left_is_a_mismatch(world, source):
    def program(group: Group) -> None:
        child = group.split(0)
        if group.rank == 0:
            child.recv(source, tag=1)
        else:
            child.close()
            group.barrier()

    errors = world.outcomes(program, 2)
    assert all(isinstance(error, oa.CollectiveMismatchError) for error in errors), errors
    assert "tag 1" in str(errors[0])


def test_the_error_of_a_request_is_what_its_wait_raises(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(9), 1, tag=1)
            group.send_object({"a": 1}, 1, tag=2)
        else:
            work = group.recv_async(0, tag=1, out=np.empty(2, np.int64))
            other = group.recv_object_async(0, tag=2, type=list[int])
            for each, kind in ((work, oa.SizeMismatchError), (other, oa.OneAccordError)):
                until = time.monotonic() + 15
                while not each.done() and time.monotonic() < until:
                    oa.sleep(0.01)
                error = each.exception()
                assert isinstance(error, kind), error
                for _ in range(2):
                    with pytest.raises(type(error)) as caught:
                        each.wait()
                    assert caught.value is error
        group.barrier()

    world(program, 2)


def test_two_threads_of_a_rank_exchange_while_a_third_waits_for_any():
    world = ThreadWorld(2, "shm")

    def body(rank: int) -> None:
        with world.rank(rank), oa.init(timeout_s=20) as group:
            if rank == 1:
                for tag in range(200):
                    group.send(group.recv(0, tag=tag), 0, tag=tag)
                return

            def half(first: int) -> None:
                for tag in range(first, 200, 2):
                    group.send(tag, 1, tag=tag)
                    assert group.recv(1, tag=tag) == tag

            must(on_threads(half, 2))

    must(on_threads(body, 2))


def test_memory_that_a_thread_reads_is_not_given_back_when_another_one_looks():
    """What came last stays in the mailbox until the next look; while a thread of the rank is in the middle of reading it, there must be none."""

    def program(group: Group) -> None:
        sent = 1
        if group.rank == 0:
            group.send(0, 1, tag=1)
            group.send(0, 1, tag=1)
            group.barrier()
            group.barrier()
            while (work := group.send_async(sent, 1, tag=1))._ended:  # until there is no more room
                sent += 1
            group.barrier()
            group.barrier()
            time.sleep(0.1)  # the message would go by itself
            ended = work._ended
            group.barrier()
            assert not ended
            work.wait()
            group.send(sent + 1, 1, tag=2)
            return
        group.barrier()
        assert group.recv(0, tag=1) == group.recv(0, tag=1) == 0
        group.barrier()
        group.barrier()
        office, looking = group._post.office, threading.Thread(target=group.iprobe, args=(0,))
        with office.lock, office.entered("reading"):
            looking.start()
            looking.join(0.3)  # it has looked by then, and waits for the lock
            group.barrier()
            group.barrier()
        looking.join()
        last = int(group.recv(0, tag=2))
        assert [int(group.recv(0, tag=1)) for _ in range(1, last)] == list(range(1, last))

    must(thread_world(program, 2, "shm"))
