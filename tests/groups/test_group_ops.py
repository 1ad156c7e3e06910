"""``op=`` as a function of the user's own, values with their locations, and arrays of structured dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

Array = np.ndarray[Any, Any]

BACKENDS = ["simulated", "tcp"]
MATRIX = np.dtype([("m", "i8", (2, 2))])
PAIR = np.dtype([("value", "f8"), ("index", "i8")])
RGB = np.dtype([("red", "u1"), ("green", "u1"), ("blue", "u1")])
"""Its elements are 3 bytes: what streams does not come in whole ones."""


def times(a: Array, b: Array) -> Array:
    """Multiply 2 x 2 matrices of integers: associative, and exact, and not commutative."""
    product = np.empty_like(a)
    product["m"] = a["m"] @ b["m"]
    return product


LAST = oa.Op(lambda a, b: b, commutative=False)
MATRICES = oa.Op(times, commutative=False, identity=(np.eye(2, dtype=int).tolist(),))


def matrices(rank: int, count: int) -> Array:
    made = np.empty(count, MATRIX)
    made["m"] = np.random.default_rng([rank, 3]).integers(-3, 4, (count, 2, 2))
    return made


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def larger_magnitude(a: Array, b: Array) -> Array:
    return np.where(np.abs(a) >= np.abs(b), a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_reduces(backend: str) -> None:
    size, count = 4, 120_000
    parts = [np.random.default_rng([rank, 1]).permutation(np.arange(count, dtype=np.int64)) * 2 for rank in range(size)]
    expected = reduce(larger_magnitude, parts)

    def program(group: Group) -> None:
        mine = parts[group.rank]
        for length in (0, 1, 5, count):
            assert same(group.all_reduce(mine[:length], larger_magnitude), expected[:length])
            result = group.reduce(mine[:length], larger_magnitude, root=1)
            assert result is None or same(result, expected[:length])
        assert same(group.reduce_scatter(mine, larger_magnitude), np.split(expected, size)[group.rank])
        assert same(group.all_reduce_async(mine, larger_magnitude).wait(), expected)
        with group.coalesce() as batch:
            works = [batch.all_reduce(mine[:7], larger_magnitude), batch.all_reduce(mine[7:9], larger_magnitude)]
        assert [work.wait().tolist() for work in works] == [expected[:7].tolist(), expected[7:9].tolist()]
        assert group.all_reduce(mine.reshape(2, 3, -1)[:, ::2], larger_magnitude).shape == (2, 2, count // 6)
        assert group.all_reduce(group.rank, larger_magnitude).shape == ()

    must(thread_world(program, size, backend))


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_function_that_keeps_what_it_gets_breaks_nothing(backend: str) -> None:
    """It must not, and what it keeps may change; but it is memory all the same, and the process goes on."""
    kept: list[Array] = []

    def keep(a: Array, b: Array) -> Array:
        kept.extend([a, b])
        return a

    def program(group: Group) -> None:
        for dtype in ("f8", [("a", "f8"), ("b", "f4")]):
            group.all_reduce(np.ones(300_000, dtype), keep)

    must(thread_world(program, 2, backend))
    assert kept
    assert all(array.tobytes() for array in kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [3, 4])
def test_what_does_not_commute_is_combined_in_the_order_of_ranks(backend: str, size: int) -> None:
    counts = (1, 5, 4096, 20_000)
    parts = [matrices(rank, max(counts)) for rank in range(size)]
    expected = reduce(times, parts)

    def program(group: Group) -> None:
        for count in counts:
            mine = parts[group.rank][:count]
            assert same(group.all_reduce(mine, MATRICES), expected[:count])
            result = group.reduce(mine, MATRICES, root=size - 1)
            assert result is None or same(result, expected[:count])
        rows = np.split(expected[: 1000 * size], size)[group.rank]
        assert same(group.reduce_scatter(parts[group.rank][: 1000 * size], MATRICES), rows)
        with group.coalesce() as batch:
            work = batch.all_reduce(parts[group.rank][:50], MATRICES)
        assert same(work.wait(), expected[:50])

    must(thread_world(program, size, backend))


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 7), count=st.integers(0, 9), data=st.data())
def test_every_collective_that_reduces_agrees_with_numpy_over_the_ranks(size: int, count: int, data: st.DataObject) -> None:
    """Maps x -> a x + b modulo 2**64, composed: which order they have in the result shows."""
    maps = np.dtype([("a", "u8"), ("b", "u8")])
    numbers = st.integers(0, 2**64 - 1)
    drawn = data.draw(st.lists(st.tuples(numbers, numbers), min_size=size * count, max_size=size * count))
    parts = np.array(drawn, maps).reshape(size, count)

    def compose(f: Array, g: Array) -> Array:
        both = np.empty_like(f)
        both["a"], both["b"] = f["a"] * g["a"], f["a"] * g["b"] + f["b"]
        return both

    op = oa.Op(compose, commutative=False, identity=(1, 0))
    prefixes = [np.full(count, np.array((1, 0), maps))]
    for part in parts:
        prefixes.append(compose(prefixes[-1], part))

    def program(group: Group) -> None:
        mine = parts[group.rank].copy()
        assert same(group.all_reduce(mine, op), prefixes[-1])
        assert same(group.scan(mine, op), prefixes[group.rank + 1])
        assert same(group.exscan(mine, op), prefixes[group.rank])
        assert same(group.exscan(mine, op, out=mine), prefixes[group.rank])

    must(thread_world(program, size, "simulated"))


def raises(a: Array, b: Array) -> Array:
    raise ZeroDivisionError("no")


def writes(a: Array, b: Array) -> Array:
    a += b
    return a


BROKEN: dict[str, tuple[Any, type[Exception], str]] = {
    "another shape": (lambda a, b: (a + b)[:1], oa.SizeMismatchError, r"shape \[1\].*float64\[2\]"),
    "another dtype": (lambda a, b: a > b, oa.DTypeError, "array of bool.*astype"),
    "no array": (
        lambda a, b: float(a.sum()),
        oa.DTypeError,
        "returned a float.*each on its own; a matrix is one element only with such a dtype",
    ),
    "nothing": (lambda a, b: None, oa.DTypeError, "returned a NoneType"),
    "writes": (writes, oa.LayoutError, r"op=Op\(writes\) writes into its arguments, which are read-only"),
    "one argument": (lambda a: a, oa.UsageError, "raised TypeError"),
}


def test_a_function_that_cannot_reduce_is_refused_before_any_byte_moves() -> None:
    def program(group: Group) -> float:
        x = np.arange(5.0)
        for fn, error, words in BROKEN.values():
            calls: list[Callable[[], Any]] = [
                *(partial(call, x, fn) for call in (group.all_reduce, group.reduce, group.scan, group.all_reduce_async)),
                partial(group.reduce_scatter, x, fn, counts=[2, 3]),
            ]
            for call in calls:
                with pytest.raises(error, match=words):
                    call()
            with group.coalesce() as batch, pytest.raises(error, match=words):
                batch.all_reduce(x, fn)
        return float(group.all_reduce(1.0))

    assert must(thread_world(program, 2, "simulated")) == [2, 2]


@pytest.mark.parametrize("backend", ["simulated", "shm", "tcp"])
@pytest.mark.parametrize(
    ("collective", "count"), [("all_reduce", 4), ("all_reduce", 200_000), ("reduce", 4), ("scan", 200_000)]
)
def test_a_function_that_fails_in_the_midst_of_a_call_ends_it_everywhere(backend: str, count: int, collective: str) -> None:
    seen: list[int] = []

    def fails_on_two(a: Array, b: Array) -> Array:
        if (np.maximum(a, b) == 2).any():
            seen.append(1)
            raise ZeroDivisionError("two")
        return a + b

    def program(group: Group) -> None:
        getattr(group, collective)(np.full(count, group.rank, np.int64), fails_on_two)

    outcomes = thread_world(program, 3, backend)
    assert seen
    own = [outcome for outcome in outcomes if isinstance(outcome, oa.UsageError)]
    assert own
    assert all("fails_on_two" in str(error) and "raised ZeroDivisionError: two" in str(error) for error in own)
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in own)
    others = [outcome for outcome in outcomes if not isinstance(outcome, oa.UsageError)]
    assert all(isinstance(error, oa.AbortedError) and "broke off" in str(error) for error in others), outcomes


def test_a_function_that_changes_its_mind_is_found() -> None:
    def program(group: Group) -> None:
        turns = iter([True])

        def once(a: Array, b: Array) -> Array:
            return a + b if next(turns, False) else (a + b).astype(np.float32)

        group.all_reduce(np.ones(3), oa.Op(once, name="once"))

    outcomes = thread_world(program, 2, "simulated")
    assert all(isinstance(outcome, oa.DTypeError | oa.AbortedError) for outcome in outcomes)
    assert any(isinstance(outcome, oa.DTypeError) and "float32" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (oa.Op(np.add, name="plus"), oa.Op(np.add, name="times"), ['op="Op(plus)"', 'op="Op(times)"']),
        (oa.Op(times), oa.Op(times, commutative=False), ['op="Op(times)"', 'op="Op(times, commutative=False)"']),
        (oa.Op(np.add, name="sum"), "sum", ['op="Op(sum)"', 'op="sum"']),
        (larger_magnitude, lambda a, b: a + b, ['op="Op(larger_magnitude)"', "<lambda> of line"]),
        (*(lambda a, b: a + b, lambda a, b: a * b), ["<lambda> of line"]),  # one line
    ],
)
def test_ranks_that_give_other_functions_all_learn_of_it(one: Any, other: Any, words: list[str]) -> None:
    def program(group: Group) -> None:
        dtype = MATRIX if one == oa.Op(times) else np.dtype(float)
        group.all_reduce(np.zeros(3, dtype), one if group.rank < 2 else other)

    outcomes = thread_world(program, 3, "simulated")
    for outcome in outcomes:
        assert isinstance(outcome, oa.CollectiveMismatchError)
        assert all(word in str(outcome) for word in words), outcome


def test_an_op_and_its_plain_function_are_the_same() -> None:
    def program(group: Group) -> float:
        return float(group.all_reduce(-2.0 * group.rank, larger_magnitude if group.rank else oa.Op(larger_magnitude)))

    assert must(thread_world(program, 3, "simulated")) == [-4, -4, -4]


@pytest.mark.parametrize(
    "make",
    [lambda: oa.Op(3), lambda: oa.Op("sum"), lambda: oa.Op(times, name=""), lambda: oa.Op(times, name="x" * 201)],  # type: ignore[arg-type]
)
def test_an_op_that_cannot_be(make: Callable[[], Any]) -> None:
    with pytest.raises(oa.UsageError):
        make()


@pytest.mark.parametrize(
    ("op", "name"), [(np.sum, "sum"), (sum, "sum"), (max, "max"), (np.argmin, "minloc"), (np.prod, "product")]
)
def test_a_function_of_one_array_gets_a_hint(op: Any, name: str) -> None:
    with oa.init(world_size=1) as group, pytest.raises(oa.DTypeError, match=f'did you mean "{name}"'):
        group.all_reduce(np.ones(3), op)


# Values with their locations


def best(parts: list[Array], op: str) -> Array:
    """The rule, one element at a time: a NaN first, then the better value, then the smaller location."""
    value, place = parts[0].dtype.names or ("", "")

    def order(pair: Any) -> tuple[bool, float, int]:
        number = float(pair[value])
        is_nan = bool(np.isnan(number))
        return not is_nan, 0.0 if is_nan else number if op == "minloc" else -number, int(pair[place])

    return np.array([min(column, key=order) for column in zip(*parts, strict=True)], parts[0].dtype)


@settings(max_examples=40, deadline=None)
@given(
    op=st.sampled_from(["minloc", "maxloc"]),
    value=st.sampled_from(["f8", "f4", "f2", "i4", "u1", "?"]),
    place=st.sampled_from(["i8", "i4", "u2"]),
    size=st.integers(1, 5),
    data=st.data(),
)
def test_minloc_and_maxloc(op: str, value: str, place: str, size: int, data: st.DataObject) -> None:
    dtype = np.dtype([("how_far", value), ("who", place)])
    numbers = st.sampled_from([0, 1, 2, np.nan, np.inf, -np.inf] if value.startswith("f") else [0, 1])
    pairs = st.lists(st.tuples(numbers, st.integers(0, 3)), min_size=3, max_size=3)
    parts = [np.array(data.draw(pairs), dtype) for _ in range(size)]

    def program(group: Group) -> None:
        assert same(group.all_reduce(parts[group.rank], op), best(parts, op))
        assert same(group.scan(parts[group.rank], op), best(parts[: group.rank + 1], op))
        before = group.exscan(parts[group.rank], op)
        assert group.rank == 0 or same(before, best(parts[: group.rank], op))

    must(thread_world(program, size, "simulated"))


@pytest.mark.parametrize(
    "dtype", ["f8", "i8", [("a", "f8")], [("a", "f8"), ("b", "f8")], [("a", "c8"), ("b", "i8")], "f8,i8,i8"]
)
def test_a_dtype_that_is_no_value_with_a_location(dtype: Any) -> None:
    with oa.init(world_size=1) as group, pytest.raises(oa.DTypeError, match="with_index"):
        group.all_reduce(np.zeros(2, dtype), "maxloc")


def test_values_with_indices() -> None:
    made = oa.with_index([[1.5, 2.5], [3.5, 4.5]], [7, 8])
    assert made.dtype == PAIR
    assert made.tolist() == [[(1.5, 7), (2.5, 8)], [(3.5, 7), (4.5, 8)]]
    with pytest.raises(oa.DTypeError, match="integers"):
        oa.with_index([1.0], 0.5)
    with pytest.raises(oa.DTypeError, match="holds 9223372036854775808, but locations are int64"):
        oa.with_index([1.0, 2.0], np.array([1, 2**63], np.uint64))
    with pytest.raises(oa.SizeMismatchError, match="broadcast"):
        oa.with_index([1.0, 2.0], [1, 2, 3])


# Structured dtypes

ALIGNED = np.dtype([("tag", "u1"), ("at", "f8", (3,)), ("mass", "f4")], align=True)
STRUCTURED = {"pair": PAIR, "matrix": MATRIX, "rgb": RGB, "aligned": ALIGNED, "text": np.dtype([("größe", "f4"), ("n", "i2")])}


def structured(dtype: np.dtype[Any], rank: int, count: int) -> Array:
    made = np.zeros(count, dtype)
    for number, name in enumerate(dtype.names or ()):
        made[name] = (np.arange(count).reshape(-1, *(1,) * (made[name].ndim - 1)) + 10 * rank + number) % 251
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_structured_arrays_travel(backend: str) -> None:
    size = 4

    def equal(found: Array, expected: Array) -> None:
        assert found.dtype == expected.dtype
        assert (found == expected).all()

    def program(group: Group) -> None:
        for dtype in STRUCTURED.values():
            for count in (0, 4, 20_000):
                travel(group, [structured(dtype, rank, count) for rank in range(size)])

    def travel(group: Group, parts: list[Array]) -> None:
        rank = group.rank
        whole, mine = np.concatenate(parts), parts[rank]
        equal(group.broadcast(mine, root=2), parts[2])
        equal(group.all_gather(mine), whole)
        gathered = group.gather(mine, root=1)
        assert (gathered is None) == (rank != 1)
        equal(gathered if gathered is not None else whole, whole)
        equal(group.scatter(whole if rank == 3 else None, root=3), mine)
        equal(group.all_to_all(mine), np.concatenate([np.split(part, size)[rank] for part in parts]))
        for out in (None, np.empty_like(mine)):
            received = group.sendrecv(mine, (rank + 1) % size, (rank - 1) % size, out=out)
            equal(received, parts[(rank - 1) % size])
        equal(group.all_reduce(mine, LAST), parts[3])

    must(thread_world(program, size, backend))


def test_ranks_with_other_fields_all_learn_of_it() -> None:
    def program(group: Group) -> None:
        name = "a" if group.rank else "b"
        group.all_gather(np.zeros(2, [(name, "i4")]))

    for outcome in thread_world(program, 3, "simulated"):
        assert isinstance(outcome, oa.CollectiveMismatchError)
        assert "[('a', '<i4')][2]" in str(outcome)
        assert "[('b', '<i4')][2]" in str(outcome)


def test_out_with_other_fields_than_what_is_sent() -> None:
    def program(group: Group) -> None:
        if group.rank:
            group.recv(0, out=np.zeros(2, [("a", "f4")]))
        else:
            group.send(np.zeros(2, [("a", "i4")]), 1)
            group.barrier()

    assert "[('a', '<i4')][2]" in str(thread_world(program, 2, "simulated")[1])


@pytest.mark.parametrize(
    "dtype",
    [
        [("a", object)],
        [("a", ">f8")],
        [("a", [("b", "f8")])],
        [("a", "U3")],
        [("a", "M8[s]")],
        [],
        {"names": ["a"], "formats": ["V4"]},
    ],
)
def test_structured_dtypes_that_cannot_travel(dtype: Any) -> None:
    with oa.init(world_size=1) as group, pytest.raises(oa.DTypeError, match="cannot travel"):
        group.all_gather(np.zeros(2, dtype))


def test_fields_that_no_message_can_describe() -> None:
    x = np.zeros(2, [("a" * 60 + str(number), "f4") for number in range(8)])

    def program(group: Group) -> int:
        peer = 1 - group.rank
        for call in (lambda: group.sendrecv(x, peer, peer), lambda: group.send(x, peer), lambda: group.scatter(x, group.rank)):
            with pytest.raises(oa.SizeMismatchError, match="8 fields"):
                call()
        return len(group.all_gather(x))

    assert must(thread_world(program, 2, "simulated")) == [4, 4]


@pytest.mark.parametrize("op", ["sum", "min", "and", np.add, np.logaddexp])
def test_a_structured_array_has_no_sum(op: Any) -> None:
    with oa.init(world_size=1) as group, pytest.raises(oa.DTypeError, match="not defined"):
        group.all_reduce(np.zeros(2, PAIR), op)
