"""Who looks after calls on GPUs: deadlines, and what is known of each stream; on fakes, as in test_devices."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device_worlds import Clock, Watched, clock, gpu_world, gpus, watched
from support.fake_gpu import fake_cuda
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.gpu_programs import failure_seen
from support.waiting import PATIENCE_S
from support.worlds import must

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.calls.devices.watch import DeviceWatch, Launched
from oneaccord.contract.header import CallSignature
from oneaccord.job.group_ranks import Members
from oneaccord_nccl.backend import NcclBackend
from oneaccord_nccl.channel import NcclChannel

__all__ = ["clock", "gpus", "watched"]


def mine(group: Group, shape: Any = 4) -> Any:
    return cupy.full(shape, group.rank + 1, np.float32)


def test_what_the_host_has_seen_done_has_no_deadline_any_more(gpus: FakeNccl, clock: Clock, watched: Watched) -> None:
    """Although another stream is busy, and the thread that watches had marked the first."""

    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.synchronize()
        one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with cupy.held(one.ptr), one:
            group.all_reduce(x, timeout_s=5.0)
            watched.until_marked(group.rank, one.ptr)
        group.synchronize()
        group.barrier()  # the clock is that of all ranks
        with cupy.held(other.ptr), other:
            group.all_reduce(x, timeout_s=900.0)
            clock.advance(10.0)
            watched.until_it_looked(group.rank)
        group.synchronize()

    must(gpu_world(program, 2))


def test_calls_that_follow_postpone_no_deadline(gpus: FakeNccl, clock: Clock, watched: Watched) -> None:
    have_launched = threading.Barrier(2)

    def program(group: Group) -> None:
        x = mine(group)
        group.all_reduce(x)
        group.synchronize()
        group.barrier()
        stream = cupy.cuda.Stream(non_blocking=True)
        with cupy.held(stream.ptr), stream:
            group.all_reduce(x, timeout_s=5.0)
            watched.until_marked(group.rank, stream.ptr)
            group.all_reduce(x, timeout_s=900.0)
            have_launched.wait(PATIENCE_S)  # the clock is that of all ranks
            clock.advance(10.0)
            failure_seen(group)
        group.barrier()

    outcomes = gpu_world(program, 2)
    assert all(isinstance(outcome, oa.DeadlineError) for outcome in outcomes), outcomes
    assert "all_reduce #2 was not done" in str(outcomes[0])


def test_a_deadline_of_ranks_that_agree_is_told_once(gpus: FakeNccl) -> None:
    def program(group: Group) -> str:
        group.all_reduce(mine(group))
        if group.rank == 1:
            failure_seen(group)
            return ""
        with pytest.raises(oa.DeadlineError) as caught:
            group.all_reduce(mine(group, 7), timeout_s=0.3)
        return "".join(traceback.format_exception(caught.value))

    told = gpu_world(program, 2)[0]  # the other one's end says so as well
    assert "direct cause" not in told
    assert "During handling" not in told


def test_a_work_of_a_group_that_was_closed_meanwhile_still_gives_its_result(gpus: FakeNccl) -> None:
    def program(group: Group) -> list[float]:
        half = group.split(0)
        x = mine(half)
        half.all_reduce(x)
        x.get()
        with cupy.held(cupy.cuda.get_current_stream().ptr):
            work = half.all_reduce_async(x)
            half.close(timeout_s=0.05)
        found: list[float] = work.wait().get().tolist()
        group.barrier()
        return found

    assert must(gpu_world(program, 2)) == [[3.0] * 4] * 2


def test_a_close_waits_for_a_look_at_the_streams_of_the_group(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    record, destroy = fake_cuda.event_record, fake_cuda.stream_destroy
    looks: dict[int, threading.Event] = {}
    ends: dict[int, threading.Event] = {}
    destroyed_too_early: list[int] = []

    def recording(event: int, stream: int) -> None:
        if stream in looks and threading.current_thread().name.startswith("oneaccord-gpus-"):
            looks[stream].set()
            if ends[stream].wait(0.3):
                destroyed_too_early.append(stream)
        record(event, stream)

    def destroying(stream: int, **options: bool) -> None:
        destroy(stream, **options)
        if stream in ends:
            ends[stream].set()

    monkeypatch.setattr(fake_cuda, "event_record", recording)
    monkeypatch.setattr(fake_cuda, "stream_destroy", destroying)

    def program(group: Group) -> None:
        half = group.split(0)
        x = mine(half)
        half.all_reduce(x)
        x.get()
        stream = half._paths.devices.channel.stream
        ends[stream], looks[stream] = threading.Event(), threading.Event()
        half.all_reduce_async(x)
        assert looks[stream].wait(PATIENCE_S)
        half.close()
        assert ends[stream].wait(PATIENCE_S)
        group.barrier()

    must(gpu_world(program, 2))
    assert not destroyed_too_early


def test_a_job_that_ends_waits_for_the_close_of_its_groups(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    is_ending, is_aborted = threading.Event(), threading.Event()
    end, close, abort = DeviceWatch.close, NcclChannel.close, NcclBackend.abort

    def ending(watch: DeviceWatch) -> Any:
        is_ending.set()
        return end(watch)

    def closing(channel: NcclChannel) -> None:
        if threading.current_thread().name == "oneaccord-gpus-close":
            assert is_ending.wait(PATIENCE_S)
            is_aborted.wait(0.3)  # in vain
        close(channel)

    def aborting(backend: NcclBackend) -> None:
        abort(backend)
        is_aborted.set()

    monkeypatch.setattr(DeviceWatch, "close", ending)
    monkeypatch.setattr(NcclChannel, "close", closing)
    monkeypatch.setattr(NcclBackend, "abort", aborting)

    def program(group: Group) -> None:
        group.all_reduce(mine(group))
        with group.split(0) as half:
            half.all_reduce(mine(half))

    must(gpu_world(program, 1))
    assert is_aborted.is_set()
    assert (gpus.names().count("comm_destroy"), gpus.names().count("comm_revoke")) == (2, 0)


@pytest.mark.parametrize("call", ["all_reduce", "messages"])
def test_streams_that_are_used_once_are_not_kept_for_ever(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("oneaccord.calls.devices.calls._CHECKED", 8)

    def program(group: Group) -> int:
        x = mine(group)
        for _ in range(25):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                if call == "all_reduce":
                    group.all_reduce(x)
                elif group.rank == 0:
                    group.send(x, 1)
                else:
                    group.recv(0, out=x)
                stream.synchronize()
            group.synchronize()
        return len(group._paths.devices.latest)

    assert max(must(gpu_world(program, 2))) < 18


def test_the_default_stream_of_a_thread_cannot_be_captured(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        x.get()
        stream = cupy.cuda.Stream.ptds
        with stream:
            # Not on the legacy default stream, which nobody may look at while one that waits for it is captured.
            group.all_reduce(x, out=x)
            x.get()
            cupy.begin_capture(stream)
            with pytest.raises(oa.UnsupportedError, match="capture a stream of your own"):
                group.all_reduce(x, out=x)
            cupy.end_capture(stream)

    must(gpu_world(program, 2))


def test_a_call_that_is_launched_while_the_watch_looks_is_the_one_that_is_told_of() -> None:
    """A launch is noted once it has been made; the point that the watch records may stand behind it before that."""
    done, coming = (
        Launched(7, None, CallSignature("all_reduce", op=op), number, time.monotonic() - 1, 20.0)
        for number, op in enumerate(["sum", "max"])
    )
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group = SimpleNamespace(members=Members(0, (0, 1), 0, 1), latest={7: done}, ended={}, entered=done)
    group.unfinished = lambda: [done]

    def record(stream: int) -> Any:
        group.entered = coming  # in the other thread, which has not come back from the library yet
        return SimpleNamespace(done=lambda: False)

    group.channel = _Channel(record)
    control = SimpleNamespace(failed=False, waits_in_background=told.put)
    watch = DeviceWatch(SimpleNamespace(rank=0, closed=False, control=control))  # type: ignore[arg-type]
    watch.add(_Hashed(group))  # type: ignore[arg-type]
    watch.wake()
    wait = told.get(timeout=PATIENCE_S)
    watch.close()
    assert (wait.sequence, wait.digest) == (1, coming.signature.digest)


class _Hashed:
    def __init__(self, group: Any) -> None:
        self.__dict__ = group.__dict__


class _Channel:
    def __init__(self, record: Any) -> None:
        self.record = record
        self.is_capturing = lambda stream: False
        self.failure = self.watch = lambda: None
