"""The first row that fits chooses the algorithm, and the config overrules it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.config.select import MAX_SEGMENTS, Rule, Selector, candidates, default_rules
from oneaccord.errors import ConfigError, DuplicatePluginError
from oneaccord.schedule.algorithms import tree
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective

KIB = 1024
MIB = 1024 * KIB
BROADCAST, REDUCE = Collective.BROADCAST, Collective.REDUCE

PLAIN = Algorithm("plain", BROADCAST, tree.broadcast, "for any call")
EVEN = Algorithm("evenly", BROADCAST, tree.broadcast, "for even blocks", even=True)
HOSTS = Algorithm("hosts", BROADCAST, tree.broadcast, "by host", by_host=True)
SEGMENTED = Algorithm("segmented", BROADCAST, tree.broadcast, "cut", segment_bytes=512 * KIB)
BLOCKS = Algorithm("blocks", Collective.REDUCE_SCATTER, tree.reduce, "cut", segment_bytes=MIB, blockwise=True)
OWN_ORDER = Algorithm("own_order", REDUCE, tree.reduce, "an order of its own")
CANONICAL = Algorithm("one_order", REDUCE, tree.reduce, "the reproducible reduction", canonical=True)
MINE = (PLAIN, EVEN, HOSTS, SEGMENTED, BLOCKS, OWN_ORDER, CANONICAL)


def selector(*rules: Rule, **overrides: str) -> Selector:
    """Choose by some rules, and by the default ones where these do not fit, among the algorithms above and oneaccord' own."""
    return Selector((*rules, *default_rules(), Rule(REDUCE, "one_order")), (*BUILTIN, *MINE), overrides)


def chosen(rule: Rule, nbytes: int, world: int, ranks_per_host: int = 1, **how: bool) -> bool:
    """Tell whether a rule decides a call."""
    choice = selector(rule).choose(rule.collective, nbytes, world, ranks_per_host=ranks_per_host, **how)
    return choice.algorithm.name == rule.algorithm


@given(
    collective=st.sampled_from(Collective),
    nbytes=st.integers(0, 2**40),
    world=st.integers(1, 70_000),
    ranks_per_host=st.integers(1, 64),
    even=st.booleans(),
    reproducible=st.booleans(),
)
def test_the_default_table_has_an_algorithm_that_serves_any_call(
    collective: Collective, nbytes: int, world: int, ranks_per_host: int, even: bool, reproducible: bool
) -> None:
    if not any(each.canonical for each in BUILTIN if each.collective is collective):
        reproducible = False
    choice = Selector().choose(collective, nbytes, world, ranks_per_host=ranks_per_host, even=even, reproducible=reproducible)
    algorithm = choice.algorithm
    assert algorithm.collective is collective
    assert even or not algorithm.even
    assert not algorithm.by_host or (1 < ranks_per_host < world and world % ranks_per_host == 0)
    assert algorithm.canonical or not reproducible or not PROMISES[collective].reduces
    assert 1 <= choice.segments <= MAX_SEGMENTS
    assert choice.reason


def test_a_small_all_reduce_takes_few_steps_and_a_large_one_few_bytes() -> None:
    assert Selector().choose(Collective.ALL_REDUCE, 8, 8).algorithm.name == "recursive_doubling"
    assert Selector().choose(Collective.ALL_REDUCE, 2**30, 8).algorithm.name != "recursive_doubling"


