"""A set of numbers that takes a bit for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oneaccord.common.numbers import Numbers

NUMBERS = st.integers(-10, 20_000) | st.integers(-(1 << 70), 1 << 70)


@given(st.sets(NUMBERS), st.sets(NUMBERS))
def test_it_holds_what_was_added_and_no_more(added: set[int], asked: set[int]) -> None:
    numbers = Numbers()
    for number in added:
        numbers.add(number)
    assert {number for number in added | asked if number in numbers} == added
