"""Where no message is in another one's way, a simulated collective takes what the literature says, to a relative 1e-9.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of High
Performance Computing Applications 19(1), 2005, sections 4 to 7; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", Journal of Parallel and Distributed Computing 69(2), 2009. Formulas are written as there: p ranks, n
bytes, latency a, seconds per byte b, seconds per byte reduced g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2

import pytest

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.simulation import Level, Network
from oneaccord_lab.simulation import simulate

A, B, G = 3e-6, 1 / 7e9, 1 / 31e9
NETWORK = Network(
    topology="wires",
    wire=Level(latency_s=A, bandwidth_bytes_per_s=7e9),
    reduction_bytes_per_s=31e9,
)

Formula = Callable[[int, float], float]

ANY = (1, 2, 3, 5, 8, 13, 16, 24, 33, 64, 100)
POWERS = (1, 2, 4, 8, 16, 32, 64)


def lg(p: int) -> int:
    return ceil(log2(p))


def part(p: int) -> float:
    return (p - 1) / p


# (collective, algorithm, worlds, formula, where it is printed)
TABLE: list[tuple[str, str, tuple[int, ...], Formula, str]] = [
    ("all_gather", "ring", ANY, lambda p, n: (p - 1) * A + part(p) * n * B, "Thakur 4.1"),
    ("all_gather", "recursive_doubling", POWERS, lambda p, n: lg(p) * A + part(p) * n * B, "Thakur 4.1"),
    ("all_gather", "bruck", ANY, lambda p, n: lg(p) * A + part(p) * n * B, "Thakur 4.1"),
    ("broadcast", "binomial", ANY, lambda p, n: lg(p) * (A + n * B), "Thakur 4.2"),
    ("broadcast", "scatter_all_gather", POWERS, lambda p, n: (lg(p) + p - 1) * A + 2 * part(p) * n * B, "Thakur 4.2"),
    ("broadcast", "scatter_doubling", POWERS, lambda p, n: 2 * lg(p) * A + 2 * part(p) * n * B, "Thakur 4.2"),
    ("all_to_all", "bruck", POWERS, lambda p, n: lg(p) * A + n / 2 * lg(p) * B, "Thakur 4.3"),
    ("all_to_all", "pairwise", ANY, lambda p, n: (p - 1) * A + part(p) * n * B, "Thakur 4.3"),
    (
        "reduce_scatter",
        "recursive_halving",
        POWERS,
        lambda p, n: lg(p) * A + part(p) * n * B + part(p) * n * G,
        "Thakur 4.4",
    ),
    ("reduce_scatter", "ring", ANY, lambda p, n: (p - 1) * A + part(p) * n * B + part(p) * n * G, "Patarasuk 3"),
    ("reduce", "binomial", ANY, lambda p, n: lg(p) * (A + n * B + n * G), "Thakur 4.5"),
    (
        "reduce",
        "reduce_scatter_gather",
        POWERS,
        lambda p, n: 2 * lg(p) * A + 2 * part(p) * n * B + part(p) * n * G,
        "Thakur 4.5",
    ),
    ("all_reduce", "recursive_doubling", POWERS, lambda p, n: lg(p) * (A + n * B + n * G), "Thakur 4.6"),
    ("all_reduce", "rabenseifner", POWERS, lambda p, n: 2 * lg(p) * A + 2 * part(p) * n * B + part(p) * n * G, "Thakur 4.6"),
    (
        "all_reduce",
        "ring",
        ANY,
        lambda p, n: 2 * (p - 1) * A + 2 * part(p) * n * B + part(p) * n * G,
        "Patarasuk 3",
    ),
    ("gather", "binomial", POWERS, lambda p, n: lg(p) * A + part(p) * n * B, "Thakur 4.5"),
    ("scatter", "binomial", POWERS, lambda p, n: lg(p) * A + part(p) * n * B, "Thakur 4.2"),
    ("barrier", "dissemination", ANY, lambda p, n: lg(p) * A, "Hensgen 1988"),
]


def find(collective: str, name: str) -> Algorithm:
    return next(each for each in BUILTIN if each.collective.value == collective and each.name == name)


def counted(collective: str, name: str) -> Algorithm:
    """Return an algorithm without its formula: its steps are then counted in its schedules, and not those that the formula says."""
    return replace(find(collective, name), cost=None)


@pytest.mark.parametrize(("collective", "name", "worlds", "formula", "where"), TABLE, ids=lambda each: str(each)[:20])
@pytest.mark.parametrize("sizes", [range(1, 25), pytest.param(range(25, 101), marks=pytest.mark.long)], ids=str)
def test_time_is_the_formula(
    collective: str, name: str, worlds: tuple[int, ...], formula: Formula, where: str, sizes: range
) -> None:
    algorithm = find(collective, name)
    for size in sorted({*worlds}.intersection(sizes)):
        for nbytes in (0, 1, 1000, 1 << 20, 10**9 + 7):
            outcome = simulate(algorithm, size, nbytes, NETWORK)
            expected = formula(size, 0 if collective == "barrier" else nbytes)
            assert outcome.time_s == pytest.approx(expected, rel=1e-9, abs=0), (size, nbytes, where)
            assert outcome.method == "events"


def test_pairwise_reduce_scatter_without_cost_of_reduction() -> None:
    # Thakur 4.4: (p - 1) a + (p - 1)/p n b + (p - 1)/p n g. Here up to four rounds are under way, so that reductions overlap with
    # transfers; where they cost nothing the formula is that of the book.
    free = NETWORK.model_copy(update={"reduction_bytes_per_s": float("inf")})
    for size in ANY:
        outcome = simulate(find("reduce_scatter", "pairwise"), size, 10**6, free)
        assert outcome.time_s == pytest.approx((size - 1) * A + part(size) * 10**6 * B, rel=1e-9, abs=0)


def test_segments_of_a_chain() -> None:
    # k segments: p + k - 2 messages of n / k bytes one after the other.
    for size in (2, 3, 9, 40):
        for k in (1, 2, 7, 100):
            outcome = simulate(counted("broadcast", "chain"), size, 10**6, NETWORK, root=size // 2, segments=k)
            assert outcome.time_s == pytest.approx((size + k - 2) * (A + 10**6 / k * B), rel=1e-9)
            assert (outcome.steps, outcome.segments) == (size + k - 2, k)
            assert outcome.bytes_per_rank == pytest.approx(10**6, rel=1e-9)


def test_a_pipelined_algorithm_gets_the_best_number_of_segments() -> None:
    chain = find("broadcast", "chain")
    for size, nbytes in ((3, 1000), (9, 10**6), (33, 10**8)):
        best = simulate(chain, size, nbytes, NETWORK)
        # The continuous optimum of (p + k - 2) (a + n / k b) is k = sqrt((p - 2) n b / a).
        optimum = ((size - 2) * nbytes * B / A) ** 0.5
        assert abs(best.segments - optimum) <= 1
        for k in {max(1, best.segments - 1), best.segments + 1}:
            assert best.time_s <= simulate(chain, size, nbytes, NETWORK, segments=k).time_s


def test_bytes_of_the_rank_that_sends_most() -> None:
    assert simulate(find("all_reduce", "ring"), 4, 1000, NETWORK).bytes_per_rank == 1500
    assert simulate(find("broadcast", "binomial"), 8, 1000, NETWORK).bytes_per_rank == 3000
    assert simulate(find("all_to_all", "pairwise"), 4, 1000, NETWORK).bytes_per_rank == 750
    assert simulate(find("gather", "binomial"), 8, 1000, NETWORK).bytes_per_rank == 500


@pytest.mark.parametrize(("collective", "name", "worlds", "formula", "where"), TABLE, ids=lambda each: str(each)[:20])
def test_steps_are_the_latencies_of_the_formula(
    collective: str, name: str, worlds: tuple[int, ...], formula: Formula, where: str
) -> None:
    for size in worlds:
        latencies = formula(size, 0) / A
        assert simulate(counted(collective, name), size, 1000, NETWORK).steps == pytest.approx(latencies, abs=1e-6), (
            size,
            where,
        )


def test_every_root_takes_the_same_time_in_a_world_of_a_power_of_two() -> None:
    for collective in ("broadcast", "reduce"):
        times = {simulate(find(collective, "binomial"), 16, 1 << 20, NETWORK, root=root).time_s for root in range(16)}
        assert max(times) == pytest.approx(min(times), rel=1e-12)
