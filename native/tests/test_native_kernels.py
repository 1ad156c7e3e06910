"""The reductions of C give NumPy's bits."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.worlds import must, thread_world

from oneaccord.api import Group
from oneaccord.arrays.low_precision import compiled_combine, fast_combine

native = pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

REDUCE, INPUT, OUTPUT = 4, 0, 1
OPS: list[np.ufunc] = [np.add, np.multiply, np.maximum, np.minimum, np.bitwise_xor, np.hypot, np.fmax]
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
KNOWN = [(op, dtype) for op in OPS for dtype in DTYPES if f"{np.dtype(dtype).char * 2}->{np.dtype(dtype).char}" in op.types]


def reduction(op: np.ufunc, dtype: str) -> native.Program:
    """Return a program of one step: the output becomes the input op the output."""
    steps = ((REDUCE, None, b"", b"", 0, INPUT, OUTPUT, OUTPUT),)
    given = np.dtype(dtype)
    return native.Program(steps, ((INPUT, 0, -1), (OUTPUT, 0, -1)), op, given.num, given.itemsize, 0, None)


@given(data=st.data())
def test_bits_are_those_of_numpy(data: st.DataObject) -> None:
    op, dtype = data.draw(st.sampled_from(KNOWN))
    shape = data.draw(st.integers(0, 70))
    left, right = (data.draw(arrays.arrays(dtype, shape)) for _ in range(2))
    other = right.copy()
    with np.errstate(all="ignore"):
        op(left, right, out=right)
    assert reduction(op, dtype).run(left, other, 0) == -1
    assert other.tobytes() == right.tobytes()


@pytest.mark.parametrize(("op", "dtype"), [(np.bitwise_and, "f8"), (np.hypot, "i4"), (np.add, "V8"), (np.negative, "f8")])
def test_what_c_does_not_know_is_left_to_python(op: np.ufunc, dtype: str) -> None:
    with pytest.raises(ValueError, match="a reduction that C does not know"):
        reduction(op, dtype)


@pytest.mark.parametrize("shift", [1, 4])
def test_what_lies_askew_or_shares_memory_in_part_is_left_to_python(shift: int) -> None:
    memory = np.zeros(64, np.uint8)
    crooked = np.ndarray(3, np.float64, memory, shift)
    assert reduction(np.add, "f8").run(crooked, np.ones(3), 0) == 0
    numbers = np.arange(12.0)
    assert reduction(np.add, "f8").run(numbers[:8], numbers[shift : shift + 8], 0) == 0
    assert numbers.tolist() == list(range(12))


def reductions() -> Iterator[tuple[np.dtype, np.ufunc]]:
    """Yield the reductions of floats of 16 and 8 bits that C has."""
    names = [name for name in dir(ml_dtypes) if name.startswith("float8")]
    for dtype in map(np.dtype, (np.float16, ml_dtypes.bfloat16, *(getattr(ml_dtypes, name) for name in names))):
        for ufunc in (np.add, np.multiply, np.minimum, np.maximum):
            if fast_combine(ufunc, dtype) is not ufunc:
                yield dtype, ufunc


LOW = list(reductions())


@pytest.mark.parametrize(("dtype", "ufunc"), LOW, ids=[f"{ufunc.__name__} {dtype}" for dtype, ufunc in LOW])
def test_bits_of_short_floats_are_those_of_numpy(dtype: np.dtype, ufunc: np.ufunc) -> None:
    _, combine = compiled_combine(native, fast_combine(ufunc, dtype))
    rng = np.random.default_rng(7)
    every = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    every = np.tile(every, max(1, 5000 // every.size))
    harmless = np.where(np.isfinite(every.astype(np.float32)), every, dtype.type(1))
    for left, right in ((every, rng.permutation(every)), (harmless, rng.permutation(harmless)), (every, every[::-1].copy())):
        mixed = np.concatenate([harmless, left[: left.size // 2 + 3]])[
            -every.size :
        ].copy()  # Python does its part in the midst
        with np.errstate(all="ignore"):
            for one, other in ((left, right), (mixed, right)):
                expected, found = ufunc(one, other), one.copy()
                assert combine(found, other, out=found) is found  # in place
                assert found.tobytes() == expected.tobytes()


def test_it_warns_of_what_numpy_warns_of() -> None:
    _, combine = compiled_combine(native, fast_combine(np.add, np.dtype(np.float16)))
    large = np.full(10_000, 60_000, np.float16)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        combine(large, large, out=large)


@pytest.mark.parametrize("wrong", ["float16 subtract", "float8", ""])
def test_a_reduction_that_c_has_not_is_refused(wrong: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        native.Low(wrong)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_calls_with_what_c_leaves_to_python_give_the_same_bits(backend: str, dtype: type) -> None:
    """NaN, infinities and overflows come in the midst of a program, and of a message that is received in place."""

    def program(group: Group) -> list[bytes]:
        found = []
        for seed in range(6):
            rng = np.random.default_rng([seed, group.rank])
            values = rng.standard_normal(30_000).astype(np.float32)
            values[rng.integers(0, values.size, seed)] = np.array([np.nan, np.inf, -np.inf, 6e4, -0.0])[
                rng.integers(0, 5, seed)
            ]
            array = values.astype(dtype)
            with np.errstate(all="ignore"):
                found += [
                    group.all_reduce(array).tobytes(),
                    group.all_reduce(array, "max").tobytes(),
                    group.scan(array).tobytes(),
                ]
                found.append(group.all_reduce(array, out=array).tobytes())
        return found

    both = [must(thread_world(program, 3, backend, config={"native": form})) for form in (True, False)]
    assert both[0] == both[1]
