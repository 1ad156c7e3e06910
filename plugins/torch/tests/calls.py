"""Calls through torch whose results are known; prints ``all right``."""

import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

import oneaccord_torch  # noqa: F401 - registers the backend
from oneaccord.errors import UsageError

dist.init_process_group("oneaccord", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
total = size * (size + 1) // 2
assert dist.get_backend() == "oneaccord"

for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64):
    for x in (torch.ones(2, 3, dtype=dtype), torch.ones(4, 6, dtype=dtype).t()[::2], torch.ones((), dtype=dtype)):
        x.mul_(rank + 1)
        dist.all_reduce(x)
        assert (x == total).all(), (dtype, x)
flags = torch.tensor([True, rank == 0])
dist.all_reduce(flags, op=dist.ReduceOp.BAND)
assert flags.tolist() == [True, size == 1]
dist.all_reduce(torch.empty(0))
x = torch.ones(3)
dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))
assert x.tolist() == [2.0 * size] * 3
x = torch.full((3,), float(rank))
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert x.tolist() == [(size - 1) / 2] * 3

strided = torch.zeros(2, size * 2).t()
dist.all_gather_single(strided, torch.full((2, 2), float(rank)))
assert strided[:, 0].tolist() == [float(each) for each in range(size) for _ in range(2)]
uneven = [torch.zeros(each + 1) for each in range(size)]
dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
assert [each.tolist() for each in uneven] == [[float(each)] * (each + 1) for each in range(size)]

sparse = torch.sparse_coo_tensor([[rank, 4]], [1.0, 1.0], (6,), check_invariants=True)
dist.all_reduce(sparse)
assert sparse.to_dense()[4] == size, sparse

with dist._coalescing_manager() as both:
    a, b = torch.ones(2), torch.ones(3)
    dist.all_reduce(a)
    dist.all_reduce(b)
assert a.sum() + b.sum() == 5 * size

part = dist.group.WORLD.split_group([0, 1], group_name="part")
if rank < 2:
    x = torch.ones(1)
    part.allreduce([x]).wait()
    assert (x.item(), part.group_name, part.size()) == (2.0, "part", 2)
dist.group.WORLD.monitored_barrier(timedelta(seconds=5))
if rank == 0:
    dist.send(torch.arange(3), 1, tag=4)
if rank == 1:
    x = torch.zeros(3, dtype=torch.int64)
    dist.recv(x, 0, tag=4)
    assert x.tolist() == [0, 1, 2]

leaf = torch.full((size,), rank + 1.0, requires_grad=True)
for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.reduce(x, 0), lambda x: dist.recv(x, 1 - rank)):
    with pytest.raises(UsageError, match="writes to a tensor that requires grad"):
        call(leaf * 2)
for call in (
    lambda x: dist.all_gather([torch.empty(size) for _ in range(size)], x),
    lambda x: dist.all_gather_single(torch.empty(size * size), x),
    lambda x: dist.gather(x, [torch.empty(size) for _ in range(size)] if rank == 0 else None),
    lambda x: dist.reduce_scatter(torch.empty(1), list(x.split(1))),
    lambda x: dist.reduce_scatter_single(torch.empty(1), x),
    lambda x: dist.all_to_all_single(torch.empty(size), x),
    lambda x: dist.all_to_all([torch.empty(1) for _ in range(size)], list(x.split(1))),
):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call(leaf * 2)
        with torch.no_grad():
            call(leaf * 2)
    (mine,) = [each for each in told if "the result has no gradient" in str(each.message)]
    assert mine.filename == __file__
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls it deprecated
    y = torch.distributed.nn.functional.all_reduce(leaf * 2)
((rank + 1) * y).sum().backward()
assert leaf.grad.tolist() == [2.0 * total] * size
dist.broadcast(leaf, 0)
assert leaf.tolist() == [1.0] * size
dist.destroy_process_group()

dist.init_process_group("oneaccord")  # once more
dist.barrier()
dist.destroy_process_group()
sys.stdout.write("all right\n")
