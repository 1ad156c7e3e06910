"""What fails, hangs or is aborted, and that it ends in bounded time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.fake_gpu import fake_cuda, fake_cupy
from support.waiting import until
from support.worlds import must, on_threads

from oneaccord.api import Collective, Deadline, DeviceCall, DeviceFailure, DeviceMeeting
from oneaccord_nccl import communicator, plugin
from oneaccord_nccl._cuda import load as load_cuda
from oneaccord_nccl.communicator import destroy_revoked

F4 = np.dtype("f4")
SUM = DeviceCall(Collective.ALL_REDUCE, F4, 4, op="sum")
ABORTED = "NCCL 2.32.3: the communicator cannot be used any more: the job was aborted"


def ones(rank):
    return rank.put(np.full(4, rank.number + 1, "f4"))


def ends():
    """The threads that end communicators."""
    return [thread for thread in threading.enumerate() if thread.name == "oneaccord nccl end"]


def aborting(nccl, backend, name):
    """Abort a backend, from another thread, once both ranks have made a call of NCCL's; return that thread."""

    def abort():
        until(lambda: nccl.names().count(name) == 2)
        backend.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    return thread


def test_an_abort_ends_a_kernel_that_waits_for_a_rank(world, nccl):
    launched = threading.Barrier(2)

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)
        if rank.number == 0:
            rank.run(launch, array, array)  # rank 1 never makes this call
        launched.wait(20)
        rank.backend.abort()
        rank.backend.abort()
        fake_cuda.stream_synchronize(0)
        with pytest.raises(DeviceFailure) as caught:
            rank.run(launch, array, array)
        return str(caught.value), rank.channel.failure()

    assert world(body, 2) == [(ABORTED, None)] * 2
    join_ends()
    assert (nccl.names().count("comm_revoke"), nccl.open_communicators()) == (2, 2)
    destroy_revoked()  # as once the survivors have met
    join_ends()
    assert (nccl.names().count("comm_abort"), nccl.open_communicators()) == (0, 0)


def test_older_versions_abort_at_once(world, nccl):
    nccl.version = 22800

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)
        fake_cuda.stream_synchronize(0)
        rank.backend.abort()

    world(body, 1)
    join_ends()
    assert (nccl.names().count("comm_revoke"), nccl.names().count("comm_abort"), nccl.open_communicators()) == (0, 1, 0)


def test_a_new_group_gives_back_what_those_before_it_revoked(world, start, nccl):
    world(lambda rank: rank.backend.abort(), 2)
    join_ends()
    assert nccl.open_communicators() == 2
    world(lambda rank: None, 2)
    join_ends()
    assert nccl.open_communicators() == 0


def test_an_abort_ends_a_launch_that_still_connects(world, nccl):
    nccl.hanging.add("connect")

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        thread = aborting(nccl, rank.backend, "all_reduce")
        with pytest.raises(DeviceFailure) as caught:
            rank.run(launch, array, array)
        thread.join()
        return str(caught.value)

    assert world(body, 2) == ["NCCL 2.32.3: the communicator was aborted: the job was aborted"] * 2


def test_a_launch_that_others_never_make_ends_by_the_jobs_timeout(world, nccl):
    nccl.hanging.add("connect")

    def body(rank):
        array = ones(rank)
        rank.channel._communicator._patience_s = 0.05
        with pytest.raises(TimeoutError) as caught:
            rank.run(rank.channel.prepare(SUM), array, array)
        return str(caught.value), rank.channel.failure()

    words = "NCCL 2.32.3: not launched within 0.05 s: another rank did not make this call, or cannot be reached, or this GPU has too much to do"
    assert world(body, 2) == [(words, None)] * 2


def opening(start, nccl, timeouts_s, meanwhile=lambda backend: None):
    backends = must(start(2))
    unique_id = b"\0" + bytes(nccl.get_unique_id())

    def enter(number):
        meanwhile(backends[number])
        meeting = DeviceMeeting([0, 1], number, lambda name, card: [unique_id, b""], Deadline(timeouts_s[number]))
        return backends[number].open_device(0, meeting)

    return on_threads(enter, 2)


def join_ends():
    for thread in filter(threading.Thread.is_alive, ends()):
        thread.join(20)


