"""Arrays on GPUs that go through the host's memory in pieces: values, order, what the ranks must do alike, and the memory that it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.device_worlds import gpu_world, gpus, mine, ranks
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import until

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["gpus"]

pytestmark = pytest.mark.filterwarnings("ignore::oneaccord.errors.GpuFallbackWarning")

STAGED: dict[str, Any] = {"backend": "tcp", "gpu_fallback": "host", "gpu_staging": {"latency_s": 1e-9}}
"""Calls cost nothing but their bytes, so that the pieces are as small as they may be: 64 KiB."""
PIECE = 1 << 14
"""So many float32."""
COUNT = 4 * PIECE + 5  # a multiple of 7


def numbers(rank: int, count: int, dtype: Any = np.float32) -> Any:
    """Return values of which each order of adding them gives other bits."""
    draw = np.random.default_rng([rank, 7])
    return (draw.normal(size=count) * 10.0 ** draw.integers(-3, 4, count)).astype(dtype)


def larger(one: Any, other: Any) -> Any:
    """Return the larger numbers: a function of the user's, for which arrays stay whole."""
    return np.maximum(one, other)


def bits(array: Any) -> tuple[Any, ...]:
    host = cupy.asnumpy(array)
    return host.dtype, host.shape, host.tobytes()


class Log:
    """What the streams have copied between the devices and pinned memory, in the order in which they came to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[tuple[int, str]] = []
        self.done: list[tuple[int, str]] = []
        runtime = cupy.cuda.runtime
        copy = runtime.memcpyAsync

        def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            entry = cupy.cuda.runtime.getDevice(), "fetch" if kind == runtime.memcpyDeviceToHost else "store"
            self.queued.append(entry)
            copy(target, source, nbytes, kind, stream)
            cupy.enqueue(stream, lambda: self.done.append(entry))

        monkeypatch.setattr(runtime, "memcpyAsync", memcpy_async)

    def count(self, device: int, what: str) -> int:
        """Return how many copies a device has done."""
        return self.done.count((device, what))


@pytest.fixture
def log(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


# Values.


def all_calls(group: Group, give: Callable[[Any], Any], dtype: Any) -> list[Any]:
    """Make each call that is cut, on an array of a size that no piece divides, and return what they give."""
    size, rank = group.world_size, group.rank
    x, long = give(numbers(rank, COUNT, dtype)), give(numbers(rank, size * COUNT, dtype))
    found = [
        group.all_reduce(x, op="sum", reproducible=True),
        group.all_reduce(x.reshape(-1, 1, 7), op="max"),
        group.reduce(x, root=size - 1, op="sum", reproducible=True),
        group.broadcast(x, root=size - 1),
        group.all_gather(x),
        group.all_gather(x, counts=[COUNT] * size),
        group.reduce_scatter(long, reproducible=True),
        group.all_reduce(x, op=np.minimum),
        group.all_reduce(x, op=larger),
    ]
    if np.dtype(dtype).kind == "f":
        found.append(group.all_reduce(x, op="mean", reproducible=True))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize(("backend", "size"), [("tcp", 2), ("tcp", 3), ("shm", 2)])
def test_the_values_are_those_of_the_call_on_the_host_bit_by_bit(log: Log, backend: str, size: int, dtype: str) -> None:
    def program(group: Group) -> None:
        found, expected = all_calls(group, cupy.asarray, dtype), all_calls(group, np.asarray, dtype)
        assert all(each is None or type(each) is cupy.ndarray for each in found)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or bits(one) == bits(other)
        assert log.count(group.rank, "fetch") >= 10

    ranks(program, size, config={**STAGED, "backend": backend})


def test_results_go_to_out_whatever_its_layout_and_what_it_shares(log: Log) -> None:
    def program(group: Group) -> None:
        x = cupy.asarray(numbers(group.rank, COUNT))
        total = bits(group.all_reduce(x, reproducible=True))
        wide = cupy.zeros((COUNT, 2), np.float32)
        assert group.all_reduce(x, out=wide[:, 1], reproducible=True) is not None
        assert bits(wide[:, 1].copy()) == total
        assert not cupy.asnumpy(wide[:, 0]).any()
        # The input in every second place, and in memory that the result shares with it three pieces further on.
        wide[:, 0] = x
        assert bits(group.all_reduce(wide[:, 0], reproducible=True)) == total
        shared = cupy.zeros(COUNT + 3 * PIECE, np.float32)
        shared[:COUNT] = x
        group.all_reduce(shared[:COUNT], out=shared[3 * PIECE :], reproducible=True)
        assert bits(shared[3 * PIECE :].copy()) == total
        gathered = cupy.zeros((2, COUNT), np.float32)
        gathered[group.rank] = x
        group.all_gather(gathered[group.rank], out=gathered.reshape(-1))
        assert bits(gathered.reshape(-1)) == bits(group.all_gather(x))
        assert group.all_reduce(x, out=x, reproducible=True) is x
        assert bits(x) == total
        with pytest.raises(oa.SizeMismatchError, match="out= has shape"):
            group.all_reduce(x, out=cupy.zeros(3, np.float32))

    ranks(program, 2, config=STAGED)


def test_copies_wait_for_what_the_streams_have_queued_and_results_are_there_on_every_stream(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        for step in range(3):
            with stream:
                x = mine(group, COUNT)
                x += step
                out = cupy.zeros(COUNT, np.float32)
                work = group.all_reduce_async(x, out=out)
                y = group.all_reduce(x)
            assert work.wait() is out
            for each in (out, y):  # on the default stream
                assert set(each.get().tolist()) == {3.0 + 2 * step}

    ranks(program, 2, config=STAGED)


# Order.


def test_copies_of_the_pieces_around_it_run_while_a_piece_is_between_the_ranks(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is held back before it is sent, until the GPU has copied the next one, and the one before back."""
    from oneaccord.calls.host.actions import HostPath

    run, moved = HostPath.run, {0: 0, 1: 0}

    def held(self: Any, request: Any, *arguments: Any) -> None:
        rank = self._job.rank
        if request.whole is not None:
            number, moved[rank] = moved[rank], moved[rank] + 1
            until(lambda: log.count(rank, "fetch") >= min(number + 2, 5))
            until(lambda: log.count(rank, "store") >= number)
            assert log.queued.count((rank, "fetch")) == min(number + 2, 5)  # no piece more is in memory
        run(self, request, *arguments)

    monkeypatch.setattr(HostPath, "run", held)

    def program(group: Group) -> None:
        assert set(group.all_reduce(mine(group, COUNT)).get().tolist()) == {3.0}

    ranks(program, 2, config=STAGED)
    assert moved == {0: 5, 1: 5}


