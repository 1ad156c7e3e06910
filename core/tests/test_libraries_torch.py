"""Tensors of torch on CUDA devices, by a torch that tests make; the real one is in test_libraries_real.py, on the CPU."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support.fake_gpu import fake_cupy
from support.gpu_arrays import cupy, held_by, read
from support.waiting import until

from oneaccord.arrays.libraries import library_of
from oneaccord.arrays.libraries import torch as torch_library
from oneaccord.arrays.libraries.torch import TorchLibrary
from oneaccord.errors import DTypeError, LayoutError

__all__ = ["cupy"]


class Tensor:
    """A tensor whose memory is a fake CuPy array."""

    is_cpu, is_cuda, is_nested, is_quantized, layout = False, True, False, False, "strided"

    def __init__(self, array, dtype, *, requires_grad=False, conj=False, **other):
        self.array, self.dtype, self.requires_grad, self.conj = array, dtype, requires_grad, conj
        self.shape = list(array.shape)  # as torch.Size, no plain tuple
        self.device = f"cuda:{array.data.device_id}"
        self.versions = 0
        self.__dict__.update(other)

    def like(self, array, **other):
        return Tensor(array, self.dtype, **other)

    is_conj = is_neg = lambda self: self.conj

    def is_inference(self):
        return False

    def data_ptr(self):
        return self.array.data.ptr

    def get_device(self):
        return self.array.data.device_id

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def detach(self):
        return self.like(self.array)

    def resolve_conj(self):
        return self.like(-self.array)  # stands for any copy

    def resolve_neg(self):
        return self

    def view(self, shape):
        if isinstance(shape, TorchDtype):
            return Tensor(self.array.view({1: np.uint8, 2: np.int16}[shape.itemsize]), shape)
        return self.like(self.array.reshape(shape))

    def reshape(self, shape):
        return self.like(self.array.reshape(shape))

    def __getitem__(self, key):
        return self.like(self.array[key])

    def contiguous(self):
        return self.like(fake_cupy.ascontiguousarray(self.array))

    def t(self):
        return self.like(self.array.T)

    def copy_(self, other, non_blocking=False):
        assert self.shape == list(other.shape)
        if isinstance(other, Pinned):
            assert non_blocking
            with fake_cupy.cuda.Device(self.get_device()):
                runtime.memcpyAsync(self.data_ptr(), other.address, self.array.nbytes, 1, current())
        else:
            fake_cupy.copyto(self.array, other.array)


runtime = fake_cupy.cuda.runtime


def current():
    return fake_cupy.cuda.get_current_stream().ptr


class Pinned:
    """A tensor in pinned memory."""

    def __init__(self, memory):
        self.memory, self.shape, self.address = memory, memory.shape, memory.ctypes.data

    def numpy(self):
        return self.memory

    def copy_(self, other, non_blocking=False):
        assert non_blocking
        with fake_cupy.cuda.Device(other.get_device()):
            runtime.memcpyAsync(self.address, other.data_ptr(), self.memory.nbytes, 2, current())


class Stream:
    """A stream of torch's: a block of it makes its device the current one as well."""

    def __init__(self, device, stream=None):
        self.device = fake_cupy.cuda.Device(device)
        with self.device:
            self.stream = fake_cupy.cuda.Stream(non_blocking=True) if stream is None else stream

    def __enter__(self):
        self.device.__enter__()
        self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)
        self.device.__exit__(*error)

    def record_event(self):
        with self.device:
            event = self.stream.record()
        event.query = lambda: event.done
        return event

    def wait_event(self, event):
        self.stream.wait_event(event)


class TorchDtype(SimpleNamespace):
    __hash__ = object.__hash__

    def __str__(self):
        return f"torch.{self.name}"


@pytest.fixture
def torch(monkeypatch, cupy):
    module = types.ModuleType("torch")
    for name, size in (("float32", 4), ("bfloat16", 2), ("float8_e5m2", 1), ("complex32", 4), ("uint8", 1), ("int16", 2)):
        setattr(module, name, TorchDtype(name=name, itemsize=size))

    def empty(shape, dtype, device):
        assert device[0] == "cuda"
        with cupy.cuda.Device(device[1]):
            return Tensor(cupy.empty(shape, {4: "f4", 2: "i2", 1: "u1"}[dtype.itemsize]), dtype)

    def increment_version(tensor):
        tensor.versions += 1

    module.__dict__.update(Tensor=Tensor, strided="strided", empty=empty, device=lambda *place: place)
    module.autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=increment_version))
    module.is_grad_enabled = lambda: False
    module.inference_mode = lambda is_on: nullcontext()
    module.cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=7000 + device))
    monkeypatch.setitem(sys.modules, "torch", module)
    for cache in (torch_library._numpy_dtype, torch_library._torch_dtype):
        cache.cache_clear()
    yield module
    for cache in (torch_library._numpy_dtype, torch_library._torch_dtype):
        cache.cache_clear()


def test_a_tensor_on_a_gpu_is_read_where_it_is(cupy, torch):
    with cupy.cuda.Device(1):
        value = Tensor(cupy.zeros((2, 3), np.float32), torch.float32)
    array = read(value)
    assert (array.owner, array.pointer, array.device) == (value, value.data_ptr(), 1)
    assert (array.shape, array.dtype, array.is_contiguous) == ((2, 3), np.float32, True)
    assert type(array.shape) is tuple
    assert not read(value.t()).is_contiguous
    assert array.library.stream(1)[0] == 7001


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_low_precision_on_a_gpu_is_that_of_ml_dtypes(torch, name):
    library = TorchLibrary()
    array = library.empty((4,), np.dtype(getattr(ml_dtypes, name)), 0)
    assert array.owner.dtype is getattr(torch, name)
    assert read(array.owner).dtype == np.dtype(getattr(ml_dtypes, name))


