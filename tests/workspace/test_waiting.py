"""The helper that waits for what must happen."""

from __future__ import annotations

import pytest
from support.waiting import until


def test_until_polls_and_returns_what_it_saw():
    answers = iter([0, None, [], [7]])
    assert until(lambda: next(answers)) == [7]


def test_until_in_vain_says_what_it_waited_for():
    with pytest.raises(AssertionError, match=r"waited 0 s in vain for the second rank; the last answer was \[\]"):
        until(list, "the second rank", patience_s=0)


def test_until_looks_once_more_when_time_is_up():
    assert until(lambda: "there", patience_s=-1) == "there"