@pytest.mark.parametrize(
    ("rule", "fitting", "others"),
    [
        (Rule(BROADCAST, "plain", max_bytes=10), [(0, 4), (10, 4)], [(11, 4)]),
        (Rule(BROADCAST, "plain", min_bytes=10), [(10, 4), (2**40, 4)], [(9, 4)]),
        (Rule(BROADCAST, "plain", max_world=4), [(8, 1), (8, 4)], [(8, 5)]),
        (Rule(BROADCAST, "plain", min_world=4), [(8, 4), (8, 99)], [(8, 3)]),
        (Rule(BROADCAST, "plain", power_of_two=True), [(8, 1), (8, 2), (8, 64)], [(8, 3), (8, 6), (8, 63)]),
        (Rule(BROADCAST, "plain", max_hosts=1), [(8, 4, 4), (8, 1)], [(8, 4), (8, 4, 2), (8, 5, 4)]),
        (Rule(BROADCAST, "plain", min_hosts=2), [(8, 4, 2), (8, 5, 4), (8, 2)], [(8, 4, 4)]),
        (Rule(BROADCAST, "plain", min_ranks_per_host=2), [(8, 4, 2), (8, 4, 4)], [(8, 4)]),
    ],
)
def test_a_rule_decides_when_all_that_it_names_holds(
    rule: Rule, fitting: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> None:
    assert [chosen(rule, *call) for call in fitting] == [True] * len(fitting)
    assert [chosen(rule, *call) for call in others] == [False] * len(others)


def test_a_rule_for_reproducible_calls_or_for_uneven_blocks_decides_these_alone() -> None:
    same = Rule(BROADCAST, "plain", reproducible=True)
    assert [chosen(same, 8, 4, reproducible=how) for how in (True, False)] == [True, False]
    uneven = Rule(BROADCAST, "plain", uneven=True)
    assert [chosen(uneven, 8, 4, even=how) for how in (False, True)] == [True, False]


def test_an_algorithm_for_even_blocks_is_passed_over_for_uneven_ones() -> None:
    assert chosen(Rule(BROADCAST, "evenly"), 8, 4)
    assert not chosen(Rule(BROADCAST, "evenly"), 8, 4, even=False)


def test_an_algorithm_by_host_is_passed_over_unless_several_hosts_have_equally_many_ranks() -> None:
    rule = Rule(BROADCAST, "hosts")
    assert chosen(rule, 8, 4, 2)
    assert chosen(rule, 8, 6, 3)
    assert [chosen(rule, 8, world, ranks) for world, ranks in ((4, 1), (4, 4), (5, 2), (3, 8))] == [False] * 4


def test_another_order_is_passed_over_when_the_call_must_be_reproducible() -> None:
    assert chosen(Rule(REDUCE, "own_order"), 8, 4)
    assert chosen(Rule(REDUCE, "one_order"), 8, 4, reproducible=True)
    both = selector(Rule(REDUCE, "own_order"), Rule(REDUCE, "one_order"))
    assert both.choose(REDUCE, 8, 4).algorithm is OWN_ORDER
    assert both.choose(REDUCE, 8, 4, reproducible=True).algorithm is CANONICAL


def test_reproducible_excludes_nothing_where_nothing_is_reduced() -> None:
    assert chosen(Rule(BROADCAST, "plain"), 8, 4, reproducible=True)


@pytest.mark.parametrize(
    ("rule", "nbytes", "segments"),
    [
        (Rule(BROADCAST, "segmented"), 512 * KIB, 1),
        (Rule(BROADCAST, "segmented"), 512 * KIB + 1, 2),
        (Rule(BROADCAST, "segmented"), 8 * MIB, 16),
        (Rule(BROADCAST, "segmented"), 2**40, MAX_SEGMENTS),
        (Rule(BROADCAST, "segmented", segments=5), 8, 5),
        (Rule(BROADCAST, "plain"), 2**40, 1),
        (Rule(Collective.REDUCE_SCATTER, "blocks"), 4 * MIB, 1),
        (Rule(Collective.REDUCE_SCATTER, "blocks"), 64 * MIB, 16),
        (Rule(Collective.REDUCE_SCATTER, "blocks"), 0, 1),
    ],
)
def test_segments_are_those_of_the_row_or_of_the_size_that_the_algorithm_asks_for(
    rule: Rule, nbytes: int, segments: int
) -> None:
    assert selector(rule).choose(rule.collective, nbytes, 4).segments == segments


def test_the_config_overrules_the_table() -> None:
    by_config = selector(all_reduce="ring")
    choice = by_config.choose(Collective.ALL_REDUCE, 8, 4)
    assert (choice.algorithm.name, choice.segments) == ("ring", 1)
    assert choice.reason == "the config asks for it"
    assert by_config.choose(BROADCAST, 8, 4) == Selector().choose(BROADCAST, 8, 4)


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("evenly", {"even": False}, "(the config asks for evenly, which needs blocks of one size)"),
        ("hosts", {"ranks_per_host": 4}, "(the config asks for hosts, which needs several hosts with equally many ranks"),
    ],
)
def test_the_table_decides_where_what_the_config_asks_for_cannot_serve_and_says_so(
    name: str, how: dict[str, int], words: str
) -> None:
    choice = selector(broadcast=name).choose(BROADCAST, 8, 4, **how)
    assert choice.algorithm.name != name
    assert words in choice.reason


def test_a_reproducible_call_by_an_order_that_the_config_asks_for_is_refused() -> None:
    asked = selector(reduce="own_order")
    with pytest.raises(
        ConfigError, match=r"reproducible reduce: the config asks for .*'own_order'.* choose one of: .*one_order"
    ) as e:
        asked.choose(REDUCE, 8, 4, reproducible=True)
    assert (e.value.key, e.value.value) == ("reduce", "own_order")
    assert asked.choose(REDUCE, 8, 4).algorithm is OWN_ORDER
    assert selector(reduce="one_order").choose(REDUCE, 8, 4, reproducible=True).algorithm is CANONICAL


