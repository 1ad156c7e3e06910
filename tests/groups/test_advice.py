"""What an error advises works: the call is refused with these words, and the advice is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.worlds import must, over_sockets

import oneaccord as oa
from oneaccord.api import Group

Act = Callable[[Group, Any], object]


class _Int(int):
    pass


class _Text(str):  # noqa: SLOT000
    pass


def _array(group: Group, x: Any) -> object:
    return group.broadcast(x)


def _object(group: Group, x: Any) -> object:
    return group.broadcast_object(x)


def _listed(group: Group, x: Any) -> object:
    return group.broadcast_object(x.tolist())


def _native(group: Group, x: Any) -> object:
    return group.broadcast(x.astype(x.dtype.newbyteorder("=")))


def _counted(group: Group, x: Any) -> object:
    return group.broadcast(x.astype("int64"))


def _bytes(group: Group, x: Any) -> object:
    return group.broadcast(x.view("uint8"))


def _plain(group: Group, x: Any) -> object:
    return group.broadcast_object(np.asarray(x))


TEXT, TIMES = np.array(["a", "bc"]), np.array(["2020-01-01"], "M8[D]")
FIXED = np.zeros(3)
FIXED.flags.writeable = False

ADVICE: list[tuple[Act, Any, str, Act]] = [
    (_array, TEXT, "an array as x.tolist()", _listed),
    (_object, TEXT, "an array as x.tolist()", _listed),
    (_object, {"names": TEXT}, "an array as x.tolist()", lambda group, x: _listed(group, x["names"])),
    (_array, "text", "send it with send_object", _object),
    (_array, TEXT.astype("S"), "an array as x.tolist()", _listed),
    (_array, TEXT.astype(">U2"), "an array as x.tolist()", _listed),
    (_array, np.array(["a", 1], object), "an array as x.tolist()", _listed),
    (_object, np.array(["a", 1], object), "an array as x.tolist()", _listed),
    (_array, {"a": 1}, "take numbers, text, lists and dicts", _object),
    (_array, np.array([(1, "a")], [("n", "i4"), ("t", "U3")]), "or x.tolist() with send_object", _listed),
    (_array, np.zeros(2, ">f4"), 'newbyteorder("=")', _native),
    (_object, np.zeros(2, ">f4"), 'newbyteorder("=")', lambda group, x: _object(group, x.astype("=f4"))),
    (_array, np.zeros(2, [("a", ">i4")]), 'newbyteorder("=")', _native),
    (_array, TIMES, 'x.astype("int64")', _counted),
    (_array, TIMES.astype(">M8[s]"), 'x.astype("int64")', _counted),
    (_array, np.zeros(1, "m8[s]"), 'x.astype("int64")', _counted),
    (_array, np.zeros(2, "V8"), 'x.view("uint8")', _bytes),
    (_object, TIMES[0], 'x.astype("int64")', lambda group, x: _object(group, x.astype("int64"))),
    (_object, np.zeros(1, "m8[ns]")[0], 'x.astype("int64")', lambda group, x: _object(group, x.astype("int64"))),
    (_object, np.longdouble(1), "float(x)", lambda group, x: _object(group, float(x))),
    (_object, 1 << 70, "str(n)", lambda group, x: _object(group, str(x))),
    (_object, _Int(3), "int(n)", lambda group, x: _object(group, int(x))),
    (_object, _Text("a"), "str(x)", lambda group, x: _object(group, str(x))),
    (_object, "\ud800", "os.fsencode(x)", lambda group, _: _object(group, os.fsencode("\udc80"))),
    (_object, 1j, "[z.real, z.imag]", lambda group, x: _object(group, [x.real, x.imag])),
    (_object, np.ma.masked_array([1]), "np.asarray(x)", _plain),
    (_object, np.rec.array([(1,)], dtype=[("a", "i4")]), "np.asarray(x)", _plain),
    (lambda group, x: group.scan(x, op="mean"), FIXED, 'op="sum"', lambda group, x: group.scan(x, op="sum")),
    (lambda group, x: group.all_reduce(x), np.ones(2, bool), 'op="or"', lambda group, x: group.all_reduce(x, op="or")),
    (
        lambda group, x: group.all_reduce(x, op="mean"),
        np.ones(2, int),
        'x.astype("float64")',
        lambda group, x: group.all_reduce(x.astype("float64"), op="mean"),
    ),
    (
        lambda group, x: group.all_reduce(x, op="max"),
        np.ones(2, complex),
        "abs(x)",
        lambda group, x: group.all_reduce(abs(x), op="max"),
    ),
    (
        lambda group, x: group.all_reduce(x, out=[0]),
        np.ones(1),
        "np.asarray(x)",
        lambda group, x: group.all_reduce(x, out=np.asarray([0.0])),
    ),
    (
        lambda group, x: group.all_to_all(x, receive_counts=[3]),
        FIXED,
        "give send_counts",
        lambda group, x: group.all_to_all(x, send_counts=[3], receive_counts=[3]),
    ),
    (lambda group, x: group.window(x), np.zeros((4, 4))[:, ::2], "x.copy()", lambda group, x: group.window(x.copy()).close()),
    (lambda group, x: group.window(x), FIXED, "x.copy()", lambda group, x: group.window(x.copy()).close()),
    (lambda group, x: group.shared(2, x), "U", "such as U10", lambda group, x: group.shared(2, x + "10")),
]


@pytest.mark.parametrize(
    ("refused", "given", "words", "advised"), ADVICE, ids=[f"{at}-{row[2]}" for at, row in enumerate(ADVICE)]
)
def test_advice_of_an_error_works(refused, given, words, advised):
    def program(group: Group) -> None:
        with pytest.raises(oa.OneAccordError) as caught:
            refused(group, given)
        assert words in str(caught.value)
        advised(group, given)

    must(over_sockets(program, 1))
