"""What a call cannot be below: exact values of the arithmetic, whatever the machine allows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord as oa
from oneaccord.errors import CommError
from oneaccord_lab.bench.limits import DIRECT, SLOTS, WIRE, Floor, floor, limit_us, link_of
from oneaccord_lab.bench.plan import BENCHMARKS, Limits, Target
from oneaccord_lab.bench.probes import Probes

# Powers of ten, which no sum confuses.
COPY_ALONE, COPY, ADD, BOTH, ONE, FLAG, PING = 1.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7


def limits_of(benchmark: str) -> Limits:
    return Limits(benchmark, 8, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)


@pytest.mark.parametrize(
    ("benchmark", "world_size", "link", "expected"),
    [
        # Each half of the array is copied into slots, added, copied into slots, and copied out: four passes over a half.
        ("all_reduce", 2, SLOTS, FLAG + 1.5 * COPY + 0.5 * ADD),
        ("all_reduce", 2, DIRECT, FLAG + 0.5 * COPY + 0.5 * ADD),
        ("all_reduce", 2, WIRE, PING + BOTH),
        ("all_reduce", 4, SLOTS, 2 * FLAG + 2.25 * COPY + 0.75 * ADD),
        ("all_reduce", 4, WIRE, 2 * PING + 1.5 * BOTH),
        ("all_reduce", 5, DIRECT, 3 * FLAG + 0.8 * COPY + 0.8 * ADD),
        ("reduce", 2, SLOTS, FLAG + 0.5 * COPY + 0.5 * ADD),
        ("reduce", 2, WIRE, PING + ONE),
        ("broadcast", 4, SLOTS, 2 * FLAG + 1.5 * COPY),
        ("broadcast", 4, WIRE, 2 * PING + ONE),
        ("broadcast", 2, DIRECT, FLAG + COPY_ALONE),
        ("broadcast", 4, DIRECT, 2 * FLAG + COPY),
        ("all_gather", 4, SLOTS, 2 * FLAG + 1.5 * COPY),
        ("all_gather", 4, WIRE, 2 * PING + 0.75 * BOTH),
        ("gather", 4, DIRECT, 2 * FLAG + 0.75 * COPY_ALONE),
        ("scatter", 4, DIRECT, 2 * FLAG + 0.25 * COPY),
        ("scatter", 4, WIRE, 2 * PING + 0.75 * ONE),
        ("reduce_scatter", 4, SLOTS, 2 * FLAG + 0.75 * COPY + 0.75 * ADD),
        ("reduce_scatter", 4, DIRECT, 2 * FLAG + 0.75 * ADD),
        ("all_to_all", 2, WIRE, PING + 0.5 * BOTH),
        ("scan", 4, DIRECT, 2 * FLAG + ADD),
        ("exscan", 4, SLOTS, 2 * FLAG + 1.5 * COPY + 0.5 * ADD),
        ("sendrecv", 4, SLOTS, FLAG + 2 * COPY),
        ("sendrecv", 4, WIRE, PING + BOTH),
        ("pingpong", 4, WIRE, PING + ONE),
        ("pingpong", 2, DIRECT, FLAG + COPY_ALONE),
        ("barrier", 2, SLOTS, FLAG),
        ("barrier", 9, WIRE, 4 * PING),
    ],
)
def test_a_limit_is_the_sum_of_what_a_call_cannot_do_without(
    benchmark: str, world_size: int, link: str, expected: float
) -> None:
    assert limit_us(limits_of(benchmark), world_size, link) == pytest.approx(expected, rel=1e-12)


@given(benchmark=st.sampled_from(BENCHMARKS), world_size=st.integers(2, 4096))
def test_reading_in_place_never_takes_more_than_slots(benchmark: str, world_size: int) -> None:
    slots, direct = (floor(benchmark, world_size, link) for link in (SLOTS, DIRECT))
    passes = [each.copied + each.added + each.copied_alone for each in (slots, direct)]
    assert passes[1] <= passes[0]
    assert slots.messages == direct.messages == floor(benchmark, world_size, WIRE).messages
    assert (passes[0] == 0) == (benchmark == "barrier")


def test_nothing_moves_in_a_world_of_one() -> None:
    assert floor("all_reduce", 1, SLOTS) == Floor(0)


@pytest.mark.parametrize(
    ("target", "environ", "link"),
    [
        ("tcp", {}, WIRE),
        ("gloo", {}, WIRE),
        ("shm", {}, SLOTS),
        ("shm+symmetric", {}, DIRECT),
        ("mpi+raw", {}, DIRECT),
        ("mpi+raw", {"OMPI_MCA_btl": "tcp,self"}, WIRE),
        ("mpi", {"OMPI_MCA_btl": "self,sm,tcp"}, DIRECT),
        ("mpi", {"OMPI_MCA_btl": "self"}, DIRECT),
        ("ucx", {"UCX_TLS": "tcp"}, WIRE),
        ("ucx", {"OMPI_MCA_btl": "tcp,self"}, DIRECT),
        ("hybrid", {}, None),
    ],
)
def test_a_target_is_held_against_the_way_that_its_ranks_take(target: str, environ: dict[str, str], link: str | None) -> None:
    assert link_of(Target.parse(target), environ) == link


def test_a_neighbour_that_does_not_answer_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = SimpleNamespace(measure_copy=late, measure_add=late)
    monkeypatch.setattr("oneaccord_lab.bench.probes.native", lambda: native)
    with oa.init(config={}) as group, closing(Probes(group, tmp_path, 1.0)) as probes:
        probes.begin(0)
        with pytest.raises(
            CommError, match="rank 0 cannot measure the machine with its neighbour: the other side did not come"
        ):
            probes.begin(8)


def late(*arguments: object) -> float:
    raise TimeoutError("the other side did not come in time")
