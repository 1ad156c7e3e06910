"""The reductions of C give NumPy's bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

native = pytest.importorskip("manyhands_native", reason="there was no C compiler", exc_type=ImportError)

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