def test_the_first_rule_that_fits_wins() -> None:
    first = Rule(BROADCAST, "segmented", max_bytes=8, reason="the first")
    both = selector(first, Rule(BROADCAST, "plain", reason="the second"))
    assert [both.choose(BROADCAST, size, 4).reason for size in (8, 9)] == ["the first", "the second"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"all_reduce": "rin"}, ["'rin'", "all_reduce", "did you mean 'ring'?", "recursive_doubling"]),
        ({"all_redcue": "ring"}, ["'all_redcue'", "did you mean 'all_reduce'?", "barrier"]),
        ({"barrier": "xyzzy"}, ["'xyzzy'", "Valid here: dissemination"]),
    ],
)
def test_an_unknown_name_in_the_config_is_refused_with_the_nearest_one(overrides: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Selector(overrides=overrides)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.key in overrides


def test_a_refused_algorithm_cannot_be_chosen_and_the_reason_is_told() -> None:
    refused = {("broadcast", "star"): "rank 2 waits for ever"}
    with pytest.raises(ConfigError, match="the algorithm 'star' for broadcast, which was refused: rank 2 waits for ever"):
        Selector(overrides={"broadcast": "star"}, refused=refused)
    with pytest.raises(ConfigError, match="a rule names the algorithm 'star' for broadcast, which was refused"):
        Selector((Rule(BROADCAST, "star"), *default_rules()), refused=refused)
    assert Selector(refused=refused).choose(BROADCAST, 8, 4)


def test_a_rule_for_an_algorithm_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="a rule names the algorithm 'star' for broadcast, which does not exist"):
        Selector([Rule(BROADCAST, "star")])


def test_segments_for_an_algorithm_that_is_not_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="segments = 4: plain is not cut into segments") as caught:
        selector(Rule(BROADCAST, "plain", segments=4))
    assert (caught.value.key, caught.value.value) == ("broadcast.segments", 4)


@pytest.mark.parametrize(
    "last",
    [
        Rule(BROADCAST, "plain", max_bytes=10),
        Rule(BROADCAST, "plain", max_world=4),
        Rule(BROADCAST, "plain", power_of_two=True),
        Rule(BROADCAST, "plain", min_hosts=6),
        Rule(BROADCAST, "plain", reproducible=True),
        Rule(BROADCAST, "evenly"),
        Rule(BROADCAST, "hosts"),
    ],
)
def test_a_call_that_no_rule_fits_is_refused(last: Rule) -> None:
    rules = [Rule(BROADCAST, "evenly", max_bytes=4), last]
    call = {"nbytes": 11, "world_size": 5, "even": False}
    with pytest.raises(
        ConfigError, match=r"no rule fits this uneven broadcast of 11 bytes in a world of 5: end its rules with"
    ) as e:
        Selector(rules, MINE).choose(BROADCAST, **call)
    assert e.value.key == "broadcast"
    assert Selector([*rules, Rule(BROADCAST, "plain")], MINE).choose(BROADCAST, **call).algorithm is PLAIN


def test_a_reproducible_call_without_a_reproducible_rule_is_refused() -> None:
    rules = [Rule(REDUCE, "own_order")]
    with pytest.raises(ConfigError, match="no rule fits this reproducible reduce of 8 bytes in a world of 4"):
        Selector(rules, MINE).choose(REDUCE, 8, 4, reproducible=True)
    for always in (Rule(REDUCE, "one_order"), Rule(REDUCE, "one_order", reproducible=True)):
        assert Selector([*rules, always], MINE).choose(REDUCE, 8, 4, reproducible=True).algorithm is CANONICAL


def test_the_shipped_rows_are_right_and_their_last_ones_serve_all_calls() -> None:
    assert Selector((*default_rules(), Rule(BROADCAST, "chain"))).rules[:-1] == default_rules()  # a row behind has all checked
    last = [rule for rule in default_rules() if rule.conditions in {"all other calls", "reproducible calls", "uneven blocks"}]
    for collective in Collective:
        canonical = any(each.canonical for each in BUILTIN if each.collective is collective)
        for even, reproducible in itertools.product((True, False), (True, False) if canonical else (False,)):
            choice = Selector(last).choose(collective, 2**40, 7, even=even, reproducible=reproducible)
            assert choice.algorithm.collective is collective


@pytest.mark.parametrize("where", [0, 5])
def test_a_wrong_row_above_the_shipped_ones_is_refused(where: int) -> None:
    rows = [Rule(BROADCAST, "chain", max_bytes=8)] * 5
    rows.insert(where, Rule(BROADCAST, "star"))
    with pytest.raises(ConfigError, match="a rule names the algorithm 'star' for broadcast, which does not exist"):
        Selector((*rows, *default_rules()))


def test_two_algorithms_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicatePluginError, match="two algorithms for all_reduce are called 'ring'"):
        Selector(algorithms=(*BUILTIN, replace(BUILTIN[0], summary="another one")))


def test_the_digest_is_the_same_exactly_where_selectors_choose_alike() -> None:
    rule = Rule(BROADCAST, "plain", max_bytes=8, reason="so it is")
    digest = selector(rule).digest
    assert digest == selector(replace(rule, reason="other words", origin="elsewhere", file="x.toml")).digest
    others = [
        selector(),
        selector(rule, reduce="own_order"),
        *(selector(replace(rule, **{field: value})) for field, value in {"max_bytes": 9, "algorithm": "hosts"}.items()),
    ]
    assert len({digest, *(other.digest for other in others)}) == 1 + len(others)


def test_candidates_are_those_that_can_carry_out_an_even_call_in_the_world() -> None:
    assert candidates(MINE[:4], 4) == [PLAIN, EVEN, SEGMENTED]
    assert candidates(MINE[:4], 4, 2) == [PLAIN, EVEN, HOSTS, SEGMENTED]
