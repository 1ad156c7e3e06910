"""The messages, chunks and steps that the proof counts are those of the formulas in the docstrings."""

from __future__ import annotations

from math import ceil, floor, log2

import pytest

from manyhands.algorithms import doubling, pairwise, ring, tree
from manyhands.schedule.verify import Report, verify

WORLDS = range(2, 18)
SEGMENTS = (1, 3)

worlds = pytest.mark.parametrize("size", WORLDS)
segmented = pytest.mark.parametrize("k", SEGMENTS)


def cost(build, size: int, root: int = 0, k: int = 1) -> Report:  # type: ignore[no-untyped-def]
    return verify([build(rank, size, root, k) for rank in range(size)])


@worlds
@segmented
def test_ring_all_reduce(size: int, k: int) -> None:
    report = cost(ring.all_reduce, size, k=k)
    assert set(report.messages) == set(report.chunks) == {2 * (size - 1) * k}
    assert report.steps == 2 * (size - 1) * k


@worlds
@segmented
def test_ring_reduce_scatter_and_all_gather(size: int, k: int) -> None:
    for build in (ring.reduce_scatter, ring.all_gather):
        report = cost(build, size, k=k)
        assert set(report.messages) == set(report.chunks) == {(size - 1) * k}
        assert report.steps == (size - 1) * k


@worlds
@segmented
def test_recursive_doubling_all_reduce(size: int, k: int) -> None:
    report = cost(doubling.all_reduce, size, k=k)
    rounds = floor(log2(size))
    extra = size - 2**rounds
    for rank, sent in enumerate(report.messages):
        if rank < 2 * extra:
            assert sent == (k if rank % 2 else (rounds + 1) * k)
        else:
            assert sent == rounds * k
    assert report.chunks == report.messages
    assert report.steps == rounds + k - 1 + (2 if extra else 0)


@worlds
def test_bruck_all_gather(size: int) -> None:
    report = cost(doubling.all_gather, size)
    rounds = ceil(log2(size))
    for rank, sent in enumerate(report.messages):
        sizes = [min(2**turn, size - 2**turn) for turn in range(rounds)]
        assert sent == rounds + sum(rank + count > size for count in sizes)
    assert set(report.chunks) == {size - 1}
    assert rounds <= report.steps <= 2 * rounds


@worlds
def test_dissemination_barrier(size: int) -> None:
    report = cost(doubling.barrier, size)
    assert set(report.messages) == {ceil(log2(size))}
    assert set(report.chunks) == {0}
    assert report.steps == ceil(log2(size))


@worlds
@segmented
def test_binomial_broadcast(size: int, k: int) -> None:
    for root in range(size):
        report = cost(tree.broadcast, size, root, k)
        assert report.messages[root] == ceil(log2(size)) * k
        assert sum(report.messages) == (size - 1) * k
        assert report.chunks == report.messages
        assert report.steps == floor(log2(size)) + k - 1


@worlds
@segmented
def test_chain_broadcast(size: int, k: int) -> None:
    for root in range(size):
        report = cost(tree.chain, size, root, k)
        last = (root - 1) % size
        assert report.chunks == report.messages == tuple(0 if rank == last else k for rank in range(size))
        assert report.steps == size + k - 2


@worlds
@segmented
def test_binomial_reduce(size: int, k: int) -> None:
    for root in range(size):
        report = cost(tree.reduce, size, root, k)
        assert report.chunks == report.messages == tuple(0 if rank == root else k for rank in range(size))
        assert report.steps == ceil(log2(size)) + k - 1


@worlds
def test_binomial_gather(size: int) -> None:
    for root in range(size):
        report = cost(tree.gather, size, root)
        assert report.messages == tuple(int(rank != root) for rank in range(size))
        below = [tree.binomial_place(rank, size, root).branch.count for rank in range(size)]
        assert report.chunks == tuple(0 if rank == root else below[rank] for rank in range(size))
        assert max(report.chunks) == size // 2
        assert report.steps == floor(log2(size))


@worlds
def test_binomial_scatter(size: int) -> None:
    for root in range(size):
        report = cost(tree.scatter, size, root)
        places = [tree.binomial_place(rank, size, root) for rank in range(size)]
        assert report.messages == tuple(len(place.children) for place in places)
        assert report.messages[root] == ceil(log2(size))
        assert report.chunks == tuple(place.branch.count - 1 for place in places)
        assert report.steps == floor(log2(size))


@worlds
def test_pairwise_all_to_all(size: int) -> None:
    report = cost(pairwise.all_to_all, size)
    assert set(report.messages) == set(report.chunks) == {size - 1}
    assert report.steps == ceil((size - 1) / pairwise.ROUNDS_AT_ONCE)


@pytest.mark.parametrize("size", range(1, 34))
def test_the_tree_splits_ranks_into_neighbours(size: int) -> None:
    for root in range(size):
        places = [tree.binomial_place(rank, size, root) for rank in range(size)]
        assert [rank for rank in range(size) if places[rank].parent is None] == [root]
        for rank, place in enumerate(places):
            covered = [rank]
            for child in place.children:
                assert places[child.leader].branch == child
                assert places[child.leader].parent == rank
                covered += range(child.start, child.stop)
            assert sorted(covered) == list(range(place.branch.start, place.branch.stop))
            assert [child.count for child in place.children] == sorted((c.count for c in place.children), reverse=True)
