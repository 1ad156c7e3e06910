"""Train a network whose weights, gradients and moments of Adam are divided among the ranks, as FSDP and ZeRO do.

Between steps, each rank holds only its share of every layer. A layer is gathered when a pass needs it, and freed afterwards; its
gradients are reduced to the shares in the background. The more ranks there are, the less memory each one needs.

    oneaccord run -n 4 examples/gallery/sharded.py
"""

from itertools import pairwise
from typing import Any

import numpy as np
from digits_data import BATCH, Floats, Labels, load

import oneaccord as oa
import oneaccord_parallel as mp


def start(sizes: list[int]) -> dict[str, Any]:
    """Return the first weights: a dict for each layer."""
    rng = np.random.default_rng(0)
    layers = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        w = rng.normal(0.0, np.sqrt(2.0 / inputs), (inputs, outputs)).astype(np.float32)
        layers[f"layer{number}"] = {"w": w, "b": np.zeros(outputs, np.float32)}
    return layers


def passes(store: mp.Sharded, images: Floats, labels: Labels) -> float:
    """Go forward and backward; return the sum of the losses."""
    x, inputs = images, []
    for number, name in enumerate(store.units):
        with store.unit(name) as layer:  # gathered here, while the next one is on its way
            inputs.append(x if number == 0 else np.maximum(x, 0.0))
            x = inputs[-1] @ layer["w"] + layer["b"]
    chance = np.exp(x - x.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    loss = float(-np.log(chance[np.arange(len(labels)), labels]).sum())
    error = (chance - np.eye(10, dtype=np.float32)[labels]) / max(1, len(labels))
    for name in reversed(store.units):
        x = inputs.pop()
        with store.unit(name) as layer:
            store.reduce(name, {"w": x.T @ error, "b": error.sum(axis=0)})  # each rank keeps its share of the mean
            error = (error @ layer["w"].T) * (x > 0.0)
    return loss


def main(group: oa.Group, epochs: int = 6, width: int = 128, depth: int = 6) -> tuple[list[float], int, Any]:
    """Return the loss of each epoch, the most bytes that this rank needed for the model, and the whole weights."""
    images, labels, _, _ = load()
    store = mp.Sharded(start([64, *[width] * depth, 10]), group)
    adam = mp.Adam(1e-3)
    losses = []
    for epoch in range(epochs):
        loss = 0.0
        for mine in mp.Sampler(len(images), group, max(1, BATCH // group.world_size)).epoch(epoch):
            with store.step(weight=len(mine)):
                loss += passes(store, images[mine], labels[mine])
            store.update(adam)
        losses.append(float(group.all_reduce(loss)) / len(images))
    peak = store.memory.peak
    return losses, peak, store.full()


if __name__ == "__main__":
    with oa.init() as group:
        losses, peak, whole = main(group)
        if group.rank == 0:
            print("the loss of each epoch:", " ".join(f"{loss:.4f}" for loss in losses))
            weights = sum(layer["w"].size + layer["b"].size for layer in whole.values())
            print(f"{weights} weights, gradients and moments: {16 * weights >> 10} KiB; on this rank at most {peak >> 10} KiB")
