"""Train a deep network in stages: each rank has some of its layers, and microbatches flow through the ranks.

The schedule 1F1B says when each rank takes which microbatch forward or backward, so that all work at the same time and few activations
are kept. A stage is two functions. The gradients are those of the whole batch, so any number of ranks learns the same.

    oneaccord run -n 4 examples/gallery/pipeline.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa
import oneaccord_parallel as mp

Array = npt.NDArray[np.float64]


def stage(weights: list[Array]) -> mp.Stage:
    """Return residual layers, x + tanh(x w), as a stage of the pipeline."""

    def forward(x: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        saved = []
        for w in weights:
            y = np.tanh(x @ w)
            saved.append((x, y))
            x = x + y
        return x, saved

    def backward(saved: list[tuple[Array, Array]], error: Array) -> tuple[Array, list[Array]]:
        gradients = []
        for w, (x, y) in zip(reversed(weights), reversed(saved), strict=True):
            inner = error * (1.0 - y**2)
            gradients.append(x.T @ inner)
            error = error + inner @ w.T
        return error, gradients[::-1]

    return mp.Stage(forward, backward)


def squares(output: Array, target: Array) -> tuple[float, Array]:
    """Return the mean squared error, and its gradient."""
    error = output - target
    return float((error**2).mean()), 2.0 * error / error.size


def main(group: oa.Group, steps: int = 60, layers: int = 8, microbatches: int = 8) -> tuple[list[float], Any]:
    """Return the loss of each step, on all ranks, and the weights of this rank's layers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 16))
    target = np.sin(x) + x[:, ::-1]
    every = rng.normal(0.0, 0.1, (layers, 16, 16))
    mine = list(np.array_split(every, group.world_size)[group.rank])
    plan = mp.schedule("1f1b", group.world_size, microbatches)
    pipeline = mp.Pipeline(group, [stage(mine)], plan)
    losses = []
    for _ in range(steps):
        loss, (gradients,) = pipeline.step(x, target, loss=squares)
        for w, gradient in zip(mine, gradients, strict=True):
            w[...] -= 0.5 * gradient
        losses.append(float(loss))
    return losses, mine


if __name__ == "__main__":
    with oa.init() as group:
        losses, mine = main(group)
        if group.rank == 0:
            print(f"rank 0 has {len(mine)} of 8 layers")
            print("the loss after 1, 20, 40, 60 steps:", " ".join(f"{losses[step]:.5f}" for step in (0, 19, 39, 59)))
