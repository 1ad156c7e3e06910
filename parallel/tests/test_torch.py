"""Modules of torch: their gradients are averaged in the backward pass. `make test-peers` runs it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.gradient_oracles import canonical, mean, same_bits
from support.peer_worlds import run_ranks
from support.worlds import must, thread_world

import oneaccord_parallel as mp
from oneaccord.errors import LayoutError, PeerLostError, UnsupportedError, UsageError
from oneaccord_simulated import Kill

pytestmark = pytest.mark.peers


def network(seed=0):
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 5)
            self.shared = nn.Linear(5, 5)
            self.rare = nn.Linear(5, 5)
            self.never = nn.Linear(2, 2)
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
            self.last = nn.Linear(5, 1)

        def forward(self, x, rare=False):
            x = torch.tanh(self.first(x))
            x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
            if rare:
                x = self.rare(x)
            return self.last(self.frozen(x))

    generator = torch.Generator().manual_seed(seed)
    module = Net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def data(rank, step=0, rows=None):
    import torch

    rng = np.random.default_rng((rank, step))
    return torch.from_numpy(rng.standard_normal((rows or rank + 2, 6)).astype("f4"))


def alone(rank, step=0, rare=False, seed=0):
    """The gradients of one rank's batch, by name."""
    module = network(seed)
    module(data(rank, step), rare).square().mean().backward()
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def grads(module):
    return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", ["simulated", "shm", "tcp"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_bits_are_those_of_one_process(backend, world_size, set_to_none):
    def program(group):
        module = network(seed=group.rank)
        sync = mp.torch.data_parallel(module, group, bucket_bytes=100, first_bucket_bytes=30)
        found = []
        for step in range(3):
            module.zero_grad(set_to_none=set_to_none)
            with sync.step(weight=group.rank + 2):
                module(data(group.rank, step)).square().mean().backward()
            found.append(grads(module))
        module.zero_grad(set_to_none=set_to_none)
        module(data(group.rank, 3)).square().mean().backward()  # weight 1
        return [*found, grads(module)]

    for found in must(thread_world(program, world_size, backend)):
        for step, each in enumerate(found):
            ranks = [alone(rank, step) for rank in range(world_size)]
            weights = [rank + 2 for rank in range(world_size)] if step < 3 else [1] * world_size
            assert set(each) == set(ranks[0])
            for name, value in each.items():
                assert same_bits(value, mean([rank[name] for rank in ranks], weights)), (step, name)


def test_paused_passes_add_up(world):
    counts = [2, 0, 1]

    def program(group, bare):
        module = network()
        sync = mp.torch.data_parallel(module, group, first_bucket_bytes=50)
        for _ in range(2):
            module.zero_grad()
            for micro in range(counts[group.rank] + 1):
                pause = sync.paused() if micro < counts[group.rank] else contextlib.nullcontext()
                block = contextlib.nullcontext() if bare else sync.step(weight=micro + 2)
                with pause, block:
                    module(data(group.rank, micro), rare=micro == 1).square().mean().backward()
        return grads(module)

    for bare in (True, False):
        weights = [[1 if bare else micro + 2 for micro in range(count + 1)] for count in counts]
        total = np.float32(sum(map(sum, weights)))
        for found in world(3).run(program, bare).results:
            for name, value in found.items():
                sums = []
                for rank, each in enumerate(weights):
                    whole = np.zeros_like(value)
                    for micro, weight in enumerate(each):
                        part = alone(rank, micro, rare=micro == 1).get(name)
                        whole = whole if part is None else whole + part * np.float32(weight)
                    sums.append(whole)
                assert same_bits(value, canonical(sums) / total), name


