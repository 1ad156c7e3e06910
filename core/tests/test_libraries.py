"""Arrays of other libraries: where their memory is, and results of the same kind, on GPUs that tests make of threads."""

from __future__ import annotations

import sys
import threading
import types
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_gpu import fake_cuda, fake_cupy
from support.gpu_arrays import cupy, held_by, read

from oneaccord.arrays.libraries import library_of
from oneaccord.arrays.libraries.shared import refuse_overlap
from oneaccord.arrays.memory import to_array
from oneaccord.errors import DTypeError, LayoutError, UnsupportedError

# Which library.

__all__ = ["cupy"]


def test_numpy_and_what_it_reads_by_itself_belong_to_no_library(cupy):
    class Readable:
        def __array__(self, dtype=None, copy=None):
            return np.zeros(3)

    for value in (
        *(np.zeros(3), np.float32(1), np.zeros(3).view(np.recarray), np.ma.zeros(3), np.zeros(3, ml_dtypes.bfloat16)[0]),
        *(1, 1.0, 1j, True, [1, 2], (1,), b"x", bytearray(2), memoryview(b"x"), range(3), Readable(), None, "x"),
    ):
        assert library_of(value) is None
        assert library_of(value) is None  # the second time it is looked up


def test_nothing_is_imported_to_find_a_library(monkeypatch):
    for name in ("cupy", "torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would raise
    assert library_of(SimpleNamespace()) is None
    assert library_of(Foreign(None, (1, 0))).name == "DLPack"


def test_a_library_that_is_being_imported_has_no_arrays_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert library_of(SimpleNamespace()) is None


def test_one_object_that_speaks_a_protocol_says_nothing_of_its_type():
    assert library_of(SimpleNamespace(__cuda_array_interface__={})).name == "DLPack"
    assert library_of(SimpleNamespace()) is None


def test_subclasses_belong_to_the_library_of_their_base(cupy):
    class Special(cupy.ndarray):
        pass

    assert library_of(cupy.zeros(3)).name == "CuPy"
    memory = cupy.zeros(3)
    assert library_of(Special(memory.data.mem, memory._view)) is library_of(memory)


# CuPy.


def test_a_cupy_array_is_read_where_it_is(cupy):
    with cupy.cuda.Device(1):
        value = cupy.asarray(np.arange(6, dtype=np.int16).reshape(2, 3))
    array = read(value)
    assert (array.owner, array.pointer, array.device) == (value, value.data.ptr, 1)
    assert (array.shape, array.dtype, array.is_contiguous) == ((2, 3), np.int16, True)
    assert (array.ndim, array.size, array.nbytes) == (2, 6, 12)
    assert not read(value.T).is_contiguous
    assert not read(value[:, ::2]).is_contiguous
    assert read(value[1:]).pointer == value.data.ptr + 6


def test_a_cupy_array_of_a_dtype_that_cannot_travel_is_refused(cupy):
    value = cupy.zeros(2, np.int64).view("i4,i4")
    with pytest.raises(DTypeError, match="structured"):
        library_of(value).read(value)


def test_memory_for_a_result_is_new_and_on_the_device_that_is_asked_for(cupy):
    library = library_of(cupy.zeros(1))
    cupy.cuda.Device(0).use()
    array = library.empty((2, 3), np.dtype(np.float32), 1)
    assert (array.shape, array.dtype, array.device, array.is_contiguous) == ((2, 3), np.float32, 1, True)
    assert array.owner.data.ptr == array.pointer
    assert cupy.cuda.runtime.getDevice() == 0
    result = library.give_device(array.reshape(3, 2), like=None)
    assert (type(result), result.shape, result.data.ptr) == (cupy.ndarray, (3, 2), array.pointer)
    assert library.give_device(array, like=None) is array.owner


def test_the_stream_is_that_of_the_device_in_this_thread(cupy):
    library = library_of(cupy.zeros(1))
    assert library.stream(0)[0] == library.stream(1)[0] == 0
    with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True) as stream:
        assert library.stream(1) == (stream.ptr, stream)
        assert library.stream(0)[0] == 0


