"""``reproducible=True``: the bits of a sum follow from the operands alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Collective, Group
from oneaccord.schedule.algorithms.registry import BUILTIN

REPRODUCIBLE = [
    algorithm.name for algorithm in BUILTIN if algorithm.collective is Collective.ALL_REDUCE and algorithm.canonical
]


def cancelling(rank: int, count: int, dtype: str = "float32") -> Any:
    """Return values of very different size and sign: each order of adding them gives other bits."""
    draw = np.random.default_rng([rank, 5])
    values = draw.normal(size=count) * 10.0 ** draw.integers(-3, 4, count)
    return (values + 1j * values[::-1]).astype(dtype) if dtype.startswith("complex") else values.astype(dtype)


def in_the_order_of_ranks(parts: list[Any], combine: Callable[[Any, Any], Any] = np.add) -> Any:
    """Combine the parts as every reproducible reduction does: the first in pairs until a power of two is left, then neighbours."""
    power = 1 << (len(parts).bit_length() - 1)
    pairs = len(parts) - power
    values = [combine(parts[2 * i], parts[2 * i + 1]) for i in range(pairs)] + parts[2 * pairs :]
    while len(values) > 1:
        values = [combine(left, right) for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def run(program: Callable[[Group], Any], size: int, **config: Any) -> list[Any]:
    """Run a program on threads with a configuration."""
    return must(thread_world(program, size, "simulated", config=config))


def same_bits(found: Any, expected: Any) -> bool:
    return bool(found.dtype == expected.dtype and found.tobytes() == expected.tobytes())


@pytest.mark.parametrize("name", REPRODUCIBLE)
@pytest.mark.parametrize("size", [3, 7, 8])
def test_every_algorithm_gives_the_same_bits(name: str, size: int) -> None:
    count = 5003
    parts = [cancelling(rank, count) for rank in range(size)]

    def program(group: Group) -> bool:
        total = group.all_reduce(parts[group.rank], reproducible=True)
        return same_bits(total, in_the_order_of_ranks(parts))

    assert all(run(program, size, algorithms={"all_reduce": name}))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [3, 6, pytest.param(8, marks=pytest.mark.long)])
def test_neither_the_size_nor_the_collective_nor_the_hosts_change_the_bits(dtype: str, size: int) -> None:
    count = 96 * 1024
    parts = [cancelling(rank, count, dtype) for rank in range(size)]
    expected = in_the_order_of_ranks(parts)

    def program(group: Group) -> None:
        mine = parts[group.rank]
        assert same_bits(group.all_reduce(mine), expected)
        for small in (1, 7, 4096):
            assert same_bits(group.all_reduce(mine[:small]), expected[:small])
        for root in range(size):
            result = group.reduce(mine, root=root)
            assert result is None or same_bits(result, expected)
        rows = group.reduce_scatter(mine)
        assert same_bits(rows, np.split(expected, size)[group.rank])
        counts = [0] * (size - 1) + [count]
        rows = group.reduce_scatter(mine, counts=counts)
        assert same_bits(rows, expected if group.rank == size - 1 else expected[:0])

    run(program, size, reproducible=True)
    if size % 2 == 0:
        run(program, size, reproducible=True, ranks_per_host=2)


def test_without_it_the_bits_may_be_others() -> None:
    parts = [cancelling(rank, 5003) for rank in range(4)]

    def program(group: Group) -> bool:
        return same_bits(group.all_reduce(parts[group.rank]), in_the_order_of_ranks(parts))

    assert not any(run(program, 4, algorithms={"all_reduce": "ring"}))


def test_an_operator_of_the_user_keeps_the_order_as_well() -> None:
    parts = [cancelling(rank, 300, "float64") for rank in range(5)]

    def program(group: Group) -> bool:
        total = group.all_reduce(parts[group.rank], np.logaddexp, reproducible=True)
        return same_bits(total, in_the_order_of_ranks(parts, np.logaddexp))

    assert all(run(program, 5))


def test_an_algorithm_of_another_order_is_refused_before_any_byte_moves() -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.ConfigError, match=r"(?s)reproducible all_reduce: the config asks for the algorithm 'ring'"):
            group.all_reduce(np.ones(3), reproducible=True)
        assert group.all_reduce(np.ones(3)).tolist() == [2, 2, 2]

    run(program, 2, algorithms={"all_reduce": "ring"})


def test_ranks_that_do_not_all_ask_for_it_are_a_mismatch() -> None:
    outcomes = thread_world(lambda group: group.all_reduce(np.ones(3), reproducible=group.rank == 1), 2, "simulated")
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 2
    assert "reproducible=True" in str(outcomes[0])
