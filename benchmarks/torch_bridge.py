"""What torch's calls cost over oneaccord and over Gloo, in the same two processes, one after the other in turn; results are checked.

Usage: oneaccord run -n 2 benchmarks/torch_bridge.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oneaccord_torch

ROUNDS = 7


def compare(name: str, calls: list[Callable[[], object]], number: int, gloo: Any) -> None:
    """Print the medians of both, the median of their ratios round by round, and the best of each, which others on the machine disturb least."""
    times: list[list[float]] = [[], []]
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for taken, call in zip(times, calls, strict=True):
            dist.barrier(group=gloo)
            begin = time.perf_counter()
            for _ in range(number):
                call()
            taken.append((time.perf_counter() - begin) / number * 1e6)
    if dist.get_rank() == 0:
        ours, theirs = map(statistics.median, times)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        best = " / ".join(f"{min(each):.0f}" for each in times)
        print(f"{name:30} oneaccord {ours:9.0f} us   gloo {theirs:9.0f} us   ratio {ratio:.2f}   best {best} us", flush=True)


def reducing(x: Any) -> Callable[[Any], object]:
    """Return what adds up ``x`` in a group."""
    return lambda group: dist.all_reduce(x, group=group)


def our_group() -> Any:
    """Return the group of ours below the default group: it is one itself in torch 2.13, and has a part that is in newer ones."""
    world = dist.group.WORLD
    return getattr(world, "group", None) or world._get_backend(torch.device("cpu")).group


def main() -> None:
    """Compare."""
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    oneaccord_torch.register()
    torch.set_num_threads(1)
    dist.init_process_group("oneaccord")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    gloo, rank = groups[1], dist.get_rank()

    def both(name: str, number: int, call: Callable[[Any], object]) -> None:
        compare(name, [partial(call, group) for group in groups], number, gloo)

    array = np.zeros(2, np.float32)
    own = partial(our_group().all_reduce, array, out=array)
    compare("all_reduce 8 B, own | Gloo", [own, partial(dist.all_reduce, torch.zeros(2), group=gloo)], 200, gloo)
    for size in (2, 1 << 10, 1 << 16, 1 << 20, 1 << 22):
        x = torch.zeros(size)  # zeros stay what they are, however often they are added up
        both(f"all_reduce {4 * size} B", max(2, min(200, (1 << 21) // size)), reducing(x))
        for group in groups:
            y = torch.arange(float(size)) + rank
            dist.all_reduce(y, group=group)
            assert torch.equal(y, 2 * torch.arange(float(size)) + 1)
    x = torch.zeros(1 << 10)
    both("all_reduce 4096 B, async_op", 100, lambda group: dist.all_reduce(x, group=group, async_op=True).wait())
    both("all_reduce 4096 B, future", 100, lambda group: dist.all_reduce(x, group=group, async_op=True).get_future().wait())
    whole, part = torch.zeros(1 << 17), torch.zeros(1 << 16)
    both("all_gather_single 256 KiB", 50, lambda group: dist.all_gather_single(whole, part, group=group))

    def exchange(group: Any) -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(x[:1], 1 - rank, group=group)
            else:
                dist.recv(x[:1], 1 - rank, group=group)

    both("send and recv 4 B", 100, exchange)
    batch = torch.randn(32, 512)
    layers = [[nn.Linear(512, 512) for _ in range(8)] for _ in groups]
    modules = {
        group: DistributedDataParallel(nn.Sequential(*layer), process_group=group, bucket_cap_mb=2)
        for group, layer in zip(groups, layers, strict=True)
    }
    both("DDP step, 2.1 M parameters", 5, lambda group: modules[group](batch).sum().backward())
    sharded = {}
    for group in groups:
        layers = [nn.Linear(512, 512) for _ in range(8)]
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        sharded[group] = fully_shard(nn.Sequential(*layers), mesh=mesh)
    both("fully_shard step, likewise", 5, lambda group: sharded[group](batch).sum().backward())
    vector, matrix = torch.zeros(1 << 22), torch.randn(512, 512)

    def beside(group: Any) -> None:
        work = dist.all_reduce(vector, group=group, async_op=True)
        for _ in range(4):
            matrix @ matrix
        work.wait()

    both("16 MiB beside 4 products", 3, beside)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