def test_what_no_rank_uses_keeps_what_it_had_and_a_rank_without_data_gets_all(world):
    def program(group):
        import torch

        module = network()
        sync = mp.torch.data_parallel(module, group)
        module.never.weight.grad = kept = torch.full((2, 2), 3.0)
        for _ in range(2):
            with sync.step(weight=group.rank):
                if group.rank:
                    module(data(group.rank), rare=group.rank == 2).square().mean().backward()
        assert module.never.weight.grad is kept
        assert kept.tolist() == [[3.0, 3.0]] * 2
        assert module.never.bias.grad is None
        assert module.frozen.weight.grad is None
        before = module.rare.weight.grad.tolist()
        module(data(group.rank)).square().mean().backward()
        assert module.rare.weight.grad.tolist() == before
        return module.rare.weight.grad.numpy().copy()

    wanted = [np.zeros((5, 5), "f4"), np.zeros((5, 5), "f4"), alone(2, rare=True)["rare.weight"]]
    first = mean(wanted, [0, 1, 2])
    for found in world(3).run(program).results:  # the second pass came on top of the first
        np.testing.assert_allclose(found, first * 2 / 3 + first, rtol=1e-5)


def test_gradients_are_views_of_buckets_and_of_the_new_ones_when_these_change(world):
    def program(group):
        module = network()
        sync = mp.torch.data_parallel(module, group, first_bucket_bytes=30, bucket_bytes=60)
        for _ in range(3):
            module.zero_grad(set_to_none=False)
            with sync.step():
                module(data(group.rank)).square().mean().backward()
            homes = {view.data_ptr() for bucket in sync._buckets for view in bucket.views.values()}
            assert all(p.grad.data_ptr() in homes for p in module.parameters() if p.grad is not None)
        gradients = sum(p.numel() for p in module.parameters() if p.requires_grad)
        marks = sum(1 for p in module.parameters() if p.requires_grad)
        return sync.memory.current == 4 * (gradients + marks)

    assert all(world(2).run(program).results)


def test_parameters_and_buffers_are_those_of_rank_0(world):
    def program(group, broadcast_buffers):
        import torch
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        with torch.no_grad():
            for each in module.state_dict().values():
                each.fill_(group.rank + 1)
        sync = mp.torch.data_parallel(module, group, broadcast_buffers=broadcast_buffers)
        assert all((each == 1).all() for each in module.state_dict().values())
        assert mp.broadcast(module[0].weight, group) is module[0].weight
        with sync.step():
            module(data(group.rank)).square().sum().backward()
        return module[1].running_mean.tolist(), module[1].num_batches_tracked.item()

    same = world(3).run(program, True).results
    assert same == [same[0]] * 3
    assert same[0][1] == 2
    own = world(3).run(program, False).results
    assert own[0] == same[0]
    assert own[1] != same[0]


def test_short_parameters_are_averaged_in_float32(world):
    def program(group):
        import torch

        module = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        sync = mp.torch.data_parallel(module, group)
        for micro in range(2):
            with sync.paused() if micro == 0 else contextlib.nullcontext(), sync.step(weight=1 + group.rank):
                module(torch.full((1, 4), 1.0 + 2**-7 * group.rank, dtype=torch.bfloat16)).sum().backward()
        assert module.weight.grad.dtype == torch.bfloat16
        return module.weight.grad.float().tolist()

    assert (
        world(2).run(program).results == [[[1.0078125] * 4]] * 2
    )  # 1 + 2/3 of 2**-7, rounded once; in bfloat16 sums would be coarse


@pytest.mark.parametrize(
    "compress", [mp.compress.Cast("bfloat16", error_feedback=True), mp.compress.PowerSGD(5, min_compression_rate=0)]
)
def test_compressed_passes_give_the_mean(world, compress):
    def program(group):
        module = network()
        sync = mp.torch.data_parallel(module, group, compress=compress, first_bucket_bytes=50)
        for step in range(2):
            module.zero_grad()
            with sync.step(weight=group.rank + 1):
                module(data(group.rank, step)).square().mean().backward()
            # as a checkpoint in another library's arrays would give it back
            state = {
                key: {n: a.numpy() for n, a in value.items()} if type(value) is dict else value
                for key, value in sync.state().items()
            }
            sync.load_state(state)
        return grads(module)

    ranks = [alone(rank, 1) for rank in range(3)]
    for found in world(3).run(program).results:
        for name, value in found.items():
            wanted = mean([each[name] for each in ranks], [1, 2, 3])
            tolerance = 2e-2 if isinstance(compress, mp.compress.Cast) else 1e-5
            assert np.abs(value - wanted).max() <= tolerance * max(np.abs(each[name]).max() for each in ranks), name


