"""The fake GPU finds what tests need it to find: missing waits, freed memory, and what a capture forbids."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu import fake_cupy
from fake_gpu.fake_cupy import CUDARuntimeError


@pytest.fixture
def cupy(monkeypatch):
    yield fake_cupy.install(monkeypatch)
    fake_cupy.shut_down()


def streams(cupy, count=2):
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


def test_a_missing_wait_shows_as_wrong_values_and_a_wait_repairs_it(cupy):
    first, second = streams(cupy)
    with fake_cupy.held(first.ptr):
        with first:
            value = cupy.full(3, 1.0)
        with second:
            early = (value + 0).get()
        second.wait_event(first.record())
        with second:
            late = value + 0
    assert np.isnan(early).all()
    np.testing.assert_array_equal(late.get(second), 1)


def test_the_legacy_stream_waits_for_blocking_streams_alone(cupy):
    blocking, other = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with fake_cupy.held(other.ptr):
        cupy.zeros(1).get()
    with blocking:
        value = cupy.full(3, 1.0)
    value += 1  # on the legacy stream
    with blocking:
        np.testing.assert_array_equal((value + 1).get(), 3)


def test_memory_is_gone_when_the_stream_comes_to_where_it_was_freed(cupy):
    stream = streams(cupy, 1)[0]
    with stream:
        value = cupy.full(3, 1.0)
        pointer, seen = value.data.ptr, []
        fake_cupy.enqueue(stream.ptr, lambda: seen.append(fake_cupy.view(pointer, 24).view(float).copy()))
        del value
        stream.synchronize()
    np.testing.assert_array_equal(seen, [[1, 1, 1]])
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        fake_cupy.view(pointer, 24)


def test_what_a_kernel_raises_breaks_the_device(cupy):
    fake_cupy.enqueue(0, lambda: fake_cupy.view(16, 8))
    with pytest.raises(CUDARuntimeError, match="IllegalAddress") as caught:
        cupy.cuda.Stream.null.synchronize()
    assert caught.value.status == 700
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        fake_cupy.enqueue(0, int)
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        fake_cupy.shut_down()


def test_a_failure_that_a_test_means_is_forgiven(cupy):
    fake_cupy.enqueue(0, lambda: 1 / 0)
    with pytest.raises(CUDARuntimeError, match="LaunchFailure"):
        cupy.cuda.Stream.null.synchronize()
    fake_cupy.forgive()
    cupy.zeros(1).get()


def test_a_graph_replays_what_was_captured_on_all_streams_that_joined(cupy):
    first, second = streams(cupy)
    with first:
        value = cupy.zeros(3)
    first.begin_capture()
    with first:
        value += 1
        second.wait_event(first.record())
        with second:
            value *= 2
        first.wait_event(second.record())
        value += 3
        assert first.is_capturing()
        assert second.is_capturing()
        graph = first.end_capture()
        np.testing.assert_array_equal(value.get(), 0)
        for expected in (5, 15):
            graph.launch()
            np.testing.assert_array_equal(value.get(), expected)


def test_what_cuda_forbids_in_a_capture_is_refused(cupy):
    first, second = streams(cupy)
    runtime = cupy.cuda.runtime

    def refused(status, action):
        with pytest.raises(CUDARuntimeError) as caught:
            action()
        assert caught.value.status == status

    first.begin_capture()
    refused(900, first.synchronize)
    refused(900, first.end_capture)

    event = second.record()
    first.begin_capture()
    refused(905, lambda: first.wait_event(event))
    refused(900, first.end_capture)

    first.begin_capture()
    second.wait_event(first.record())
    refused(904, first.end_capture)
    assert not second.is_capturing()

    first.begin_capture()
    event = first.record()
    assert runtime.eventQuery(event.ptr) == 907
    assert not runtime.streamIsCapturing(second.ptr)
    first.end_capture()

    refused(900, lambda: fake_cupy.begin_capture(0))
    blocking = cupy.cuda.Stream()
    blocking.begin_capture()
    refused(906, lambda: runtime.streamIsCapturing(0))
    refused(900, blocking.end_capture)


def test_events_and_streams_tell_how_far_they_are(cupy):
    stream, runtime = streams(cupy, 1)[0], cupy.cuda.runtime
    event = runtime.eventCreateWithFlags(2)
    assert runtime.eventQuery(event) == 0  # as one that was never recorded
    with fake_cupy.held(stream.ptr):
        runtime.eventRecord(event, stream.ptr)
        assert (runtime.eventQuery(event), runtime.streamQuery(stream.ptr)) == (600, 600)
    runtime.eventSynchronize(event)
    assert (runtime.eventQuery(event), runtime.streamQuery(stream.ptr)) == (0, 0)
    with cupy.cuda.Device(1):
        elsewhere = cupy.cuda.Stream()
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        runtime.eventRecord(event, elsewhere.ptr)
    runtime.eventDestroy(event)
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        runtime.eventQuery(event)
