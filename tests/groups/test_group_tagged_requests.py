"""Requests of messages with tags: progress, cancelling, waiting for some, and those that are started again and again."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group

LONG = 200_000
"""Elements of a message that no backend sends before its receive is known."""


def test_sixteen_requests_each_way_without_a_thread_for_each(world):
    def program(group: Group) -> int:
        other = 1 - group.rank
        for count in (8, 30_000):
            outs = [np.empty(count) for _ in range(16)]
            before = threading.active_count()
            works = [group.recv_async(other, tag=tag, out=outs[tag]) for tag in range(16)]
            works += [group.send_async(np.full(count, float(tag)), other, tag=tag) for tag in reversed(range(16))]
            more = threading.active_count() - before
            oa.wait_all(works)
            assert all((out == tag).all() for tag, out in enumerate(outs))
        return more

    more = world(program, 2)
    if world.backend in ("shm", "tcp"):
        assert max(more) <= 4


def test_requests_make_progress_while_nobody_waits(world):
    if world.backend.endswith("simulated"):
        pytest.skip("real time passes only on the computer")

    def program(group: Group) -> None:
        if group.rank == 0:
            work = group.send_async(np.arange(LONG), 1, tag=1)
            until = time.monotonic() + 15
            while not work._ended and time.monotonic() < until:  # no call of the group
                time.sleep(0.01)
            assert work._ended
        else:
            assert group.recv(0, tag=1).shape == (LONG,)

    world(program, 2)


def test_cancel_takes_back_only_what_has_met_nothing(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1, tag=2)
            group.send(np.arange(3), 1, tag=1)
            group.send(np.arange(4), 1, tag=1)
        else:
            first, second = group.recv_async(0, tag=1), group.recv_async(0, tag=1)
            third = group.recv_async(tag=oa.ANY_TAG)
            assert first.cancel()
            assert first.done()
            assert first.cancelled()
            with pytest.raises(oa.UsageError, match="taken back"):
                first.wait()
            assert not first.cancel()
            group.send(0, 0, tag=2)
            assert second.wait().tolist() == [0, 1, 2]
            assert not second.cancel()
            assert not second.cancelled()
            assert second.status.count == 3
            assert third.wait().tolist() == [0, 1, 2, 3]
            assert not group.send_async(0, 1, tag=9).cancel()
            assert group.recv(1, tag=9) == 0

    world(program, 2)


def test_wait_any_wait_some_and_as_completed_take_requests(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(1, 1, tag=1)
            group.recv(1, tag=9)
            group.send(0, 1, tag=0)
            group.send(2, 1, tag=2)
        else:
            works = [group.recv_async(0, tag=tag) for tag in range(3)]
            assert oa.wait_any(works) == 1
            assert oa.wait_some(works) == [1]
            with pytest.raises(oa.DeadlineError):
                works[0].wait(timeout_s=0.01)
            group.send(0, 0, tag=9)
            done = [int(work.wait()) for work in oa.as_completed(works)]
            assert sorted(done) == [0, 1, 2]

    world(program, 2)


def test_requests_can_be_awaited_and_call_back(world):
    if world.backend.endswith("simulated"):
        pytest.skip("event loops of several ranks share one thread pool there")

    def program(group: Group) -> None:
        other = 1 - group.rank

        async def main() -> None:
            sent = group.send_async(np.arange(LONG), other, tag=1)
            got = await group.recv_async(other, tag=1)
            assert got.shape == (LONG,)
            await sent

        asyncio.run(main())
        called = threading.Event()
        work = group.recv_async(other, tag=2)
        work.add_done_callback(lambda _: called.set())
        group.send(np.arange(3), other, tag=2)
        assert called.wait(20)

    world(program, 2)


def test_sendrecv_with_tags_and_requests_of_it(world):
    def program(group: Group) -> None:
        size, me = group.world_size, group.rank
        after, before = (me + 1) % size, (me - 1) % size
        for count in (2, LONG):
            x = np.full(count, me)
            assert (group.sendrecv(x, after, before, tag=3) == before).all()
            status = oa.Status()
            assert (group.sendrecv(x, after, oa.ANY, tag=4, recv_tag=oa.ANY_TAG, status=status) == before).all()
            assert (status.source, status.tag) == (before, 4)
            work = group.sendrecv_async(x, after, before, tag=5, out=np.empty_like(x))
            assert (work.wait() == before).all()
            assert (group.sendrecv(x, after, before, tag=6, out=x) == before).all()
            group.barrier()
        edge = np.full(2, 9)
        assert group.sendrecv(edge, None, None, tag=1, out=edge) is edge

    world(program, 3)


def test_no_rank_is_sent_nothing_and_sends_nothing(world):
    def program(group: Group) -> None:
        status = oa.Status()
        group.send(1, None, tag=1)
        group.send_object(1, None, tag=1)
        assert group.recv(None, tag=1, status=status) is None
        assert (status.source, status.count) == (None, 0)
        assert group.recv_async(None, tag=1).wait() is None
        assert group.send_async(1, None, tag=1).wait() is None

    world(program, 2)


def test_persistent_requests_are_started_again_and_again(world):
    def program(group: Group) -> None:
        other, x, out = 1 - group.rank, np.zeros(4), np.zeros(4)
        send = group.persistent_send(x, other, tag=1)
        receive = group.persistent_recv(other, tag=1, out=out)
        for turn in range(5):
            x[:] = 10 * turn + group.rank
            works = [receive.start(), send.start()]
            oa.wait_all(works)
            assert (out == 10 * turn + other).all()
        pending = receive.start()
        with pytest.raises(oa.UsageError, match="has not ended"):
            receive.start()
        assert pending.cancel()

    world(program, 2)
