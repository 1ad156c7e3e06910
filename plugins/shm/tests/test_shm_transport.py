"""Messages through rings: of any length, short ones and long ones in one order, and what becomes of a wait."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.transport_tools import PATIENCE_S, connected, finish, held
from support.waiting import until
from support.worlds import must, on_threads

from oneaccord.api import HEADER_BYTES, Deadline, HeaderMismatch, LinkLost, Transfer, map_shared
from oneaccord_shm import bell, kernel, order
from oneaccord_shm.segment import SLOTS

SLOT = 512 << 10
RING = SLOTS * SLOT
_random = np.random.default_rng(0).integers(0, 256, 2 * RING + (1 << 17), dtype=np.uint8)
_random.flags.writeable = False


def header(number: int) -> bytes:
    """Return a header that no other message has."""
    return number.to_bytes(8, "little") * (HEADER_BYTES // 8)


def content(number: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a payload that no other message has."""
    start = 101 * number % 65521
    return _random[start : start + nbytes]


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody look again who sleeps: a wake-up that is lost ends the test, and nothing else hides it."""
    monkeypatch.setattr(bell, "SLICE_S", 1000.0)
    monkeypatch.setattr("support.transport_tools.PATIENCE_S", 1000.0)


SIZES = [
    *(0, 1, 7, 8, 63, 64, 65, 4097),
    *(SLOT - 1, SLOT, SLOT + 1, 8 * SLOT, 8 * SLOT + 1),
    *(RING + 1, 2 * RING + 13),
]


@pytest.mark.parametrize("segment_bytes", [64 << 20, 1 << 16], ids=["default", "smallest"])
@pytest.mark.parametrize("how", ["recv", "consume"])
def test_messages_of_any_size_pass_each_other_whole(backends: Any, segment_bytes: int, how: str) -> None:
    ends = connected(backends(segment_bytes=segment_bytes, single_copy=False))

    def exchange(rank: int) -> None:
        transport, peer = ends[rank], 1 - rank
        for number, nbytes in enumerate(SIZES if segment_bytes > 1 << 20 else SIZES[:12]):
            out, into = content(2 * number + rank, nbytes), np.zeros(nbytes, np.uint8)
            sent = transport.send(peer, header(number), out.data)
            if how == "recv":
                received = transport.recv(peer, header(number), into.data)
            else:
                parts: list[tuple[int, int]] = []

                def sink(data: memoryview, offset: int, into: Any = into, parts: list[tuple[int, int]] = parts) -> None:
                    assert data.readonly
                    parts.append((offset, len(data)))
                    into[offset : offset + len(data)] = data

                received = transport.consume(peer, header(number), nbytes, sink)
            finish(transport, sent, received)
            np.testing.assert_array_equal(into, content(2 * number + peer, nbytes))
            assert received.moved == sent.moved == HEADER_BYTES + nbytes
            if how == "consume":
                assert [offset for offset, _ in parts] == [0, *np.cumsum([size for _, size in parts])][: len(parts)]
                assert all(size % 64 == 0 for _, size in parts[:-1])

    must(on_threads(exchange, 2))


def test_a_sender_runs_ahead_of_a_receiver_that_comes_late(backends: Any) -> None:
    ends = connected(backends())
    count = 0
    transfer = ends[0].send(1, header(0), content(0, 100).data)
    while transfer.done:
        count += 1
        transfer = ends[0].send(1, header(count), content(count, 100).data)
    assert count == SLOTS - 1  # one slot is free whenever no send is on its way
    with pytest.raises(TimeoutError):
        ends[0].wait([transfer], Deadline(0.05))
    for number in range(count + 1):
        into = np.zeros(100, np.uint8)
        finish(ends[1], ends[1].recv(0, header(number), into.data))
        np.testing.assert_array_equal(into, content(number, 100))
    finish(ends[0], transfer)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
@pytest.mark.parametrize("variant", ["as it is", "spin 0", "fenced", "no futex"])
def test_short_and_long_messages_keep_one_order(
    backends: Any, monkeypatch: pytest.MonkeyPatch, seed: int, variant: str
) -> None:
    """Each side chooses freely, for each message, between the mailbox and the rest."""
    if variant == "fenced":
        monkeypatch.setattr("oneaccord_shm.backend.ORDERED", False)
        monkeypatch.setattr(kernel, "register_barrier", lambda: False)
    if variant == "no futex":
        monkeypatch.setattr(kernel, "futex_wait", lambda *_: False)
    made = backends(spin_us=0 if variant in ("spin 0", "no futex") else 150, segment_bytes=1 << 20)
    assert {backend.fenced for backend in made} == {variant == "fenced" or not order.ORDERED}
    ends = connected(made)
    plan = random.Random(seed)
    capacity = len(ends[0].mailbox(1).outgoing[0])  # type: ignore[union-attr]
    sizes = [[plan.choice([0, 8, 8, 8, 100, capacity, capacity + 1, 5 << 18]) for _ in range(150)] for _ in range(2)]

    def side(rank: int) -> None:
        choose = random.Random(10 * seed + rank)
        transport, peer = ends[rank], 1 - rank
        mailbox = transport.mailbox(peer)
        assert mailbox is not None
        pending: Transfer | None = None
        for number in range(150):
            out, nbytes = content(2 * number + rank, sizes[rank][number]), sizes[peer][number]
            finish(transport, pending)
            if len(out) <= capacity and choose.random() < 0.6:
                mailbox.outgoing[mailbox.next_out][: len(out)] = out.data
                pending = mailbox.post(bytearray(header(number)), len(out))
            else:
                pending = transport.send(peer, header(number), out.data)
            into: Any = np.zeros(nbytes, np.uint8)
            if nbytes <= capacity and choose.random() < 0.6:
                received = mailbox.fetch(bytearray(header(number)), nbytes)
                while received is not None and not received.done:
                    transport.wait(
                        [each for each in (received, pending) if each is not None and not each.done], Deadline(PATIENCE_S)
                    )
                into = np.frombuffer(mailbox.incoming[mailbox.next_in], np.uint8)[:nbytes]
            else:
                finish(transport, pending, transport.recv(peer, header(number), into.data))
            np.testing.assert_array_equal(into, content(2 * number + peer, nbytes))
        finish(transport, pending)

    must(on_threads(side, 2))


def test_what_was_fetched_stays_while_the_peer_goes_on(backends: Any) -> None:
    first, second = (end.mailbox(1 - rank) for rank, end in enumerate(connected(backends())))
    assert first is not None
    assert second is not None
    unfinished = None
    posted = 0
    while unfinished is None:
        first.outgoing[first.next_out][:8] = posted.to_bytes(8, "little")
        unfinished = first.post(header(posted), 8)
        posted += 1
    assert posted == SLOTS
    assert second.fetch(header(0), 8) is None
    assert second.incoming[second.next_in][:8] == (0).to_bytes(8, "little")
    assert not unfinished.advance()  # type: ignore[attr-defined]  # the slot is still being read
    assert second.fetch(header(1), 8) is None
    assert unfinished.advance()  # type: ignore[attr-defined]
    assert second.incoming[second.next_in][:8] == (1).to_bytes(8, "little")


@pytest.mark.parametrize("how", ["recv", "recv of a long one", "consume", "fetch", "late fetch"])
def test_another_message_than_expected_is_told(backends: Any, how: str) -> None:
    ends = connected(backends())
    mailbox = ends[1].mailbox(0)
    assert mailbox is not None
    nbytes = 2 * RING if "long" in how else 8  # its first part tells
    into = np.zeros(nbytes, np.uint8)
    late = mailbox.fetch(header(1), 8) if how == "late fetch" else None
    ends[0].send(1, header(2), content(2, nbytes).data)
    receive: dict[str, Callable[[], Any]] = {
        "recv": lambda: ends[1].recv(0, header(1), into.data),
        "recv of a long one": lambda: ends[1].recv(0, header(1), into.data),
        "consume": lambda: ends[1].consume(0, header(1), 8, lambda *_: pytest.fail("it was handed over")),
        "fetch": lambda: mailbox.fetch(bytearray(header(1)), 8),
        "late fetch": lambda: finish(ends[1], late),
    }
    with pytest.raises(HeaderMismatch) as caught:
        receive[how]()
    assert (caught.value.peer, caught.value.header) == (0, header(2))
    assert not into.any()


def test_what_a_sink_raises_passes_through(backends: Any) -> None:
    ends = connected(backends())
    ends[0].send(1, header(0), content(0, 8).data)

    def sink(data: memoryview, offset: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ends[1].consume(0, header(0), 8, sink)


@pytest.mark.parametrize("spin_us", [0, 150])
def test_a_wait_ends_at_its_deadline_and_the_transfer_goes_on(backends: Any, spin_us: int) -> None:
    ends = connected(backends(spin_us=spin_us))
    into = np.zeros(100, np.uint8)
    received = ends[1].recv(0, header(0), into.data)
    with pytest.raises(TimeoutError):
        ends[1].wait([received], Deadline(0.03))
    finish(ends[0], ends[0].send(1, header(0), content(0, 100).data))
    finish(ends[1], received)
    np.testing.assert_array_equal(into, content(0, 100))


def asleep(backend: Any, count: int) -> None:
    """Wait until ``count`` threads of a rank sleep."""
    until(lambda: backend.bell.sleepers[0] >= count)


@pytest.mark.parametrize("ending", ["abort", "close"])
@pytest.mark.usefixtures("sleeping")
def test_the_end_wakes_all_who_sleep(backends: Any, ending: str) -> None:
    pair = backends(spin_us=0)
    ends = [connected(pair, channel)[1] for channel in range(3)]

    def wait(number: int) -> None:
        if number == 3:
            asleep(pair[1], 3)
            getattr(pair[1], ending)()
            return
        received = ends[number].recv(0, header(0), np.zeros(8, np.uint8).data)
        with pytest.raises(LinkLost, match=r"the job was aborted|the backend was closed") as caught:
            finish(ends[number], received)
        assert caught.value.peer == 0

    must(on_threads(wait, 4))
    for end in ends:
        with pytest.raises(LinkLost):
            end.recv(0, header(0), np.zeros(8, np.uint8).data)
    with pytest.raises(LinkLost):
        pair[1].open_transport(9).connect([0], Deadline(1))


def test_a_fetch_after_the_end_does_not_wait(backends: Any) -> None:
    pair = backends()
    mailbox = connected(pair)[1].mailbox(0)
    assert mailbox is not None
    pair[1].abort()
    with pytest.raises(LinkLost):
        mailbox.fetch(header(0), 8)


@pytest.mark.parametrize("spin_us", [0, 2000])
@pytest.mark.usefixtures("sleeping")
def test_no_wake_up_is_lost(spin_us: int, backends: Any) -> None:
    ends = connected(backends(spin_us=spin_us), 1)

    def play(rank: int) -> None:
        transport, peer, ball = ends[rank], 1 - rank, np.zeros(8, np.uint8)
        pause = random.Random(rank)
        for number in range(300):
            if number % 2 == rank:
                for _ in range(pause.randrange(3000)):
                    pass
                finish(transport, transport.send(peer, header(number), ball.data))
            else:
                finish(transport, transport.recv(peer, header(number), ball.data))

    must(on_threads(play, 2))


def test_what_comes_just_before_sleep_is_seen(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer looks for sleepers a moment before this thread counts itself among them."""
    pair = backends(spin_us=0)
    ends = connected(pair)
    change = bell.Bell._change

    def change_late(self: bell.Bell, by: int) -> None:
        if by > 0:
            ends[0].send(1, header(0), content(0, 100).data)
        change(self, by)

    monkeypatch.setattr(bell.Bell, "_change", change_late)
    monkeypatch.setattr(kernel, "futex_wait", lambda *_: pytest.fail("it sleeps although the message is there"))
    into = np.zeros(100, np.uint8)
    finish(ends[1], ends[1].recv(0, header(0), into.data))
    np.testing.assert_array_equal(into, content(0, 100))


