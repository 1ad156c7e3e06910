"""Messages with tags: order, wildcards, probes, modes, requests, and messages that do not fit."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group, Transport
from oneaccord_shm.backend import ShmTransport

LONG = 200_000
"""Elements of a message that no backend sends before its receive is known."""
SIZES = (0, 1, 100, 160, 161, 5000, 8100, 20_000, LONG)


def test_tags_and_sources_choose_the_message(world):
    def program(group: Group) -> None:
        if group.rank:
            group.send(np.full(3, group.rank), 0, tag=group.rank)
            group.send(np.full(LONG, -group.rank), 0, tag=10)
            return
        status = oa.Status()
        assert group.recv(2, tag=2).tolist() == [2, 2, 2]
        assert group.recv(1, tag=oa.ANY_TAG, status=status).tolist() == [1, 1, 1]
        assert (status.source, status.tag, status.count, status.nbytes, status.dtype) == (1, 1, 3, 24, np.int64)
        found = set()
        for _ in range(2):
            array = group.recv(tag=10, status=status)
            assert array.shape == status.shape == (LONG,)
            assert (array == -status.source).all()
            found.add(status.source)
        assert found == {1, 2}

    world(program, 3)


def test_messages_of_every_size_come_whole_into_new_memory_and_out(world):
    def program(group: Group) -> None:
        for count in SIZES:
            for dtype in (np.uint8, np.float64):
                if group.rank == 0:
                    group.send(np.arange(count).astype(dtype), 1, tag=count)
                    group.send(np.arange(count).astype(dtype), 1, tag=count)
                else:
                    assert np.array_equal(group.recv(0, tag=count), np.arange(count).astype(dtype))
                    out = np.full(count + 5, 7, dtype)
                    assert group.recv(0, tag=count, out=out) is out
                    assert np.array_equal(out[:count], np.arange(count).astype(dtype))
                    assert (out[count:] == 7).all()

    world(program, 2)


def test_dtype_and_shape_travel_with_the_message(world):
    point = np.dtype([("x", "f8"), ("kind", "i2", (2,))])
    arrays = [
        np.float32(3),
        np.arange(6, dtype=np.complex64).reshape(2, 1, 3),
        np.zeros((3, 0, 2), bool),
        np.array([(1.5, (2, 3)), (2.5, (4, 5))], point),
        np.arange(24).reshape(4, 6)[:, ::2],
        np.arange(8, dtype=np.int32).reshape([2, *[1] * 29, 2, 2]),
    ]

    def program(group: Group) -> None:
        for tag, array in enumerate(arrays):
            if group.rank == 0:
                group.send(array, 1, tag=tag)
            else:
                got = group.recv(0, tag=tag)
                assert got.dtype == array.dtype
                assert got.shape == array.shape
                assert np.array_equal(got, array)

    world(program, 2)


def test_out_that_is_not_contiguous_takes_the_message(world):
    def program(group: Group) -> None:
        for count in (4, LONG):
            if group.rank == 0:
                group.send(np.arange(count), 1, tag=0)
            else:
                base = np.full((count, 2), -1)
                out = base[:, 1]
                assert group.recv(0, tag=0, out=out) is out
                assert np.array_equal(out, np.arange(count))
                assert (base[:, 0] == -1).all()

    world(program, 2)


def test_messages_do_not_overtake_each_other(world):
    def program(group: Group) -> None:
        numbers = list(range(60))
        if group.rank == 0:
            oa.wait_all([group.send_async(np.full(SIZES[n % len(SIZES)] + 1, n), 1, tag=n % 3) for n in numbers])
        else:
            came = [int(group.recv(0, tag=oa.ANY_TAG)[0]) for _ in numbers[:30]]
            assert came == numbers[:30]
            for tag in (2, 0, 1):
                rest = [int(group.recv(oa.ANY, tag=tag)[0]) for _ in range(10)]
                assert rest == [number for number in numbers[30:] if number % 3 == tag]

    world(program, 2)


def test_large_before_small_in_the_other_order(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            works = [group.send_async(np.arange(LONG), 1, tag=1), group.send_async(np.arange(3), 1, tag=2)]
            oa.wait_all(works)
        else:
            assert group.recv(0, tag=2).tolist() == [0, 1, 2]
            assert np.array_equal(group.recv(0, tag=1), np.arange(LONG))

    world(program, 2)


def test_a_receive_posted_first_meets_the_message_that_comes_first(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv(1, tag=9)
            for number in range(4):
                group.send(np.full(2, number), 1, tag=5)
        else:
            receives = [
                group.recv_async(0, tag=5),
                group.recv_async(oa.ANY, tag=5),
                group.recv_async(0, tag=oa.ANY_TAG),
                group.recv_async(tag=oa.ANY_TAG),
            ]
            group.send(1, 0, tag=9)
            assert [int(work.wait()[0]) for work in reversed(receives)] == [3, 2, 1, 0]

    world(program, 2)


@pytest.mark.parametrize("size", [1, 3])
def test_messages_to_oneself(world, size):
    def program(group: Group) -> None:
        me = group.rank
        receive = group.recv_async(me, tag=1)
        group.send(np.arange(4), me, tag=1)
        group.send(np.arange(LONG), me, tag=2, mode="buffered")
        group.send_object({"a": [1]}, me, tag=3)
        sync = group.send_async(np.arange(5), me, tag=4, mode="sync")
        assert not sync.done()
        assert group.recv_object(tag=3) == {"a": [1]}
        assert np.array_equal(group.recv(oa.ANY, tag=2), np.arange(LONG))
        assert receive.wait().tolist() == [0, 1, 2, 3]
        assert group.recv(me, tag=4).tolist() == [0, 1, 2, 3, 4]
        sync.wait()
        x = np.arange(3)
        assert group.sendrecv(x, me, me, tag=7, out=x[::-1]).tolist() == [0, 1, 2]

    world(program, size)


def test_what_does_not_fit_is_lost_and_the_group_goes_on(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            for count in (10, 5000, LONG):
                group.send(np.arange(count), 1, tag=1)
                group.send(np.arange(count), 1, tag=1)
                group.send(np.arange(count), 1, tag=1)
                group.send_object(list(range(count)), 1, tag=1)
            group.send(7, 1, tag=2)
        else:
            for count in (10, 5000, LONG):
                short = np.full(count - 1, -1)
                with pytest.raises(oa.SizeMismatchError, match=rf"int64\[{count}\].*tag 1.*room for {count - 1}"):
                    group.recv(0, tag=1, out=short)
                assert (short == -1).all()
                with pytest.raises(oa.DTypeError, match="float64"):
                    group.recv_async(0, tag=1, out=np.zeros(count)).wait()
                with pytest.raises(oa.DTypeError, match="recv"):
                    group.recv_object(0, tag=1)
                with pytest.raises(oa.DTypeError, match="recv_object"):
                    group.recv(0, tag=1)
            assert group.recv(0, tag=2) == 7

    world(program, 2)


def test_objects_travel_in_one_message(world):
    values = [None, {"a": 1}, ["x" * 5000], {"array": np.arange(LONG)}, b""]

    def program(group: Group) -> None:
        status = oa.Status()
        for tag, value in enumerate(values):
            if group.rank == 0:
                group.send_object(value, 1, tag=tag)
                group.send_object_async(value, 1, tag=tag).wait()
            else:
                for got in (
                    group.recv_object(0, tag=tag, status=status),
                    group.recv_object_async(tag=oa.ANY_TAG).wait(),
                ):
                    assert str(got) == str(value)
                assert (status.source, status.tag, status.count, status.dtype) == (0, tag, 1, None)
        if group.rank == 0:
            group.send_object(5, 1, tag=1)
        else:
            with pytest.raises(oa.UsageError, match="str"):
                group.recv_object(0, tag=1, type=str)

    world(program, 2)


def test_probes_find_messages_and_leave_them(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            assert group.recv(1, tag=1) == 1
            group.send(np.arange(5, dtype=np.int16), 1, tag=3)
            group.send_async(np.arange(LONG), 1, tag=4).wait()
        else:
            assert group.iprobe() is None
            group.send(1, 0, tag=1)
            status = group.probe(oa.ANY, 3)
            assert (status.source, status.tag, status.count, status.shape, status.dtype) == (0, 3, 5, (5,), np.int16)
            assert group.iprobe(0, 3).count == 5
            assert group.probe(0).tag == 3
            out = np.empty(status.shape, status.dtype)
            assert group.recv(status.source, tag=status.tag, out=out).tolist() == [0, 1, 2, 3, 4]
            status = group.probe()
            assert (status.tag, status.count) == (4, LONG)
            assert group.iprobe(tag=3) is None
            assert np.array_equal(group.recv(0, tag=4), np.arange(LONG))

    world(program, 2)


def test_a_taken_message_is_received_by_its_taker_alone(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            for count in (2, LONG):
                oa.wait_all([group.send_async(np.full(count, number), 1, tag=3) for number in (1, 2)])
            group.send_object("o", 1, tag=4)
            group.recv(1, tag=1)
        else:
            assert group.take_now(0, 99) is None
            for count in (2, LONG):
                first = group.take(oa.ANY, 3)
                assert first.status.count == count
                assert group.recv(0, tag=3)[0] == 2
                assert first.recv()[0] == 1
                with pytest.raises(oa.UsageError, match="only once"):
                    first.recv()
            taken = group.take(tag=4)
            with pytest.raises(oa.DTypeError, match="recv_object"):
                taken.recv()
            group.send(1, 0, tag=1)

    world(program, 2)


def test_a_synchronous_send_ends_when_it_has_met_its_receive(world):
    def program(group: Group) -> None:
        for count in (3, 6000, LONG):
            if group.rank == 0:
                work = group.send_async(np.arange(count), 1, tag=1, mode="sync")
                group.send_object(0, 1, tag=2)
                assert group.recv(1, tag=3) == 0
                assert not work.done()
                group.send(0, 1, tag=4)
                work.wait()
                group.send(np.arange(count), 1, tag=5, mode="sync")
            else:
                group.recv_object(0, tag=2)
                group.send(0, 0, tag=3)
                group.recv(0, tag=4)
                assert group.recv(0, tag=1).shape == (count,)
                assert group.recv(0, tag=5).shape == (count,)

    world(program, 2)


def test_a_buffered_send_returns_at_once_and_copies(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            x = np.arange(LONG)
            group.send(x, 1, tag=1, mode="buffered")
            group.send_object([1], 1, tag=1, mode="buffered")
            x[:] = 0
            group.barrier()
        else:
            group.barrier()
            assert np.array_equal(group.recv(0, tag=1), np.arange(LONG))
            assert group.recv_object(0, tag=1) == [1]

    world(program, 2)


def test_a_ready_send_needs_its_receive(world):
    def fine(group: Group) -> None:
        for count in (3, LONG):
            if group.rank == 0:
                group.recv(1, tag=2)
                group.send(np.arange(count), 1, tag=1, mode="ready")
            else:
                work = group.recv_async(0, tag=1)
                group.send(0, 0, tag=2)
                assert work.wait().shape == (count,)

    def early(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(3), 1, tag=1, mode="ready")
            group.send(0, 1, tag=2)
        else:
            group.recv(0, tag=2)
        group.barrier()

    world(fine, 2)
    errors = world.outcomes(early, 2)
    assert all(isinstance(error, oa.CollectiveMismatchError) for error in errors), errors
    assert "mode='ready'" in str(errors[1])


def test_groups_do_not_mix_their_messages(world):
    def program(group: Group) -> None:
        with group.split(0, -group.rank) as reversed_group:
            if group.rank == 0:
                group.send(1, 1, tag=1)
                reversed_group.send(2, reversed_group.world_size - 2, tag=1)
                group.send(3, 1)
            elif group.rank == 1:
                status = oa.Status()
                assert group.recv(0) == 3
                assert reversed_group.recv(tag=1, status=status) == 2
                assert status.source == reversed_group.world_size - 1
                assert group.recv(oa.ANY, tag=oa.ANY_TAG, status=status) == 1
                assert status.source == 0
            group.barrier()

    world(program, 3)


def test_a_message_may_come_before_the_receiver_has_made_the_group(world):
    def program(group: Group) -> None:
        if group.rank == 1:
            group.send(np.arange(3), 0, tag=1)
        child = group.subgroup([0, 1])
        if group.rank == 1:
            child.send(np.arange(4), 0, tag=1)
        elif group.rank == 0:
            assert child.recv(1, tag=1).shape == (4,)
            assert group.recv(1, tag=1).shape == (3,)
        child.close()

    world(program, 2)


def test_arguments_are_checked_before_anything_is_sent(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        for tag in (-1, 1.5, "a", True, 1 << 63):
            with pytest.raises(oa.UsageError, match="tag"):
                group.send(1, other, tag=tag)
            with pytest.raises(oa.UsageError, match="tag"):
                group.recv(other, tag=tag)
        for call in (
            group.recv,
            lambda: group.recv(oa.ANY),
            group.recv_async,
            group.recv_object,
            lambda: group.send(1, other, mode="sync"),
            lambda: group.recv(other, status=oa.Status()),
            lambda: group.sendrecv(1, other, oa.ANY),
        ):
            with pytest.raises(oa.UsageError, match="needs a tag"):
                call()
        with pytest.raises(oa.UsageError, match="mode must be one of"):
            group.send(1, other, tag=1, mode="fast")
        with pytest.raises(oa.UsageError, match=r"oneaccord\.Status"):
            group.recv(other, tag=1, status={})
        with pytest.raises(oa.InvalidRankError):
            group.send(1, 7, tag=1)
        with pytest.raises(oa.InvalidRankError):
            group.probe(7)
        with pytest.raises(oa.UsageError, match="cannot send"):
            group.send_object(object(), other, tag=1)
        with pytest.raises(oa.LayoutError):
            group.recv(other, tag=1, out=[1, 2])
        read_only = np.zeros(2)
        read_only.flags.writeable = False
        with pytest.raises(oa.LayoutError):
            group.recv(other, tag=1, out=read_only)
        for call in (group.recv, group.recv_async):  # at once: a message that came would be lost
            with pytest.raises(oa.DTypeError, match="byte order"):
                call(other, tag=1, out=np.zeros(2, ">f8"))
        assert group.sendrecv(group.rank, other, other, tag=1) == other

    world(program, 2)


def test_threads_of_a_rank_receive_side_by_side(world):
    turns = 5 if world.backend.endswith("simulated") else 40

    def program(group: Group) -> None:
        other, errors = 1 - group.rank, []

        def talk(tag: int) -> None:
            try:
                for turn in range(turns):
                    count = SIZES[turn % len(SIZES)] + 1
                    if (tag + group.rank) % 2:
                        group.send(np.full(count, turn), other, tag=tag)
                        assert group.recv(other, tag=tag)[0] == turn
                    else:
                        assert group.recv(oa.ANY, tag=tag)[0] == turn
                        group.send(np.full(count, turn), other, tag=tag)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    world(program, 2)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_ends_as_mpi_says(world, seed):
    """Every rank sends and receives in an order of its own; each message must meet the receive that the rules say."""

    def program(group: Group) -> None:
        rank, size = group.rank, group.world_size
        plan = random.Random(seed)
        messages = [(plan.randrange(size), plan.randrange(size), plan.randrange(3), plan.choice(SIZES)) for _ in range(120)]
        sends = [(number, *message[1:]) for number, message in enumerate(messages) if message[0] == rank]
        expected = [(number, *message) for number, message in enumerate(messages) if message[1] == rank]
        own = random.Random(1000 * seed + rank)
        works: list = []
        receives: list = []

        def send_one() -> None:
            number, dest, tag, count = sends.pop(0)
            works.append(group.send_async(np.full(count + 1, number), dest, tag=tag, mode=own.choice(["standard", "sync"])))

        def receive_one() -> None:
            _, source, _, tag, _ = expected.pop(own.randrange(len(expected)))
            receives.append((source, tag, group.recv_async(source, tag=tag)))

        while sends or expected:
            choices = [send_one] * bool(sends) + [receive_one] * bool(expected)
            own.choice(choices)()
        oa.wait_all(works)
        got: dict[tuple[int, int], list[int]] = {}
        for source, tag, work in receives:
            array = work.wait()
            assert (array == array[0]).all()
            assert array.size == messages[array[0]][3] + 1
            got.setdefault((source, tag), []).append(int(array[0]))
        for (source, tag), numbers in got.items():
            sent = [number for number, (a, b, t, _) in enumerate(messages) if (a, b, t) == (source, rank, tag)]
            assert numbers == sent

    world(program, 3)


def test_transports_without_poll_and_interrupt_serve_as_well(monkeypatch):
    monkeypatch.setattr(ShmTransport, "poll", Transport.poll)
    monkeypatch.setattr(ShmTransport, "interrupt", Transport.interrupt)

    def program(group: Group) -> None:
        other, errors = 1 - group.rank, []

        def talk(tag: int) -> None:
            try:
                for turn in range(10):
                    assert group.iprobe(tag=99) is None
                    if (tag + group.rank) % 2:
                        group.send(np.full(SIZES[turn % len(SIZES)] + 1, turn), other, tag=tag)
                    assert group.recv(oa.ANY, tag=tag)[0] == turn
                    if not (tag + group.rank) % 2:
                        group.send_async(np.full(SIZES[turn % len(SIZES)] + 1, turn), other, tag=tag).wait()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    must(thread_world(program, 2, "shm"))
