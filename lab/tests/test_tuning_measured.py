"""A table that was measured takes what was fastest where it was measured, and changes nothing elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oneaccord.config.select import Selector, default_rules
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective
from oneaccord_lab.tuning.measured import measured_rules
from oneaccord_lab.tuning.plan import Plan, Point

ALL_REDUCE = Collective.ALL_REDUCE
KIB = 1024


def point(nbytes: int, **times: float) -> Point:
    return Point("all_reduce", nbytes, {name: value * 1e-6 for name, value in times.items()}, 3)


POINTS = [
    point(8, ring=45, recursive_doubling=31),
    point(4 * KIB, ring=46, recursive_doubling=35),
    point(64 * KIB, ring=100, recursive_doubling=102),
    point(1024 * KIB, ring=500, recursive_doubling=900),
]


def selector(points: list[Point], hosts: int = 1) -> Selector:
    return Selector((*measured_rules(points, 4, hosts, BUILTIN), *default_rules()))


def test_the_rows_say_what_was_measured() -> None:
    reproducible, first, second = measured_rules(POINTS, 4, 1, BUILTIN)
    assert (first.algorithm, first.min_bytes, first.max_bytes) == ("recursive_doubling", None, 256 * KIB)
    assert first.reason == "measured here at 4 KiB: 35 us against 46 us of ring"
    assert (second.algorithm, second.min_bytes, second.max_bytes) == ("ring", None, 1024 * KIB)
    assert second.reason == "measured here at 1 MiB: 500 us against 900 us of recursive_doubling"
    assert (reproducible.algorithm, reproducible.max_bytes) == ("recursive_doubling", 1024 * KIB)
    assert reproducible.reason == "measured here at 4 KiB, reproducible: 35 us; there is no other"
    assert [rule.reproducible for rule in (reproducible, first, second)] == [True, False, False]
    for rule in (first, second, reproducible):
        assert (rule.min_world, rule.max_world, rule.min_hosts, rule.max_hosts) == (4, 4, None, 1)


def test_the_table_decides_in_the_measured_world_and_sizes_alone() -> None:
    measured, default = selector(POINTS), Selector()

    def names(nbytes: int, world: int = 4, per_host: int = 4, **how: bool) -> tuple[str, str]:
        both = [each.choose(ALL_REDUCE, nbytes, world, ranks_per_host=per_host, **how) for each in (measured, default)]
        return both[0].reason, both[1].reason

    assert names(0)[0].startswith("measured here at 4 KiB")
    assert names(1024 * KIB)[0].startswith("measured here at 1 MiB")
    assert names(1024 * KIB, reproducible=True)[0].startswith("measured here at 4 KiB, reproducible")
    for elsewhere in (names(1024 * KIB + 1), names(8, 3, 3), names(8, 8, 8), names(8, 4, 1), names(8, 4, 2)):
        assert elsewhere[0] == elsewhere[1]


def test_what_begins_with_large_calls_says_nothing_of_small_ones() -> None:
    measured = selector(POINTS[2:])
    assert measured.choose(ALL_REDUCE, 64 * KIB, 4, ranks_per_host=4).reason.startswith("measured")
    assert measured.choose(ALL_REDUCE, 64 * KIB - 1, 4, ranks_per_host=4).reason.startswith("in the model, ")


def test_what_was_measured_on_several_hosts_is_for_as_many() -> None:
    [rule] = measured_rules([point(8, ring=1)], 4, 2, BUILTIN)
    assert (rule.min_hosts, rule.max_hosts) == (2, 2)
    measured = selector([point(8, ring=1)], hosts=2)
    assert measured.choose(ALL_REDUCE, 8, 4, ranks_per_host=2).algorithm.name == "ring"
    assert measured.choose(ALL_REDUCE, 8, 4, ranks_per_host=4).reason.startswith("in the model, ")


def test_a_barrier_has_no_size() -> None:
    [rule] = measured_rules([Point("barrier", 0, {"dissemination": 5e-5}, 3)], 4, 1, BUILTIN)
    assert (rule.min_bytes, rule.max_bytes) == (None, None)
    assert rule.reason == "measured here: 50 us; there is no other"


def test_points_that_the_budget_did_not_reach_are_passed_over() -> None:
    assert measured_rules([Point("all_reduce", 8)], 4, 1, BUILTIN) == []
    assert measured_rules([*POINTS, Point("all_reduce", 2048 * KIB)], 4, 1, BUILTIN) == measured_rules(POINTS, 4, 1, BUILTIN)


seconds = st.sampled_from([1.0, 1.03, 1.2, 2.0])
names = [each.name for each in BUILTIN if each.collective is ALL_REDUCE and not each.by_host]


@given(st.dictionaries(st.integers(3, 30), st.fixed_dictionaries(dict.fromkeys(names, seconds)), min_size=1))
def test_no_choice_takes_much_longer_than_the_best(measured: dict[int, dict[str, float]]) -> None:
    points = [Point("all_reduce", 1 << power, times, 3) for power, times in measured.items()]
    chooser = selector(points)
    canonical = {each.name for each in chooser.algorithms(ALL_REDUCE) if each.canonical}
    for each in points:
        call = (ALL_REDUCE, each.nbytes, 4)
        plain = chooser.choose(*call, ranks_per_host=4).algorithm.name
        assert each.times[plain] <= 1.05 * min(each.times.values())
        same = chooser.choose(*call, ranks_per_host=4, reproducible=True).algorithm.name
        assert each.times[same] <= 1.05 * min(each.times[name] for name in canonical & set(each.times))


def test_a_plan_travels_as_text() -> None:
    plan = Plan({"all_reduce": ["ring"]}, [8, 1024], 2.5, "tcp", "points.json")
    assert Plan.load(plan.dump()) == plan