@pytest.mark.usefixtures("sleeping")
def test_what_comes_just_after_the_last_look_ends_the_sleep(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = connected(backends(spin_us=0))
    futex_wait = kernel.futex_wait

    def wait_late(*arguments: Any) -> bool:
        ends[0].send(1, header(0), content(0, 100).data)
        return futex_wait(*arguments)

    monkeypatch.setattr(kernel, "futex_wait", wait_late)
    into = np.zeros(100, np.uint8)
    finish(ends[1], ends[1].recv(0, header(0), into.data))
    np.testing.assert_array_equal(into, content(0, 100))


@pytest.mark.usefixtures("sleeping")
def test_a_sleeping_sender_is_woken_by_who_makes_room(backends: Any) -> None:
    pair = backends(spin_us=0)
    ends = connected(pair)
    payload = content(0, 2 * RING)

    def side(rank: int) -> None:
        if rank == 0:
            finish(ends[0], ends[0].send(1, header(0), payload.data))
            return
        asleep(pair[0], 1)
        into = np.zeros(len(payload), np.uint8)
        finish(ends[1], ends[1].recv(0, header(0), into.data))
        np.testing.assert_array_equal(into, payload)

    must(on_threads(side, 2))


@pytest.mark.usefixtures("sleeping")
def test_short_messages_wake_who_sleeps_on_either_side(backends: Any) -> None:
    pair = backends(spin_us=0)
    ends = connected(pair)
    boxes: list[Any] = [end.mailbox(1 - rank) for rank, end in enumerate(ends)]
    count = SLOTS + 10

    def side(rank: int) -> None:
        if rank == 0:
            asleep(pair[1], 1)
            for number in range(count):
                finish(ends[0], boxes[0].post(header(number), 8))
            return
        finish(ends[1], boxes[1].fetch(header(0), 8))
        asleep(pair[0], 1)
        for number in range(1, count):
            finish(ends[1], boxes[1].fetch(header(number), 8))

    must(on_threads(side, 2))


def test_an_abort_just_before_sleep_is_seen(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = backends(spin_us=0)
    end = connected(pair)[1]
    change = bell.Bell._change

    def change_late(self: bell.Bell, by: int) -> None:
        if by > 0:
            pair[1].abort()
        change(self, by)

    monkeypatch.setattr(bell.Bell, "_change", change_late)
    monkeypatch.setattr(kernel, "futex_wait", lambda *_: pytest.fail("it sleeps although all is over"))
    with pytest.raises(LinkLost):
        finish(end, end.recv(0, header(0), np.zeros(8, np.uint8).data))


@pytest.mark.usefixtures("sleeping")
def test_a_long_wait_sleeps_in_the_kernel(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = connected(backends())
    sleeps: list[float] = []

    def sleep(address: int, seen: int, seconds: float) -> bool:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            ends[0].send(1, header(0), content(0, 8).data)
        return True

    monkeypatch.setattr(kernel, "futex_wait", sleep)
    finish(ends[1], ends[1].recv(0, header(0), np.zeros(8, np.uint8).data))
    assert len(sleeps) == 3
    assert min(sleeps) > 100  # as long as it may


def test_channels_do_not_mix(backends: Any) -> None:
    made = backends(3)
    numbers = [0, 1, 2, 7, 1 << 20, 1 << 31]
    ends = {number: connected(made, number) for number in numbers}
    for number in numbers:
        finish(ends[number][0], ends[number][0].send(2, header(number), content(number, 100).data))
    for number in reversed(numbers):
        into = np.zeros(100, np.uint8)
        finish(ends[number][2], ends[number][2].recv(0, header(number), into.data))
        np.testing.assert_array_equal(into, content(number, 100))


def used_bytes(backend: Any) -> int:
    """Return how much memory a rank's segment takes."""
    return os.fstat(backend._segments[backend.rank].fd).st_blocks * 512


def test_channels_that_are_closed_leave_nothing(backends: Any) -> None:
    made = backends(segment_bytes=1 << 20, single_copy=False)
    before = [used_bytes(backend) for backend in made], held("oneaccord-shm")
    for channel in range(3):
        ends = connected(made, channel)
        sent = ends[0].send(1, header(channel), content(0, 1 << 17).data)
        finish(ends[1], ends[1].recv(0, header(channel), np.zeros(1 << 17, np.uint8).data))
        finish(ends[0], sent)
        assert used_bytes(made[0]) > before[0][0] + (1 << 17)
        for end in ends:
            end.close()
        del ends, end, sent
    assert ([used_bytes(backend) for backend in made], held("oneaccord-shm")) == before


def test_a_backend_that_is_closed_leaves_nothing(backends: Any) -> None:
    descriptors, mappings = held("oneaccord-shm")
    made = backends(3)
    ends = connected(made)
    finish(ends[0], ends[0].send(1, header(0), content(0, 100).data))
    assert held("oneaccord-shm") > (descriptors, mappings)
    for backend in made:
        backend.close()
        backend.close()
        backend.abort()
    assert held("oneaccord-shm")[0] == descriptors


def test_memory_is_taken_only_where_messages_went(backends: Any) -> None:
    made = backends(8)
    ends = connected(made)
    finish(ends[0], ends[0].send(1, header(0), content(0, 100).data))
    assert used_bytes(made[0]) < 1 << 16


def test_rings_of_one_channel_stay_within_segment_bytes(backends: Any) -> None:
    limit = 1 << 20
    made = backends(4, segment_bytes=limit, single_copy=False)
    ends = connected(made)
    for peer in range(1, 4):
        ends[0].send(peer, header(0), content(0, 4 << 20).data)
        link: Any = ends[0].mailbox(peer)
        assert len(link._out_payloads) < limit // 3
    assert limit // 2 < used_bytes(made[0]) <= limit + (1 << 16)


def test_a_word_is_never_seen_half_written() -> None:
    """Sequence numbers are written and read by memoryview, in another process."""
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    words = map_shared(fd, 0, 4096).cast("Q")
    full = (1 << 64) - 1
    child = os.fork()
    if not child:
        ends = time.monotonic() + 10
        while not words[8] and time.monotonic() < ends:
            for _ in range(1000):
                words[0] = full
                words[0] = 0
        os._exit(0)
    seen = {words[0] for _ in range(100_000)}
    words[8] = 1
    os.waitpid(child, 0)
    os.close(fd)
    assert seen <= {0, full}


def test_threads_of_a_rank_use_the_directions_of_a_peer_at_once(backends: Any) -> None:
    ends = connected(backends(spin_us=0))
    count = 200

    def direction(number: int) -> None:
        rank, sends = divmod(number, 2)
        transport, peer = ends[rank], 1 - rank
        for message in range(count):
            data = np.full(1000, message % 256, np.uint8)
            if sends:
                finish(transport, transport.send(peer, header(message), data.data))
            else:
                data[:] = 0
                finish(transport, transport.recv(peer, header(message), data.data))
                assert (data == message % 256).all()

    must(on_threads(direction, 4))