@pytest.mark.parametrize("device", [0, 1])
def test_copies_on_the_device_wait_for_what_its_current_stream_has_queued(cupy, device):
    library = library_of(cupy.zeros(1))
    with cupy.cuda.Device(device):
        source = cupy.asarray(np.arange(6.0).reshape(2, 3))
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
        cupy.cuda.Device(device).synchronize()
    try:
        with fake_cupy.held(stream.ptr):
            with cupy.cuda.Device(device):
                source += 10
                target = cupy.zeros((3, 2))
            copied = library.contiguous(read(source.T))
            assert copied.is_contiguous
            assert copied.device == device
            library.copy(library.write(target.T), read(source))
            assert not stream.done
        np.testing.assert_array_equal(library.to_host(copied), [[10, 13], [11, 14], [12, 15]])
        np.testing.assert_array_equal(library.to_host(read(target)), [[10, 13], [11, 14], [12, 15]])
        array = read(source)
        assert library.contiguous(array) is array
        library.copy(array.reshape(6), copied.reshape(2, 3))
        np.testing.assert_array_equal(library.to_host(array), [[10, 13, 11], [14, 12, 15]])
    finally:
        with cupy.cuda.Device(device):
            cupy.cuda.Stream.null.use()


@pytest.mark.parametrize("device", [0, 1])
def test_what_comes_to_the_host_is_in_pinned_memory_and_complete(cupy, device):
    with cupy.cuda.Device(device):
        value = cupy.asarray(np.arange(12, dtype=np.float32).reshape(3, 4)) * 2
        library = library_of(value)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device(device).synchronize()
        stream.use()
        value += 1
    try:
        cupy.pinned.clear()
        expected = np.arange(12).reshape(3, 4) * 2 + 1
        host = library.to_host(read(value))
        np.testing.assert_array_equal(host, expected)
        assert cupy.pinned == [48]
        assert host.flags.c_contiguous
        np.testing.assert_array_equal(library.to_host(read(value.T)), expected.T)
        np.testing.assert_array_equal(library.to_host(read(value).reshape(12)), expected.ravel())
        assert library.to_host(read(value[:0])).shape == (0, 4)
    finally:
        with cupy.cuda.Device(device):
            cupy.cuda.Stream.null.use()


@pytest.mark.parametrize("shape", [(), (0, 2), (5,), (2, 3)])
def test_what_goes_to_a_device_is_a_copy(cupy, shape):
    host = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    expected = host.copy()
    library = library_of(cupy.zeros(1))
    with fake_cupy.held(0), cupy.cuda.Device(1), fake_cupy.held(0):
        with cupy.cuda.Device(0):  # the device that happens to be current does not matter
            array = library.to_device(np.asfortranarray(host) if host.ndim else host, 1)
        host[...] = -1
    assert (array.shape, array.dtype, array.device, array.is_contiguous) == (shape, np.float32, 1, True)
    assert array.owner.flags.c_contiguous
    np.testing.assert_array_equal(library.to_host(array), expected)
    like = cupy.zeros(3)
    assert library.give(expected, like).device == like.device


def test_a_result_never_goes_where_elements_share_memory(cupy):
    value = cupy.zeros(6)
    library = library_of(value)
    assert library.write(value).pointer == value.data.ptr
    assert library.write(value[::2]).pointer == value.data.ptr
    shared = cupy.ndarray(value.data.mem, np.broadcast_to(value._view, (2, 6)))
    with pytest.raises(LayoutError, match="share memory"):
        library.write(shared)


@given(st.data())
def test_overlap_is_never_missed_and_slices_pass(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(-12, 12), min_size=len(shape), max_size=len(shape)))
    places = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    touched = [place + byte for place in places for byte in range(2)]
    if len(set(touched)) < len(touched):
        with pytest.raises(LayoutError):
            refuse_overlap(shape, strides, 2)
    sliced = np.zeros([2 * count for count in shape], np.int16)[tuple(slice(None, None, -2) for _ in shape)].T
    refuse_overlap(sliced.shape, sliced.strides, 2)


# Whatever speaks DLPack or the CUDA array interface.


class Namespace:
    """The functions of a library that has a type ``Given``."""

    def from_dlpack(self, array):
        if array.__dlpack_device__()[0] == 2:
            return Foreign(fake_cupy.from_dlpack(array), array.__dlpack_device__(), self)
        return Foreign(np.from_dlpack(array), (1, 0), self)

    def asarray(self, array):
        return Foreign(array.copy(), (1, 0), self)


class Foreign:
    """An array of a library that speaks DLPack; it lets its memory be written to on a stream of its own."""

    def __init__(self, array, device, namespace=None, stream=None):
        self.array, self.device, self.stream = array, device, stream
        if namespace is not None:
            self.__array_namespace__ = lambda: namespace

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.stream is None:
            return self.array.__dlpack__(**options)
        with self.stream:
            return self.array.__dlpack__(**options)


