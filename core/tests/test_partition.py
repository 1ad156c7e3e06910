"""How vectors are divided into chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.schedule.chunking import blocks, even


@pytest.mark.parametrize(
    ("count", "parts", "offsets"),
    [
        (0, 1, (0, 0)),
        (0, 3, (0, 0, 0, 0)),
        (1, 3, (0, 1, 1, 1)),
        (3, 3, (0, 1, 2, 3)),
        (4, 3, (0, 2, 3, 4)),
        (10, 4, (0, 3, 6, 8, 10)),
        (7, 1, (0, 7)),
        (0, 0, (0,)),
    ],
)
def test_even(count, parts, offsets):
    assert even(count, parts) == offsets


@given(count=st.integers(0, 10**15), parts=st.integers(1, 200))
def test_even_covers_everything_in_order_with_sizes_that_differ_by_one_at_most(count, parts):
    offsets = even(count, parts)
    sizes = [stop - start for start, stop in pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(sizes)) == (0, count, parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_blocks():
    assert blocks([], 3) == (0,)
    assert blocks([2, 0, 3], 1) == (0, 2, 2, 5)
    assert blocks([3, 0, 4], 2) == (0, 2, 3, 3, 3, 5, 7)


@given(counts=st.lists(st.integers(0, 1000), max_size=20), segments=st.integers(1, 64))
def test_blocks_keep_each_block_together(counts, segments):
    offsets = blocks(counts, segments)
    assert len(offsets) == len(counts) * segments + 1
    start = 0
    for index, count in enumerate(counts):
        mine = offsets[index * segments : (index + 1) * segments + 1]
        assert tuple(offset - start for offset in mine) == even(count, segments)
        start += count
