"""What comes first on GPUs, who is told what, and what survives errors: on fakes, as in test_devices."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.device_worlds import HYBRID, Clock, Foreign, clock, gpu_world, gpus
from support.fake_gpu import fake_cuda
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.gpu_programs import failure_seen
from support.waiting import PATIENCE_S, until
from support.worlds import free_port, must, on_threads

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["clock", "gpus"]

NCCL = {"backend": "nccl"}


def over_sockets(program: Callable[[Group], Any], configs: list[dict[str, Any]]) -> list[Any]:
    """Run ``program`` on a rank for each config, which meet as processes do; return what each returned or raised."""
    address = f"127.0.0.1:{free_port()}"

    def body(rank: int) -> Any:
        config = {**configs[rank], "rendezvous": {"address": address}}
        with oa.init(config=config, rank=rank, world_size=len(configs), timeout_s=20) as group:
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
        failure_seen(group)
        until(work.done)  # the abort has ended the kernel
        work.synchronize()

    outcomes = gpu_world(program, 2)
    assert isinstance(outcomes[0], oa.AbortedError), outcomes


def test_messages_of_known_kinds_in_another_order_are_found(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        sizes = [4, 6]
        for size in sizes + (sizes if group.rank == 0 else sizes[::-1]):
            if group.rank == 0:
                group.send(mine(group, size), 1)
            else:
                group.recv(0, out=cupy.zeros(size, np.float32))

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes
    assert "the first 4 messages from rank 0 to rank 1 of the group of all ranks differ" in str(outcomes[0])


def test_what_the_last_comparison_finds_is_told_to_every_rank(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        cupy.cuda.Device(group.rank).use()
        shapes = [(2, 3), (3, 2)]  # alike for NCCL
        for shape in shapes + (shapes if group.rank == 0 else shapes[::-1]):
            group.all_reduce(mine(group, shape))

    outcomes = over_sockets(program, [HYBRID] * 2)
    assert all(isinstance(outcome, oa.CollectiveMismatchError) for outcome in outcomes), outcomes


def test_an_error_of_the_device_ends_the_job_and_nobodys_watch(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[bool] = []
    query = fake_cuda.event_query

    def fails(handle: int) -> int:
        return 700 if broken else query(handle)

    monkeypatch.setattr(fake_cuda, "event_query", fails)

    def program(group: Group) -> None:
        group.all_reduce_async(mine(group)).synchronize()
        group.barrier()
        work = group.all_reduce_async(mine(group))
        broken.append(True)
        work.synchronize()

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.AbortedError) for outcome in outcomes), outcomes
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
            with pytest.raises(oa.UnsupportedError, match="CUDA graph"):
                group.all_reduce_async(x)
            cupy.end_capture(stream)

    must(gpu_world(program, 2))


def test_kinds_that_are_forgotten_are_forgotten_by_all_ranks(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from oneaccord.calls.devices import calls

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
    assert all(isinstance(outcome, oa.RendezvousError) for outcome in outcomes), outcomes


def test_the_rank_that_is_furthest_behind_is_named(gpus: FakeNccl, clock: Clock) -> None:
    launched = threading.Barrier(2)

    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.barrier()
        if group.rank == 2:
            failure_seen(group)
            return
        for _ in range(2 - group.rank):
            group.all_reduce(x, timeout_s=5.0)
        launched.wait(PATIENCE_S)
        clock.advance(10.0)
        group.synchronize()

    outcomes = gpu_world(program, 3)
    assert isinstance(outcomes[0], oa.DeadlineError), outcomes
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
        except oa.AbortedError:
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
        out.get()  # the other stream does not wait for the zeros
        with cupy.cuda.Stream(non_blocking=True):
            group.all_reduce(x, out=out)
        group.all_reduce_async(x).wait()
        group.synchronize()
        assert out._view.tolist() == [3.0] * 4, "read without waiting for any stream"

    monkeypatch.setattr(module, "copyto", slow)
    must(gpu_world(program, 2))


def test_a_batch_takes_each_array_once(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from oneaccord.arrays.libraries import cupy as library

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
    from oneaccord_nccl.backend import NcclBackend

    opened = NcclBackend.open_device

    def open_device(self: NcclBackend, channel: int, meeting: Any) -> Any:
        if channel and self.device == 1:
            raise MemoryError("no room")
        return opened(self, channel, meeting)

    monkeypatch.setattr(NcclBackend, "open_device", open_device)
    outcomes = gpu_world(lambda group: group.split(0), 2)
    assert isinstance(outcomes[1], MemoryError)
    assert isinstance(outcomes[0], oa.AbortedError), outcomes
    assert "rank 1 broke off opening the GPUs of group" in str(outcomes[0])
    assert str(outcomes[0]).endswith("with MemoryError: no room")


@pytest.mark.parametrize("begun", ["all_reduce", "all_reduce_async", "coalesce"])
def test_the_default_stream_of_each_thread_is_that_of_the_caller(gpus: FakeNccl, begun: str) -> None:
    """NCCL launches on threads of its own, which have another one."""

    def program(group: Group) -> list[float]:
        with cupy.cuda.Stream.ptds:
            x = cupy.zeros(4, np.float32)
            for _ in range(5):
                x += group.rank + 1
                if begun == "all_reduce":
                    group.all_reduce(x, out=x)
                elif begun == "all_reduce_async":
                    group.all_reduce_async(x, out=x).wait()
                else:
                    with group.coalesce() as batch:
                        batch.all_reduce(x, out=x)
                        batch.all_reduce(x + 1)
                x /= 2
            return x.get().tolist()

    expected = 0.0
    for _ in range(5):
        expected = (2 * expected + 3) / 2
    assert must(gpu_world(program, 2)) == [[expected] * 4] * 2


@pytest.mark.parametrize("last", ["nothing", "captured"])
def test_synchronize_waits_for_every_stream(gpus: FakeNccl, last: str) -> None:
    def program(group: Group) -> None:
        x, empty = mine(group), cupy.zeros(0, np.float32)
        for each in (x, empty):
            group.all_reduce(each)
        x.get()
        stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with cupy.held(stream.ptr):
            with stream:
                group.all_reduce(x, out=x)
            with other:
                if last == "captured":
                    cupy.begin_capture(other)
                    group.all_reduce(empty)
                    cupy.end_capture(other)
                else:
                    group.all_reduce(empty)
            with pytest.raises(oa.DeadlineError):
                group.synchronize(timeout_s=0.2)
        group.synchronize()
        assert x._view.tolist() == [3.0] * 4

    must(gpu_world(program, 2))


def test_a_hang_on_a_stream_ends_at_the_deadline_whatever_other_streams_did_since(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x, empty = mine(group), cupy.zeros(0, np.float32)
        for each in (x, empty):
            group.all_reduce(each)
        group.synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with cupy.held(stream.ptr):
            with stream:
                group.all_reduce(x, timeout_s=0.5)
            group.all_reduce(empty)
            failure_seen(group)
        group.barrier()

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.DeadlineError) for outcome in outcomes), outcomes


@pytest.mark.parametrize("wait", [True, False])
def test_of_a_batch_that_is_refused_nothing_is_launched(gpus: FakeNccl, wait: bool) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        works = []
        batch = group.coalesce(wait=wait)
        try:
            with batch:
                works = [batch.all_reduce(x, out=x), batch.all_reduce(mine(group, dtype=np.int16))]
        except oa.UnsupportedError:
            assert wait
        for work in works:
            with pytest.raises(oa.UnsupportedError, match="int32"):
                work.wait()
        assert x.get().tolist() == [group.rank + 1.0] * 4
        assert group.all_reduce(x).get().tolist() == [3.0] * 4

    must(gpu_world(program, 2))


def test_a_batch_is_in_order_with_each_arrays_own_stream(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where some arrays are CuPy's, and others torch's, whose current stream is another one."""
    from oneaccord.arrays.libraries.cupy import CuPyLibrary

    streams: dict[int, Any] = {}

    class Other(CuPyLibrary):
        streams = "another library"

        def stream(self, device: int) -> tuple[int, Any]:
            return streams[device].ptr, streams[device]

    class Array(cupy.ndarray):
        pass

    from oneaccord.arrays import libraries

    found = libraries.library_of
    other = Other()
    monkeypatch.setattr("oneaccord.arrays.buffers.library_of", lambda value: other if type(value) is Array else found(value))

    def program(group: Group) -> list[float]:
        device = group.backend("nccl").device  # type: ignore[union-attr]
        streams[device] = cupy.cuda.Stream(non_blocking=True)
        x = mine(group)
        with streams[device]:
            base = mine(group)
        y = Array(base.data, base._view)
        for _ in range(2):
            with streams[device]:
                y += 1
            with group.coalesce() as batch:
                batch.all_reduce(x)
                batch.all_reduce(y, out=y)
            with streams[device]:
                y *= 2
        with streams[device]:
            return y.get().tolist()

    assert must(gpu_world(program, 2)) == [[44.0] * 4] * 2