class Interface:
    """An array of a library that has the CUDA array interface alone, such as numba's."""

    def __init__(self, array, **entries):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None, **entries}


def both_protocols(array, stream):
    return [
        Foreign(array, (2, array.data.device_id), stream=stream),
        Interface(array, stream=stream.ptr),
    ]


def test_host_memory_is_read_and_written_through_dlpack():
    memory = np.arange(3.0)
    value = Foreign(memory, (1, 0))
    library = library_of(value)
    assert np.shares_memory(library.read(value), memory)
    assert np.shares_memory(to_array(value), memory)
    if np.from_dlpack(memory).flags.writeable:
        library.write(value)[...] = 7
        np.testing.assert_array_equal(memory, 7)
    else:  # what NumPy before 2.2.5 reads through DLPack, it does not write to
        with pytest.raises(LayoutError, match=r"out= is a Foreign that .* does not say that it is writable"):
            library.write(value)
    pinned = Foreign(memory, (3, 0))
    assert np.shares_memory(library.read(pinned), memory)


def test_read_only_host_memory_takes_no_results():
    class ReadOnly(Foreign):
        def __dlpack__(self, **options):
            options.pop("max_version", None)  # the first version of DLPack cannot tell
            return self.array.__dlpack__(**options)

    value = ReadOnly(np.arange(3.0), (1, 0))
    np.testing.assert_array_equal(library_of(value).read(value), [0, 1, 2])
    with pytest.raises(LayoutError, match="out= is a ReadOnly that is read-only"):
        library_of(value).write(value)


def test_what_dlpack_cannot_say_is_read_as_numpy_reads_it():
    class Readable(Foreign):
        def __array__(self, dtype=None, copy=None):
            return self.array

    half = np.ones(3, ml_dtypes.bfloat16)
    value = Readable(half, (1, 0))
    assert library_of(value).read(value) is half
    unreadable = Foreign(half, (1, 0))
    with pytest.raises(LayoutError, match="Foreign cannot be read as an array: "):
        library_of(unreadable).read(unreadable)


