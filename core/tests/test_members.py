"""Who belongs to a group: its channels, its size, and how many neighbours share a host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.job.group_ranks import Members, ranks_per_host


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        ([], 1),
        ([0], 1),
        ([0, 0], 2),
        ([0, 1, 2], 1),
        ([0, 0, 2, 2], 2),
        ([5, 5, 5, 1, 1, 1], 3),
        ([0, 0, 0, 3], 1),  # the hosts differ
        ([0, 1, 1, 1], 1),
        ([0, 0, 2, 2, 4], 1),
        ([0, 1, 0, 1], 1),  # the ranks of a host are no neighbours
        ([0, 0, 2, 2, 0, 0], 1),
        ([0, 0, 2, 3], 1),
    ],
)
def test_neighbours_share_a_host_where_all_hosts_have_as_many(hosts: list[int], count: int) -> None:
    assert ranks_per_host(hosts) == count


@given(st.integers(1, 6), st.lists(st.integers(), min_size=1, max_size=5, unique=True))
def test_a_regular_job_is_known_whatever_its_hosts_are_called(count: int, names: list[int]) -> None:
    assert ranks_per_host([name for name in names for _ in range(count)]) == count


@given(st.lists(st.integers(0, 3), max_size=12))
def test_the_count_divides_the_ranks_into_whole_hosts_or_is_one(hosts: list[int]) -> None:
    count = ranks_per_host(hosts)
    assert count >= 1
    if count > 1:
        firsts = hosts[::count]
        assert hosts == [host for host in firsts for _ in range(count)]
        assert len(set(firsts)) == len(firsts)


def test_a_group_in_words_says_its_ranks_and_how_it_was_made() -> None:
    assert Members(0, (0, 1), 0, 1).name == "the group of all ranks"
    assert Members(7, (2, 0), 1, 1, "made by split()").name == "group 7 (ranks 0, 2, made by split())"
    assert Members(7, (1,), 0, 1).name == "group 7 (rank 1)"


def test_a_group_has_two_channels_of_its_own() -> None:
    groups = [Members(number, (4, 2), 1, 1) for number in range(4)]
    assert [group.size for group in groups] == [2] * 4
    channels = [channel for group in groups for channel in (group.channel, group.channel + 1)]
    assert channels == list(range(8))