def until_given_back(nccl):
    """Wait until the two ranks have revoked what came up too late, and then have given it back: one of them may have used it by then."""
    until(lambda: nccl.names().count("comm_revoke") == 2)
    until(lambda: len(communicator._revoked) == 2)
    destroy_revoked()
    until(lambda: nccl.open_communicators() == 0)
    assert "comm_abort" not in nccl.names()


def test_a_communicator_that_never_comes_up_ends_by_the_deadline(start, nccl):
    nccl.hanging.add("comm_init")
    for outcome in opening(start, nccl, (0.05, 0.05)):
        assert isinstance(outcome, TimeoutError)
        assert str(outcome) == "NCCL 2.32.3: the ranks did not meet within 0.05 s"
    assert nccl.open_communicators() == 0
    nccl.release()  # they come up too late
    until_given_back(nccl)


def test_an_abort_ends_a_communicator_that_comes_up(start, nccl):
    nccl.hanging.add("comm_init")
    threads = []
    for outcome in opening(
        start, nccl, (20, 20), lambda backend: threads.append(aborting(nccl, backend, "comm_init_rank_config"))
    ):
        assert isinstance(outcome, DeviceFailure)
        assert str(outcome) == ABORTED
    for thread in threads:
        thread.join()
    nccl.release()
    until_given_back(nccl)


def test_nothing_comes_up_after_an_abort(start, nccl):
    for outcome in opening(start, nccl, (20, 20), lambda backend: backend.abort()):
        assert isinstance(outcome, DeviceFailure)
        assert str(outcome) == "NCCL 2.32.3: the job was aborted"
    assert "comm_init_rank_config" not in nccl.names()


def test_a_failure_of_nccl_to_come_up_is_told(start, nccl):
    nccl.refuse("comm_init_rank_config", 2)

    def after_the_first(backend):
        if backend.device:
            until(lambda: "comm_init_rank_config" in nccl.names())

    failure, late = opening(start, nccl, (20, 0.05), after_the_first)
    assert (type(failure), type(late)) == (DeviceFailure, TimeoutError)
    assert str(failure) == "NCCL 2.32.3: SystemError (2): unhandled system error (run with NCCL_DEBUG=INFO for details)"
    join_ends()


def test_all_ranks_learn_that_the_first_cannot_make_an_id(outcomes, nccl):
    nccl.refuse("get_unique_id", 2)
    found = outcomes(lambda rank: None, 3)
    words = "NCCL 2.32.3: SystemError (2): unhandled system error (run with NCCL_DEBUG=INFO for details)"
    assert [(type(each), str(each), each.is_remote) for each in found] == [
        (DeviceFailure, words, rank != 0) for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("status", "said", "is_remote"),
    [
        (6, "NCCL 2.32.3: remote process exited or there was a network error", True),
        (1, "NCCL 2.32.3: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        (8, "NCCL 2.32.3: operation timed out", True),
        (10, "NCCL 2.32.3: unknown result code", False),
    ],
)
def test_an_asynchronous_error_is_found_by_whoever_looks(world, nccl, status, said, is_remote):
    together = threading.Barrier(2)

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)
        fake_cuda.stream_synchronize(0)
        before = rank.channel.failure()
        together.wait(20)
        if rank.number == 1:
            nccl.fail(1, status)
        together.wait(20)
        found = rank.channel.failure()
        together.wait(20)
        rank.backend.abort()
        return before, found and (found.reason, found.is_remote)

    assert world(body, 2) == [(None, None), (None, (said, is_remote))]


def test_a_launch_raises_an_asynchronous_error(world, nccl):
    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)
        fake_cuda.stream_synchronize(0)
        nccl.fail(0, 6)
        with pytest.raises(DeviceFailure, match="RemoteError") as caught:
            rank.run(launch, array, array)
        rank.backend.abort()
        return caught.value.is_remote, rank.channel.failure() is caught.value

    assert world(body, 1) == [(True, True)]


