"""`Group.scan` and `Group.exscan`: each rank gets what the ranks up to it have, in their order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Collective, Group
from oneaccord.schedule.algorithms.registry import BUILTIN

Array = np.ndarray[Any, Any]

SCANS = [(each.collective.value, each.name) for each in BUILTIN if each.collective in (Collective.SCAN, Collective.EXSCAN)]


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def cancelling(rank: int, count: int) -> Array:
    draw = np.random.default_rng([rank, 5])
    return (draw.normal(size=count) * 10.0 ** draw.integers(-3, 4, count)).astype(np.float32)


@pytest.mark.parametrize(("collective", "name"), SCANS)
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 9),
    count=st.integers(0, 12),
    in_place=st.booleans(),
    reproducible=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_algorithm_scans_in_the_order_of_ranks(
    collective: str, name: str, size: int, count: int, in_place: bool, reproducible: bool, seed: int
) -> None:
    def times(a: Array, b: Array) -> Array:
        product = np.empty_like(a)
        product["m"] = a["m"] @ b["m"]
        return product

    op = oa.Op(times, commutative=False, identity=([[1, 0], [0, 1]],))
    parts = np.zeros((size, count), [("m", "i8", (2, 2))])
    parts["m"] = np.random.default_rng(seed).integers(-3, 4, (size, count, 2, 2))
    identity = np.full(count, np.array(([[1, 0], [0, 1]],), parts.dtype))
    expected = [identity, *accumulate(parts, times)]

    def program(group: Group) -> bool:
        mine = parts[group.rank].copy()
        out = mine if in_place else None
        found = getattr(group, collective)(mine, op, out=out, reproducible=reproducible)
        return same(found, expected[group.rank + (collective == "scan")])

    canonical = name == "chain"
    config = {"algorithms": {collective: name}} if canonical or not reproducible else {}
    assert all(must(thread_world(program, size, "simulated", config=config)))


@pytest.mark.parametrize("by_config", [True, False])
def test_a_reproducible_scan_adds_from_left_to_right(by_config: bool) -> None:
    size, most = 5, 300_000
    parts = [cancelling(rank, most) for rank in range(size)]
    sums = [np.zeros(most, np.float32), *np.add.accumulate(parts)]

    def program(group: Group) -> None:
        given = {} if by_config else {"reproducible": True}
        for count in (1, 100, most):
            assert same(group.scan(parts[group.rank][:count], **given), sums[group.rank + 1][:count])
            assert same(group.exscan(parts[group.rank][:count], **given), sums[group.rank][:count])

    must(thread_world(program, size, "simulated", config={"reproducible": by_config}))


def test_means_are_refused_before_any_byte_moves() -> None:
    def program(group: Group) -> Any:
        for call in (group.scan, group.exscan, group.scan_async, group.exscan_async):
            with pytest.raises(oa.UsageError, match='not support op="mean"'):
                call(1.0, "mean")
        return group.scan(1)

    assert must(thread_world(program, 3, "simulated")) == [1, 2, 3]


NO_IDENTITY: list[Any] = [
    lambda a, b: a + b,
    oa.Op(np.add),
    np.fmax,
    oa.Op(np.add, identity="x"),
    oa.Op(np.add, identity=(1, 2)),
]


def test_an_exscan_needs_an_identity_on_every_rank() -> None:
    def program(group: Group) -> Any:
        for op in NO_IDENTITY:
            with pytest.raises(oa.UsageError, match="identity"):
                group.exscan(1.0, op)
        return group.scan(1.0, oa.Op(np.add))

    assert must(thread_world(program, 3, "simulated")) == [1, 2, 3]


def test_what_rank_0_gets_of_an_exscan() -> None:
    cases: list[tuple[Any, Any, Any]] = [
        ("sum", np.float64, 0),
        ("product", np.complex64, 1),
        ("min", np.float16, np.inf),
        ("max", np.int8, -128),
        ("min", np.bool_, True),
        ("and", np.uint16, 65535),
        ("xor", np.bool_, False),
        (np.logaddexp, np.float64, -np.inf),
        (np.gcd, np.int32, 0),
        (oa.Op(np.maximum, identity=7), np.int16, 7),
    ]

    def program(group: Group) -> None:
        for op, dtype, expected in cases:
            found = group.exscan(np.ones((2, 3), dtype), op)
            assert found.shape == (2, 3)
            assert group.rank or (found == expected).all()
            assert group.rank != 1 or (found == 1).all()

    must(thread_world(program, 2, "simulated"))


Calls = dict[str, tuple[Callable[[Group], Any], Callable[[Group], Any]]]
DIFFERENT: Calls = {
    "the other kind": (lambda group: group.scan(1.0), lambda group: group.exscan(1.0)),
    "another op": (lambda group: group.scan(1.0), lambda group: group.scan(1.0, "max")),
    "another shape": (lambda group: group.exscan(np.ones(2)), lambda group: group.exscan(np.ones(3))),
    "another identity": (
        lambda group: group.exscan(1.0, oa.Op(np.add, identity=0)),
        lambda group: group.exscan(1.0, oa.Op(np.add, identity=1)),
    ),
    "all_reduce": (lambda group: group.scan(1.0), lambda group: group.all_reduce(1.0)),
}


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "simulated") for kind in DIFFERENT), ("another op", "shm"), ("another op", "tcp")]
)
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_calls_something_else_is_found_on_all_ranks(kind: str, backend: str, who: int) -> None:
    one, other = DIFFERENT[kind]
    outcomes = thread_world(lambda group: (other if group.rank == who else one)(group), 3, backend)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_nobody_returns_before_all_have_come(collective: str) -> None:
    """Rank 0 needs nobody's data, and yet must not go on."""

    def program(group: Group) -> None:
        if group.rank < 2:
            getattr(group, collective)(1.0)
            raise AssertionError("it returned")

    for outcome in thread_world(program, 3, "simulated", timeout_s=2)[:2]:
        assert isinstance(outcome, oa.CollectiveMismatchError)


def test_groups_scan_in_the_order_of_their_own_ranks() -> None:
    def program(group: Group) -> list[int]:
        with group.split(group.rank % 2, key=-group.rank) as half:
            return [int(half.scan(group.rank + 1)), int(half.exscan(group.rank + 1))]

    # The even ranks are 4, 2, 0, and the odd ones 3, 1.
    assert must(thread_world(program, 5, "simulated")) == [[9, 8], [6, 4], [8, 5], [4, 0], [5, 0]]