def test_gradients_and_lazy_signs_on_a_gpu_are_resolved(cupy, torch):
    value = Tensor(cupy.full(3, np.float32(2)), torch.float32, requires_grad=True)
    array = read(value)
    assert (array.pointer, array.owner.requires_grad) == (value.data_ptr(), False)
    lazy = Tensor(value.array, torch.float32, conj=True)
    np.testing.assert_array_equal(held_by(read(lazy)), -2)
    with pytest.raises(LayoutError, match="resolve_conj"):
        library_of(lazy).write(lazy)


def test_a_result_in_a_tensor_on_a_gpu_counts_as_a_change(cupy, torch):
    value = Tensor(cupy.zeros((2, 3), np.float32), torch.float32, requires_grad=True)
    library = library_of(value)
    assert (library.write(value).pointer, value.versions) == (value.data_ptr(), 1)
    assert not library.write(value.t()).is_contiguous
    assert (read(value).pointer, value.versions) == (value.data_ptr(), 1)
    shared = value.like(cupy.ndarray(value.array.data.mem, np.broadcast_to(value.array._view[:1], (2, 3))))
    with pytest.raises(LayoutError, match="share memory"):
        library.write(shared)


def test_copies_and_results_of_tensors_keep_values_and_shapes(cupy, torch):
    value = Tensor(cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3)), torch.float32)
    library = library_of(value)
    copied = library.contiguous(read(value.t()))
    np.testing.assert_array_equal(held_by(copied), np.arange(6).reshape(2, 3).T)
    target = library.empty((6,), np.dtype(np.float32), 0)
    library.copy(target, copied.reshape(6))
    library.copy(target.reshape(3, 2), copied)
    np.testing.assert_array_equal(held_by(target), [0, 3, 1, 4, 2, 5])
    result = library.give_device(target.reshape(2, 3), value)
    assert (type(result), result.shape, result.data_ptr()) == (Tensor, [2, 3], target.pointer)
    array = read(value)
    assert library.contiguous(array) is array


def test_a_lane_copies_by_bytes_beside_the_current_stream_and_behind_a_point_of_it(cupy, torch):
    def current_stream(device):
        return Stream(device, cupy.cuda.get_current_stream(device))

    torch.cuda = SimpleNamespace(Stream=Stream, stream=lambda stream: stream, current_stream=current_stream)
    torch.from_numpy = Pinned

    def empty(nbytes, dtype, pin_memory):
        assert pin_memory
        assert dtype is torch.uint8
        return Pinned(np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8))

    torch.empty = empty
    with cupy.cuda.Device(1):
        busy = cupy.cuda.Stream(non_blocking=True)
        source, target = (Tensor(cupy.zeros((2, 3), np.int16), torch.bfloat16) for _ in range(2))
        cupy.cuda.Device(1).synchronize()
        with busy:
            library, array = library_of(source), read(source)
            with fake_cupy.held(busy.ptr):
                source.array[...] = cupy.asarray(np.arange(6, dtype=np.int16).reshape(2, 3))
                point = library.point(1)
                lane, host = library.lane(1), library.pinned(8, 1)
                with cupy.cuda.Device(0):
                    lane.after(point)
                    lane.fetch(host.view(array.dtype)[:3], array, 2)
                    mark = lane.mark()
                assert not mark()
            until(mark)
            assert host.view(np.int16)[:3].tolist() == [2, 3, 4]
            lane.store(read(target), 3, host.view(array.dtype)[:2])
            until(lane.mark())
            assert target.array.get().tolist() == [[0, 0, 0], [2, 3, 0]]
            lane.copy(read(target), array)
            until(lane.mark())
            assert target.array.get().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"is_cuda": False, "device": "mps:0"}, r"device mps:0.*x\.cpu\(\)"),
        ({"layout": "sparse_coo"}, "sparse_coo"),
        ({"is_quantized": True}, "quantized"),
        ({"is_nested": True}, "other tensors"),
    ],
)
def test_tensors_that_are_no_plain_memory_are_refused(cupy, torch, other, words):
    value = Tensor(cupy.zeros(3, np.float32), torch.float32, **other)
    for take in (library_of(value).read, library_of(value).write):
        with pytest.raises(LayoutError, match=words):
            take(value)


def test_a_tensor_that_holds_other_tensors_is_refused(cupy, torch):
    class DTensor(Tensor):
        def __tensor_flatten__(self):
            pass

    value = DTensor(cupy.zeros(3, np.float32), torch.float32)
    with pytest.raises(LayoutError, match=r"DTensor holds other tensors.*to_local"):
        library_of(value).read(value)


def test_dtypes_that_one_side_lacks_are_refused(cupy, torch):
    value = Tensor(cupy.zeros(3, np.float32), torch.complex32)
    with pytest.raises(DTypeError, match="complex32"):
        library_of(value).read(value)
    with pytest.raises(DTypeError, match="float64"):
        library_of(value).empty((3,), np.dtype(float), 0)
