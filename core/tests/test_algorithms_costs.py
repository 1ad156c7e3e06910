"""The formulas of the algorithms: against the textbooks, against what a proof counts, and against a run with a clock.

The run here is a second opinion on `Cost`: a rank sends one message and receives one at a time, a message of m bytes takes a latency
and m times a time for each byte, reducing m bytes takes m times another, and what can start first does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from math import ceil, floor, log2

import pytest

from oneaccord.schedule.algorithms import (
    bruck,
    circulant,
    composed,
    doubling,
    halving,
    hierarchical,
    pairwise,
    prefix,
    ring,
    tree,
)
from oneaccord.schedule.algorithms.cost import Cost
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES, Contract, Layout
from oneaccord.schedule.proof.verify import Report, verify
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send

Address = tuple[int, int]


def names(algorithm: Algorithm) -> str:
    return f"{algorithm.collective.value}-{algorithm.name}"


each_algorithm = pytest.mark.parametrize("algorithm", BUILTIN, ids=names)


def bytes_of(schedule: Schedule, ref: Ref | None, nbytes: float) -> float:
    """Return the bytes of a reference where all chunks are even."""
    if ref is None:
        return 0.0
    contract = Contract.of(schedule)
    buffer = schedule.scratch[0].buffer if ref.buffer is Buffer.SCRATCH else ref.buffer
    layout = contract.promise.input if buffer is Buffer.INPUT else contract.promise.output
    return ref.count * nbytes / (contract.segments * (1 if layout is Layout.VECTOR else schedule.size))


class Clock:
    """All ranks, run step by step on a clock."""

    def __init__(self, schedules: list[Schedule], nbytes: float, latency: float, per_byte: float, per_reduced: float) -> None:
        self.schedules = schedules
        self.nbytes, self.latency, self.per_byte, self.per_reduced = nbytes, latency, per_byte, per_reduced
        self.waiting: dict[Address, int] = {}
        self.followers: dict[Address, list[Address]] = defaultdict(list)
        self.partners: dict[Address, Address] = {}
        self.free_at: dict[tuple[str, int], float] = defaultdict(float)
        self.ready: dict[Address, float] = {}
        self.open: list[tuple[float, int, int]] = []
        self.events: list[tuple[float, Address]] = []
        channels: dict[tuple[str, int, int], list[Address]] = defaultdict(list)
        for rank, schedule in enumerate(schedules):
            for index, step in enumerate(schedule.steps):
                self.waiting[rank, index] = len(step.after)
                for earlier in step.after:
                    self.followers[rank, earlier].append((rank, index))
                if isinstance(step, Send):
                    channels["send", rank, step.peer].append((rank, index))
                elif isinstance(step, Recv | RecvReduce):
                    channels["receive", step.peer, rank].append((rank, index))
        for (kind, sender, receiver), mine in channels.items():
            for before, behind in itertools.pairwise(mine):
                self.waiting[behind] += 1
                self.followers[before].append(behind)
            other = channels["receive" if kind == "send" else "send", sender, receiver]
            self.partners.update(zip(mine, other, strict=True))

    def run(self) -> float:
        """Return the time at which the last step ends."""
        now = 0.0
        for address in [address for address, count in self.waiting.items() if not count]:
            self.start(address, now)
        ended = 0
        while True:
            self.transfer(now)
            if not self.events:
                break
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                address = heapq.heappop(self.events)[1]
                ended += 1
                for follower in self.followers[address]:
                    self.waiting[follower] -= 1
                    if not self.waiting[follower]:
                        self.start(follower, now)
        assert ended == len(self.waiting)
        return now

    def start(self, address: Address, now: float) -> None:
        step = self.schedules[address[0]].steps[address[1]]
        self.ready[address] = now
        if isinstance(step, Copy):
            self.end(address, now)
        elif isinstance(step, Reduce):
            self.reduce(address, step.target, now)
        elif self.partners[address] in self.ready:
            rank, index = address if isinstance(step, Send) else self.partners[address]
            heapq.heappush(self.open, (now, index, rank))

    def transfer(self, now: float) -> None:
        """Start all messages for which both ports are free, those first that have been ready longest."""
        held_up = []
        while self.open:
            since, index, rank = heapq.heappop(self.open)
            receiver, place = self.partners[rank, index]
            if max(self.free_at["send", rank], self.free_at["receive", receiver]) > now:
                held_up.append((since, index, rank))
                continue
            send, receive = self.schedules[rank].steps[index], self.schedules[receiver].steps[place]
            assert isinstance(send, Send)
            there = now + self.latency + self.per_byte * bytes_of(self.schedules[rank], send.source, self.nbytes)
            self.free_at["send", rank] = self.free_at["receive", receiver] = there
            self.end((rank, index), there)
            if isinstance(receive, RecvReduce):
                self.reduce((receiver, place), receive.target, there)
            else:
                self.end((receiver, place), there)
        self.open = held_up

    def reduce(self, address: Address, target: Ref, now: float) -> None:
        rank = address[0]
        begin = max(now, self.free_at["reduce", rank])
        ended = begin + self.per_reduced * bytes_of(self.schedules[rank], target, self.nbytes)
        self.free_at["reduce", rank] = ended
        self.end(address, ended)

    def end(self, address: Address, when: float) -> None:
        # Rounded, so that what ends at one time on all ranks does so in floating point.
        heapq.heappush(self.events, (round(when, 9), address))


def hosts_of(algorithm: Algorithm, size: int) -> list[int]:
    return [count for count in range(1, size + 1) if size % count == 0] if algorithm.by_host else [1]


def roots_of(algorithm: Algorithm, size: int) -> list[int]:
    promise = PROMISES[algorithm.collective]
    return sorted({0, size // 2, size - 1}) if promise.input_on_root or promise.output_on_root else [0]


def is_power_of_two(*numbers: int) -> bool:
    return all(not number & (number - 1) for number in numbers)


NETWORKS = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (60.0, 1.0, 0.25), (3.0, 0.5, 0.25)]
"""Latency, time for a byte, time for a byte reduced."""


LOGARITHMIC_SCANS = {(Collective.SCAN, "recursive_doubling"), (Collective.EXSCAN, "doubling_123")}


@each_algorithm
@pytest.mark.parametrize(
    "sizes", [(1, 2, 3, 4, 6, 7, 8), pytest.param((5, *range(9, 20), 31, 32, 33), marks=pytest.mark.long)], ids=str
)
def test_a_formula_is_the_time_of_the_slowest_root(algorithm: Algorithm, sizes: Sequence[int]) -> None:
    assert algorithm.cost is not None
    for size in sizes:
        nbytes = 60.0 * size
        for ranks_per_host in hosts_of(algorithm, size):
            cost = algorithm.cost(size, nbytes, 1, ranks_per_host)
            every = [
                [algorithm.schedule(rank, size, root, 1, ranks_per_host) for rank in range(size)]
                for root in roots_of(algorithm, size)
            ]
            # Where ranks enter the second half at different times, worlds that are no power of two take longer.
            mixed = algorithm.collective is Collective.BROADCAST and algorithm.name in ("scatter_doubling", "hierarchical")
            exact = not mixed or is_power_of_two(ranks_per_host, size // ranks_per_host)
            for latency, per_byte, per_reduced in NETWORKS if size < 31 else NETWORKS[2:3]:
                found = max(Clock(made, nbytes, latency, per_byte, per_reduced).run() for made in every)
                formula = cost.steps * latency + cost.path_bytes * per_byte + cost.reduced_bytes * per_reduced
                # In worlds that are no power of two a block may have to wait for the reduction of others.
                queued = algorithm.name == "pairwise" and per_reduced * log2(size) * 60 > latency + per_byte * 60
                # Ranks at the beginning of a scan have nothing to wait for, so that the last one may wait for a reduction less.
                if (algorithm.collective, algorithm.name) in LOGARITHMIC_SCANS and (
                    not is_power_of_two(size) or algorithm.name == "doubling_123"
                ):
                    assert formula - per_reduced * nbytes - 1e-9 * formula <= found <= formula + 1e-9 * formula
                elif exact and (not queued or is_power_of_two(size)):
                    assert found == pytest.approx(formula, rel=1e-9)
                else:
                    assert found >= formula - 1e-9 * formula


@each_algorithm
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 3, 4, 6), pytest.param((2, 5, *range(7, 14)), marks=pytest.mark.long)], ids=str)
def test_a_formula_is_what_a_proof_counts(algorithm: Algorithm, sizes: Sequence[int], segments: int) -> None:
    assert algorithm.cost is not None
    for size in sizes:
        nbytes = 60.0 * size
        for ranks_per_host in hosts_of(algorithm, size):
            cost = algorithm.cost(size, nbytes, segments, ranks_per_host)
            most = 0.0
            for root in roots_of(algorithm, size):
                made = [algorithm.schedule(rank, size, root, segments, ranks_per_host) for rank in range(size)]
                report = verify(made)
                if report.chunks != (0,) * size:
                    most = max(most, max(report.chunks) * bytes_of(made[0], Ref(Buffer.INPUT, 0), nbytes))
                # A proof lets a rank do any number of things at once.
                assert report.steps <= cost.steps
            assert cost.sent_bytes == pytest.approx(most)


SEGMENTED = {
    (Collective.ALL_REDUCE, "ring"),
    (Collective.BROADCAST, "binomial"),
    (Collective.BROADCAST, "chain"),
    (Collective.BROADCAST, "scatter_all_gather"),
    (Collective.ALL_GATHER, "ring"),
    (Collective.REDUCE_SCATTER, "ring"),
    (Collective.SCAN, "chain"),
    (Collective.EXSCAN, "chain"),
}


@pytest.mark.parametrize("algorithm", [one for one in BUILTIN if (one.collective, one.name) in SEGMENTED], ids=names)
@pytest.mark.parametrize("segments", [2, 3])
def test_a_formula_holds_with_segments(algorithm: Algorithm, segments: int) -> None:
    assert algorithm.cost is not None
    for size in (1, 2, 3, 5, 8, 9):
        cost = algorithm.cost(size, 60.0 * size, segments, 1)
        formula = cost.steps * 3.0 + cost.path_bytes * 0.5 + cost.reduced_bytes * 0.25
        found = 0.0
        for root in roots_of(algorithm, size):
            made = [algorithm.schedule(rank, size, root, segments) for rank in range(size)]
            found = max(found, Clock(made, 60.0 * size, 3.0, 0.5, 0.25).run())
        assert found == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize("segments", [2, 3])
def test_segments_of_a_reduce_hide_reductions_and_nothing_else(segments: int) -> None:
    for size in (1, 2, 3, 8, 13):
        made = [tree.reduce(rank, size, 0, segments) for rank in range(size)]
        cost = tree.reduce_cost(size, 60.0 * size, segments)
        assert Clock(made, 60.0 * size, 3.0, 0.5, 0.0).run() == pytest.approx(cost.steps * 3.0 + cost.path_bytes * 0.5)
        assert Clock(made, 60.0 * size, 0.0, 0.0, 1.0).run() <= cost.reduced_bytes + 1e-6


@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize(("size", "ranks_per_host"), [(8, 1), (8, 2), (8, 8), (16, 4)])
def test_segments_of_a_hierarchical_all_reduce(size: int, ranks_per_host: int, segments: int) -> None:
    made = [hierarchical.all_reduce(rank, size, 0, segments, ranks_per_host) for rank in range(size)]
    cost = hierarchical.all_reduce_cost(size, 960.0, segments, ranks_per_host)
    assert cost.steps == segments * hierarchical.all_reduce_cost(size, 960.0, 1, ranks_per_host).steps
    found = Clock(made, 960.0, 3.0, 0.5, 0.0).run()
    assert found == pytest.approx(cost.steps * 3.0 + cost.path_bytes * 0.5)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 1024, 65536])
def test_the_formulas_of_thakur_rabenseifner_and_gropp(size: int) -> None:
    # Section 3 and 4 of the paper, for a power of two: latencies, bytes on the path, bytes reduced.
    log, n = int(log2(size)), 2.0**30
    others = n * (size - 1) / size
    expected: dict[str, tuple[Cost, tuple[int, float, float]]] = {
        "recursive doubling all_gather": (doubling.all_gather_cost(size, n), (log, others, 0)),
        "Bruck all_gather": (bruck.all_gather_cost(size, n), (log, others, 0)),
        "ring all_gather": (ring.all_gather_cost(size, n), (size - 1, others, 0)),
        "binomial broadcast": (tree.broadcast_cost(size, n), (log, log * n, 0)),
        "van de Geijn broadcast": (composed.scatter_all_gather_cost(size, n), (log + size - 1, 2 * others, 0)),
        "van de Geijn broadcast, doubling": (composed.scatter_doubling_cost(size, n), (2 * log, 2 * others, 0)),
        "Bruck all_to_all": (bruck.all_to_all_cost(size, n), (log, log * n / 2, 0)),
        "pairwise all_to_all": (pairwise.all_to_all_cost(size, n), (size - 1, others, 0)),
        "recursive halving reduce_scatter": (halving.reduce_scatter_cost(size, n), (log, others, others)),
        "binomial reduce": (tree.reduce_cost(size, n), (log, log * n, log * n)),
        "Rabenseifner reduce": (halving.reduce_cost(size, n), (2 * log, 2 * others, others)),
        "recursive doubling all_reduce": (doubling.all_reduce_cost(size, n), (log, log * n, log * n)),
        "Rabenseifner all_reduce": (halving.all_reduce_cost(size, n), (2 * log, 2 * others, others)),
        "ring all_reduce": (ring.all_reduce_cost(size, n), (2 * (size - 1), 2 * others, others)),
        "binomial scatter": (tree.scatter_cost(size, n), (log, others, 0)),
        "binomial gather": (tree.gather_cost(size, n), (log, others, 0)),
    }
    for name, (cost, figures) in expected.items():
        assert (cost.steps, cost.path_bytes, cost.reduced_bytes) == pytest.approx(figures), name


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 100, 1000])
def test_the_fewest_bytes_in_any_world(size: int) -> None:
    others = 1000.0 * (size - 1) / size
    for cost in (circulant.reduce_scatter_cost(size, 1000.0), pairwise.reduce_scatter_cost(size, 1000.0)):
        assert cost.path_bytes == cost.sent_bytes == pytest.approx(others)
    both = circulant.all_reduce_cost(size, 1000.0)
    assert both.path_bytes == both.sent_bytes == pytest.approx(2 * others)
    assert both.steps <= 2 * ceil(log2(size)) + 1


WORLDS = [2, 3, 4, 6, 7, 8, *(pytest.param(size, marks=pytest.mark.long) for size in (5, *range(9, 18)))]

worlds = pytest.mark.parametrize("size", WORLDS)
segmented = pytest.mark.parametrize("k", [1, 3])


def count(build, size: int, root: int = 0, k: int = 1) -> Report:  # type: ignore[no-untyped-def]
    return verify([build(rank, size, root, k) for rank in range(size)])


@worlds
@segmented
def test_messages_around_a_ring(size: int, k: int) -> None:
    report = count(ring.all_reduce, size, k=k)
    assert set(report.messages) == set(report.chunks) == {2 * (size - 1) * k}
    assert report.steps == 2 * (size - 1) * k
    for build in (ring.reduce_scatter, ring.all_gather):
        report = count(build, size, k=k)
        assert set(report.messages) == set(report.chunks) == {(size - 1) * k}
        assert report.steps == (size - 1) * k


@worlds
def test_messages_of_recursive_doubling_and_halving(size: int) -> None:
    rounds = floor(log2(size))
    extra = size - 2**rounds
    hops = 2 if extra else 0
    for build, both_ways in ((doubling.all_reduce, 1), (doubling.all_gather, 1), (halving.all_reduce, 2)):
        report = count(build, size)
        # What the partner hands over in an all_gather does not come back to the rank that hands on the result.
        assert report.steps == both_ways * rounds + hops or build is doubling.all_gather
        for rank, sent in enumerate(report.messages):
            if rank < 2 * extra:
                assert sent == (1 if rank % 2 else both_ways * rounds + 1)
            else:
                assert sent == both_ways * rounds
    assert count(halving.reduce_scatter, size).steps == rounds + hops


@worlds
def test_messages_of_a_reduce_by_halves(size: int) -> None:
    rounds = floor(log2(size))
    extra = size > 2**rounds
    for root in range(size):
        report = count(halving.reduce, size, root)
        assert report.steps == 2 * rounds + extra
        assert report.messages[root] == rounds
        assert max(report.messages) <= rounds + 1


@worlds
def test_messages_of_bruck(size: int) -> None:
    rounds = ceil(log2(size))
    report = count(bruck.all_gather, size)
    assert set(report.messages) == {rounds}
    assert set(report.chunks) == {size - 1}
    assert report.steps == rounds
    report = count(bruck.all_to_all, size)
    assert set(report.messages) == {rounds}
    assert set(report.chunks) == {sum(distance.bit_count() for distance in range(size))}
    assert report.steps == rounds


@worlds
def test_messages_of_the_circulant_graph(size: int) -> None:
    rounds = ceil(log2(size))
    report = count(circulant.reduce_scatter, size)
    assert set(report.chunks) == {size - 1}
    assert set(report.messages) <= {rounds, rounds + 1}
    assert max(report.messages) == rounds + (size > 3)
    report = count(circulant.all_reduce, size)
    assert set(report.chunks) == {2 * (size - 1)}
    assert max(report.messages) == 2 * rounds + (size > 3)


@worlds
def test_messages_of_the_dissemination_barrier(size: int) -> None:
    report = count(doubling.barrier, size)
    assert set(report.messages) == {ceil(log2(size))}
    assert set(report.chunks) == {0}
    assert report.steps == ceil(log2(size))


@worlds
@segmented
def test_messages_down_a_tree_and_a_chain(size: int, k: int) -> None:
    for root in range(size):
        report = count(tree.broadcast, size, root, k)
        assert report.messages[root] == ceil(log2(size)) * k
        assert sum(report.messages) == (size - 1) * k
        assert report.chunks == report.messages
        assert report.steps == floor(log2(size)) + k - 1
        report = count(tree.chain, size, root, k)
        last = (root - 1) % size
        assert report.chunks == report.messages == tuple(0 if rank == last else k for rank in range(size))
        assert report.steps == size + k - 2


@worlds
@segmented
def test_messages_up_a_tree(size: int, k: int) -> None:
    for root in range(size):
        report = count(tree.reduce, size, root, k)
        assert report.chunks == report.messages == tuple(0 if rank == root else k for rank in range(size))
        assert report.steps == ceil(log2(size)) + k - 1


@worlds
@segmented
def test_messages_of_scans(size: int, k: int) -> None:
    for build in (prefix.chain_scan, prefix.chain_exscan):
        report = count(build, size, k=k)
        assert report.chunks == report.messages == (*[k] * (size - 1), 0)
        assert report.steps == size + k - 2
    report = count(prefix.scan, size)
    assert report.messages == tuple(ceil(log2(size - rank)) for rank in range(size))
    assert floor(log2(size)) <= report.steps <= ceil(log2(size))
    report = count(prefix.exscan, size)
    # Träff: ceil(log2(p - 1) + log2(4 / 3)) rounds.
    assert max(report.messages) == (ceil(log2(4 * (size - 1) / 3)) if size > 2 else 1)
    assert report.chunks == report.messages


@worlds
def test_messages_of_gather_and_scatter(size: int) -> None:
    for root in range(size):
        places = [tree.binomial_place(rank, size, root) for rank in range(size)]
        report = count(tree.gather, size, root)
        assert report.messages == tuple(int(rank != root) for rank in range(size))
        assert report.chunks == tuple(0 if rank == root else places[rank].branch.count for rank in range(size))
        assert max(report.chunks) == size // 2
        assert report.steps == floor(log2(size))
        report = count(tree.scatter, size, root)
        assert report.messages == tuple(len(place.children) for place in places)
        assert report.messages[root] == ceil(log2(size))
        assert report.chunks == tuple(place.branch.count - 1 for place in places)
        assert report.steps == floor(log2(size))


@worlds
def test_messages_of_pairwise_exchanges(size: int) -> None:
    for build in (pairwise.all_to_all, pairwise.reduce_scatter):
        report = count(build, size)
        assert set(report.messages) == set(report.chunks) == {size - 1}
        assert report.steps == ceil((size - 1) / pairwise.ROUNDS_AT_ONCE)


@pytest.mark.parametrize("place_of", [tree.binomial_place, tree.canonical_place])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 32, 33])
def test_a_tree_splits_ranks_into_neighbours(place_of, size: int) -> None:  # type: ignore[no-untyped-def]
    for root in range(size):
        places = [place_of(rank, size, root) for rank in range(size)]
        assert [rank for rank in range(size) if places[rank].parent is None] == [root]
        for rank, place in enumerate(places):
            covered = [rank]
            for child in place.children:
                assert places[child.leader].branch == child
                assert places[child.leader].parent == rank
                covered += range(child.start, child.stop)
            assert sorted(covered) == list(range(place.branch.start, place.branch.stop))
            if place_of is tree.binomial_place:
                counts = [child.count for child in place.children]
                assert counts == sorted(counts, reverse=True)


def test_halving_shares_the_vector_so_that_no_scratch_is_needed() -> None:
    for size in (1, 2, 3, 7, 8, 33):
        for rank in range(size):
            made = halving.all_reduce(rank, size)
            assert made.scratch == ()
            assert not any(isinstance(step, Copy | Reduce) for step in made.steps) or size == 1
