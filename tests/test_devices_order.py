"""What comes first on GPUs, who is told what, and what survives errors: on fakes, as in test_devices."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_worlds import HYBRID, gpu_world, gpus
from fake_gpu import fake_cuda
from fake_gpu import fake_cupy as cupy
from fake_gpu.fake_nccl import FakeNccl
from worlds import free_port, must, on_threads

import manyhands as mh
from manyhands.api import Group

__all__ = ["gpus"]

NCCL = {"backend": "nccl"}


def over_sockets(program: Callable[[Group], Any], configs: list[dict[str, Any]]) -> list[Any]:
    """Run ``program`` on a rank for each config, which meet as processes do; return what each returned or raised."""
    address = f"127.0.0.1:{free_port()}"

    def body(rank: int) -> Any:
        config = {**configs[rank], "rendezvous": {"address": address}}
        with mh.init(config=config, rank=rank, world_size=len(configs), timeout_s=20) as group:
            return program(group)

    return on_threads(body, len(configs))


def mine(group: Group, shape: Any = 4, dtype: Any = np.float32) -> Any:
    return cupy.full(shape, group.rank + 1, dtype)


@pytest.mark.parametrize("call", ["reduce", "gather", "send"])
def test_calls_without_a_result_wait_for_the_callers_stream_as_well(gpus: FakeNccl, call: str) -> None:
    def program(group: Group) -> Any:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.zeros(4, np.float32)
            x.get()
            with cupy.held(stream.ptr):
                x += 7  # late
                if call == "send":
                    work = group.send_async(x, 1) if group.rank == 0 else group.recv_async(0, out=cupy.zeros(4, np.float32))
                else:
                    work = group.reduce_async(x) if call == "reduce" else group.gather_async(x)
            result = work.wait()
            x += 100  # behind the call
            return None if result is None else result.get().tolist()

    receiver = 1 if call == "send" else 0
    expected = {"reduce": [14.0] * 4, "gather": [7.0] * 8, "send": [7.0] * 4}[call]
    results = must(gpu_world(program, 2))
    assert results[receiver] == expected
    assert results[1 - receiver] is None


def test_a_batch_into_arrays_that_are_not_contiguous(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        outs = [cupy.zeros((4, 2), np.float32)[:, 0] for _ in range(2)]
        with group.coalesce() as batch:
            works = [batch.all_reduce(mine(group), out=out) for out in outs]
        for work, out in zip(works, outs, strict=True):
            assert work.wait() is out
            assert out.get().tolist() == [3.0] * 4

    must(gpu_world(program, 2))


def test_a_work_that_was_aborted_is_no_success(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce_async(x).synchronize()
        if group.rank == 1:
            raise KeyError("mine")
        work = group.all_reduce_async(x)
        while not repr(group).endswith("failed>"):
            time.sleep(0.01)
        for _ in range(100):  # until the abort has ended the kernel
            work.done()
            time.sleep(0.002)
        work.synchronize()

    outcomes = gpu_world(program, 2)
    assert isinstance(outcomes[0], mh.AbortedError), outcomes


def test_messages_of_known_kinds_in_another_order_are_found(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        sizes = [4, 6]
        for size in sizes + (sizes if group.rank == 0 else sizes[::-1]):
            if group.rank == 0:
                group.send(mine(group, size), 1)
            else:
                group.recv(0, out=cupy.zeros(size, np.float32))

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, mh.CollectiveMismatchError) for outcome in outcomes), outcomes
    assert "the first 4 messages from rank 0 to rank 1 of group 0 differ" in str(outcomes[0])


def test_what_the_last_comparison_finds_is_told_to_every_rank(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        cupy.cuda.Device(group.rank).use()
        shapes = [(2, 3), (3, 2)]  # alike for NCCL
        for shape in shapes + (shapes if group.rank == 0 else shapes[::-1]):
            group.all_reduce(mine(group, shape))

    outcomes = over_sockets(program, [HYBRID] * 2)
    assert all(isinstance(outcome, mh.CollectiveMismatchError) for outcome in outcomes), outcomes


def test_an_error_of_the_device_ends_the_job_and_nobodys_watch(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[bool] = []
    query = fake_cuda.event_query

    def fails(handle: int) -> int:
        return 700 if broken else query(handle)

    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", fails)

    def program(group: Group) -> None:
        group.all_reduce_async(mine(group)).synchronize()
        group.barrier()
        work = group.all_reduce_async(mine(group))
        broken.append(True)
        work.synchronize()

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, mh.AbortedError) for outcome in outcomes), outcomes
    assert "lost its GPU in all_reduce" in str(outcomes[0])
    broken.clear()


def test_calls_beside_the_stream_cannot_be_captured(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        x.get()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            cupy.begin_capture(stream)
            with pytest.raises(mh.UnsupportedError, match="CUDA graph"):
                group.all_reduce_async(x)
            cupy.end_capture(stream)

    must(gpu_world(program, 2))


def test_kinds_that_are_forgotten_are_forgotten_by_all_ranks(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.devices import calls

    monkeypatch.setattr(calls, "_MAX_KINDS", 8)

    def program(group: Group) -> None:
        for _ in range(2):
            x = mine(group)
            group.reduce(x)
            group.reduce(x)  # by a shortcut, on the root alone
            for size in range(10, 20):
                group.all_reduce_async(mine(group, size)).wait()
        group.synchronize()

    must(gpu_world(program, 2))


def test_sendrecv_meets_send_and_then_recv(gpus: FakeNccl) -> None:
    def program(group: Group) -> list[float]:
        out = cupy.zeros(4, np.float32)
        if group.rank == 0:
            group.sendrecv(mine(group), 1, 1, out=out)
        else:
            group.send(mine(group), 0)
            group.recv(0, out=out)
        return out.get().tolist()

    assert must(gpu_world(program, 2)) == [[2.0] * 4, [1.0] * 4]


def _scattered(group: Group) -> Any:
    return group.scatter_async(cupy.arange(4, dtype=np.float32) if group.rank == 0 else None, root=0)


@pytest.mark.parametrize("begin", [lambda group: group.all_reduce_async(mine(group)), _scattered])
def test_a_call_beside_the_stream_does_not_wait_for_the_others(gpus: FakeNccl, begin: Callable[[Group], Any]) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            work = begin(group)
            group.send(np.ones(2), 1)
        else:
            group.recv(0)
            work = begin(group)
        work.synchronize()

    must(gpu_world(program, 2))


def test_ranks_that_compare_differently_do_not_meet(gpus: FakeNccl) -> None:
    configs = [{**HYBRID, "gpu_check": check} for check in ("kinds", "always")]
    outcomes = over_sockets(lambda group: group.barrier(), configs)
    assert all(isinstance(outcome, mh.RendezvousError) for outcome in outcomes), outcomes


def test_the_rank_that_is_furthest_behind_is_named(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.barrier()
        if group.rank == 2:
            while not repr(group).endswith("failed>"):
                time.sleep(0.01)
            return
        for _ in range(2 - group.rank):
            group.all_reduce(x, timeout_s=1.0)
        group.synchronize()

    outcomes = gpu_world(program, 3)
    assert isinstance(outcomes[0], mh.DeadlineError), outcomes
    assert "rank 2 did not come" in str(outcomes[0])
    assert outcomes[0].peer == 2


def test_those_that_are_left_go_on_with_their_gpus(gpus: FakeNccl) -> None:
    def program(group: Group) -> list[float]:
        cupy.cuda.Device(group.rank).use()
        x = mine(group)
        try:
            group.all_reduce(x)
            if group.rank == 1:
                raise KeyError("mine")
            group.all_reduce_async(x).synchronize()
            raise AssertionError
        except mh.AbortedError:
            pass
        with group.shrink() as left:
            assert (left.world_size, left.rank) == (2, {0: 0, 2: 1}[group.rank])
            assert left.barrier() is None
            # Each rank still has the GPU that it had.
            return left.all_reduce(mine(group)).get().tolist()

    outcomes = over_sockets(program, [HYBRID] * 3)
    assert isinstance(outcomes[1], KeyError)
    assert [outcomes[0], outcomes[2]] == [[4.0] * 4] * 2


def test_what_a_root_scatters_need_not_be_contiguous(gpus: FakeNccl) -> None:
    def program(group: Group) -> list[float]:
        columns = cupy.asarray(np.arange(8, dtype=np.float32).reshape(4, 2)).T.reshape(2, 4).T if group.rank == 0 else None
        return group.scatter_async(columns, root=0).wait().get().tolist()

    rows = np.arange(8, dtype=np.float32).reshape(4, 2).T.reshape(2, 4).T
    assert must(gpu_world(program, 2)) == [rows[:2].tolist(), rows[2:].tolist()]


def test_synchronize_waits_for_copies_on_other_streams(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["cupy"]
    copyto = module.copyto

    def slow(*args: Any) -> None:
        fake_cuda.enqueue(cupy.cuda.get_current_stream().ptr, lambda: time.sleep(0.05))
        copyto(*args)

    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        out = cupy.zeros((4, 2), np.float32)[:, 0]
        with cupy.cuda.Stream(non_blocking=True):
            group.all_reduce(x, out=out)
        group.all_reduce_async(x).wait()
        group.synchronize()
        assert out._view.tolist() == [3.0] * 4, "read without waiting for any stream"

    monkeypatch.setattr(module, "copyto", slow)
    must(gpu_world(program, 2))


def test_a_batch_takes_each_array_once(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.libraries import cupy as library

    written: list[int] = []
    write = library.CuPyLibrary.write

    def counted(self: Any, out: Any) -> Any:
        written.append(1)
        return write(self, out)

    monkeypatch.setattr(library.CuPyLibrary, "write", counted)

    def program(group: Group) -> None:
        with group.coalesce() as batch:
            batch.all_reduce(mine(group), out=cupy.zeros(4, np.float32))

    must(gpu_world(program, 2))
    assert len(written) == 2


def test_a_group_that_one_rank_cannot_open_is_told_to_all(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands_nccl.backend import NcclBackend

    opened = NcclBackend.open_device

    def open_device(self: NcclBackend, channel: int, meeting: Any) -> Any:
        if channel and self.device == 1:
            raise MemoryError("no room")
        return opened(self, channel, meeting)

    monkeypatch.setattr(NcclBackend, "open_device", open_device)
    outcomes = gpu_world(lambda group: group.split(0), 2)
    assert isinstance(outcomes[1], MemoryError)
    assert isinstance(outcomes[0], mh.AbortedError), outcomes
    assert "rank 1 broke off opening the GPUs of group" in str(outcomes[0])
    assert str(outcomes[0]).endswith("with MemoryError: no room")
