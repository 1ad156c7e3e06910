"""What NCCL does not reduce, in words that say what to do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oneaccord.api import UnsupportedError
from oneaccord_nccl.dtypes import Abilities, Wire, named, wire_of

NOW = Abilities(23203, (9, 0))
HOST = 'copy it to the host and reduce it there, or let gpu_fallback = "host" do so'


def typed(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@pytest.mark.parametrize(
    ("dtype", "op", "said"),
    [
        ("int16", "sum", f'NCCL does not reduce int16: convert it with x.astype("int32"), or {HOST}'),
        ("uint16", "max", f'NCCL does not reduce uint16: convert it with x.astype("int32"), or {HOST}'),
        ("longdouble", "sum", f'NCCL does not reduce {np.dtype("g").name}: convert it with x.astype("float64"), or {HOST}'),
        ("clongdouble", "sum", f'NCCL does not reduce {np.dtype("G").name}: convert it with x.astype("complex128"), or {HOST}'),
        ("float8_e4m3", "sum", f'NCCL does not reduce float8_e4m3: convert it with x.astype("float16"), or {HOST}'),
        ("float8_e4m3fnuz", "min", f'NCCL does not reduce float8_e4m3fnuz: convert it with x.astype("float16"), or {HOST}'),
        ("int32", "xor", f'NCCL has no op="xor", which is bitwise: {HOST}'),
        ("int16", "and", f'NCCL has no op="and", which is bitwise: {HOST}'),
        (
            "bool",
            "xor",
            f'NCCL has no op="xor" for bool, only and, or, min and max: reduce x.astype("uint8") by sum, or {HOST}',
        ),
        ("complex64", "product", f'NCCL has no op="product" for complex64, only sum and mean: {HOST}'),
        ("complex128", "max", f'NCCL has no op="max" for complex128, only sum and mean: {HOST}'),
        ("bool", "Op(f)", f"NCCL has no op=Op(f): use one of sum, product, max, min, mean; {HOST}"),
        ("float32", "np.hypot", f"NCCL has no op=np.hypot: use one of sum, product, max, min, mean; {HOST}"),
    ],
)
def test_a_reduction_that_nccl_lacks_is_refused_in_words(dtype, op, said):
    with pytest.raises(UnsupportedError) as caught:
        wire_of(typed(dtype), op, NOW)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("dtype", "op", "abilities", "said"),
    [
        (
            "float8_e5m2",
            "sum",
            Abilities(22304, (9, 0)),
            'NCCL reduces float8_e5m2 from 2.24 on, and the installed version is 2.23.4: convert it with x.astype("float16")',
        ),
        (
            "float8_e4m3fn",
            "max",
            Abilities(23203, (8, 9)),
            (
                "NCCL reduces float8_e4m3fn on GPUs of compute capability 9.0 or higher, and one of this job has 8.9: "
                'convert it with x.astype("float16")'
            ),
        ),
        (
            "bfloat16",
            "sum",
            Abilities(21000, (8, 0)),
            'NCCL reduces bfloat16 from 2.10.3 on, and the installed version is 2.10.0: convert it with x.astype("float32")',
        ),
        (
            "float32",
            "mean",
            Abilities(2808, (7, 0)),
            'NCCL has op="mean" from 2.10 on, and the installed version is 2.8.8: use op="sum" and divide',
        ),
    ],
)
def test_what_an_older_nccl_or_gpu_lacks_is_refused_in_words(dtype, op, abilities, said):
    with pytest.raises(UnsupportedError) as caught:
        wire_of(typed(dtype), op, abilities)
    assert str(caught.value) == said
    wire_of(typed(dtype), op, NOW)


@pytest.mark.parametrize("dtype", ["longlong", "int64", "q"])
def test_names_of_one_dtype_are_one_type_of_nccl(dtype):
    assert wire_of(np.dtype(dtype), "sum", NOW) == Wire(4, 0)


def test_complex_numbers_are_twice_as_many_floats():
    assert wire_of(np.dtype("c8"), "sum", NOW) == Wire(7, 0, 2)
    assert wire_of(np.dtype("c16"), "mean", NOW) == Wire(8, 4, 2)


@pytest.mark.parametrize(("version", "name"), [(2808, "2.8.8"), (21003, "2.10.3"), (23203, "2.32.3")])
def test_a_version_is_named_as_people_write_it(version, name):
    assert named(version) == name
