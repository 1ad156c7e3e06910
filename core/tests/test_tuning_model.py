"""The table that comes with manyhands is what the model says, in few rows."""

from __future__ import annotations

import hashlib

import pytest

from manyhands.algorithms.registry import Algorithm
from manyhands.schedule.contracts import PROMISES
from manyhands.schedule.steps import Collective
from manyhands.select import Selector, candidates, default_rules
from manyhands.tuning.model import LAYOUTS, SIZES, TOLERANCE, Layout, model_rules, predict

MIB = 1 << 20


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


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_whatever_the_times_are_no_choice_at_a_simulated_place_loses_more_than_is_allowed(tolerance: float) -> None:
    selector = Selector(model_rules(made_up, tolerance))
    for collective in Collective:
        for layout in LAYOUTS:
            for world in layout.worlds:
                for nbytes in SIZES if collective is not Collective.BARRIER else (0,):
                    assert loss(selector, collective, layout, world, nbytes, {}) <= tolerance
                    if PROMISES[collective].reduces:
                        assert loss(selector, collective, layout, world, nbytes, {"reproducible": True}) <= tolerance


def test_where_nothing_differs_there_is_one_row_for_all() -> None:
    rules = model_rules(lambda *_: 1.0)
    assert [rule.collective for rule in rules if rule.unconditional and rule.collective is Collective.BARRIER]
    assert all(rule.max_bytes is None and rule.max_hosts is None for rule in rules)
    assert len(rules) <= 2 * len(Collective)


def test_an_algorithm_by_host_gets_rows_only_where_it_can_serve() -> None:
    selector = Selector(model_rules(lambda algorithm, *_: 1.0 if algorithm.by_host else 2.0 + (algorithm.name == "ring")))
    for world, per_host, name in ((16, 8, "hierarchical"), (16, 16, "other"), (16, 1, "other")):
        chosen = selector.choose(Collective.ALL_REDUCE, 8, world, ranks_per_host=per_host).algorithm.name
        assert (chosen == "hierarchical") == (name == "hierarchical")
        assert chosen != "ring"


def test_the_table_is_small_and_every_row_quotes_the_model() -> None:
    assert len(default_rules()) < 100
    assert all(rule.reason.startswith("on the model's networks, such as ") for rule in default_rules())


@pytest.mark.parametrize("collective", [each for each in Collective if each is not Collective.BARRIER])
def test_the_table_is_current(collective: Collective) -> None:
    """Its choices are good by the simulator; if not: python tools/make_selection_table.py."""
    selector = Selector()
    for layout in LAYOUTS:
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
