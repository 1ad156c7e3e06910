"""oneaccord for one device, Gloo for another one, and groups that are made of both; prints ``all right``."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("cpu:oneaccord,cuda:gloo")
names = {device.type: dist.group.WORLD._get_backend(device)._get_backend_name() for device in dist.group.WORLD._device_types}
assert names == {"cpu": "oneaccord", "cuda": "gloo"}, names
groups = [dist.group.WORLD, dist.new_group([0, 1])]
if torch.__version__ >= (2, 15):  # torch 2.14 splits no group without an accelerator
    groups.append(dist.split_group(None, [[0, 1]]))
for group in groups:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3
dist.destroy_process_group()
sys.stdout.write("all right\n")
