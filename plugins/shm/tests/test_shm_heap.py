"""Memory that peers read in place."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transport_tools import connected, finish

from oneaccord.api import HEADER_BYTES, Deadline
from oneaccord_shm.heap import Heap
from oneaccord_shm.segment import MOST_SLOT_BYTES, PAGE, Segment

MIB = 1 << 20


def used_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_memory_is_zeroed_aligned_and_writable_and_comes_back(backends: Any) -> None:
    backend = backends()[0]
    segment = backend._segments[0]
    first = backend.allocate(3 * MIB + 5)
    assert (len(first), first.format, first.readonly, first.ndim) == (3 * MIB + 5, "B", False, 1)
    array = np.frombuffer(first, np.uint8)
    address = array.ctypes.data
    assert address % 64 == 0
    assert not array.any()
    array[:] = 7
    full = used_bytes(segment)
    assert full >= 3 * MIB
    del first
    part = array[10:20].view()
    del array
    gc.collect()
    assert used_bytes(segment) == full
    assert (part == 7).all()
    del part
    gc.collect()
    assert used_bytes(segment) <= full - 3 * MIB
    assert [len(backend.allocate(nbytes)) for nbytes in (0, 1, PAGE, PAGE + 1)] == [0, 1, PAGE, PAGE + 1]
    again = np.frombuffer(backend.allocate(3 * MIB), np.uint8)
    assert again.ctypes.data == address
    assert not again.any()


def test_what_is_more_than_the_share_is_refused_in_words(backends: Any) -> None:
    backend = backends(heap_bytes=MIB)[0]
    kept = backend.allocate(MIB // 2)
    with pytest.raises(
        MemoryError, match=rf"{MIB} bytes .* largest free part of .* is {MIB // 2}: .*backends\.shm\.heap_bytes"
    ):
        backend.allocate(MIB)
    assert len(backend.allocate(MIB // 2)) == len(kept)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=40))
def test_parts_never_overlap_and_all_come_together_again(actions: list[tuple[bool, int]]) -> None:
    pages = 64
    segment = Segment.create(bytes(32), pages * PAGE)
    heap = Heap(segment)
    kept: list[memoryview] = []
    marks: list[bytes] = []
    try:
        for number, (takes, amount) in enumerate(actions):
            if takes:
                try:
                    kept.append(heap.allocate(amount * PAGE))
                except MemoryError:
                    assert pages - sum(len(view) for view in kept) // PAGE < amount * (len(kept) + 1)
                    continue
                assert not any(kept[-1])
                marks.append(bytes([number + 1]))
                kept[-1][:] = marks[-1] * len(kept[-1])
            elif kept:
                del kept[amount % len(kept)], marks[amount % len(marks)]
            assert all(view == mark * len(view) for view, mark in zip(kept, marks, strict=True))
        kept.clear()
        assert len(heap.allocate(pages * PAGE)) == pages * PAGE
    finally:
        segment.close()


@pytest.mark.parametrize("how", ["recv", "consume"])
@pytest.mark.parametrize(("start", "nbytes"), [(0, MOST_SLOT_BYTES + 64), (1, 3 * MIB + 77)])
def test_a_message_from_shared_memory_is_read_in_place(backends: Any, how: str, start: int, nbytes: int) -> None:
    made = backends()
    ends = connected(made)
    memory = made[0].allocate(4 * MIB)
    source = np.frombuffer(memory, np.uint8)
    source[:] = np.random.default_rng(0).integers(0, 256, len(source), dtype=np.uint8)
    before = used_bytes(made[0]._segments[0])
    header = bytes(range(HEADER_BYTES))
    sent = ends[0].send(1, header, memory.toreadonly()[start : start + nbytes])
    with pytest.raises(TimeoutError):  # before the peer has read it
        ends[0].wait([sent], Deadline(0.02))
    assert used_bytes(made[0]._segments[0]) - before <= 4 * PAGE
    into = np.zeros(nbytes, np.uint8)
    if how == "recv":
        received = ends[1].recv(0, header, into.data)
    else:
        sizes = []

        def sink(data: memoryview, offset: int) -> None:
            assert data.readonly
            sizes.append(len(data))
            into[offset : offset + len(data)] = data

        received = ends[1].consume(0, header, nbytes, sink)
    finish(ends[1], received)
    finish(ends[0], sent)
    np.testing.assert_array_equal(into, source[start : start + nbytes])
    assert received.moved == sent.moved == HEADER_BYTES + nbytes
    if how == "consume":
        assert all(size % 64 == 0 and size <= MIB for size in sizes[:-1])
    # What comes after it is not taken for it.
    after = ends[0].send(1, header, np.arange(100, dtype=np.uint8).data)
    small = np.zeros(100, np.uint8)
    finish(ends[1], ends[1].recv(0, header, small.data))
    assert after.done
    assert small.tolist() == list(range(100))


@pytest.mark.parametrize("nbytes", [8, MOST_SLOT_BYTES])
def test_what_fits_a_slot_can_be_fetched_wherever_it_comes_from(backends: Any, nbytes: int) -> None:
    made = backends()
    ends = connected(made)
    source = np.frombuffer(made[0].allocate(MIB), np.uint8)
    mailbox = ends[1].mailbox(0)
    assert mailbox is not None
    for number in range(20):
        source[:nbytes] = number
        header = number.to_bytes(HEADER_BYTES, "little")
        sent = ends[0].send(1, header, source.data[:nbytes])
        missing = mailbox.fetch(header, nbytes)
        if missing is not None:
            finish(ends[1], missing)
        assert set(mailbox.incoming[mailbox.next_in][:nbytes].tobytes()) == {number}
        finish(ends[0], sent)


def test_memory_stays_while_a_message_from_it_is_on_its_way(backends: Any) -> None:
    made = backends()
    ends = connected(made)
    memory = made[0].allocate(MIB)
    memory[:] = b"\7" * MIB
    sent = ends[0].send(1, bytes(HEADER_BYTES), memory)
    del memory
    gc.collect()
    into = np.zeros(MIB, np.uint8)
    finish(ends[1], ends[1].recv(0, bytes(HEADER_BYTES), into.data))
    assert (into == 7).all()
    finish(ends[0], sent)


def test_other_memory_of_the_same_process_is_copied(backends: Any) -> None:
    """The peer's heap is not this rank's, although both are mapped here."""
    made = backends()
    ends = connected(made)
    made[0].allocate(MIB)
    theirs = np.frombuffer(made[1].allocate(MIB), np.uint8)
    theirs[:] = 5
    sent = ends[0].send(1, bytes(HEADER_BYTES), theirs.data[: MIB // 4])
    assert sent.done
    theirs[:] = 6
    into = np.zeros(MIB // 4, np.uint8)
    finish(ends[1], ends[1].recv(0, bytes(HEADER_BYTES), into.data))
    assert (into == 5).all()


def test_arrays_outlive_the_backend(backends: Any) -> None:
    backend = backends()[0]
    array = np.frombuffer(backend.allocate(MIB), np.uint8)
    array[:] = 3
    backend.close()
    gc.collect()
    assert (array == 3).all()
    array[:] = 4
    del array
    gc.collect()
    with pytest.raises(MemoryError, match="the backend was closed"):
        backend.allocate(MIB)


def test_a_forked_child_gives_nothing_back_that_is_its_parents(backends: Any) -> None:
    array = np.frombuffer(backends()[0].allocate(MIB), np.uint8)
    array[:] = 9
    child = os.fork()
    if not child:
        del array
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == 9).all()