def test_one_piece_takes_the_array_whole(log: Log) -> None:
    def program(group: Group) -> None:
        assert set(group.all_reduce(mine(group, PIECE)).get().tolist()) == {3.0}
        group.gather(mine(group, COUNT), root=0)
        group.all_gather(mine(group, COUNT + group.rank), uneven=True)
        group.scan(mine(group, COUNT))
        assert group.all_gather(mine(group, 0)).shape == (0,)

    ranks(program, 2, config=STAGED)
    assert log.queued == []


# What the ranks must do alike.


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (lambda rank: COUNT + rank, [f"float32[{COUNT}] on a GPU", f"float32[{COUNT + 1}] on a GPU"]),
        (lambda rank: None if rank else COUNT, [f"all_reduce(float32[{COUNT}]", "in pieces of 16384 elements"]),
    ],
    ids=["another shape", "not on a GPU"],
)
def test_a_mismatch_names_the_calls_of_the_user(gpus: FakeNccl, count: Any, said: list[str]) -> None:
    def program(group: Group) -> None:
        found = count(group.rank)
        group.all_reduce(np.ones(COUNT, np.float32) if found is None else mine(group, found))

    outcomes = gpu_world(program, 2, config=STAGED)
    assert {type(each) for each in outcomes} == {oa.CollectiveMismatchError}
    assert len({str(each) for each in outcomes}) == 1
    assert all(words in str(outcomes[0]) for words in said), outcomes[0]
    assert "piece 0" not in str(outcomes[0])


