"""Fault plans: what they may say, what is said of those that say something else, and what they answer."""

from __future__ import annotations

import math
import re
import tomllib
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from oneaccord.api import ConfigError, UsageError
from oneaccord_simulated.faults import (
    Corrupt,
    Cut,
    Delay,
    Drop,
    Fault,
    FaultPlan,
    Kill,
    Partition,
    Pause,
    Slow,
    When,
)

PLAN = FaultPlan(
    summary="a bad day",
    faults=(
        Kill(rank=2, operation="all_reduce", nth=3),
        Kill(rank=0, at_s=0.5),
        Pause(rank=1, operation="*", for_s=0.25),
        Slow(rank=3, factor=4),
        Cut(links=((0, 1), (2, "*")), from_s=0.5, until_s=2.0),
        Delay(links=((3, 0),), by_s=0.01),
        Partition(sides=((0, 1), (2,)), until_s=3.0),
        Drop(source=0, dest=1, nth=7),
        Corrupt(source=1, dest=0, bit=12),
    ),
)
FILE = """\
summary = "a bad day"

[[kill]]
rank = 2
operation = "all_reduce"
nth = 3

[[kill]]
rank = 0
at_s = 0.5

[[pause]]
rank = 1
operation = "*"
for_s = 0.25

[[slow]]
rank = 3
factor = 4.0

[[cut]]
from_s = 0.5
until_s = 2.0
links = [[0, 1], [2, "*"]]

[[delay]]
links = [[3, 0]]
by_s = 0.01

[[partition]]
until_s = 3.0
sides = [[0, 1], [2]]

[[drop]]
source = 0
dest = 1
nth = 7

[[corrupt]]
source = 1
dest = 0
bit = 12
"""


# Any plan at all, also one that fits no world.

ranks = st.integers(0, 6)
counts = st.integers(0, 10**20)
times = st.floats(0, allow_infinity=False, allow_nan=False)
ends = st.one_of(ranks, st.just("*"))
links = st.lists(st.tuples(ends, ends), min_size=1, max_size=4).map(tuple)
lasting = st.one_of(
    st.just({}),
    st.builds(lambda until: {"until_s": until}, st.floats(0, exclude_min=True)),
    st.lists(times, min_size=2, max_size=2, unique=True).map(lambda pair: {"from_s": min(pair), "until_s": max(pair)}),
)
moments = st.one_of(
    st.fixed_dictionaries({"at_s": times}),
    st.fixed_dictionaries({"operation": st.sampled_from(["*", "all_reduce", "send", "send_object"]), "nth": counts}),
)
sides = st.lists(ranks, min_size=2, max_size=6, unique=True).flatmap(
    lambda named: st.integers(1, len(named) - 1).map(lambda cut: (tuple(named[:cut]), tuple(named[cut:])))
)


def made(model: type[BaseModel], *parts: st.SearchStrategy[dict[str, object]], **fields: object) -> st.SearchStrategy[Fault]:
    """Faults of a kind, from dictionaries of fields and single fields."""
    return st.tuples(st.fixed_dictionaries(fields), *parts).map(lambda found: model(**ChainMap(*found)))


faults = st.one_of(
    made(Kill, moments, rank=counts),
    made(Pause, moments, rank=ranks, for_s=st.floats(0)),
    made(Slow, lasting, rank=ranks, factor=st.floats(0, exclude_min=True, allow_infinity=False)),
    made(Cut, lasting, links=links),
    made(Delay, lasting, links=links, by_s=times),
    made(Partition, lasting, sides=sides),
    made(Drop, source=ranks, dest=ranks, nth=counts),
    made(Corrupt, source=ranks, dest=ranks, nth=counts, bit=st.none() | counts),
)
plans = st.builds(FaultPlan, summary=st.text(), faults=st.lists(faults, max_size=6))


def write(folder: Path, text: str) -> Path:
    path = folder / "faults.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Files


def test_a_file_is_read_and_written(tmp_path: Path) -> None:
    assert FaultPlan.load(write(tmp_path, FILE)) == PLAN
    assert PLAN.to_toml() == FILE
    assert FaultPlan.load(write(tmp_path, "")) == FaultPlan()
    assert FaultPlan().to_toml() == ""


def test_a_file_may_be_written_as_people_do(tmp_path: Path) -> None:
    text = 'kill = [{ rank = 2, operation = "all_reduce", nth = 3 }]\ncut = [{ links = [["*", 1]], until_s = inf }]\n'
    plan = FaultPlan.load(write(tmp_path, text))
    assert plan.faults == (Kill(rank=2, operation="all_reduce", nth=3), Cut(links=(("*", 1),)))


