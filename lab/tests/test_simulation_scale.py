"""Large worlds: one period of ranks stands for all where ranks are alike, and a formula where there are too many messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oneaccord.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.simulation import PRESETS, Level, Network
from oneaccord.schedule.simulation.routes import Wiring, cube
from oneaccord.schedule.steps import Collective
from oneaccord_lab.simulation import outcome, simulate
from oneaccord_lab.simulation.outcome import run_program
from oneaccord_lab.simulation.program import Symmetry, compile_program, find_symmetry

TEXTBOOK = PRESETS["textbook"]


def find(collective: str, name: str) -> Algorithm:
    return next(each for each in BUILTIN if each.collective.value == collective and each.name == name)


def fits(algorithm: Algorithm, size: int, network: Network) -> bool:
    return not algorithm.by_host or size % network.neighbours(size) == 0


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective.value}-{algorithm.name}"


@pytest.mark.parametrize("algorithm", BUILTIN, ids=name_of)
@pytest.mark.parametrize("sizes", [range(1, 17), pytest.param((*range(17, 26), 32, 36, 48), marks=pytest.mark.long)], ids=str)
def test_ranks_that_look_alike_in_a_sample_are_alike(algorithm: Algorithm, sizes: Sequence[int]) -> None:
    # Beyond some number of steps only a sample of ranks is compared. Here it is a small one, and all ranks decide.
    for size in sizes:
        for per_host in (1, 2, 4):
            if algorithm.by_host and size % per_host:
                continue

            def build(rank, size=size, per_host=per_host):  # type: ignore[no-untyped-def]
                return algorithm.schedule(rank, size, 0, 1, per_host)

            wiring = Wiring(TEXTBOOK, size)
            assert find_symmetry(build, wiring, per_host, 0) == find_symmetry(build, wiring, per_host, 10**9), (size, per_host)


@pytest.mark.parametrize("preset", ["textbook", "fat-tree", "torus"])
@pytest.mark.parametrize(
    ("collective", "name"),
    [("all_reduce", "ring"), ("all_to_all", "pairwise"), ("all_to_all", "bruck"), ("all_reduce", "rabenseifner")],
)
def test_one_period_of_ranks_tells_what_all_ranks_do(collective: str, name: str, preset: str) -> None:
    algorithm, network = find(collective, name), PRESETS[preset].with_ranks_per_host(2)
    network = network.model_copy(update={"hosts_per_leaf": 2} if preset == "fat-tree" else {})
    for size in (16, 18, 24, 32):
        wiring = Wiring(network, size)

        def build(rank: int, size: int = size):  # type: ignore[no-untyped-def]
            return algorithm.schedule(rank, size)

        symmetry = find_symmetry(build, wiring, 1, 10**9)
        folded = run_program(compile_program(build, size, symmetry), wiring, 1000.0)
        full = run_program(compile_program(build, size, Symmetry(size, size)), wiring, 1000.0)
        assert (folded.time_s, folded.steps) == (full.time_s, full.steps), (size, symmetry)
        assert full.finished == folded.finished * (size // symmetry.period)


@pytest.mark.long
def test_a_ring_of_32768_ranks_on_wires_is_its_formula() -> None:
    size, nbytes = 32_768, 1 << 30
    found = simulate(replace(find("all_gather", "ring"), cost=None), size, nbytes, TEXTBOOK)
    assert found.method == "events"
    assert found.time_s == pytest.approx((size - 1) * (1e-6 + nbytes / size / 10e9), rel=1e-9)
    assert found.steps == size - 1


def test_recursive_doubling_of_4096_ranks_with_contention() -> None:
    # Eight ranks of a host share its card in nine of twelve rounds.
    nbytes = 1 << 20
    found = simulate(replace(find("all_reduce", "recursive_doubling"), cost=None), 4096, nbytes, PRESETS["fat-tree"])
    assert (found.method, found.steps) == ("events", 12)
    assert found.time_s > 9 * 8 * nbytes / 50e9
    assert found.bytes_per_rank == 12 * nbytes


@pytest.mark.parametrize("algorithm", [each for each in BUILTIN if each.cost], ids=name_of)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 6, 16), pytest.param((25, 36), marks=pytest.mark.long)], ids=str)
def test_the_formula_is_what_events_give_without_contention(
    algorithm: Algorithm, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in sizes:
        for per_host in (1, 2):
            network = TEXTBOOK.with_ranks_per_host(per_host)
            if not fits(algorithm, size, network):
                continue
            # Without its formula, so that steps are counted in the schedules.
            exact = simulate(replace(algorithm, cost=None), size, 10**6, network, segments=1)
            monkeypatch.setattr(outcome, "MAX_MESSAGES", -1)
            formula = simulate(algorithm, size, 10**6, network, segments=1)
            monkeypatch.undo()
            assert (exact.method, formula.method) == ("events", "formula")
            assert formula.time_s == pytest.approx(exact.time_s, rel=1e-9)
            assert formula.steps == exact.steps
            assert formula.bytes_per_rank == pytest.approx(exact.bytes_per_rank, rel=1e-9)


# How far the closed form may be from events, in worlds where both are at hand: it takes the slowest way for all.
NEAR = [
    ("all_reduce", "ring", "fat-tree", 1.35),
    ("all_reduce", "ring", "torus", 1.35),
    ("all_gather", "ring", "fat-tree", 1.35),
    ("all_to_all", "pairwise", "fat-tree", 3),
    ("all_to_all", "pairwise", "torus", 3),
    ("broadcast", "chain", "fat-tree", 1.35),
]


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.long), pytest.param(256, marks=pytest.mark.long)])
@pytest.mark.parametrize(("collective", "name", "preset", "factor"), NEAR)
def test_the_formula_is_near_to_events_with_contention(
    collective: str, name: str, preset: str, factor: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = find(collective, name)
    for nbytes in (10**3, 10**9):
        exact = simulate(algorithm, size, nbytes, PRESETS[preset], segments=1)
        monkeypatch.setattr(outcome, "MAX_MESSAGES", -1)
        formula = simulate(algorithm, size, nbytes, PRESETS[preset], segments=1)
        monkeypatch.undo()
        assert exact.time_s / factor < formula.time_s < exact.time_s * factor, (size, nbytes)


def test_a_formula_knows_that_the_slowest_port_sets_the_pace_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Level(latency_s=1e-6, bandwidth_bytes_per_s=1e9), Level(latency_s=1e-6, bandwidth_bytes_per_s=100e9)
    network = Network(topology="wires", ranks_per_host=8, wire=slow, host=fast)
    exact = simulate(find("all_gather", "ring"), 64, 10**9, network)
    monkeypatch.setattr(outcome, "MAX_MESSAGES", -1)
    formula = simulate(find("all_gather", "ring"), 64, 10**9, network)
    assert formula.time_s == pytest.approx(exact.time_s, rel=0.02)


def test_what_has_no_formula_is_refused_in_words_when_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = find("all_gather", "ring")
    secret = Algorithm("secret", Collective.ALL_GATHER, ring.build, "")
    monkeypatch.setattr(outcome, "MAX_MESSAGES", 10)
    with pytest.raises(UsageError, match=r"secret all_gather of 64 ranks has more than 10 messages .* has no formula"):
        simulate(secret, 64, 1000, PRESETS["laptop"])


def test_arguments_out_of_range_are_refused_in_words() -> None:
    ring, hosts = find("all_gather", "ring"), find("all_reduce", "hierarchical")
    with pytest.raises(InvalidWorldSizeError, match="a world of 0 ranks"):
        simulate(ring, 0, 1, TEXTBOOK)
    with pytest.raises(InvalidRankError, match="the root is 4, but the ranks are 0 to 3"):
        simulate(ring, 4, 1, TEXTBOOK, root=4)
    with pytest.raises(UsageError, match="-1 bytes"):
        simulate(ring, 4, -1, TEXTBOOK)
    with pytest.raises(UsageError, match="0 segments"):
        simulate(ring, 4, 1, TEXTBOOK, segments=0)
    with pytest.raises(UsageError, match="12 ranks are not a multiple of 8 ranks per host"):
        simulate(hosts, 12, 1, PRESETS["fat-tree"])


def test_hosts_form_a_torus_as_near_to_a_cube_as_they_can() -> None:
    assert [cube(hosts) for hosts in (1, 7, 8, 12, 512, 8192)] == [
        (1, 1, 1),
        (1, 1, 7),
        (2, 2, 2),
        (2, 2, 3),
        (8, 8, 8),
        (16, 16, 32),
    ]
