"""The table that comes with oneaccord is what the model says, in few rows."""

from __future__ import annotations

import hashlib
import re

import pytest

from oneaccord.config.select import Selector, candidates, default_rules, default_segments
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.simulation import PRESETS
from oneaccord.schedule.steps import Collective
from oneaccord_lab.simulation import Prepared, simulate
from oneaccord_lab.tuning import model
from oneaccord_lab.tuning.model import LAYOUTS, SIZES, SLACK, TOLERANCE, Layout, model_rules, predict

MIB = 1 << 20
FEW_SIZES = tuple(1 << power for power in (3, 8, 13, 18, 23, 27, 30))
"""Enough where times differ in a few ranges of sizes; each layout's `every` divides their number less one."""


def made_up(algorithm: Algorithm, layout: Layout, world_size: int, nbytes: int) -> float:
    """Return times without any sense, the same each time."""
    digest = hashlib.sha256(f"{algorithm.name} {layout.name} {world_size > 8} {nbytes.bit_length() // 8}".encode()).digest()
    return 1 + digest[0] % 8


def loss(selector: Selector, collective: Collective, layout: Layout, world: int, nbytes: int, how: dict[str, bool]) -> float:
    """Return how much longer than the best the chosen algorithm takes by the made-up times."""
    per_host = layout.neighbours(world)
    chosen = selector.choose(collective, nbytes, world, ranks_per_host=per_host, **how).algorithm
    able = [
        each
        for each in candidates(selector.algorithms(collective), world, per_host)
        if (each.canonical or not how.get("reproducible") or not PROMISES[collective].reduces)
        and (how.get("even", True) or not each.even)
    ]
    assert chosen in able
    return made_up(chosen, layout, world, nbytes) / min(made_up(each, layout, world, nbytes) for each in able) - 1


@pytest.mark.parametrize(("tolerance", "sizes"), [(0.5, FEW_SIZES), pytest.param(0.0, SIZES, marks=pytest.mark.long)])
def test_whatever_the_times_are_no_choice_at_a_simulated_place_loses_more_than_is_allowed(
    tolerance: float, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SIZES", sizes)
    selector = Selector(model_rules(made_up, tolerance))
    for collective in Collective:
        for layout in LAYOUTS:
            for world in layout.worlds:
                for nbytes in sizes[:: layout.every] if collective is not Collective.BARRIER else (0,):
                    allowed = tolerance * layout.slack
                    assert loss(selector, collective, layout, world, nbytes, {}) <= allowed
                    if PROMISES[collective].reduces:
                        assert loss(selector, collective, layout, world, nbytes, {"reproducible": True}) <= allowed


def test_where_nothing_differs_there_is_one_row_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SIZES", SIZES[::7])
    rules = model_rules(lambda *_: 1.0)
    assert [rule.collective for rule in rules if rule.conditions == "all other calls" and rule.collective is Collective.BARRIER]
    assert all(rule.max_bytes is None and rule.max_hosts is None for rule in rules)
    assert len(rules) <= 2 * len(Collective)


def test_an_algorithm_by_host_gets_rows_only_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SIZES", SIZES[::7])
    selector = Selector(model_rules(lambda algorithm, *_: 1.0 if algorithm.by_host else 2.0 + (algorithm.name == "ring")))
    for world, per_host, name in ((16, 8, "hierarchical"), (16, 16, "other"), (16, 1, "other")):
        chosen = selector.choose(Collective.ALL_REDUCE, 8, world, ranks_per_host=per_host).algorithm.name
        assert (chosen == "hierarchical") == (name == "hierarchical")
        assert chosen != "ring"


def test_the_table_is_small_and_every_row_says_how_well_it_does_in_the_model() -> None:
    assert len(default_rules()) < 170
    for rule in default_rules():
        assert re.fullmatch(
            r"in the model, .* (ranks|hosts?) .*: (there is no other|the fastest in (all \d+ cases|\d+ of \d+ cases, else .* slower))",
            rule.reason,
        ), rule.reason


FACTOR = 2.0
"""How many times as long as the best a choice may take, in large worlds that the table was not made from."""


@pytest.mark.parametrize(
    ("network", "world", "per_host"),
    [
        ("torus", 36, 4),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("torus", 96, 4), ("fat-tree", 192, 1), ("fat-tree", 192, 8))
        ),
    ],
)
@pytest.mark.parametrize("collective", [each for each in Collective if each is not Collective.BARRIER])
def test_in_large_worlds_the_choice_is_near_the_best_of_the_simulator(
    collective: Collective, network: str, world: int, per_host: int
) -> None:
    """None of these places is among those that the table was made from."""
    selector, where = Selector(), PRESETS[network].with_ranks_per_host(per_host)
    able = candidates(selector.algorithms(collective), world, per_host)
    for nbytes in (8, 32 * 1024, 2 * MIB, 256 * MIB):
        choice = selector.choose(collective, nbytes, world, ranks_per_host=per_host)
        times = {
            each.name: simulate(each, world, nbytes, where, segments=default_segments(each, nbytes, world)).time_s
            for each in able
        }
        assert times[choice.algorithm.name] <= FACTOR * min(times.values()), (nbytes, choice.reason, times)


@pytest.mark.long
def test_in_a_world_of_65536_ranks_the_choice_is_near_the_best_of_the_simulator() -> None:
    world, per_host, selector = 65536, 8, Selector()
    able = candidates(selector.algorithms(Collective.ALL_REDUCE), world, per_host)
    # The two that are left out take a minute, and are far behind.
    some = [each for each in able if each.name not in ("circulant", "tree")]
    prepared = {each.name: Prepared.of(each, world, PRESETS["fat-tree"]) for each in some}
    for nbytes in (64, 64 * 1024, 8 * MIB, 1024 * MIB):
        choice = selector.choose(Collective.ALL_REDUCE, nbytes, world, ranks_per_host=per_host)
        times = {name: each.at(nbytes).time_s for name, each in prepared.items()}
        assert times[choice.algorithm.name] <= (1 + SLACK * TOLERANCE) * min(times.values()), (nbytes, choice.reason, times)


@pytest.mark.parametrize("collective", [each for each in Collective if each is not Collective.BARRIER])
def test_the_table_is_current(collective: Collective) -> None:
    """Its choices are good by the simulator; if not: python tools/make_selection_table.py."""
    selector = Selector()
    for layout in (each for each in LAYOUTS if each.slack == 1):
        for world in (2, 3, 8) if layout.ranks_per_host != 8 else (16,):
            per_host = layout.neighbours(world)
            for nbytes in (8, 8192, 128 * 1024, 2 * MIB, 32 * MIB):
                chosen = selector.choose(collective, nbytes, world, ranks_per_host=per_host).algorithm
                able = candidates(selector.algorithms(collective), world, per_host)
                best = min(predict(each, layout, world, nbytes) for each in able)
                assert predict(chosen, layout, world, nbytes) <= (1 + TOLERANCE) * best * (1 + 1e-9), (
                    layout.name,
                    world,
                    nbytes,
                )
