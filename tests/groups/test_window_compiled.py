"""The calls of a window in C: they do what Python does, whatever is given, and leave the rest to it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.calls.windows import wire
from oneaccord.group.window_base import WindowBase

pytest.importorskip("oneaccord_native")

LENGTH = 6
DTYPES = [
    "float64",
    "int64",
    "uint64",
    "int32",
    "float32",
    "bool",
    "complex128",
    "float16",
    "longdouble",
    [("x", "f4"), ("n", "i8")],
]
AT = [0, 1, -1, -6, -7, 5, 6, 1 << 70, -(1 << 70), np.int64(1), True, "x", None, slice(None), np.s_[1:4], np.s_[:3], np.s_[3:]]
AT += [np.s_[4:1:-1], np.s_[0 : 1 << 70], np.s_[-3:], np.s_[-7:2], np.s_[::2], np.s_[3:3], np.s_[2:9], np.s_[0 : np.int64(3)]]
AT += [np.s_[1:2], np.s_["a":], np.s_[-(1 << 70) :], np.s_[: -(1 << 70)]]
OPS = ["sum", "min", "replace", "xor", "mean", "plus", "product", np.add, abs, ["sum"]]
TARGETS = [0, 2, -1, 1 << 70, True, np.int64(1), None, "1"]
SECONDS = [5.0, 5, 0.0, -1.0, float("nan"), float("inf"), "1"]


def mostly(rng: random.Random, usual: Any, others: list[Any]) -> Any:
    return usual if rng.random() < 0.8 else rng.choice(others)


def some_values(rng: random.Random, dtype: np.dtype[Any], flat: np.ndarray) -> Any:
    three = np.array([3, 1, 2]).astype(dtype)
    locked = three.copy()
    locked.flags.writeable = False
    plain = [
        1,
        -1,
        0,
        2**63 - 1,
        2**63,
        2**70,
        True,
        1.5,
        float("nan"),
        1j,
        None,
        "x",
        [1, 2, 3],
        np.float64(2.5),
        np.int64(3),
        np.int32(3),
    ]
    arrays = [
        three,
        three.reshape(3, 1),
        three[:1],
        three[:0],
        three[::2],
        three[0],
        np.asarray(three[0]),
        locked,
        flat[1:4],
        flat[::2],
    ]
    arrays += [np.arange(3.0), np.arange(3), three.astype(three.dtype.newbyteorder()), np.zeros(LENGTH, dtype)]
    return mostly(rng, three, plain if rng.random() < 0.4 else arrays)


def some_out(rng: random.Random, dtype: np.dtype[Any]) -> Any:
    locked = np.zeros(3, dtype)
    locked.flags.writeable = False
    outs = [
        np.zeros(3, dtype),
        np.zeros(1, dtype),
        np.zeros((), dtype),
        np.zeros((3, 1), dtype),
        locked,
        np.zeros(6, dtype)[::2],
    ]
    return mostly(rng, rng.choice([None, outs[0]]), [*outs, np.zeros(3), np.zeros(3, "i4"), np.zeros(LENGTH, dtype), [0, 0, 0]])


def outcome(call: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        with np.errstate(all="ignore"):
            result = call(*arguments)
    except oa.OneAccordError as error:
        return type(error), str(error)
    return type(result), getattr(result, "dtype", None), np.shape(result), repr(result), result is arguments[5]


def test_calls_in_c_do_what_python_does():
    def program(group: Group) -> int:
        if group.rank:
            for dtype in DTYPES:
                group.window(LENGTH, np.dtype(dtype)).close()
            return 0
        rng, made_in_c = random.Random(1), 0
        for each in DTYPES:
            with group.window(LENGTH, np.dtype(each)) as win:
                dtype, flats = win.dtype, win._parts.direct._flats
                notes = group._post._shorts.compiled
                for _ in range(1500):
                    kind = rng.choice(list(wire.NAMES))
                    content = np.array([rng.randrange(4) for _ in range(LENGTH)]).astype(dtype)
                    state = rng.getstate()
                    found = []
                    for call in (win._compiled.change, lambda *given: WindowBase._change(win, *given)):
                        rng.setstate(state)
                        for flat in flats.values():
                            flat[:] = content
                        values, out = some_values(rng, dtype, flats[1]), some_out(rng, dtype)
                        if rng.random() < 0.05 and isinstance(values, np.ndarray):
                            out = values
                        expected = values if rng.random() < 0.2 else some_values(rng, dtype, flats[0])
                        op = mostly(rng, "sum", OPS) if kind in (wire.ACCUMULATE, wire.FETCH) else None
                        if kind in (wire.PUT, wire.ACCUMULATE):
                            out = None
                        where = mostly(rng, 1, TARGETS), mostly(rng, np.s_[1:4], AT)
                        given = kind, values, *where, op, out, expected, mostly(rng, None, SECONDS)
                        before = notes.call
                        found.append((outcome(call, given), [flat.tobytes() for flat in flats.values()], repr(out)))
                        made_in_c += notes.call != before
                    assert str(found[0]) == str(found[1]), (dtype, given)
        return made_in_c

    assert must(thread_world(program, 2, "shm"))[0] > 3000  # else C looks at too few calls


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "int32", "bool", "complex64"])
def test_usual_calls_are_made_in_c(dtype: str) -> None:
    def program(group: Group) -> None:
        other = 1 - group.rank
        with group.window(LENGTH, dtype) as win:

            def refuse(*given: Any) -> None:
                raise AssertionError(f"C has not made the call {given}")

            x, one, out = np.ones(2, win.dtype), np.ones(1, win.dtype), np.zeros(2, win.dtype)
            number, op = win.get(other, 0), "or" if dtype == "bool" else "sum"
            if group.rank == 0:
                direct = win._parts.direct
                direct.change = direct.flush = direct.lock = direct.unlock = refuse
                win.put(x, other)
                win.put(number, other, -1)
                win.put(x, 0, np.s_[2:4])
                win.get(other)
                win.get(other, 3)
                win.get(other, np.s_[:2])
                win.get(other, 0, out=out)
                win.get(other, np.s_[3:5], out=out)
                win.accumulate(x, other, 1, op)
                win.accumulate(number, other, op="replace")
                win.fetch_and_op(one, other, op=op)
                win.fetch_and_op(x, other, np.s_[0:2], op, out=out)
                win.compare_and_swap(number, number, other)
                win.compare_and_swap(x, x, other, out=out)
                if dtype in ("float64", "int64"):
                    win.put(1, other)
                    win.fetch_and_op(1, other)
                win.flush(other)
                win.flush()
                with win.lock(other), win.lock(0, shared=True):
                    pass
                with win.lock_all():
                    win.unlock(0)
                del direct.change, direct.flush, direct.lock, direct.unlock

    must(thread_world(program, 2, "shm"))


def test_notes_of_c_are_those_of_python():
    def program(group: Group) -> list[str]:
        with group.window(LENGTH) as win:
            if group.rank == 0:
                for change, lock, unlock in (
                    (win._change, win._lock, win._unlock),
                    (
                        *(
                            lambda *given, name=name: getattr(WindowBase, name)(win, *given)
                            for name in ("_change", "_lock", "_unlock")
                        ),
                    ),
                ):
                    for kind in wire.NAMES:
                        op = "sum" if kind in (wire.ACCUMULATE, wire.FETCH) else None
                        for at, values in ((2, 1.0), (-1, 1.0), (np.s_[1:4], np.ones(3)), (np.s_[5:], np.ones(1))):
                            change(kind, values, 1, at, op, None, values, None)
                    for shared in (False, True):
                        lock(1, shared, None)
                        unlock(1, None)
                return [str(what) for _, _, what, *_ in group._post._shorts.short()]
            return []

    calls = must(thread_world(program, 2, "shm", config={"recorder": {"calls": 64}}))[0]
    half = len(calls) // 2
    assert half == 24
    assert calls[:half] == calls[half:]


def test_closed_window_lets_go_of_its_memory():
    def program(group: Group) -> None:
        win = group.window(LENGTH)
        memory = win._parts.direct._flats[group.rank]
        win.close()
        for call in (
            lambda: win.put(1.0, 0),
            lambda: win.get(0),
            win.flush,
            lambda: win.lock(0),
            lambda: win.unlock(0),
            win.fence,
        ):
            with pytest.raises(oa.ClosedError, match="after close"):
                call()
        assert memory is not None

    must(thread_world(program, 2, "shm"))
