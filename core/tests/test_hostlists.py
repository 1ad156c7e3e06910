"""The lists of hosts and tasks that schedulers write into variables."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.errors import ConfigError
from oneaccord.launchers.hosts import expand_hostlist, hosts_of_lsf, tasks_of_node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("node1,gpu3", ["node1", "gpu3"]),
        ("node[001-004,007],gpu3", ["node001", "node002", "node003", "node004", "node007", "gpu3"]),
        ("rack[1-2]n[08-10]-ib", [f"rack{r}n{n}-ib" for r in (1, 2) for n in ("08", "09", "10")]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_hostlists(text: str, expected: list[str]) -> None:
    assert list(expand_hostlist(text)) == expected


def test_a_long_hostlist_is_not_written_out() -> None:
    assert list(islice(expand_hostlist("n[1-9999999999]x[1-9999999999]"), 2)) == ["n1x1", "n1x2"]


@pytest.mark.parametrize("text", ["", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[2-1]", "a[x]", "a[1-2", "a[[1]]"])
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        list(expand_hostlist(text))


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20))
def test_a_hostlist_of_numbers_names_each_of_them(numbers: list[int]) -> None:
    text = f"node[{','.join(f'{number:04}' for number in numbers)}]"
    assert list(expand_hostlist(text)) == [f"node{number:04}" for number in numbers]


def test_tasks_per_node() -> None:
    assert [tasks_of_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_of_node("", 0) is None


def test_hosts_of_lsf() -> None:
    assert hosts_of_lsf("batch1 1 h1 42 h2 42") == ["h1", "h2"]
    assert hosts_of_lsf("h1 1 h2 1") == ["h1", "h2"]
    assert hosts_of_lsf("h1 4") == ["h1"]
    assert hosts_of_lsf("") == []
