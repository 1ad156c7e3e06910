"""Pieces of arrays: a range of elements as boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord.errors import DTypeError, SizeMismatchError


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_range_of_elements_is_few_boxes_that_hold_each_of_them_once(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    found = mp.ShardedArray.of_range(shape, start, np.arange(start, stop))
    assert len(found.pieces) <= max(2 * len(shape) - 1, 1)
    assert [x for box, piece in found.pieces for x in whole[box.slices].ravel()] == list(range(start, stop))
    assert all((whole[box.slices] == piece).all() for box, piece in found.pieces)


def test_the_pieces_are_views():
    flat = np.zeros(7)
    for _, piece in mp.ShardedArray.of_range((3, 4), 3, flat).pieces:
        piece[...] = 1
    assert flat.tolist() == [1.0] * 7


@pytest.mark.parametrize(
    ("pieces", "error", "said"),
    [
        ([((2, 0), np.zeros((2, 3)))], SizeMismatchError, r"shape \(2, 3\) at \(2, 0\) does not lie within the shape \(3, 3\)"),
        ([((-1, 0), np.zeros((2, 3)))], SizeMismatchError, "does not lie within"),
        ([((0,), np.zeros(3))], SizeMismatchError, "does not lie within"),
        ([], DTypeError, "give dtype="),
        ([((0, 0), np.zeros((1, 3))), ((1, 0), np.zeros((1, 3), "f4"))], DTypeError, r"have \['float32', 'float64'\]"),
    ],
)
def test_impossible_pieces_are_refused(pieces, error, said):
    with pytest.raises(error, match=said):
        mp.ShardedArray((3, 3), pieces)
