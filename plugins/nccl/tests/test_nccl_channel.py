"""A channel: the order of streams, events, groups, graphs, the current device, refusals, and what is left after closing."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from support.bootstraps import ThreadBootstrap
from support.fake_gpu import fake_cuda, fake_cupy

from oneaccord.api import Collective, Deadline, DeviceCall, DeviceFailure, DeviceMeeting, UnsupportedError

F4 = np.dtype("f4")
SUM = DeviceCall(Collective.ALL_REDUCE, F4, 4, op="sum")


def ones(rank):
    return rank.put(np.full(4, rank.number + 1, "f4"))


def test_the_streams_own_calls_wait_for_the_callers_work_and_the_caller_for_them(world):
    def body(rank):
        launch, channel = rank.channel.prepare(SUM), rank.channel
        array = rank.empty(4, F4)
        with fake_cupy.held(0):
            array.array.view(np.float32)[:] = np.float32(rank.number + 1)  # queued behind the point where the stream is held
            channel.record(0).hold(channel.stream)
            rank.run(launch, array, array, channel.stream)
            after = channel.record(channel.stream)
            after.hold(0)
            early = after.done()
        result = array.get()  # on the caller's stream
        return early, result.tolist(), after.done()

    assert world(body, 2) == [(False, [3.0] * 4, True)] * 2


def test_a_call_on_the_callers_stream_needs_no_event(world):
    def body(rank):
        with fake_cupy.cuda.Stream(non_blocking=True) as stream:
            array = ones(rank)
            rank.run(rank.channel.prepare(SUM), array, array, stream.ptr)
            return array.get().tolist()

    assert world(body, 3) == [[6.0] * 4] * 3


def test_a_launch_does_not_wait_for_the_device(world):
    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)  # connects
        with fake_cupy.held(0):
            rank.run(launch, array, array)
            done = rank.channel.record(0).done()
        return done, array.get().tolist()

    assert world(body, 2) == [(False, [6.0] * 4)] * 2


def test_events_are_used_again(world, monkeypatch):
    create, made = fake_cuda.event_create, []
    monkeypatch.setattr(fake_cuda, "event_create", lambda: made.append(create()) or made[-1])

    def body(rank):
        for _ in range(100):
            rank.channel.record(0).hold(rank.channel.stream)
        kept = [rank.channel.record(0) for _ in range(3)]
        return len(kept)

    assert world(body, 1) == [3]
    assert len(made) == 3


def test_an_event_that_is_kept_is_not_recorded_elsewhere(world):
    def body(rank):
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        first = rank.channel.record(0)
        with fake_cupy.held(stream.ptr):
            second = rank.channel.record(stream.ptr)
            fake_cuda.stream_synchronize(0)
            return first.done(), second.done()

    assert world(body, 1) == [(True, False)]


def test_closing_gives_back_streams_events_and_communicators(world, nccl):
    def held_things():
        return len(fake_cuda._machine.streams), len(fake_cuda._machine.events)

    before = held_things()

    def body(rank):
        array = ones(rank)
        rank.run(rank.channel.prepare(SUM), array, array, rank.channel.stream)
        kept = rank.channel.record(rank.channel.stream)
        rank.channel.record(0).hold(rank.channel.stream)
        fake_cuda.stream_synchronize(rank.channel.stream)
        rank.channel.close()
        rank.channel.close()
        return kept

    assert len(world(body, 2)) == 2
    assert (held_things(), nccl.open_communicators()) == (before, 0)


def test_a_closed_channel_refuses_launches(world):
    def body(rank):
        launch = rank.channel.prepare(SUM)
        rank.channel.close()
        with pytest.raises(DeviceFailure) as caught:
            launch(0, 0, 0)
        return str(caught.value)

    assert world(body, 1) == ["NCCL 2.32.3: the communicator cannot be used any more: it was closed"]


@pytest.mark.parametrize("size", [1, 2])
def test_calls_work_while_another_device_is_current_and_leave_it_so(world, size):
    def body(rank):
        launch, array = rank.channel.prepare(SUM), ones(rank)
        fake_cuda.stream_synchronize(0)
        fake_cuda.set_device(3)
        default = rank.channel.record(0)  # the default stream of the channel's device
        rank.run(launch, array, array, rank.channel.stream)
        after = rank.channel.record(rank.channel.stream)
        after.hold(0)
        assert not rank.channel.is_capturing(rank.channel.stream)
        default.hold(rank.channel.stream)
        left = fake_cuda.get_device()
        fake_cuda.set_device(rank.channel.device)
        return left, array.get().tolist()

    assert world(body, size) == [(3, [sum(range(size + 1))] * 4)] * size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_calls_on_the_default_stream_are_on_that_of_the_groups_device(world, size, grouped):
    def body(rank):
        launch, array = rank.channel.prepare(SUM), rank.empty(4, F4)
        with fake_cupy.held(0):
            array.array.view(np.float32)[:] = np.float32(1)  # queued behind the point where the stream is held
            fake_cuda.set_device(3)
            with rank.channel.together() if grouped else contextlib.nullcontext():
                rank.run(launch, array, array, 0)
            fake_cuda.set_device(rank.channel.device)
        return array.get().tolist()

    assert world(body, size) == [[float(size)] * 4] * size


def test_a_group_is_enqueued_as_one_at_its_end(world, nccl):
    def body(rank):
        launch, arrays = rank.channel.prepare(SUM), [ones(rank) for _ in range(5)]
        with rank.channel.together():
            for array in arrays:
                rank.run(launch, array, array)
        return [array.get().tolist() for array in arrays]

    assert world(body, 2) == [[[3.0] * 4] * 5] * 2
    assert [call for call in nccl.calls if call[0] == "group_end"] == [("group_end", 5)] * 2


def test_uneven_calls_may_be_part_of_a_group(world, nccl):
    def body(rank):
        counts = (1, 3)
        gather = rank.channel.prepare(DeviceCall(Collective.ALL_GATHER, F4, counts[rank.number], counts=counts))
        source, target, array = rank.put(np.full(counts[rank.number], rank.number, "f4")), rank.empty(4, F4), ones(rank)
        with rank.channel.together():
            rank.run(gather, source, target)
            rank.run(rank.channel.prepare(SUM), array, array)
        return target.get().tolist(), array.get().tolist()

    assert world(body, 2) == [([0.0, 1.0, 1.0, 1.0], [3.0] * 4)] * 2
    assert [call for call in nccl.calls if call[0] == "group_end"] == [("group_end", 3)] * 2


def test_an_error_of_the_program_within_a_group_ends_the_group(world):
    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)

        def program():
            with rank.channel.together():
                rank.run(launch, array, array)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            program()
        rank.run(launch, array, array)  # not part of a group any more
        return array.get().tolist()

    assert world(body, 2) == [[6.0] * 4] * 2


def test_a_captured_call_runs_each_time_the_graph_is_launched(world):
    def body(rank):
        launch, array = rank.channel.prepare(SUM), ones(rank)
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        fake_cuda.stream_synchronize(0)
        rank.run(launch, array, array, stream.ptr)
        stream.begin_capture()
        during = rank.channel.is_capturing(stream.ptr)
        rank.run(launch, array, array, stream.ptr)
        graph = stream.end_capture()
        before = rank.channel.is_capturing(stream.ptr)
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        return during, before, array.get().tolist()

    assert world(body, 2) == [(True, False, [12.0] * 4)] * 2


def test_the_own_stream_joins_a_capture_through_events(world):
    def body(rank):
        launch, array, own = rank.channel.prepare(SUM), ones(rank), rank.channel.stream
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        fake_cuda.stream_synchronize(0)
        rank.run(launch, array, array, own)
        fake_cuda.stream_synchronize(own)
        stream.begin_capture()
        rank.channel.record(stream.ptr).hold(own)
        rank.run(launch, array, array, own)
        rank.channel.record(own).hold(stream.ptr)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        return array.get().tolist()

    assert world(body, 2) == [[6.0] * 4] * 2


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER])
def test_reproducible_reductions_are_refused_in_words(world, collective):
    def body(rank):
        with pytest.raises(UnsupportedError) as caught:
            rank.channel.prepare(DeviceCall(collective, F4, 4, counts=(2, 2), op="sum", root=0, reproducible=True))
        return str(caught.value), caught.value.operation

    words = (
        "NCCL promises no order of reduction, so it cannot honour reproducible=True: omit it, or reduce on the host, with a cpu "
        'backend and gpu_fallback = "host"'
    )
    assert world(body, 2) == [(words, collective.value)] * 2


def test_what_is_only_moved_is_reproducible(world):
    def body(rank):
        array = ones(rank)
        rank.run(rank.channel.prepare(DeviceCall(Collective.BROADCAST, F4, 4, root=1, reproducible=True)), array, array)
        return array.get().tolist()

    assert world(body, 2) == [[2.0] * 4] * 2


def test_an_unsupported_reduction_says_in_which_operation(world):
    def body(rank):
        with pytest.raises(UnsupportedError, match="NCCL does not reduce int16") as caught:
            rank.channel.prepare(DeviceCall(Collective.REDUCE_SCATTER, np.dtype("i2"), 4, counts=(2, 2), op="sum"))
        return caught.value.operation

    assert world(body, 2) == ["reduce_scatter"] * 2


def test_calls_on_several_streams_keep_their_order(world):
    def body(rank):
        launch, array = rank.channel.prepare(SUM), ones(rank)
        fake_cuda.stream_synchronize(0)
        streams = [fake_cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        for stream in streams:
            rank.run(launch, array, array, stream.ptr)
        for stream in streams:
            rank.channel.record(stream.ptr).hold(0)
        return array.get().tolist()

    assert world(body, 2) == [[12.0] * 4] * 2


def test_a_channel_says_what_moves_its_bytes(world):
    assert world(lambda rank: (rank.channel.library, rank.channel.device), 3) == [("NCCL 2.32.3", rank) for rank in range(3)]


def test_two_groups_have_communicators_of_their_own(world, nccl):
    cards, together = {}, threading.Barrier(2)

    def body(rank):
        exchange = ThreadBootstrap(rank.number, cards, together, None).exchange
        second = rank.backend.open_device(2, DeviceMeeting([0, 1], rank.number, exchange, Deadline(20)))
        array, other = ones(rank), ones(rank)
        rank.run(second.prepare(SUM), array, array)
        rank.run(rank.channel.prepare(SUM), other, other)
        results = array.get().tolist(), other.get().tolist()
        second.close()
        return results

    assert world(body, 2) == [([3.0] * 4, [3.0] * 4)] * 2
    assert list(cards) == ["nccl id 2"]
    assert nccl.names().count("get_unique_id") == 2


def test_an_event_that_became_part_of_a_graph_breaks_nothing(world, monkeypatch):
    def body(rank):
        event = rank.channel.record(0)
        monkeypatch.setattr(fake_cuda, "event_query", lambda handle: 907)
        with pytest.raises(DeviceFailure) as caught:
            event.done()
        monkeypatch.undo()
        return caught.value.is_passing

    assert world(body, 1) == [True]


def test_a_capture_that_has_become_invalid_is_one_still(world, monkeypatch):
    invalid = 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED
    monkeypatch.setattr(fake_cuda, "is_capturing", lambda stream: invalid)
    assert world(lambda rank: rank.channel.is_capturing(0), 1) == [True]


def test_to_ask_spoils_no_capture_of_another_stream(world):
    def body(rank):
        array, stream = ones(rank), fake_cupy.cuda.Stream()
        fake_cuda.stream_synchronize(0)
        stream.begin_capture()
        is_in_order = rank.channel.is_capturing(0)  # the default stream is in one order with it
        rank.run(rank.channel.prepare(SUM), array, array, stream.ptr)
        stream.end_capture().launch(stream)
        stream.synchronize()
        return is_in_order, array.get().tolist()

    assert world(body, 2) == [(True, [3.0] * 4)] * 2
