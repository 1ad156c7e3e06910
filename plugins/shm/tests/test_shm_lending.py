"""Long messages that the receiver copies out of the sender's process, and what becomes of one whose sender fails meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

import numpy as np
import pytest
from support.transport_tools import connected, finish
from support.worlds import must, on_threads

from oneaccord.api import HEADER_BYTES, LinkLost, Transfer, Transport
from oneaccord_shm import kernel
from oneaccord_shm.lender import Lender, can_lend, measured_bytes
from oneaccord_shm.segment import PAGE, Segment

MIB = 1 << 20
HEADER = bytes(range(HEADER_BYTES))
LENT_BYTES = 16 * MIB
SIZES = [LENT_BYTES, LENT_BYTES + MIB + 13]


def used_bytes(backend: Any) -> int:
    return os.fstat(backend._segments[backend.rank].fd).st_blocks * 512


def receive(end: Transport, how: str, into: Any) -> Transfer:
    def sink(data: memoryview, offset: int) -> None:
        assert data.readonly
        into[offset : offset + len(data)] = data

    return end.recv(0, HEADER, into.data) if how == "recv" else end.consume(0, HEADER, len(into), sink)


@pytest.mark.parametrize("how", ["recv", "consume"])
def test_a_long_message_is_copied_where_it_lies(backends: Any, how: str) -> None:
    made = backends()
    ends = connected(made)
    before = used_bytes(made[0])
    for number, nbytes in enumerate(SIZES):
        source = np.arange(number, number + nbytes // 4 + 1, dtype=np.uint32).view(np.uint8)[:nbytes]
        into = np.zeros(nbytes, np.uint8)
        sent = ends[0].send(1, HEADER, source.data.toreadonly())
        assert not sent.done  # until the peer has read it
        received = receive(ends[1], how, into)
        finish(ends[1], received)
        finish(ends[0], sent)
        assert sent.moved == received.moved == HEADER_BYTES + nbytes
        np.testing.assert_array_equal(into, source)
    assert used_bytes(made[0]) - before <= 4 * PAGE  # nothing passed through slots


@pytest.mark.parametrize("nbytes", [(128 << 10) + 1, 512 << 10, (512 << 10) + 1])
def test_a_message_that_is_not_reduced_is_lent_from_128_kib_on(backends: Any, nbytes: int) -> None:
    made = backends(single_copy_bytes=128 << 10)
    ends = connected(made)
    for size, copied in ((128 << 10, True), (nbytes, False)):
        before = used_bytes(made[0])
        source = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
        into = np.zeros(size, np.uint8)
        sent = ends[0].lend(1, HEADER, source.data)
        finish(ends[1], ends[1].recv(0, HEADER, into.data))
        finish(ends[0], sent)
        np.testing.assert_array_equal(into, source)
        assert (used_bytes(made[0]) - before >= size) == copied


def test_a_message_that_may_be_reduced_passes_through_slots_if_it_fits(backends: Any) -> None:
    made = backends(single_copy_bytes=128 << 10)
    ends = connected(made)
    source = np.ones(512 << 10, np.uint8)
    assert ends[0].send(1, HEADER, source.data).done
    into = np.zeros_like(source)
    finish(ends[1], receive(ends[1], "consume", into))
    np.testing.assert_array_equal(into, source)


def test_the_largest_threshold_of_all_ranks_counts(backends: Any) -> None:
    made = backends(own={1: {"single_copy_bytes": 1 << 20}}, single_copy_bytes=1 << 16)
    boxes = [end.mailbox(1 - rank) for rank, end in enumerate(connected(made))]
    assert [box is not None and box.posted_bytes for box in boxes] == [1 << 20, 1 << 20]


def test_where_the_system_copies_slowly_short_messages_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    read = kernel.read_process

    def slowly(*arguments: Any) -> bool:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return read(*arguments)

    monkeypatch.setattr(kernel, "read_process", slowly)
    assert measured_bytes() == 16 * MIB
    monkeypatch.setattr(kernel, "read_process", lambda *_: False)
    assert measured_bytes() == 16 * MIB


def test_memory_that_the_system_does_not_fill_is_filled_by_the_receiver(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backends()
    ends = connected(made)
    read = kernel.read_process
    monkeypatch.setattr(kernel, "read_process", lambda pid, *parts: len(parts[0][1]) <= 64 << 10 and read(pid, *parts))
    source = np.arange(LENT_BYTES + 16, dtype=np.uint32).view(np.uint8)[: LENT_BYTES + 13]
    into = np.zeros_like(source)
    sent = ends[0].send(1, HEADER, source.data)
    finish(ends[1], ends[1].recv(0, HEADER, into.data))
    finish(ends[0], sent)
    np.testing.assert_array_equal(into, source)


@pytest.mark.parametrize("unwilling", [0, 1])
def test_either_rank_can_do_without(backends: Any, unwilling: int) -> None:
    made = backends(own={unwilling: {"single_copy": False}})
    ends = connected(made)
    source = np.arange(LENT_BYTES, dtype=np.uint8)
    into = np.zeros_like(source)
    before = used_bytes(made[0])
    ways = [lambda: ends[0].send(1, HEADER, source.data), lambda: receive(ends[1], "recv", into)]
    must(on_threads(lambda rank: finish(ends[rank], ways[rank]()), 2))
    np.testing.assert_array_equal(into, source)
    assert used_bytes(made[0]) - before >= 4 * MIB


@pytest.mark.parametrize("how", ["recv", "consume"])
@pytest.mark.parametrize("where", ["heap", "process"])
def test_what_a_failed_sender_has_in_its_memory_is_not_taken_for_its_message(backends: Any, how: str, where: str) -> None:
    made = backends()
    ends = connected(made)
    source = np.frombuffer(made[0].allocate(3 * MIB), np.uint8) if where == "heap" else np.zeros(LENT_BYTES, np.uint8)
    sent = ends[0].send(1, HEADER, source.data)
    into = np.ones(len(source), np.uint8)
    made[0].abort()  # what core does before the sender's call raises
    source[:] = 7  # what its program may do then
    with pytest.raises(LinkLost, match="rank 0 failed or died while this rank read its memory") as caught:
        finish(ends[1], receive(ends[1], how, into))
    assert caught.value.peer == 0
    assert not sent.done


def test_a_process_that_got_the_number_of_another_is_not_read() -> None:
    token = os.urandom(32)
    segment = Segment.create(token, PAGE)
    try:
        at = kernel.address_of(segment.page())
        assert Lender(os.getpid(), at, token, segment).may_borrow
        assert not Lender(os.getpid(), at, os.urandom(32), segment).may_borrow
        assert not Lender(os.getpid(), 0, token, segment).may_borrow
        assert not Lender(1 << 22, at, token, segment).may_borrow
    finally:
        segment.close()


def test_memory_that_the_system_does_not_read_is_not_lent() -> None:
    with mmap.mmap(-1, 4 * PAGE) as memory:
        view = memoryview(memory)
        assert can_lend(view)
        at = kernel.address_of(view) + 3 * PAGE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), PAGE, 0) == 0
        assert not can_lend(view)
        assert can_lend(view[: 3 * PAGE])
        view.release()