@given(plan=plans)
@example(plan=FaultPlan(summary='"quoted" back\\slash, two\nlines\r \x7f\x00 \N{COLLISION SYMBOL}'))
def test_each_plan_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, plan: FaultPlan) -> None:
    path = tmp_path_factory.getbasetemp() / "faults.toml"
    path.write_text(plan.to_toml(), encoding="utf-8")
    assert FaultPlan.load(path) == plan


NOT_NEGATIVE, POSITIVE, FINITE = (
    "it should be greater than or equal to 0",
    "it should be greater than 0",
    "it should be a finite number",
)
INTEGER, NUMBER, MISSING = "it should be a valid integer", "it should be a valid number", "is missing, and it has no default"
TABLES = "expected an array of tables, each below a line [[kill]]"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("kill = [{ rank = -1, at_s = 1 }]", "kill[0].rank", NOT_NEGATIVE),
        ("kill = [{ rank = 0, at_s = 1 }, { rank = true, at_s = 1 }]", "kill[1].rank", INTEGER),
        ('kill = [{ rank = "1", at_s = 1 }]', "kill[0].rank", INTEGER),
        ("kill = [{ rank = 1.0, at_s = 1 }]", "kill[0].rank", INTEGER),
        ("kill = [{ at_s = 1 }]", "kill[0].rank", MISSING),
        ("kill = [{ rank = 0, at_s = true }]", "kill[0].at_s", NUMBER),
        ("kill = [{ rank = 0, at_s = inf }]", "kill[0].at_s", FINITE),
        ("kill = [{ rank = 0, at_s = nan }]", "kill[0].at_s", FINITE),
        ("kill = [{ rank = 0, at_s = -0.5 }]", "kill[0].at_s", NOT_NEGATIVE),
        ("kill = [{ rank = 0 }]", "kill[0]", "at_s is None and operation None; expected exactly one of them"),
        ('kill = [{ rank = 0, at_s = 1, operation = "send" }]', "kill[0]", "at_s is 1.0 and operation 'send'; expected"),
        ("kill = [{ rank = 0, at_s = 1, nth = 2 }]", "kill[0]", "nth is 2; expected an operation whose calls it counts"),
        ('kill = [{ rank = 0, operation = "all-reduce" }]', "kill[0].operation", "did you mean 'all_reduce'?"),
        ('kill = [{ rank = 0, operation = "Send" }]', "kill[0].operation", "did you mean 'send'?"),
        ("kill = [{ rank = 0, operation = 1 }]", "kill[0].operation", "sleep, split, or '*' for any"),
        ('kill = [{ rank = 0, operation = "send", nth = -1 }]', "kill[0].nth", NOT_NEGATIVE),
        ("kill = [{ rank = 0, at_s = 1, ntn = 2 }]", "kill[0].ntn", "mean 'nth'? Valid here: rank, at_s, operation, nth"),
        ("pause = [{ rank = 0, at_s = 1, for_s = -1 }]", "pause[0].for_s", NOT_NEGATIVE),
        ("pause = [{ rank = 0, at_s = 1, for_s = nan }]", "pause[0].for_s", NOT_NEGATIVE),
        ("pause = [{ rank = 0, at_s = 1, for_s = true }]", "pause[0].for_s", NUMBER),
        ("pause = [{ rank = 0 }]", "pause[0]", "at_s is None and operation None"),
        ("slow = [{ rank = 0, factor = 0 }]", "slow[0].factor", POSITIVE),
        ("slow = [{ rank = 0, factor = inf }]", "slow[0].factor", FINITE),
        ("slow = [{ rank = 0, factor = true }]", "slow[0].factor", NUMBER),
        ("slow = [{ rank = 0 }]", "slow[0].factor", MISSING),
        (
            "slow = [{ rank = 0, factor = 2, from_s = 2, until_s = 2 }]",
            "slow[0]",
            "until_s 2.0; expected an end after the",
        ),
        ("cut = [{ links = [] }]", "cut[0].links", "expected an array of pairs of ranks, such as [[0, 1]]"),
        ("cut = [{ links = [0, [0, 1]] }]", "cut[0].links[0]", "expected a pair of ranks, such as [0, 1] or [2, '*']"),
        ('cut = [{ links = ["01"] }]', "cut[0].links[0]", "expected a pair of ranks"),
        ("cut = [{ links = [[0]] }]", "cut[0].links[0]", "expected a pair of ranks"),
        ("cut = [{ links = [[0, 1, 2]] }]", "cut[0].links[0]", "it should have at most 2 items"),
        ("cut = [{ links = [[0, 1], [1, true]] }]", "cut[0].links[1][1]", "expected a rank, 0 or more, or '*'"),
        ('cut = [{ links = [["-", 1]] }]', "cut[0].links[0][0]", "expected a rank, 0 or more, or '*'"),
        ("cut = [{ links = [[-1, 1]] }]", "cut[0].links[0][0]", "expected a rank, 0 or more, or '*'"),
        ("cut = [{ links = [[0, 1]], from_s = inf }]", "cut[0].from_s", FINITE),
        ("cut = [{ links = [[0, 1]], until_s = nan }]", "cut[0].until_s", NOT_NEGATIVE),
        ("cut = [{ links = [[0, 1]], link = [] }]", "cut[0].link", "mean 'links'? Valid here: from_s, until_s, links"),
        ("delay = [{ links = [[0, 1]], by_s = -1 }]", "delay[0].by_s", NOT_NEGATIVE),
        ("delay = [{ links = [[0, 1]], by_s = inf }]", "delay[0].by_s", FINITE),
        ("delay = [{ links = [[0, 1]] }]", "delay[0].by_s", MISSING),
        ("partition = [{ sides = [[0]] }]", "partition[0].sides", "expected an array of two or more sides, such as"),
        ("partition = [{ sides = [[0], []] }]", "partition[0].sides[1]", "expected an array of ranks, such as [0, 1]"),
        ('partition = [{ sides = [[0], ["*"]] }]', "partition[0].sides[1][0]", INTEGER),
        ("partition = [{ sides = [[0], [1, 0]] }]", "partition[0]", "rank 0 is in the sides 2 times; expected once"),
        ("partition = [{ sides = [[3, 3], [1]] }]", "partition[0]", "rank 3 is in the sides 2 times"),
        ('drop = [{ source = "*", dest = 0 }]', "drop[0].source", INTEGER),
        ("drop = [{ source = 0 }]", "drop[0].dest", MISSING),
        ("drop = [{ source = 0, dest = 1, nth = true }]", "drop[0].nth", INTEGER),
        ("drop = [{ source = 0, dest = 1, bit = 1 }]", "drop[0].bit", "this key is unknown. Valid here: source, dest, nth"),
        ("corrupt = [{ source = 0, dest = 1, bit = -1 }]", "corrupt[0].bit", NOT_NEGATIVE),
        ("corrupt = [{ source = -2, dest = 1 }]", "corrupt[0].source", NOT_NEGATIVE),
        ("kil = [{ rank = 0 }]", "kil", "mean 'kill'? Valid here: summary, kill, pause, slow, cut, delay, partition"),
        ("kill = { rank = 0 }", "kill", TABLES),
        ("kill = [2]", "kill[0]", TABLES),
        ("summary = 1", "summary", "it should be a valid string"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_file_key_and_value(tmp_path: Path, text: str, key: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        FaultPlan.load(path)
    value: Any = None
    if words != MISSING:
        value = tomllib.loads(text)
        for part in re.findall(r"\w+", key):
            value = value[int(part) if part.isdigit() else part]
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert repr(caught.value.value) == repr(value)  # no nan equals another
    start = f"{path}: {key} " if words == MISSING else f"{path}: {key} = {value!r}: "
    assert str(caught.value).startswith(start)
    assert words in str(caught.value)
    assert not re.search("\n|Value error", str(caught.value))


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan.load(write(tmp_path, "kil = 1\nkill = [{ rank = -1, at_s = 1 }]\ndrop = [{ source = 0 }]"))
    named = [line.split(": ")[1].split()[0] for line in str(caught.value).splitlines()]
    assert named == ["kill[0].rank", "drop[0].dest", "kil"]


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'summary = "\xe9"')
    for path in (write(tmp_path, "[[kill"), tmp_path / "latin.toml"):
        with pytest.raises(ConfigError, match=r"\.toml: the fault plan cannot be read as TOML: ") as caught:
            FaultPlan.load(path)
        assert caught.value.file == str(path)
    for path in (tmp_path / "other.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            FaultPlan.load(path)
        assert caught.value.file == str(path)
        assert str(caught.value).startswith(f"the fault plan {str(path)!r} cannot be read: ")


# Faults


def test_faults_are_frozen_and_take_nothing_else() -> None:
    assert [type(fault) for fault in PLAN.faults if isinstance(fault, When)] == [Kill, Kill, Pause]
    assert len({*PLAN.faults, *PLAN.faults, Kill(rank=0, at_s=0.5)}) == len(PLAN.faults)
    with pytest.raises(ValidationError, match="frozen"):
        PLAN.faults[0].rank = 1  # type: ignore[union-attr,misc]
    with pytest.raises(UsageError, match=r"^Kill: for_s is unknown. Valid here: rank, at_s, operation, nth$"):
        Kill(rank=0, at_s=1, for_s=1)  # type: ignore[call-arg]


def test_what_is_wrong_with_a_fault_is_said_in_words() -> None:
    with pytest.raises(UsageError, match=r"^Kill: at_s is None and operation None; expected exactly one of them$"):
        Kill(rank=1)
    with pytest.raises(UsageError, match=r"^Kill: rank is missing$"):
        Kill(at_s=1.0)  # type: ignore[call-arg]
    with pytest.raises(
        UsageError, match=r"^Kill: operation = 'allreduce': there is no such operation; did you mean 'all_reduce'?"
    ):
        Kill(rank=1, operation="allreduce")
    with pytest.raises(UsageError, match=r"^Slow: factor = 0: it should be greater than 0$"):
        Slow(rank=1, factor=0)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Kill(rank=2, operation="all_reduce", nth=3), "rank 2 is killed at all_reduce #3"),
        (Kill(rank=2, operation="*", nth=3), "rank 2 is killed at its call #3"),
        (Kill(rank=2, at_s=1234.567891), "rank 2 is killed at 1234.567891 s"),
        (Pause(rank=1, at_s=0.1 + 0.2), "rank 1 stands still at 0.3 s for ever"),
        (Pause(rank=1, operation="send", for_s=2), "rank 1 stands still at send #0 for 2 s"),
        (Slow(rank=0, factor=2.5), "rank 0 computes for 2.5 times as long all the time"),
        (Slow(rank=0, factor=4, from_s=1), "rank 0 computes for 4 times as long from 1 s on"),
        (Cut(links=[(0, 1)], until_s=1), "the link 0-1 is cut until 1 s"),
        (Cut(links=[(0, 1), (2, "*")], from_s=0.5, until_s=2), "the links 0-1, 2-* are cut from 0.5 s to 2 s"),
        (Delay(links=[(0, 1)], by_s=0.25), "messages on the link 0-1 take 0.25 s longer all the time"),
        (Delay(links=[(0, 1), (1, 2)], by_s=2, from_s=3), "messages on the links 0-1, 1-2 take 2 s longer from 3 s on"),
        (Partition(sides=[[0, 1], [2]], until_s=2), "the sides 0,1 | 2 are cut off from each other and all others until 2 s"),
        (Drop(source=0, dest=1, nth=3), "message #3 from rank 0 to rank 1 is lost"),
        (Corrupt(source=0, dest=1, bit=7), "bit 7 of message #0 from rank 0 to rank 1 is flipped"),
        (Corrupt(source=0, dest=1), "a bit of message #0 from rank 0 to rank 1 is flipped"),
    ],
)
def test_each_fault_is_described_in_a_line(fault: Fault, line: str) -> None:
    assert fault.describe() == line


