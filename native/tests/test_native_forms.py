"""Calls by the compiled executor and by Python: the same bits, and ranks of both kinds in one world."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, on_threads, thread_world

import oneaccord as oa
from oneaccord.api import Group, ThreadWorld

native = pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

BACKENDS = ["shm", "tcp"]
DTYPES = ["int8", "int64", "uint16", "float16", "float32", "float64", "complex64", "bool"]


def bits(value: Any) -> Any:
    return (
        [bits(each) for each in value]
        if isinstance(value, list)
        else None
        if value is None
        else (value.dtype, value.shape, value.tobytes())
    )


def program(group: Group, seed: int, dtype: str) -> list[Any]:
    """Make calls of each kind that reduces or copies, on arrays of several sizes and layouts; return what came."""
    return [calls(group, seed, dtype, *each) for each in zip([0, 1, 7, 1000, 30_000], "CFSFS", strict=True)]


def calls(group: Group, seed: int, dtype: str, count: int, layout: str) -> list[Any]:
    rng = np.random.default_rng([seed, group.rank])
    array: Any = rng.integers(0, 2 if dtype == "bool" else 4, (2, count, 3)).astype(dtype)
    array = {"C": array, "F": np.asfortranarray(array), "S": array[:, ::-1]}[layout]
    op = "or" if dtype == "bool" else "sum"
    found = [
        group.all_reduce(array, op),
        group.all_reduce(array, "and" if array.dtype.kind in "bui" else "product", out=np.empty_like(array, order="C")),
        group.reduce(array, op, root=group.world_size - 1),
        group.broadcast(array, root=0),
        group.all_gather(array),
        group.reduce_scatter(np.concatenate([array[0]] * group.world_size), op),
        group.all_to_all(np.concatenate([array[1]] * group.world_size)),
        group.scan(array, op),
        group.exscan(array, op),
        group.sendrecv(array, (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size),
    ]
    if array.dtype.kind in "fc":
        found += [group.all_reduce(array, "mean"), group.reduce_scatter(np.concatenate([array[0]] * group.world_size), "mean")]
    group.barrier()
    return bits(found)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=3)
@given(size=st.integers(2, 5), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_both_forms_give_the_same_bits(backend: str, size: int, seed: int, dtype: str) -> None:
    both = [
        thread_world(lambda group: program(group, seed, dtype), size, backend, config={"native": form})
        for form in (True, False)
    ]
    for outcome in both[0]:
        assert not isinstance(outcome, BaseException), outcome
    assert both[0] == both[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_python_goes_on_where_c_has_stopped(backend: str) -> None:
    def late(group: Group) -> list[float]:
        found = []
        for number in range(60):
            if number % 7 == group.rank * 3:
                time.sleep(0.02)  # longer than anyone looks for a message before it sleeps
            found.append(float(group.all_reduce(np.full(900, float(number + group.rank)), "sum")[-1]))
            group.broadcast(np.full(20_000, 1.0), root=number % 3)  # nobody waits for those behind, until the slots are full
        return found

    expected = [3.0 * number + 3 for number in range(60)]
    assert thread_world(late, 3, backend) == [expected] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=3)
@given(seed=st.integers(0, 999))
def test_messages_of_any_length_and_haste_are_those_that_were_sent(backend: str, seed: int) -> None:
    """Whoever is late, and wherever C stops: before an opening, behind it, in the midst of an exchange."""
    lengths = [0, 3, 161, 162, 400, 5000, 65_697, 200_000]  # of float64: 161 fill an opening, and 65,697 an opening and a slot

    def program(group: Group) -> list[bytes]:
        own, alike = np.random.default_rng([seed, group.rank]), np.random.default_rng(seed)
        other, found = 1 - group.rank, []
        for number in range(40):
            length, way, keeps = int(alike.choice(lengths)), int(alike.integers(3)), int(alike.integers(2))
            if own.random() < 0.15:
                time.sleep(0.003 * own.random())
            array = np.arange(length, dtype=np.float64) + 1000.0 * number
            out = np.empty(length) if keeps else None
            if way == 2:
                found.append(group.sendrecv(array + group.rank, other, other, out=out).tobytes())
                assert found[-1] == (array + other).tobytes()
            elif way == group.rank:
                group.send(array, other)
            else:
                found.append(group.recv(other, out=out).tobytes())
                assert found[-1] == array.tobytes()
        return found

    both = [thread_world(program, 2, backend, config={"native": form}) for form in (True, False)]
    assert must(both[0]) == must(both[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_both_forms_understand_each_other(backend: str) -> None:
    world = ThreadWorld(3, backend)

    def body(rank: int) -> list[float]:
        with world.rank(rank), oa.init(config={"native": rank != 1}, timeout_s=30) as group:
            found = []
            for count in (0, 3, 5000, 200_000):
                for _ in range(20):
                    found.append(float(group.all_reduce(np.full(count, group.rank + 1.0)).sum()))
                    group.barrier()
            return found

    assert must(on_threads(body, 3)) == [[6.0 * count for count in (0, 3, 5000, 200_000) for _ in range(20)]] * 3
