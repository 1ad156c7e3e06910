"""Arrays of the real torch and JAX in host memory; see `make test-peers`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from oneaccord.arrays.libraries import library_of
from oneaccord.arrays.memory import to_array
from oneaccord.errors import DTypeError, LayoutError, UsageError

pytestmark = pytest.mark.peers

if importlib.util.find_spec("torch"):
    import torch
if importlib.util.find_spec("jax"):
    import jax
    import jax.numpy as jnp

NUMPY_DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
LOW_PRECISION = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()


def numbers(dtype, shape=(2, 3)):
    return np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def same(array, expected):
    assert type(array) is np.ndarray
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


# torch.


@pytest.mark.parametrize("name", NUMPY_DTYPES + LOW_PRECISION)
def test_tensors_of_every_dtype_are_views_both_ways(name):
    dtype = np.dtype(getattr(ml_dtypes, name) if name in LOW_PRECISION else name)
    like = torch.zeros(1)
    library = library_of(like)
    for expected in (numbers(dtype), numbers(dtype, ()), numbers(dtype, (0, 3))):
        given = library.give(expected, like)
        assert type(given) is torch.Tensor
        assert given.dtype is getattr(torch, name)
        assert tuple(given.shape) == expected.shape
        array = library.read(given)
        same(array, expected)
        same(to_array(given), expected)
        if expected.size:
            assert array.ctypes.data == given.data_ptr() == expected.ctypes.data
        library.write(given)[...] = 2
        same(expected, np.full(expected.shape, 2).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_keep_their_layout(dtype):
    value = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    library = library_of(value)
    for view in (value.t(), value[:, ::2], value[1:], value.expand(2, 3, 4), value.t()[1]):
        array = library.read(view)
        assert array.astype(float).tolist() == view.tolist()
        assert np.shares_memory(array, library.read(value))
    library.write(value.t())[0] = 9
    assert value[:, 0].tolist() == [9, 9, 9]
    with pytest.raises(LayoutError, match="share memory"):
        library.write(value[:1].expand(2, 4))


def test_tensors_that_require_gradients_are_refused_where_these_are_recorded():
    value = torch.nn.Parameter(torch.ones(3))
    library = library_of(value)
    assert library.name == "torch"
    for tensor in (value, value * 2):
        with pytest.raises(UsageError, match=r"x\.detach\(\), or make the call in `with torch\.no_grad\(\):`"):
            library.read(tensor)
        with pytest.raises(UsageError, match="requires a gradient"):
            library.write(tensor)
    with torch.no_grad():
        same(library.read(value), np.ones(3, np.float32))
        library.write(value)[...] = 2
    assert value.requires_grad
    assert value.tolist() == [2, 2, 2]
    assert not library.give(np.ones(3), value).requires_grad
    same(library.read((torch.ones(3, requires_grad=True) * 2).detach()), np.full(3, 2, np.float32))


def test_autograd_notices_that_a_result_was_written_to_what_it_saved():
    weight, value = torch.ones(3, requires_grad=True), torch.ones(3)
    total = (weight * value).sum()
    library_of(value).write(value)[...] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_tensors_of_inference_mode_take_results():
    with torch.inference_mode():
        value = torch.ones(3)
    library_of(value).write(value)[...] = 5
    assert value.tolist() == [5, 5, 5]


def test_lazy_conjugates_and_negatives_are_read_as_what_they_mean_and_take_no_results():
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    library = library_of(value)
    same(library.read(value.conj()), np.array([1 - 2j, 3 + 4j], np.complex64))
    same(library.read(value.conj().imag), np.array([-2, 4], np.float32))
    for lazy in (value.conj(), value.conj().imag):
        with pytest.raises(LayoutError, match="resolve_conj"):
            library.write(lazy)


def test_subclasses_of_tensors_are_tensors_and_results_are_plain():
    class Named(torch.Tensor):
        pass

    value = torch.ones(3).as_subclass(Named)
    library = library_of(value)
    array = library.read(value)
    same(array, np.ones(3, np.float32))
    assert type(library.give(array, value)) is torch.Tensor


def test_results_that_torch_cannot_share_are_copied():
    library = library_of(torch.zeros(1))
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    assert library.give(fixed, None).tolist() == [0, 1, 2]
    assert library.give(np.arange(3.0)[::-1], None).tolist() == [2, 1, 0]
    with pytest.raises(DTypeError, match=np.dtype(np.longdouble).name):
        library.give(np.zeros(3, np.longdouble), None)


@pytest.mark.filterwarnings("ignore")  # torch calls some of these a beta or deprecated
def test_tensors_that_are_no_plain_memory_are_refused_in_words():
    dense = torch.eye(3)
    for value, words in (
        (dense.to_sparse(), r"sparse_coo.*to_dense"),
        (dense.to_sparse_csr(), r"sparse_csr.*to_dense"),
        (dense.to_mkldnn(), r"mkldnn.*to_dense"),
        (torch.zeros(3, device="meta"), "device meta .* holds no data"),
        (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "quantized.*dequantize"),
        (torch.nested.nested_tensor([dense]), "holds other tensors"),
        (torch.nested.nested_tensor([dense], layout=torch.jagged), "jagged"),
    ):
        for take in (library_of(value).read, library_of(value).write):
            with pytest.raises(LayoutError, match=words):
                take(value)
    with pytest.raises(DTypeError, match="complex32"):
        library_of(dense).read(dense.to(torch.complex32))

    def inside(value):
        with pytest.raises(LayoutError, match="Tensor of torch cannot be read"):
            library_of(value).read(value)
        return value

    torch.vmap(inside)(dense)


# JAX.


@pytest.mark.parametrize("name", [n for n in NUMPY_DTYPES if not n.endswith(("64", "128"))] + ["complex64", *LOW_PRECISION])
def test_arrays_of_jax_are_read_without_a_copy_and_results_are_new_ones(name):
    dtype = np.dtype(getattr(ml_dtypes, name) if name in LOW_PRECISION else name)
    for expected in (numbers(dtype), numbers(dtype, ()), numbers(dtype, (0, 3)), numbers(dtype, (3, 2)).T):
        value = jnp.asarray(expected)
        library = library_of(value)
        assert library.name == "JAX"
        array = library.read(value)
        same(array, expected)
        same(to_array(value), expected)
        assert not array.flags.writeable
        if expected.size:
            assert array.ctypes.data == value.unsafe_buffer_pointer()
        given = library.give(expected, value)
        assert isinstance(given, jax.Array)
        assert given.devices() == value.devices()
        same(np.asarray(given), expected)
        fixed = expected.copy()
        fixed.flags.writeable = False
        same(np.asarray(library.give(fixed, value)), expected)


def test_well_aligned_results_become_arrays_of_jax_without_a_copy():
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    result = memory[start : start + 4096].view(np.float32)
    like = jnp.zeros(3)
    assert library_of(like).give(result, like).unsafe_buffer_pointer() == result.ctypes.data


def test_arrays_of_jax_take_no_results():
    value = jnp.zeros(3)
    with pytest.raises(LayoutError, match=r"JAX.*cannot be changed.*leave out= out"):
        library_of(value).write(value)


def test_a_result_that_jax_would_round_is_refused():
    like = jnp.zeros(3)
    with pytest.raises(DTypeError, match=r"float64 into float32.*jax_enable_x64"):
        library_of(like).give(np.zeros(3), like)


def test_what_jax_only_traces_or_keeps_for_itself_is_refused_in_words():
    def inside(value):
        with pytest.raises(LayoutError, match="cannot be read as an array"):
            library_of(value).read(value)
        return value

    jax.jit(inside)(jnp.zeros(3))
    gone = jnp.zeros(3)
    gone.delete()
    for value in (gone, jax.random.key(0)):
        with pytest.raises(LayoutError, match="cannot be read as an array"):
            library_of(value).read(value)


def test_an_array_in_parts_on_several_devices_is_refused():
    program = """
import jax, numpy
from oneaccord.arrays.libraries import library_of
devices = jax.devices()
halves = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
value = jax.device_put(numpy.zeros(4, "f4"), halves)
try:
    library_of(value).read(value)
except Exception as error:
    assert type(error).__name__ == "LayoutError" and "unsharded" in str(error), error
else:
    raise AssertionError
other = jax.device_put(numpy.zeros(4, "f4"), devices[1])
assert library_of(other).give(numpy.ones(2, "f4"), other).devices() == {devices[1]}
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