# Plans


def test_a_plan_is_made_of_a_plan_a_fault_or_several() -> None:
    kill, cut = Kill(rank=0, at_s=1), Cut(links=[(0, 1)])
    assert FaultPlan.of(PLAN) is PLAN
    assert FaultPlan.of(kill) == FaultPlan(faults=(kill,))
    assert FaultPlan.of(iter([kill, cut])).faults == (kill, cut)
    assert FaultPlan.of([]) == FaultPlan()


def test_faults_stand_by_kind_and_within_a_kind_as_given() -> None:
    late, early = Kill(rank=1, at_s=2), Kill(rank=0, at_s=1)
    drop, slow = Drop(source=0, dest=1), Slow(rank=0, factor=2)
    assert FaultPlan.of([drop, late, slow, early]).faults == (late, early, slow, drop)
    assert FaultPlan(faults=(drop, late, slow, early)) == FaultPlan.of([late, early, slow, drop])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (3, "3"),
        (None, "None"),
        ("faults.toml", "'faults.toml'"),
        (Path("faults.toml"), repr(Path("faults.toml"))),
        ({"rank": 1, "at_s": 1}, "'rank'"),
        ([Kill(rank=0, at_s=1), 4], "4"),
        ([PLAN], repr(PLAN)),
        (When(at_s=1), "When(at_s=1.0, operation=None, nth=0)"),
    ],
)
def test_what_is_no_fault_is_refused(given: object, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        FaultPlan.of(given)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{named} is not a fault: expected faults such as Kill(")
    with pytest.raises(UsageError, match="is not a fault"):
        FaultPlan(faults=given)  # type: ignore[arg-type]


def test_a_plan_fits_a_world_that_has_all_its_ranks() -> None:
    PLAN.check(4)
    with pytest.raises(ConfigError) as caught:
        PLAN.check(3)
    assert (caught.value.key, caught.value.value) == ("slow[0]", 3)


@pytest.mark.parametrize(
    ("fault", "value", "words"),
    [
        (Kill(rank=4, at_s=1), 4, "rank 4 is killed at 1 s: a world of 4 has no rank 4; expected one from 0 to 3"),
        (Pause(rank=4, at_s=1), 4, "has no rank 4"),
        (Slow(rank=9, factor=2), 9, "has no rank 9"),
        (Cut(links=[(0, 1), ("*", 5)]), 5, "has no rank 5"),
        (Delay(links=[(6, 1)], by_s=1), 6, "has no rank 6"),
        (Partition(sides=[[0], [1, 4]]), 4, "has no rank 4"),
        (Drop(source=4, dest=0), 4, "message #0 from rank 4 to rank 0 is lost: a world of 4 has no rank 4"),
        (Corrupt(source=0, dest=4), 4, "has no rank 4"),
        (Cut(links=[(0, 1), (2, 2)]), (2, 2), "the links 0-1, 2-2 are cut all the time: rank 2 has no link to itself"),
        (Delay(links=[(0, 0)], by_s=1), (0, 0), "rank 0 has no link to itself; expected two ranks"),
        (Drop(source=3, dest=3), (3, 3), "rank 3 has no link to itself"),
        (Corrupt(source=1, dest=1), (1, 1), "rank 1 has no link to itself"),
    ],
)
def test_a_fault_that_fits_no_world_of_four_is_named(fault: Fault, value: object, words: str) -> None:
    kind = type(fault).__name__.lower()
    fine = {"kill": Kill(rank=3, at_s=1), "cut": Cut(links=[("*", "*")]), "drop": Drop(source=0, dest=3)}
    plan = FaultPlan.of([*fine.values(), fault])
    key = f"{kind}[{int(kind in fine)}]"
    for check in (plan.check, plan.links):
        with pytest.raises(ConfigError) as caught:
            check(4)
        assert (caught.value.key, caught.value.value) == (key, value)
        assert str(caught.value).startswith(f"{key}: {fault.describe()}: ")
        assert words in str(caught.value)


# Links


def test_a_plan_without_faults_of_links_has_none() -> None:
    quiet = FaultPlan.of([Kill(rank=0, at_s=1), Drop(source=0, dest=1)]).links(4)
    assert (quiet.any, quiet.changes) == (False, ())
    assert (quiet.cut_until(0, 1, 0.0), quiet.delay_s(0, 1, 0.0)) == (0.0, 0.0)
    delayed = FaultPlan.of(Delay(links=[(0, 1)], by_s=1, from_s=2)).links(2)
    assert (delayed.any, delayed.changes) == (True, ())


def test_a_cut_holds_in_both_directions_from_its_beginning_up_to_its_end() -> None:
    links = FaultPlan.of(Cut(links=[(0, 1)], from_s=1, until_s=2)).links(3)
    assert [links.cut_until(0, 1, now) for now in (0.0, 0.999, 1.0, 1.999, 2.0, 5.0)] == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    assert links.cut_until(1, 0, 1.5) == 2.0
    assert {links.cut_until(a, b, 1.5) for a, b in ((0, 2), (2, 0), (1, 2), (2, 1), (0, 0), (1, 1))} == {0.0}
    assert (links.any, links.changes) == (True, (1.0, 2.0))


def test_cuts_that_overlap_or_touch_are_over_together() -> None:
    links = FaultPlan.of(
        [
            Cut(links=[(0, 1)], from_s=6, until_s=7),
            Cut(links=[(1, 0)], from_s=1, until_s=3),
            Partition(sides=[[0], [1]], from_s=2, until_s=4),
            Cut(links=[("*", 1)], from_s=4, until_s=5),
            Cut(links=[(0, 2)], from_s=0, until_s=9),
            Cut(links=[(0, 1)], from_s=1.5, until_s=2.5),
            Cut(links=[(0, 1)], from_s=8),
        ]
    ).links(4)
    assert [links.cut_until(0, 1, now) for now in (0.5, 1, 2, 3.5, 4, 4.9, 5, 5.5, 6, 7, 8)] == [
        0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0, 7.0, 0.0, math.inf,
    ]  # fmt: skip
    assert links.changes == (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


def test_a_star_is_all_other_ranks() -> None:
    one = FaultPlan.of(Cut(links=[(2, "*")])).links(4)
    every = FaultPlan.of(Cut(links=[("*", "*")])).links(4)
    pairs = [(a, b) for a in range(4) for b in range(4)]
    assert [pair for pair in pairs if one.cut_until(*pair, 0.0)] == [(a, b) for a, b in pairs if a != b and 2 in {a, b}]
    assert [pair for pair in pairs if every.cut_until(*pair, 0.0)] == [(a, b) for a, b in pairs if a != b]


def test_ranks_that_no_side_names_are_one_more_side() -> None:
    links = FaultPlan.of(Partition(sides=[[0, 3], [1]], until_s=2)).links(6)
    together = [{0, 3}, {1}, {2, 4, 5}]
    for a in range(6):
        for b in range(6):
            whole = any({a, b} <= side for side in together)
            assert links.cut_until(a, b, 1.0) == (0.0 if whole else 2.0), (a, b)
            assert links.cut_until(a, b, 2.0) == 0.0


def test_delays_add_up_while_they_hold() -> None:
    links = FaultPlan.of(
        [
            Delay(links=[(0, 1)], by_s=0.5),
            Delay(links=[(1, "*"), (0, 1)], by_s=0.25, from_s=1, until_s=2),
            Cut(links=[(0, 2)]),
        ]
    ).links(3)
    assert [links.delay_s(0, 1, now) for now in (0.0, 1.0, 1.5, 2.0)] == [0.5, 0.75, 0.75, 0.5]
    assert [links.delay_s(2, 1, now) for now in (0.0, 1.0, 2.0)] == [0.0, 0.25, 0.0]
    assert links.delay_s(0, 2, 1.5) == 0.0
    assert links.cut_until(0, 1, 1.5) == 0.0
    assert links.delay_s(1, 1, 1.5) == 0.0


def joins(fault: Cut | Delay | Partition, a: int, b: int) -> bool:
    """Whether a fault is about the link of two different ranks, word by word."""
    if isinstance(fault, Partition):
        return [a in side for side in fault.sides] != [b in side for side in fault.sides]
    return any((x in {a, "*"} and y in {b, "*"}) or (x in {b, "*"} and y in {a, "*"}) for x, y in fault.links)


few = st.integers(0, 3)
spans = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda span: {"from_s": span[0], "until_s": sum(span)})
few_ends = st.one_of(few, st.just("*"))
few_links = st.lists(
    st.tuples(few_ends, few_ends).filter(lambda link: link[0] != link[1] or link[0] == "*"), min_size=1, max_size=2
)
few_sides = st.sampled_from([((0,), (1,)), ((0, 1), (2, 3)), ((0,), (1,), (2,)), ((3,), (1, 0))])


@given(
    st.lists(
        made(Cut, spans, links=few_links)
        | made(Partition, spans, sides=few_sides)
        | made(Delay, spans, links=few_links, by_s=st.integers(0, 9)),
        max_size=7,
    ),
    few,
    few,
    st.integers(0, 20).map(lambda half: half / 2),
)
def test_links_answer_what_a_walk_through_all_faults_finds(
    found: list[Cut | Delay | Partition], a: int, b: int, now: float
) -> None:
    links = FaultPlan.of(found).links(4)
    mine = [fault for fault in found if a != b and joins(fault, a, b)]

    def active(at: float) -> Iterator[Cut | Delay | Partition]:
        return (fault for fault in mine if fault.from_s <= at < fault.until_s)

    whole = now
    while later := [fault.until_s for fault in active(whole) if not isinstance(fault, Delay)]:
        whole = max(later)
    assert links.cut_until(a, b, now) == links.cut_until(b, a, now) == (0.0 if whole == now else whole)
    delay = sum(fault.by_s for fault in active(now) if isinstance(fault, Delay))
    assert links.delay_s(a, b, now) == links.delay_s(b, a, now) == delay
