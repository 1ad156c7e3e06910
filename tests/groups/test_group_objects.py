"""Python objects between ranks: what goes in, what comes out, and what is refused in words."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import enum
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypedDict

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.worlds import must, over_sockets, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.contract.header import pack_description
from oneaccord.group import objects as object_calls
from oneaccord.group.packing import Unpacker


class Color(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[float, ...] = ()


class Model(msgspec.Struct):
    name: str
    layers: list[Point]


class Row(TypedDict):
    loss: float


class Pair(NamedTuple):
    left: int
    right: int


UTC = dt.UTC
BERLIN = dt.timezone(dt.timedelta(hours=2))
IDENTITY = uuid.UUID(int=5)

# What goes in, and what comes out without type=.
TABLE: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (-(2**63), -(2**63)),
    (2**64 - 1, 2**64 - 1),
    (0.1, 0.1),
    (float("inf"), float("inf")),
    ("naïve ∑ 🙂 \0", "naïve ∑ 🙂 \0"),
    (b"\x00\xff", b"\x00\xff"),
    ([1, [2, []]], [1, [2, []]]),
    ((1, (2,)), [1, [2]]),
    (Pair(1, 2), [1, 2]),
    ({3}, [3]),
    (frozenset([3]), [3]),
    ({"a": 1, 2: "b", 1.5: None, None: 0, b"k": []}, {"a": 1, 2: "b", 1.5: None, None: 0, b"k": []}),
    ({(1, 2): 3}, {(1, 2): 3}),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (Point(1, (2.0,)), {"x": 1, "y": [2.0]}),
    (Model("m", [Point(1)]), {"name": "m", "layers": [{"x": 1, "y": []}]}),
    (Color.RED, "red"),
    (bytearray(b"x"), b"x"),
    (memoryview(b"x"), b"x"),
    (np.float32(0.5), 0.5),
    (np.int64(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    ({np.int8(1): np.float16(2)}, {1: 2.0}),
    (dt.datetime(2020, 1, 1, 1, tzinfo=BERLIN), dt.datetime(2019, 12, 31, 23, tzinfo=UTC)),
    (dt.datetime(2020, 1, 1), "2020-01-01T00:00:00"),  # noqa: DTZ001 - a time without a zone is meant
    (dt.date(2020, 1, 1), "2020-01-01"),
    (dt.time(1, 2), "01:02:00"),
    (dt.timedelta(days=1), "P1D"),
    (decimal.Decimal("1.50"), "1.50"),
    (IDENTITY, str(IDENTITY)),
]


def test_what_comes_out_is_what_the_table_in_the_docs_says(world):
    def program(group: Group) -> None:
        for given_object, expected in TABLE:
            got = group.broadcast_object(given_object if group.rank == 1 else None, root=1)
            assert got == expected
            assert type(got) is type(expected)

    world(program, 2)


def test_messages_keep_their_order_and_their_type(world):
    def program(group: Group) -> None:
        if group.rank == 0:
            for number in range(20):
                group.send_object(Point(number, (0.5,)), 1)
            assert group.recv_object(1, type=dict[str, Row]) == {"first": {"loss": 1.0}}
        else:
            for number in range(19):
                assert group.recv_object(0, type=Point) == Point(number, (0.5,))
            assert group.recv_object(0) == {"x": 19, "y": [0.5]}
            group.send_object({"first": {"loss": np.float32(1)}}, 0)

    world(program, 2)


def test_type_gives_back_what_went_in(world):
    model = Model("m", [Point(1, (0.5,)), Point(2)])

    def program(group: Group) -> None:
        assert group.broadcast_object(model, type=Model) == model
        assert group.all_gather_object({3, group.rank}, type=set[int]) == [{3, 0}, {3, 1}]
        gathered = group.gather_object(Point(group.rank), 1, type=Point)
        assert gathered == ([Point(0), Point(1)] if group.rank else None)
        assert group.scatter_object([(1, "a"), (2, "b")], type=tuple[int, str]) == (group.rank + 1, "ab"[group.rank])
        assert group.broadcast_object({Point(1): Color.RED}, type=dict[Point, Color]) == {Point(1): Color.RED}
        # Each rank may want something else.
        assert group.broadcast_object(IDENTITY, type=uuid.UUID if group.rank else None) == (
            IDENTITY if group.rank else str(IDENTITY)
        )

    world(program, 2)


def test_results_are_new_objects_on_the_root_too(world):
    def program(group: Group) -> None:
        mine = [[1]]
        for got in (group.broadcast_object(mine), group.all_gather_object(mine)[group.rank]):
            assert got == mine
            assert got is not mine
            assert got[0] is not mine[0]

    world(program, 2)


def test_sizes_around_the_edges_of_messages_arrive_whole():
    def program(group: Group) -> None:
        for nbytes in (0, 1, 63, 64, 65, 1023, 1025, 70_001, 3_000_000):
            data = np.random.default_rng(nbytes).bytes(nbytes)
            part = data[: nbytes // (group.rank + 1)]
            assert group.broadcast_object(data if group.rank == 2 else None, 2) == data
            assert [len(got) for got in group.all_gather_object(part)] == [nbytes, nbytes // 2, nbytes // 3]
            assert group.scatter_object([data, b"", data[:5]]) == [data, b"", data[:5]][group.rank]
            if group.rank == 0:
                group.send_object(data, 1)
            elif group.rank == 1:
                assert group.recv_object(0) == data

    must(over_sockets(program, 3))


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=settings().max_examples // 4)
@given(st.lists(json, min_size=6, max_size=6))
def test_plain_objects_arrive_as_they_were(objects):

    def program(group: Group) -> None:
        for first in range(0, len(objects), 3):
            three = objects[first : first + 3]
            assert group.all_gather_object(three[group.rank]) == three
            assert group.scatter_object(three, 2) == three[group.rank]

    must(thread_world(program, 3, "simulated"))


circle: dict[str, Any] = {"next": [1]}
circle["next"].append(circle)
deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]


class Name(str):
    __slots__ = ()


class Unknown:
    pass


@dataclass
class Layer:
    name: str
    weights: np.ndarray[Any, Any]
    more: list[npt.NDArray[np.float32]]


DTYPES = [*"?bBhHiIqQefdgFDG", "bfloat16", "float8_e4m3fn", "f4,i8"]


def test_arrays_travel_inside_objects_with_dtype_shape_and_bytes(world):
    def program(group: Group) -> None:
        for dtype in DTYPES:
            travel(group, np.dtype(getattr(ml_dtypes, dtype, dtype)))

    def travel(group: Group, dtype: np.dtype[Any]) -> None:
        wide = np.arange(24).astype(dtype).reshape(2, 3, 4)
        views = (wide, wide[:, ::2], wide.T, np.asfortranarray(wide), wide[:0], wide[:, 1:1], wide.ravel()[1:])
        arrays = [*views, np.array(wide[0, 0, 1])]
        other = 1 - group.rank
        given = {"arrays": arrays, "rank": group.rank, ("a", 1): (arrays[0], {2: [arrays[1]]})}
        sent = group.send_object_async(given, other)
        found = [group.recv_object(other), *group.all_gather_object(given), group.broadcast_object(given, 1)]
        found += [group.scatter_object([given, given] if group.rank == 0 else None), *(group.gather_object(given) or [])]
        sent.wait()
        for each in found:
            for mine, got in zip(arrays, each["arrays"], strict=True):
                assert type(got) is np.ndarray
                assert (got.dtype, got.shape) == (mine.dtype, mine.shape)
                np.testing.assert_array_equal(got, mine)
                assert got.flags.writeable
                assert got.flags.aligned
                got[...] = 0  # its own
            np.testing.assert_array_equal(each["a", 1][0], wide)
        np.testing.assert_array_equal(wide.ravel(), np.arange(24).astype(dtype))

    world(program, 2)


def test_arrays_come_as_fields_of_what_type_says(world):
    def program(group: Group) -> None:
        layer = Layer("first", np.eye(3), [np.ones(2, np.float32)] * 2)
        for found in group.all_gather_object(layer, type=Layer):
            assert found.weights.tolist() == np.eye(3).tolist()
            assert [each.tolist() for each in found.more] == [[1.0, 1.0]] * 2
        with pytest.raises(oa.UsageError, match=r"Expected `numpy\.ndarray`, got `str`"):
            group.broadcast_object({"name": "first", "weights": "none", "more": []}, type=Layer)
        with pytest.raises(oa.UsageError, match="Expected `int`, got `ext`"):
            group.broadcast_object([np.ones(2)], type=list[int])
        group.barrier()

    world(program, 2)


WELL = pack_description(np.dtype("f4"), (2, 2)).rstrip(b"\0")
"""The description of an array of two times two numbers."""


def described(description: bytes) -> bytes:
    return len(description).to_bytes(2, "little") + description


@given(
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=300).map(described),
        st.binary(max_size=20).map(lambda data: described(WELL) + data),
        st.tuples(st.integers(0, len(WELL) - 1), st.binary(max_size=3)).map(
            lambda hit: described(WELL[: hit[0]] + hit[1] + WELL[hit[0] + 1 :]) + bytes(16)
        ),
    )
)
@example(b"\xff\xff" + b"\xff" * 70000)
@example(described(pack_description(np.dtype("f4"), (0, 1 << 63))))
@example(described(pack_description(np.dtype("f4"), (1 << 62,))))
@example(described(pack_description(np.dtype("f4"), (1 << 33, 1 << 33))))
@example(b"")
def test_any_bytes_make_an_array_of_what_is_there_or_an_error(data: bytes) -> None:
    message = msgspec.msgpack.encode([msgspec.msgpack.Ext(77, data)])
    for each in (message, b"\x81" + message[1:] + b"\x01"):  # in a list; as the key of a dict
        with contextlib.suppress(oa.UsageError):
            (array,) = Unpacker[Any](None, "recv_object").unpack(bytearray(each), 1)
            assert array.nbytes == len(data) - 2 - int.from_bytes(data[:2], "little")
    whole = msgspec.msgpack.encode([msgspec.msgpack.Ext(77, described(WELL) + bytes(16))])
    assert Unpacker[Any](None, "recv_object").unpack(bytearray(whole), 1)[0].tolist() == [[0.0, 0.0]] * 2


def test_objects_travel_in_the_background(world):
    def program(group: Group) -> None:
        other = 1 - group.rank
        received = [
            group.recv_object_async(other, type=Point),
            group.recv_object_async(other),
            group.recv_object_async(other, type=int),
        ]
        point = [group.rank]
        sent = [
            group.send_object_async(Point(group.rank), other),
            group.send_object_async(point, other),
            group.send_object_async("text", other),
        ]
        point.append(5)
        assert oa.wait_all(received[:2]) == [Point(other), [other]]
        with pytest.raises(oa.UsageError, match="cannot read the object of rank"):
            received[2].wait()
        assert oa.wait_all(sent) == [None] * 3
        with pytest.raises(oa.UsageError, match="cannot send obj, a function"):
            group.send_object_async(lambda: 1, other)
        with pytest.raises(oa.UsageError, match="cannot decode into type"):
            group.recv_object_async(other, type=5)
        with pytest.raises(oa.SelfSendError):
            group.recv_object_async(group.rank)
        group.barrier()

    world(program, 2)


# An object, where in it the culprit is, and what is said of it.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "function": (lambda: 1, "obj, a function", "may hold None, bool"),
    "type": ([int], "obj[0], a type", "may hold"),
    "instance": ({"a": {"b": Unknown()}}, 'obj["a"]["b"], a ', "Unknown"),
    "array of objects": (
        [0, {"model": np.array([1, "a"], object)}],
        'obj[1]["model"], a NumPy array',
        "it holds Python objects",
    ),
    "array of text": ((np.array("a"),), "obj[0], a NumPy array", "it holds text"),
    "array of times": (np.zeros(2, "M8[s]"), "obj, a NumPy array", 'send x.astype("int64")'),
    "array of records": (np.zeros(2, "i4,U2"), "obj, a NumPy array", "send its fields one by one"),
    "array of many fields": (np.zeros(2, [(f"field {n}", "i4") for n in range(40)]), "obj, a NumPy array", "x.view(np.uint8)"),
    "array in another order": (np.zeros(2, np.dtype("f8").newbyteorder()), "obj, a NumPy array", "newbyteorder"),
    "array with a mask": (
        [np.ma.array([1], mask=[True])],
        "obj[0], a numpy.ma.MaskedArray, a kind of array",
        "give np.asarray(x)",
    ),
    "complex": ({1: 1j}, "obj[1], a complex", "[z.real, z.imag]"),
    "NumPy complex": (np.complex64(1j), "obj, a numpy.complex64", "z.real"),
    "long double": ([np.longdouble(1)], "obj[0], a numpy.longdouble", "float(x)"),
    "NumPy time": (np.datetime64(1, "s"), "obj, a numpy.datetime64", "no Python number"),
    "large int": ([[2**64]], "obj[0][0], an int of more than 64 bits", "str(n)"),
    "large negative int": (-(2**63) - 1, "obj, an int of more than 64 bits", "as text"),
    "surrogate": ({"name": "caf\udce9"}, 'obj["name"], a str with half a surrogate pair', "os.fsencode"),
    "surrogate key": ({"caf\udce9": 1}, "(the key 'caf\\udce9')", "surrogate"),
    "str subclass": ([Name("x")], "obj[0], a ", "a kind of str: give str(x)"),
    "set element": ({"s": {1, 1j}}, 'obj["s"] (an element of the set), a complex', "parts"),
    "key": ({"s": {1j: 2}}, 'obj["s"] (the key 1j), a complex', "parts"),
    "dataclass field": ([Point(1, (2**70,))], "obj[0].y[0], an int of more than 64 bits", "str(n)"),
    "Struct field": (Model("m", [Point(Fraction(1, 2))]), "obj.layers[0].x, a fractions.Fraction", "give its data"),  # type: ignore[arg-type]
    "circle": (circle, 'obj["next"][1], which contains itself', "circles"),
    "depth": (deep, "nested too deep", "flatter"),
    "4 GiB": ({"w": bytes((1 << 32) + 5)}, 'obj["w"], a bytes of length 4294967301', "give an array alone"),
    "generator": ((x for x in "ab"), "obj, a generator", "may hold"),
}


def test_what_cannot_travel_is_refused_by_place_and_the_group_stays_as_it_was():
    def program(group: Group) -> None:
        for culprit, place, remedy in REFUSED.values():
            refuse(group, culprit, place, remedy)
            assert group.all_gather_object(group.rank) == [0, 1]

    def refuse(group: Group, culprit: Any, place: str, remedy: str) -> None:
        calls = [
            lambda: group.send_object(culprit, 1 - group.rank),
            lambda: group.broadcast_object(culprit, group.rank),
            lambda: group.all_gather_object(culprit),
            lambda: group.gather_object(culprit),
            lambda: group.scatter_object([0, culprit], group.rank),
        ]
        for call in calls:
            with pytest.raises(oa.UsageError) as caught:
                call()
            assert place in str(caught.value)
            assert remedy in str(caught.value)
            assert len(str(caught.value)) < 600
            str(caught.value).encode()

    must(thread_world(program, 2, "simulated"))


def test_arguments_are_refused_before_any_byte_moves(world):
    def program(group: Group) -> None:
        size, rank = group.world_size, group.rank
        for call in (
            lambda: group.send_object(1, size),
            lambda: group.recv_object(-1),
            lambda: group.broadcast_object(1, size),
            lambda: group.gather_object(1, 1.5),  # type: ignore[arg-type]
            lambda: group.scatter_object([1, 2, 3], "0"),  # type: ignore[arg-type]
        ):
            with pytest.raises(oa.InvalidRankError):
                call()
        for call in (lambda: group.send_object(1, rank), lambda: group.recv_object(rank)):
            with pytest.raises(oa.SelfSendError):
                call()
        with pytest.raises(oa.SizeMismatchError, match="each of the 3 ranks, but got 2"):
            group.scatter_object([1, 2], rank)
        with pytest.raises(oa.UsageError, match="list of 3 objects on the root, not a NoneType"):
            group.scatter_object(None, rank)
        for kind in (3, "Undefined", Point | Model):
            with pytest.raises(oa.UsageError, match="cannot decode into type="):
                group.broadcast_object(1, type=kind)
        with pytest.raises(oa.UsageError, match="timeout_s"):
            group.all_gather_object(1, timeout_s=0)
        assert group.all_gather_object(rank) == [0, 1, 2]

    world(program, 3)


def test_what_does_not_fit_type_is_an_error_after_which_the_group_goes_on(world):
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError, match=r"object of rank 0 as type=.*Point: Expected `int`, got `str` - at `\$.x`"):
            group.broadcast_object({"x": "one"}, type=Point)
        with pytest.raises(oa.UsageError, match="object of rank 1 as type=int") as caught:
            group.all_gather_object(["1", 1][1 - group.rank], type=int)
        assert caught.value.peer == 1
        if group.rank == 0:
            group.send_object([1], 1)
            group.send_object("next", 1)
        else:
            with pytest.raises(oa.UsageError, match=r"as type=list\[str\]"):
                group.recv_object(0, type=list[str])
            assert group.recv_object(0) == "next"
        with pytest.raises(oa.UsageError, match=r"keys must be hashable.*give type="):
            group.broadcast_object({Point(1): 1})
        with pytest.raises(oa.UsageError, match="cannot rebuild"):
            group.broadcast_object(msgspec.Raw(b"\xc1"))
        with pytest.raises(oa.UsageError, match="nested too deep"):
            group.broadcast_object(msgspec.Raw(b"\x91" * 100_000 + b"\x90"))
        assert group.broadcast_object("well") == "well"

    world(program, 2)


# Two calls that are not the same.
MISMATCHES: dict[str, tuple[Any, Any]] = {
    "another call": (lambda g: g.broadcast_object(1), lambda g: g.all_gather_object(1)),
    "another root": (lambda g: g.broadcast_object(1, 0), lambda g: g.broadcast_object(1, 1)),
    "another root of gather": (lambda g: g.gather_object(1, 0), lambda g: g.gather_object(1, 1)),
    "another root of scatter": (lambda g: g.scatter_object([1] * 3, 0), lambda g: g.scatter_object([1] * 3, 1)),
    "gather and all_gather": (lambda g: g.gather_object(1, 0), lambda g: g.all_gather_object(1)),
    "an array": (lambda g: g.broadcast_object(1), lambda g: g.broadcast(np.zeros(1, np.int64))),
    "an array gathered": (lambda g: g.all_gather_object(1), lambda g: g.all_gather(np.zeros(1, np.int64))),
    "a barrier": (lambda g: g.scatter_object([1] * 3), lambda g: g.barrier()),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_do_not_make_the_same_call_all_learn_it(world, case):
    usual, other = MISMATCHES[case]
    outcomes = world.outcomes(lambda group: (other if group.rank == 1 else usual)(group), 3)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_a_mismatch_names_the_calls_and_their_roots(world):
    def program(group: Group) -> None:
        group.gather_object(1, root=0) if group.rank else group.gather_object(1, root=1)

    for outcome in world.outcomes(program, 2):
        assert "rank 0: sizes of gather_object(int64[1], root=1) #0" in str(outcome)
        assert "rank 1: sizes of gather_object(int64[1], root=0) #0" in str(outcome)


@pytest.mark.parametrize("sends_object", [True, False])
def test_an_object_does_not_arrive_as_an_array_nor_an_array_as_an_object(world, sends_object):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send_object([1], 1) if sends_object else group.send(np.zeros(3), 1)
            group.barrier()
        else:
            group.recv(0) if sends_object else group.recv_object(0)

    outcomes = world.outcomes(program, 2)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 2


def test_other_ranks_learn_that_the_root_could_not_send(world):
    def program(group: Group) -> None:
        group.broadcast_object((lambda: 1) if group.rank == 0 else None)

    outcomes = world.outcomes(program, 3)
    assert [type(outcome) for outcome in outcomes] == [oa.UsageError, oa.AbortedError, oa.AbortedError]


@pytest.mark.parametrize("size", [0, 2**62])
@pytest.mark.parametrize("name", ["broadcast_object", "all_gather_object", "gather_object", "scatter_object"])
def test_a_size_that_cannot_be_ends_the_job_before_memory_is_taken(world, monkeypatch, size, name):
    class Damaged(bytearray):
        def __len__(self) -> int:
            return size

    monkeypatch.setattr(object_calls, "_room", lambda nbytes: pytest.fail("memory was asked for"))
    monkeypatch.setattr(object_calls, "pack", lambda obj, what: Damaged())
    outcomes = world.outcomes(lambda group: getattr(group, name)([1, 2]), 2)
    assert [type(outcome) for outcome in outcomes] == [oa.ProtocolError] * 2
    assert f"learned in {name} of" in str(outcomes[0])
    assert "which is impossible" in str(outcomes[0])


def test_a_rank_without_memory_for_what_comes_says_so_on_every_rank(world, monkeypatch):
    def no_memory(count: Any, dtype: Any = float) -> Any:
        if dtype == np.uint8 and np.prod(count) > 2**20:
            raise MemoryError
        return empty(count, dtype)

    empty = np.empty
    monkeypatch.setattr(object_calls.np, "empty", no_memory)
    outcomes = world.outcomes(lambda group: group.broadcast_object(b"x" * 2**21 if group.rank == 0 else None), 3)
    # Who was first says why; the other one may have heard of that before it came so far.
    assert type(outcomes[0]) is oa.AbortedError
    assert oa.OutOfMemoryError in {type(outcome) for outcome in outcomes} <= {oa.AbortedError, oa.OutOfMemoryError}
    assert "has no memory for the 2359296 bytes of broadcast_object" in str(outcomes[0])


def test_objects_of_many_sizes_share_few_plans(world):
    def program(group: Group) -> int:
        for size in range(2000, 4000, 3):
            assert len(group.broadcast_object(b"x" * size)) == size
        return len(group._paths.host.plans.made)

    assert max(world(program, 2)) <= 20


def test_a_call_is_one_turn_between_others(world):
    """Calls in flight around an object call keep their order on all ranks."""

    def program(group: Group) -> None:
        works = [group.all_reduce_async(np.full(3, n)) for n in range(20)]
        assert group.all_gather_object(group.rank) == [0, 1, 2]
        assert [int(work.wait()[0]) for work in works] == [3 * n for n in range(20)]

    world(program, 3)


def test_objects_travel_in_groups_of_some_ranks(world):
    def program(group: Group) -> None:
        part = group.split(group.rank % 2, key=-group.rank)
        assert part is not None
        with part:
            members = [3, 1] if group.rank % 2 else [2, 0]
            assert part.all_gather_object(group.rank) == members
            assert part.broadcast_object(group.rank, 1) == members[1]
            if part.rank == 0:
                part.send_object("hello", 1)
            else:
                assert part.recv_object(0) == "hello"

    world(program, 4)
