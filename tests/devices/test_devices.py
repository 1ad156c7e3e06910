"""Calls on GPUs through groups: on fakes of CUDA, CuPy and NCCL, whose streams run late wherever nothing makes them wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.device_worlds import BACKENDS, HYBRID, NCCL, gpus, mine, ranks
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import PATIENCE_S

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["gpus"]


@BACKENDS
def test_an_out_that_cannot_take_the_result_is_refused(gpus: FakeNccl, config: Any) -> None:
    def program(group: Group) -> None:
        for wrong, error in [
            (cupy.zeros((3, 4)), oa.DTypeError),
            (cupy.zeros((4, 3), np.float32), oa.SizeMismatchError),
            (np.zeros((3, 4), np.float32), oa.LayoutError),
        ]:
            with pytest.raises(error):
                group.all_reduce(mine(group, (3, 4)), out=wrong)
        with pytest.raises(oa.LayoutError, match="out= is on a GPU"):
            group.all_reduce(np.ones((3, 4), np.float32), out=cupy.zeros((3, 4), np.float32))

    ranks(program, 2, config=config)


def test_calls_launch_no_event_and_do_not_wait_on_the_host(gpus: FakeNccl) -> None:
    reached = threading.Event()

    def program(group: Group) -> list[float]:
        x = mine(group)
        group.all_reduce(x, out=x)
        x.get()
        group.barrier()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            if group.rank == 1:
                with cupy.held(stream.ptr):
                    group.all_reduce(x, out=x)
                    assert reached.wait(PATIENCE_S)
            else:
                group.all_reduce(x, out=x)  # returns although rank 1's device does nothing
                reached.set()
            return x.get().tolist()

    assert ranks(program, 2) == [[6.0] * 5] * 2


def test_several_works_beside_the_stream_are_waited_for(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = mine(group, 100)

            async def wait() -> None:
                works = [group.all_reduce_async(x), group.all_reduce_async(x, "max")]
                assert await asyncio.wait(works, timeout=PATIENCE_S) == ({*works}, set())

            asyncio.run(wait())
            works = [group.all_reduce_async(x, "min"), group.all_reduce_async(x)]
            assert [result.get().tolist() for result in oa.wait_all(works)] == [[1.0] * 100, [3.0] * 100]
            works = [group.all_reduce_async(x, "min"), group.all_reduce_async(x)]
            assert {works.index(work) for work in oa.as_completed(works, timeout_s=PATIENCE_S)} == {0, 1}
            assert oa.wait_any(works) == 0
            with pytest.raises(oa.LayoutError, match="C-contiguous"):
                group.all_reduce_async(x, out=cupy.zeros((100, 2), np.float32)[:, 0])
            group.synchronize()

    ranks(program, 2)


def test_a_work_waits_for_what_the_stream_had_queued_when_it_was_made(gpus: FakeNccl) -> None:
    def program(group: Group) -> list[float]:
        stream = cupy.cuda.Stream(non_blocking=True)
        x = mine(group)
        x.get()
        with stream:
            with cupy.held(stream.ptr):
                x += 10  # late
                work = group.all_reduce_async(x)
                assert not work.done()
            y = work.wait()
            return y.get().tolist()

    assert ranks(program, 2) == [[23.0] * 5] * 2


@BACKENDS
def test_messages(gpus: FakeNccl, config: Any) -> None:
    def program(group: Group) -> None:
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        if group.rank == 0:
            group.send(mine(group, (2, 2)), 2)
        if group.rank == 2:
            out = cupy.zeros(4, np.float32).reshape(2, 2)
            assert group.recv(0, out=out) is out
            assert out.get().tolist() == [[1.0] * 2] * 2
        with pytest.raises(oa.LayoutError, match="needs out="):
            group.sendrecv(mine(group), right, left)
        with pytest.raises(oa.DTypeError, match="float64"):
            group.sendrecv(mine(group), group.rank, group.rank, out=cupy.zeros(5, np.float64))
        group.send(mine(group), None)
        group.send_async(mine(group), None).wait()
        assert group.recv_async(None, out=out).wait() is out if group.rank == 2 else group.recv(None) is None
        if group.rank == 1:
            assert group.recv_async(2, out=cupy.zeros(5, np.float32)).wait().get().tolist() == [3.0] * 5
        if group.rank == 2:
            group.send_async(mine(group), 1).synchronize()
        group.barrier()

    ranks(program, 3, config=config)


def test_a_world_of_one_copies_to_an_out_that_is_the_input_in_another_order(gpus: FakeNccl) -> None:
    matrix = np.arange(9.0).reshape(3, 3)
    calls: list[Callable[[Group, Any, Any], Any]] = [
        lambda group, x, out: group.all_reduce(x, out=out),
        lambda group, x, out: group.all_gather(x, out=out),
        lambda group, x, out: group.sendrecv(x, 0, 0, out=out),
    ]

    def program(group: Group) -> None:
        for call in calls:
            for turn in (lambda x: x.T, lambda x: x[::-1], lambda x: x):
                x = cupy.asarray(matrix)
                out = turn(x)
                assert call(group, x, out) is out
                assert out.get().tolist() == matrix.tolist()

    ranks(program, 1)
    with oa.init(world_size=1) as group:
        program(group)


def test_calls_beside_the_stream_whose_ranks_first_tell_each_other_something(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        tens = cupy.asarray(np.full(3, 10.0 * group.rank))
        tens.get()
        with stream:
            x = tens + 1  # late
            counts = [1, 2] if group.rank == 0 else [2, 1]
            swapped = group.all_to_all_async(x, send_counts=counts).wait()
            assert swapped.get().tolist() == ([1.0, 11.0, 11.0] if group.rank == 0 else [1.0, 1.0, 11.0])
            joined = group.all_gather_async(x[group.rank :], uneven=True).wait()
            assert joined.get().tolist() == [1.0, 1.0, 1.0, 11.0, 11.0]
            with cupy.held(stream.ptr):
                y = x + 1  # later than the call is enqueued
                gathering = group.gather_async(y[group.rank :], 1, uneven=True)
                group.barrier()
                assert not gathering.done()
            gathered = gathering.wait()
            assert gathered is None if group.rank == 0 else gathered.get().tolist() == [2.0, 2.0, 2.0, 12.0, 12.0]
            parts = x[:2] if group.rank == 0 else None
            assert group.scatter_async(parts, root=0).wait().get().tolist() == [1.0]
            assert group.scatter_async(np.arange(2) if group.rank == 0 else None, root=0).wait().tolist() == [group.rank]

    ranks(program, 2)


def test_counts_that_only_one_rank_has_had_before(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        for counts in ([[1, 2], [1, 2]], [[1, 2], [2, 1]], [[2, 1], [2, 1]]):
            mine = counts[group.rank]
            got = group.all_to_all(cupy.asarray(np.arange(3.0)), send_counts=mine)
            first = [0.0, 1.0, 2.0]
            expected = [first[: each[0]] if group.rank == 0 else first[each[0] :] for each in counts]
            assert got.get().tolist() == [value for part in expected for value in part]

    ranks(program, 2)


def test_batches(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        arrays = [mine(group, (n, 2)) for n in range(1, 4)]
        host = np.ones(3)
        for _ in range(2):
            with group.coalesce() as batch:
                works = [batch.all_reduce(array, out=array if number == 1 else None) for number, array in enumerate(arrays)]
                other = batch.all_reduce(host)
            assert [work.wait().get().tolist() for work in works[::2]] == [[[3.0] * 2] * n for n in (1, 3)]
            assert works[1].wait() is arrays[1]
            assert other.wait().tolist() == [2.0] * 3
            assert arrays[1].get().tolist() == [[3.0] * 2] * 2
            arrays[1] = mine(group, (2, 2))

    ranks(program, 2)
    assert gpus.names().count("all_reduce") == 12


# What is refused, and what does not fit together.


def test_host_arrays_and_objects_need_another_route(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.UnsupportedError, match='backend = "hybrid"'):
            group.all_reduce(np.ones(3))
        with pytest.raises(oa.UnsupportedError, match='backend = "hybrid"'):
            group.broadcast_object("x")
        with pytest.raises(oa.UnsupportedError, match="reproducible"):
            group.all_reduce(mine(group), reproducible=True)
        with pytest.raises(oa.UnsupportedError, match="int16"):
            group.all_reduce(mine(group, 3, np.int16))
        assert group.all_reduce(mine(group)).get().tolist() == [3.0] * 5

    ranks(program, 2, config=NCCL)


# Through the host.


@pytest.mark.parametrize("source", ["config", "variable"])
def test_arrays_go_through_the_host_where_that_is_allowed(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    config: dict[str, Any] = {"backend": "tcp"}
    if source == "config":
        config["gpu_fallback"] = "host"
    else:
        monkeypatch.setenv("ONEACCORD_GPU_FALLBACK", "host")

    def program(group: Group) -> None:
        x = mine(group)
        y = group.all_reduce(x)
        assert y.get().tolist() == [3.0] * 5
        assert group.all_reduce(x, out=x) is x
        assert x.get().tolist() == [3.0] * 5
        if group.rank == 0:
            group.send(x + 1, 1)
        else:
            out = cupy.zeros(5, np.float32)
            assert group.recv(0, out=out) is out
            assert out.get().tolist() == [4.0] * 5

    with pytest.warns(
        oa.GpuFallbackWarning
    ) as seen:  # around all ranks: these are threads, and warnings are caught for all of them
        ranks(program, 2, config=config)
    told = sorted(str(warning.message) for warning in seen)
    assert [text.partition(":")[0] for text in told] == ["all_reduce"] * 2 + ["recv", "send"]  # once on each rank
    assert all(": 20 bytes of a ndarray on a GPU go through the host" in text for text in told)
    assert {warning.filename for warning in seen} == {__file__}


def test_arrays_on_gpus_are_refused_by_backends_of_the_host(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with pytest.raises(
            oa.UnsupportedError, match=r'all_reduce was given a ndarray on a GPU.*"nccl".*gpu_fallback = "host"'
        ):
            group.all_reduce(mine(group))

    ranks(program, 2, config={"backend": "tcp"})


def test_messages_with_a_route_of_their_own_go_through_the_host(gpus: FakeNccl) -> None:
    routes = {"cpu": "tcp", "cuda": "nccl", "barrier": "tcp", "p2p": "tcp"}
    config = {**HYBRID, "backends": {"hybrid": {"routes": routes}}}

    def program(group: Group) -> None:
        assert group.all_reduce(mine(group)).get().tolist() == [3.0] * 5
        with pytest.raises(oa.UnsupportedError, match=r"send was given a ndarray on a GPU.*routes\.p2p"):
            group.send(mine(group), 1 - group.rank)
        if group.rank == 0:
            group.send(np.ones(3), 1)
        else:
            assert group.recv(0).tolist() == [1.0] * 3
        assert group.backend("nccl") is not None
        assert group.backend("tcp") is not None
        assert group.backend("shm") is None

    ranks(program, 2, config=config)


class Other:
    """An array of some other library: CUDA's array interface alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_arrays_of_other_libraries_are_kept_until_the_gpu_is_done(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        result = group.all_reduce(Other(mine(group)))
        assert type(result) is cupy.ndarray
        assert result.get().tolist() == [3.0] * 5
        work = group.all_reduce_async(Other(mine(group)))
        assert work.wait().get().tolist() == [3.0] * 5

    ranks(program, 2)


