"""Train a small network of torch to read handwritten digits, data parallel: a program for one process, but for the ten marked lines.

python examples/train_digits_torch.py                         one process
oneaccord run -n 4 examples/train_digits_torch.py             four
"""

import sys
from pathlib import Path

import torch
from torch import nn

import oneaccord as oa  # <-
import oneaccord_parallel as mp  # <-

DATA = Path(__file__).parent / "data" / "digits.csv"
EPOCHS, BATCH = 30, 64
WANTED_ACCURACY = 0.95


def main(group: oa.Group) -> int:
    """Train, test, and return the exit code."""
    torch.manual_seed(0)
    table = torch.tensor([[float(word) for word in line.split(",")] for line in DATA.read_text().splitlines()])
    table = table[torch.randperm(len(table))]
    images, labels = table[:, :-1] / 16.0, table[:, -1].long()
    cut = len(table) * 8 // 10

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sync = mp.torch.data_parallel(model, group)  # <-
    sampler = mp.Sampler(cut, group, max(1, BATCH // group.world_size))  # <- instead of a DataLoader's own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for mine in map(torch.from_numpy, sampler.epoch(epoch)):  # <-
            optimizer.zero_grad()
            with sync.step(weight=len(mine)):  # <-
                if len(mine):  # <-
                    nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        if group.rank == 0 and (epoch + 1) % 5 == 0:  # <-
            print(f"epoch {epoch + 1:2d}/{EPOCHS}", flush=True)

    with torch.no_grad():
        accuracy = float((model(images[cut:]).argmax(dim=1) == labels[cut:]).float().mean())
    if group.rank == 0:  # <-
        print(f"test accuracy {accuracy:.4f} (wanted: at least {WANTED_ACCURACY})")
    return 0 if accuracy >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    with oa.init() as world:  # <-
        code = main(world)
    sys.exit(code)
