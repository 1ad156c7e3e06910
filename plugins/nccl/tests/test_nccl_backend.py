"""Making the backend: which GPU a rank takes, and what the ranks compare before NCCL begins."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from support.fake_gpu import fake_cuda, fake_cupy
from support.worlds import must

from oneaccord.api import BackendUnavailableError, Collective, ConfigError, DeviceCall, DeviceFailure, UnsupportedError
from oneaccord_nccl import backend as room

SHARING = "; several ranks on one GPU need NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of all ranks"


def devices(backends):
    return [backend.device for backend in must(backends)]


def refusal(outcomes, kind=BackendUnavailableError):
    """The words of the refusal, which must be the same on all ranks."""
    assert {type(outcome) for outcome in outcomes} == {kind}
    (words,) = {str(outcome) for outcome in outcomes}
    return words


def test_the_ranks_of_a_host_take_its_gpus_in_order(start):
    assert devices(start(4)) == [0, 1, 2, 3]
    assert devices(start(6, hosts=(0, 1, 0, 1, 1, 0))) == [0, 0, 1, 1, 2, 2]


def test_the_config_chooses_the_gpu(start):
    assert devices(start(2, configs=[{"device": 3}, {"device": 0}])) == [3, 0]


def test_more_ranks_than_gpus_are_refused_with_the_ways_out(start, monkeypatch):
    assert refusal(start(5)) == (
        "rank 4 cannot use NCCL: this process sees 4 GPUs, and is number 4 of the ranks of its host, counted from 0: start as many ranks on a "
        "host as it has GPUs, or show each rank its own by CUDA_VISIBLE_DEVICES" + SHARING
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    assert "this process sees 4 GPUs (CUDA_VISIBLE_DEVICES=0,1,2,5), and is number 4" in refusal(start(5))


def test_ranks_that_were_each_shown_one_gpu_take_it(start, monkeypatch):
    fake_cuda.start_up(1)
    own = threading.local()
    numbers = iter([3, 1, 0, 2])

    def uuid(device, *, is_whole=False):
        own.uuid = getattr(own, "uuid", None) or bytes([*bytes(15), next(numbers)])
        return own.uuid

    monkeypatch.setattr(fake_cuda, "uuid", uuid)
    assert devices(start(4)) == [0] * 4


def test_two_ranks_on_one_gpu_are_refused_before_nccl_begins(start, nccl):
    fake_cuda.start_up(1)
    words = (
        "ranks 0 and 1 have the same GPU, 0000:01:00: start as many ranks on a host as it has GPUs, show each rank its own by "
        "CUDA_VISIBLE_DEVICES, or give each its number as backends.nccl.device"
    )
    assert refusal(start(3)) == words + SHARING
    fake_cuda.start_up(4)
    assert refusal(start(2, configs=[{"device": 2}, {"device": 2}])) == words.replace(":01:", ":03:") + SHARING
    nccl.version = 22907
    assert refusal(start(2, configs=[{"device": 0}, {"device": 0}])) == (
        words + "; several ranks on one GPU need NCCL 2.30.3 or newer, and the installed version is 2.29.7"
    )
    assert nccl.names() == []


def test_one_number_of_a_gpu_on_two_hosts_is_two_gpus(start):
    assert devices(start(2, hosts=(0, 1))) == [0, 0]


def test_ranks_share_gpus_where_nccl_is_told_to(start, nccl, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert devices(start(6)) == [0, 1, 2, 3, 0, 1]
    nccl.version = 22907
    assert "needs" not in refusal(start(6))


@pytest.mark.parametrize(("config", "sharing", "expected"), [({}, False, None), ({}, True, 4), ({"max_ctas": 7}, True, 7)])
def test_the_kernels_of_ranks_that_share_a_gpu_are_small(world, nccl, monkeypatch, start, config, sharing, expected):
    if sharing:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        fake_cuda.start_up(1)
    assert [backend._max_ctas for backend in must(start(2, configs=[config] * 2))] == [expected] * 2


def test_a_gpu_that_is_not_there_is_refused_on_all_ranks(start):
    assert refusal(start(2, configs=[{}, {"device": 4}])) == (
        "rank 1 cannot use NCCL: backends.nccl.device is 4, and this process sees 4 GPUs, counted from 0"
    )


def test_a_host_without_gpus_is_refused_on_all_ranks(start):
    fake_cuda.start_up(0)
    assert refusal(start(2)) == "rank 0 cannot use NCCL: CUDA: cudaErrorNoDevice: no CUDA-capable device is detected"


def test_different_limits_of_kernels_are_refused(start):
    words = refusal(start(2, configs=[{}, {"max_ctas": 8}]), ConfigError)
    assert words == "backends.nccl.max_ctas is None on rank 0 and 8 on rank 1: set the same value on all ranks"


def test_different_dtypes_of_sums_are_refused(start):
    words = refusal(start(2, configs=[{}, {"accumulate": "float32"}]), ConfigError)
    assert words == "backends.nccl.accumulate is dtype on rank 0 and float32 on rank 1: set the same value on all ranks"


def test_different_versions_of_nccl_are_refused(start, nccl, monkeypatch):
    versions = iter([22907, 23203])
    monkeypatch.setattr(nccl, "get_version", lambda: next(versions))
    words = refusal(start(2)).replace("2.32.3", "X").replace("2.29.7", "X")  # whichever rank asks first
    assert words == (
        "rank 0 has NCCL X and rank 1 has X, and NCCL connects ranks of the same version only: install the same nvidia-nccl-cu12 or "
        "nvidia-nccl-cu13 for all ranks"
    )


def test_reductions_of_float8_need_the_right_gpu_on_every_rank(start, monkeypatch):
    describe = fake_cupy.cuda.runtime.getDeviceProperties
    minors = {0: (9, 0), 1: (8, 9)}

    def properties(device):
        major, minor = minors[device]
        return {**describe(device), "major": major, "minor": minor}

    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceProperties", properties)
    assert [backend._abilities.capability for backend in must(start(2))] == [(8, 9)] * 2


def test_arrays_of_the_host_are_refused_with_the_way_out(start):
    (backend,) = must(start(1))
    assert backend.memory == {"cuda"}
    with pytest.raises(UnsupportedError) as caught:
        backend.open_transport(0)
    assert str(caught.value) == (
        'the backend nccl moves GPU memory only; for host arrays, set backend = "hybrid" with routes = { cpu = "tcp", cuda = "nccl" }'
    )


@pytest.mark.parametrize(("config", "limit"), [({}, -2147483648), ({"max_ctas": 3}, 3)])
def test_communicators_have_the_limit_of_the_config(world, nccl, config, limit):
    world(lambda rank: None, 2, configs=[config] * 2)
    assert {found.max_ctas for found in nccl._ranks.values()} == {limit}


@pytest.mark.parametrize(("version", "config", "variable"), [(23100, True, None), (22600, False, "1"), (22500, False, None)])
def test_kernels_of_several_groups_run_in_the_order_of_their_launches_where_nccl_can(
    world, nccl, monkeypatch, version, config, variable
):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")  # what is set from here on goes when the test ends
    nccl.version = version
    world(lambda rank: None, 2)
    assert {found.is_ordered for found in nccl._ranks.values()} == {config}
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == variable


@pytest.fixture
def instances(nccl, monkeypatch):
    """Let all devices be MIG instances of one GPU, of which NCCL sees the GPU alone."""
    describe = fake_cupy.cuda.runtime.getDeviceProperties
    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceProperties", lambda device: describe(device) | {"pciBusID": 1})
    monkeypatch.setattr(
        fake_cuda, "uuid", lambda device, *, is_whole=False: bytes([*bytes(14), 1, 0 if is_whole else device + 1])
    )
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")  # what is set from here on goes when the test ends
    monkeypatch.setattr(room, "_set_here", set())


def summed(rank):
    array = rank.put(np.full(4, rank.number + 1, "f4"))
    rank.run(rank.channel.prepare(DeviceCall(Collective.ALL_REDUCE, array.dtype, 4, op="sum")), array, array)
    return array.get().tolist()


def test_ranks_have_an_instance_of_one_gpu_each(instances, world, nccl):
    assert world(summed, 3) == [[6] * 4] * 3
    assert {found.max_ctas for found in nccl._ranks.values()} == {-2147483648}, "instances share no multiprocessors"


def test_two_ranks_on_one_instance_are_refused_whatever_instances_needed_before(instances, start):
    assert devices(start(4)) == [0, 1, 2, 3]
    fake_cuda.start_up(1)
    assert refusal(start(2)) == (
        "ranks 0 and 1 have the same MIG instance of GPU 0000:01:00: a process sees one instance, the first that CUDA_VISIBLE_DEVICES names, so set "
        "that to another one for each rank, before it uses CUDA"
    )


def test_instances_of_one_gpu_need_a_version_of_nccl_that_connects_them(instances, start, nccl):
    nccl.version = 23007
    assert refusal(start(2)) == (
        "ranks 0 and 1 have MIG instances of one GPU, 0000:01:00, which NCCL connects only from 2.31 on; the installed version is 2.30.7: install a newer "
        "nvidia-nccl-cu12 or nvidia-nccl-cu13, or give each rank a GPU of its own"
    )
    assert devices(start(2, hosts=(0, 1))) == [0, 0]


def test_a_switch_of_nccl_that_the_user_has_set_stays(instances, outcomes, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert {type(outcome) for outcome in outcomes(summed, 2)} == {DeviceFailure}


def test_closing_a_backend_ends_what_was_left_open(world, nccl):
    def body(rank):
        rank.backend.close()
        rank.backend.close()
        rank.channel.close()

    world(body, 2)
    assert nccl.names().count("comm_revoke") == 2


def test_a_closed_channel_is_not_aborted(world, nccl):
    def body(rank):
        rank.channel.close()
        rank.backend.abort()
        rank.backend.close()

    world(body, 2)
    assert "comm_abort" not in nccl.names()


def test_a_rank_without_nccl_is_refused_on_all_ranks(start, monkeypatch):
    load = room._nccl.load
    ranks = iter([True, False])

    def missing():
        if next(ranks):
            return load()
        raise BackendUnavailableError("nccl4py cannot be imported (no reason)")

    monkeypatch.setattr(room._nccl, "load", missing)
    assert "cannot use NCCL: nccl4py cannot be imported (no reason)" in refusal(start(2))