def test_arrays_on_another_device_than_the_groups_are_refused(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with (
            cupy.cuda.Device(3),
            pytest.raises(oa.LayoutError, match=rf"is on device 3, and this rank's group uses device {group.rank}"),
        ):
            group.all_reduce(cupy.zeros(3, np.float32))

    ranks(program, 2)


def test_a_closed_group_refuses_also_what_only_copies(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.close()
        for call in (group.all_reduce, group.all_reduce_async, lambda y: group.sendrecv(y, 0, 0)):
            with pytest.raises(oa.ClosedError):
                call(x)

    ranks(program, 1)


def test_a_world_of_one_needs_no_gpu_library_of_its_own(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group, (2, 2))
        y = group.all_reduce(x, "mean")
        assert y is not x
        assert y.get().tolist() == [[1.0] * 2] * 2
        assert group.all_reduce(x, out=x) is x
        assert group.all_gather_async(x).wait().get().tolist() == [[1.0] * 2] * 2
        group.synchronize()

    ranks(program, 1, config={"backend": "tcp"})
    assert "all_reduce" not in gpus.names()


def test_calls_of_known_kinds_cost_the_store_nothing(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from oneaccord.control.connection import Control

    asked: list[str] = []
    exchange = Control.exchange

    def counted(self: Control, name: str, *args: Any, **options: Any) -> Any:
        asked.append(name)
        return exchange(self, name, *args, **options)

    monkeypatch.setattr(Control, "exchange", counted)

    def program(group: Group) -> None:
        x, y = mine(group), cupy.zeros(5, np.float32)
        group.all_reduce(x, out=y)
        group.barrier()
        before = len(asked)
        for _ in range(100):
            group.all_reduce(x, out=y)
            group.all_reduce_async(x, out=y).wait()
        assert len(asked) == before
        y.get()
        group.barrier()

    ranks(program, 2)
