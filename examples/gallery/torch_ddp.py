"""Train a network of torch with its own DistributedDataParallel, over oneaccord.

The one line that differs from any other program of torch.distributed is the name of the backend. oneaccord then moves the gradients over
shm, tcp or any other of its backends, and every rank learns which calls do not match and which ranks are lost.

    oneaccord run -n 4 examples/gallery/torch_ddp.py
    torchrun --nproc-per-node 4 examples/gallery/torch_ddp.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oneaccord_torch  # noqa: F401 - torch 2.14 and newer find the backend by themselves

BATCH = 60  # of all ranks together


def main(epochs: int = 10) -> tuple[float, list[float]]:
    """Return the accuracy on images that were not trained on, and the loss of each epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lines = (Path(__file__).parents[1] / "data" / "digits.csv").read_text(encoding="ascii").splitlines()
    table = torch.tensor([[float(word) for word in line.split(",")] for line in lines])
    table = table[torch.randperm(len(table))]
    images, labels, cut = table[:, :-1] / 16.0, table[:, -1].long(), len(table) * 8 // 10

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(epochs):
        total = torch.zeros(())
        for batch in torch.randperm(cut).split(BATCH)[:-1]:  # whole batches: DDP takes the mean of the ranks' means
            mine = batch[rank::ranks]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / ranks / (cut // BATCH))
        if rank == 0:
            print(f"epoch {len(losses):2}: loss {losses[-1]:.4f}", flush=True)
    with torch.no_grad():
        return float((net(images[cut:]).argmax(dim=1) == labels[cut:]).float().mean()), losses


if __name__ == "__main__":
    dist.init_process_group("oneaccord")
    accuracy, _ = main()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%} on images that were not trained on")
    dist.destroy_process_group()
