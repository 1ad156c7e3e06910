"""The fake GPU finds what tests need it to find: missing waits, freed memory, and what a capture forbids."""

from __future__ import annotations

import array_api_compat
import numpy as np
import pytest
from support.fake_gpu import fake_cupy
from support.fake_gpu.fake_cupy import CUDARuntimeError


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
    refused(906, lambda: runtime.streamIsCapturing(0))  # to ask spoils nothing
    blocking.end_capture()


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


def test_array_api_compat_takes_its_arrays_for_those_of_cupy(cupy):
    x = cupy.arange(6.0).reshape(2, 3)
    xp = array_api_compat.array_namespace(x)
    assert xp.__name__ == "array_api_compat.cupy"
    assert array_api_compat.is_cupy_array(x)
    assert array_api_compat.device(x) == cupy.cuda.Device(0)
    assert type(x).__module__ == "cupy"
    found = [
        xp.concat([x, xp.zeros_like(x)], axis=1).tolist(),
        xp.sum(x, axis=0, dtype=xp.float64).tolist(),
        np.sqrt(x * x).tolist(),
        (np.float64(2) - x).tolist(),
        xp.astype(x, xp.int32).dtype.name,
    ]
    wanted = [[[0, 1, 2, 0, 0, 0], [3, 4, 5, 0, 0, 0]], [3, 5, 7], [[0, 1, 2], [3, 4, 5]], [[2, 1, 0], [-1, -2, -3]], "int32"]
    assert found == wanted


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (np.asarray, TypeError, "Implicit conversion to a NumPy array is not allowed"),
        (lambda x: x + np.ones(3), TypeError, "Unsupported type <class 'numpy.ndarray'>"),
        (lambda x: np.ones(3) + x, TypeError, "Unsupported type <class 'numpy.ndarray'>"),
        (lambda x: x * np.ones(()), TypeError, "Unsupported type <class 'numpy.ndarray'>"),
        (lambda x: x.__setitem__(..., np.ones(3)), ValueError, "non-scalar numpy.ndarray cannot be used for fill"),
        (lambda x: np.ones(3).__setitem__(..., x), TypeError, "Implicit conversion"),
        (lambda x: np.concatenate([x, np.ones(3)]), TypeError, "Only cupy arrays can be concatenated"),
        (lambda x: x.__iadd__(1j), TypeError, "could not be coerced"),
        (bool, ValueError, "ambiguous"),
        (lambda x: x.item(), ValueError, "size 1"),
        (lambda x: [1, 2][x[0].astype(int)], TypeError, "indices"),
        (lambda x: x.flags.writeable, AttributeError, "writeable"),
        (hash, TypeError, "unhashable"),
        (lambda x: x[:2].__setitem__(..., x), ValueError, "broadcast"),
    ],
)
def test_what_cupy_refuses_is_refused(cupy, use, error, said):
    with pytest.raises(error, match=said):
        use(cupy.ones(3))


def test_work_is_late_and_only_masks_and_numbers_make_the_host_wait(cupy):
    (stream,) = streams(cupy, 1)
    with stream:
        x, places = cupy.arange(4.0), cupy.asarray([3, 0])
        with fake_cupy.held(stream.ptr):
            late = [x[places], cupy.concatenate([x, x]), x.sum(), cupy.linalg.qr(x.reshape(2, 2))[1]]
            x[places] = 7.0
            cupy.add.at(x, cupy.asarray([1, 1, 2]), cupy.ones(3))
            assert not stream.done
        assert [each.tolist() for each in late[:3]] == [[3, 0], [0, 1, 2, 3] * 2, 6]
        assert x.tolist() == [7, 3, 3, 7]
        assert x[x > 3].tolist() == [7, 7]
        x[x > 3] = x[:2]
        assert x.tolist() == [7, 3, 3, 3]
