"""Programs of torch's in a simulated world: results, time and chance follow from the seed, and failures name their lines."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from oneaccord.errors import CollectiveMismatchError, DeadlockError, UnsupportedError
from oneaccord_simulated import Kill, run

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent


def line_of(mark):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{next(number for number, line in enumerate(lines, 1) if line.endswith('# ' + mark))}"


@pytest.fixture
def dist():
    """torch.distributed with our backend, as for a program that imports both before the world begins.

    No rank may wait in C++ for what others do: the world would stand still.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("oneaccord_torch")
    torch.set_num_threads(1)
    return torch.distributed


def backward(dist, step):
    """Do a step of DDP; the calls in it are those of this line of `step`."""
    import torch

    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    step(module(torch.ones(2, 3)).sum())
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "kind"), [("mismatch", CollectiveMismatchError), ("deadlock", DeadlockError), ("skipped", DeadlockError)]
)
def test_a_planted_failure_of_ddp_is_told_with_the_lines_of_its_ranks(dist, case, kind):
    import torch

    def program(group):
        dist.init_process_group("oneaccord")

        def step(loss):
            if group.rank == 1 and case == "mismatch":
                dist.all_reduce(torch.ones(7))  # mismatch
            if group.rank == 1 and case == "deadlock":
                dist.recv(torch.ones(7), 0)  # deadlock
            if group.rank == 0 or case != "skipped":
                loss.backward()  # backward

        backward(dist, step)

    done = run(program, 3, check=False)
    words = str(done.cause)
    assert f"{kind.__name__}: " in f"{type(done.cause).__name__}: {words}"
    assert line_of("backward") in words
    assert case == "skipped" or line_of(case) in words


def test_a_fault_plan_kills_a_rank_within_a_backward_pass(dist):
    def program(_):
        dist.init_process_group("oneaccord")
        backward(dist, lambda loss: loss.backward())

    done = run(program, 3, faults=Kill(rank=2, operation="all_reduce", nth=0), check=False)
    assert sorted(done.errors) == [0, 1]
    assert all("PeerLostError: rank 2 was lost" in f"{type(error).__name__}: {error}" for error in done.errors.values())


@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1:1", "file:///nowhere"])
def test_ranks_meet_in_their_world_and_share_a_store_whose_waits_take_its_time(dist, init_method):
    def program(group):
        dist.init_process_group("oneaccord", init_method=init_method, rank=group.rank, world_size=group.world_size)
        store = dist.distributed_c10d._get_default_store()
        if group.rank == 0:
            group.compute(5.0)
            store.set("there", "yes")
        assert (store.get("there"), store.add("count", 1) > 0) == (b"yes", True)
        if group.rank == 1:
            with pytest.raises(dist.DistStoreError, match=r"no rank has set .*never in torch's store within 3 s"):
                store.wait(["never"], timedelta(seconds=3))
        dist.destroy_process_group()

    assert run(program, 3).duration_s == 8.0
    assert not dist.is_initialized()


def test_ranks_do_not_find_each_others_shards_in_torchs_caches(dist):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    def program(_):
        dist.init_process_group("oneaccord")
        mesh = dist.init_device_mesh("cpu", (2, 2))
        whole = torch.arange(35.0).reshape(7, 5)
        columns = distribute_tensor(whole, mesh, [Shard(1), Shard(1)]).redistribute(placements=[Shard(0), Shard(1)])
        assert torch.equal(columns.full_tensor(), whole)
        dist.destroy_process_group()
        return tuple(columns.to_local().shape)

    assert run(program, 4).results == [(4, 3), (4, 2), (3, 3), (3, 2)]


@pytest.mark.parametrize("backend", ["gloo", "cpu:oneaccord,cuda:gloo", None])
def test_groups_of_other_backends_are_refused(dist, backend):
    def program(_):
        dist.init_process_group("oneaccord")
        with pytest.raises(UnsupportedError, match="a simulated world has torch's groups of oneaccord alone"):
            dist.new_group(backend="gloo")
        dist.destroy_process_group()
        with pytest.raises(UnsupportedError, match="name 'oneaccord' in init_process_group"):
            dist.init_process_group(backend)

    run(program, 2)


def test_a_future_waits_for_a_call_that_another_rank_makes_late(dist):
    import torch

    def program(group):
        dist.init_process_group("oneaccord")
        if group.rank == 0:
            group.compute(1.0)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        (total,) = work.get_future().then(lambda future: future.value()).wait()
        dist.destroy_process_group()
        return total.tolist()

    done = run(program, 2)
    assert (done.results, done.duration_s) == ([[2.0] * 3] * 2, 1.0)


def launch(backend, folder, **variables):
    command = [sys.executable, "-m", "oneaccord", "run", "-n", "4", "--backend", backend, HERE / "training.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables, cwd=folder, check=False, timeout=55
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_unchanged_training_gives_what_it_gives_on_processes_and_one_trace_for_a_seed(tmp_path):
    expected = sorted(launch("shm", tmp_path).splitlines())
    assert len(expected) == 4
    network, traces = {"ONEACCORD_BACKENDS__SIMULATED__NETWORK": "fat-tree"}, []
    for _ in range(2):
        assert (
            sorted(launch("simulated", tmp_path, ONEACCORD_BACKENDS__SIMULATED__TRACE="t.json", **network).splitlines())
            == expected
        )
        traces.append((tmp_path / "t.json").read_bytes())
    assert traces[0] == traces[1]