def test_an_error_that_the_binding_does_not_know_is_a_failure(world, nccl):
    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        nccl.refuse("all_reduce", 10)
        with pytest.raises(DeviceFailure, match=r"NCCL 2\.32\.3: 10 is not a valid Result"):
            rank.run(launch, array, array)

    world(body, 1)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_call_that_nccl_refuses_is_a_failure_and_the_next_one_may_work(world, nccl, grouped):
    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)

        def launch_again():
            if not grouped:
                return rank.run(launch, array, array)
            with rank.channel.together():
                rank.run(launch, array, array)
            return None

        nccl.refuse("all_reduce", 3)
        with pytest.raises(DeviceFailure) as caught:
            launch_again()
        launch_again()
        return str(caught.value), rank.channel.failure() is caught.value, array.get().tolist()

    words = "NCCL 2.32.3: InternalError (3): internal error - please report this issue to the NCCL developers"
    assert world(body, 1) == [(words, True, [1.0] * 4)]


def test_an_uneven_call_that_fails_half_way_closes_its_group(world, nccl):
    def body(rank):
        source, target, array = rank.put(np.ones(3, "f4")), rank.empty(3, F4), ones(rank)
        call = DeviceCall(Collective.ALL_TO_ALL, F4, 3, counts=(3,), receive_counts=(3,))
        launch = rank.channel.prepare(call)
        nccl.refuse("recv", 4)
        with pytest.raises(DeviceFailure, match="InvalidArgument"):
            rank.run(launch, source, target)
        rank.run(launch, source, target)
        rank.run(rank.channel.prepare(SUM), array, array)
        return target.get().tolist(), array.get().tolist()

    assert world(body, 1) == [([1.0] * 3, [1.0] * 4)]


def test_an_abort_that_hangs_in_nccl_is_left_alone_and_said(world, nccl, monkeypatch):
    monkeypatch.setattr(communicator, "_END_S", 0.05)
    nccl.hanging.add("comm_revoke")
    said, words = threading.Event(), []

    def warning(text, *values):
        words.append(text % values)
        said.set()

    monkeypatch.setattr(communicator._log, "warning", warning)

    def body(rank):
        rank.backend.abort()
        rank.channel.close()  # comes back
        return nccl.open_communicators()

    assert world(body, 1) == [1]
    assert said.wait(20)
    nccl.release()
    join_ends()
    assert words == ["NCCL 2.32.3: ending a communicator hangs, and is left alone"]


def test_a_process_that_exits_waits_for_what_ends(world, nccl, monkeypatch):
    monkeypatch.setattr(communicator, "_END_S", 30.0)
    nccl.hanging.add("comm_revoke")

    def body(rank):
        rank.backend.abort()
        threading.Timer(0.05, nccl.release).start()
        plugin._finish()
        return any(end.is_alive() for end in ends())

    assert world(body, 1) == [False]


def test_a_process_that_exits_leaves_an_abort_alone_that_hangs(world, nccl, monkeypatch):
    monkeypatch.setattr(communicator, "_END_S", 0.05)
    nccl.hanging.add("comm_revoke")

    def body(rank):
        rank.backend.abort()
        plugin._finish()  # comes back
        return nccl.open_communicators()

    assert world(body, 1) == [1]
    nccl.release()
    join_ends()