@pytest.mark.parametrize("nth", [1, 3])
def test_a_rank_that_dies_in_a_pass_is_named_and_no_gradient_is_half_a_mean(world, nth):
    left = {}

    def program(group):
        module = network()
        sync = mp.torch.data_parallel(module, group, first_bucket_bytes=50, bucket_bytes=50)
        left[group.rank] = module
        assert sync.group is group
        module(data(group.rank)).square().mean().backward()
        group.barrier()

    run = world(3).run(program, faults=Kill(rank=1, operation="all_reduce", nth=nth), check=False)
    for rank in (0, 2):
        assert isinstance(run.errors[rank], PeerLostError), run.errors[rank]
        assert "rank 1 was lost" in str(run.errors[rank])
        assert all(p.grad is None for p in left[rank].parameters())


def test_a_gradient_by_hand_holds_its_mean_or_is_refused(world):
    def program(group):
        import torch

        b, rank = torch.zeros(3, requires_grad=True), group.rank
        sync = mp.GradientSync(group, {"b": b.detach(), "z": torch.zeros(2, dtype=torch.complex64)})
        (one,) = torch.autograd.grad(b.sum(), b)
        assert one.stride() == (0,)
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
        with torch.inference_mode():
            inferred = torch.full((3,), float(rank))
        with sync.step() as step:
            with pytest.raises(LayoutError, match=r"the mean of 'b' .* this Tensor cannot hold it.*expanded.*x.clone\(\)"):
                step.ready("b", one)
            with pytest.raises(
                LayoutError, match=r"the gradient of 'b' is a tensor of the layout torch.sparse_coo: use x.to_dense\(\)"
            ):
                step.ready("b", sparse)
            step.ready("b", inferred)
            step.ready("z", conjugated := torch.full((2,), complex(rank, 1)).conj())
        with pytest.raises(LayoutError, match=r"use x.to_dense\(\)"):
            sync({"b": sparse})
        mine = (one * (rank + 1)).clone()
        with sync.step() as step:
            step.ready("b", mine)
        return inferred.tolist(), conjugated.tolist(), one.tolist(), mine.tolist(), sync({"b": one})["b"].tolist()

    assert world(2).run(program).results == [([0.5] * 3, [0.5 - 1j] * 2, [1.0] * 3, [1.5] * 3, [1.0] * 3)] * 2


def test_a_pass_that_fails_is_not_forgotten(world):
    def program(group):
        module = network()
        sync = mp.torch.data_parallel(module, group)
        module.first.weight.register_hook(lambda gradient: {}["no"])
        with pytest.raises(KeyError):
            module(data(0)).square().mean().backward()
        with pytest.raises(UsageError, match="the backward pass did not come to its end"):
            module(data(0))
        with pytest.raises(UsageError, match="make a new one on all ranks"), sync.step():
            pass
        sync.remove()
        assert module(data(0)).isfinite().all()

    world(1).run(program)


def test_wrong_use_is_refused(world):
    def program(group):
        import torch

        module = network()
        sync = mp.torch.data_parallel(module, group)
        with pytest.raises(UsageError, match="become ready in its backward pass"), sync.step() as step:
            step.ready("first.weight", torch.zeros(5, 6))
        with pytest.raises(AttributeError, match=r"use \.parameters of the module that it was given"):
            torch.optim.SGD(sync.parameters(), lr=0.1)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            sync.nothing  # noqa: B018
        with pytest.raises(UsageError, match=r"first\.weight: float32") as told:
            mp.torch.data_parallel(torch.nn.ModuleDict({"first": torch.nn.Linear(6, 5 + group.rank)}), group)
        assert "float32[5, 6] on rank 0; float32[6, 6] on rank 1" in str(told.value)
        table = torch.nn.Embedding(5, 2, sparse=True)
        sync = mp.torch.data_parallel(table, group)
        with pytest.raises(UnsupportedError, match="give the layer sparse=False"):
            table(torch.tensor([1])).sum().backward()

    world(2).run(program)


