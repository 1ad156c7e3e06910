"""Checkpoints are loaded by other numbers of ranks, with other placements."""

from __future__ import annotations

import math
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord_parallel.boxes import Box
from oneaccord_parallel.checkpoint.tiling import find_fault, tile
from oneaccord_simulated import run


@pytest.fixture(autouse=True, scope="module")
def _disk_is_not_waited_for():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([np.dtype(code) for code in "BefD"])
PLACEMENTS = st.sampled_from(["replicated", "flat", "flat uneven", "rows", "columns", "blocks", "copies", "one rank"])


def bounds(size, parts, part):
    step = -(-size // parts)
    return min(part * step, size), min((part + 1) * step, size)


def place(whole, placement, ranks, rank, copy):
    """Return what a rank holds of an array: a leaf."""
    take = np.copy if copy else np.zeros_like
    if placement == "replicated":
        return take(whole)
    if placement.startswith("flat") or whole.ndim == 0:
        first, last = bounds(whole.size, ranks, rank)
        if placement == "flat uneven":  # rank r has a share of r
            total = max(ranks * (ranks - 1) // 2, 1)
            first, last = (whole.size * (k * (k - 1) // 2) // total for k in (rank, rank + 1))
            last = whole.size if rank == ranks - 1 else last
        return mp.ShardedArray.of_range(whole.shape, first, take(whole.reshape(-1)[first:last]))
    boxes = []
    if placement in ("rows", "columns"):
        axis = 0 if placement == "rows" else whole.ndim - 1
        first, last = bounds(whole.shape[axis], ranks, rank)
        offset, shape = [0] * whole.ndim, list(whole.shape)
        offset[axis], shape[axis] = first, last - first
        boxes = [Box(tuple(offset), tuple(shape))]
    elif placement == "blocks":
        # Every second element along the first axis, and halves of the last one: dealt out.
        middle = whole.shape[-1] // 2
        for row in range(whole.shape[0]):
            for number, (first, last) in enumerate([(0, middle), (middle, whole.shape[-1])]):
                offset, shape = [0] * whole.ndim, list(whole.shape)
                offset[0], shape[0] = row, 1
                if whole.ndim > 1:
                    offset[-1], shape[-1] = first, last - first
                elif number:
                    continue
                if (row + number) % ranks == rank:
                    boxes.append(Box(tuple(offset), tuple(shape)))
    elif placement == "copies" or rank == ranks - 1:
        boxes = [Box((0,) * whole.ndim, whole.shape)]
    pieces = [(box.offset, take(whole[box.slices])) for box in boxes]
    return mp.ShardedArray(whole.shape, pieces, str(whole.dtype))


def leaves_of(arrays, placements, ranks, rank, copy):
    return [place(array, placement, ranks, rank, copy) for array, placement in zip(arrays, placements, strict=True)]


def same(one, other):
    if isinstance(one, mp.ShardedArray):
        pairs = zip(one.pieces, other.pieces, strict=True)
        return all(a == b and x.tobytes() == y.tobytes() for (a, x), (b, y) in pairs)
    return one.tobytes() == other.tobytes()


def nbytes(leaf):
    return sum(array.nbytes for _, array in leaf.pieces) if isinstance(leaf, mp.ShardedArray) else leaf.nbytes


@pytest.mark.timeout(180)
@settings(max_examples=settings().max_examples // 2)
@given(st.data(), st.lists(st.tuples(SHAPES, DTYPES), max_size=3), st.integers(0, 9), st.booleans())
def test_n_ranks_to_m_and_back_keeps_every_bit_and_reads_no_more_than_is_needed(data, arrays, seed, verify):
    random = np.random.default_rng(seed)
    wholes = [
        random.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
        for shape, dtype in arrays
    ]
    counts = [data.draw(st.integers(1, 4)) for _ in range(2)]
    placements = [[data.draw(PLACEMENTS) for _ in wholes] for _ in counts]

    with tempfile.TemporaryDirectory() as path:

        def step(source, dest, ranks):
            def program(group):
                mine = leaves_of(wholes, placements[dest], ranks, group.rank, copy=False)
                report = mp.LoadReport()
                found = mp.load(f"{path}/{source}", like=mine, group=group, verify=verify, report=report)
                expected = leaves_of(wholes, placements[dest], ranks, group.rank, copy=True)
                assert all(map(same, found, expected))
                assert verify or report.bytes_read <= sum(map(nbytes, mine))
                mp.save(found, f"{path}/{dest}", group)

            run(program, ranks)

        run(lambda group: mp.save(leaves_of(wholes, placements[0], counts[0], group.rank, True), f"{path}/0", group), counts[0])
        step(0, 1, counts[1])
        step(1, 0, counts[0])
        for found, whole in zip(mp.load(f"{path}/0").values(), wholes, strict=True) if wholes else ():
            assert same(found, whole)


@pytest.mark.parametrize("by", ["rows", "columns", "flat"])
@pytest.mark.parametrize("to", ["rows", "columns", "flat", "replicated"])
def test_long_and_short_runs_are_read_alike(tmp_path, by, to):
    # Beyond the sizes from which on blocks, slices and mapped memory come in.
    whole = np.random.default_rng(0).integers(0, 256, (70, 5000), np.uint8).view("u4")[:, :1250].repeat(10, axis=1)
    run(lambda group: mp.save([place(whole, by, 3, group.rank, True)], tmp_path, group), 3)

    def program(group):
        report = mp.LoadReport()
        mine = place(whole, to, 2, group.rank, False)
        found = mp.load(tmp_path, like=[mine], group=group, report=report)
        assert same(found[0], place(whole, to, 2, group.rank, True))
        assert report.bytes_read == nbytes(mine)

    run(program, 2)


@st.composite
def tilings(draw):
    """Return a shape, and boxes that fill it, made by cutting it again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        for start, extent in ((0, cut), (cut, box.shape[axis] - cut)):
            offset, parts = list(box.offset), list(box.shape)
            offset[axis], parts[axis] = offset[axis] + start, extent
            boxes.append(Box(tuple(offset), tuple(parts)))
    return shape, boxes


@settings(max_examples=2 * settings().max_examples)
@given(tilings(), st.data())
def test_whether_boxes_fill_an_array_once_is_told_exactly(tiling, data):
    shape, boxes = tiling
    assert tile(boxes, shape)
    assert find_fault(boxes, shape) is None
    wrong = [box for box in boxes if data.draw(st.booleans())]
    wrong += [data.draw(st.sampled_from(boxes)) for _ in range(data.draw(st.integers(0, 2)))]
    counts = np.zeros(shape, int)
    for box in wrong:
        counts[box.slices] += 1
    assert tile(wrong, shape) == bool((counts == 1).all())
    fault = find_fault(wrong, shape)
    assert (fault is None) == tile(wrong, shape)
    if isinstance(fault, Box):
        assert not counts[fault.slices].any()
    elif fault is not None:
        assert fault[0].intersection(fault[1])
