"""Neighbouring sizes share a row exactly where little is lost by it, and there are as few rows as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oneaccord.common.units import time_text
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective
from oneaccord_lab.tuning.ranges import Kind, Range, kinds, losses, ranges

times = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1.0, 1.05, 1.2, 2.0]), min_size=1), min_size=1, max_size=7
)
tolerances = st.sampled_from([0.0, 0.06, 0.3])


def fewest(cases: list[dict[str, float]], tolerance: float) -> int:
    """Return the least number of ranges, by trying all."""
    best = [0]
    for stop in range(1, len(cases) + 1):
        best.append(
            min(
                best[start] + 1
                for start in range(stop)
                if any(all(case.get(name, 9) <= tolerance for case in cases[start:stop]) for name in "abcd")
            )
        )
    return best[-1]


def test_a_loss_is_what_it_takes_longer_than_the_best() -> None:
    assert losses({"ring": 3.0, "tree": 2.0}) == {"ring": 0.5, "tree": 0.0}
    assert losses({"ring": 0.0, "tree": 0.0}) == {"ring": 0.0, "tree": 0.0}


@given(times, tolerances)
def test_ranges_cover_all_sizes_with_little_loss_and_are_as_few_as_can_be(
    some: list[dict[str, float]], tolerance: float
) -> None:
    cases = [losses(each) for each in some]
    found = ranges(cases, tolerance)
    assert found is not None
    assert [index for each in found for index in range(each.first, each.last + 1)] == list(range(len(cases)))
    for each in found:
        assert all(cases[index][each.name] <= tolerance for index in range(each.first, each.last + 1))
    assert len(found) == fewest(cases, tolerance)


def test_of_several_that_are_good_enough_the_best_is_taken() -> None:
    cases = [{"a": 0.04, "b": 0.0}, {"a": 0.03, "b": 0.0}, {"a": 0.0, "b": 0.02}, {"a": 0.0, "b": 2.0}]
    assert ranges(cases[:3], 0.05) == [Range("b", 0, 2)]
    assert ranges(cases, 0.05) == [Range("a", 0, 3)]
    assert ranges(cases, 0.01) == [Range("b", 0, 1), Range("a", 2, 3)]


def test_there_are_no_ranges_where_all_lose_too_much() -> None:
    assert ranges([{"a": 0.0}, {"a": 0.2, "b": 0.3}], 0.1) is None


def test_calls_that_some_algorithms_cannot_serve_get_rows_of_their_own() -> None:
    def of(collective: Collective) -> list[Kind]:
        return kinds(collective, {each.name: each for each in BUILTIN if each.collective is collective})

    reproducible, everyone = of(Collective.ALL_REDUCE)
    assert (reproducible.reproducible, reproducible.uneven, reproducible.words) == (True, False, ", reproducible")
    assert everyone.names > reproducible.names >= {"recursive_doubling"}
    uneven, both = of(Collective.ALL_TO_ALL)
    assert uneven == Kind(frozenset({"pairwise"}), ", uneven blocks", uneven=True)
    assert both == Kind(frozenset({"pairwise", "bruck"}))
    assert [kind.words for kind in of(Collective.BROADCAST)] == [""]


def test_times_have_three_digits_and_a_unit() -> None:
    assert [time_text(seconds) for seconds in (2.0, 0.0314159, 31.4e-6, 5e-9, 0.0)] == [
        "2 s",
        "31.4 ms",
        "31.4 us",
        "5 ns",
        "0 ns",
    ]
