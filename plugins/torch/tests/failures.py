"""A DDP program in which something goes wrong in the third step: what, says the argument."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oneaccord_torch  # noqa: F401 - registers the backend

case = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("oneaccord")
rank = dist.get_rank()
module = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1)), bucket_cap_mb=0.0001)
for step in range(3):
    if step == 2 and rank == 1:
        if case == "mismatch":
            dist.all_reduce(torch.ones(3))
        if case == "kill":
            module.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        if case == "raise":
            raise ValueError("planted")
    module(torch.randn(4, 10)).sum().backward()
if case == "pending":
    work = dist.all_reduce(torch.ones(1000), async_op=True)
if case == "futures":
    futures = [dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda f: f.wait()) for _ in range(20)]
if case == "dropped":
    dist.new_group([0, 1])
    dist.distributed_c10d._world.pg_map.clear()
if case == "works":
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    future = work.get_future()
    for each in (work, future, future.then(lambda f: f.wait())):
        try:
            each.wait()
        except Exception as error:
            print(type(error).__name__, "CollectiveMismatchError" in f"{type(error)} {error}")
    os._exit(0)