def test_ranks_that_cut_in_another_way_are_told(gpus: FakeNccl) -> None:
    """As where their configurations differ."""
    from oneaccord.arrays import costs

    def program(group: Group) -> None:
        if group.rank:
            group._paths.staged._costs = costs.Costs(1e-3, 2e9, 12e9)
        group.all_reduce(mine(group, 1 << 20))

    outcomes = gpu_world(program, 2, config=STAGED)
    assert {type(each) for each in outcomes} == {oa.CollectiveMismatchError}
    assert "in pieces of 16384 elements" in str(outcomes[0])


def test_a_rank_that_dies_between_two_pieces_is_named(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from oneaccord.calls.host.actions import HostPath

    run, moved = HostPath.run, []

    def dying(self: Any, request: Any, *arguments: Any) -> None:
        if request.whole is not None and self._job.rank == 1:
            moved.append(request)
            if len(moved) == 3:
                raise ValueError("planted")
        run(self, request, *arguments)

    monkeypatch.setattr(HostPath, "run", dying)

    def program(group: Group) -> Any:
        x = mine(group, COUNT)
        kept = x.copy()
        try:
            group.all_reduce(x)
        finally:
            assert bits(x) == bits(kept)

    left, died = gpu_world(program, 2, config=STAGED)
    assert isinstance(died, ValueError)
    assert isinstance(left, oa.AbortedError)
    assert "rank 1 broke off all_reduce with ValueError: planted" in str(left)


def test_a_gpu_that_does_not_end_a_copy_is_a_deadline(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = mine(group, COUNT)
            if group.rank:
                group.all_reduce(x, timeout_s=60)
                return
            with cupy.held(stream.ptr):
                group.all_reduce(x, timeout_s=0.5)

    outcomes = gpu_world(program, 2, config=STAGED)
    assert {type(each) for each in outcomes} == {oa.DeadlineError}
    assert "the copy to the host has not ended" in str(outcomes[0])
    assert "all_reduce #" in str(outcomes[0])


# Memory.


def test_pinned_memory_is_used_again_and_given_back_when_the_group_is_closed(gpus: FakeNccl) -> None:
    gc.collect()  # what failed in an earlier test
    before = cupy.pinned_now()

    def program(group: Group) -> None:
        x, out = mine(group, 16 * PIECE), cupy.zeros(16 * PIECE, np.float32)
        group.all_reduce(x, out=out)
        group.barrier()
        asked = len(cupy.pinned)
        group.barrier()
        for _ in range(3):
            group.all_reduce(x, out=out)
            group.broadcast(x, out=out, root=0)
        group.barrier()
        assert len(cupy.pinned) == asked
        group.barrier()
        assert cupy.pinned_now() - before == 2 * 3 * 4 * PIECE
        group.barrier()

    ranks(program, 2, config=STAGED)
    assert cupy.pinned_now() == before


def test_costs_choose_small_pieces_where_calls_are_cheap_and_none_where_they_are_not() -> None:
    from oneaccord.arrays.costs import MOST_PIECE_BYTES, Costs, piece_bytes

    usual = Costs(100e-6, 2e9, 12e9)
    assert piece_bytes(usual, 1 << 18) == 1 << 18
    assert [piece_bytes(usual, 1 << power) for power in (24, 26, 30)] == [1 << 22, 1 << 23, MOST_PIECE_BYTES]
    assert piece_bytes(Costs(1.0, 2e9, 12e9), 1 << 26) == 1 << 26
    for nbytes in (1 << 20, 1 << 24, (1 << 27) + 1):
        best = piece_bytes(usual, nbytes)
        assert all(usual.seconds(nbytes, best) <= usual.seconds(nbytes, 1 << power) for power in range(16, 25))