def test_an_interpreter_that_refuses_threads_can_end(world, nccl, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def body(rank):
        with monkeypatch.context() as patch:
            patch.setattr(communicator.threading.Thread, "start", refuse)
            rank.backend.abort()
            rank.channel.close()

    world(body, 1)
    assert nccl.open_communicators() == 1


def test_a_communicator_that_cannot_be_closed_well_is_aborted(world, nccl, monkeypatch, caplog):
    nccl.refuse("comm_finalize", 2)
    world(lambda rank: None, 1)
    join_ends()
    assert (nccl.names().count("comm_abort"), nccl.open_communicators()) == (1, 0)
    words = "NCCL 2.32.3: closing a communicator failed, so that it is aborted: SystemError (2): unhandled system error (run with NCCL_DEBUG=INFO for details)"
    assert caplog.messages == [words]


def test_closing_comes_back_from_a_communicator_that_does_not_end(world, nccl, monkeypatch):
    monkeypatch.setattr(communicator, "_END_S", 0.05)
    nccl.hanging.add("comm_finalize")
    world(lambda rank: None, 2)
    assert nccl.open_communicators() == 2
    nccl.release()
    join_ends()
    assert nccl.open_communicators() == 0


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_a_graph_that_lives_does_not_hold_up_the_end_of_a_group(world, nccl, monkeypatch, caplog, ending):
    monkeypatch.setattr(communicator, "_CAPTURED_S", 0.05)
    graphs = []

    def body(rank):
        launch, array = rank.channel.prepare(SUM), ones(rank)
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        fake_cuda.stream_synchronize(0)
        rank.run(launch, array, array, stream.ptr)
        stream.begin_capture()
        rank.run(launch, array, array, stream.ptr)
        graphs.append(stream.end_capture())
        stream.synchronize()
        if ending == "abort":
            rank.backend.abort()
        rank.channel.close()
        plugin._finish()  # a process that exits does not wait for it

    world(body, 2)
    if ending == "abort":
        destroy_revoked()
    assert nccl.open_communicators() == 2
    graphs.clear()
    join_ends()
    assert nccl.open_communicators() == 0
    words = "NCCL 2.32.3: a CUDA graph holds calls of this group, and NCCL gives the group's memory back when the graph is gone: drop graphs before closing the group"
    assert caplog.messages == [words] * 2


@pytest.mark.parametrize("version", [23203, 22800])
def test_an_abort_frees_a_launch_that_is_stuck_in_a_full_queue(world, nccl, monkeypatch, version):
    nccl.version = version
    kernel = threading.Barrier(2)
    monkeypatch.setattr(communicator, "_LOCK_S", 0.05)  # in vain

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)
        rank.run(launch, array, array)
        fake_cuda.stream_synchronize(0)
        kernel.wait(20)
        nccl.hanging.add("all_reduce")
        stuck = threading.Thread(target=rank.run, args=(launch, array, array))
        stuck.start()
        until(lambda: nccl.names().count("all_reduce") == 4)
        rank.backend.abort()
        if version < 22900:
            join_ends()
            nccl.release()
        stuck.join(20)
        return stuck.is_alive()

    assert world(body, 2) == [False] * 2
    revoked, aborted = nccl.names().count("comm_revoke"), nccl.names().count("comm_abort")
    if version < 22900:  # there is no other way, and no other thread to be asked
        assert (revoked, aborted) == (0, 2)
        nccl.crimes.clear()
    else:
        assert (revoked, aborted) == (2, 0)


def test_a_device_that_has_failed_is_a_failure_of_events(world):
    def body(rank):
        event = rank.channel.record(0)
        fake_cupy.enqueue(0, lambda: fake_cuda.view(1, 1))  # an illegal address
        with pytest.raises(fake_cupy.CUDARuntimeError):
            fake_cuda.stream_synchronize(0)
        found = []
        for call in (event.done, lambda: rank.channel.record(0)):
            with pytest.raises(DeviceFailure) as caught:
                call()
            found.append(str(caught.value))
        fake_cupy.forgive()
        return found

    words = "CUDA: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    assert world(body, 1) == [[words, words]]


def test_an_unknown_stream_is_a_failure(world):
    def body(rank):
        for call in (lambda: rank.channel.record(12345), lambda: rank.channel.is_capturing(12345)):
            with pytest.raises(DeviceFailure, match="CUDA: CUDA_ERROR_INVALID_HANDLE"):
                call()

    world(body, 1)


def test_a_helper_leaves_the_device_that_a_thread_had(nccl):
    cuda = load_cuda()
    fake_cuda.set_device(1)
    with pytest.raises(DeviceFailure, match="CUDA_ERROR_INVALID_DEVICE"), cuda.on(9):
        raise AssertionError
    with cuda.on(2):
        assert fake_cuda.get_device() == 2
    assert fake_cuda.get_device() == 1
    fake_cuda.set_device(0)


def test_the_error_of_a_block_is_told_although_its_group_is_never_launched(world, nccl):
    nccl.hanging.add("connect")

    def body(rank):
        array, launch = ones(rank), rank.channel.prepare(SUM)

        def broken_off():
            with rank.channel.together():
                rank.run(launch, array, array)
                rank.channel._communicator._patience_s = 0.05  # for the end of the block
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            broken_off()

    world(body, 1)
