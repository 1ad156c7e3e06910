"""The table chooses the algorithm that it says, and the config overrules it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.algorithms import tree
from manyhands.algorithms.registry import BUILTIN, Algorithm
from manyhands.errors import ConfigError, DuplicatePluginError
from manyhands.schedule.steps import Collective
from manyhands.select import DEFAULT_RULES, MAX_SEGMENTS, Rule, Selector

KIB = 1024
MIB = 1024 * KIB


@pytest.mark.parametrize(
    ("collective", "nbytes", "world", "algorithm"),
    [
        (Collective.ALL_REDUCE, 0, 8, "recursive_doubling"),
        (Collective.ALL_REDUCE, 64 * KIB, 8, "recursive_doubling"),
        (Collective.ALL_REDUCE, 64 * KIB + 1, 8, "ring"),
        (Collective.ALL_REDUCE, 128 * KIB, 2, "recursive_doubling"),
        (Collective.ALL_REDUCE, 128 * KIB + 1, 2, "ring"),
        (Collective.BROADCAST, 256 * KIB, 3, "binomial"),
        (Collective.BROADCAST, 256 * KIB + 1, 3, "chain"),
        (Collective.BROADCAST, 64 * MIB, 2, "binomial"),
        (Collective.ALL_GATHER, 64 * KIB, 5, "bruck"),
        (Collective.ALL_GATHER, 64 * KIB + 1, 5, "ring"),
        (Collective.BARRIER, 0, 5, "dissemination"),
    ],
)
def test_the_default_rules(collective: Collective, nbytes: int, world: int, algorithm: str) -> None:
    choice = Selector().choose(collective, nbytes, world)
    assert (choice.algorithm.collective, choice.algorithm.name) == (collective, algorithm)
    assert choice.reason


@pytest.mark.parametrize("collective", Collective)
def test_the_default_rules_fit_every_call(collective: Collective) -> None:
    selector = Selector()
    for nbytes in (0, 1, KIB, MIB, 2**40):
        for world in (1, 2, 3, 65_536):
            assert selector.choose(collective, nbytes, world).algorithm.collective is collective


@pytest.mark.parametrize(
    ("collective", "nbytes", "world", "segments"),
    [
        (Collective.BROADCAST, 512 * KIB, 3, 1),
        (Collective.BROADCAST, 512 * KIB + 1, 3, 2),
        (Collective.BROADCAST, 8 * MIB, 3, 16),
        (Collective.BROADCAST, 2**40, 3, MAX_SEGMENTS),
        (Collective.ALL_REDUCE, 4 * MIB, 4, 1),
        (Collective.ALL_REDUCE, 64 * MIB, 4, 16),
        (Collective.ALL_REDUCE, 0, 4, 1),
        (Collective.ALL_TO_ALL, 2**40, 4, 1),
    ],
)
def test_segments_have_the_size_that_the_algorithm_asks_for(
    collective: Collective, nbytes: int, world: int, segments: int
) -> None:
    assert Selector().choose(collective, nbytes, world).segments == segments


def test_the_config_overrules_the_table() -> None:
    selector = Selector(overrides={"all_reduce": "ring"})
    choice = selector.choose(Collective.ALL_REDUCE, 8, 4)
    assert (choice.algorithm.name, choice.segments) == ("ring", 1)
    assert "config" in choice.reason
    assert selector.choose(Collective.BROADCAST, 8, 4).algorithm.name == "binomial"


def test_the_first_rule_that_fits_wins() -> None:
    rule = Rule(Collective.BROADCAST, "chain", None, None, "measured")
    choice = Selector((rule, *DEFAULT_RULES)).choose(Collective.BROADCAST, 1, 2)
    assert (choice.algorithm.name, choice.reason) == ("chain", "measured")


def test_an_algorithm_of_a_plugin_can_be_chosen() -> None:
    mine = Algorithm("star", Collective.BROADCAST, tree.broadcast, "everyone at once", segment_bytes=10)
    selector = Selector(algorithms=(*BUILTIN, mine), overrides={"broadcast": "star"})
    choice = selector.choose(Collective.BROADCAST, 25, 4)
    assert choice.algorithm is mine
    assert choice.segments == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"all_reduce": "rin"}, ["'rin'", "all_reduce", "did you mean 'ring'?", "recursive_doubling, ring"]),
        ({"all_redcue": "ring"}, ["'all_redcue'", "did you mean 'all_reduce'?", "barrier"]),
        ({"barrier": "xyzzy"}, ["'xyzzy'", "Known are: dissemination"]),
        ({"reduce_scatter": "recursive_doubling"}, ["'recursive_doubling'", "reduce_scatter", "Known are: ring"]),
    ],
)
def test_an_unknown_name_in_the_config_is_refused_with_the_nearest_one(overrides: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Selector(overrides=overrides)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.key in overrides


def test_a_rule_for_an_algorithm_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="a rule names the algorithm 'star' for broadcast"):
        Selector([Rule(Collective.BROADCAST, "star", None, None, "")])


def test_a_call_that_no_rule_fits_is_refused() -> None:
    selector = Selector([Rule(Collective.BROADCAST, "chain", 10, 4, "")])
    assert selector.choose(Collective.BROADCAST, 10, 4).algorithm.name == "chain"
    for nbytes, world in ((11, 4), (10, 5)):
        with pytest.raises(ConfigError, match=f"no rule fits broadcast of {nbytes} bytes in a world of {world}"):
            selector.choose(Collective.BROADCAST, nbytes, world)


def test_two_algorithms_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicatePluginError, match="two algorithms for all_reduce are called 'ring'"):
        Selector(algorithms=(*BUILTIN, replace(BUILTIN[0], summary="another one")))