def test_results_in_host_memory_are_given_as_the_namespace_makes_them():
    value = Foreign(np.zeros(3), (1, 0), Namespace())
    library = library_of(value)
    result = np.arange(3.0)
    given = library.give(result, value)
    assert type(given) is Foreign
    assert np.shares_memory(given.array, result)
    half = np.ones(3, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(library.give(half, value).array, half)
    assert library.give(result, Foreign(np.zeros(3), (1, 0))) is result


@pytest.mark.parametrize("kind", [4, 8, 10, 14, 16])
def test_memory_of_other_devices_is_refused(kind):
    value = Foreign(np.zeros(3), (kind, 0))
    with pytest.raises(LayoutError, match=f"DLPack's type {kind}.*copy it to the host first"):
        library_of(value).read(value)


def test_a_device_that_dlpack_cannot_name_is_refused():
    class Sharded(Foreign):
        def __dlpack_device__(self):
            raise BufferError("in parts")

    value = Sharded(None, None)
    with pytest.raises(LayoutError, match="Sharded cannot be read as an array: in parts"):
        library_of(value).read(value)


def test_an_array_on_a_gpu_needs_cupy(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    for value in (Foreign(None, (2, 0)), Foreign(None, (13, 0)), SimpleNamespace(__cuda_array_interface__={})):
        with pytest.raises(UnsupportedError, match=r"GPU is read through CuPy.*`import cupy`"):
            library_of(value).read(value)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("protocol", [0, 1])
def test_the_current_stream_waits_for_who_wrote_the_array(cupy, device, protocol):
    with cupy.cuda.Device(device):
        producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        memory = cupy.zeros(4, np.float32)
        cupy.cuda.Stream.null.synchronize()
        with fake_cupy.held(producer.ptr):
            with producer:
                memory += 5
            value = both_protocols(memory, producer)[protocol]
            with consumer:
                with cupy.cuda.Device(0):  # the device that happens to be current does not matter
                    array = read(value)
                assert (array.pointer, array.device, array.shape) == (memory.data.ptr, device, (4,))
                seen = memory + 0
            assert not consumer.done
        np.testing.assert_array_equal(seen.get(consumer), 5)
    assert array.owner is not value
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.parametrize("show", [lambda array: Foreign(array, (2, 1)), Interface])
def test_no_other_device_is_woken_by_reading_and_by_pinned_memory(cupy, show):
    """A device that is made current, or for which memory is pinned, gets a context, which fills its memory."""
    made = []

    def body():
        cupy.cuda.Device(1).use()
        made.append(cupy.zeros(4, np.float32))
        cupy.cuda.Stream.null.synchronize()

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert fake_cuda.contexts() == {1}
    # This thread has used no device yet, so that its current one is the first.
    array = read(show(made[0]))
    assert fake_cuda.contexts() == {1}
    assert array.library.to_host(array).tolist() == [0] * 4
    assert fake_cuda.contexts() == {1}


def test_reading_by_the_interface_does_not_let_the_host_wait(cupy):
    producer = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.zeros(4)
    with fake_cupy.held(producer.ptr):  # a host that waits for this stream would wait for ever
        array = read(Interface(memory, stream=producer.ptr))
    assert array.pointer == memory.data.ptr


@pytest.mark.parametrize("stream", [None, 1])
def test_an_interface_that_names_the_same_stream_or_none_costs_no_wait(cupy, monkeypatch, stream):
    value = Interface(cupy.zeros(4), stream=stream)
    monkeypatch.setattr(cupy.cuda, "Event", None)
    assert read(value).shape == (4,)


def test_stream_0_is_no_stream_of_the_interface(cupy):
    value = Interface(cupy.zeros(4), stream=0)
    with pytest.raises(LayoutError, match="stream 0"):
        library_of(value).read(value)


def test_the_memory_lives_as_long_as_what_was_read(cupy):
    for make in (lambda: Foreign(cupy.full(3, 2.0), (2, 0)), lambda: Interface(cupy.full(3, 2.0))):
        array = read(make())
        cupy.cuda.Stream.null.synchronize()
        np.testing.assert_array_equal(held_by(array), 2)


def test_layouts_and_dtypes_of_foreign_arrays_are_kept(cupy):
    memory = cupy.asarray(np.arange(6, dtype=np.complex64).reshape(2, 3))
    for value in (Foreign(memory.T, (2, 0)), Interface(memory.T)):
        array = read(value)
        assert (array.shape, array.dtype, array.is_contiguous) == ((3, 2), np.complex64, False)
        np.testing.assert_array_equal(array.library.to_host(array), np.arange(6).reshape(2, 3).T)


def test_foreign_device_memory_takes_results_unless_it_says_that_it_is_read_only(cupy):
    memory = cupy.zeros(3)
    for value in (Foreign(memory, (2, 0)), Interface(memory)):
        assert library_of(value).write(value).pointer == memory.data.ptr
    value = Interface(memory, data=(memory.data.ptr, True))
    assert read(value).pointer == memory.data.ptr
    both = Foreign(memory, (2, 0))
    both.__cuda_array_interface__ = value.__cuda_array_interface__
    for each in (value, both):
        with pytest.raises(LayoutError, match="read-only"):
            library_of(each).write(each)


def test_results_on_a_device_are_given_through_dlpack_in_order(cupy):
    class Consumer:
        """It works on a stream of its own, for which DLPack lets it wait."""

        def from_dlpack(self, array):
            return Foreign(array.__dlpack__(stream=own.ptr).consume(), (2, 1), self)

    with cupy.cuda.Device(1):
        current, own = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        like = Foreign(cupy.zeros(3), (2, 1), Consumer())
        library = library_of(like)
        with current:
            result = library.empty((4,), np.dtype(np.float32), 1)
            with fake_cupy.held(current.ptr):
                result.owner.fill(4)
                with cupy.cuda.Device(0):  # the device that happens to be current does not matter
                    given = library.give_device(result.reshape(2, 2), like)
                with own:
                    seen = given.array + 0
                assert not own.done
            np.testing.assert_array_equal(seen.get(own), [[4, 4], [4, 4]])
    assert type(given) is Foreign
    assert given.array.data.ptr == result.pointer
    plain = library.give_device(result.reshape(1, 4), Interface(cupy.zeros(3)))
    assert (type(plain), plain.shape) == (cupy.ndarray, (1, 4))


# Host memory only.


def test_arrays_on_a_gpu_are_refused_where_only_host_memory_is_moved(cupy):
    for value in (cupy.zeros(3), Foreign(cupy.zeros(3), (2, 0)), Interface(cupy.zeros(3))):
        with pytest.raises(UnsupportedError, match=r'on a GPU.*backend = "nccl".*"hybrid".*doctor.*gpu_fallback = "host"'):
            to_array(value)
