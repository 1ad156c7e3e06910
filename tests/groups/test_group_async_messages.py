"""Sends and receives without tags in the background: who moves them, their order, and what becomes of them when something goes wrong."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.fault_tools import Nursery
from support.waiting import until
from support.worlds import must, on_threads, thread_world

import oneaccord as oa
from oneaccord.api import Group, ThreadWorld

LONG = 300_000
"""Elements of a message that no backend takes at once."""
SIZES = (0, 1, 100, 160, 161, 5000, 20_000, LONG)
REAL = ("shm", "tcp")


def _meet(group: Group) -> None:
    """Let the ranks of two connect, in both directions: the first message to a rank has a thread, which connects."""
    other = 1 - group.rank
    group.sendrecv(np.ones(1), other, other)


def _threads(*names: str) -> int:
    return sum(thread.name.startswith(names or ("oneaccord-work", "oneaccord-messages")) for thread in threading.enumerate())


def test_sixteen_each_way_come_whole_in_order(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        for count in (1, 200, 5000, 30_000):
            outs = [np.empty(count) for _ in range(16)]
            works: list[oa.Work[Any]] = [group.recv_async(other, out=out) for out in outs]
            works += [group.send_async(np.full(count, 100.0 * group.rank + number), other) for number in range(16)]
            results = oa.wait_all(works)
            for number, out in enumerate(outs):
                assert results[number] is out
                assert (out == 100.0 * other + number).all()
            assert results[16:] == [None] * 16

    world(program, 2)


@pytest.mark.parametrize("backend", REAL)
def test_no_message_has_a_thread(backend):
    together = threading.Barrier(2)

    def program(group: Group) -> int:
        other = 1 - group.rank
        x = np.ones(8)
        for _ in range(2):
            oa.wait_all([group.recv_async(other), group.send_async(x, other)])
        until(lambda: not _threads("oneaccord-work"), "the threads that connected to end")
        together.wait(20)
        works: list[oa.Work[Any]] = [group.recv_async(other) for _ in range(50)]
        more = _threads()
        works += [group.send_async(np.full(8, number), other) for number in range(50)]
        more = max(more, _threads())
        oa.wait_all(works)
        return max(more, _threads())

    assert max(must(thread_world(program, 2, backend))) <= 2  # one of each rank: here, ranks are threads of one process


def test_messages_of_every_size_pass_each_other(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        for _ in range(2):
            sends = [group.send_async(np.full(count, group.rank, np.int32), other) for count in SIZES]
            receives = [group.recv_async(other) for _ in SIZES]
            oa.wait_all(sends)  # both ranks wait for their sends first
            for count, work in zip(SIZES, receives, strict=True):
                array = work.wait()
                assert array.dtype == np.int32
                assert array.tolist() == [other] * count

    world(program, 2)


def test_a_ring_of_long_messages_moves_with_one_way_in_the_background(world):
    def program(group: Group) -> None:
        after, before = (group.rank + 1) % 3, (group.rank - 1) % 3
        for _ in range(3):
            work = group.send_async(np.full(LONG, group.rank), after)
            assert (group.recv(before) == before).all()
            work.wait()
            receive = group.recv_async(before)
            group.send(np.full(LONG, group.rank), after)
            assert (receive.wait() == before).all()

    world(program, 3)


def test_blocking_calls_keep_their_place_behind_those_in_the_background(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        for count in (2, LONG):
            if group.rank == 0:
                works = [group.send_async(np.full(count, number), other) for number in range(3)]
                group.send(np.full(count, 3), other)
                works.append(group.send_async(np.full(count, 4), other))
                oa.wait_all(works)
            else:
                receives = [group.recv_async(other) for _ in range(2)]
                assert group.recv(other)[0] == 2
                receives.append(group.recv_async(other))
                assert group.recv(other)[-1] == 4
                assert [int(array[-1]) for array in oa.wait_all(receives)] == [0, 1, 3]

    world(program, 2)


def test_objects_and_strided_results_come_in_the_background(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        for value in ([1, "a"], {"x": "y" * 100_000}):
            works = [group.recv_object_async(other), group.send_object_async(value, other)]
            assert works[0].wait() == value
            works[1].wait()
        base = np.full((1000, 2), -1.0)
        out = base[:, 1]
        works = [group.recv_async(other, out=out), group.send_async(np.arange(1000.0)[::-1], other)]
        assert works[0].wait() is out
        assert out.tolist() == np.arange(1000.0)[::-1].tolist()
        assert (base[:, 0] == -1).all()
        works[1].wait()
        group.send_object_async("three", other).wait()
        wrong = group.recv_object_async(other, type=int)
        with pytest.raises(oa.UsageError, match="int"):
            wrong.wait()
        group.barrier()  # the group goes on

    world(program, 2)


def test_messages_move_while_nobody_waits(world):
    if world.backend.endswith("simulated"):
        pytest.skip("real time passes only on the computer")

    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        for count in (3, LONG):
            send, receive = group.send_async(np.full(count, group.rank), other), group.recv_async(other)
            until(lambda: send._ended and receive._ended)  # noqa: B023 - no call of the group
            assert receive.wait().tolist() == [other] * count

    world(program, 2)


def test_done_moves_messages_and_callbacks_are_called(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        send, receive = group.send_async(np.arange(LONG), other), group.recv_async(other)
        ended: list[Any] = []
        receive.add_done_callback(ended.append)
        for _ in range(10_000_000):
            if send.done() and receive.done():
                break
        assert receive.exception() is None
        assert receive.wait().shape == (LONG,)
        first, second = group.recv_async(other), group.recv_async(other)
        assert oa.wait_any([second, first, group.send_async(np.ones(2), other)]) in (0, 1, 2)
        group.send_async(np.ones(2), other)
        assert {id(work) for work in oa.as_completed([first, second])} == {id(first), id(second)}
        group.barrier()
        assert ended == [receive]

    world(program, 2)


def test_several_threads_wait_at_once(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        receives = [group.recv_async(other) for _ in range(12)]

        def waits(first: int) -> list[int]:
            return [int(work.wait()[-1]) for work in receives[first::3]]

        def sends() -> None:
            for number in range(12):
                group.send_async(np.full(1 + number % 3 * LONG // 4, number), other).wait()

        threads = [lambda first=first: waits(first) for first in range(3)]
        found = on_threads(lambda number: sends() if number == 3 else threads[number](), 4)
        assert found == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11], None]

    world(program, 2)


def test_a_wait_that_gives_up_leaves_the_message_alone(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        work = group.recv_async(other)
        with pytest.raises(oa.DeadlineError, match=r"recv from rank \d was not done within 0.05 s"):
            work.wait(timeout_s=0.05)
        assert not work.done()
        group.barrier()
        group.send(np.ones(3), other)
        assert work.wait(timeout_s=20).tolist() == [1.0] * 3

    world(program, 2)


@pytest.mark.parametrize("waits", [True, False])
def test_a_message_ends_by_its_deadline_whether_or_not_someone_waits(world, waits):
    def program(group: Group) -> None:
        _meet(group)
        if group.rank == 0:
            work = group.recv_async(1, timeout_s=0.3)
            behind = group.recv_async(1)
            for _ in range(0 if waits else 1500):
                if work._ended:
                    break
                oa.sleep(0.01)
            assert work._ended is not waits
            with pytest.raises(oa.DeadlineError, match="recv from rank 1 #"):
                work.wait()
            with pytest.raises(oa.DeadlineError, match="recv from rank 1 #"):
                behind.wait()
            raise oa.DeadlineError("as expected")
        oa.sleep(2.0)
        group.barrier()

    first, second = world.outcomes(program, 2)
    assert isinstance(first, oa.DeadlineError), first
    assert str(first) == "as expected"
    assert isinstance(second, oa.DeadlineError), second


def test_the_time_of_a_message_begins_with_its_turn(world):
    def program(group: Group) -> None:
        _meet(group)
        if group.rank == 0:
            first, second = group.recv_async(1, timeout_s=20), group.recv_async(1, timeout_s=1.5)
            assert first.wait()[0] == 1
            assert second.wait()[0] == 2
        else:
            oa.sleep(2.0)
            group.send(np.full(2, 1), 0)
            group.send(np.full(2, 2), 0)

    world(program, 2)


def test_an_out_that_does_not_fit_is_a_mismatch_on_both_ranks(world):
    def program(group: Group) -> None:
        _meet(group)
        if group.rank == 0:
            group.send_async(np.ones(3), 1).wait()
            group.recv(1)
        else:
            out = np.zeros(4)
            try:
                group.recv_async(0, out=out).wait()
            finally:
                assert (out == 0).all()

    errors = world.outcomes(program, 2)
    assert [type(error) for error in errors] == [oa.CollectiveMismatchError] * 2, errors
    assert "rank 0 sent float64[3], but out= is float64[4]" in str(errors[0])


@pytest.mark.alone
@pytest.mark.parametrize("count", [3, LONG])
def test_ranks_that_wait_in_a_circle_are_found(world, count):
    def program(group: Group) -> None:
        after, before = (group.rank + 1) % 3, (group.rank - 1) % 3
        group.sendrecv(np.ones(1), after, before)
        if group.rank == 0:
            group.recv_async(before).wait()
        elif group.rank == 1:
            work = group.recv_async(before)
            group.recv_async(after)
            work.wait()
        else:
            group.recv(before)
        group.send(np.ones(count), after)

    started = time.monotonic()
    errors = world.outcomes(program, 3)
    assert [type(error) for error in errors] == [oa.DeadlockError] * 3, errors
    assert time.monotonic() - started < 15
    assert "recv from rank" in str(errors[0])


@pytest.mark.alone
def test_a_message_that_may_still_come_hides_no_progress(world):
    def program(group: Group) -> None:
        """Ranks 0 and 1 wait for each other, but a callback of rank 0 is on its way."""
        group.all_gather(np.ones(1))
        if group.rank == 0:
            first = group.recv_async(2)
            first.wait()
            again = group.recv_async(2)
            again.add_done_callback(lambda _: group.send(np.ones(1), 1))
            assert group.recv(1)[0] == 5
        elif group.rank == 1:
            group.recv(0)
            group.send(np.full(1, 5), 0)
        else:
            group.send(np.ones(1), 0)
            oa.sleep(2.0)
            group.send(np.ones(1), 0)

    world(program, 3)


def test_a_rank_that_raises_ends_all_that_is_in_flight(world):
    works: dict[int, list[oa.Work[Any]]] = {}

    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        if group.rank == 0:
            works[0] = [group.recv_async(other), group.recv_async(other)]
            oa.sleep(0.2)
            raise KeyError("the program is broken")
        works[1] = [group.recv_async(other), group.recv_async(other)]
        for work in works[1]:
            with pytest.raises(oa.AbortedError):
                work.wait()
        raise oa.AbortedError("as expected")

    first, second = world.outcomes(program, 2)
    assert isinstance(first, KeyError)
    assert str(second) == "as expected"
    for work in works[0]:
        with pytest.raises(oa.CommError):
            work.wait(timeout_s=20)


def test_closing_waits_for_what_is_in_flight(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        _meet(group)
        receives = [group.recv_async(other) for _ in range(3)]
        sends = [group.send_async(np.full(LONG, number), other) for number in range(3)]
        group.close()
        assert all(work.done() for work in (*receives, *sends))
        assert [int(work.wait()[-1]) for work in receives] == [0, 1, 2]
        with pytest.raises(oa.ClosedError):
            group.recv_async(other)

    world(program, 2)


@pytest.mark.parametrize("backend", REAL)
def test_closed_groups_leave_no_thread_behind(backend):
    def program(group: Group) -> None:
        other = 1 - group.rank
        for _ in range(3):
            half = group.split(0)
            assert half is not None
            for _ in range(3):
                oa.wait_all([half.recv_async(other), half.send_async(np.ones(LONG), other)])
            half.close()

    must(thread_world(program, 2, backend))
    until(lambda: not [each for each in threading.enumerate() if each.name == "oneaccord-messages"])


def test_a_killed_rank_is_named_by_what_is_in_flight(nursery: Nursery):
    program = """
        group = oa.init(timeout_s=60)
        for peer in range(3):
            if peer != rank:
                group.sendrecv(np.ones(1), peer, peer)
        works = [group.recv_async(1), group.recv_async(1)] if rank == 0 else [group.recv_async(0)]
        group.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        for work in works:
            attempt(work.wait)
    """
    with nursery.ranks(program, 3) as ranks:
        raised = ranks.start().raised()
    assert {rank: (fact["type"], fact["about"]) for rank, fact in raised.items()} == {
        0: ("PeerLostError", 1),
        2: ("PeerLostError", 1),
    }


@pytest.mark.parametrize("backend", REAL)
def test_a_signal_handler_may_begin_messages_but_not_wait_inside_a_wait(backend):
    world = ThreadWorld(2, backend)
    refused: list[BaseException] = []
    begun: list[oa.Work[Any]] = []

    def other() -> None:
        with world.rank(1), oa.init(timeout_s=20) as group:
            _meet(group)
            until(lambda: refused)
            group.send(np.full(2, 7), 0)
            assert group.recv(0).tolist() == [5, 5]

    def handler(*_: Any) -> None:
        begun.append(group.send_async(np.full(2, 5), 1))
        try:
            receive.wait()
        except oa.UsageError as error:
            refused.append(error)

    thread = threading.Thread(target=other, name="rank 1")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        thread.start()
        with world.rank(0), oa.init(timeout_s=20) as group:
            _meet(group)
            receive = group.recv_async(1)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert receive.wait().tolist() == [7, 7]
            begun[0].wait()
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join(20)
    assert "a signal handler called wait() for recv from rank 1" in str(refused[0])


@pytest.mark.parametrize("backend", REAL)
def test_an_interrupt_of_a_wait_ends_the_job(backend):
    world = ThreadWorld(2, backend)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with world.rank(1), oa.init(timeout_s=20) as group:
                _meet(group)
                group.recv(0)
        except oa.CommError as error:
            errors.append(error)

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=other, name="rank 1")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt), world.rank(0), oa.init(timeout_s=20) as group:  # noqa: PT012 - both contexts
            _meet(group)
            work = group.recv_async(1)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            work.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join(20)
    assert [type(error) for error in errors] == [oa.AbortedError]
