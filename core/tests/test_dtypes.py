"""Wire codes of dtypes, and what is a reduction of which."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.arrays.dtypes import OP_NAMES, check_dtype, dtype_code, dtype_from_code, dtype_name, fields_of, resolve_op
from oneaccord.errors import DTypeError

# A code that changes is a protocol that changes: two versions would read each other's bytes wrongly.
CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "longdouble": 13,
    "complex64": 14,
    "complex128": 15,
    "clongdouble": 16,
    "bfloat16": 17,
    "float8_e4m3fn": 18,
    "float8_e5m2": 19,
    "float8_e4m3": 20,
    "float8_e3m4": 21,
    "float8_e4m3fnuz": 22,
    "float8_e5m2fnuz": 23,
    "float8_e4m3b11fnuz": 24,
    "float8_e8m0fnu": 25,
}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


@pytest.mark.parametrize("name", CODES)
def test_every_dtype_has_its_code_and_comes_back_from_it(name):
    assert check_dtype(dtype_of(name)) == dtype_code(dtype_of(name)) == CODES[name]
    assert dtype_from_code(CODES[name]) == dtype_of(name)
    assert dtype_name(CODES[name]) == name


@pytest.mark.parametrize("alias", ["b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "e", "f", "d", "g", "F", "D", "G", "?"])
def test_the_many_names_of_one_dtype_have_one_code(alias):
    dtype = np.dtype(alias)
    assert dtype_from_code(dtype_code(dtype)) == dtype


def test_unknown_codes():
    for code in (0, 26, 255):
        assert dtype_from_code(code) is None
    assert dtype_name(99) == "dtype code 99"


STRUCTURED = [
    "f8,i8",
    [("a", "?"), ("größe", "f4", (2, 3)), ("z", "c16")],
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    {"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [8, 0], "itemsize": 20},
    [("low", ml_dtypes.bfloat16), ("long", "g")],
]


@pytest.mark.parametrize("made", STRUCTURED)
def test_a_structured_dtype_comes_back_from_its_fields(made):
    dtype = np.dtype(made)
    back = dtype_from_code(check_dtype(dtype), fields_of(dtype))
    assert back == dtype
    assert (back.itemsize, back.isalignedstruct or True) == (dtype.itemsize, True)
    assert dtype_name(dtype_code(dtype), fields_of(dtype)) == str(back)
    assert fields_of(dtype) != fields_of(np.dtype([("a", "f8"), ("b", "i8")]))


@given(
    data=st.binary()
    | st.sampled_from(STRUCTURED).flatmap(lambda made: st.permutations(list(fields_of(np.dtype(made)))).map(bytes))
)
def test_any_bytes_are_fields_or_not(data):
    dtype = dtype_from_code(128, data)
    assert dtype is None or dtype.names is not None
    assert dtype_name(128, data)


def test_no_dtype_has_the_fields_of_another():
    assert fields_of(np.dtype(float)) == fields_of(np.dtype([])) == fields_of(np.dtype([("a", object)])) == b""


def test_low_precision_without_ml_dtypes(run_python: Callable[..., subprocess.CompletedProcess[str]]):
    """A rank without ml_dtypes says so instead of failing at import."""
    done = run_python(
        "-c",
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from oneaccord.arrays.dtypes import dtype_code, dtype_from_code\n"
        "import numpy as np\n"
        "assert dtype_from_code(17) is None and dtype_from_code(12) == np.float64 and dtype_code(np.dtype(float)) == 12",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stranger_named_like_one_of_ours_is_refused():
    class bfloat16(np.void):  # noqa: N801
        pass

    with pytest.raises(DTypeError, match="cannot travel"):
        check_dtype(np.dtype((bfloat16, 2)))


@pytest.mark.parametrize("name", OP_NAMES)
def test_reductions_are_resolved_once(name):
    dtype = np.dtype("f8,i8" if name.endswith("loc") else bool if name in ("and", "or", "xor") else float)
    reduction = resolve_op(name, dtype)
    assert (reduction.name, reduction.code, reduction.is_mean) == (name, OP_NAMES.index(name) + 1, name == "mean")
    assert resolve_op(name, dtype) is reduction


@pytest.mark.parametrize(
    ("ufunc", "name"),
    [(np.add, "sum"), (np.multiply, "product"), (np.minimum, "min"), (np.maximum, "max"), (np.bitwise_xor, "xor")],
)
def test_a_ufunc_with_a_name_is_that_reduction(ufunc, name):
    """So that ranks which write one thing in two ways agree."""
    assert resolve_op(ufunc, np.dtype(np.int64)) is resolve_op(name, np.dtype(np.int64)) or resolve_op(
        ufunc, np.dtype(np.int64)
    ) == resolve_op(name, np.dtype(np.int64))


def test_an_impostor_is_not_taken_for_a_reduction_with_a_name():
    impostor = np.frompyfunc(lambda a, b: a, 2, 1)
    impostor_named_add = type("Fake", (), {"__name__": "add"})()
    for op in (impostor, impostor_named_add):
        with pytest.raises(DTypeError):
            resolve_op(op, np.dtype(float))
