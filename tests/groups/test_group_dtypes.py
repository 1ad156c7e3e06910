"""Every dtype through every collective and message, and the whole table of dtypes and reductions."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group

SIZE = 3
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128", "clongdouble"]
LOW_PRECISION = [
    "bfloat16",
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
]
ALL = ["bool", *INTEGERS, *FLOATS, *COMPLEX, *LOW_PRECISION]
ANY = {"bool", "integer", "float", "complex"}
NAMED = {
    "sum": (np.add, ANY - {"bool"}),
    "mean": (np.add, {"float", "complex"}),
    "product": (np.multiply, ANY - {"bool"}),
    "min": (np.minimum, ANY - {"complex"}),
    "max": (np.maximum, ANY - {"complex"}),
    "and": (np.bitwise_and, {"bool", "integer"}),
    "or": (np.bitwise_or, {"bool", "integer"}),
    "xor": (np.bitwise_xor, {"bool", "integer"}),
}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if name in LOW_PRECISION else np.dtype(name)


def kind_of(name: str) -> str:
    if name in INTEGERS:
        return "integer"
    return "bool" if name == "bool" else "complex" if name in COMPLEX else "float"


def values_of(name: str, rank: int, count: int = 6) -> np.ndarray:
    """Return numbers whose sums, products and means over three ranks are exact in every dtype."""
    numbers = np.array([1, 2, 1, 1, 2, 1] if name == "float8_e8m0fnu" else [1, 0, 2, 1, 0, 2]) * (1 if rank else 2)
    if name == "bool":
        return np.resize(np.arange(6) % (rank + 2) == 0, count)
    return np.resize(numbers, count).astype(dtype_of(name))


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    return actual.dtype == expected.dtype and actual.shape == expected.shape and bool((actual == expected).all())


def test_the_table_of_dtypes_and_reductions(world):
    """Each pair gives what NumPy gives, or is refused in words that name both and say what to do."""

    def program(group: Group) -> None:
        for name in ALL:
            for op in NAMED:
                check(group, name, op)

    def check(group: Group, name: str, op: str) -> None:
        ufunc, kinds = NAMED[op]
        rank, dtype = group.rank, dtype_of(name)
        everybody = [values_of(name, r) for r in range(SIZE)]
        if kind_of(name) not in kinds:
            methods = [group.all_reduce, group.reduce, group.reduce_scatter]
            for method in methods:
                with pytest.raises(oa.DTypeError) as caught:
                    method(everybody[rank], op)
                assert f'op="{op}"' in str(caught.value)
                assert str(dtype) in str(caught.value)
                assert len(str(caught.value).partition(": ")[2]) > 10
            group.barrier()
            return
        expected = functools.reduce(ufunc, everybody)
        if op == "mean":
            expected = (expected / dtype.type(SIZE)).astype(dtype)
        assert same(group.all_reduce(everybody[rank], op), expected), op
        assert same(group.reduce_scatter(everybody[rank], op), expected[2 * rank : 2 * rank + 2]), op
        reduced = group.reduce(everybody[rank], op, 1)
        assert reduced is None if rank != 1 else same(reduced, expected), op
        assert same(group.all_reduce(everybody[rank][0], op), expected[0, ...]), op

    world(program, SIZE)


def test_integers_overflow_as_numpys_do(world):
    def program(group: Group) -> None:
        assert group.all_reduce(np.array([100, -100], np.int8)).tolist() == [44, -44]
        assert group.all_reduce(np.array([200], np.uint8)).tolist() == [88]

    world(program, 3)


UFUNCS = [
    (np.add, "int32"),
    (np.logical_or, "bool"),
    (np.logical_and, "bool"),
    (np.logical_xor, "bool"),
    (np.gcd, "int64"),
    (np.lcm, "uint16"),
    (np.fmax, "float32"),
    (np.fmin, "float16"),
    (np.bitwise_xor, "uint8"),
    (np.maximum, "bfloat16"),
    (np.multiply, "complex64"),
]


def test_ufuncs(world):
    def program(group: Group) -> None:
        for ufunc, name in UFUNCS:
            everybody = [values_of(name, rank) for rank in range(group.world_size)]
            assert same(group.all_reduce(everybody[group.rank], ufunc), functools.reduce(ufunc, everybody)), (ufunc, name)

    world(program, SIZE)


NO_REDUCTIONS = [
    (np.sqrt, "float64", "sqrt .*two arguments with one result"),
    (np.modf, "float64", "modf .*two arguments with one result"),
    (np.divmod, "int64", "divmod .*two arguments with one result"),
    (np.subtract, "int64", "subtract is not associative"),
    (np.true_divide, "float64", "divide is not associative"),
    (np.power, "float64", "power is not associative"),
    (np.less, "float64", "less is not associative"),
    (np.logical_and, "float64", "logical_and turns float64 into bool"),
    (np.logaddexp, "int64", "logaddexp turns int64 into float64"),
    (np.gcd, "float64", "gcd is not defined for arrays of float64"),
    (np.bitwise_and, "float32", "not defined for arrays of float32"),
    (np.add, "bool", "not defined for arrays of bool"),
    (np.matmul, "float64", "matmul .*element-by-element"),
    (np.vecdot, "float64", "vecdot .*element-by-element"),
    (np.frompyfunc(lambda a, b: a, 2, 1), "float64", "frompyfunc, returns Python objects.*give a function of two arrays"),
    ("Sum", "float64", 'did you mean "sum"'),
    ("avg", "float64", "'avg' is not a reduction.*did you mean \"mean\".*sum, mean, product"),
    ("prod", "float64", 'did you mean "product"'),
    ("MAXIMUM", "float64", 'did you mean "max"'),
    ("bitwise_or", "int64", 'did you mean "or"'),
    ("BXOR", "int64", 'did you mean "xor"'),
    ("summ", "float64", 'did you mean "sum"'),
    ("", "float64", "is not a reduction"),
    (None, "float64", "None is not a reduction"),
    (np.sum, "float64", "is not a reduction"),
    (sum, "float64", "is not a reduction"),
    (["sum"], "float64", "is not a reduction"),
    (3, "float64", "3 is not a reduction"),
    (np.ones(2), "float64", r"op=<ndarray> is not a reduction \(did you mean out="),
]


def test_what_is_no_reduction_is_refused(world):
    def program(group: Group) -> None:
        for op, name, words in NO_REDUCTIONS:
            for method in (group.all_reduce, group.reduce, group.reduce_scatter):
                with pytest.raises(oa.DTypeError, match=f"(?s){words}"):
                    method(values_of(name, group.rank), op)
        assert group.all_reduce(1).item() == SIZE

    world(program, SIZE)


REFUSED = {
    "big-endian": (np.arange(3, dtype=">f4"), r"order.*newbyteorder"),
    "structured twice": (np.zeros(3, [("a", [("b", "f4")])]), "structured.*one by one"),
    "objects": (np.array([1, None, "x"], object), "Python objects.*never pickles"),
    "structured objects": (np.zeros(3, [("a", object)]), "Python objects"),
    "text": (np.array(["a", "b", "c"]), "text"),
    "bytes": (np.array([b"a", b"b", b"c"]), "text"),
    "python text": ("abc", "text"),
    "python bytes": (b"abc", "text"),
    "datetime": (np.zeros(3, "M8[s]"), r'times.*astype\("int64"\)'),
    "timedelta": (np.zeros(3, "m8[s]"), r'times.*astype\("int64"\)'),
    "void": (np.zeros(3, "V4"), "not one of NumPy's numeric dtypes"),
    "int4": (np.zeros(3, ml_dtypes.int4), "not one of NumPy's numeric dtypes"),
    "a large Python number": (2**70, "Python objects"),
    "None": (None, "Python objects"),
    "a dict": ({"a": 1}, r"Python objects.*send_object\(\), broadcast_object\(\)"),
}


def test_what_cannot_travel_is_refused_in_words_and_leaves_the_group_usable(world):
    def program(group: Group) -> None:
        for value, words in REFUSED.values():
            refuse(group, value, words)
        assert group.all_reduce(1).item() == SIZE

    def refuse(group: Group, value: object, words: str) -> None:
        rank, root = group.rank, group.rank
        calls = [
            lambda: group.all_reduce(value),
            lambda: group.reduce(value),
            lambda: group.broadcast(value if value is not None else np.array(None)),
            lambda: group.all_gather(value),
            lambda: group.gather(value),
            lambda: group.scatter(value if value is not None else np.array(None), root),
            lambda: group.reduce_scatter(value),
            lambda: group.all_to_all(value),
            lambda: group.send(value, (rank + 1) % SIZE),
            lambda: group.sendrecv(value, (rank + 1) % SIZE, (rank - 1) % SIZE),
        ]
        for call in calls:
            with pytest.raises(oa.DTypeError, match=f"(?s)cannot travel.*{words}"):
                call()

    world(program, SIZE)


def test_big_endian_out_is_refused(world):
    def program(group: Group) -> None:
        with pytest.raises(oa.DTypeError, match=">f8"):
            group.all_reduce(np.zeros(3), out=np.zeros(3, ">f8"))
        with pytest.raises(oa.DTypeError, match=">f8"):
            group.recv((group.rank + 1) % SIZE, out=np.zeros(3, ">f8"))
        group.barrier()

    world(program, SIZE)


def test_what_numpy_cannot_read_is_refused_in_words(world):
    class NotOnHost:
        __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (1, False), "version": 3}  # noqa: RUF012

    def program(group: Group) -> None:
        with pytest.raises(oa.LayoutError, match="list cannot be read as an array"):
            group.all_reduce([[1, 2], [3]])
        with pytest.raises(oa.UnsupportedError, match=r"GPU is read through CuPy.*import cupy"):
            group.all_reduce(NotOnHost())
        group.barrier()

    world(program, 2)