def test_two_passes_in_one_step_are_refused_and_retained_graphs_work_in_two(world):
    def program(group):
        module = network()
        sync = mp.torch.data_parallel(module, group)
        loss = module(data(group.rank)).square().mean()
        loss.backward(retain_graph=True)
        once = grads(module)
        module.zero_grad()
        loss.backward(retain_graph=True)
        assert all(same_bits(once[name], value) for name, value in grads(module).items())
        with sync.step():
            loss.backward(retain_graph=True)
            with pytest.raises(UsageError, match="paused steps add up"):
                loss.backward()

    world(1).run(program)


AGAINST_DDP = """
import contextlib
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import oneaccord_parallel as mp

torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.rare = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 2)
    def forward(self, x, rare=False):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.rare(x) if rare else x)

with oa.init(timeout_s=30) as group:
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=group.rank, world_size=group.world_size)
    torch.manual_seed(group.rank)
    ours, theirs = Net(), Net()
    sync = mp.torch.data_parallel(ours, group, first_bucket_bytes=100, bucket_bytes=1000)
    with torch.no_grad():
        for mine, other in zip(theirs.state_dict().values(), ours.state_dict().values()):
            mine.copy_(other)
    ddp = DDP(theirs, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = [torch.randn(4, 8) for _ in range(3)]
        rare = step > 2 and group.rank == 0
        for micro in x[:2]:
            with sync.paused():
                ours(micro, rare).square().mean().backward()
            with ddp.no_sync():
                (ddp(micro, rare).square().mean() / 3).backward()
        ours(x[2], rare).square().mean().backward()
        (ddp(x[2], rare).square().mean() / 3).backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
            if mine.grad is None or other.grad is None:
                assert other.grad is mine.grad is None, (name, step)
            else:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
print("all is well")
"""


def test_gradients_are_those_of_torchs_own(tmp_path):
    done = run_ranks(tmp_path, "tcp", AGAINST_DDP, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2


POWER = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP
import oneaccord_parallel as mp

torch.set_num_threads(1)
with oa.init(timeout_s=30) as group:
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=group.rank, world_size=group.world_size)
    ours, theirs = torch.nn.Linear(12, 10), torch.nn.Linear(12, 10)
    sync = mp.torch.data_parallel(ours, group, compress=mp.compress.PowerSGD(2, min_compression_rate=0))
    theirs.load_state_dict(ours.state_dict())
    ddp = DDP(theirs)
    state = power.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.1, orthogonalization_epsilon=1e-12)
    ddp.register_comm_hook(state, power.powerSGD_hook)
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(group.rank)) ** 3  # the same gradients in each step
    sums = [0.0, 0.0]
    for step in range(152):
        ours.zero_grad(), theirs.zero_grad()
        ours(x).pow(3).mean().backward()
        ddp(x).pow(3).mean().backward()
        if step >= 2:
            sums = [total + each.weight.grad.clone() for total, each in zip(sums, (ours, theirs))]
    theirs.zero_grad()
    with ddp.no_sync():
        ddp(x).pow(3).mean().backward()
    exact = group.all_reduce(theirs.weight.grad, "mean")
    errors = [((total / 150 - exact).norm() / exact.norm()).item() for total in sums]
    assert max(errors) < 0.05, errors  # with error feedback both converge to the mean
    dist.destroy_process_group()
print("all is well")
"""


def test_powersgd_converges_as_torchs_does(tmp_path):
    done = run_ranks(tmp_path, "tcp", POWER, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2
