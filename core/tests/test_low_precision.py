"""Fast reductions of small floats give the bits, and the warnings, of NumPy's own ufuncs."""

from __future__ import annotations

import ctypes
import itertools
import platform
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.arrays.dtypes import resolve_op
from oneaccord.arrays.low_precision import BLOCK, divide, fast_combine

HALVES = ("float16", "bfloat16")
BYTES = tuple(f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))
UFUNCS = {"add": np.add, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum}
LARGEST = {"float16": 0x7BFF, "bfloat16": 0x7F7F}
# Zeros, the ends of subnormal and normal numbers, one and its neighbours, infinities, NaN of both signs and kinds.
SPECIAL = {
    "float16": (0, 1, 2, 0x1FF, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x7800, 0x77FF, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
    "bfloat16": (0, 1, 2, 0x3F, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F00, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def check(ufunc: np.ufunc, left: np.ndarray, right: np.ndarray) -> None:
    """Compare with the ufunc, into a new array and in place of either operand."""
    expected = bits_of(ufunc(left, right))
    combine = fast_combine(ufunc, left.dtype)
    first, second = left.copy(), right.copy()
    for a, b, out in ((left, right, np.empty_like(left)), (first, right, first), (left, second, second)):
        combine(a, b, out=out)
        wrong = np.flatnonzero(bits_of(out) != expected)[:3]
        assert not wrong.size, [[hex(bits_of(x)[i]) for x in (left, right, out)] for i in wrong]


def takes(ufunc: np.ufunc, left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether a block goes the fast way."""
    _, kernel, _ = fast_combine(ufunc, left.dtype).args
    return kernel(left, right, np.empty_like(left))


@pytest.mark.parametrize("ufunc", UFUNCS.values(), ids=UFUNCS)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.long)])
def test_every_number_with_special_and_with_random_numbers(name, ufunc, count):
    everything = np.arange(1 << 16, dtype=np.uint16)
    one_sign = np.array([*SPECIAL[name], *np.random.default_rng(1).integers(0, LARGEST[name], count)], np.uint16)
    finite = everything[(everything & 0x7FFF) <= LARGEST[name]]
    if count == 1:  # one sign of the special numbers with both of all others that are finite, and one with all there are
        pairs = [*itertools.product(one_sign, [finite]), (one_sign[-1], everything)]
    else:
        pairs = [*itertools.product((*one_sign, *(one_sign | 0x8000)), (everything, finite))]
    for other, numbers in pairs:
        left, right = numbers.view(dtype_of(name)), np.full_like(numbers, other).view(dtype_of(name))
        check(ufunc, left, right)
        check(ufunc, right, left)


@pytest.mark.long
@pytest.mark.parametrize("ufunc", UFUNCS.values(), ids=UFUNCS)
@pytest.mark.parametrize("name", HALVES)
def test_ten_million_random_pairs(name, ufunc):
    """Of all sizes; of like sizes, where sums cancel and ties are common; and so small that results are subnormal."""
    generator = np.random.default_rng(2)
    top = LARGEST[name] + 1
    for number in range(10):
        left = generator.integers(0, top if number % 5 < 4 else top // 3, 1 << 20, np.uint16)
        right = generator.integers(0, top if number % 5 < 2 else top // 2, 1 << 20, np.uint16)
        if number % 5 == 2:
            right = np.clip(left.astype(np.int32) + generator.integers(-2500, 2500, left.size), 0, top - 1).astype(np.uint16)
        if name == "float16" and ufunc is np.add:  # larger ones are left to the ufunc
            left, right = (np.minimum(x, 0x77FF) for x in (left, right))
        left, right = (x | generator.integers(0, 2, x.size, np.uint16) << 15 for x in (left, right))
        check(ufunc, left.view(dtype_of(name)), right.view(dtype_of(name)))


@pytest.mark.parametrize("ufunc", UFUNCS.values(), ids=UFUNCS)
@pytest.mark.parametrize("name", BYTES)
def test_all_pairs_of_floats_of_eight_bits(name, ufunc):
    pairs = np.random.default_rng(3).permutation(1 << 16).astype(np.uint16)
    left, right = (pairs >> 8).astype(np.uint8), pairs.astype(np.uint8)
    check(ufunc, left.view(dtype_of(name)), right.view(dtype_of(name)))
    # Without what NumPy may warn of, which is left to the ufunc.
    finite = np.isfinite(left.view(dtype_of(name))) & np.isfinite(right.view(dtype_of(name)))
    left, right = left[finite].view(dtype_of(name)), right[finite].view(dtype_of(name))
    check(ufunc, left, right)
    if name != "float8_e8m0fnu":
        assert takes(ufunc, left[:BLOCK], right[:BLOCK])


@pytest.mark.parametrize("ufunc", UFUNCS.values(), ids=UFUNCS)
@pytest.mark.parametrize("name", HALVES)
def test_ordinary_numbers_go_the_fast_way(name, ufunc):
    """Else this would all be slow, and the comparisons here be of NumPy with itself."""
    generator = np.random.default_rng(4)
    left, right = (generator.standard_normal(BLOCK).astype(dtype_of(name)) for _ in range(2))
    left[::7], right[::5] = 0, -0.0
    left[::11] *= dtype_of(name).type(1e-5)
    if name == "float16" or ufunc in (np.add, np.multiply):
        assert takes(ufunc, left, right)


@given(st.data())
def test_any_size_shape_and_layout(data):
    """The memory may be read-only, start anywhere, overlap and be in any order; sizes are around those where the way changes."""
    name, ufunc = data.draw(st.sampled_from((*HALVES, "float8_e5m2"))), data.draw(st.sampled_from(list(UFUNCS.values())))
    dtype = dtype_of(name)
    sizes = st.integers(0, 20) | st.integers(4090, 4100) | st.integers(8190, 8194) | st.integers(2 * BLOCK - 2, 2 * BLOCK + 3)
    count = data.draw(sizes)
    memory = np.random.default_rng(count).standard_normal(6 * count + 64, np.float32).astype(dtype)
    memory = memory.view(np.uint8)
    parts = []
    for part in range(3):
        start = data.draw(st.integers(0, 5)) + (
            data.draw(st.integers(0, count)) if data.draw(st.booleans()) else 2 * part * count
        )
        array = memory[start * dtype.itemsize + data.draw(st.sampled_from((0, 0, 0, 1))) :][: count * dtype.itemsize].view(
            dtype
        )
        parts.append(array[::-1] if data.draw(st.integers(0, 5)) == 0 else array)
    left, right, out = parts
    if data.draw(st.booleans()) and count % 2 == 0:
        left, right, out = (x.reshape(2, -1) if data.draw(st.integers(0, 3)) else x.reshape(-1, 2).T for x in parts)
    if data.draw(st.booleans()):
        left.flags.writeable = right.flags.writeable = False
    expected = ufunc(left, right).tobytes()
    assert fast_combine(ufunc, dtype)(left, right, out=out) is out
    assert out.tobytes() == expected


@pytest.mark.parametrize("transposed", range(3))
def test_memory_that_is_not_contiguous(transposed):
    """It cannot be divided into blocks as it is."""
    numbers = np.random.default_rng(6).standard_normal((100, 200)).astype(np.float16)
    left, right, out = (numbers.T.copy().T if part == transposed else numbers.copy() for part in range(3))
    fast_combine(np.add, left.dtype)(left, right, out=out)
    assert np.array_equal(out, numbers + numbers)


def test_scalars_in_arrays():
    left, right, out = np.array(1.5, np.float16), np.array(2.0, np.float16), np.zeros((), np.float16)
    fast_combine(np.add, left.dtype)(left, right, out=out)
    assert out == 3.5


@pytest.mark.parametrize("ufunc", [np.add, np.multiply], ids=["add", "multiply"])
@pytest.mark.parametrize("name", [*HALVES, "float8_e5m2", "float8_e4m3fn"])
def test_warnings_are_those_of_the_ufunc(name, ufunc):
    dtype = dtype_of(name)
    quiet = np.ones(BLOCK, dtype)
    cases = []
    for value, other in itertools.product((float(ml_dtypes.finfo(dtype).max), np.inf, np.nan, -np.inf, 1e-7, 0.0), repeat=2):
        left, right = quiet.copy(), quiet.copy()
        left[5], right[5] = value, other
        cases.append((left, right))
    for (left, right), kind in itertools.product(cases, ("warn", "ignore", "raise")):
        seen = []
        for call in (ufunc, fast_combine(ufunc, dtype)):
            with warnings.catch_warnings(record=True) as told, np.errstate(all=kind):
                warnings.simplefilter("always")
                try:
                    call(left, right, out=np.empty_like(left))
                except FloatingPointError as error:
                    told.append(error)
            seen.append(sorted({str(getattr(one, "message", one)) for one in told}))
        assert seen[0] == seen[1], (left[5], right[5], kind)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 4099])
@pytest.mark.parametrize("name", [*HALVES, "float8_e4m3fn"])
def test_quotients_are_those_of_float32_rounded_to_the_dtype(name, count):
    dtype = dtype_of(name)
    numbers = np.resize(np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}"), 70_000).view(dtype)
    for layout in (lambda x: x, lambda x: x[:100], lambda x: x[::2], lambda x: x.reshape(2, -1), lambda x: x.reshape(2, -1).T):
        found = layout(numbers.copy())
        divide(found, count)
        assert found.tobytes() == (layout(numbers).astype(np.float32) / np.float32(count)).astype(dtype).tobytes()


def test_a_group_reduces_so():
    """`resolve_op` gives what is tested here, also for mean, and leaves alone what NumPy does well."""
    for name, ufunc in {"sum": np.add, "mean": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}.items():
        assert resolve_op(name, np.dtype(np.float16)).combine.args[0] is ufunc
        assert resolve_op(name, np.dtype(np.float32)).combine is ufunc


def test_threads_do_not_share_scratch_memory():
    generator = np.random.default_rng(5)
    pairs = [[generator.standard_normal(3 * BLOCK).astype(np.float16) for _ in range(2)] for _ in range(4)]
    start = threading.Barrier(len(pairs))

    def work(pair: list[np.ndarray]) -> bool:
        left, right = pair
        out, expected = np.empty_like(left), np.add(left, right)
        start.wait()
        return all(np.array_equal(fast_combine(np.add, left.dtype)(left, right, out=out), expected) for _ in range(20))

    with ThreadPoolExecutor(len(pairs)) as pool:
        assert all(pool.map(work, pairs))


@pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="sets x86's MXCSR by glibc's fenv_t"
)
@pytest.mark.parametrize("ufunc", UFUNCS.values(), ids=UFUNCS)
def test_a_processor_that_flushes_subnormals_changes_nothing(ufunc):
    """Some libraries, built with -ffast-math, make every thread do so as soon as they are loaded."""
    left = np.arange(1, BLOCK + 1, dtype=np.uint16) % 0x3FF
    left, right = left.view(np.float16), np.where(left % 2, left[::-1], 0x6400).astype(np.uint16).view(np.float16)
    expected = ufunc(left, right).tobytes()
    libm = ctypes.CDLL("libm.so.6")
    before = ctypes.create_string_buffer(32)
    libm.fegetenv(before)
    now = (ctypes.c_uint32 * 8).from_buffer_copy(before)
    now[7] |= 0x8040  # flush to zero, and take subnormal operands for zero
    out = np.empty_like(left)
    libm.fesetenv(now)
    try:
        flushed = np.full(1, 1e-40, np.float32) * np.float32(1) == 0
        fast_combine(ufunc, left.dtype)(left, right, out=out)
    finally:
        libm.fesetenv(before)
    assert flushed.all()
    assert out.tobytes() == expected
