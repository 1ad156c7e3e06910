"""A training with DDP whose ranks draw numbers of their own; prints what each rank ends with."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("oneaccord")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
module = DistributedDataParallel(layers, static_graph=True, bucket_cap_mb=0.0001)
optimizer = torch.optim.AdamW(module.parameters(), 0.01)
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    module(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    dist.barrier()
weights = [p.sum().item().hex() for p in module.parameters()]
print(dist.get_rank(), *weights, torch.rand(1).item(), random.random(), np.random.random())  # noqa: NPY002 - it is the one that is meant
dist.destroy_process_group()