def test_a_stream_may_go_once_its_work_is_done(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        handle = fake_cuda.stream_create(is_blocking=False)
        with cupy.cuda.Stream.from_external(Foreign(handle)):
            group.all_reduce(x)
        group.synchronize()
        fake_cuda.stream_destroy(handle)
        group.synchronize()

    must(gpu_world(program, 2))


def test_waiting_for_a_work_in_a_capture_is_refused_and_breaks_nothing(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        stream = cupy.cuda.Stream(non_blocking=True)
        x.get()
        work = group.all_reduce_async(x)
        with stream:
            cupy.begin_capture(stream)
            with pytest.raises(oa.UnsupportedError, match="wait before the capture"):
                work.wait()
            assert not work.done() or work.exception() is None
            cupy.end_capture(stream)
        assert work.wait().get().tolist() == [3.0] * 4
        group.barrier()

    must(gpu_world(program, 2))


@pytest.mark.filterwarnings("ignore::oneaccord.errors.GpuFallbackWarning")
def test_what_goes_through_the_host_is_there_on_every_device(gpus: FakeNccl) -> None:
    """The handle 0 of a stream means another one on each device."""

    def program(group: Group) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for step in range(10):
                x, out = mine(group) + step, cupy.zeros(4, np.float32)
                group.all_reduce_async(x, out=out).wait()
                assert out.get().tolist() == [3.0 + 2 * step] * 4

    must(gpu_world(program, 2, config={"backend": "tcp", "gpu_fallback": "host"}))


def test_no_other_gpu_is_woken(gpus: FakeNccl) -> None:
    """To make one current fills its memory with a context, also where that is only to give it back."""
    found: list[set[int]] = []

    def body() -> None:
        with oa.init(config={**NCCL, "backends": {"nccl": {"device": 2}}}, rank=0, world_size=1) as group:
            cupy.cuda.Device(2).use()
            x = mine(group)
            group.all_reduce_async(x).synchronize()
            group.scatter_async(x[:1], root=0).wait()
            with group.split(0) as other:
                other.all_reduce(x)
        found.append(fake_cuda.contexts())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [{2}]


def test_arrays_that_were_copied_are_kept_until_the_copy_is_done(gpus: FakeNccl) -> None:
    class Other:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    def program(group: Group) -> None:
        group.all_reduce(mine(group))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.zeros((4, 2), np.float32)
            array.get()
            other = Other(array[:, 0])
            known = weakref.ref(other)
            with cupy.held(stream.ptr):
                if group.world_size > 1:
                    group.all_reduce(other)
                    del other
                    gc.collect()
                    assert known() is not None

    must(gpu_world(program, 2))


# A call, and what each rank says that all must have alike.
TOLD_FIRST = {
    "root of scatter": (
        lambda group: group.scatter(cupy.zeros(3, np.float32), root=group.rank),
        ["root=0", "root=1", "root=2"],
    ),
    "root of scatter, where nobody is it": (
        lambda group: group.scatter(None, root=(group.rank + 1) % 3),
        ["root=1", "root=2", "root=0"],
    ),
    "counts of scatter": (
        lambda group: group.scatter(cupy.zeros(3, np.float32), counts=[3, 0, 0] if group.rank == 1 else [1, 1, 1]),
        [f"root=0 and counts={counts}" for counts in ([1, 1, 1], [3, 0, 0], [1, 1, 1])],
    ),
    "root of gather": (
        lambda group: group.gather(cupy.zeros(group.rank, np.float32), root=group.rank, uneven=True),
        [f"float32 rows of shape [] for root={root}" for root in range(3)],
    ),
    "rows of all_gather": (
        lambda group: group.all_gather(cupy.zeros((2, 1 + group.rank), np.float32), uneven=True),
        [f"float32 rows of shape [{width}]" for width in (1, 2, 3)],
    ),
}


@pytest.mark.parametrize("what", TOLD_FIRST)
def test_a_mismatch_of_what_ranks_tell_each_other_first_is_found_before_anything_is_launched(gpus: FakeNccl, what: str) -> None:
    program, said = TOLD_FIRST[what]
    outcomes = gpu_world(program, 3, config=NCCL)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1
    told = re.match(r"in \w+, rank (\d) has (.*), and rank (\d) has (.*)\n", str(outcomes[0]))
    assert told is not None, outcomes[0]
    one, other = int(told[1]), int(told[3])
    assert (told[2], told[4]) == (said[one], said[other])
    assert said[one] != said[other]
    assert not {"send", "recv", "broadcast", "all_gather"}.intersection(gpus.names())
