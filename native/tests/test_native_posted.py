"""Receives with tags that C keeps: they end in order, are handed over in order, and cost the same however many wait."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

BACKENDS = ["shm", "tcp"]


def posted(group: Group) -> Any:
    return group._post.office._posted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kinds", [1, 1000])
def test_looks_for_each_of_many_receives_do_not_grow_with_their_number(backend, reverse, kinds):
    def program(group: Group) -> list[float]:
        looks = []
        for count in (1000, 8000):
            if group.rank == 0:
                group.recv(1, tag=10**6)
                for i in range(count):
                    group.send(np.float64(i), 1, tag=i % kinds)
            else:
                group.send(0, 0, tag=10**6 + 1)  # makes the line
                before = posted(group).looks
                works = [group.recv_async(0, tag=i % kinds) for i in range(count)]
                group.send(0, 0, tag=10**6)
                for work in reversed(works) if reverse else works:
                    work.wait()
                assert [float(work.wait()) for work in works] == list(range(count))
                looks.append((posted(group).looks - before) / count)
            if group.rank == 0:
                group.recv(1, tag=10**6 + 1)
        return looks

    few, many = must(thread_world(program, 2, backend))[1]
    assert many <= few + 3  # a lookup passes those of the same place, of which there are as many as places


def test_receives_that_are_handed_over_keep_their_order_before_later_ones():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1, tag=9)
            for i in range(6):
                group.send(np.int64(i), 1, tag=1)
        else:
            group.send(0, 0, tag=8)
            first = [group.recv_async(0, tag=1) for _ in range(2)]
            wild = group.recv_async(oa.ANY, tag=1)  # Python's, behind those of C
            assert not posted(group)
            last = [group.recv_async(0, tag=1) for _ in range(3)]
            assert last[1].cancel()
            more = group.recv_async(0, tag=1)
            group.send(0, 0, tag=9)
            got = [int(work.wait()) for work in [*first, wild, last[0], last[2], more]]
            assert got == list(range(6))
        if group.rank == 0:
            group.recv(1, tag=8)

    must(thread_world(program, 2, "shm"))


def test_receives_taken_back_from_the_middle_are_not_searched_for():
    def program(group: Group) -> None:
        if group.rank == 0:
            assert group.recv(1, tag=9) == 0
            return
        compared = 0

        def counts(self: object, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        works = [group.recv_async(0, tag=1) for _ in range(300)]
        kind = type(works[0].operations[0])
        kind.__eq__, kind.__hash__ = counts, object.__hash__  # type: ignore[method-assign]
        try:
            assert all(work.cancel() for work in works[100:200])
            assert all(work.cancel() for work in works[:100] + works[200:])
        finally:
            del kind.__eq__, kind.__hash__
        assert compared == 0
        group.send(0, 0, tag=9)

    must(thread_world(program, 2, "shm"))


def test_handles_that_c_makes_are_works_that_nothing_keeps():
    def program(group: Group) -> None:
        other = 1 - group.rank
        for shape in ((), (2, 3), (1,) * 6):
            sent = np.full(shape, group.rank)
            receive, send = group.recv_async(other, tag=3), group.send_async(sent, other, tag=3)
            assert isinstance(receive, oa.Work)
            assert isinstance(send, oa.Work)
            got = receive.wait(timeout_s=20.0)
            assert got.shape == shape
            assert (got == other).all()
            assert send.wait() is None
            status = receive.status
            assert status is not None
            assert (status.source, status.tag, status.shape, status.nbytes) == (other, 3, shape, got.nbytes)
            assert "done" in repr(receive)
            assert f"recv from rank {other}, tag 3" in repr(receive)
            assert send.status is None
            assert receive.exception() is None
        with pytest.raises(TypeError):
            type(receive)()
        out = np.empty(3)
        kept, work = weakref.ref(out), group.recv_async(other, tag=4, out=out)
        group.send(np.zeros(3), other, tag=4)
        assert work.wait() is out
        assert work.operations[0].array is out  # its form in Python, which refers back to it
        group.barrier()
        del out, work
        until = time.monotonic() + 20
        while kept() is not None and time.monotonic() < until:
            gc.collect()  # which does nothing while another thread collects
            time.sleep(0.01)
        assert kept() is None

    must(thread_world(program, 2, "shm"))


def test_many_sends_each_way_before_any_receive_is_waited_for():
    def program(group: Group) -> None:
        other = 1 - group.rank
        for _ in range(3):
            works = [group.recv_async(other, tag=tag) for tag in range(200)]
            works += [group.send_async(np.int64(tag), other, tag=tag) for tag in range(200)]
            results = oa.wait_all(works)
            assert [int(each) for each in results[:200]] == list(range(200))

    must(thread_world(program, 2, "shm"))
