"""What torch builds on a process group, done over the backend that is named: Gloo writes what each rank got, and all others compare.

Prints the names of what does not agree. Between two ranks every sum has one order, so that all results agree bit for bit.
Usage: features.py BACKEND FOLDER [NAME ...]
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import oneaccord_torch  # noqa: F401 - registers the backend

FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(rank, step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(module, parameters=None, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(dist.get_rank(), step)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in (parameters or module.parameters)()]
    return [p.detach().clone() for p in full]


@feature
def ddp():
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.0005))


@feature
def ddp_static_graph():
    return train(DistributedDataParallel(model(), static_graph=True, gradient_as_bucket_view=True))


@feature
def ddp_unused():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = model(), model()

        def forward(self, x):
            return (self.a if dist.get_rank() else self.b)(x)

    return train(DistributedDataParallel(Branches(), find_unused_parameters=True))


@feature
def ddp_no_sync():
    module = DistributedDataParallel(model())
    with module.no_sync():
        module(batch(dist.get_rank())).sum().backward()
    module(batch(dist.get_rank(), 1)).sum().backward()
    return [p.grad for p in module.parameters()]


@feature
def ddp_hook_float16():
    module = DistributedDataParallel(model())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(module)


@feature
def ddp_power_sgd():
    module = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(module, steps=4)


@feature
def ddp_uneven():
    module = DistributedDataParallel(model())
    with module.join():
        for step in range(2 + dist.get_rank()):
            module(batch(dist.get_rank(), step)).sum().backward()
    return [p.grad for p in module.parameters()]


@feature
def ddp_sparse():
    torch.manual_seed(5)
    module = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    module(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()
    return [module.module.weight.grad.to_dense()]


@feature
def zero():
    module = DistributedDataParallel(model())
    return train(module, optimizer=ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01))


@feature
def fsdp1():
    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(module):
        before = [p.detach().clone() for p in module.parameters()]
    module(batch(dist.get_rank())).square().mean().backward()
    module.clip_grad_norm_(0.1)
    return [*before, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@feature
def fsdp2():
    module = model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return train(fully_shard(module))


@feature
def dtensor():
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    partial = (rows.t() @ rows).redistribute(placements=[Replicate()])
    return [rows.to_local(), columns.to_local(), columns.full_tensor(), partial.to_local(), (rows + 1).sum().full_tensor()]


@feature
def tensor_parallel():
    mesh = dist.init_device_mesh("cpu", (2,))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(module)


@feature
def checkpoint():
    module = fully_shard(model())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(module.state_dict(), checkpoint_id=folder[0])
    other = fully_shard(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    return [p.full_tensor() for p in other.parameters()]


def pipeline(schedule):
    rank, whole = dist.get_rank(), model()
    part = whole[:2] if rank == 0 else whole[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    losses = []
    run = schedule(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    if rank == 0:
        run.step(batch(0))
    else:
        run.step(target=torch.zeros(8, 4), losses=losses)
    return [*(loss.detach() for loss in losses), *(p.grad for p in part.parameters())]


@feature
def pipeline_gpipe():
    return pipeline(ScheduleGPipe)


@feature
def pipeline_1f1b():
    return pipeline(Schedule1F1B)


@feature
def operators():
    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.arange(4.0) + rank
    return [
        functional.all_reduce(x, "sum", world) + 0,
        functional.all_gather_single(x, 0, world) + 0,
        functional.reduce_scatter_single(x, "sum", 0, world) + 0,
        functional.all_to_all_single(x, None, None, world) + 0,
        functional.broadcast(x, 1, world) + 0,
        *functional.all_reduce_coalesced([x, x * 2], "max", world),
    ]


@feature
def messages():
    rank = dist.get_rank()
    got, many = torch.empty(3), [torch.empty(2), torch.empty(3, dtype=torch.int64)]
    ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank:
        dist.send_object_list([{"a": 1}], 0)
        works = [dist.irecv(each, 0) for each in many]
    else:
        objects = [None]
        dist.recv_object_list(objects, 1)
        assert objects == [{"a": 1}]
        works = [dist.isend(torch.ones(2), 1), dist.isend(torch.arange(3), 1)]
    for work in works:
        work.wait()
    return [got, *(many if rank else ())]


@feature
def objects():
    rank = dist.get_rank()
    everything, scattered, gathered = [None] * 2, [None], [None] * 2 if rank == 0 else None
    dist.all_gather_object(everything, {"rank": rank})
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None)
    dist.gather_object("x" * rank, gathered)
    return [everything, scattered, gathered]


@feature
def groups():
    rank = dist.get_rank()
    alone, both = dist.new_subgroups(1)[0], dist.new_group([1, 0])
    x, y = torch.ones(2) * rank, torch.ones(2) * rank
    dist.all_reduce(x, group=alone)
    dist.broadcast(y, 1, group=both)
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    z = torch.ones(1) * rank
    dist.all_reduce(z, group=mesh["b"].get_group())
    return [x, y, z]


def results(backend, **meeting):
    dist.init_process_group(backend, **meeting)
    try:
        return {name: function() for name, function in FEATURES.items() if not sys.argv[3:] or name in sys.argv[3:]}
    finally:
        dist.destroy_process_group()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend, folder = sys.argv[1:3]
    rank = int(os.environ["RANK"])
    file = f"{folder}/{rank}.pt"
    if backend == "gloo":
        torch.save(results("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2), file)
    else:
        got = results(backend)
        theirs = torch.load(file, weights_only=False)
        for name in got:
            if len(got[name]) != len(theirs[name]) or not all(map(same, got[name], theirs[name])):
                print("DIFFERS", name, got[name], theirs[name])
        print("compared", len(got))
